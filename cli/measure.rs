//! Measuring: repeated runs by the wall clock and what the process took. In: something to run. Out: seconds, as the peer's
//! script reports them, so that both sides print the same fields.

use std::time::Instant;

/// Seconds of repeated runs.
#[derive(Clone, Copy, Debug)]
pub struct Seconds {
    /// Middle one; the mean of the middle two for an even number.
    pub median: f64,
    /// Fastest.
    pub min: f64,
    /// Slowest.
    pub max: f64,
}

impl Seconds {
    /// Of at least one run.
    pub fn of(mut runs: Vec<f64>) -> Seconds {
        runs.sort_by(f64::total_cmp);
        let at = |i: usize| runs.get(i).copied().unwrap_or(f64::NAN);
        let (n, half) = (runs.len(), runs.len() / 2);
        let median = if n % 2 == 1 { at(half) } else { (at(half.saturating_sub(1)) + at(half)) / 2.0 };
        Seconds { median, min: at(0), max: at(n.saturating_sub(1)) }
    }
}

/// Runs `work` once.
pub fn once<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(T, f64), E> {
    let started = Instant::now();
    let made = work()?;
    Ok((made, started.elapsed().as_secs_f64()))
}

/// Most memory this process held since its beginning, or since the system was told to forget that, MiB.
pub fn peak_rss_mb() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills the structure it is given; zeroes are a valid value of it should the call refuse.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    u64::try_from(usage.ru_maxrss).unwrap_or(0) / 1024
}

/// `x` with this many decimals.
pub fn rounded(x: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (x * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between() {
        let s = Seconds::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!([s.median, s.min, s.max], [2.5, 1.0, 4.0]);
        assert_eq!(Seconds::of(vec![3.0, 1.0, 2.0]).median, 2.0);
        assert!(peak_rss_mb() > 0);
    }
}
