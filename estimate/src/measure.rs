//! This machine as hardware. In: a device. Out: of a processor its peaks of arithmetic, the bytes per second that it reads of so many, and
//! what starting its threads takes, all measured; of a device beside it the peaks that its attributes say, and what a small kernel takes.

use crate::Refused;
use crate::hardware::{Hardware, Kernels, Precision};
use astrai_engine::machine::{Peaks, exchange, median, product};
use astrai_ir::ops::ReduceKind;
use astrai_ir::{DType, Dim, Graph};
use astrai_runtime::device::process_memory;
use astrai_runtime::{Device, Options, Session, Value, compile};
use std::collections::HashMap;
use std::hint::spin_loop;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{available_parallelism, sleep};
use std::time::{Duration, Instant};

/// Tries, of which the fastest counts.
const TRIES: usize = 200;
/// Longest that a thread waits for the others: one of them may have lost its core to another process.
const LONGEST_START: Duration = Duration::from_millis(1);
/// Rounds of measuring, and the time between two: where a hypervisor moves the cores, one round says nothing.
const ROUNDS: usize = 5;
const APART: Duration = Duration::from_secs(1);
/// Least speed of a cache beside that of memory. One that is hardly faster is shared or too small: a loop that only reads finds part of what it
/// touched there, half of it in a cache half as large, a program little.
const CACHE: f64 = 1.75;

/// Of one round: operations per second of vectors, of the unit for bf16, of f32 in pieces; bytes read again and again with bytes per second,
/// the greatest from memory; seconds of starting the threads; bytes per second that cores exchange, and operations per second of small products.
type Round = ([Option<f64>; 3], Vec<(f64, f64)>, f64, [Option<f64>; 2]);

/// The device as hardware.
///
/// # Errors
/// Its peaks cannot be measured, or it fails; one line.
pub fn here(device: &Arc<dyn Device>) -> Result<Hardware, Refused> {
    match processor(&**device) {
        Some(found) => Ok(found),
        None if apart(&**device) => accelerator(device).map_err(|e| e.to_string()),
        None => Err("the peaks of this device cannot be measured; give --hardware FILE".into()),
    }
}

/// Rounds of two small kernels in the programs whose times are compared.
pub const CHAIN: [usize; 2] = [2, 34];

/// Whether a device has memory that this process does not see.
fn apart(device: &dyn Device) -> bool {
    device.alloc(&[1]).is_ok_and(|blocks| device.host(blocks[0].at()).is_none())
}

/// A device beside the processor.
fn accelerator(device: &Arc<dyn Device>) -> Result<Hardware, astrai_runtime::Error> {
    let target = device.backend().target();
    let [short, long] = [chain(device, CHAIN[0])?, chain(device, CHAIN[1])?];
    let row = |(dtype, peak): &(DType, f64)| (Precision::of(*dtype), *peak);
    Ok(Hardware {
        name: target.name.clone(),
        kind: "gpu".into(),
        units: target.units,
        memory: target.memory as f64,
        process: 0.0,
        bandwidth: target.bandwidth,
        caches: vec![],
        exchange: None,
        product: None,
        faster: 1.0,
        compute: target.flops.iter().map(row).collect(),
        launch: (long - short).max(0.0) / (2 * (CHAIN[1] - CHAIN[0])) as f64,
        links: vec![],
        power: None,
        price: None,
        kernels: Kernels::typical(),
        sources: vec![
            "peaks by the attributes of the device; a small kernel measured by `astrai devices --measure`"
                .into(),
        ],
    })
}

/// Seconds of a run of so many rounds of two small kernels, at best: a sum along columns keeps rounds from merging.
///
/// # Errors
/// The device fails.
pub fn chain(device: &Arc<dyn Device>, rounds: usize) -> Result<f64, astrai_runtime::Error> {
    let side = 32;
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, vec![Dim::from(side), Dim::from(side)])?;
    let mut y = x;
    for _ in 0..rounds {
        let sums = g.reduce(ReduceKind::Sum, y, &[0])?;
        y = g.add(y, sums)?;
    }
    g.set_output("y", y)?;
    let program = Arc::new(compile(&g, device.backend(), &Options::default())?);
    let mut session = Session::new(program, &HashMap::<String, Value>::new(), device, &mut |_, _| {})?;
    let ones = Value::f32(&[side, side], &vec![1.0; side * side]);
    let mut least = f64::INFINITY;
    for _ in 0..TRIES {
        let started = Instant::now();
        session.execute_rows(&[("x", &ones)], Some(&|_| false))?;
        least = least.min(started.elapsed().as_secs_f64());
    }
    Ok(least)
}

/// A processor: arithmetic and small products of the fastest round, the rest of the one whose reading from memory lies in the middle. `None` where
/// its peaks cannot be measured.
fn processor(device: &dyn Device) -> Option<Hardware> {
    let mut rounds: Vec<Round> = Vec::new();
    for i in 0..ROUNDS {
        if i > 0 {
            sleep(APART);
        }
        rounds.push((
            Peaks::arithmetic_of(device)?,
            Peaks::levels(device)?,
            launch(device),
            [exchange(device), product(device)],
        ));
    }
    let fastest = |of: &dyn Fn(&Round) -> Option<f64>| rounds.iter().filter_map(of).reduce(f64::max);
    let [vector, matrix, pieces] = [0, 1, 2].map(|i| fastest(&|(peaks, ..)| peaks[i]));
    let product = fastest(&|(.., [_, product])| *product);
    let rows =
        [(Precision::F32, vector), (Precision::F32Pieces, pieces), (Precision::Bf16, matrix.or(vector))];
    let compute = rows.into_iter().filter_map(|(p, rate)| Some((p, rate?))).collect();
    let memory = |(_, levels, ..): &Round| levels.last().map_or(0.0, |(_, rate)| *rate);
    rounds.sort_by(|a, b| memory(a).total_cmp(&memory(b)));
    let caches = caches(&rounds.iter().map(|(_, levels, ..)| &levels[..]).collect::<Vec<_>>());
    let (_, levels, launch, [exchange, _]) = rounds.swap_remove(ROUNDS / 2);
    let target = device.backend().target();
    let bandwidth = levels.last().map_or(target.bandwidth, |(_, rate)| *rate);
    Some(Hardware {
        name: target.name.clone(),
        kind: "cpu".into(),
        units: target.units,
        memory: device.available() as f64,
        process: process_memory().map_or(0.0, |[now, _]| now as f64),
        bandwidth,
        caches,
        exchange,
        product,
        faster: 1.0,
        compute,
        launch,
        links: vec![],
        power: None,
        price: None,
        kernels: Kernels::typical(),
        sources: vec!["measured by `astrai devices --measure`".into()],
    })
}

/// Caches with the speed of each, of rounds that read as many bytes of each size, the greatest from memory. Each is held against the memory of its own round, and
/// what most rounds say counts: in some the cores were moved between one size and the next.
fn caches(rounds: &[&[(f64, f64)]]) -> Vec<(f64, f64)> {
    let Some([sizes @ .., _]) = rounds.first() else { return vec![] };
    let of = |i: usize, much: fn(f64, f64) -> f64| {
        let one = |levels: &&[(f64, f64)]| Some(much(levels.get(i)?.1, levels.last()?.1));
        median(rounds.iter().filter_map(one))
    };
    let fast = |i: usize| of(i, |rate, memory| rate / memory).is_some_and(|part| part > CACHE);
    let rows = sizes.iter().enumerate().filter(|(i, _)| fast(*i));
    rows.filter_map(|(i, (size, _))| Some((*size, of(i, |rate, _| rate)?))).collect()
}

/// Seconds of a run that as many threads as there are cores take part in, in the middle of many: each waits in its unit for the others, or one would take
/// the units of all.
fn launch(device: &dyn Device) -> f64 {
    // More threads than cores are never all there at once.
    let cores = available_parallelism().map_or(1, NonZero::get);
    let threads = device.threads().clamp(1, cores);
    let start = |_| {
        let (there, started) = (AtomicUsize::new(0), Instant::now());
        let meet = |_| {
            there.fetch_add(1, Ordering::AcqRel);
            while there.load(Ordering::Acquire) < threads && started.elapsed() < LONGEST_START {
                spin_loop();
            }
        };
        device.share(threads, &|_, some| some.for_each(meet));
        started.elapsed().as_secs_f64()
    };
    median((0..TRIES).map(start)).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cores whose memory reads 35 GB/s together and 60 apart, moved in the midst of the third round, which has a memory in the middle of all, and of the fourth.
    #[test]
    fn a_cache_is_fast_beside_the_memory_of_its_round() {
        let round = |far: [bool; 2]| {
            let [large, memory] = far.map(|far| if far { 60e9 } else { 35e9 });
            vec![(16e6, 190e9), (67e6, 1.2 * large), (268e6, memory)]
        };
        let rounds = [[false; 2], [false; 2], [true, false], [false, true], [true; 2]].map(round);
        let found = caches(&rounds.each_ref().map(|levels| &levels[..]));
        assert_eq!(found, [(16e6, 190e9)]);
        assert_eq!(caches(&[]), []);
    }
}
