//! Kernels through the system's C compiler. In: kernels as C. Out: a loaded shared object's functions. Objects are
//! cached by (source, flags, compiler, and the processor where the flags say "native"), written atomically into a folder
//! private to the user. Flags come of the target's vector instructions, so that one folder holds objects for several.

use crate::Error;
use astrai_codegen::cpu::isa::FLAGS;
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, Dim, Kernel};
use libloading::Library;
use std::collections::HashMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Version of what the emitter writes around kernels; part of every cache key.
const EMITTER: u32 = 3;

/// A function over units of one phase.
type RunFn = unsafe extern "C" fn(*const *mut u8, *const i64, *mut u8, i64, i64);
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

/// Compiled kernels on disk.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// A cache in this folder, made private to the user if it does not exist.
    pub fn open(folder: &Path) -> Result<KernelCache, Error> {
        let io = |source| Error::Io { path: folder.to_path_buf(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io)?;
        // Objects in here are loaded into this process: nobody else may write them.
        let meta = fs::metadata(folder).map_err(io)?;
        // SAFETY: geteuid has no preconditions.
        if meta.uid() != unsafe { libc::geteuid() } || meta.mode() & 0o022 != 0 {
            let what = "belongs to or can be written by another user; give another cache folder";
            return Err(io(io::Error::new(io::ErrorKind::PermissionDenied, what)));
        }
        Ok(KernelCache { folder: folder.to_path_buf() })
    }

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
        let holder = |k: &Kernel| self.folder.join(format!("{}.kernel", key(&backend.unit(&[k]))));
        let held = |k: &Kernel| {
            let object = self.folder.join(fs::read_to_string(holder(k)).ok()?);
            object.is_file().then_some(object)
        };
        let mut objects: HashMap<&str, PathBuf> = HashMap::new();
        objects.extend(kernels.iter().filter_map(|k| Some((&*k.identity, held(k)?))));
        let missing: Vec<&Kernel> =
            kernels.iter().copied().filter(|k| !objects.contains_key(&*k.identity)).collect();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let units = split(&missing, threads.min(cores));
        let built: Vec<Result<PathBuf, Error>> = std::thread::scope(|s| {
            let build = |unit: &Vec<&Kernel>| {
                let source = backend.unit(unit);
                let object = self.build(compiler, &source, &key(&source), &flags)?;
                let name = object.file_name().unwrap_or_default().to_string_lossy();
                unit.iter().try_for_each(|k| self.write(&holder(k), &name))?;
                Ok(object)
            };
            let jobs: Vec<_> = units.iter().map(|unit| s.spawn(move || build(unit))).collect();
            jobs.into_iter()
                .map(|j| j.join().unwrap_or_else(|_| Err(Error::Input("a compiler thread failed".into()))))
                .collect()
        });
        for (unit, object) in units.iter().zip(built) {
            let object = object?;
            objects.extend(unit.iter().map(|k| (&*k.identity, object.clone())));
        }
        let mut libraries: HashMap<&Path, Arc<Library>> = HashMap::new();
        let mut loaded = Vec::with_capacity(kernels.len());
        for k in kernels {
            let Some(object) = objects.get(&*k.identity) else { continue };
            if !libraries.contains_key(&**object) {
                // SAFETY: the object was made by `build` from our own source, in a folder only this user can write; its
                // initialisers ask the system for a processor feature and nothing else.
                let library = unsafe { Library::new(object) };
                let fail =
                    |e: libloading::Error| Error::Compiler { unit: object.clone(), message: e.to_string() };
                libraries.insert(object, Arc::new(library.map_err(fail)?));
            }
            loaded.push(symbols(&libraries[&**object], k)?);
        }
        Ok(loaded)
    }

    /// Writes a file of the cache whole: other processes, and other threads of this one, may be writing the same.
    fn write(&self, path: &Path, text: &str) -> Result<(), Error> {
        let half_done = self.folder.join(format!("{}.tmp", fresh_name()));
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        fs::write(&half_done, text).and_then(|()| fs::rename(&half_done, path)).map_err(io)
    }

    /// Path of the shared object of a unit.
    fn build(&self, compiler: &Compiler, source: &str, key: &str, flags: &[&str]) -> Result<PathBuf, Error> {
        let object = self.folder.join(format!("{key}.so"));
        if object.exists() {
            return Ok(object);
        }
        let own = fresh_name();
        let unit = self.folder.join(format!("{key}.c"));
        let (written, half_done) = ["c", "tmp"].map(|end| self.folder.join(format!("{own}.{end}"))).into();
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Io { path, source }
        };
        fs::write(&written, source).map_err(io(&written))?;
        let run = Command::new(&compiler.path).args(flags).arg("-o").arg(&half_done).arg(&written).output();
        let run = run.map_err(io(&compiler.path))?;
        fs::rename(&written, &unit).map_err(io(&unit))?;
        if !run.status.success() {
            let text = String::from_utf8_lossy(&run.stderr);
            let line =
                text.lines().find(|l| l.contains("error")).or(text.lines().last()).unwrap_or("no message");
            return Err(Error::Compiler { unit, message: line.to_string() });
        }
        fs::rename(&half_done, &object).map_err(io(&object))?;
        Ok(object)
    }
}

/// A file name that no other process and no other thread of this one takes.
fn fresh_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
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

/// 128 bits of hash as hex.
fn key(parts: &[&str]) -> String {
    let half = |seed: u64| {
        let mut h = DefaultHasher::new();
        seed.hash(&mut h);
        parts.hash(&mut h);
        h.finish()
    };
    format!("{:016x}{:016x}", half(1), half(2))
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
