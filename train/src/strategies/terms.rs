//! What objectives are written with. In: the outputs of a program with [`astrai_builders::Loss::Tokens`] and a batch's inputs. Out: values
//! of tokens `[tokens]` and of sequences `[sequences]`, sums between the two, and the functions that losses share.

use astrai_ir::{DType, Dim, Tape, Value};
use std::collections::HashMap;

/// A loss and what is logged beside it.
pub struct Objective {
    /// The value to minimise, a scalar.
    pub loss: Value,
    /// Scalars by name.
    pub metrics: Vec<(&'static str, Value)>,
}

/// The values from which an objective is made; values of tokens are f32 `[tokens]`, and 0 where the target is ignored.
pub struct Terms {
    tape: Tape,
    /// Log-probability of the target.
    pub logp: Value,
    /// Log of the sum of the logits' exponentials.
    pub lse: Value,
    /// Mean logit.
    pub mean_logit: Value,
    /// Entropy.
    pub entropy: Value,
    /// log Σ p².
    pub log_sum_square: Value,
    /// 1 where no logit is greater than the target's.
    pub top: Value,
    /// 1 at tokens whose target is of a completion, else 0.
    pub mask: Value,
    /// Sequence of each token, i32.
    sequence: Value,
    /// Sequences.
    pub sequences: usize,
}

impl Terms {
    pub(super) fn new(tape: &Tape, of: &HashMap<String, Value>, sequences: usize) -> Terms {
        let tokens = || vec![Dim::symbol("tokens")];
        let at = |name: &str| of[name].clone();
        Terms {
            logp: -at("nll"),
            lse: at("lse"),
            mean_logit: at("mean_logit"),
            entropy: at("entropy"),
            log_sum_square: at("log_sum_square"),
            top: at("top"),
            mask: tape.input("mask", DType::F32, tokens()),
            sequence: tape.input("sequence", DType::I32, tokens()),
            tape: tape.clone(),
            sequences,
        }
    }

    /// A column of tokens.
    pub fn of_tokens(&self, name: &str) -> Value {
        self.tape.input(name, DType::F32, vec![Dim::symbol("tokens")])
    }

    /// A column of sequences, or of `n` things.
    pub fn of(&self, name: &str, n: usize) -> Value {
        self.tape.input(name, DType::F32, [n])
    }

    /// A number as a scalar.
    pub fn number(&self, x: f64) -> Value {
        self.tape.full(DType::F32, [0; 0], x)
    }

    /// Sums over the tokens of each sequence.
    pub fn sum(&self, x: &Value) -> Value {
        self.tape.full(DType::F32, [self.sequences], 0.0).scatter_add(&self.sequence, x, 0)
    }

    /// A value of sequences at each of their tokens.
    pub fn spread(&self, x: &Value) -> Value {
        x.gather(&self.sequence, 0)
    }

    /// Completion tokens of each sequence, at least 1.
    pub fn lengths(&self) -> Value {
        let n = self.sum(&self.mask);
        n.maximum(&n.full_like(1.0))
    }

    /// The mean of a value over completion tokens.
    pub fn mean(&self, x: &Value) -> Value {
        (x * &self.mask).sum(&[], false) / count(&self.mask)
    }

    /// The same over the tokens whose `weight` is 1.
    pub fn mean_where(&self, x: &Value, weight: &Value) -> Value {
        (x * weight).sum(&[], false) / count(weight)
    }

    /// The same by the column `window_tokens` of the strategy, so that the micro-batches of a window count by their tokens.
    pub fn mean_of_window(&self, x: &Value, weight: &Value) -> Value {
        (x * weight).sum(&[], false) / self.tape.input("window_tokens", DType::F32, [0; 0])
    }

    /// The mask of the tokens of sequences `range` alone.
    pub fn mask_of(&self, range: std::ops::Range<usize>) -> Value {
        let one: Vec<f32> = (0..self.sequences).map(|i| if range.contains(&i) { 1.0 } else { 0.0 }).collect();
        let one = self.tape.constant(&astrai_ir::Tensor::f32(&[self.sequences], &one));
        self.spread(&one) * &self.mask
    }
}

/// The sum of a mask, at least 1.
fn count(mask: &Value) -> Value {
    let n = mask.sum(&[], false);
    n.maximum(&n.full_like(1.0))
}

/// The mean over all elements.
pub fn mean(x: &Value) -> Value {
    x.mean(&[], false)
}

/// log σ(x) of `n` numbers, by a softmax over x and 0: right, with its gradient, at every x.
pub fn log_sigmoid(x: &Value, n: usize) -> Value {
    let x = x.reshape([n, 1]);
    x.concat(&[&x.full_like(0.0)], 1).log_softmax(-1).slice(1, 0..1).reshape([n])
}

/// Truth as 1 and 0.
pub fn truth(x: Value) -> Value {
    x.cast(DType::F32)
}

/// `x` between two bounds, each optional.
pub fn clamp(x: &Value, low: Option<f64>, high: Option<f64>) -> Value {
    let x = low.map_or_else(|| x.clone(), |low| x.maximum(&x.full_like(low)));
    high.map_or_else(|| x.clone(), |high| x.minimum(&x.full_like(high)))
}
