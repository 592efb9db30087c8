//! The estimate held to the device at hand. In: a configuration, a schedule of one rank, hardware. Out: predicted beside measured seconds of
//! a step and of each kernel, with random weights; and measurements from which the numbers of kernels are fitted.

use crate::Refused;
use crate::estimate::{estimate, even};
use crate::hardware::Hardware;
use crate::model::{Time, time, time_among, touched};
use crate::schedule::{Purpose, Schedule};
use crate::work::{Work, settled, without_numbers, work};
use astrai_builders::{Cache, Logits, ModelConfig, Program};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::load::draw;
use astrai_engine::machine::{Machine, Speeds};
use astrai_engine::model::{Model, check_sizes, plan_within, served_fidelity};
use astrai_ir::{Dim, Mesh};
use astrai_runtime::device::{forget_peak, process_memory};
use astrai_runtime::{Compiled, Dump, Profile, Session, Value};
use astrai_serve::cache::KvCache;
use astrai_serve::pages::Page;
use astrai_serve::scheduler::batch::StepBatch;
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::settings::Settings;
use std::collections::BTreeMap;
use std::time::Duration;
pub use watch::Looks;
use watch::{Stretch, Watch, middle};

mod watch;

/// How long steps are run again while the machine's speeds changed: those of one program, and those of all from which a machine's numbers are
/// fitted.
const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const PATIENCE_OF_ALL: Duration = Duration::from_secs(120);
/// Seconds of steps that are enough where there are many programs.
const ENOUGH: f64 = 5.0;

/// A byte of keys and values; numbers made of it are about a hundredth in both types.
const WRITTEN: u8 = 0x3c;

/// A kernel in the layers of one kind.
#[derive(Clone, Debug)]
pub struct Operator {
    /// Its program.
    pub program: &'static str,
    /// What it does; sizes settled.
    pub work: Work,
    /// Of one launch.
    pub time: Time,
    /// Seconds of all its launches in a step.
    pub predicted: f64,
    /// The same, measured.
    pub measured: f64,
}

/// A step.
#[derive(Clone, Debug)]
pub struct Checked {
    /// Seconds predicted, at the speeds beside the steps.
    pub predicted: f64,
    /// Seconds predicted at the speeds of the hardware's file.
    pub as_told: f64,
    /// The step in the middle of the stretch that counts, in the middle of all by predicted beside measured: one whose steps were on other
    /// cores than the looks around it may be faster or slower by far.
    pub measured: f64,
    /// Mean of all steps measured, as long as they would be at the speeds beside that stretch.
    pub mean: f64,
    /// Part of the median by which these steps differ: half of the way from the first to the third quarter.
    pub spread: f64,
    /// Its kernels.
    pub operators: Vec<Operator>,
    /// Bytes planned, and the most that the process held while it loaded and ran, of a device's own memory where it has some; none where the
    /// system does not say.
    pub memory: Option<[u64; 2]>,
    /// The machine's speeds beside the steps; none where they are not measured.
    pub now: Option<Speeds>,
}

impl Checked {
    /// Relative error of the whole.
    pub fn error(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

/// Programs by name with their launches, and what was measured of all in turn.
struct Measured {
    programs: Vec<(&'static str, Vec<Work>)>,
    stretches: Vec<Stretch>,
}

/// Runs the program and compares.
///
/// # Errors
/// A schedule of several ranks, sizes that the model does not take, or a device that fails; one line.
pub fn check(
    config: &ModelConfig,
    s: &Schedule,
    hardware: &Hardware,
    machine: &Machine,
    repeat: usize,
) -> Result<Checked, Refused> {
    if s.devices() != 1 || s.micro != 1 {
        return Err("--check runs one rank on the device at hand; leave --tp, --dp, --ep, --pp and --micro-batches out".into());
    }
    check_sizes(config, s.batch, s.seq)?;
    let memory = estimate(config, s, hardware, machine.backend())?.summary.memory;
    // A prefill that is checked keeps no keys and values.
    let kept = if s.purpose == Purpose::Prefill { memory.kv } else { 0 };
    let planned = memory.total() - kept;
    let mut patience = PATIENCE;
    let mut watch = Watch::new(hardware, machine, repeat, &mut patience);
    let forgotten = forget_peak();
    let measured = run(config, s, 1, machine, &mut watch)?;
    let held = |[_, peak]: [u64; 2]| [planned, peak.saturating_sub(watch.bytes())];
    let peak = match machine.device.memory_use() {
        Some(of_device) => Some([planned, of_device.most]),
        None => process_memory().filter(|_| forgotten).map(held),
    };
    Ok(Checked { memory: peak, ..beside(measured, hardware)? })
}

/// The same without the plan's memory; of decode the last `new` tokens of each sequence, whose keys and values are in pages: a server's
/// prefill.
///
/// # Errors
/// As [`check`].
pub fn check_time(
    config: &ModelConfig,
    s: &Schedule,
    new: u64,
    hardware: &Hardware,
    machine: &Machine,
    repeat: usize,
    patience: &mut Duration,
) -> Result<Checked, Refused> {
    let given = PATIENCE.min(*patience);
    let mut left = given;
    let mut watch = Watch::new(hardware, machine, repeat, &mut left);
    watch.enough = ENOUGH;
    let measured = run(config, s, new, machine, &mut watch)?;
    *patience -= given - left;
    beside(measured, hardware)
}

fn run(
    config: &ModelConfig,
    s: &Schedule,
    new: u64,
    machine: &Machine,
    watch: &mut Watch,
) -> Result<Measured, Refused> {
    match s.purpose {
        Purpose::Train => train(config, s, machine, watch),
        Purpose::Prefill => prefill(config, s, machine, watch),
        Purpose::Decode => paged(config, s, new, machine, watch),
    }
}

/// What was measured beside what is predicted at the speeds meanwhile.
fn beside(measured: Measured, hardware: &Hardware) -> Result<Checked, Refused> {
    let Measured { programs, stretches } = measured;
    let predict = |hardware: &Hardware| -> Result<f64, Refused> {
        let mut sum = programs.len() as f64 * hardware.kernels.step;
        for work in programs.iter().flat_map(|(_, works)| works) {
            sum += time(work, hardware, &Mesh::default(), &|_| None)?.total() * work.launches as f64;
        }
        Ok(sum)
    };
    let (mut tried, mut seconds) = (Vec::new(), Vec::new());
    for stretch in &stretches {
        let predicted = predict(&hardware.at(stretch.now))?;
        seconds.extend(stretch.seconds.iter().map(|s| s / predicted));
        tried.push((predicted, stretch));
    }
    tried.sort_by(|(p, one), (q, other)| (p / one.middle()).total_cmp(&(q / other.middle())));
    let (predicted, chosen) = tried[tried.len() / 2];
    let now = chosen.now;
    let steps = steps_at(now, &stretches);
    let (mut operators, seen) = (Vec::new(), hardware.at(now));
    for (i, (program, works)) in programs.iter().enumerate() {
        let profiles: Vec<&Profile> = steps.iter().filter_map(|step| step.get(i)).collect();
        operators.extend(compare(program, works, &profiles, &seen)?);
    }
    seconds.sort_by(f64::total_cmp);
    let at = |part: f64| seconds[((seconds.len() - 1) as f64 * part).round() as usize];
    Ok(Checked {
        predicted,
        as_told: predict(hardware)?,
        measured: chosen.middle(),
        mean: predicted * seconds.iter().sum::<f64>() / seconds.len() as f64,
        spread: (at(0.75) - at(0.25)) / 2.0 / at(0.5),
        operators,
        memory: None,
        now,
    })
}

/// Launches of all steps at about these speeds: those of one step differ more than whole steps do.
fn steps_at(now: Option<Speeds>, stretches: &[Stretch]) -> Vec<&Vec<Profile>> {
    let alike = |stretch: &&Stretch| stretch.now.zip(now).is_none_or(|(other, now)| now.alike(other));
    stretches.iter().filter(alike).flat_map(|stretch| &stretch.profiles).collect()
}

/// Seconds that a run of a program is predicted to take at these sizes.
///
/// # Errors
/// A size overflows.
pub fn predict(
    program: &Compiled,
    size: &dyn Fn(&str) -> Option<u64>,
    hardware: &Hardware,
) -> Result<f64, Refused> {
    let sizes = even(&program.plan.symbols, size, 1.0);
    let mut sum = hardware.kernels.step;
    let works = work(program);
    let among = touched(&works, &sizes)?;
    for w in works {
        sum += time_among(&w, among, hardware, &Mesh::default(), &sizes)?.total() * w.launches as f64;
    }
    Ok(sum)
}

/// The launches of a program, sizes settled.
fn settle(program: &Compiled) -> Result<Vec<Work>, Refused> {
    let symbols = &program.plan.symbols;
    let bound = |name: &str| symbols.iter().find(|s| &*s.name == name).map(|s| s.max);
    let sizes = even(symbols, &bound, 1.0);
    let works = work(program);
    let among = touched(&works, &sizes)? as u64;
    works.into_iter().map(|w| Ok(Work { among, ..settled(w, &sizes)? })).collect()
}

fn compare(
    program: &'static str,
    works: &[Work],
    profiles: &[&Profile],
    hardware: &Hardware,
) -> Result<Vec<Operator>, Refused> {
    // Launches of a kernel in the layers of one kind, of all steps.
    let mut measured: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    for row in profiles.iter().flat_map(|profile| &profile.rows) {
        let key = (row.kernel.clone(), without_numbers(&row.origin).0);
        measured.entry(key).or_default().push(row.measured);
    }
    let mut found = Vec::new();
    for w in works {
        let time = time(w, hardware, &Mesh::default(), &|_| None)?;
        let predicted = time.total() * w.launches as f64;
        // The launch in the middle for all of them: another tenant may have a core during one of them for as long as many take. Those of one
        // identity and origin in layers of several kinds were timed together.
        let launches = measured.get(&(w.kernel.clone(), w.origin.clone())).cloned();
        let measured = launches.and_then(middle).unwrap_or(0.0) * w.launches as f64;
        found.push(Operator { program, work: w.clone(), time, predicted, measured });
    }
    Ok(found)
}

fn said<E: ToString>(e: E) -> String {
    e.to_string()
}

/// Steps of a session.
fn forward(
    session: &mut Session,
    inputs: &[(&str, &Value)],
    watch: &mut Watch,
) -> Result<Vec<Stretch>, Refused> {
    watch.steps(|timed| {
        if timed {
            session.start_profile();
        }
        // Logits stay on the device, as where it samples.
        session.execute_rows(inputs, Some(&|_| false)).map_err(said)?;
        Ok(vec![session.take_profile().unwrap_or_default()])
    })
}

fn prefill(
    config: &ModelConfig,
    s: &Schedule,
    machine: &Machine,
    watch: &mut Watch,
) -> Result<Measured, Refused> {
    let logits = if config.encoder.is_some() { Logits::None } else { Logits::Last };
    let program = Program { logits, ..Program::full(s.batch, s.seq) };
    let planned = plan_within(config, &program, s.storage, machine, Default::default()).map_err(said)?;
    planned.check_memory(&*machine.device).map_err(said)?;
    let works = settle(&planned)?;
    let vocab = config.vocab_size;
    let ids: Vec<i64> = (0..program.tokens).map(|i| (draw(i) % vocab as u64) as i64).collect();
    let batch = RaggedBatch::new(&ids.chunks(s.seq as usize).collect::<Vec<_>>(), vocab)?;
    let model = Model::fresh(config.clone(), vec![], 0);
    let mut session = model.start(planned, machine, &mut |_, _| {}).map_err(said)?;
    let inputs = batch.inputs(session.inputs());
    let stretches = forward(&mut session, &inputs, watch)?;
    Ok(Measured { programs: vec![("forward", works)], stretches })
}

fn paged(
    config: &ModelConfig,
    s: &Schedule,
    new: u64,
    machine: &Machine,
    watch: &mut Watch,
) -> Result<Measured, Refused> {
    config.check_decoder()?;
    let table = (s.seq as usize).div_ceil(Cache::PAGE);
    let cache =
        Cache { page: Cache::PAGE, pages: table.saturating_mul(s.batch as usize), table, windows: None };
    let program = Program { span: s.seq, ..Program::paged(s.batch * new, s.batch, cache) };
    let planned = plan_within(config, &program, s.storage, machine, served_fidelity(config)).map_err(said)?;
    planned.check_memory(&*machine.device).map_err(said)?;
    let mut works = settle(&planned)?;
    for w in works.iter_mut().filter(|w| w.form == "attention") {
        // The last token sees all keys, each before it one fewer.
        let all = w.flops.size().unwrap_or(0) as f64;
        w.flops = Dim::from((all * (1.0 - (new - 1) as f64 / 2.0 / s.seq as f64)) as usize);
    }
    let kv = KvCache::new(config, cache, s.storage, &machine.device).map_err(said)?;
    // As after a prompt: of pages that nobody wrote, the system gives all the same one, which stays in the caches.
    for name in kv.buffers().names() {
        kv.buffers().write(name, |bytes| bytes.fill(WRITTEN)).map_err(said)?;
    }
    let model = Model::fresh(config.clone(), vec![], 0);
    let mut session = model.start_over(planned, kv.buffers(), &mut |_, _| {}).map_err(said)?;
    let mut batch = StepBatch::of_program(session.inputs(), cache.page, cache.table);
    let bounds = [config.vocab_size, cache.pages];
    for i in 0..s.batch as usize {
        // Neighbours in a sequence are far apart in memory, as after many requests.
        let pages: Vec<Page> = (0..table).map(|p| (p * s.batch as usize + i) as Page).collect();
        let token = |n: u64| (draw(i as u64 * new + n) % config.vocab_size as u64) as u32;
        let tokens: Vec<u32> = (0..new).map(token).collect();
        batch.push(&tokens, (s.seq - new) as usize, &pages, bounds).map_err(said)?;
    }
    let inputs = batch.inputs(session.inputs());
    let stretches = forward(&mut session, &inputs, watch)?;
    Ok(Measured { programs: vec![("forward", works)], stretches })
}

fn train(
    config: &ModelConfig,
    s: &Schedule,
    machine: &Machine,
    watch: &mut Watch,
) -> Result<Measured, Refused> {
    config.check_decoder()?;
    let recipe =
        Recipe { storage: s.storage, recompute: s.recompute, ..Settings::of_sizes(s.batch, s.seq).recipe() };
    let plan = Plan::new(config, &recipe, machine.backend(), Dump::None).map_err(said)?;
    let works = [settle(&plan.grad)?, settle(&plan.update)?];
    let tokens = s.batch * s.seq;
    let ids: Vec<i32> = (0..=tokens).map(|i| (draw(i) % config.vocab_size as u64) as i32).collect();
    let mut batches = [PackedBatch::default()];
    for first in (0..tokens as usize).step_by(s.seq as usize) {
        let next = first + s.seq as usize;
        batches[0].push(&ids[first..next], &ids[first + 1..=next]);
    }
    let model = Model::fresh(config.clone(), vec![], 0);
    let mut engine = Engine::open(plan, model.source(), &machine.device, &mut |_, _| {}).map_err(said)?;
    let stretches = watch.steps(|timed| {
        if timed {
            engine.start_profile();
        }
        engine.step(&batches, 1e-4).map_err(said)?;
        Ok(engine.take_profile().map(Option::unwrap_or_default).into())
    })?;
    let [first, second] = works;
    Ok(Measured { programs: vec![("gradient", first), ("update", second)], stretches })
}

#[cfg(test)]
mod tests;
