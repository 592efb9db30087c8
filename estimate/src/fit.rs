//! Numbers of kernels from measurements. In: launches with the seconds that they took together. Out: for each archetype the part of the
//! peaks reached and the seconds beside, for each engine the seconds between starts. Least squares of ln(predicted / measured), with
//! a pull to typical numbers where measurements say nothing; walked coordinate by coordinate, the same on every machine.

use crate::Refused;
use crate::hardware::{ARCHETYPES, Hardware, Kernels, Reach};
use crate::model::{body, time};
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
/// The same of parts of the peaks, beside all measurements: many that cannot tell computing from memory do not say that either is strange.
const PULL_OF: f64 = 0.005;

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
                apart: 0.0,
            };
        }
        let at = 3 * ARCHETYPES.len();
        Fitted { kernels, launch: std::array::from_fn(|i| value(at + i)) }
    }

    fn loss(&self, cases: &[&Case]) -> Result<f64, Refused> {
        let mut sum = 0.0;
        for case in cases {
            sum += (self.predict(case)? / case.measured).ln().powi(2);
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
    let loss = |numbers: &mut Vec<f64>| {
        let fitted = Fitted::with(numbers);
        *numbers = fitted.numbers();
        fitted.loss(&cases)
    };
    let mut best = Fitted::with(&walk(Fitted::typical().numbers(), ROUNDS, &loss)?.1);
    let mut square = 0.0;
    for case in &cases {
        square += (best.predict(case)? / case.measured).ln().powi(2);
    }
    best.kernels.residual = Some((square / cases.len().max(1) as f64).sqrt());
    Ok(best)
}

/// What is to be small, of numbers that are brought into their ranges.
type Loss<'a> = &'a dyn Fn(&mut Vec<f64>) -> Result<f64, Refused>;

/// The numbers for which the loss is small, found from these, behind it.
fn walk(mut numbers: Vec<f64>, rounds: usize, loss: Loss) -> Result<(f64, Vec<f64>), Refused> {
    let mut least = loss(&mut numbers)?;
    let mut steps = vec![0.25; numbers.len()];
    for _ in 0..rounds {
        for i in 0..numbers.len() {
            let mut better = false;
            for sign in [1.0, -1.0] {
                let mut tried = numbers.clone();
                tried[i] += sign * steps[i];
                let l = loss(&mut tried)?;
                if l < least {
                    (least, numbers, better) = (l, tried, true);
                    break;
                }
            }
            steps[i] *= if better { 1.3 } else { 0.5 };
        }
    }
    Ok((least, numbers))
}

/// A kernel measured on a device: seconds at its peaks of computing and of memory, of what is known, and beside them; seconds measured; how much it counts.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Computing, computing whose speed is known, memory, memory past the caches, and what is known to be beside them.
    pub at_peaks: [f64; 5],
    /// Measured.
    pub measured: f64,
    /// Its weight.
    pub weight: f64,
}

/// Part by which a measurement is off, up to which its square counts, and beyond it only so much more: a host moves a virtual machine's cores at times between a
/// look at the speeds and the step beside it, and such a step is not to draw the numbers of all others.
const OFF: f64 = 0.1;

/// How much it counts that a logarithm is so far off: Huber's loss.
fn bounded(off: f64) -> f64 {
    let off = off.abs();
    if off <= OFF { off * off } else { OFF * (2.0 * off - OFF) }
}

/// How far kernels of one kind reach the peaks; with the sum of weighted squares that is left, and the weights.
///
/// # Errors
/// None: the form is that of the walk.
pub fn reach(seen: &[Seen]) -> Result<(Reach, [f64; 2]), Refused> {
    let typical = [0.6f64.ln(), 0.8f64.ln(), 0.3, 1e-6f64.ln()];
    let weight: f64 = seen.iter().map(|s| s.weight).sum();
    let pull = [PULL + PULL_OF * weight, PULL + PULL_OF * weight, PULL, PULL];
    let of = |n: &[f64]| Reach {
        compute: n[0].exp(),
        memory: n[1].exp().min(Reach::MOST_MOVED),
        apart: n[2],
        fixed: n[3].exp(),
    };
    let counted = |r: Reach, much: fn(f64) -> f64| {
        let one = |s: &Seen| {
            let [compute, known, memory, past, beside] = s.at_peaks;
            let memory = [memory, past].map(|bytes| bytes / r.memory);
            let predicted = body(compute / r.compute + known, memory, r.apart) + r.fixed + beside;
            s.weight * much((predicted / s.measured).ln())
        };
        seen.iter().map(one).sum::<f64>()
    };
    let loss = |n: &mut Vec<f64>| {
        for (x, (least, most)) in
            n.iter_mut().zip([(1e-3, 1.0), (0.02, Reach::MOST_MOVED), (0.0, 1.0), (1e-8, 1e-3)])
        {
            let range: (f64, f64) = if least > 0.0 { (f64::ln(least), f64::ln(most)) } else { (least, most) };
            *x = x.clamp(range.0, range.1);
        }
        let far = n.iter().zip(typical).zip(pull).map(|((a, b), pull)| pull * (a - b).powi(2)).sum::<f64>();
        Ok(counted(of(n), bounded) + far)
    };
    // Where computing and memory take as long as each other a walk may end far from the best, so that it begins at several places.
    let mut best = walk(typical.to_vec(), 3 * ROUNDS, &loss)?;
    for (i, j, k) in (0..27).map(|i| (i / 9, i / 3 % 3, i % 3)) {
        let start =
            [f64::ln([0.3, 0.6, 0.95][i]), f64::ln([0.5, 0.8, 1.1][j]), [0.0, 0.5, 1.0][k], typical[3]];
        let next = walk(start.to_vec(), 3 * ROUNDS, &loss)?;
        if next.0 < best.0 {
            best = next;
        }
    }
    let found = of(&best.1);
    Ok((found, [counted(found, |off| off * off), weight]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_again() {
        let is = Reach { compute: 0.4, memory: 0.7, apart: 0.2, fixed: 5e-6 };
        let seen = |[compute, memory]: [f64; 2]| {
            let known = compute / 10.0;
            let bytes = [memory / is.memory, memory / is.memory / 10.0];
            let measured = body(compute / is.compute + known, bytes, is.apart) + is.fixed + 1e-6;
            Seen { at_peaks: [compute, known, memory, memory / 10.0, 1e-6], measured, weight: 1.0 }
        };
        let cases = [[1e-3, 1e-5], [1e-3, 1e-3], [1e-6, 1e-3], [2e-4, 2e-4], [1e-7, 1e-7], [1e-5, 1e-6]];
        let seen: Vec<Seen> = cases.into_iter().map(seen).collect();
        let (found, [squares, weight]) = reach(&seen).unwrap();
        assert!((squares / weight).sqrt() < 0.03, "{found:?}");
        assert!(
            (found.compute / is.compute - 1.0).abs() < 0.05 && (found.memory / is.memory - 1.0).abs() < 0.05,
            "{found:?}"
        );
    }

    /// Nine steps at one speed, and one while memory was half as fast again.
    #[test]
    fn one_wrong_step_draws_no_other() {
        let is = Reach { compute: 0.8, memory: 1.0, apart: 0.1, fixed: 1e-6 };
        let seen = |i: usize| {
            let at_peaks = [1e-4 * (i + 1) as f64, 0.0, 1e-3, 0.0, 0.0];
            let measured = body(at_peaks[0] / is.compute, [1e-3, 0.0], is.apart) + is.fixed;
            Seen { at_peaks, measured: if i == 0 { measured / 1.5 } else { measured }, weight: 20.0 }
        };
        let (found, _) = reach(&(0..10).map(seen).collect::<Vec<_>>()).unwrap();
        for Seen { at_peaks: [compute, _, memory, ..], measured, .. } in (1..10).map(seen) {
            let predicted =
                body(compute / found.compute, [memory / found.memory, 0.0], found.apart) + found.fixed;
            assert!((predicted / measured - 1.0).abs() < 0.05, "{found:?}");
        }
    }

    #[test]
    fn a_walk_does_not_end_on_the_way() {
        // Gradients of experts' weights, 128 and 1,024 tokens, whose results are written past the caches.
        let steps = [(1135.2, 10.0, 902.5, 18.7, 2123.5), (9081.5, 86.3, 881.6, 145.1, 11449.3)];
        let seen = steps.map(|(compute, memory, past, beside, measured)| Seen {
            at_peaks: [compute, 0.0, memory, past, beside].map(|us| us * 1e-6),
            measured: measured * 1e-6,
            weight: 1.4,
        });
        let (found, [squares, weight]) = reach(&seen).unwrap();
        assert!((squares / weight).sqrt() < 0.06, "{found:?}, {}", (squares / weight).sqrt());
    }
}
