//! The time of a launch. In: its work, hardware, values of the sizes. Out: seconds of computing, of memory, of messages, beside what
//! a launch costs by itself. A model with few numbers: what part of the peaks an archetype reaches, tiles that do not fill the
//! machine, experts that are not met, algorithms of collectives; all are in the hardware's file.

use crate::Refused;
use crate::hardware::{Hardware, Kernels, Precision};
use crate::work::{Message, Work};
use astrai_ir::kernel::Products;
use astrai_ir::{Dim, Mesh};

/// Rows and columns of a product that one multiprocessor computes at a time.
const TILE: [f64; 2] = [128.0, 128.0];
/// Rows that a processor's matrix unit multiplies at a time, of f32 in pieces and of bf16.
const LINES: [f64; 2] = [32.0, 16.0];
/// Rows of a product that use what a matrix unit's way has packed of the right side, and operations of packing a number of it.
const PACKED_FOR: f64 = 384.0;
const PACKING: f64 = 4.0;
/// Operations on vectors for a score: scaling, the maximum, an exponential, its sum and its pieces.
const SCORE: f64 = 40.0;
/// Operations of vectors for each number of a query of attention, and of its gradient, on a processor, beside the keys that it sees: as many as f32 needs for 50
/// keys. Packing, what tiles hold beyond those keys, sums over the heads that share keys.
const ROW: f64 = 200.0;
const ROW_GRAD: f64 = 480.0;
/// Rows of a product on a processor of which each thread has some, as it has in the kernels around: where AVX-512 cuts them into two blocks.
const OWN_ROWS: f64 = 127.0;
/// Least length of a sum that is worth sharing between multiprocessors.
const SHARED_SUM: f64 = 1024.0;

/// Values of symbols.
pub type Sizes<'a> = &'a dyn Fn(&str) -> Option<u64>;

/// A collective as it is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Sent {
    /// Its operator: `all_reduce`.
    pub operator: &'static str,
    /// How it is done: `ring`.
    pub algorithm: &'static str,
    /// The link that it waits for.
    pub link: String,
    /// Ranks that take part.
    pub ranks: u64,
    /// Bytes that a rank sends, and in how many messages.
    pub bytes: f64,
    /// Messages one after another.
    pub messages: f64,
    /// Seconds of latency.
    pub latency: f64,
    /// Seconds of bytes.
    pub bandwidth: f64,
}

/// Seconds of a launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Time {
    /// Operations.
    pub flops: f64,
    /// Bytes.
    pub bytes: f64,
    /// In what its products are computed.
    pub precision: Precision,
    /// Of operations, those of vectors beside products among them.
    pub compute: f64,
    /// Of operations of vectors beside products.
    pub vectors: f64,
    /// Of bytes, but for what is written past the caches.
    pub memory: f64,
    /// Of bytes that are written past the caches, which nothing waits for.
    pub past: f64,
    /// Part of the lesser of both that does not hide behind the greater.
    pub apart: f64,
    /// Of starting, filling and draining.
    pub fixed: f64,
    /// Collectives.
    pub sent: Vec<Sent>,
}

impl Time {
    /// Seconds of messages.
    pub fn communication(&self) -> f64 {
        self.sent.iter().fold(0.0, |sum, s| sum + s.latency + s.bandwidth)
    }

    /// Seconds of all bytes.
    pub fn all_memory(&self) -> f64 {
        self.memory + self.past
    }

    /// Computing and memory, which overlap.
    pub fn body(&self) -> f64 {
        body(self.compute, [self.memory, self.past], self.apart)
    }

    /// Seconds in which computing and memory go on at once.
    pub fn overlap(&self) -> f64 {
        self.compute + self.all_memory() - self.body()
    }

    /// All: what is neither computing nor memory overlaps with nothing.
    pub fn total(&self) -> f64 {
        self.body() + self.fixed + self.communication()
    }

    /// What it waits for.
    pub fn bound(&self) -> &'static str {
        let body = self.body();
        match () {
            () if self.communication() > body.max(self.fixed) => {
                let latency: f64 = self.sent.iter().map(|s| s.latency).sum();
                if 2.0 * latency > self.communication() { "latency" } else { "link" }
            }
            () if self.fixed > body => "launch",
            () if self.compute >= self.all_memory() => "compute",
            () => "memory",
        }
    }
}

/// Seconds of computing and memory that overlap but for a part of the lesser; what is written past the caches overlaps with all computing.
pub fn body(compute: f64, [memory, past]: [f64; 2], apart: f64) -> f64 {
    compute.max(memory + past) + apart * compute.min(memory)
}

fn value(d: &Dim, sizes: Sizes) -> Result<f64, Refused> {
    d.eval(sizes).map(|n| n as f64)
}

/// Bytes that one run of these touches beside values between its kernels: what caches would have to hold for the next run to find it there.
/// Of experts these are the ones that rows choose.
///
/// # Errors
/// A size overflows.
pub fn touched(works: &[Work], sizes: Sizes) -> Result<f64, Refused> {
    let mut sum = 0.0;
    for w in works {
        let (bytes, warm, rows) =
            (value(&w.bytes, sizes)?, value(&w.warm, sizes)?, value(&w.sizes[0], sizes)?);
        sum += (bytes * met(w, rows) - warm).max(0.0) * w.launches as f64;
    }
    Ok(sum)
}

/// The time of one launch of `work`.
///
/// # Errors
/// A size overflows.
pub fn time(work: &Work, hardware: &Hardware, mesh: &Mesh, sizes: Sizes) -> Result<Time, Refused> {
    time_among(work, work.among as f64, hardware, mesh, sizes)
}

/// The same in a run that touches so many bytes.
///
/// # Errors
/// A size overflows.
pub fn time_among(
    work: &Work,
    among: f64,
    hardware: &Hardware,
    mesh: &Mesh,
    sizes: Sizes,
) -> Result<Time, Refused> {
    let (flops, bytes) = (value(&work.flops, sizes)?, value(&work.bytes, sizes)?);
    let mut sent = Vec::new();
    for m in &work.messages {
        sent.push(message(m, hardware, mesh, sizes)?);
    }
    if !sent.is_empty() {
        return Ok(Time { flops, bytes, sent, ..Time::default() });
    }
    let precision = precision(work, hardware);
    let archetype = work.archetype(sizes)?;
    let reach = hardware.kernels.of(Kernels::counted(archetype, &hardware.kind), precision);
    let [m, n, k, batch] =
        [&work.sizes[0], &work.sizes[1], &work.sizes[2], &work.sizes[3]].map(|d| value(d, sizes));
    let shape = [m?, n?, k?, batch?];
    let bytes = bytes * met(work, shape[0]);
    let beside = beside_products(work, hardware, flops, shape);
    let vectors = (beside + packing(work, hardware, shape))
        / (hardware.peak(Precision::F32) * hardware.kernels.of("loops", Precision::F32).compute);
    let products = (flops - beside) / (hardware.peak(precision) * filled(work, hardware, shape));
    let around = softmax(work, hardware, precision, flops, shape) + queries(archetype, hardware, shape);
    let compute = (products + around) / reach.compute + vectors;
    let warm = value(&work.warm, sizes)?.min(bytes);
    let past = if hardware.kind == "cpu" { value(&work.past, sizes)?.min(bytes - warm) } else { 0.0 };
    let rate = if archetype == "attention_one" { hardware.paced(among) } else { hardware.rate(among) };
    let mut memory = (bytes - warm - past) / rate + warm / hardware.rate(warm);
    let past = past / rate / reach.memory;
    let (mut starts, mut exchanged) = (1.0, 0.0);
    if hardware.kind == "cpu" {
        // What is packed is written once and read once.
        let mut between = value(&work.warm, sizes)?;
        if matches!(work.form, "dot" | "panels" | "grouped" | "grouped_panels") {
            let packed = value(&work.workspace, sizes)?;
            memory += 2.0 * packed / hardware.rate(packed);
            between += packed;
        }
        // Another core wrote most of it, and computing waits for that; but for rows so many that threads have rows of their own.
        if let Some(rate) = hardware.exchange.filter(|_| work.form != "panels" || shape[0] < OWN_ROWS) {
            exchanged = between * (1.0 - 1.0 / f64::from(hardware.units.max(1))) / rate;
        }
        starts = work.phases as f64;
    }
    let (memory, fixed) = (memory / reach.memory, reach.fixed + starts * hardware.launch + exchanged);
    Ok(Time { flops, bytes, precision, compute, vectors, memory, past, apart: reach.apart, fixed, sent })
}

/// In which numbers products are computed; whatever has no product, in f32. On a processor its kernel says so; on a
/// GPU the types decide.
fn precision(work: &Work, hardware: &Hardware) -> Precision {
    let [left, right] = [work.types[0], work.types[1]].map(Precision::of);
    // Codes are widened to the numbers of a side that is not rounded to integers as well.
    let by_type = if right == Precision::Int8 { left } else { right.max(left) };
    match (work.form, work.products) {
        ("loops" | "route" | "interpreted" | "collective", _) => Precision::F32,
        _ if hardware.kind != "cpu" => by_type,
        (_, Products::Native | Products::Pairs) => by_type,
        (_, Products::Vectors) if by_type == Precision::Bf16 => Precision::Bf16Vectors,
        (_, Products::Vectors) => Precision::F32,
        (_, Products::Pieces) => Precision::F32Pieces,
    }
}

/// Operations that a product does on a processor beside its products, in what it reads or writes: activations, norms, sums. These are
/// computed as kernels without products compute them, far from the peaks of products. Numbers of the right side are converted as they are loaded.
fn beside_products(work: &Work, hardware: &Hardware, flops: f64, [m, n, k, batch]: [f64; 4]) -> f64 {
    let sums = matches!(work.form, "dot" | "panels" | "grouped" | "grouped_panels" | "outer");
    let (products, converted) = match work.form {
        // Rows of all groups come together, each to one of them.
        "grouped" | "grouped_panels" => (2.0 * m * n * k, batch * n * k),
        "outer" => (2.0 * m * n * k, n * k),
        _ => (2.0 * batch * m * n * k, batch * n * k),
    };
    if sums && hardware.kind == "cpu" { (flops - products - converted).max(0.0) } else { 0.0 }
}

/// Operations of packing the right side for a matrix unit where nobody has packed it ahead.
fn packing(work: &Work, hardware: &Hardware, [m, n, k, batch]: [f64; 4]) -> f64 {
    let unit = hardware.kind == "cpu" && matches!(work.products, Products::Native | Products::Pieces);
    let (groups, rows) = match work.form {
        // Vectors multiply a row alone.
        "dot" if unit && m > 1.0 => (batch, m),
        "grouped" if unit => (distinct(batch, m), m / distinct(batch, m).max(1.0)),
        _ => return 0.0,
    };
    PACKING * n * k * groups * (rows / PACKED_FOR).ceil()
}

/// Seconds in which a processor's vectors make weights of attention's scores, where a faster unit makes the scores.
fn softmax(work: &Work, hardware: &Hardware, precision: Precision, flops: f64, [.., d, _]: [f64; 4]) -> f64 {
    if work.form != "attention" || hardware.kind != "cpu" || precision != Precision::Bf16 || d <= 0.0 {
        return 0.0;
    }
    SCORE * flops / (4.0 * d) / hardware.peak(Precision::F32)
}

/// Seconds in which a processor's vectors pack what attention multiplies and add up what comes of it.
fn queries(archetype: &str, hardware: &Hardware, [m, _, d, heads]: [f64; 4]) -> f64 {
    let operations = match archetype {
        "attention" if hardware.kind == "cpu" => ROW,
        "attention_grad" if hardware.kind == "cpu" => ROW_GRAD,
        _ => return 0.0,
    };
    operations * m * d * heads / hardware.peak(Precision::F32)
}

/// Of the matrices of which `rows` choose, the part of the bytes counted that is read: distinct ones, when rows choose evenly.
fn met(work: &Work, rows: f64) -> f64 {
    if work.groups == 0 || rows <= 0.0 {
        return 1.0;
    }
    let groups = work.groups as f64;
    distinct(groups, rows) / groups.min(rows)
}

/// Of so many groups those that rows choose, each evenly.
fn distinct(groups: f64, rows: f64) -> f64 {
    groups * (1.0 - (1.0 - 1.0 / groups).powf(rows))
}

/// Part of the machine that the tiles of a product fill; 1 where it is no product, or a core takes rows as they come.
fn filled(work: &Work, hardware: &Hardware, [m, n, k, batch]: [f64; 4]) -> f64 {
    let (work_form, units) = (work.form, f64::from(hardware.units));
    if !matches!(work_form, "dot" | "panels" | "grouped" | "grouped_panels" | "outer") || m * n * batch <= 0.0
    {
        return 1.0;
    }
    if hardware.kind == "cpu" {
        let lines = match work.products {
            // Vectors multiply a row alone, too.
            _ if m <= 1.0 => return 1.0,
            Products::Vectors | Products::Pairs => return 1.0,
            Products::Pieces => LINES[0],
            Products::Native => LINES[1],
        };
        // The last rows of every group are fewer, by half of them on average.
        let wasted = match work_form {
            "grouped" | "grouped_panels" => distinct(batch, m) * (lines - 1.0) / 2.0,
            "outer" => 0.0,
            _ => (m / lines).ceil() * lines - m,
        };
        return m / (m + wasted);
    }
    // Rows of groups come to all groups together, and to no more than there are rows.
    let grouped = matches!(work_form, "grouped" | "grouped_panels");
    let many = if grouped { batch.min(m) } else { batch };
    let rows = if grouped { m / many } else { m };
    let tile = [TILE[0].min(16.0 * (rows / 16.0).ceil()).max(16.0), TILE[1]];
    let tiles = (rows / tile[0]).ceil() * (n / tile[1]).ceil() * many;
    let splits =
        if tiles < units { (units / tiles).floor().min((k / SHARED_SUM).floor()).max(1.0) } else { 1.0 };
    let waves = (tiles * splits / units).ceil();
    let exact = rows * n * many / (tile[0] * tile[1]) * splits;
    (exact / (waves * units)).clamp(1e-3, 1.0)
}

/// How many ranks of a group are joined by the nearest link, and how many such parts there are.
fn parts(m: &Message, hardware: &Hardware, mesh: &Mesh) -> [f64; 2] {
    let ranks = m.traffic.ranks.max(1) as f64;
    let Some(near) = hardware.links.first() else { return [ranks, 1.0] };
    // Ranks along the last axis have consecutive numbers.
    let inner = m.over.iter().filter_map(|a| mesh.axes.iter().position(|b| b == a)).max();
    let stride: usize = inner.map_or(1, |i| mesh.axes[i + 1..].iter().map(|a| a.size).product());
    let here = (f64::from(near.devices) / stride as f64).floor().clamp(1.0, ranks);
    [here, (ranks / here).ceil()]
}

/// How a collective is sent, and what it takes.
///
/// # Errors
/// The hardware has no links, or a size overflows.
pub fn message(m: &Message, hardware: &Hardware, mesh: &Mesh, sizes: Sizes) -> Result<Sent, Refused> {
    let whole = value(&m.traffic.bytes, sizes)? * m.factor;
    let [near, far] = parts(m, hardware, mesh);
    let reach = hardware.kernels.of("collective", Precision::F32).memory;
    let ranks = near * far;
    let link = |i: usize| hardware.links.get(i).or(hardware.links.last());
    let sent =
        |algorithm: &'static str, name: &str, bytes: f64, messages: f64, latency: f64, bandwidth: f64| Sent {
            operator: m.operator,
            algorithm,
            link: name.to_string(),
            ranks: m.traffic.ranks,
            bytes,
            messages,
            latency,
            bandwidth,
        };
    let (Some(inside), Some(outside)) = (link(0), link(1)) else {
        return Err(format!(
            "{}: hardware of {ranks} ranks has no links; add `links` to its file",
            hardware.name
        ));
    };
    let at = |l: &astrai_ir::target::Link, bytes: f64| bytes / (l.bandwidth * reach);
    let share = |n: f64| if n > 1.0 { (n - 1.0) / n } else { 0.0 };
    let times = m.traffic.times as f64;
    Ok(match m.operator {
        "send" => {
            let l = if far > 1.0 { outside } else { inside };
            sent("to one", &l.name, whole, 1.0, l.latency, at(l, whole))
        }
        "all_to_all" if m.by_nodes.is_some() => {
            // A token goes once to each other node of its experts, and there once to each rank of them, both at the same time.
            let [chosen, part] = m.by_nodes.unwrap_or([1.0; 2]);
            let copies = |n: f64| distinct((n * part).max(1.0), chosen) / chosen * whole;
            let (a, b) = (copies(ranks) * share(near), copies(far) * share(far));
            let seconds = at(inside, a).max(at(outside, b));
            if far > 1.0 {
                let latency = inside.latency + outside.latency;
                sent("by nodes", &outside.name, a + b, near + far - 2.0, latency, seconds)
            } else {
                sent("by nodes", &inside.name, a, near - 1.0, inside.latency, seconds)
            }
        }
        "all_to_all" => {
            let to = |n: f64| whole * n / ranks;
            let (a, b) = (to(near - 1.0), to(ranks - near));
            let [x, y] = [at(inside, a), at(outside, b)];
            let (l, latency) = if far > 1.0 { (outside, outside.latency) } else { (inside, inside.latency) };
            sent("direct", &l.name, a + b, ranks - 1.0, latency, x.max(y))
        }
        _ if far > 1.0 => {
            // Inside the parts, then between them on what each rank of a part has, then inside again.
            let (a, b) = (times * share(near) * whole, times * share(far) * whole / near);
            let messages = times * ((near - 1.0) + far.log2().ceil());
            let latency = times * ((near - 1.0) * inside.latency + far.log2().ceil() * outside.latency);
            let algorithm = if near > 1.0 { "by parts" } else { "tree" };
            sent(algorithm, &outside.name, a + b, messages, latency, at(inside, a) + at(outside, b))
        }
        _ => {
            // A ring sends little many times, a tree all of it a few times, one shot all of it to everybody at once.
            let ways = [
                ("ring", [times * (ranks - 1.0), times * share(ranks) * whole]),
                ("tree", [times * ranks.log2().ceil(), times * whole]),
                ("one shot", [1.0, (ranks - 1.0) * if times > 1.0 { whole } else { whole / ranks }]),
            ];
            let seconds = |[n, bytes]: [f64; 2]| n * inside.latency + at(inside, bytes);
            let best = ways.iter().min_by(|a, b| seconds(a.1).total_cmp(&seconds(b.1)));
            let (name, [n, bytes]) = best.copied().unwrap_or(ways[0]);
            sent(name, &inside.name, bytes, n, n * inside.latency, at(inside, bytes))
        }
    })
}
