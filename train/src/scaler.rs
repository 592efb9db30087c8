//! Dynamic loss scaling (arXiv:1710.03740), by the rule and the numbers of PyTorch's `GradScaler`. In: whether a step's gradients were finite. Out: what
//! the loss of the next is multiplied by, so that gradients stored as f16 neither vanish nor overflow; the update divides by it again.

use serde::{Deserialize, Serialize};

/// Clean steps after which the scale grows.
const INTERVAL: u64 = 2000;

/// The scale of the loss, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// What the loss is multiplied by: a power of two, so that no gradient is rounded for it.
    pub scale: f64,
    /// Steps with finite gradients since it last changed.
    pub clean: u64,
    /// Steps with finite gradients in all: the moments count them alone.
    pub updates: u64,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale { scale: 65536.0, clean: 0, updates: 0 }
    }
}

impl LossScale {
    /// Takes note of a step.
    pub fn note(&mut self, finite: bool) {
        if !finite {
            (self.scale, self.clean) = (self.scale * 0.5, 0);
            return;
        }
        (self.clean, self.updates) = (self.clean + 1, self.updates + 1);
        if self.clean == INTERVAL {
            (self.scale, self.clean) = (self.scale * 2.0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_at_once_and_doubles_after_two_thousand() {
        let mut s = LossScale::default();
        let mut note = |finite: bool, times: usize| {
            (0..times).for_each(|_| s.note(finite));
            (s.scale, s.clean, s.updates)
        };
        assert_eq!(note(false, 2), (16384.0, 0, 0));
        assert_eq!(note(true, 1999), (16384.0, 1999, 1999));
        assert_eq!(note(false, 1), (8192.0, 0, 1999));
        assert_eq!(note(true, 2000), (16384.0, 0, 3999));
        assert_eq!(note(true, 2000), (32768.0, 0, 5999));
    }
}
