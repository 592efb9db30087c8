//! Threads for the processor's kernels: calls enter, each over independent units, the threads share the units of one call after the
//! other, and the run returns when all are done. Own, because a kernel lasts microseconds: a run allocates nothing, threads that wait spin
//! briefly before they park, and a run never waits for a thread that is still waking up: others take its units until it is there.
//!
//! Where cores are far apart, what a call costs is how many cache lines go from one to another after one another. Every thread
//! therefore walks the calls by itself and learns of the others only how far they are: one line of each, read where it was last written.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// What the threads of one run execute: `(call, worker, units)`, with `worker < threads()`, for disjoint ranges of the call's units.
type Body<'a> = dyn Fn(usize, usize, Range<usize>) + Sync + 'a;

/// Spins before a waiting thread parks: tens of microseconds, longer than the gap between two kernels.
const SPINS: u32 = 20_000;

/// Spins before a thread that waits for others gives its core to whoever else wants it, perhaps one of those: some microseconds.
const BRIEF: u32 = 300;

/// Bits of a unit's number, and most units of a call, of which several count as one where there are more; above two of them stands a call's number.
const BITS: u32 = 24;
const MOST: usize = (1 << BITS) - 1;

/// States of a worker: it waits for a run; it sleeps; it takes part in one; above, it may do so from this call on.
const AWAKE: u64 = 0;
const ASLEEP: u64 = 1;
const INSIDE: u64 = 2;
const OFFERED: u64 = 3;

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

/// What lies in cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct Apart<T>(T);

/// How far a thread is.
#[derive(Default)]
struct At {
    /// The call that it is ready for: all before it are done as far as it goes. Calls are numbered from the pool's first on, and the number
    /// behind a run's last is none's.
    call: AtomicU64,
    /// Of a worker [`AWAKE`], [`ASLEEP`], [`INSIDE`], or [`OFFERED`] and a call.
    state: AtomicU64,
}

/// The run in progress, which lives until it ends.
#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    units: *const [u32],
    /// The number of its first call.
    first: u64,
}

struct Shared {
    /// The caller's thread, then the workers.
    at: Vec<Apart<At>>,
    job: Apart<UnsafeCell<Option<Job>>>,
    /// Units that are left of each thread's share of a call: the first below, the end above [`BITS`] bits, then the lowest bits of the call's number.
    /// With those of another call, all are left: the caller's thread looks at every share in each call, so that no number is older than the one
    /// before. The thread takes them from the front, one after another in memory; others, when theirs are done, from the back.
    left: Vec<Apart<AtomicU64>>,
    stop: AtomicBool,
    /// A body panicked: no more calls begin.
    failed: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the job is written only by the caller that holds `turn` while no worker is inside, and before it offers others to take part
// (release); it is read only by workers inside (acquire), of which all have left when the run returns. `body` is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointers in `job` are dereferenced only while the run that lent them is in progress.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads including the caller's; 0 means one per available core.
    ///
    /// # Errors
    /// The system's, when a thread cannot be started; those already started are ended.
    pub fn new(threads: usize) -> io::Result<Pool> {
        let threads = if threads == 0 { thread::available_parallelism()?.get() } else { threads };
        let shared = Arc::new(Shared {
            at: (0..threads).map(|_| Apart::default()).collect(),
            job: Apart::default(),
            left: (0..threads).map(|_| Apart::default()).collect(),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
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
    /// Which worker gets which units varies from run to run. One unit, more than `u32::MAX`, or a run from within a run, stay on the calling thread.
    ///
    /// # Panics
    /// As [`run_all`](Self::run_all).
    pub fn run(&self, units: usize, body: &(dyn Fn(usize, Range<usize>) + Sync)) {
        match u32::try_from(units) {
            Ok(n) => self.run_all(&[n], &|_, worker, units| body(worker, units)),
            Err(_) => self.alone(&|worker| body(worker, 0..units)),
        }
    }

    /// Calls `body(call, worker, units)` for each call in turn until every one of its `units` has been covered exactly once. No call begins
    /// before all units of those before it are done. Calls of one unit alone, or a run from within a run, stay on the calling thread.
    ///
    /// # Panics
    /// With the first panic of `body`, after all threads have left it; units not begun by then are dropped.
    pub fn run_all(&self, units: &[u32], body: &(dyn Fn(usize, usize, Range<usize>) + Sync)) {
        if self.workers.is_empty() || WORKER.get().is_some() || units.iter().all(|n| *n < 2) {
            let some = || units.iter().enumerate().filter(|(_, n)| **n > 0);
            return self.alone(&|worker| some().for_each(|(i, n)| body(i, worker, 0..*n as usize)));
        }
        let turn = lock(&self.turn);
        let shared = &*self.shared;
        let call = &shared.at[0].0.call;
        // SAFETY: only the lifetime changes; all threads have left the run when this returns.
        let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        // The number before is none's.
        let first = call.load(Ordering::Relaxed) + 1;
        let job = Job { body, units, first };
        // SAFETY: `turn` is held, and no worker is inside.
        unsafe { *shared.job.0.get() = Some(job) };
        self.offer(first);
        call.store(first, Ordering::Release);
        shared.walk(0, job, first, &|call| self.offer(call));
        for Apart(worker) in &shared.at[1..] {
            let mut spins = 0;
            // Who is inside leaves; who is not must not enter any more.
            let retract =
                |from| worker.state.compare_exchange(from, AWAKE, Ordering::Acquire, Ordering::Relaxed);
            while let state @ INSIDE.. = worker.state.load(Ordering::Acquire) {
                if state == INSIDE || retract(state).is_err() {
                    wait(&mut spins);
                }
            }
        }
        let failed = shared.failed.load(Ordering::Relaxed);
        let panic = if failed { lock(&shared.panic).take() } else { None };
        if failed {
            shared.failed.store(false, Ordering::Relaxed);
            // Calls that nobody began left shares as they were.
            let end = tagged(call.load(Ordering::Relaxed), 0..0);
            shared.left.iter().for_each(|left| left.0.store(end, Ordering::Relaxed));
        }
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// What is not shared.
    fn alone(&self, all: &dyn Fn(usize)) {
        match WORKER.get() {
            Some(worker) => all(worker),
            None => {
                let _turn = lock(&self.turn);
                let _here = Here::enter(0);
                all(0);
            }
        }
    }

    /// Workers that are not inside may take part from this call on; who sleeps is woken.
    fn offer(&self, call: u64) {
        for (Apart(at), (thread, _)) in self.shared.at[1..].iter().zip(&self.workers) {
            let mut state = at.state.load(Ordering::Relaxed);
            while state != INSIDE {
                match at.state.compare_exchange(state, OFFERED + call, Ordering::AcqRel, Ordering::Relaxed) {
                    Ok(before) => {
                        if before == ASLEEP {
                            thread.unpark();
                        }
                        break;
                    }
                    Err(now) => state = now,
                }
            }
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
    /// A worker's life: take part in each run that it is offered, sleep when none comes.
    fn serve(&self, worker: usize) {
        let Apart(at) = &self.at[worker];
        let mut spins = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let state = at.state.load(Ordering::Relaxed);
            let change =
                |to| at.state.compare_exchange(state, to, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if let Some(call) = state.checked_sub(OFFERED) {
                at.call.store(call, Ordering::Release);
                if change(INSIDE) {
                    // SAFETY: the job was there before the offer, and stays until this has left.
                    if let Some(job) = unsafe { *self.job.0.get() } {
                        self.walk(worker, job, call, &|_| {});
                    }
                    at.state.store(AWAKE, Ordering::Release);
                    spins = 0;
                }
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else if change(ASLEEP) {
                while at.state.load(Ordering::Relaxed) == ASLEEP && !self.stop.load(Ordering::Relaxed) {
                    thread::park();
                }
                spins = 0;
            }
        }
    }

    /// A thread's way through the calls of a run, from one on; `ready` is called before it says that it is ready for the next. The first panic ends
    /// the run for all.
    fn walk(&self, me: usize, job: Job, from: u64, ready: &dyn Fn(u64)) {
        let _here = Here::enter(me);
        // SAFETY: `run_all` does not return, hence body and units live, until all workers inside have left.
        let (body, units) = unsafe { (&*job.body, &*job.units) };
        let mine = &self.at[me].0.call;
        let result = catch_unwind(AssertUnwindSafe(|| {
            for (call, i) in (from..).zip((from - job.first) as usize..units.len()) {
                if call > from {
                    ready(call);
                    mine.store(call, Ordering::Release);
                }
                self.wait_for_others(me, call);
                if self.failed.load(Ordering::Relaxed) {
                    return;
                }
                let units = units[i] as usize;
                let step = units.div_ceil(MOST).max(1);
                let shares = Shares { left: &self.left, call, units: units.div_ceil(step) };
                while let Some(some) = shares.take(me) {
                    body(i, me, some.start * step..units.min(some.end * step));
                }
            }
        }));
        if let Err(payload) = result {
            lock(&self.panic).get_or_insert(payload);
            self.failed.store(true, Ordering::Release);
        }
        // Nobody waits for a thread that has nothing more to do.
        mine.store(job.first + units.len() as u64, Ordering::Release);
    }

    /// Waits until all threads are ready for a call. The caller's thread comes first: when it is, a worker is inside, or enters at this call or
    /// behind it, or not at all, or has left the run, of which this is the last call or which failed.
    fn wait_for_others(&self, me: usize, call: u64) {
        for (thread, Apart(at)) in self.at.iter().enumerate().filter(|(thread, _)| *thread != me) {
            let mut spins = 0;
            while at.call.load(Ordering::Acquire) < call
                && (thread == 0 || at.state.load(Ordering::Acquire) == INSIDE)
            {
                wait(&mut spins);
            }
        }
    }
}

/// The units of a call, in a share for each thread.
struct Shares<'a> {
    left: &'a [Apart<AtomicU64>],
    call: u64,
    units: usize,
}

impl Shares<'_> {
    /// The next units of a thread: the first half of what is left of its share, which, where that is empty, becomes half of another's: long ranges first,
    /// single units last.
    fn take(&self, me: usize) -> Option<Range<usize>> {
        let half = |units: &Range<usize>| units.len().div_ceil(2);
        let own = self.change(me, |units| units.start + half(units)..units.end);
        if !own.is_empty() {
            return Some(own.start..own.start + half(&own));
        }
        let threads = self.left.len();
        let others = (1..threads).map(|i| (me + i) % threads);
        let mut found = others.map(|t| self.change(t, |units| units.start..units.end - half(units)));
        let units = found.find(|units| !units.is_empty())?;
        let (begin, end) = (units.end - half(&units), units.end);
        let first = begin..begin + (end - begin).div_ceil(2);
        // Nobody else writes a share that is empty.
        self.left[me].0.store(tagged(self.call, first.end..end), Ordering::Relaxed);
        Some(first)
    }

    /// What is left of a thread's share becomes what this makes of it; what it was.
    fn change(&self, thread: usize, to: impl Fn(&Range<usize>) -> Range<usize>) -> Range<usize> {
        let Apart(left) = &self.left[thread];
        let mut found = left.load(Ordering::Relaxed);
        loop {
            let begun = found >> (2 * BITS) == tagged(self.call, 0..0) >> (2 * BITS);
            let units = if begun { parts(found) } else { self.whole(thread) };
            if begun && units.is_empty() {
                return units;
            }
            let rest = tagged(self.call, to(&units));
            match left.compare_exchange_weak(found, rest, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return units,
                Err(now) => found = now,
            }
        }
    }

    /// A thread's share of all units.
    fn whole(&self, thread: usize) -> Range<usize> {
        let bound = |thread: usize| (self.units * thread).div_ceil(self.left.len());
        bound(thread)..bound(thread + 1)
    }
}

fn tagged(call: u64, units: Range<usize>) -> u64 {
    units.start as u64 | (units.end as u64) << BITS | call << (2 * BITS)
}

fn parts(left: u64) -> Range<usize> {
    left as usize & MOST..(left >> BITS) as usize & MOST
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
    if *spins < BRIEF {
        *spins += 1;
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests;
