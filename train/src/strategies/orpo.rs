//! Odds-ratio preference optimisation (arXiv:2403.07691): cross-entropy of the better conversation, and the log-odds of the better answer
//! against the worse; no reference.

use super::terms::{Objective, Terms, log_sigmoid, mean, truth};
use super::{Batch, Column, Entry, Frozen, Strategy, read, share};
use serde::Deserialize;

pub(super) const ORPO: Entry = Entry {
    name: "orpo",
    description: "pairs of answers by their odds, without a reference",
    make: |o| Ok(Box::new(read::<Orpo>(o)?)),
};

/// Options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Orpo {
    beta: f64,
}

impl Default for Orpo {
    fn default() -> Orpo {
        Orpo { beta: 0.1 }
    }
}

impl Strategy for Orpo {
    /// The cross-entropy is that of prompt and answer.
    fn learns_prompts(&self) -> bool {
        true
    }

    fn columns(&self, batch: &Batch, _: &Frozen, window: &[Batch]) -> Result<Vec<Column>, String> {
        let Batch::Pairs(_) = batch else { return Err("orpo learns from pairs of answers".into()) };
        let all = batch.sequences();
        let half = all.starts[all.sequences() / 2] as usize;
        let next = super::next_tokens(&all);
        let chosen = (0..all.tokens()).map(|t| if t < half && next[t] >= 0 { 1.0 } else { 0.0 }).collect();
        let next =
            |b: &Batch| if let Batch::Pairs(b) = b { b.chosen.tokens().saturating_sub(b.pairs()) } else { 0 };
        Ok(vec![("better", vec![all.tokens()], chosen), share(window, next)])
    }

    fn objective(&self, t: &Terms) -> Objective {
        let (n, b) = (t.sequences / 2, self.beta);
        let nll = -t.mean_of_window(&t.logp, &t.of_tokens("better"));
        let means = t.sum(&(&t.logp * &t.mask)) / t.lengths();
        let (w, l) = (means.slice(0, 0..n), means.slice(0, n..2 * n));
        let against = |x: &astrai_ir::Value| (1.0 - x.exp()).log();
        let odds = &w - &l - (against(&w) - against(&l));
        let ratio = log_sigmoid(&odds, n);
        let loss = &nll - mean(&ratio) * b;
        let metrics = vec![
            ("rewards/accuracies", mean(&truth(w.greater(&l)))),
            ("rewards/margins", mean(&((&w - &l) * b))),
            ("rewards/chosen", mean(&w) * b),
            ("rewards/rejected", mean(&l) * b),
            ("logits/chosen", t.mean_where(&t.mean_logit, &t.mask_of(0..n))),
            ("logits/rejected", t.mean_where(&t.mean_logit, &t.mask_of(n..2 * n))),
            ("logps/chosen", mean(&w)),
            ("logps/rejected", mean(&l)),
            ("nll_loss", nll),
            ("log_odds_ratio", mean(&ratio)),
            ("log_odds_chosen", mean(&odds)),
        ];
        Objective { loss, metrics }
    }
}
