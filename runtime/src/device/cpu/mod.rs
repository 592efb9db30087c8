//! The processor as a device. In: kernels in C. Out: functions of shared objects, run by a pool of threads on pages of this process.

mod compiler;
pub mod exchange;
pub mod isa;
pub mod peaks;
mod pool;
pub mod product;
mod record;
pub mod speeds;

pub use astrai_codegen::cpu::Isa;
pub use compiler::Compiler;
pub use isa::{host_isa, host_levels, modelled_levels};
pub use pool::Pool;

use super::{Device, Executable, InProcess, KernelCache, Launch, Recording, Threads, available_memory};
use crate::Error;
use astrai_codegen::cpu::Cpu as Kernels;
use astrai_ir::{Backend, Kernel, Target};
use compiler::Loaded;
use record::{Calls, Recorder};
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
            let code = Arc::new(Code { kernel: (*k).clone(), loaded });
            let made = Arc::new(CpuKernel { code, pool: self.pool.clone() });
            known.insert(k.identity.clone(), Arc::downgrade(&made));
            held.insert(&k.identity, made);
        }
        known.retain(|_, made| made.strong_count() > 0);
        let all = kernels.iter().filter_map(|k| held.get(&*k.identity));
        Ok(all.map(|made| made.clone() as Arc<dyn Executable>).collect())
    }

    fn records(&self) -> bool {
        true
    }

    fn resizes(&self) -> bool {
        true
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), Error>,
        timed: bool,
    ) -> Result<Option<Box<dyn Recording>>, Error> {
        // Threads that go through calls by themselves are not timed between them.
        if timed { Ok(None) } else { Recorder::record(launches, &self.pool).map(Some) }
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
struct Code {
    kernel: Kernel,
    loaded: Loaded,
}

/// A kernel with the threads that run it.
struct CpuKernel {
    code: Arc<Code>,
    pool: Arc<Pool>,
}

impl Executable for CpuKernel {
    fn launch(&self, launch: &Launch) -> Result<(), Error> {
        if Recorder::add(&self.code, launch) {
            return Ok(());
        }
        Calls::launch(&self.code, launch, &self.pool)
    }
}
