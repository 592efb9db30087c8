//! The learning rate. In: the step and the schedule's settings. Out: one number, a pure function of both, so that a
//! resumed run continues the curve by knowing its step alone. Warm-up, cosine and the warmup-stable-decay form follow
//! llm.c's `schedulers.h`; the floor is an absolute rate.

use std::f64::consts::PI;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What follows the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// The peak rate to the end
    Constant,
    /// A straight line from the peak to the floor
    Linear,
    /// Half a cosine from the peak to the floor
    Cosine,
    /// The peak rate, then over the last fifth of the steps down to the floor with one minus a square root
    Wsd,
}

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// What follows the warm-up.
    pub decay: Decay,
    /// Peak rate.
    pub lr: f64,
    /// Rate at which the decay ends, absolute.
    pub min_lr: f64,
    /// Steps over which the rate rises linearly to the peak.
    pub warmup: u64,
    /// Steps of the whole run, warm-up included.
    pub total: u64,
}

impl Schedule {
    /// Rate of the update number `step`, counted from 0. Beyond `total` it stays where the decay ended.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / self.warmup as f64;
        }
        let share = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - self.progress(step, self.warmup),
            Decay::Cosine => 0.5 * (1.0 + (PI * self.progress(step, self.warmup)).cos()),
            Decay::Wsd => {
                let start = (self.total - self.total / 5).max(self.warmup);
                1.0 - self.progress(step, start).sqrt()
            }
        };
        match self.decay {
            Decay::Constant => self.lr,
            _ => self.min_lr + share * (self.lr - self.min_lr),
        }
    }

    /// How much of the way from step `start` to the last lies behind, in 0..=1.
    fn progress(&self, step: u64, start: u64) -> f64 {
        let (done, all) = (step.saturating_sub(start), self.total.saturating_sub(start));
        if done >= all && done > 0 { 1.0 } else { done as f64 / all.max(1) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay) -> Schedule {
        Schedule { decay, lr: 1.0, min_lr: 0.2, warmup: 4, total: 24 }
    }

    fn near(schedule: &Schedule, values: &[(u64, f64)]) {
        for &(step, lr) in values {
            let got = schedule.at(step);
            assert!((got - lr).abs() < 1e-12, "{:?} at {step}: {got}, by hand {lr}", schedule.decay);
        }
    }

    #[test]
    fn warm_up_reaches_the_peak_at_its_last_step() {
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine, Decay::Wsd] {
            near(&schedule(decay), &[(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0)]);
        }
    }

    #[test]
    fn values_by_hand() {
        near(&schedule(Decay::Constant), &[(14, 1.0), (24, 1.0), (99, 1.0)]);
        near(&schedule(Decay::Linear), &[(9, 0.8), (14, 0.6), (19, 0.4), (24, 0.2), (99, 0.2)]);
        // cos(π/4) = √½
        let eighth = 0.2 + 0.4 * (1.0 + 0.5f64.sqrt());
        near(&schedule(Decay::Cosine), &[(9, eighth), (14, 0.6), (24, 0.2), (99, 0.2)]);
        // A fifth of 24 steps is 4: the decay begins at step 20.
        near(&schedule(Decay::Wsd), &[(19, 1.0), (20, 1.0), (21, 0.6), (24, 0.2), (99, 0.2)]);
    }

    #[test]
    fn degenerate_lengths_give_finite_rates() {
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine, Decay::Wsd] {
            for (warmup, total) in [(0, 0), (0, 1), (1, 1), (5, 5), (0, u64::MAX), (9, 3)] {
                let schedule = Schedule { decay, lr: 3e-4, min_lr: 0.0, warmup, total };
                for step in [0, 1, 4, 5, 6, u64::MAX - 1] {
                    let lr = schedule.at(step);
                    assert!((0.0..=3e-4).contains(&lr), "{schedule:?} at {step}: {lr}");
                }
            }
        }
    }
}
