//! The time of a launch. In: its work, hardware, values of the sizes. Out: seconds of computing, of memory, of messages, beside what
//! a launch costs by itself. A model with few numbers: what part of the peaks an archetype reaches, tiles that do not fill the
//! machine, experts that are not met, algorithms of collectives; all are in the hardware's file.

use crate::Refused;
use crate::hardware::{Hardware, Precision};
use crate::work::{Message, Work};
use astrai_ir::{Dim, Mesh};

/// Rows and columns of a product that one multiprocessor computes at a time.
const TILE: [f64; 2] = [128.0, 128.0];
/// Least length of a sum that is worth sharing between multiprocessors.
const SHARED_SUM: f64 = 1024.0;

/// Values of symbols.
pub type Sizes<'a> = &'a dyn Fn(&str) -> Option<u64>;

/// A collective as it is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Sent {
    /// Its operator and how it is done: `all_reduce, ring`.
    pub algorithm: String,
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
    /// Of operations.
    pub compute: f64,
    /// Of bytes.
    pub memory: f64,
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

    /// All: computing and memory overlap, the rest does not.
    pub fn total(&self) -> f64 {
        self.compute.max(self.memory) + self.fixed + self.communication()
    }

    /// What it waits for.
    pub fn bound(&self) -> &'static str {
        let body = self.compute.max(self.memory);
        match () {
            () if self.communication() > body.max(self.fixed) => {
                let latency: f64 = self.sent.iter().map(|s| s.latency).sum();
                if 2.0 * latency > self.communication() { "latency" } else { "link" }
            }
            () if self.fixed > body => "launch",
            () if self.compute >= self.memory => "compute",
            () => "memory",
        }
    }
}

fn value(d: &Dim, sizes: Sizes) -> Result<f64, Refused> {
    d.eval(sizes).map(|n| n as f64)
}

/// The time of one launch of `work`.
///
/// # Errors
/// A size overflows.
pub fn time(work: &Work, hardware: &Hardware, mesh: &Mesh, sizes: Sizes) -> Result<Time, Refused> {
    let (flops, bytes) = (value(&work.flops, sizes)?, value(&work.bytes, sizes)?);
    let mut sent = Vec::new();
    for m in &work.messages {
        sent.push(message(m, hardware, mesh, sizes)?);
    }
    if !sent.is_empty() {
        return Ok(Time { flops, bytes, sent, ..Time::default() });
    }
    let reach = hardware.kernels.of(work.form);
    let [m, n, k, batch] =
        [&work.sizes[0], &work.sizes[1], &work.sizes[2], &work.sizes[3]].map(|d| value(d, sizes));
    let shape = [m?, n?, k?, batch?];
    let bytes = bytes * met(work, shape[0]);
    let peak = hardware.peak(precision(work));
    let compute = flops / (peak * reach.compute * filled(work, hardware, shape));
    let warm = value(&work.warm, sizes)?.min(bytes);
    let cold = |bytes: f64| bytes / (hardware.bandwidth * reach.memory);
    let memory = match hardware.cache {
        Some((size, bandwidth)) if warm <= size => cold(bytes - warm) + warm / bandwidth,
        _ => cold(bytes),
    };
    Ok(Time { flops, bytes, compute, memory, fixed: reach.fixed + hardware.launch, sent })
}

/// In which numbers products are computed; whatever has no product, in f32.
pub fn precision(work: &Work) -> Precision {
    match work.form {
        "loops" | "route" | "interpreted" | "collective" => Precision::F32,
        _ => Precision::of(work.types[1]).max(Precision::of(work.types[0])),
    }
}

/// Of the matrices of which `rows` choose, the part of the bytes counted that is read: distinct ones, when rows choose evenly.
fn met(work: &Work, rows: f64) -> f64 {
    if work.groups == 0 || rows <= 0.0 {
        return 1.0;
    }
    let groups = work.groups as f64;
    let distinct = groups * (1.0 - (1.0 - 1.0 / groups).powf(rows));
    distinct / groups.min(rows)
}

/// Part of the machine that the tiles of a product fill; 1 where it is no product, or a core takes rows as they come.
fn filled(work: &Work, hardware: &Hardware, [m, n, k, batch]: [f64; 4]) -> f64 {
    let (work_form, units) = (work.form, f64::from(hardware.units));
    if !matches!(work_form, "dot" | "grouped" | "outer") || hardware.kind == "cpu" || m * n * batch <= 0.0 {
        return 1.0;
    }
    // Rows of groups come to all groups together, and to no more than there are rows.
    let many = if work_form == "grouped" { batch.min(m) } else { batch };
    let rows = if work_form == "grouped" { m / many } else { m };
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
    let whole = value(&m.traffic.bytes, sizes)?;
    let [near, far] = parts(m, hardware, mesh);
    let reach = hardware.kernels.of("collective").memory;
    let ranks = near * far;
    let link = |i: usize| hardware.links.get(i).or(hardware.links.last());
    let sent = |algorithm: &str, name: &str, bytes: f64, messages: f64, latency: f64, bandwidth: f64| Sent {
        algorithm: format!("{}, {algorithm}", m.operator),
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
