//! Greedy continuation through the serving engine, and how sure the model was of each token. In: a model over paged keys and
//! values, a prompt. Out: the tokens that the engine chose, with the logits' margins, seen as they pass by.

use astrai_runtime::Threads;
use astrai_serve::engine::{End, Engine, Model, ModelError, Settings, Sizes};
use astrai_serve::request::{Request, Sampling};
use astrai_serve::scheduler::plan::StepPlan;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// Logits that are looked at together.
const PIECE: usize = 64;

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

/// A model that tells of the logits it gives for the last sequence of each step.
struct Watched<M> {
    model: M,
    seen: Sender<Option<Choice>>,
}

impl<M: Model> Model for Watched<M> {
    fn sizes(&self) -> Sizes {
        self.model.sizes()
    }

    fn plan(&self) -> StepPlan {
        self.model.plan()
    }

    fn pool(&self) -> Option<Arc<dyn Threads>> {
        self.model.pool()
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        let vocabulary = self.model.sizes().vocabulary;
        self.model.step(plan, logits)?;
        let all = logits.last().map_or(&[][..], |l| l);
        self.seen.send(choose(&all[all.len().saturating_sub(vocabulary)..]))?;
        Ok(())
    }
}

/// Continues `prompt` by `new` tokens; `each` hears how many there are.
pub fn continue_greedily(
    model: impl Model + Send + 'static,
    prompt: &[i64],
    new: usize,
    each: &mut dyn FnMut(usize),
) -> Result<Vec<Choice>, String> {
    let id = |t: &i64| u32::try_from(*t).map_err(|_| format!("the prompt's token {t} is none"));
    let mut request = Request::new(prompt.iter().map(id).collect::<Result<_, _>>()?);
    request.sampling =
        Sampling { temperature: 0.0, max_tokens: Some(new), ignore_eos: true, ..Sampling::default() };
    let (seen, choices) = channel();
    let settings = Settings { prefix_cache: false, ..Settings::default() };
    let engine = Engine::start(Watched { model, seen }, &settings).map_err(|e| e.to_string())?;
    let mut stream = engine.handle().submit(request).map_err(|e| e.to_string())?;
    let mut tokens = Vec::with_capacity(new);
    while let Some(event) = stream.blocking_recv() {
        tokens.extend(event.updates.iter().map(|u| i64::from(u.token)));
        each(tokens.len());
        if let Some(End::Refused(why) | End::Failed(why)) = event.end {
            return Err(why);
        }
    }
    // A prompt may take several steps; the last of them gave the first token.
    let choices: Vec<Option<Choice>> = choices.try_iter().collect();
    let first = choices.len().checked_sub(tokens.len()).ok_or("the engine chose without the model")?;
    let chosen = choices[first..].iter().zip(tokens).map(|(c, token)| Some(Choice { token, ..(*c)? }));
    chosen.collect::<Option<_>>().ok_or_else(|| "the logits are not all finite numbers".into())
}

/// The largest of the logits; `None` where one is not finite. Of most pieces the bits of their largest say that the choice is elsewhere.
pub fn choose(logits: &[f32]) -> Option<Choice> {
    // Integers in the order of the numbers, and the bits of magnitudes.
    let order = |x: f32| x.to_bits() as i32 ^ ((x.to_bits() as i32 >> 31) as u32 >> 1) as i32;
    let (mut best, mut second, mut at, mut top) = (f32::NEG_INFINITY, f32::NEG_INFINITY, 0, 0);
    for (piece, some) in logits.chunks(PIECE).enumerate() {
        let (greatest, size) = some.iter().fold((i32::MIN, 0), |(greatest, size), x| {
            (greatest.max(order(*x)), size.max(x.to_bits() & !(1 << 31)))
        });
        top = top.max(size);
        if greatest <= order(second) {
            continue;
        }
        for (i, x) in some.iter().enumerate() {
            if *x > best {
                (second, best, at) = (best, *x, piece * PIECE + i);
            } else if *x > second {
                second = *x;
            }
        }
    }
    let top = f32::from_bits(top);
    (best.is_finite() && top.is_finite()).then_some(Choice { token: at as i64, margin: best - second, top })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equals_is_chosen_and_nan_is_no_choice() {
        let c = choose(&[1.0, -4.0, 3.0, 3.0]).unwrap();
        assert_eq!((c.token, c.margin, c.top), (2, 0.0, 4.0));
        let far: Vec<f32> = (0..1000).map(|i| if i % 300 == 299 { 2.0 } else { -(i as f32) }).collect();
        let c = choose(&far).unwrap();
        assert_eq!((c.token, c.margin, c.top), (299, 0.0, 999.0));
        assert!(choose(&[1.0, f32::NAN]).is_none() && choose(&[f32::NEG_INFINITY, 0.0]).is_none());
        assert!(choose(&[]).is_none());
    }
}
