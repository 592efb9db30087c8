//! The estimate of a schedule. In: the programs of every stage, hardware. Out: a row for each kernel of a layer kind, and what follows
//! from them for a step: latency, throughput, use of the machine, memory, cost and energy.

use crate::Refused;
use crate::hardware::{Hardware, Precision};
use crate::model::{Time, time_among, touched};
use crate::schedule::{Memory, Purpose, Schedule, Stage, stages};
use crate::server::{Rows, Run};
use crate::work::{ARRIVED, Work, in_order, live, work};
use crate::zero::{gathers, summed};
use astrai_builders::ModelConfig;
use astrai_builders::config::MlpSpec;
use astrai_ir::{Backend, Dim, Mesh, Symbol};

/// The kernels of one region in the layers of one kind.
#[derive(Clone, Debug)]
pub struct Row {
    /// Stage of the pipeline.
    pub stage: usize,
    /// `forward`, `gradient` or `update`.
    pub program: &'static str,
    /// What is done.
    pub work: Work,
    /// Rows, columns, length of the sums, products side by side.
    pub sizes: [u64; 4],
    /// Of one launch.
    pub time: Time,
    /// Launches of a step, of all its micro-batches.
    pub launches: u64,
    /// Seconds of these.
    pub seconds: f64,
    /// Part of the stage's time at work.
    pub share: f64,
}

/// A rank of one stage.
#[derive(Clone, Debug)]
pub struct Rank {
    /// Its kernels.
    pub rows: Vec<Row>,
    /// Seconds of a run of each program.
    pub seconds: Vec<(&'static str, f64)>,
    /// What it holds.
    pub memory: Memory,
    /// The launches of a run of each program in their order.
    pub launches: Vec<Launch>,
}

/// A launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Which of the rows.
    pub row: usize,
    /// Bytes of values between kernels that are kept meanwhile.
    pub live: u64,
    /// 0 forward, 1 backward, 2 the update.
    pub phase: usize,
}

impl Rank {
    /// Seconds of all programs but the update, which runs once a step.
    fn piece(&self) -> f64 {
        self.seconds.iter().filter(|(name, _)| *name != "update").map(|(_, s)| s).sum()
    }

    /// Seconds of the update.
    pub fn update(&self) -> f64 {
        self.seconds.iter().filter(|(name, _)| *name == "update").map(|(_, s)| s).sum()
    }
}

/// What a step takes.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Seconds until the step's results are there: TTFT of a prefill, TPOT of decode, an optimiser step.
    pub step: f64,
    /// Seconds from one step to the next where steps follow one another.
    pub period: f64,
    /// Tokens per second of all devices.
    pub tokens_per_s: f64,
    /// Of prompts that are computed beside decode the seconds until one's first token, and their tokens per second.
    pub beside: Option<[f64; 2]>,
    /// Devices.
    pub devices: usize,
    /// Part of the step in which a pipeline's stages wait for one another.
    pub bubble: f64,
    /// Part of the peak that the model's operations take: all pairs of attention, as PaLM counts; visible pairs only.
    pub mfu: [f64; 2],
    /// Seconds of computing, of memory, of messages, of starts in all pieces of a step on the slowest stage.
    pub parts: [f64; 4],
    /// Memory of the fullest rank.
    pub memory: Memory,
    /// Bytes left there; negative: missing.
    pub left: i64,
    /// Most sequences in all, and tokens of a sequence, that would fit, by proportion.
    pub largest: [u64; 2],
    /// Dollars for a million tokens, where the hardware has a price.
    pub cost: Option<f64>,
    /// Joules for a token, where the hardware's power is known.
    pub energy: Option<f64>,
}

/// An estimate.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// What was asked.
    pub schedule: Schedule,
    /// On what.
    pub hardware: Hardware,
    /// Parameters of the whole model.
    pub parameters: u64,
    /// A rank of each stage.
    pub ranks: Vec<Rank>,
    /// What follows.
    pub summary: Summary,
}

/// The programs of a schedule, to be estimated on hardware whose numbers may differ from those they were planned for.
pub struct Planned<'a> {
    config: &'a ModelConfig,
    schedule: &'a Schedule,
    mesh: Mesh,
    stages: Vec<Stage>,
}

impl<'a> Planned<'a> {
    /// Plans with the kernels of a backend.
    ///
    /// # Errors
    /// One line that names the flag or key.
    pub fn new(
        config: &'a ModelConfig,
        schedule: &'a Schedule,
        backend: &dyn Backend,
    ) -> Result<Planned<'a>, Refused> {
        let mesh = schedule.mesh(config)?;
        let stages = stages(config, schedule, backend)?;
        Ok(Planned { config, schedule, mesh, stages })
    }

    /// The estimate on this hardware.
    ///
    /// # Errors
    /// One line that names the flag or key.
    pub fn on(&self, hardware: &Hardware) -> Result<Estimate, Refused> {
        of_stages(self.config, self.schedule, hardware, &self.mesh, &self.stages)
    }
}

/// Estimates a schedule with the kernels of a backend.
///
/// # Errors
/// One line that names the flag or key.
pub fn estimate(
    config: &ModelConfig,
    schedule: &Schedule,
    hardware: &Hardware,
    backend: &dyn Backend,
) -> Result<Estimate, Refused> {
    Planned::new(config, schedule, backend)?.on(hardware)
}

fn of_stages(
    config: &ModelConfig,
    schedule: &Schedule,
    hardware: &Hardware,
    mesh: &Mesh,
    stages: &[Stage],
) -> Result<Estimate, Refused> {
    let ranks: Result<Vec<Rank>, Refused> =
        stages.iter().enumerate().map(|(i, s)| rank(i, s, (config, schedule), hardware, mesh)).collect();
    let ranks = ranks?;
    let summary = summary(config, schedule, hardware, &ranks);
    let (schedule, hardware) = (schedule.clone(), hardware.clone());
    Ok(Estimate { schedule, hardware, parameters: config.parameter_count(), ranks, summary })
}

/// What a symbol is worth: of what arrives from all ranks of experts an even share, times the imbalance of the busiest rank.
pub fn even<'a>(
    symbols: &'a [Symbol],
    of: &'a dyn Fn(&str) -> Option<u64>,
    imbalance: f64,
) -> impl Fn(&str) -> Option<u64> + 'a {
    move |name: &str| match name
        .strip_suffix(ARRIVED)
        .filter(|base| symbols.iter().any(|s| &*s.name == *base))
    {
        Some(base) => of(base).map(|n| (n as f64 * imbalance).ceil() as u64),
        None => of(name),
    }
}

/// These launches with rows sent to experts as the schedule says.
pub fn sent(mut works: Vec<Work>, config: &ModelConfig, s: &Schedule) -> Vec<Work> {
    let d = &s.dispatch;
    let chosen = config.layers.iter().find_map(|l| match &l.mlp {
        MlpSpec::Experts(e) => {
            Some([e.chosen as f64, e.groups.map_or(1.0, |g| g.kept as f64 / g.count as f64)])
        }
        MlpSpec::Stacked(_) | MlpSpec::Dense { .. } => None,
    });
    // A scale in f32 for 128 numbers.
    let narrow = d.dtype.map_or(1.0, |t| (t.bytes() as f64 + 4.0 / 128.0) / s.storage.bytes() as f64);
    for m in works.iter_mut().flat_map(|w| &mut w.messages).filter(|m| m.operator == "all_to_all") {
        m.factor = d.imbalance * if m.back { 1.0 } else { narrow };
        m.by_nodes = chosen.filter(|_| d.by_nodes);
    }
    works
}

/// The rows of a rank of one stage.
///
/// # Errors
/// A size overflows.
fn rank(
    number: usize,
    stage: &Stage,
    (config, schedule): (&ModelConfig, &Schedule),
    hardware: &Hardware,
    mesh: &Mesh,
) -> Result<Rank, Refused> {
    let (mut rows, mut seconds, mut launches) = (Vec::new(), Vec::new(), Vec::new());
    for Run { name: program, planned, times, rows: of } in &stage.runs {
        let symbols = &planned.plan.symbols;
        let bound = |name: &str| {
            let most = symbols.iter().find(|s| &*s.name == name).map(|s| s.max);
            match (name, of) {
                ("tokens", Some(rows)) => Some(rows.tokens),
                ("sequences", Some(rows)) => Some(rows.sequences),
                // Pages in use.
                ("context", Some(rows)) => most.map(|most| rows.pages().clamp(1, most)),
                _ => most,
            }
        };
        let sizes = even(symbols, &bound, schedule.dispatch.imbalance);
        let (works, order) = in_order(planned);
        let mut works = sent(works, config, schedule);
        let (first, mut order) = (rows.len(), order.into_iter().zip(live(&planned.plan)).collect::<Vec<_>>());
        if *program == "update" {
            // What comes with each piece instead is not launched here.
            let own: Vec<Option<Work>> = works.iter().map(|w| summed(schedule, w)[1].take()).collect();
            let before = |row: usize| own[..row].iter().flatten().count();
            order.retain(|(row, _)| own[*row].is_some());
            order.iter_mut().for_each(|(row, _)| *row = before(*row));
            works = own.into_iter().flatten().collect();
        }
        // Of states that ranks share each updates its own.
        let part = if *program == "update" { schedule.updates(stage.weights) } else { 1.0 };
        let runs = times * if *program == "update" { 1 } else { schedule.pieces() };
        let kernels = works.len();
        for work in &mut works {
            if part < 1.0 && work.messages.is_empty() {
                let of = |d: &Dim| Ok::<_, Refused>(Dim::from((d.eval(&sizes)? as f64 * part) as usize));
                (work.flops, work.bytes) = (of(&work.flops)?, of(&work.bytes)?);
            }
            if let Some(rows) = of.as_ref().filter(|_| work.form == "attention") {
                seen(work, rows, &sizes)?;
            }
        }
        // A piece comes by once for each group of layers.
        works.iter_mut().filter(|w| w.is_sent()).for_each(|w| w.launches *= schedule.interleave);
        let among = touched(&works, &sizes)?;
        if hardware.kernels.step > 0.0 {
            works.push(Work::beside("the run of its program", vec![]));
        }
        if *program == "gradient" {
            let gathers = gathers(schedule, mesh, stage.weights);
            // Forward and backward.
            works.extend(
                gathers.into_iter().map(|m| Work { launches: 2, ..Work::beside("weights", vec![m]) }),
            );
        }
        let scattered = works.len();
        if *program == "gradient" {
            let updates = stage.runs.iter().filter(|r| r.name == "update").flat_map(|r| work(&r.planned));
            works.extend(updates.filter_map(|w| summed(schedule, &w)[0].take()));
        }
        let mut sum = 0.0;
        for (i, work) in works.into_iter().enumerate() {
            let time = match i >= kernels && work.messages.is_empty() {
                true => Time { fixed: hardware.kernels.step, ..Time::default() },
                false => time_among(&work, among, hardware, mesh, &sizes)?,
            };
            sum += time.total() * work.launches as f64;
            let at = |d: &Dim| d.eval(&sizes).unwrap_or(u64::MAX);
            let sizes = [0, 1, 2, 3].map(|i: usize| at(&work.sizes[i]));
            let launches = work.launches * runs;
            let seconds = time.total() * launches as f64;
            rows.push(Row { stage: number, program, work, sizes, time, launches, seconds, share: 0.0 });
        }
        let phase = if *program == "update" { 2 } else { 0 };
        let launch = |(row, live): (usize, u64)| Launch { row: first + row, live, phase };
        // What is beside the kernels comes before them; of weights gathered twice the second time where the backward pass begins.
        let backward = order.iter().position(|(row, _)| rows[first + row].work.layer.ends_with(".grad"));
        let beside = || (kernels..scattered).map(|row| (row, 0)).map(launch);
        let again = beside().filter(|l| rows[l.row].work.launches > 1).collect::<Vec<_>>();
        // Gradients that ranks share are scattered when they are there.
        let sums = (scattered..rows.len() - first)
            .flat_map(|row| (0..rows[first + row].work.launches).map(move |_| (row, 0)));
        let mut own: Vec<Launch> = order.into_iter().chain(sums).map(launch).collect();
        let middle = backward.unwrap_or(own.len());
        own.splice(middle..middle, again);
        own[middle..].iter_mut().for_each(|l| l.phase = l.phase.max(usize::from(backward.is_some())));
        let run: Vec<Launch> = beside().chain(own).collect();
        (0..*times).for_each(|_| launches.extend(&run));
        seconds.push((*program, sum * *times as f64));
    }
    let total: f64 = rows.iter().map(|r| r.seconds).sum();
    rows.iter_mut().for_each(|r| r.share = r.seconds / total);
    let memory = Memory { process: hardware.process as u64, ..stage.memory };
    Ok(Rank { rows, seconds, memory, launches })
}

/// Attention over pages as these rows have it: the plan counts the longest sequence's keys for all of them.
///
/// # Errors
/// A size overflows.
pub fn seen(work: &mut Work, rows: &Rows, sizes: &dyn Fn(&str) -> Option<u64>) -> Result<(), Refused> {
    let span = work.sizes[1].eval(sizes)?;
    let most = work.window.map_or(span, |w| w.min(span)) as f64;
    let (all, window) = (work.flops.eval(sizes)? as f64, work.window);
    let flops = all * rows.seen(window) / (rows.tokens as f64 * most);
    // Beside keys and values are queries and results, which are the tokens' own.
    let alone = |name: &str| if name == "sequences" { Some(0) } else { sizes(name) };
    let (bytes, own) = (work.bytes.eval(sizes)?, work.bytes.eval(&alone)?);
    let read = bytes.saturating_sub(own) as f64 * rows.held(window) / (rows.sequences as f64 * most);
    work.flops = Dim::from(flops.round() as usize);
    work.bytes = Dim::from(own as usize + read.round() as usize);
    Ok(())
}

/// Seconds until a step's results are there (of decode a token's of a sequence), from one to the next, and the part in which stages wait.
pub fn step(s: &Schedule, pieces: &[f64], update: f64) -> [f64; 3] {
    let (sum, slowest) = (pieces.iter().sum::<f64>(), pieces.iter().copied().fold(0.0, f64::max));
    let (micro, stages) = (s.pieces() as f64, pieces.len() as f64);
    match s.purpose {
        Purpose::Train => {
            // 1F1B: what fills and drains is a piece a stage, of an interleaved pipeline a group of layers of it.
            let step = (micro + (stages - 1.0) / s.interleave as f64) * slowest + update;
            [step, step, 1.0 - (micro * slowest + update) / step]
        }
        // Pieces follow one another through the stages; the next step's begin when their own are through.
        Purpose::Prefill => [sum + (micro - 1.0) * slowest, micro * slowest, 0.0],
        Purpose::Decode => {
            let period = sum.max(micro * slowest);
            [period / s.server.tokens(), period, 1.0 - micro * slowest / period]
        }
    }
}

/// Operations that a model's step needs, whatever computes it: products of parameters that a token meets, and of attention with all
/// pairs, with visible ones.
pub fn model_flops(config: &ModelConfig, s: &Schedule) -> [f64; 2] {
    // Tokens of prompts that are computed, and those of answers; rejected proposals are nobody's.
    let shares = (s.ranks.dp * s.ranks.ep) as f64;
    let prompts = match (s.purpose, s.server.chunk) {
        (Purpose::Decode, chunk) => chunk.map_or(0.0, |n| n as f64 * shares * s.micro as f64),
        _ => (s.batch * s.fresh()) as f64,
    };
    let answers = if s.purpose == Purpose::Decode { s.tokens() } else { 0.0 };
    let tokens = prompts + answers;
    let idle = |mlp: &MlpSpec| match mlp {
        MlpSpec::Experts(e) => 3 * (e.count - e.chosen) * e.intermediate * config.hidden_size,
        MlpSpec::Stacked(e) => 3 * (e.count - e.chosen) * e.intermediate * config.hidden_size,
        MlpSpec::Dense { .. } => 0,
    };
    let idle: usize = config.layers.iter().map(|l| idle(&l.mlp)).sum();
    let table = if config.tie_embeddings { 0 } else { config.vocab_size * config.hidden_size };
    let met = config.parameter_count() as f64 - idle as f64 - table as f64;
    // A prompt's last token alone meets the head.
    let head = if config.encoder.is_some() { 0 } else { config.vocab_size * config.hidden_size } as f64;
    let unread = match s.purpose {
        Purpose::Train => 0.0,
        _ => head * prompts * (1.0 - 1.0 / s.fresh() as f64),
    };
    let pairs = |l: &astrai_builders::config::LayerSpec| {
        let window = l.attention.window.map(|w| w as u64);
        let seen = window.map_or(s.seq, |w| s.seq.min(w)) as f64 * s.part(window);
        let d = config.head_dim + l.attention.value_dim(config.head_dim);
        2.0 * config.heads as f64 * d as f64 * seen
    };
    let attention: f64 = config.layers.iter().map(pairs).sum();
    let times = if s.purpose == Purpose::Train { 3.0 } else { 1.0 };
    // A token of a prompt sees what is found of it and half of the rest.
    let half = 1.0 - 0.5 * s.fresh() as f64 / s.seq as f64;
    let visible = (answers + prompts * half) / tokens;
    [1.0, visible].map(|part| times * (tokens * (2.0 * met + part * attention) - 2.0 * unread))
}

fn summary(config: &ModelConfig, s: &Schedule, hardware: &Hardware, ranks: &[Rank]) -> Summary {
    let pieces: Vec<f64> = ranks.iter().map(Rank::piece).collect();
    let update = ranks.iter().map(Rank::update).fold(0.0, f64::max);
    let [step, period, bubble] = self::step(s, &pieces, update);
    let tokens = s.tokens();
    let devices = s.devices();
    let peak = hardware.peak(Precision::of(s.storage)) * devices as f64;
    let slowest = ranks.iter().max_by(|a, b| a.piece().total_cmp(&b.piece()));
    let part = |f: fn(&Time) -> f64| {
        let rows = slowest.iter().flat_map(|r| &r.rows);
        rows.fold(0.0, |sum, r| sum + f(&r.time) * r.launches as f64)
    };
    let memory = ranks.iter().map(|r| r.memory).max_by_key(Memory::total).unwrap_or_default();
    let tokens_per_s = tokens / period;
    Summary {
        step,
        period,
        tokens_per_s,
        beside: beside(s, step * s.server.tokens(), period),
        devices,
        bubble,
        mfu: model_flops(config, s).map(|f| f / (period * peak)),
        parts: [part(|t| t.compute), part(Time::all_memory), part(Time::communication), part(|t| t.fixed)],
        memory,
        left: hardware.memory as i64 - i64::try_from(memory.total()).unwrap_or(i64::MAX),
        largest: largest(s, &memory, hardware.memory as u64, config.max_positions as u64),
        cost: hardware.price.map(|p| p * devices as f64 / 3600.0 / tokens_per_s * 1e6),
        energy: hardware.power.map(|p| p * devices as f64 / tokens_per_s),
    }
}

/// What prompts beside decode wait, and their tokens per second: every piece of a step takes a chunk.
fn beside(s: &Schedule, step: f64, period: f64) -> Option<[f64; 2]> {
    let chunk = s.server.chunk.filter(|_| s.purpose == Purpose::Decode)?;
    let runs = s.fresh().div_ceil(chunk);
    // What is found of a prompt counts, too.
    let prompts = (s.ranks.dp * s.ranks.ep) as f64 * s.micro as f64;
    let tokens = prompts * chunk as f64 * s.seq as f64 / s.fresh() as f64;
    Some([(runs - 1) as f64 * period + step, tokens / period])
}

/// Most sequences in all, and tokens of each, by proportion to what this schedule holds.
fn largest(s: &Schedule, m: &Memory, memory: u64, positions: u64) -> [u64; 2] {
    let free = memory.saturating_sub(m.weights + m.gradients + m.optimizer + m.process) as f64;
    // Of prompts in pieces activations do not grow with what there is of these.
    let [free, grows] = match s.purpose == Purpose::Prefill && s.server.chunk.is_some() {
        true => [(free - (m.activations + m.buffers) as f64).max(0.0), m.kv.max(1) as f64],
        false => [free, (m.kv + m.activations + m.buffers).max(1) as f64],
    };
    let batch = (s.batch as f64 * free / grows) as u64;
    // Activations of decode do not grow with the context.
    let (room, of) = if s.purpose == Purpose::Decode {
        (free - (m.activations + m.buffers) as f64, m.kv.max(1) as f64)
    } else {
        (free, grows)
    };
    let shares = ((s.ranks.dp * s.ranks.ep) as u64 * s.micro).max(1);
    [batch / shares * shares, ((s.seq as f64 * (room / of).max(0.0)) as u64).min(positions)]
}

/// What products of a row are computed in, for the reader.
pub fn computed_in(row: &Row) -> &'static str {
    row.time.precision.name()
}

#[cfg(test)]
mod tests;
