//! The processor as a device. In: kernels in C. Out: functions of shared objects, run by a pool of threads on pages of this process.

mod compiler;
pub mod exchange;
pub mod isa;
pub mod peaks;
mod pool;
pub mod product;
pub mod speeds;

pub use astrai_codegen::cpu::Isa;
pub use compiler::Compiler;
pub use isa::{host_isa, host_levels, modelled_levels};
pub use pool::Pool;

use super::{Device, Executable, InProcess, KernelCache, Launch, Pointer, Threads, available_memory};
use crate::Error;
use astrai_codegen::cpu::Cpu as Kernels;
use astrai_ir::{Backend, Kernel, Target};
use compiler::Loaded;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A processor, its compiler, and the kernels that it has loaded.
pub struct Cpu {
    backend: Kernels,
    isa: Isa,
    pool: Arc<Pool>,
    compiler: Compiler,
    cache: KernelCache,
    loaded: Mutex<HashMap<String, Weak<CpuKernel>>>,
}

/// The backend of these instructions, on this machine.
fn kernels(isa: Isa, threads: usize) -> Kernels {
    let backend = Kernels::new(isa, threads as u32, available_memory());
    let integer_dots = backend.target().integer_dots || isa::multiplies_integers(isa);
    Kernels::with(Target { integer_dots, ..backend.target().clone() })
}

impl Cpu {
    /// This machine's, with so many threads (0: all cores), kernels of these instructions.
    ///
    /// # Errors
    /// Threads do not start.
    pub fn new(isa: Isa, threads: usize, compiler: Compiler, cache: KernelCache) -> Result<Cpu, Error> {
        let io = |source| Error::Io { path: "threads".into(), source };
        let pool = Arc::new(Pool::new(threads).map_err(io)?);
        let backend = kernels(isa, pool.threads());
        Ok(Cpu { backend, isa, pool, compiler, cache, loaded: Mutex::default() })
    }

    /// The same processor, compiler, cache and threads with kernels of other instructions.
    pub fn with_isa(&self, isa: Isa) -> Cpu {
        let backend = kernels(isa, self.pool.threads());
        let (pool, compiler, cache) = (self.pool.clone(), self.compiler.clone(), self.cache.clone());
        Cpu { backend, isa, pool, compiler, cache, loaded: Mutex::default() }
    }

    /// The same processor, compiler, cache and threads, with other costs: peaks that were measured, or a model of another machine.
    pub fn with_target(&self, target: Target) -> Cpu {
        Cpu { backend: Kernels::with(target), ..self.with_isa(self.isa) }
    }

    /// The same processor, compiler and threads over another folder of compiled kernels.
    pub fn with_cache(&self, cache: KernelCache) -> Cpu {
        Cpu { cache, ..self.with_isa(self.isa) }
    }
}

impl InProcess for Cpu {}

impl Device for Cpu {
    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn identity(&self) -> String {
        format!("{} {}", self.compiler.identity(), self.isa.name())
    }

    fn cache(&self) -> Option<&KernelCache> {
        Some(&self.cache)
    }

    fn load(&self, kernels: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error> {
        let mut known = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held: HashMap<&str, Arc<CpuKernel>> = HashMap::new();
        for k in kernels {
            held.extend(known.get(&k.identity).and_then(Weak::upgrade).map(|made| (&*k.identity, made)));
        }
        // Regions that differ in what the reader sees alone share a kernel.
        let mut seen = HashSet::new();
        let missing = |k: &&Kernel| !held.contains_key(&*k.identity) && seen.insert(k.identity.clone());
        let fresh: Vec<&Kernel> = kernels.iter().copied().filter(missing).collect();
        let flags = isa::flags(self.isa);
        let built = self.cache.load(&self.compiler, &self.backend, &fresh, flags, self.pool.threads())?;
        for (k, loaded) in fresh.iter().zip(built) {
            let made = Arc::new(CpuKernel { kernel: (*k).clone(), loaded, pool: self.pool.clone() });
            known.insert(k.identity.clone(), Arc::downgrade(&made));
            held.insert(&k.identity, made);
        }
        known.retain(|_, made| made.strong_count() > 0);
        let all = kernels.iter().filter_map(|k| held.get(&*k.identity));
        Ok(all.map(|made| made.clone() as Arc<dyn Executable>).collect())
    }
}

impl Threads for Cpu {
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn share(&self, units: usize, body: &(dyn Fn(usize, Range<usize>) + Sync)) {
        self.pool.run(units, body);
    }
}

impl Threads for Pool {
    fn threads(&self) -> usize {
        Pool::threads(self)
    }

    fn share(&self, units: usize, body: &(dyn Fn(usize, Range<usize>) + Sync)) {
        self.run(units, body);
    }
}

/// A kernel as functions of a loaded object.
struct CpuKernel {
    kernel: Kernel,
    loaded: Loaded,
    pool: Arc<Pool>,
}

/// Sizes that kernels are given at most: symbols, the round, the threads.
const MOST_SIZES: usize = 32;

/// Addresses of a launch's buffers, shared by the pool's threads.
struct Addresses<'a>(&'a [Pointer]);

// SAFETY: kernels write disjoint parts of the buffers per unit; the addresses themselves are only read.
unsafe impl Sync for Addresses<'_> {}

impl Addresses<'_> {
    fn as_ptr(&self) -> *const *mut u8 {
        // A pointer of this device is an address of this process, of 64 bits.
        const { assert!(size_of::<Pointer>() == size_of::<*mut u8>()) };
        self.0.as_ptr().cast()
    }
}

impl Executable for CpuKernel {
    fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let size = |name: &str| launch.size(name);
        let value = |d: &astrai_ir::Dim| d.eval(&size).map_err(Error::Input);
        let (needs, rounds) = (value(&self.kernel.workspace)?, value(&self.kernel.rounds)?);
        let (name, room) = (&self.kernel.identity, launch.workspace.len());
        if needs > room as u64 || launch.sizes.len() + 2 > MOST_SIZES {
            let line = format!("kernel {name} wants {needs} bytes of workspace, planned were {room}");
            return Err(Error::Input(line));
        }
        // Behind the symbols the number of the round, and that of the threads.
        let mut sizes = [0i64; MOST_SIZES];
        sizes[..launch.sizes.len()].copy_from_slice(launch.sizes);
        sizes[launch.sizes.len() + 1] = self.pool.threads() as i64;
        let bufs = Addresses(launch.buffers);
        for round in 0..rounds {
            sizes[launch.sizes.len()] = round as i64;
            let sizes = &sizes;
            for phase in &self.loaded.phases {
                let units = match (&phase.units, phase.count) {
                    (Some(units), _) => value(units)?,
                    // SAFETY: the emitted function reads the sizes, of which all are there.
                    (None, Some(count)) => unsafe { count(sizes.as_ptr()) }.max(0) as u64,
                    (None, None) => 0,
                };
                self.pool.run(units as usize, &|_, range| {
                    let workspace = launch.workspace.at().0 as usize as *mut u8;
                    // SAFETY: buffers are as large as the region's types at these sizes (checked bounds of the plan); units
                    // are independent, so that ranges on different threads touch disjoint results.
                    unsafe {
                        let (begin, end) = (range.start as i64, range.end as i64);
                        (phase.run)(bufs.as_ptr(), sizes.as_ptr(), workspace, begin, end)
                    }
                });
            }
        }
        Ok(())
    }
}
