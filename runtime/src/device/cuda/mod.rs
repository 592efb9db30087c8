//! CUDA devices. In: kernels as CUDA C++, bytes, launches. Out: memory of a GPU and runs on it. Driver and compiler (NVRTC) are NVIDIA's
//! libraries, loaded when they are first asked for, so that everything else works where they are absent.

mod driver;
mod hot;
mod launch;
mod memory;
mod nvrtc;
mod programs;
mod target;

pub use hot::hot_loop;
pub use nvrtc::{Cubin, Nvrtc, Usage};
pub use programs::{architecture, compile};
pub use target::{Found, devices, nominal, resident, target};

use super::cpu::Pool;
use super::{Block, Device, Executable, KernelCache, MemoryUse, Pointer, Recording, Space, Threads};
use crate::Error;
use astrai_codegen::cuda::Cuda as Kernels;
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, Kernel, Target};
use cudarc::driver::sys::{CUfunction_attribute, CUresult};
use cudarc::driver::{CudaModule, DriverError};
use cudarc::nvrtc::Ptx;
use driver::{Driver, Numbered, lock, words};
use launch::{Loaded, Phase};
use memory::Memory;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

/// Bytes of shared memory that a block has without asking.
const UNASKED: usize = 48 << 10;

/// A CUDA device, its compiler, and the kernels that it has loaded.
pub struct Cuda {
    backend: Kernels,
    driver: Arc<Driver>,
    memory: Arc<Memory>,
    /// Threads of the processor: they sample, and lay out weights.
    pool: Pool,
    nvrtc: Nvrtc,
    arch: String,
    cache: KernelCache,
    loaded: Mutex<HashMap<String, Weak<Loaded>>>,
}

impl Cuda {
    /// The device of this number, with so many threads of the processor beside it (0: all cores), what compiles its kernels, and the
    /// folder where they are kept.
    ///
    /// # Errors
    /// There is no driver, no such device, or NVRTC does not compile for it; threads do not start.
    pub fn open(ordinal: usize, threads: usize, nvrtc: Nvrtc, cache: KernelCache) -> Result<Cuda, Error> {
        let pool = Pool::new(threads).map_err(|source| Error::Io { path: "threads".into(), source })?;
        let numbered = Numbered::of(ordinal).map_err(|e| match e {
            Error::Device { device, message } => {
                Error::Device { device, message: format!("{message}; use --device cpu") }
            }
            other => other,
        })?;
        let target = target::of(&numbered)?;
        let arch = architecture(&nvrtc, &target.isa)?;
        let driver = Arc::new(Driver::open(&numbered)?);
        let memory = Arc::new(Memory::new(driver.clone()));
        let backend = Kernels::new(target);
        Ok(Cuda { backend, driver, memory, pool, nvrtc, arch, cache, loaded: Mutex::default() })
    }

    /// The same device with other costs: peaks that were measured, or those of another machine.
    pub fn with_target(self, target: Target) -> Cuda {
        Cuda { backend: Kernels::new(target), ..self }
    }

    /// The driver's module of a program: its cubin, or the PTX beside it where the driver cannot run the cubin.
    fn module(&self, kernel: &Kernel, made: Cubin) -> Result<Arc<CudaModule>, Error> {
        let (major, minor) = self.nvrtc.version();
        let refused = |e: DriverError| {
            let line = format!("loading kernel {} of NVRTC {major}.{minor}: {}", kernel.identity, words(e));
            self.driver.error(format!("{line}; a newer driver or an older NVRTC may help"))
        };
        if !made.image.is_empty() {
            match self.driver.context.load_module(Ptx::from_binary(made.image)) {
                // An older driver may not know the format of a newer compiler either.
                Err(DriverError(
                    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_IMAGE,
                )) => {}
                found => return found.map_err(refused),
            }
        }
        self.driver.context.load_module(Ptx::from_src(made.ptx)).map_err(refused)
    }

    fn functions(&self, kernel: &Kernel, made: Cubin) -> Result<Loaded, Error> {
        let module = self.module(kernel, made)?;
        let one = |entry: &astrai_ir::kernel::Entry| {
            let Grid::Units(blocks) = &entry.grid else {
                let message = "a grid that the kernel counts itself has no launch here".into();
                return Err(Error::Codegen { origin: kernel.identity.clone(), message });
            };
            let function = self.driver.check("looking for a kernel", module.load_function(&entry.symbol))?;
            // More shared memory than any device gives unasked.
            if let Some(bytes) = entry.shared.size().filter(|n| *n > UNASKED) {
                let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                self.driver.check("asking for shared memory", function.set_attribute(most, bytes as i32))?;
            }
            Ok(Phase { function, blocks: blocks.clone(), block: entry.block, shared: entry.shared.clone() })
        };
        let phases = kernel.entries.iter().map(one).collect::<Result<_, Error>>()?;
        let (driver, name) = (self.driver.clone(), kernel.identity.as_str().into());
        Ok(Loaded {
            driver,
            name,
            phases,
            workspace: kernel.workspace.clone(),
            rounds: kernel.rounds.clone(),
        })
    }
}

impl Threads for Cuda {
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn share(&self, units: usize, body: &(dyn Fn(usize, Range<usize>) + Sync)) {
        self.pool.run(units, body);
    }
}

impl Space for Cuda {
    fn available(&self) -> u64 {
        self.memory.available()
    }

    fn alloc(&self, lens: &[usize]) -> Result<Vec<Block>, Error> {
        self.memory.alloc(lens)
    }

    fn host(&self, _: Pointer) -> Option<*mut u8> {
        None
    }

    fn import(&self, _: &[u8]) -> Option<Pointer> {
        None
    }

    fn read(&self, at: Pointer, to: &mut [u8]) -> Result<(), Error> {
        self.memory.read(at, to)
    }

    fn write(&self, at: Pointer, from: &[u8]) -> Result<(), Error> {
        self.memory.write(at, from)
    }

    fn copy(&self, from: Pointer, to: Pointer, len: usize) -> Result<(), Error> {
        self.memory.copy(from, to, len)
    }

    fn fill(&self, at: Pointer, len: usize, f: &mut dyn FnMut(&mut [u8])) -> Result<(), Error> {
        self.memory.fill(at, len, f)
    }
}

impl Device for Cuda {
    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn identity(&self) -> String {
        let (major, minor) = self.nvrtc.version();
        let identity = format!("{} {} NVRTC {major}.{minor}", self.backend.target().name, self.arch);
        [&[identity], self.nvrtc.options()].concat().join(" ")
    }

    fn load(&self, kernels: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error> {
        self.driver.bind()?;
        let mut known = lock(&self.loaded);
        let mut held: HashMap<&str, Arc<Loaded>> = HashMap::new();
        for k in kernels {
            held.extend(known.get(&k.identity).and_then(Weak::upgrade).map(|made| (&*k.identity, made)));
        }
        // Regions that differ in what the reader sees alone share a kernel.
        let mut seen = HashSet::new();
        let missing = |k: &&Kernel| !held.contains_key(&*k.identity) && seen.insert(k.identity.clone());
        let fresh: Vec<&Kernel> = kernels.iter().copied().filter(missing).collect();
        let built = compile(&self.nvrtc, Some(&self.cache), &self.backend, &fresh, &self.arch)?;
        for (k, made) in fresh.iter().zip(built) {
            let made = Arc::new(self.functions(k, made)?);
            known.insert(k.identity.clone(), Arc::downgrade(&made));
            held.insert(&k.identity, made);
        }
        known.retain(|_, made| made.strong_count() > 0);
        let all = kernels.iter().filter_map(|k| held.get(&*k.identity));
        Ok(all.map(|made| made.clone() as Arc<dyn Executable>).collect())
    }

    fn synchronise(&self) -> Result<(), Error> {
        self.driver.wait()
    }

    fn records(&self) -> bool {
        true
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), Error>,
        timed: bool,
    ) -> Result<Option<Box<dyn Recording>>, Error> {
        launch::record(&self.driver, launches, timed)
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        Some(self.memory.figures())
    }
}
