//! How far a model's probabilities of the next token are from a reference's, with the measures of llama.cpp's `--kl-divergence`. In: two
//! models of one vocabulary, sequences of tokens. Out: the perplexity of both, the Kullback-Leibler divergence of the model from the
//! reference at each token, and how often both have the same likeliest token.

use crate::machine::Machine;
use crate::model::{Model, check_sizes, plan_within};
use crate::{Error, Hear, Note};
use astrai_builders::{Cache, Logits, Program};
use astrai_ir::DType;
use astrai_passes::Fidelity;
use astrai_runtime::Session;
use astrai_serve::cache::KvCache;
use astrai_serve::pages::Page;
use astrai_serve::scheduler::batch::StepBatch;

/// A model that gives the logits of every token of a sequence, over pages as they are when it answers requests.
pub struct Scorer {
    session: Session,
    batch: StepBatch,
    /// Ids, and pages.
    bounds: [usize; 2],
}

impl Scorer {
    /// For sequences of at most `window` tokens.
    ///
    /// # Errors
    /// The model does not take so many, or the memory does not hold it.
    pub fn new(
        model: &Model,
        window: usize,
        (storage, fidelity): (DType, Fidelity),
        machine: &Machine,
        hear: Hear,
    ) -> Result<Scorer, Error> {
        let config = &model.config;
        check_sizes(config, 1, window as u64)?;
        let table = window.div_ceil(Cache::PAGE);
        let cache = Cache { page: Cache::PAGE, pages: table, table, windows: None };
        let program = Program { logits: Logits::All, ..Program::paged(window as u64, 1, cache) };
        let planned = plan_within(config, &program, storage, machine, fidelity)?;
        planned.check_memory(&*machine.device)?;
        let kv = KvCache::new(config, cache, storage, &machine.device)?;
        let what = "loading weights";
        let session = model.start_over(planned, kv.buffers(), &mut |done, total| {
            hear(Note::Progress { what, done, total })
        })?;
        let batch = StepBatch::of_program(session.inputs(), cache.page, cache.table);
        Ok(Scorer { session, batch, bounds: [config.vocab_size, cache.pages] })
    }

    /// Logits of a sequence, `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// The sequence is empty, too long, or has ids that there are not; the device failed.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        let pages: Vec<Page> = (0..ids.len().div_ceil(Cache::PAGE)).map(|i| i as Page).collect();
        self.batch.clear();
        self.batch.push(ids, 0, &pages, self.bounds)?;
        let results = self.session.run(&self.batch.inputs(self.session.inputs()))?;
        let found = results.iter().find(|(name, _)| name == "logits").map(|(_, v)| v.to_f32());
        Ok(found.ok_or("the program has no logits")?)
    }
}

/// What two models gave so far.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Negative log-likelihood of all tokens by the model and by the reference.
    nll: [f64; 2],
    /// Of each token.
    divergences: Vec<f64>,
    /// Tokens for which both have the same likeliest one.
    agree: usize,
}

impl Comparison {
    /// Adds a sequence: logits `[tokens, vocabulary]` of the model and of the reference.
    pub fn add(&mut self, ids: &[u32], logits: [&[f32]; 2]) {
        let width = logits[0].len() / ids.len().max(1);
        let [model, reference] = logits.map(|all| all.chunks_exact(width.max(1)));
        for ((next, model), reference) in ids.iter().skip(1).zip(model).zip(reference) {
            let rows = [model, reference].map(log_softmax);
            for (sum, row) in self.nll.iter_mut().zip(&rows) {
                *sum -= row.get(*next as usize).copied().unwrap_or(f64::NAN);
            }
            let [q, p] = &rows;
            let terms =
                p.iter().zip(q).filter(|(p, _)| **p > f64::NEG_INFINITY).map(|(p, q)| p.exp() * (p - q));
            self.divergences.push(terms.sum());
            self.agree += usize::from(likeliest(q) == likeliest(p));
        }
    }

    /// The measures by name; none of no token.
    pub fn metrics(&self) -> Vec<(&'static str, f64)> {
        let n = self.divergences.len();
        if n == 0 {
            return vec![];
        }
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        let mean = |sum: f64| sum / n as f64;
        vec![
            ("tokens", n as f64),
            ("perplexity", mean(self.nll[0]).exp()),
            ("reference_perplexity", mean(self.nll[1]).exp()),
            ("kl_mean", mean(sorted.iter().sum())),
            ("kl_p95", sorted[(n * 95).div_ceil(100) - 1]),
            ("kl_max", sorted[n - 1]),
            ("top1_agreement", mean(self.agree as f64)),
        ]
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let top = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - top).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - top - sum.ln()).collect()
}

/// The place of the largest, the first of equals.
fn likeliest(row: &[f64]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_by_hand() {
        let mut c = Comparison::default();
        assert!(c.metrics().is_empty());
        // The reference says 1/2 and 1/2, the model 3/4 and 1/4; the last row predicts nothing.
        let (model, reference) = ([3f32.ln(), 0.0, 9.0, 9.0], [0.0; 4]);
        c.add(&[0, 1], [&model, &reference]);
        let found = c.metrics();
        let want = [1.0, 4.0, 2.0, (4f64 / 3.0).ln() / 2.0];
        assert!(found.iter().zip(want).all(|((_, x), want)| (x - want).abs() < 1e-6), "{found:?}");
        c.add(&[0, 0], [&reference, &reference]);
        assert_eq!((c.agree, c.divergences[1]), (2, 0.0));
    }
}
