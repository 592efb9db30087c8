//! Kernels through NVRTC. In: kernels as CUDA C++, a compute capability. Out: for each a cubin for exactly this architecture, and the PTX
//! that it was made of for drivers that refuse the cubin; compiled on all cores, one program a kernel, and kept on disk by
//! (source, options, architecture, version of NVRTC, version of the emitter).

use super::nvrtc::{Cubin, Nvrtc, usage};
use crate::Error;
use crate::device::cache::{KernelCache, key};
use astrai_codegen::cuda::OPTIONS;
use astrai_ir::{Backend, Kernel};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Version of what the emitter writes around kernels; part of every cache key.
const EMITTER: &str = "1";

/// The architecture to compile for on a device of this one, `sm_90` say: its own with all its instructions, or, where NVRTC is older than
/// the device, the newest that it knows as PTX, which the driver compiles.
///
/// # Errors
/// The device is older than what NVRTC compiles for, or this is no architecture of CUDA.
pub fn architecture(nvrtc: &Nvrtc, isa: &str) -> Result<String, Error> {
    let capability: Option<u32> = isa.strip_prefix("sm_").and_then(|n| n.parse().ok());
    let capability = capability.ok_or_else(|| Error::Input(format!("`{isa}` is no architecture of CUDA")))?;
    let known = nvrtc.architectures()?;
    if known.contains(&capability) {
        // Instructions of one architecture alone, which later ones do not have: wgmma of 90 among them.
        let own = if capability >= 90 { "a" } else { "" };
        return Ok(format!("sm_{capability}{own}"));
    }
    let older = known.iter().rev().find(|n| **n < capability);
    let ((major, minor), least) = (nvrtc.version(), known.first().copied().unwrap_or(0));
    older.map(|n| format!("compute_{n}")).ok_or_else(|| Error::Library {
        library: "NVRTC",
        program: isa.into(),
        message: format!("version {major}.{minor} compiles for sm_{least} and later; install an older one"),
    })
}

/// Compiles kernels for an architecture such as `sm_90a`; those that the cache has are read.
///
/// # Errors
/// What the compiler says; the cache's folder cannot be written.
pub fn compile(
    nvrtc: &Nvrtc,
    cache: Option<&KernelCache>,
    backend: &dyn Backend,
    kernels: &[&Kernel],
    arch: &str,
) -> Result<Vec<Cubin>, Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(kernels.len());
    each(threads, kernels.len(), |i| one(nvrtc, cache, kernels[i], &backend.unit(&[kernels[i]]), arch))
}

/// What `make` gives for each number below `count`, on so many threads. After an error no thread begins another.
fn each<T: Send>(
    threads: usize,
    count: usize,
    make: impl Fn(usize) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut made = vec![];
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return made;
            }
            let one = make(i);
            if one.is_err() {
                next.store(count, Ordering::Relaxed);
            }
            made.push((i, one));
        }
    };
    let mut all: Vec<(usize, Result<T, Error>)> = std::thread::scope(|s| {
        let jobs: Vec<_> = (0..threads).map(|_| s.spawn(work)).collect();
        let failed = |_| vec![(0, Err(Error::Input("a compiler thread failed".into())))];
        jobs.into_iter().flat_map(|job| job.join().unwrap_or_else(failed)).collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, one)| one).collect()
}

fn one(
    nvrtc: &Nvrtc,
    cache: Option<&KernelCache>,
    kernel: &Kernel,
    source: &str,
    arch: &str,
) -> Result<Cubin, Error> {
    let (major, minor) = nvrtc.version();
    let version = format!("{major}.{minor}");
    // The first comment is for the reader: kernels that differ in it alone are one kernel.
    let code = source.split_once("*/").map_or(source, |(_, code)| code);
    let (options, more) = (OPTIONS.join(" "), nvrtc.options().join(" "));
    let name = format!("{}.cubin", key(&[code, &options, &more, arch, &version, EMITTER]));
    if let Some(found) = cache.and_then(|c| c.whole(&name)).and_then(|bytes| unpack(&bytes)) {
        return Ok(found);
    }
    let made = nvrtc.cubin(&kernel.identity, source, arch, OPTIONS)?;
    if let Some(cache) = cache {
        let io = |source| Error::Io { path: cache.path().join(&name), source };
        cache.keep(&name, pack(&made)).map_err(io)?;
    }
    Ok(made)
}

/// Image, PTX and log, each behind its length.
fn pack(made: &Cubin) -> Vec<u8> {
    let parts = [made.image.as_slice(), made.ptx.as_bytes(), made.log.as_bytes()];
    parts.iter().flat_map(|p| (p.len() as u64).to_le_bytes().into_iter().chain(p.iter().copied())).collect()
}

fn unpack(bytes: &[u8]) -> Option<Cubin> {
    let mut rest = bytes;
    let mut part = || {
        let (len, after) = rest.split_first_chunk::<8>()?;
        let (part, after) = after.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        rest = after;
        Some(part.to_vec())
    };
    let (image, ptx, log) = (part()?, String::from_utf8(part()?).ok()?, String::from_utf8(part()?).ok()?);
    Some(Cubin { image, ptx, usage: usage(&log), log })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_an_error_nothing_more_is_made() {
        assert_eq!(each(3, 100, Ok).unwrap(), (0..100).collect::<Vec<_>>());
        assert!(each(0, 0, Ok).unwrap().is_empty());
        let made = AtomicUsize::new(0);
        let fails_at_three = |i: usize| {
            made.fetch_add(1, Ordering::Relaxed);
            if i == 3 { Err(Error::Input("the third".into())) } else { Ok(i) }
        };
        let error = each(1, 100, fails_at_three).unwrap_err();
        assert_eq!((error.to_string().contains("the third"), made.into_inner()), (true, 4));
    }

    #[test]
    fn what_was_packed_is_unpacked_and_what_was_cut_is_not() {
        let made =
            Cubin { image: vec![1, 2, 3], ptx: ".version 9.0".into(), usage: vec![], log: "said".into() };
        let bytes = pack(&made);
        let found = unpack(&bytes).unwrap();
        assert_eq!((found.image, found.ptx, found.log), (made.image, made.ptx, made.log));
        assert!((0..bytes.len()).all(|n| unpack(&bytes[..n]).is_none()));
    }
}
