//! Launches as calls that the threads go through by themselves. In: kernels with their buffers, sizes. Out: for each phase of each kernel a function,
//! what it is given, and how many units it has; kept from run to run, so that only what changed goes from one core's cache to another's.

use super::compiler::RunFn;
use super::{Code, Pool};
use crate::Error;
use crate::device::{Block, Launch, Pointer, Recording, size_of_symbol};
use astrai_ir::Symbol;
use std::cell::RefCell;
use std::iter;
use std::sync::{Arc, Mutex, PoisonError};

/// Sizes that kernels are given at most: symbols, the round, the threads.
const MOST_SIZES: usize = 32;

/// One phase of one round of a launch.
#[derive(Clone, Copy)]
struct Call {
    run: RunFn,
    buffers: *const *mut u8,
    sizes: *const i64,
    workspace: *mut u8,
}

impl PartialEq for Call {
    fn eq(&self, other: &Call) -> bool {
        let rest = |call: &Call| (call.buffers, call.sizes, call.workspace);
        std::ptr::fn_addr_eq(self.run, other.run) && rest(self) == rest(other)
    }
}

// SAFETY: kernels write disjoint parts of the buffers per unit; the addresses themselves are only read.
unsafe impl Sync for Call {}
// SAFETY: as above.
unsafe impl Send for Call {}

/// What a kernel is launched on.
#[derive(Clone, Copy)]
struct Bound<'a> {
    code: &'a Code,
    buffers: &'a [Pointer],
    workspace: &'a Block,
}

/// Calls with their units and sizes.
#[derive(Default)]
pub(super) struct Calls {
    all: Vec<Call>,
    units: Vec<u32>,
    /// The sizes that kernels are given in each round.
    sizes: Vec<[i64; MOST_SIZES]>,
}

impl Calls {
    /// The calls of these launches in order, with these sizes.
    fn set<'a>(
        &mut self,
        launches: impl Iterator<Item = Bound<'a>> + Clone,
        symbols: &[Symbol],
        sizes: &[i64],
        threads: usize,
    ) -> Result<(), Error> {
        let size = |name: &str| size_of_symbol(symbols, sizes, name);
        let value = |d: &astrai_ir::Dim| d.eval(&size).map_err(Error::Input);
        let mut rounds = 0;
        for Bound { code, workspace, .. } in launches.clone() {
            let (needs, room) = (value(&code.kernel.workspace)?, workspace.len());
            if needs > room as u64 || sizes.len() + 2 > MOST_SIZES {
                let name = &code.kernel.identity;
                let line = format!("kernel {name} wants {needs} bytes of workspace, planned were {room}");
                return Err(Error::Input(line));
            }
            rounds = value(&code.kernel.rounds)?.max(rounds);
        }
        // Behind the symbols the number of the round, and that of the threads.
        self.sizes.resize(rounds as usize, [0; MOST_SIZES]);
        for (round, given) in self.sizes.iter_mut().enumerate() {
            given[..sizes.len()].copy_from_slice(sizes);
            given[sizes.len()] = round as i64;
            given[sizes.len() + 1] = threads as i64;
        }
        self.units.clear();
        for Bound { code, buffers, workspace } in launches {
            // A pointer of this device is an address of this process, of 64 bits.
            const { assert!(size_of::<Pointer>() == size_of::<*mut u8>()) };
            let (buffers, workspace) = (buffers.as_ptr().cast(), workspace.at().0 as usize as *mut u8);
            for sizes in self.sizes.iter().take(value(&code.kernel.rounds)? as usize) {
                for phase in &code.loaded.phases {
                    let units = match (&phase.units, phase.count) {
                        (Some(units), _) => value(units)?,
                        // SAFETY: the emitted function reads the sizes, of which all are there.
                        (None, Some(count)) => unsafe { count(sizes.as_ptr()) }.max(0) as u64,
                        (None, None) => 0,
                    };
                    let many = |_| Error::Input(format!("kernel {}: {units} units", code.kernel.identity));
                    let call = Call { run: phase.run, buffers, sizes: sizes.as_ptr(), workspace };
                    match self.all.get_mut(self.units.len()) {
                        // What does not change stays in the others' caches.
                        Some(old) if *old == call => {}
                        Some(old) => *old = call,
                        None => self.all.push(call),
                    }
                    self.units.push(u32::try_from(units).map_err(many)?);
                }
            }
        }
        Ok(())
    }

    fn run(&self, pool: &Pool) {
        let all = &self.all;
        pool.run_all(&self.units, &|call, _, range| {
            let Call { run, buffers, sizes, workspace } = all[call];
            // SAFETY: buffers are as large as the region's types at these sizes (checked bounds of the plan); units
            // are independent, so that ranges on different threads touch disjoint results.
            unsafe { run(buffers, sizes, workspace, range.start as i64, range.end as i64) }
        });
    }

    /// Launches one kernel.
    pub(super) fn launch(code: &Code, launch: &Launch, pool: &Pool) -> Result<(), Error> {
        let mut calls = ONE.take();
        let one = Bound { code, buffers: launch.buffers, workspace: launch.workspace };
        let done = calls.set(iter::once(one), launch.symbols, launch.sizes, pool.threads());
        if done.is_ok() {
            calls.run(pool);
        }
        ONE.set(calls);
        done
    }
}

/// A launch that was recorded.
struct Recorded {
    code: Arc<Code>,
    buffers: Box<[Pointer]>,
    workspace: Block,
}

impl Recorded {
    fn bound(&self) -> Bound<'_> {
        Bound { code: &self.code, buffers: &self.buffers, workspace: &self.workspace }
    }
}

/// Launches that this thread records instead of running them.
#[derive(Default)]
pub(super) struct Recorder {
    launches: Vec<Recorded>,
    symbols: Vec<Symbol>,
}

thread_local! {
    /// Memory for the calls of a single launch.
    static ONE: RefCell<Calls> = RefCell::default();
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

impl Recorder {
    /// Adds a launch to what this thread records, if it does.
    pub(super) fn add(code: &Arc<Code>, launch: &Launch) -> bool {
        RECORDER.with_borrow_mut(|recorder| {
            let Some(recorder) = recorder else { return false };
            recorder.symbols.clear();
            recorder.symbols.extend_from_slice(launch.symbols);
            let (buffers, workspace) = (launch.buffers.into(), launch.workspace.clone());
            recorder.launches.push(Recorded { code: code.clone(), buffers, workspace });
            true
        })
    }

    /// What `launches` launches.
    pub(super) fn record(
        launches: &mut dyn FnMut() -> Result<(), Error>,
        pool: &Arc<Pool>,
    ) -> Result<Box<dyn Recording>, Error> {
        RECORDER.set(Some(Recorder::default()));
        // Also when they panic: what is launched later would not run.
        let ends = Ends;
        launches()?;
        let of = RECORDER.take().unwrap_or_default();
        drop(ends);
        Ok(Box::new(Kept { of, pool: pool.clone(), newest: Mutex::default() }))
    }
}

/// Ends a thread's recording.
struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        RECORDER.take();
    }
}

/// Launches and their calls with the sizes of the newest run.
struct Kept {
    of: Recorder,
    pool: Arc<Pool>,
    newest: Mutex<Newest>,
}

#[derive(Default)]
struct Newest {
    calls: Calls,
    sizes: Vec<i64>,
    /// Whether these are the calls with these sizes.
    set: bool,
}

impl Recording for Kept {
    fn replay(&self, sizes: &[i64]) -> Result<(), Error> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let Newest { calls, sizes: known, set } = &mut *newest;
        if !*set || known != sizes {
            *set = false;
            let launches = self.of.launches.iter().map(Recorded::bound);
            calls.set(launches, &self.of.symbols, sizes, self.pool.threads())?;
            known.clear();
            known.extend_from_slice(sizes);
            *set = true;
        }
        calls.run(&self.pool);
        Ok(())
    }

    fn seconds(&self) -> Result<Vec<f64>, Error> {
        Ok(vec![])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn a_recording_that_panics_or_fails_ends() {
        let pool = Arc::new(Pool::new(1).unwrap());
        let ended = || RECORDER.with_borrow(Option::is_none);
        let panics = || Recorder::record(&mut || panic!("a launch failed"), &pool).map(drop);
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert!(ended());
        assert!(Recorder::record(&mut || Err(Error::Input("a launch failed".into())), &pool).is_err());
        assert!(ended());
    }
}
