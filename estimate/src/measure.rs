//! This machine as hardware. In: a device. Out: hardware with its peaks of arithmetic, the bytes per second that it reads of so many, and
//! what starting its threads takes, all measured.

use crate::hardware::{Hardware, Kernels, Precision};
use astrai_engine::machine::{Peaks, exchange};
use astrai_runtime::Device;
use astrai_runtime::device::process_memory;
use std::hint::black_box;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Tries, of which the fastest counts.
const TRIES: usize = 200;
/// Rounds of measuring, and the time between two: where a hypervisor moves the cores, one round says nothing.
const ROUNDS: usize = 5;
const APART: Duration = Duration::from_secs(1);

/// Of one round: operations per second of vectors, of the unit for bf16, of f32 in pieces; bytes read again and again with bytes per second,
/// the greatest from memory; seconds of starting the threads; bytes per second that cores exchange.
type Round = ([Option<f64>; 3], Vec<(f64, f64)>, f64, Option<f64>);

/// This machine: arithmetic of the fastest round, reading and starting of the one whose reading from memory lies in the middle. `None` where
/// its peaks cannot be measured.
pub fn here(device: &dyn Device) -> Option<Hardware> {
    let mut rounds: Vec<Round> = Vec::new();
    for i in 0..ROUNDS {
        if i > 0 {
            sleep(APART);
        }
        rounds.push((
            Peaks::arithmetic_of(device)?,
            Peaks::levels(device)?,
            launch(device),
            exchange(device),
        ));
    }
    let fastest = |i: usize| rounds.iter().filter_map(|(peaks, ..)| peaks[i]).reduce(f64::max);
    let [vector, matrix, pieces] = [0, 1, 2].map(fastest);
    let rows =
        [(Precision::F32, vector), (Precision::F32Pieces, pieces), (Precision::Bf16, matrix.or(vector))];
    let compute = rows.into_iter().filter_map(|(p, rate)| Some((p, rate?))).collect();
    let memory = |(_, levels, ..): &Round| levels.last().map_or(0.0, |(_, rate)| *rate);
    rounds.sort_by(|a, b| memory(a).total_cmp(&memory(b)));
    let (_, mut caches, launch, exchange) = rounds.swap_remove(ROUNDS / 2);
    let target = device.backend().target();
    let bandwidth = caches.pop().map_or(target.bandwidth, |(_, rate)| rate);
    Some(Hardware {
        name: target.name.clone(),
        kind: "cpu".into(),
        units: target.units,
        memory: device.available() as f64,
        process: process_memory().map_or(0.0, |[now, _]| now as f64),
        bandwidth,
        caches,
        exchange,
        faster: 1.0,
        compute,
        launch,
        links: vec![],
        power: None,
        price: None,
        kernels: Kernels::typical(),
        sources: vec!["measured by `astrai estimate --measure`".into()],
    })
}

/// Seconds of starting all threads, at best.
fn launch(device: &dyn Device) -> f64 {
    let threads = device.threads().max(1);
    let start = |_| {
        let started = Instant::now();
        device.share(threads, &|_, some| some.for_each(|i| _ = black_box(i)));
        started.elapsed().as_secs_f64()
    };
    (0..TRIES).map(start).fold(f64::INFINITY, f64::min)
}
