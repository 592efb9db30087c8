//! The machine a command runs on, from the common flags: a device and what its user should know.

use astrai_codegen::cpu::Cpu as CpuKernels;
use astrai_codegen::cuda::Cuda as CudaKernels;
use astrai_ir::{Backend, Target};
use astrai_runtime::device::cpu::{Compiler, Cpu, Isa, host_isa};
// What is measured of a machine.
pub use astrai_runtime::device::cpu::exchange::exchange;
pub use astrai_runtime::device::cpu::peaks::Peaks;
pub use astrai_runtime::device::cpu::product::product;
pub use astrai_runtime::device::cpu::speeds::{Speedometer, Speeds, median};
use astrai_runtime::device::cuda::{self, Cuda, Nvrtc};
use astrai_runtime::device::null::Null;
use astrai_runtime::device::reference::Reference;
use astrai_runtime::device::{KernelCache, available_memory};
use astrai_runtime::{Device, Error};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Kinds of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Kernels in C on this machine's processor.
    Cpu,
    /// Kernels on the CUDA device of this number.
    Cuda(usize),
    /// The reference interpreter.
    Interpreter,
    /// Nothing: programs are planned and their kernels written, but never built or run.
    Null,
}

/// A device, and how it was come by.
pub struct Machine {
    /// What runs programs.
    pub device: Arc<dyn Device>,
    /// The processor, where kernels run on it.
    pub cpu: Option<Arc<Cpu>>,
    /// What the user should know, one line each.
    pub warnings: Vec<String>,
}

/// What programs are said to cost: of the target that a device's kernels are made for, one with these peaks.
pub type Costs<'a> = &'a dyn Fn(&Target) -> Target;

impl Machine {
    /// The machine for a kind of device and a number of threads (0: all cores), with all that its processor has. Without a C
    /// compiler the interpreter stands in.
    ///
    /// # Errors
    /// Threads do not start, the cache's folder cannot be used.
    pub fn new(kind: Kind, threads: usize) -> Result<Machine, Error> {
        Machine::with(kind, threads, host_isa(), &Target::clone)
    }

    /// The same with these vector instructions, which kernels can only run with if the processor has them, and these costs.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(kind: Kind, threads: usize, isa: Isa, costs: Costs) -> Result<Machine, Error> {
        let folders = || std::env::var_os("PATH").map(|p| std::env::split_paths(&p).collect::<Vec<_>>());
        let mut warnings = Vec::new();
        if let Kind::Cuda(ordinal) = kind {
            let (cache, warning) = cache()?;
            let cuda = Cuda::open(ordinal, threads, nvrtc()?, cache)?;
            let target = costs(cuda.backend().target());
            let device = Arc::new(cuda.with_target(target));
            return Ok(Machine { warnings: warning.into_iter().collect(), ..Machine::over(device) });
        }
        let device: Arc<dyn Device> = match (kind, Compiler::find(&folders().unwrap_or_default())) {
            (Kind::Cpu, Some(cc)) => {
                let (cache, warning) = cache()?;
                let cpu = Cpu::new(isa, threads, cc, cache)?;
                let cpu = cpu.with_target(costs(cpu.backend().target()));
                return Ok(Machine { warnings: warning.into_iter().collect(), ..Machine::on(cpu) });
            }
            (Kind::Null, _) => return Ok(Machine::planner(Kind::Cpu, threads, isa, costs)),
            (kind, _) => {
                if kind == Kind::Cpu {
                    let slow =
                        "no C compiler (cc, gcc, clang) in PATH: the interpreter runs the model, slowly";
                    warnings.push(slow.to_string());
                }
                Arc::new(Reference::default())
            }
        };
        Ok(Machine { warnings, ..Machine::over(device) })
    }

    /// A machine that plans for a kind of device and runs nothing: the processor with these instructions, or a CUDA device, which need
    /// not be here; at these costs.
    pub fn planner(kind: Kind, threads: usize, isa: Isa, costs: Costs) -> Machine {
        if let Kind::Cuda(ordinal) = kind {
            let (target, absent) = match cuda::target(ordinal) {
                Ok(target) => (costs(&target), None),
                Err(why) => (costs(&cuda::nominal()), Some(why)),
            };
            let warning = absent.map(|why| format!("{why}: planned for {}", target.name));
            let machine = Machine::nothing(CudaKernels::new(target));
            return Machine { warnings: warning.into_iter().collect(), ..machine };
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads };
        let kernels = CpuKernels::new(isa, threads as u32, available_memory());
        Machine::nothing(CpuKernels::with(costs(kernels.target())))
    }

    /// A machine that plans for hardware of these costs, whatever is here, and runs nothing: a processor with the instructions of this one,
    /// or a GPU, with the kernels of an H100.
    pub fn elsewhere(processor: bool, costs: Costs) -> Machine {
        match processor {
            true => Machine::planner(Kind::Cpu, 1, host_isa(), costs),
            false => Machine::nothing(CudaKernels::new(costs(&cuda::nominal()))),
        }
    }

    /// A machine for these kernels, none of which is ever run.
    fn nothing(kernels: impl Backend + 'static) -> Machine {
        Machine::over(Arc::new(Null::new(Box::new(kernels))))
    }

    /// Any device.
    pub fn over(device: Arc<dyn Device>) -> Machine {
        Machine { device, cpu: None, warnings: vec![] }
    }

    /// This processor.
    pub fn on(cpu: Cpu) -> Machine {
        let cpu = Arc::new(cpu);
        Machine { device: cpu.clone(), cpu: Some(cpu), warnings: vec![] }
    }

    /// What programs are compiled for.
    pub fn backend(&self) -> &dyn Backend {
        self.device.backend()
    }

    /// Vector instructions of its kernels, by name.
    pub fn isa(&self) -> &str {
        &self.backend().target().isa
    }
}

/// NVIDIA's run-time compiler: the file or folder that `$ASTRAI_NVRTC` names, what the loader finds, or that of a toolkit in `$CUDA_HOME`,
/// `$CUDA_PATH` or `/usr/local/cuda`; with the further options of `$ASTRAI_NVRTC_FLAGS`.
///
/// # Errors
/// There is none, or it cannot be loaded; the options are no text.
pub fn nvrtc() -> Result<Nvrtc, Error> {
    let flags = std::env::var_os("ASTRAI_NVRTC_FLAGS").unwrap_or_default();
    let flags = flags.to_str().ok_or_else(|| Error::Input("ASTRAI_NVRTC_FLAGS is no UTF-8".into()))?;
    installed().map(|nvrtc| nvrtc.with(flags))
}

fn installed() -> Result<Nvrtc, Error> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(named) = var("ASTRAI_NVRTC") {
        let inside =
            || Nvrtc::find(std::slice::from_ref(&named)).unwrap_or_else(|| named.join("libnvrtc.so"));
        return Nvrtc::open(&if named.is_dir() { inside() } else { named.clone() });
    }
    Nvrtc::system().or_else(|none| {
        let toolkits = [var("CUDA_HOME"), var("CUDA_PATH"), Some("/usr/local/cuda".into())];
        let folders: Vec<_> = toolkits.into_iter().flatten().map(|p| p.join("lib64")).collect();
        match (Nvrtc::find(&folders), none) {
            (Some(file), _) => Nvrtc::open(&file),
            (None, Error::Library { library, program, message }) => {
                let remedy = "install nvidia-cuda-nvrtc of PyPI, say, and name its folder in ASTRAI_NVRTC";
                Err(Error::Library { library, program, message: format!("{message}; {remedy}") })
            }
            (None, other) => Err(other),
        }
    })
}

/// Compiled kernels in `$ASTRAI_CACHE`, `$XDG_CACHE_HOME/astrai` or `~/.cache/astrai`; where none is named, or the last two cannot
/// be used, in a folder for this process alone, with a line for the user.
///
/// # Errors
/// The folder that `$ASTRAI_CACHE` names, or that of temporary files, cannot be used.
pub fn cache() -> Result<(KernelCache, Option<String>), Error> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    };
    if let Some(folder) = var("ASTRAI_CACHE").map(|p| p.join("kernels")) {
        return Ok((KernelCache::open(&folder).map_err(failed(&folder))?, None));
    }
    let folder = var("XDG_CACHE_HOME")
        .map(|p| p.join("astrai"))
        .or_else(|| var("HOME").map(|p| p.join(".cache").join("astrai")))
        .map(|p| p.join("kernels"));
    let why = match folder.map(|folder| (KernelCache::open(&folder), folder)) {
        Some((Ok(cache), _)) => return Ok((cache, None)),
        Some((Err(e), folder)) => format!("{}: {e}", folder.display()),
        None => "no cache folder is named (HOME, XDG_CACHE_HOME)".to_string(),
    };
    let cache = KernelCache::temporary().map_err(failed(&std::env::temp_dir()))?;
    Ok((
        cache,
        Some(format!("{why}; kernels are compiled for this run alone, set ASTRAI_CACHE to keep them")),
    ))
}
