//! Threads for the processor's kernels: a closure over independent units enters, the threads share the units, and the call
//! returns when all are done. Own, because a kernel lasts microseconds: a run allocates nothing, threads that wait
//! spin briefly before they park, and a run never waits for a thread that is still waking up.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// What the threads of one run execute: `(worker, units)`, with `worker < threads()`, for disjoint ranges of units.
type Body<'a> = dyn Fn(usize, Range<usize>) + Sync + 'a;

/// Spins before a waiting thread parks: tens of microseconds, longer than the gap between two kernels.
const SPINS: u32 = 20_000;
/// `Shared::state`: run number above, then whether workers may still enter, then how many are inside.
const RUN: u64 = 1 << 32;
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

thread_local! {
    /// The worker number of this thread while it executes units, so that a nested run stays on this thread.
    static WORKER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// A fixed set of threads, one of them the caller's. Dropping it ends the others.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<(Thread, JoinHandle<()>)>,
    /// Held during a run: callers on different threads take turns.
    turn: Mutex<()>,
}

/// What lies in cache lines of its own: a thread that takes its units disturbs none that waits for `state`.
#[repr(align(128))]
struct Apart<T>(T);

/// Units that are left of a thread's share, the first below, the end above 32 bits. The thread takes them from the front, one after
/// another in memory; others, when theirs are done, from the back.
type Left = Apart<AtomicU64>;

struct Shared {
    /// With the run that it announces: a thread that enters has both by one line.
    state: Apart<(AtomicU64, UnsafeCell<Option<Job>>)>,
    left: Vec<Left>,
    stop: AtomicBool,
    asleep: Vec<AtomicBool>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// The body of the run in progress, which lives until the run ends.
type Job = *const Body<'static>;

// SAFETY: the job is written only by the caller that holds `turn` while the state is closed with nobody inside, and read
// only by threads inside; entering (acquire) and leaving (release) `state` order the two. `body` is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is dereferenced only while the run that lent it is in progress.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads including the caller's; 0 means one per available core.
    ///
    /// # Errors
    /// The system's, when a thread cannot be started; those already started are ended.
    pub fn new(threads: usize) -> io::Result<Pool> {
        let threads = if threads == 0 { thread::available_parallelism()?.get() } else { threads };
        let shared = Arc::new(Shared {
            state: Apart((AtomicU64::new(0), UnsafeCell::new(None))),
            left: (0..threads).map(|_| Apart(AtomicU64::new(0))).collect(),
            stop: AtomicBool::new(false),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let mut pool = Pool { shared, workers: Vec::with_capacity(threads - 1), turn: Mutex::new(()) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let handle = thread::Builder::new()
                .name(format!("astrai-{worker}"))
                .spawn(move || shared.serve(worker))?;
            pool.workers.push((handle.thread().clone(), handle));
        }
        Ok(pool)
    }

    /// The number of threads that share a run, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(worker, units)` until every unit in `0..units` has been covered exactly once, and returns then.
    /// Which worker gets which units varies from run to run. One unit, more than `u32::MAX`, or a run from within a run, stay on the
    /// calling thread.
    ///
    /// # Panics
    /// With the first panic of `body`, after all threads have left it; units not begun by then are dropped.
    pub fn run(&self, units: usize, body: &(dyn Fn(usize, Range<usize>) + Sync)) {
        if units == 0 {
            return;
        }
        if let Some(worker) = WORKER.get() {
            return body(worker, 0..units);
        }
        let turn = lock(&self.turn);
        if units == 1 || self.workers.is_empty() || units > u32::MAX as usize {
            let _here = Here::enter(0);
            return body(0, 0..units);
        }
        self.open(units, body);
        self.shared.work(0);
        self.close();
        let panic = lock(&self.shared.panic).take();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    fn open(&self, units: usize, body: &Body<'_>) {
        // SAFETY: only the lifetime changes; `close` ends every use before `run` returns.
        let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let Apart((state, cell)) = &self.shared.state;
        // SAFETY: the state is closed with nobody inside and `turn` is held, so nobody else touches the cell.
        unsafe { *cell.get() = Some(body) };
        let bound = |t: usize| units * t / self.threads();
        for (t, left) in self.shared.left.iter().enumerate() {
            left.0.store(both(bound(t)..bound(t + 1)), Ordering::Relaxed);
        }
        let run = state.load(Ordering::Relaxed) / RUN;
        state.store(run.wrapping_add(1).wrapping_mul(RUN) | OPEN, Ordering::SeqCst);
        for (asleep, (thread, _)) in self.shared.asleep.iter().zip(&self.workers).take(units - 1) {
            if asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }

    fn close(&self) {
        let mut spins = 0;
        let shared = &self.shared.state.0.0;
        let mut state = shared.fetch_and(!OPEN, Ordering::AcqRel);
        while state & INSIDE != 0 {
            wait(&mut spins);
            state = shared.load(Ordering::Acquire);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for (thread, handle) in self.workers.drain(..) {
            thread.unpark();
            // A worker catches the panics of bodies, so that joining it has nothing left to report.
            let _ = handle.join();
        }
    }
}

impl Shared {
    /// A worker's life: enter each run that is still open, sleep when none comes.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        let mut spins = 0;
        let shared = &self.state.0.0;
        while !self.stop.load(Ordering::Acquire) {
            let state = shared.load(Ordering::SeqCst);
            if state / RUN == seen || state & OPEN == 0 {
                if spins < SPINS {
                    spins += 1;
                    std::hint::spin_loop();
                } else {
                    self.sleep(worker, seen);
                    spins = 0;
                }
            } else if shared.compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                seen = state / RUN;
                self.work(worker);
                shared.fetch_sub(1, Ordering::Release);
                spins = 0;
            }
        }
    }

    fn sleep(&self, worker: usize, seen: u64) {
        let asleep = &self.asleep[worker - 1];
        asleep.store(true, Ordering::SeqCst);
        // Either this load sees the new run, or the caller sees `asleep` and unparks.
        let state = self.state.0.0.load(Ordering::SeqCst);
        if (state / RUN == seen || state & OPEN == 0) && !self.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }

    /// Takes ranges of units until none is left; the first panic empties the run.
    fn work(&self, worker: usize) {
        // SAFETY: this thread is inside the run, hence the cell is set and not written until it has left.
        let Some(job) = (unsafe { *self.state.0.1.get() }) else { return };
        let _here = Here::enter(worker);
        let result = catch_unwind(AssertUnwindSafe(|| {
            while let Some(units) = self.take(worker) {
                // SAFETY: `run` does not return, hence the body lives, until all threads have left.
                unsafe { (*job)(worker, units) };
            }
        }));
        if let Err(payload) = result {
            self.left.iter().for_each(|left| left.0.store(0, Ordering::Relaxed));
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// The first half of what is left of the thread's share, which, where that is nothing, becomes half of another's: long ranges first,
    /// single units last.
    fn take(&self, worker: usize) -> Option<Range<usize>> {
        let threads = self.left.len();
        let own = &self.left[worker].0;
        let half = |x: u64| parts(x).len().div_ceil(2);
        let front = |x: u64| (!parts(x).is_empty()).then(|| both(parts(x).start + half(x)..parts(x).end));
        if let Ok(x) = own.fetch_update(Ordering::Relaxed, Ordering::Relaxed, front) {
            return Some(parts(x).start..parts(x).start + half(x));
        }
        let back = |x: u64| (!parts(x).is_empty()).then(|| both(parts(x).start..parts(x).end - half(x)));
        (1..threads).find_map(|i| {
            let left = &self.left[(worker + i) % threads].0;
            let x = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, back).ok()?;
            let (begin, end) = (parts(x).end - half(x), parts(x).end);
            let first = begin..begin + (end - begin).div_ceil(2);
            // Nobody else writes a share that is empty.
            own.store(both(first.end..end), Ordering::Relaxed);
            Some(first)
        })
    }
}

fn both(range: Range<usize>) -> u64 {
    range.start as u64 | (range.end as u64) << 32
}

fn parts(left: u64) -> Range<usize> {
    left as u32 as usize..(left >> 32) as usize
}

/// Marks this thread as executing units, also while it unwinds.
struct Here;

impl Here {
    fn enter(worker: usize) -> Here {
        WORKER.set(Some(worker));
        Here
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        WORKER.set(None);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(spins: &mut u32) {
    if *spins < SPINS {
        *spins += 1;
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    fn pool(threads: usize) -> Pool {
        Pool::new(threads).expect("threads start")
    }

    #[test]
    fn covers_every_unit_once() {
        for threads in [1, 2, 3, 7] {
            let pool = pool(threads);
            for units in [0, 1, 2, 3, 31, 1000] {
                let counts: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
                pool.run(units, &|worker, range| {
                    assert!(worker < threads);
                    for unit in range {
                        counts[unit].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {units} units"
                );
            }
        }
    }

    #[test]
    fn many_short_runs_keep_order() {
        let pool = pool(3);
        let sum = AtomicUsize::new(0);
        for run in 0..20_000 {
            pool.run(4, &|_, range| {
                sum.fetch_add(range.len(), Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 4 * (run + 1));
        }
    }

    #[test]
    fn threads_share_a_run_also_after_sleep() {
        let pool = pool(2);
        for _ in 0..5 {
            thread::sleep(Duration::from_millis(5));
            let both = Barrier::new(2); // passes only when two threads are inside
            pool.run(2, &|_, range| {
                for _ in range {
                    both.wait();
                }
            });
        }
    }

    #[test]
    fn workers_have_distinct_numbers() {
        let pool = pool(4);
        let busy: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        for _ in 0..200 {
            pool.run(64, &|worker, _| {
                assert!(!busy[worker].swap(true, Ordering::SeqCst));
                std::hint::spin_loop();
                busy[worker].store(false, Ordering::SeqCst);
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = pool(2);
        for units in [1, 64] {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(units, &|_, _| panic!("unit failed"))));
            assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"unit failed"));
            let done = AtomicUsize::new(0);
            pool.run(64, &|_, range| {
                done.fetch_add(range.len(), Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 64);
        }
    }

    #[test]
    fn nested_and_concurrent_runs_complete() {
        let pool = pool(2);
        let done = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let count = |_: usize, units: Range<usize>| {
                            done.fetch_add(units.len(), Ordering::Relaxed);
                        };
                        pool.run(8, &|_, range| range.for_each(|_| pool.run(5, &count)));
                    }
                });
            }
        });
        assert_eq!(done.load(Ordering::Relaxed), 3 * 100 * 8 * 5);
    }
}
