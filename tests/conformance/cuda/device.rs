//! A CUDA device on the processor: kernels as host C++ behind the shim, every thread a fiber, in memory between guards. Shared memory
//! and workspace hold NaN before they are written.

use astrai_codegen::cpu::{Cpu, Isa};
use astrai_codegen::cuda::{self, Cuda};
use astrai_engine::Machine;
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, DType, Kernel, Target};
use astrai_runtime::device::{Block, Executable, Launch, Pointer, Space, Threads};
use astrai_runtime::{Device, Error};
use libloading::Library;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const CPP: [&str; 3] = ["g++", "clang++", "c++"];
const SHIM_FLAGS: [&str; 8] =
    ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fwrapv", "-fPIC", "-shared", "-w"];
/// Kernels of a translation unit at most.
const UNIT: usize = 16;
/// Bytes around a block of memory that kernels must leave alone.
const GUARD: usize = 256;

/// The numbers of a device with so many multiprocessors; what the compiler searches costs as on a processor.
pub fn target(units: u32) -> Target {
    let flops = vec![(DType::F32, 60e12), (DType::BF16, 60e12)];
    let plain = Cpu::new(Isa::Plain, 1, 1 << 34).target().clone();
    Target { name: "cuda".into(), kind: "cuda".into(), isa: "sm_80".into(), units, flops, warp: 32, ..plain }
}

/// The first of these programs in `PATH`.
pub fn program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    names.iter().find_map(|n| std::env::split_paths(&path).map(|f| f.join(n)).find(|p| p.is_file()))
}

/// The device, where there is a C++ compiler.
pub struct Shim {
    backend: Cuda,
    compiler: PathBuf,
    blocks: AtomicU64,
    seed: AtomicU64,
}

impl Shim {
    /// With so many multiprocessors; `None`, and a word, without a compiler.
    pub fn new(units: u32) -> Option<Arc<Shim>> {
        let Some(compiler) = program(&CPP) else {
            println!("skipped: no C++ compiler for the shim");
            return None;
        };
        let backend = Cuda::new(target(units));
        Some(Arc::new(Shim { backend, compiler, blocks: u64::MAX.into(), seed: 1.into() }))
    }

    /// A machine with this device.
    pub fn machine(self: &Arc<Shim>) -> Machine {
        Machine::over(self.clone())
    }

    /// From here on launches have at most so many blocks, whose threads run in the order of this seed.
    pub fn order(&self, blocks: u64, seed: u64) {
        self.blocks.store(blocks, Relaxed);
        self.seed.store(seed, Relaxed);
    }
}

/// Zero bytes between guards, which are looked at when they are given back.
struct Bytes {
    words: Mutex<Vec<u128>>,
    len: usize,
}

impl Drop for Bytes {
    fn drop(&mut self) {
        let words = self.words.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the words are so many initialised bytes.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), words.len() * 16) };
        let first = bytes.as_ptr().align_offset(GUARD) + GUARD;
        let around = bytes[first - GUARD..first].iter().chain(&bytes[first + self.len..][..GUARD]);
        let whole = around.into_iter().all(|b| *b == 0xff);
        assert!(whole || std::thread::panicking(), "a kernel wrote outside its buffer");
    }
}

impl Threads for Shim {}

impl Space for Shim {
    fn available(&self) -> u64 {
        1 << 50
    }

    fn alloc(&self, lens: &[usize]) -> Result<Vec<Block>, Error> {
        let one = |&len: &usize| {
            let mut words = vec![u128::MAX; (len + 3 * GUARD).div_ceil(16)];
            let all = words.as_mut_ptr().cast::<u8>();
            let at = all.wrapping_add(all.align_offset(GUARD) + GUARD);
            // SAFETY: room for the bytes and both guards.
            unsafe { at.write_bytes(0, len) };
            Block::new(Pointer(at as u64), len, Arc::new(Bytes { words: Mutex::new(words), len }))
        };
        Ok(lens.iter().map(one).collect())
    }

    fn host(&self, _: Pointer) -> Option<*mut u8> {
        None
    }

    fn import(&self, _: &[u8]) -> Option<Pointer> {
        None
    }

    fn read(&self, at: Pointer, to: &mut [u8]) -> Result<(), Error> {
        // SAFETY: whoever has a pointer knows how many bytes lie there.
        unsafe { (at.0 as *const u8).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn write(&self, at: Pointer, from: &[u8]) -> Result<(), Error> {
        // SAFETY: as in `read`.
        unsafe { (at.0 as *mut u8).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }
}

impl Device for Shim {
    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn name(&self) -> &'static str {
        "shim"
    }

    fn load(&self, kernels: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error> {
        static BUILT: OnceLock<Mutex<HashMap<String, Arc<Library>>>> = OnceLock::new();
        let mut built = BUILT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let mut fresh: BTreeMap<&str, &Kernel> = kernels.iter().map(|k| (&*k.identity, *k)).collect();
        fresh.retain(|identity, _| !built.contains_key(*identity));
        let fresh: Vec<&Kernel> = fresh.into_values().collect();
        let parts: Vec<&[&Kernel]> = fresh.chunks(UNIT.min(fresh.len().div_ceil(2).max(1))).collect();
        let units: Vec<String> = parts.iter().map(|part| cuda::shim(part)).collect();
        for (part, library) in parts.iter().zip(build(&self.compiler, &units)) {
            let library = Arc::new(library);
            built.extend(part.iter().map(|k| (k.identity.clone(), library.clone())));
        }
        let one = |k: &&Kernel| {
            let (kernel, library) = ((*k).clone(), built[&k.identity].clone());
            let order = (self.blocks.load(Relaxed), self.seed.load(Relaxed));
            Arc::new(Loaded { kernel, library, order }) as Arc<dyn Executable>
        };
        Ok(kernels.iter().map(one).collect())
    }
}

/// Compiles units, two at a time, and loads them.
fn build(compiler: &Path, units: &[String]) -> Vec<Library> {
    let folder = tempfile::tempdir().unwrap();
    let one = |(i, text): (usize, &String)| {
        let (from, to) = (folder.path().join(format!("u{i}.cpp")), folder.path().join(format!("u{i}.so")));
        std::fs::write(&from, text).unwrap();
        let run = Command::new(compiler).args(SHIM_FLAGS).arg("-o").arg(&to).arg(&from).output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{}", said.lines().take(24).collect::<Vec<_>>().join("\n"));
        // SAFETY: the object was made from our own source just now and has no initialisers of its own.
        unsafe { Library::new(&to) }.unwrap()
    };
    let all: Vec<(usize, &String)> = units.iter().enumerate().collect();
    let pair = |two: &[(usize, &String)]| {
        std::thread::scope(|s| {
            let jobs: Vec<_> = two.iter().map(|u| s.spawn(|| one(*u))).collect();
            jobs.into_iter().map(|j| j.join().unwrap()).collect::<Vec<_>>()
        })
    };
    all.chunks(2).flat_map(pair).collect()
}

/// A kernel's entries in a library.
struct Loaded {
    kernel: Kernel,
    library: Arc<Library>,
    /// Most blocks of a launch, and the seed of its threads' order.
    order: (u64, u64),
}

type Entry = unsafe extern "C" fn(*const *mut u8, *const i64, i64, u64) -> i32;

impl Executable for Loaded {
    fn launch(&self, launch: &Launch) -> Result<(), Error> {
        // The fibers of a library are one set.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let value = |d: &astrai_ir::Dim| d.eval(&|name| launch.size(name)).map_err(Error::Input);
        let mut buffers: Vec<*mut u8> = launch.buffers.iter().map(|at| at.0 as *mut u8).collect();
        if self.kernel.workspace.literal() != Some(0) {
            let (at, bytes) = (launch.workspace.at().0 as *mut u8, value(&self.kernel.workspace)?);
            assert!(bytes <= launch.workspace.len() as u64, "{}: workspace", self.kernel.identity);
            // SAFETY: a block of that length.
            unsafe { at.write_bytes(0xff, bytes as usize) };
            buffers.push(at);
        }
        for round in 0..value(&self.kernel.rounds)? {
            let mut sizes = launch.sizes.to_vec();
            sizes.push(round as i64);
            for e in &self.kernel.entries {
                let Grid::Units(blocks) = &e.grid else { panic!("blocks are a size") };
                let blocks = value(blocks)?.min(self.order.0) as i64;
                assert!(value(&e.shared)? <= 227 << 10, "{}: shared memory", e.symbol);
                let name = format!("{}_launch", e.symbol);
                // SAFETY: the shim declares every launcher with this signature; buffers are those of the region.
                let line = unsafe {
                    let run = self.library.get::<Entry>(name.as_bytes()).unwrap();
                    run(buffers.as_ptr(), sizes.as_ptr(), blocks, self.order.1)
                };
                if line != 0 {
                    return Err(Error::Input(format!(
                        "{}: some threads miss the barrier in line {line}",
                        e.symbol
                    )));
                }
            }
        }
        Ok(())
    }
}
