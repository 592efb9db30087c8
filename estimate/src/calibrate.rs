//! The numbers of kernels from programs run on the device at hand. In: shapes, hardware that was measured. Out: the hardware with what part
//! of its peaks kernels of each archetype and type of product reach. Shapes, sizes and types
//! differ so much that each number shows: few rows and many, one layer after another from memory, experts with a few rows each.

use crate::Refused;
use crate::check::{Checked, PATIENCE_OF_ALL, check, check_time};
use crate::fit::{Seen, reach};
use crate::hardware::{Hardware, Kernels, Precision, Reach};
use crate::model::time;
use crate::schedule::{Purpose, Schedule};
use crate::turns::turns;
use astrai_builders::ModelConfig;
use astrai_engine::machine::{Machine, median};
use astrai_ir::{DType, Mesh};
use std::collections::{BTreeMap, BTreeSet};

/// Shapes that are run where none are given: dense, and with experts.
const SHAPES: [(&str, &str); 2] = [
    ("smollm2-135m", include_str!("../../bench/shapes/smollm2-135m.json")),
    ("qwen3-moe-tiny", include_str!("../../bench/shapes/qwen3-moe-tiny.json")),
];

/// Layers that are enough where they are alike and steps are long: those of training and of prefill. Steps over pages take all, for the more launches
/// follow one another, the longer each of them takes.
const LAYERS: usize = 8;

/// Sequences and tokens of each of the steps of training and of prefill. What attention costs a key shows where there are many, so one prompt is longer.
const WHOLE: [(Purpose, &[[u64; 2]]); 2] =
    [(Purpose::Train, &[[1, 128], [4, 256]]), (Purpose::Prefill, &[[1, 128], [4, 256], [1, 512]])];
/// Sequences, tokens of each, and how many of them are new, of the steps over pages.
const PAGED: [[u64; 3]; 5] = [[1, 256, 1], [4, 512, 1], [16, 256, 1], [1, 128, 128], [4, 256, 32]];
/// The same of a shape with a head of keys for each head: computing is less beside the keys that one query reads than where a group shares them.
const UNGROUPED: [[u64; 3]; 2] = [[4, 512, 1], [16, 256, 1]];

/// The shapes that are run where none are given.
///
/// # Errors
/// None: they are those of the repository.
pub fn shapes() -> Result<Vec<ModelConfig>, Refused> {
    let one =
        |(name, text): (&str, &str)| Ok(ModelConfig::parse(text, name).map_err(|e| e.to_string())?.config);
    SHAPES.into_iter().map(one).collect()
}

/// Runs the shapes and fits the numbers to them. `progress` hears how many of how many steps were measured.
///
/// # Errors
/// A shape that cannot be run, or a device that fails; one line.
pub fn calibrate(
    shapes: &[ModelConfig],
    hardware: &Hardware,
    machine: &Machine,
    repeat: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Hardware, Refused> {
    let mut asked = Vec::new();
    let grouped = |config: &&ModelConfig| config.kv_heads < config.heads;
    let ungroup = |config: &ModelConfig| ModelConfig { kv_heads: config.heads, ..config.clone() };
    let ungrouped: Vec<_> = shapes.iter().filter(grouped).map(ungroup).collect();
    let shallow: Vec<_> = shapes.iter().map(shallow).collect();
    let all = shapes.iter().zip(&shallow).map(|(config, shallow)| (config, Some(shallow), &PAGED[..]));
    let without_groups = ungrouped.iter().map(|config| (config, None, &UNGROUPED[..]));
    for (config, shallow, paged) in all.chain(without_groups) {
        let longest = config.max_positions as u64;
        for storage in [DType::F32, DType::BF16] {
            let of = |purpose, batch, seq: u64| Schedule::of_one(purpose, batch, seq.min(longest), storage);
            if let Some(shallow) = shallow {
                for (purpose, sizes) in WHOLE {
                    asked.extend(sizes.iter().map(|[batch, seq]| (shallow, of(purpose, *batch, *seq), 1)));
                }
            }
            asked.extend(
                paged.iter().map(|[batch, seq, new]| (config, of(Purpose::Decode, *batch, *seq), *new)),
            );
        }
    }
    // What else a machine does changes within minutes.
    asked.extend_from_within(..);
    let process = process(&shallow, hardware, machine)?;
    let (mut steps, mut patience) = (Vec::new(), PATIENCE_OF_ALL);
    for (config, s, new) in &asked {
        progress(steps.len() as u64, asked.len() as u64);
        steps.push(check_time(config, s, (*new).min(s.seq), hardware, machine, repeat, &mut patience)?);
    }
    let mut found = Hardware { process, ..fitted(hardware, &steps)? };
    if hardware.kind == "cpu" {
        found.kernels.usual = usual(&asked, &steps);
    }
    if let Some(config) = shallow.first() {
        [found.kernels.turn, found.kernels.logit] = turns(config, machine)?;
    }
    Ok(found)
}

/// The first layers, where all are alike.
fn shallow(config: &ModelConfig) -> ModelConfig {
    let mut config = config.clone();
    if config.layers.windows(2).all(|two| two[0] == two[1]) {
        config.layers.truncate(LAYERS);
        config.num_layers = config.layers.len();
    }
    config
}

/// Bytes that a process takes beside what is planned. Training holds so much that it is at its peak then, not while a tensor is loaded.
fn process(shapes: &[ModelConfig], hardware: &Hardware, machine: &Machine) -> Result<f64, Refused> {
    let Some(config) = shapes.first().filter(|_| hardware.kind == "cpu") else { return Ok(hardware.process) };
    let seq = (config.max_positions as u64).min(128);
    let found = check(config, &Schedule::of_one(Purpose::Train, 1, seq, DType::BF16), hardware, machine, 1)?;
    let more = found.memory.map_or(0.0, |[planned, held]| held as f64 - planned as f64);
    Ok((hardware.process + more).max(0.0))
}

/// Seconds of a run of a program that none of its kernels takes, in the middle of these steps: on a device beside the processor its inputs are
/// sent, and it is started and waited for.
fn rest(steps: &[Checked]) -> f64 {
    let of = |step: &Checked| {
        let programs: BTreeSet<&str> = step.operators.iter().map(|o| o.program).collect();
        let kernels: f64 = step.operators.iter().map(|o| o.measured).sum();
        (step.measured - kernels).max(0.0) / programs.len().max(1) as f64
    };
    median(steps.iter().map(of)).unwrap_or(0.0)
}

/// What was seen of kernels of each archetype and type of product.
type Groups = BTreeMap<(usize, Precision), Vec<Seen>>;

/// What these steps show beside peaks of which kernels reach so much, each at the speeds beside its step.
fn groups(peaks: &Hardware, steps: &[Checked]) -> Result<Groups, Refused> {
    let mut groups = Groups::new();
    for step in steps {
        let all: f64 = step.operators.iter().map(|o| o.measured).sum();
        // On a processor what is between kernels is of each of them.
        let step_of = if peaks.kind == "cpu" { step.measured / all } else { 1.0 };
        let peaks = peaks.at(step.now);
        for o in step.operators.iter().filter(|o| o.measured > 0.0) {
            let t = time(&o.work, &peaks, &Mesh::default(), &|_| None)?;
            let measured = o.measured * step_of / o.work.launches as f64;
            let at_peaks = [t.compute - t.vectors, t.vectors, t.memory, t.past, t.fixed + t.communication()];
            // A kernel counts by its part of the step, steps alike.
            let seen = Seen { at_peaks, measured, weight: 20.0 * o.measured / all };
            let form = Kernels::counted(o.work.archetype(&|_| None)?, &peaks.kind);
            let archetype = Kernels::archetype(form);
            groups.entry((archetype, t.precision)).or_default().push(seen);
        }
    }
    Ok(groups)
}

/// A step on average beside that in the middle: in the middle of the steps over pages, which are those of a server.
fn usual(asked: &[(&ModelConfig, Schedule, u64)], steps: &[Checked]) -> f64 {
    let paged = asked.iter().zip(steps).filter(|((_, s, _), _)| s.purpose == Purpose::Decode);
    let of_middle = |(_, step): (_, &Checked)| step.mean / step.measured;
    median(paged.map(of_middle).filter(|part| part.is_finite()))
        .unwrap_or(1.0)
        .clamp(1.0, Kernels::MOST_USUAL)
}

/// The numbers that fit these steps.
fn fitted(hardware: &Hardware, steps: &[Checked]) -> Result<Hardware, Refused> {
    // At the peaks themselves, but for what stands beside products: that is computed as it is without them.
    let mut kernels = Kernels::typical();
    kernels.reach = kernels.reach.map(|_| Reach::default());
    let mut peaks = Hardware { kernels, ..hardware.clone() };
    let loops = Kernels::archetype("loops");
    let mut alone = groups(&peaks, steps)?;
    alone.retain(|(archetype, _), _| *archetype == loops);
    let mut reached = BTreeMap::new();
    for (kind, seen) in alone {
        reached.insert(kind, reach(&seen)?);
    }
    let typical = Kernels::typical().reach[loops];
    peaks.kernels.reach[loops] = reached.get(&(loops, Precision::F32)).map_or(typical, |(found, _)| *found);
    for (kind, seen) in groups(&peaks, steps)?.into_iter().filter(|((archetype, _), _)| *archetype != loops) {
        reached.insert(kind, reach(&seen)?);
    }
    let mut kernels = Kernels::typical();
    let (mut all, mut most) = ([0.0; 2], [0.0; crate::hardware::ARCHETYPES.len()]);
    for ((archetype, precision), (found, [squares, weight])) in reached {
        all = [all[0] + squares, all[1] + weight];
        kernels.own.push((archetype, precision, found));
        // What multiplies in other types has the numbers of those that were seen most.
        if weight > most[archetype] {
            (kernels.reach[archetype], most[archetype]) = (found, weight);
        }
    }
    if hardware.kind != "cpu" {
        kernels.step = rest(steps);
    }
    kernels.residual = Some((all[0] / all[1].max(f64::MIN_POSITIVE)).sqrt());
    Ok(Hardware { kernels, ..hardware.clone() })
}
