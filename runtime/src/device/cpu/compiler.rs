//! Kernels through the system's C compiler. In: kernels as C. Out: a loaded shared object's functions. Objects are
//! cached by (source, flags, compiler, and the processor where the flags say "native") in a folder of this user's
//! ([`KernelCache`]). Flags come of the target's vector instructions, so that one folder holds objects for several.

use crate::Error;
use crate::device::cache::{KernelCache, key};
use crate::device::cause;
use astrai_codegen::cpu::isa::FLAGS;
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, Dim, Kernel};
use libloading::Library;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

/// Version of what the emitter writes around kernels; part of every cache key.
const EMITTER: u32 = 3;

/// A function over units of one phase.
pub(super) type RunFn = unsafe extern "C" fn(*const *mut u8, *const i64, *mut u8, i64, i64);
/// Number of units of a phase.
type CountFn = unsafe extern "C" fn(*const i64) -> i64;

/// One phase of a kernel: its units, as a size or as a function says, and what computes them.
pub(super) struct Phase {
    pub(super) units: Option<Dim>,
    pub(super) count: Option<CountFn>,
    pub(super) run: RunFn,
}

/// The functions of one kernel, kept alive by their library.
pub(super) struct Loaded {
    pub(super) phases: Vec<Phase>,
    _library: Arc<Library>,
}

/// The system's C compiler.
#[derive(Clone, Debug)]
pub struct Compiler {
    path: PathBuf,
    identity: String,
}

impl Compiler {
    /// Path and version, as one line.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The first of `cc`, `gcc`, `clang` in these folders (the caller's `PATH`).
    pub fn find(folders: &[PathBuf]) -> Option<Compiler> {
        for name in ["cc", "gcc", "clang"] {
            for folder in folders {
                let path = folder.join(name);
                if let Ok(m) =
                    fs::metadata(&path).and_then(|_| fs::canonicalize(&path)).and_then(fs::metadata)
                {
                    let identity = format!("{} {} {}", path.display(), m.len(), m.mtime());
                    return Some(Compiler { path, identity });
                }
            }
        }
        None
    }
}

impl KernelCache {
    /// Functions of all kernels in order. What no object in the folder has, whichever program it was built for, is built at once,
    /// in as many units as `threads` and no more than the processor has cores: each unit repeats the text that kernels share.
    pub(super) fn load(
        &self,
        compiler: &Compiler,
        backend: &dyn Backend,
        kernels: &[&Kernel],
        instructions: &[&str],
        threads: usize,
    ) -> Result<Vec<Loaded>, Error> {
        let flags = [instructions, FLAGS].concat();
        let processor =
            if instructions.contains(&"-march=native") { features() } else { std::env::consts::ARCH.into() };
        let same = [&flags.join(" "), &compiler.identity, &processor, &EMITTER.to_string()].map(Clone::clone);
        let key = |text: &str| key(&[&[text], same.each_ref().map(String::as_str).as_slice()].concat());
        // Beside the objects lies for each kernel the name of one that has it.
        let holder = |k: &Kernel| format!("{}.kernel", key(&backend.unit(&[k])));
        let mut objects = Objects { cache: self, open: HashMap::new() };
        let mut held: HashMap<&str, Loaded> = HashMap::new();
        for k in kernels {
            let named = self.read(&holder(k)).and_then(|name| String::from_utf8(name).ok());
            let found = named.filter(|name| is_name(name)).and_then(|name| objects.symbols(&name, k).ok());
            held.extend(found.map(|loaded| (&*k.identity, loaded)));
        }
        let missing: Vec<&Kernel> =
            kernels.iter().copied().filter(|k| !held.contains_key(&*k.identity)).collect();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let units = split(&missing, threads.min(cores));
        let built: Vec<Result<String, Error>> = std::thread::scope(|s| {
            let build = |unit: &Vec<&Kernel>| {
                let source = backend.unit(unit);
                let object = self.build(compiler, &source, &key(&source), &flags)?;
                let io = |source| Error::Io { path: self.path().to_path_buf(), source };
                unit.iter().try_for_each(|k| self.write(&holder(k), object.as_bytes())).map_err(io)?;
                Ok(object)
            };
            let jobs: Vec<_> = units.iter().map(|unit| s.spawn(move || build(unit))).collect();
            jobs.into_iter()
                .map(|j| j.join().unwrap_or_else(|_| Err(Error::Input("a compiler thread failed".into()))))
                .collect()
        });
        for (unit, object) in units.iter().zip(built) {
            let object = object?;
            for k in unit {
                held.insert(&k.identity, objects.symbols(&object, k)?);
            }
        }
        Ok(kernels.iter().filter_map(|k| held.remove(&*k.identity)).collect())
    }

    /// Name of the shared object of a unit.
    fn build(&self, compiler: &Compiler, source: &str, key: &str, flags: &[&str]) -> Result<String, Error> {
        let object = format!("{key}.so");
        if self.object(&object).is_some() {
            return Ok(object);
        }
        let (unit, made) = (format!("{key}.c"), self.fresh_name("so.tmp"));
        let io = |name: &str| {
            let path = self.path().join(name);
            move |source| Error::Io { path, source }
        };
        self.write(&unit, source.as_bytes()).map_err(io(&unit))?;
        // The compiler works in the folder as well, for its drafts are as much to be trusted as what it makes of them.
        let mut command = Command::new(&compiler.path);
        command.args(flags).args(["-o", &made, &unit]).current_dir(self.directory()).env("TMPDIR", ".");
        let run = command.output().map_err(|source| Error::Io { path: compiler.path.clone(), source })?;
        if !run.status.success() {
            self.remove(&made);
            let text = String::from_utf8_lossy(&run.stderr);
            let line =
                text.lines().find(|l| l.contains("error")).or(text.lines().last()).unwrap_or("no message");
            return Err(Error::Compiler { unit: self.path().join(unit), message: line.to_string() });
        }
        self.publish(&made, &object).map_err(io(&object))?;
        Ok(object)
    }
}

/// Whether a text is the name of an object.
fn is_name(text: &str) -> bool {
    text.strip_suffix(".so").is_some_and(|key| key.len() == 32 && key.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Objects of a cache that are loaded.
struct Objects<'a> {
    cache: &'a KernelCache,
    open: HashMap<String, Arc<Library>>,
}

impl Objects<'_> {
    /// The functions of a kernel in the object of this name.
    fn symbols(&mut self, name: &str, k: &Kernel) -> Result<Loaded, Error> {
        let fail = |message: String| Error::Compiler { unit: self.cache.path().join(name), message };
        if !self.open.contains_key(name) {
            let object = self.cache.object(name).ok_or_else(|| fail("its object is not whole".into()))?;
            // SAFETY: the object was made by `build` from our own source, as its sum shows, and lies in a folder that only this
            // user can write; its initialisers ask the system for a processor feature and nothing else.
            let library = unsafe { Library::new(object) };
            let library = Arc::new(library.map_err(|e| fail(cause(&e)))?);
            self.open.insert(name.to_string(), library);
        }
        symbols(&self.open[name], k)
    }
}

/// Kernels dealt into units of about equal compile time.
fn split<'a>(kernels: &[&'a Kernel], threads: usize) -> Vec<Vec<&'a Kernel>> {
    let count = threads.clamp(1, kernels.len().max(1));
    let mut units: Vec<(usize, Vec<&Kernel>)> = vec![(0, vec![]); count];
    let mut order = kernels.to_vec();
    order.sort_by(|a, b| (b.source.len(), &a.identity).cmp(&(a.source.len(), &b.identity)));
    for k in order {
        if let Some(least) = units.iter_mut().min_by_key(|u| u.0) {
            least.0 += k.source.len() + 1000;
            least.1.push(k);
        }
    }
    units.into_iter().map(|u| u.1).filter(|u| !u.is_empty()).collect()
}

fn symbols(library: &Arc<Library>, k: &Kernel) -> Result<Loaded, Error> {
    let missing = |name: &str| Error::Compiler {
        unit: k.identity.clone().into(),
        message: format!("no symbol {name}"),
    };
    let mut phases = Vec::new();
    for entry in &k.entries {
        // SAFETY: the emitter declares every function of units with this signature.
        let run = unsafe { library.get::<RunFn>(entry.symbol.as_bytes()) };
        let run = *run.map_err(|_| missing(&entry.symbol))?;
        let (units, count) = match &entry.grid {
            Grid::Units(units) => (Some(units.clone()), None),
            Grid::Counted(name) => {
                // SAFETY: the emitter declares every function that counts units with this signature.
                let count = unsafe { library.get::<CountFn>(name.as_bytes()) };
                (None, Some(*count.map_err(|_| missing(name))?))
            }
        };
        phases.push(Phase { units, count, run });
    }
    Ok(Loaded { phases, _library: library.clone() })
}

/// Features of the processor, to which `-march=native` resolves.
fn features() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let wanted =
        |l: &&str| l.starts_with("flags") || l.starts_with("Features") || l.starts_with("model name");
    let mut lines: Vec<&str> = text.lines().filter(wanted).take(2).collect();
    lines.sort_unstable();
    format!("{} {}", std::env::consts::ARCH, lines.join(" "))
}
