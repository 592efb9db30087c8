//! This machine as hardware. In: a device, its peaks of arithmetic, and the bytes per second that it reads of so many. Out: hardware with
//! these numbers, and with what starting its threads takes, which is measured here.

use crate::hardware::{Hardware, Kernels, Precision};
use astrai_runtime::Device;
use astrai_runtime::device::process_memory;
use std::hint::black_box;
use std::time::Instant;

/// Tries, of which the fastest counts.
const TRIES: usize = 200;

/// The hardware of a device whose peaks were measured: operations per second by type; bytes that are read again and again, with bytes per
/// second, the greatest from memory.
pub fn hardware(
    device: &dyn Device,
    compute: Vec<(Precision, f64)>,
    mut caches: Vec<(f64, f64)>,
) -> Hardware {
    let target = device.backend().target();
    let threads = device.threads().max(1);
    let start = |_| {
        let started = Instant::now();
        device.share(threads, &|_, some| some.for_each(|i| _ = black_box(i)));
        started.elapsed().as_secs_f64()
    };
    let launch = (0..TRIES).map(start).fold(f64::INFINITY, f64::min);
    let bandwidth = caches.pop().map_or(target.bandwidth, |(_, rate)| rate);
    Hardware {
        name: target.name.clone(),
        kind: "cpu".into(),
        units: target.units,
        memory: device.available() as f64,
        process: process_memory().map_or(0.0, |[now, _]| now as f64),
        bandwidth,
        caches,
        compute,
        launch,
        links: vec![],
        power: None,
        price: None,
        kernels: Kernels::typical(),
        sources: vec!["measured by `astrai estimate --measure`".into()],
    }
}
