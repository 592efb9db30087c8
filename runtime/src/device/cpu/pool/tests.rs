//! Runs of units and of calls, among threads that sleep, panic, or have nothing to do.

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

#[test]
fn no_call_begins_before_those_before_it_are_done() {
    let units = [5, 0, 1, 64, 2, 3, 1000, 1];
    for threads in [1, 2, 3, 7] {
        let pool = pool(threads);
        for round in 0..200 {
            if round % 50 == 0 {
                thread::sleep(Duration::from_millis(5)); // they sleep, and enter anywhere
            }
            let done: Vec<AtomicUsize> = units.iter().map(|_| AtomicUsize::new(0)).collect();
            pool.run_all(&units, &|call, worker, range| {
                assert!(worker < threads && range.end <= units[call] as usize);
                let before = done[..call].iter().map(|n| n.load(Ordering::Relaxed));
                assert!(before.eq(units[..call].iter().map(|n| *n as usize)), "call {call}");
                done[call].fetch_add(range.len(), Ordering::Relaxed);
            });
            assert!(done.iter().map(|n| n.load(Ordering::Relaxed)).eq(units.map(|n| n as usize)));
        }
    }
}

#[test]
fn a_panic_ends_all_calls() {
    let pool = pool(3);
    for unit in [0, 50, 99] {
        let last = AtomicUsize::new(0);
        let body = |call: usize, _: usize, range: Range<usize>| {
            last.fetch_max(call, Ordering::Relaxed);
            assert!(call != 3 || !range.contains(&unit), "unit failed");
        };
        let run = || pool.run_all(&[100; 8], &body);
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        assert_eq!(last.load(Ordering::Relaxed), 3);
    }
}

#[test]
fn more_units_than_a_share_holds() {
    let (pool, sum) = (pool(2), AtomicUsize::new(0));
    let units = [u32::MAX, 1 << BITS, MOST as u32];
    pool.run_all(&units, &|_, _, range| {
        sum.fetch_add(range.len(), Ordering::Relaxed);
    });
    assert_eq!(sum.load(Ordering::Relaxed), units.iter().map(|n| *n as usize).sum::<usize>());
}

#[test]
fn shares_of_old_calls_are_not_those_of_new_ones() {
    let (pool, sum) = (pool(2), AtomicUsize::new(0));
    let count = |_: usize, range: Range<usize>| {
        sum.fetch_add(range.len(), Ordering::Relaxed);
    };
    // A call's number, of which a share has 16 bits, comes again.
    (0..1 << 15).for_each(|_| pool.run(4, &count));
    for calls in [[4, 4].as_slice(), &[4, 0, 1, 4, 1]] {
        sum.store(0, Ordering::Relaxed);
        pool.run_all(calls, &|_, worker, range| count(worker, range));
        assert_eq!(sum.load(Ordering::Relaxed), calls.iter().sum::<u32>() as usize);
    }
}
