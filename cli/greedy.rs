//! Greedy continuation by full forward passes, without a cache: the plainest way to generate, and the reference for any
//! faster one.

use crate::batch::Batch;
use astrai_builders::{Logits, Program};
use astrai_runtime::Session;

/// One token chosen.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// The token of the largest logit; the smallest such token where several are equal.
    pub token: i64,
    /// Largest logit minus the second largest.
    pub margin: f32,
    /// Largest magnitude of any logit.
    pub top: f32,
}

/// The program for sequences of up to `tokens` tokens.
pub fn program(tokens: u64) -> Program {
    Program { logits: Logits::Last, ..Program::full(1, tokens) }
}

/// Continues `prompt` by `new` tokens with a session of [`program`]; `each` hears how many there are.
pub fn continue_greedily(
    session: &mut Session,
    prompt: &[i64],
    new: usize,
    vocab: usize,
    each: &mut dyn FnMut(usize),
) -> Result<Vec<Choice>, String> {
    let mut sequence = prompt.to_vec();
    let mut chosen = Vec::with_capacity(new);
    for step in 0..new {
        let batch = Batch::new(&[&sequence], vocab)?;
        let outs = session.run(&batch.inputs(session.inputs())).map_err(|e| e.to_string())?;
        let logits = outs.first().map(|(_, v)| v.to_f32()).unwrap_or_default();
        let choice = choose(logits.iter().copied())
            .ok_or_else(|| format!("step {step}: the logits are not all finite numbers"))?;
        sequence.push(choice.token);
        chosen.push(choice);
        each(step + 1);
    }
    Ok(chosen)
}

/// The largest of the logits; `None` where one is not finite.
pub(crate) fn choose(logits: impl Iterator<Item = f32>) -> Option<Choice> {
    let (mut best, mut second, mut at, mut top) = (f32::NEG_INFINITY, f32::NEG_INFINITY, 0, 0f32);
    for (i, x) in logits.enumerate() {
        if !x.is_finite() {
            return None;
        }
        if x > best {
            (second, best, at) = (best, x, i);
        } else if x > second {
            second = x;
        }
        top = top.max(x.abs());
    }
    best.is_finite().then_some(Choice { token: at as i64, margin: best - second, top })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equals_is_chosen_and_nan_is_no_choice() {
        let c = choose([1.0, -4.0, 3.0, 3.0].into_iter()).unwrap();
        assert_eq!((c.token, c.margin, c.top), (2, 0.0, 4.0));
        assert!(choose([1.0, f32::NAN].into_iter()).is_none());
        assert!(choose([].into_iter()).is_none());
    }
}
