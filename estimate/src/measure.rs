//! This machine as hardware. In: a device, and its peaks of arithmetic and of reading memory. Out: hardware with these numbers, and with what
//! is measured here: the bytes per second that caches give, and what starting its threads takes.

use crate::hardware::{Hardware, Kernels, Precision};
use astrai_runtime::Device;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// Bytes that a thread reads again and again, and how often in a try.
const BLOCK: usize = 256 << 10;
const TURNS: usize = 64;
/// Tries, of which the fastest counts.
const TRIES: usize = 40;

/// Seconds of the fastest of some tries.
fn best(mut work: impl FnMut()) -> f64 {
    let mut timed = |_| {
        let started = Instant::now();
        work();
        started.elapsed().as_secs_f64()
    };
    (0..TRIES).map(&mut timed).fold(f64::INFINITY, f64::min)
}

/// The hardware of a device whose peaks were measured: operations per second by type, bytes per second read from memory.
pub fn hardware(device: &dyn Device, compute: Vec<(Precision, f64)>, reading: f64) -> Hardware {
    let target = device.backend().target();
    let threads = device.threads().max(1);
    let block = vec![1u64; BLOCK / 8];
    let sum = || {
        let eight = |s: [u64; 8], x: &[u64; 8]| std::array::from_fn(|i| s[i].wrapping_add(x[i]));
        black_box(black_box(&block[..]).as_chunks::<8>().0.iter().fold([0u64; 8], eight))
    };
    let seconds =
        best(|| device.share(threads, &|_, some| some.for_each(|_| (0..TURNS).for_each(|_| _ = sum()))));
    let cache = (BLOCK * TURNS * threads) as f64 / seconds;
    let launch = best(|| device.share(threads, &|_, some| some.for_each(|i| _ = black_box(i))));
    Hardware {
        name: target.name.clone(),
        kind: "cpu".into(),
        units: target.units,
        memory: device.available() as f64,
        bandwidth: reading,
        cache: caches().map(|bytes| (bytes, cache.max(reading))),
        compute,
        launch,
        links: vec![],
        power: None,
        price: None,
        kernels: Kernels::typical(),
        sources: vec!["measured by `astrai estimate --measure`".into()],
    }
}

/// Bytes of the greatest cache that the system tells of.
fn caches() -> Option<f64> {
    let size = |i: usize| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size");
        let text = std::fs::read_to_string(Path::new(&path)).ok()?;
        text.trim().strip_suffix('K')?.parse::<f64>().ok().map(|k| k * 1024.0)
    };
    (0..8).filter_map(size).reduce(f64::max)
}
