//! Numbers of kernels from measurements. In: launches with the seconds that they took together. Out: for each archetype the part of the
//! peaks reached and the seconds beside, for each engine the seconds between starts. Least squares of ln(predicted / measured), with
//! a pull to typical numbers where measurements say nothing; walked coordinate by coordinate, the same on every machine.

use crate::Refused;
use crate::hardware::{ARCHETYPES, Hardware, Kernels, Reach};
use crate::model::time;
use crate::published::{Case, ENGINES};

/// What was fitted.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// Numbers of all archetypes.
    pub kernels: Kernels,
    /// Seconds between starts, of each engine.
    pub launch: [f64; ENGINES.len()],
}

/// Weight of the pull to typical numbers, beside one measurement.
const PULL: f64 = 0.02;

/// Rounds of the walk.
const ROUNDS: usize = 24;

impl Fitted {
    fn typical() -> Fitted {
        Fitted { kernels: Kernels::typical(), launch: [0.5e-6, 4e-6] }
    }

    /// Seconds of a case with these numbers.
    ///
    /// # Errors
    /// A size overflows.
    pub fn predict(&self, case: &Case) -> Result<f64, Refused> {
        let hardware = Hardware {
            kernels: self.kernels.clone(),
            launch: self.launch[case.engine],
            ..case.hardware.clone()
        };
        let mut sum = case.beside + self.kernels.step;
        for (work, launches) in &case.works {
            sum += time(work, &hardware, &case.mesh, &|_| None)?.total() * launches;
        }
        Ok(sum)
    }

    /// Its numbers as logarithms, in a row; parts of peaks and seconds alike.
    fn numbers(&self) -> Vec<f64> {
        let reach = self.kernels.reach.iter().flat_map(|r| [r.compute, r.memory, r.fixed.max(1e-9)]);
        reach.chain(self.launch).map(f64::ln).collect()
    }

    fn with(numbers: &[f64]) -> Fitted {
        let value = |i: usize| numbers[i].exp();
        let mut kernels = Kernels::typical();
        for (i, r) in kernels.reach.iter_mut().enumerate() {
            let part = |x: f64| x.clamp(0.02, 1.0);
            *r = Reach {
                compute: part(value(3 * i)),
                memory: part(value(3 * i + 1)),
                fixed: value(3 * i + 2),
            };
        }
        let at = 3 * ARCHETYPES.len();
        Fitted { kernels, launch: std::array::from_fn(|i| value(at + i)) }
    }

    fn loss(&self, cases: &[&Case]) -> Result<f64, Refused> {
        let mut sum = 0.0;
        for case in cases {
            sum += case.weight * (self.predict(case)? / case.measured).ln().powi(2);
        }
        let typical = Fitted::typical().numbers();
        let pull: f64 = self.numbers().iter().zip(typical).map(|(a, b)| (a - b).powi(2)).sum();
        Ok(sum + PULL * pull)
    }
}

/// Fits the numbers to measurements; those whose error has a written reason are left out.
///
/// # Errors
/// A size overflows.
pub fn fit(cases: &[&Case]) -> Result<Fitted, Refused> {
    let cases: Vec<&Case> = cases.iter().copied().filter(|c| c.reason.is_none()).collect();
    let mut best = Fitted::typical();
    let mut numbers = best.numbers();
    let mut loss = best.loss(&cases)?;
    let mut steps = vec![0.25; numbers.len()];
    for _ in 0..ROUNDS {
        for i in 0..numbers.len() {
            let mut better = false;
            for sign in [1.0, -1.0] {
                let mut tried = numbers.clone();
                tried[i] += sign * steps[i];
                let candidate = Fitted::with(&tried);
                let l = candidate.loss(&cases)?;
                if l < loss {
                    (loss, best, better) = (l, candidate, true);
                    numbers = best.numbers();
                    break;
                }
            }
            steps[i] *= if better { 1.3 } else { 0.5 };
        }
    }
    let mut square = 0.0;
    for case in &cases {
        square += case.weight * (best.predict(case)? / case.measured).ln().powi(2);
    }
    let weight: f64 = cases.iter().map(|c| c.weight).sum();
    best.kernels.residual = Some((square / weight.max(f64::MIN_POSITIVE)).sqrt());
    Ok(best)
}
