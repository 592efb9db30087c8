//! The learning rate. In: the step and the schedule's settings. Out: one number, a pure function of both, so that a
//! resumed run continues the curve by knowing its step alone. Warm-up, cosine and the warmup-stable-decay form follow
//! llm.c's `schedulers.h`; the floor is an absolute rate.

use std::f64::consts::PI;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What follows the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Decay {
    /// The peak rate to the end
    Constant,
    /// A straight line from the peak to the floor
    Linear,
    /// Half a cosine from the peak to the floor
    Cosine,
    /// Half a cosine from the peak to zero, never below the floor
    CosineClamped,
    /// Cosines from the peak to the floor, one after another (arXiv:1608.03983)
    Sgdr,
    /// The peak rate, then over the last fifth of the steps, or after --stable, down to the floor with one minus a square root
    Wsd,
    /// As wsd in a straight line
    WsdLinear,
    /// As wsd along half a cosine
    WsdCosine,
    /// As wsd along a parabola
    WsdSquare,
    /// As wsd along 2 · 0.5^r − 1, as Megatron's exponential
    WsdExponential,
    /// From the end of the warm-up with the inverse square root of the step
    InverseSqrt,
}

impl Decay {
    /// Whether there is a time at the peak before the decay.
    pub fn is_wsd(self) -> bool {
        use Decay::{Wsd, WsdCosine, WsdExponential, WsdLinear, WsdSquare};
        matches!(self, Wsd | WsdLinear | WsdCosine | WsdSquare | WsdExponential)
    }

    /// Whether it ends at a floor.
    pub fn has_floor(self) -> bool {
        !matches!(self, Decay::Constant | Decay::InverseSqrt)
    }
}

/// How the rate rises over the warm-up's W steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum WarmUp {
    /// Step t, from 0, has (t + 1) / W of the peak
    #[default]
    First,
    /// t / W: the first step changes nothing
    Zero,
    /// t / W, never below the floor
    Floor,
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
    /// How it does.
    pub warm_up: WarmUp,
    /// Steps at the peak, of the forms that have such; else the decay takes the last fifth.
    pub stable: Option<u64>,
    /// Of warm restarts: steps of the first cosine, and how many times as long each next one is.
    pub cycle: (u64, u64),
    /// Steps of the whole run, warm-up included.
    pub total: u64,
}

impl Schedule {
    /// Rate of the update number `step`, counted from 0. Beyond `total` it stays where the decay ended.
    pub fn at(&self, step: u64) -> f64 {
        let floor = if self.lr > 0.0 { self.min_lr / self.lr } else { 0.0 };
        if step < self.warmup {
            let share = |t: u64| t as f64 / self.warmup as f64;
            return self.lr
                * match self.warm_up {
                    WarmUp::First => share(step + 1),
                    WarmUp::Zero => share(step),
                    WarmUp::Floor => share(step).max(floor),
                };
        }
        let cosine = |r: f64| 0.5 * (1.0 + (PI * r).cos());
        let after = |step| self.progress(step, self.warmup);
        let late = || {
            let last = self.total.saturating_sub(self.total / 5);
            let start = self.stable.map_or(last, |n| self.warmup.saturating_add(n));
            self.progress(step, start.max(self.warmup))
        };
        let share = match self.decay {
            Decay::Constant => return self.lr,
            Decay::InverseSqrt => return self.lr * (self.warmup.max(1) as f64 / step.max(1) as f64).sqrt(),
            Decay::CosineClamped => return self.lr * cosine(after(step)).max(floor),
            Decay::Linear => 1.0 - after(step),
            Decay::Cosine => cosine(after(step)),
            Decay::Sgdr => cosine(self.in_cycle(step - self.warmup)),
            Decay::Wsd => 1.0 - late().sqrt(),
            Decay::WsdLinear => 1.0 - late(),
            Decay::WsdCosine => cosine(late()),
            Decay::WsdSquare => (1.0 - late()).powi(2),
            Decay::WsdExponential => 2.0 * 0.5f64.powf(late()) - 1.0,
        };
        self.min_lr + share * (self.lr - self.min_lr)
    }

    /// How much of its cycle lies behind step `t` after the warm-up, in 0..1.
    fn in_cycle(&self, t: u64) -> f64 {
        let (mut length, mut begin) = (self.cycle.0.max(1), 0u64);
        if self.cycle.1 <= 1 {
            return (t % length) as f64 / length as f64;
        }
        while t - begin >= length {
            begin += length;
            length = length.saturating_mul(self.cycle.1);
        }
        (t - begin) as f64 / length as f64
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

    fn flat() -> Schedule {
        let (decay, warm_up) = (Decay::Constant, WarmUp::First);
        Schedule { decay, lr: 0.0, min_lr: 0.0, warmup: 0, warm_up, stable: None, cycle: (5, 2), total: 0 }
    }

    fn schedule(decay: Decay) -> Schedule {
        Schedule { decay, lr: 1.0, min_lr: 0.2, warmup: 4, total: 24, ..flat() }
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

    /// Cycles of 5, 10, 20 steps after a warm-up of 4.
    #[test]
    fn restarts_and_floors_by_hand() {
        near(&schedule(Decay::Sgdr), &[(4, 1.0), (9, 1.0), (14, 0.6), (19, 1.0), (29, 0.6)]);
        near(&schedule(Decay::CosineClamped), &[(4, 1.0), (14, 0.5), (22, 0.2), (99, 0.2)]);
        near(
            &Schedule { stable: Some(10), ..schedule(Decay::WsdLinear) },
            &[(13, 1.0), (19, 0.6), (24, 0.2)],
        );
        let half = 0.2 + 0.8 * (2.0 * 0.5f64.sqrt() - 1.0);
        near(&schedule(Decay::WsdExponential), &[(20, 1.0), (22, half), (24, 0.2), (99, 0.2)]);
        near(&schedule(Decay::InverseSqrt), &[(4, 1.0), (16, 0.5)]);
        near(
            &Schedule { warm_up: WarmUp::Floor, ..schedule(Decay::Cosine) },
            &[(0, 0.2), (1, 0.25), (3, 0.75)],
        );
        near(&Schedule { warm_up: WarmUp::Zero, ..schedule(Decay::Cosine) }, &[(0, 0.0), (2, 0.5)]);
    }

    #[test]
    fn degenerate_lengths_give_finite_rates() {
        for decay in Decay::value_variants().iter().copied() {
            for (warmup, total) in [(0, 0), (0, 1), (1, 1), (5, 5), (0, u64::MAX), (9, 3)] {
                let schedule = Schedule { decay, lr: 3e-4, min_lr: 0.0, warmup, total, ..flat() };
                for step in [0, 1, 4, 5, 6, u64::MAX - 1] {
                    let lr = schedule.at(step);
                    assert!((0.0..=3e-4).contains(&lr), "{schedule:?} at {step}: {lr}");
                }
            }
        }
    }
}
