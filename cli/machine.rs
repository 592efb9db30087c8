//! The machine a command runs on: threads, target, compiler and kernel cache, from the common flags.

use astrai_ir::{Simd, Target, TargetKind};
use astrai_runtime::pool::Pool;
use astrai_runtime::{Compiler, Device, Error, KernelCache, Tools, available_memory, host_simd};
use astrai_train::engine::Runner;
use std::path::PathBuf;
use std::sync::Arc;

/// Threads, target and tools.
pub struct Machine {
    /// What runs programs.
    pub device: Device,
    /// What they are made for.
    pub target: Target,
    /// The threads that run kernels.
    pub pool: Arc<Pool>,
    tools: Option<(Compiler, KernelCache)>,
    /// What the user should know, one line each.
    pub warnings: Vec<String>,
}

impl Machine {
    /// The machine for a device and a number of threads (0: all cores), with all that its processor has. Without a C compiler
    /// the interpreter stands in.
    pub fn new(device: Device, threads: usize) -> Result<Machine, Error> {
        Machine::with(device, threads, host_simd())
    }

    /// The same with these vector instructions, which kernels can only run with if the processor has them.
    pub fn with(device: Device, threads: usize, simd: Simd) -> Result<Machine, Error> {
        let io = |source| Error::Io { path: "threads".into(), source };
        let pool = Arc::new(Pool::new(threads).map_err(io)?);
        let target = Target::host(simd, pool.threads() as u32, available_memory());
        let mut warnings = Vec::new();
        let mut machine = Machine { device, target, pool, tools: None, warnings: vec![] };
        if device == Device::Host {
            let folders: Vec<PathBuf> =
                std::env::var_os("PATH").map(|p| std::env::split_paths(&p).collect()).unwrap_or_default();
            match Compiler::find(&folders) {
                Some(cc) => machine.tools = Some((cc, KernelCache::open(&cache_folder())?)),
                None => {
                    machine.device = Device::Interpreter;
                    let slow =
                        "no C compiler (cc, gcc, clang) in PATH: the interpreter runs the model, slowly";
                    warnings.push(slow.to_string());
                }
            }
        }
        machine.warnings = warnings;
        Ok(machine)
    }

    /// The compiler and cache for host kernels; none where the interpreter runs.
    pub fn tools(&self) -> Option<Tools<'_>> {
        self.tools.as_ref().map(|(compiler, cache)| Tools { compiler, cache })
    }
}

impl Machine {
    /// Vector instructions of its kernels.
    pub fn simd(&self) -> Simd {
        match self.target.kind {
            TargetKind::Host { simd } => simd,
            TargetKind::Cuda { .. } => Simd::Plain,
        }
    }

    /// Which C compiler makes the kernels, and with which vector instructions; on this depend the last bits of results.
    pub fn compiler(&self) -> String {
        let made = |c: &Compiler| format!("{} {}", c.identity(), self.simd().name());
        self.tools.as_ref().map_or("interpreter".into(), |(c, _)| made(c))
    }

    /// What runs a model under training.
    pub fn runner(&self) -> Runner<'_> {
        Runner { pool: self.pool.clone(), tools: self.tools(), target: &self.target }
    }
}

/// `$ASTRAI_CACHE`, `$XDG_CACHE_HOME/astrai` or `~/.cache/astrai`, else a folder of this user among temporary files.
fn cache_folder() -> PathBuf {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("ASTRAI_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|p| p.join("astrai")))
        .or_else(|| var("HOME").map(|p| p.join(".cache").join("astrai")))
        .unwrap_or_else(|| std::env::temp_dir().join("astrai-cache"))
        .join("kernels")
}
