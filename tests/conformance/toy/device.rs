//! The toy device: memory in an address space of its own, which this process only sees by copies, and kernels in C, a row at a time.

use crate::toy::backend::{ALIGNMENT, Toy};
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, Kernel};
use astrai_runtime::device::{Block, Executable, Launch, Pointer, Recording, Space, Threads};
use astrai_runtime::{Device, Error};
use libloading::Library;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// Where the toy's addresses begin: no address of a process has these bits.
const FIRST: u64 = 0x7000_0000_0000_0000;

/// Memory of some blocks, and where the toy sees it.
struct Bytes(Mutex<Vec<u128>>);

/// All blocks by address.
type Blocks = Mutex<BTreeMap<u64, Weak<Bytes>>>;

pub struct ToyDevice {
    backend: Toy,
    space: Arc<Blocks>,
    recorder: Arc<Recorder>,
}

impl ToyDevice {
    pub fn new() -> ToyDevice {
        ToyDevice { backend: Toy::new(), space: Arc::default(), recorder: Arc::default() }
    }

    /// Launches that were run from recordings.
    pub fn replayed(&self) -> usize {
        self.recorder.replayed.load(Ordering::Relaxed)
    }
}

/// One launch with everything that it needs.
type Call = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Recorder {
    calls: Mutex<Option<Vec<Call>>>,
    replayed: AtomicUsize,
}

/// Calls, and the seconds of each in the last replay.
struct Recorded(Vec<Call>, Arc<Recorder>, Mutex<Vec<f64>>);

impl Recording for Recorded {
    fn replay(&self, _sizes: &[i64]) -> Result<(), Error> {
        let timed = |call: &Call| {
            let started = Instant::now();
            call();
            started.elapsed().as_secs_f64()
        };
        *self.2.lock().unwrap() = self.0.iter().map(timed).collect();
        self.1.replayed.fetch_add(self.0.len(), Ordering::Relaxed);
        Ok(())
    }

    fn seconds(&self) -> Result<Vec<f64>, Error> {
        Ok(self.2.lock().unwrap().clone())
    }
}

/// The host's address of a byte of the toy's.
fn translate(space: &Blocks, at: Pointer) -> *mut u8 {
    let blocks = space.lock().unwrap();
    let (base, bytes) = blocks.range(..=at.0).next_back().expect("an address of no block");
    let bytes = bytes.upgrade().expect("memory that was given back");
    let first = bytes.0.lock().unwrap().as_mut_ptr().cast::<u8>();
    first.wrapping_add((at.0 - base) as usize)
}

impl Threads for ToyDevice {}

impl Space for ToyDevice {
    fn available(&self) -> u64 {
        1 << 30
    }

    fn alloc(&self, lens: &[usize]) -> Result<Vec<Block>, Error> {
        let mut space = self.space.lock().unwrap();
        let one = |&len: &usize| {
            let bytes = Arc::new(Bytes(Mutex::new(vec![0; len.div_ceil(16).max(1)])));
            // A gap behind each block: an address beyond its end is an address of nothing.
            let last = space.last_key_value().map_or(FIRST, |(at, _)| at + (1 << 32));
            let at = last.next_multiple_of(ALIGNMENT);
            space.insert(at, Arc::downgrade(&bytes));
            Block::new(Pointer(at), len, bytes)
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
        unsafe { translate(&self.space, at).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn write(&self, at: Pointer, from: &[u8]) -> Result<(), Error> {
        // SAFETY: as in `read`.
        unsafe { translate(&self.space, at).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }
}

impl Device for ToyDevice {
    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn name(&self) -> &'static str {
        "toy"
    }

    fn load(&self, kernels: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error> {
        let mut distinct: BTreeMap<&str, &Kernel> = BTreeMap::new();
        kernels.iter().for_each(|k| _ = distinct.insert(&k.identity, k));
        let folder = tempfile::tempdir().unwrap();
        let [unit, object] = ["c", "so"].map(|end| folder.path().join(format!("toy.{end}")));
        let text = self.backend.unit(&distinct.into_values().collect::<Vec<_>>());
        std::fs::write(&unit, text).unwrap();
        let flags = ["-O1", "-fwrapv", "-ffp-contract=off", "-fPIC", "-shared", "-w"];
        let said = Command::new("cc").args(flags).arg("-o").arg(&object).arg(&unit).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        // SAFETY: the object was made of our own source just now.
        let library = Arc::new(unsafe { Library::new(&object) }.unwrap());
        let one = |k: &&Kernel| {
            let (space, library) = (self.space.clone(), library.clone());
            let recorder = self.recorder.clone();
            Arc::new(Loaded { kernel: (*k).clone(), library, space, recorder }) as Arc<dyn Executable>
        };
        Ok(kernels.iter().map(one).collect())
    }

    fn records(&self) -> bool {
        true
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), Error>,
        _timed: bool,
    ) -> Result<Option<Box<dyn Recording>>, Error> {
        *self.recorder.calls.lock().unwrap() = Some(vec![]);
        launches()?;
        let calls = self.recorder.calls.lock().unwrap().take().unwrap();
        Ok(Some(Box::new(Recorded(calls, self.recorder.clone(), Mutex::default()))))
    }
}

struct Loaded {
    kernel: Kernel,
    library: Arc<Library>,
    space: Arc<Blocks>,
    recorder: Arc<Recorder>,
}

type Rows = unsafe extern "C" fn(*const *mut u8, *const i64, i64, i64);

impl Executable for Loaded {
    fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let [entry] = self.kernel.entries.as_slice() else { panic!("one phase a kernel") };
        let Grid::Units(units) = &entry.grid else { panic!("a size") };
        let units = units.eval(&|name| launch.size(name)).map_err(Error::Input)?;
        let (space, library, symbol) = (self.space.clone(), self.library.clone(), entry.symbol.clone());
        let (buffers, sizes) = (launch.buffers.to_vec(), launch.sizes.to_vec());
        let call = move || {
            let buffers: Vec<*mut u8> = buffers.iter().map(|at| translate(&space, *at)).collect();
            // SAFETY: the kernel's one function has this signature; buffers are those of its region.
            unsafe {
                let rows = library.get::<Rows>(symbol.as_bytes()).unwrap();
                rows(buffers.as_ptr(), sizes.as_ptr(), 0, units as i64);
            }
        };
        match &mut *self.recorder.calls.lock().unwrap() {
            Some(calls) => calls.push(Arc::new(call)),
            None => call(),
        }
        Ok(())
    }
}
