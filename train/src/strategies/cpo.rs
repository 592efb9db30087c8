//! Contrastive preference optimisation (arXiv:2401.08417) and SimPO (arXiv:2405.14734): pairs of answers without a reference.

use super::terms::{Objective, Terms, log_sigmoid, mean, truth};
use super::{Batch, Column, Entry, Frozen, Strategy, read, share};
use serde::Deserialize;
use serde_json::json;

pub(super) const CPO: Entry = Entry {
    name: "cpo",
    description: "pairs of answers without a reference; loss_type=simpo by means over tokens with a margin",
    make: |o| Ok(Box::new(read::<Cpo>(o)?)),
};

/// The same with the loss and the numbers of SimPO; where TRL is told `loss_type=simpo`, it keeps those of CPO.
pub(super) const SIMPO: Entry = Entry {
    name: "simpo",
    description: "pairs of answers without a reference, by means over tokens with a margin",
    make: |mut o| {
        if o.contains_key("loss_type") {
            return Err("loss_type: there is one; the strategy cpo has others".into());
        }
        o.insert("loss_type".into(), json!("simpo"));
        for (key, unless) in [("beta", 2.0), ("cpo_alpha", 0.0)] {
            o.entry(key).or_insert(unless.into());
        }
        Ok(Box::new(read::<Cpo>(o)?))
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Sigmoid,
    Hinge,
    Ipo,
    /// Means over tokens, less the margin `simpo_gamma`.
    Simpo,
}

/// Options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Cpo {
    loss_type: Kind,
    beta: f64,
    label_smoothing: f64,
    /// Of the cross-entropy of the better answers.
    cpo_alpha: f64,
    simpo_gamma: f64,
}

impl Default for Cpo {
    fn default() -> Cpo {
        Cpo { loss_type: Kind::Sigmoid, beta: 0.1, label_smoothing: 0.0, cpo_alpha: 1.0, simpo_gamma: 0.5 }
    }
}

impl Strategy for Cpo {
    fn columns(&self, batch: &Batch, _: &Frozen, window: &[Batch]) -> Result<Vec<Column>, String> {
        let chosen = |b: &Batch| if let Batch::Pairs(b) = b { b.chosen.valid() } else { 0 };
        match batch {
            Batch::Pairs(_) if self.cpo_alpha != 0.0 => Ok(vec![share(window, chosen)]),
            Batch::Pairs(_) => Ok(vec![]),
            _ => Err("cpo and simpo learn from pairs of answers".into()),
        }
    }

    fn objective(&self, t: &Terms) -> Objective {
        let (n, b, e) = (t.sequences / 2, self.beta, self.label_smoothing);
        let sums = t.sum(&t.logp);
        let by_length = matches!(self.loss_type, Kind::Simpo | Kind::Ipo);
        let logps = if by_length { sums / t.lengths() } else { sums };
        let (w, l) = (logps.slice(0, 0..n), logps.slice(0, n..2 * n));
        let delta = &w - &l;
        let smoothed = |x: astrai_ir::Value| log_sigmoid(&x, n) * (e - 1.0) - log_sigmoid(&-&x, n) * e;
        let losses = match self.loss_type {
            Kind::Sigmoid => smoothed(delta * b),
            Kind::Simpo => smoothed(delta * b - self.simpo_gamma),
            Kind::Hinge => (1.0 - delta * b).relu(),
            Kind::Ipo => {
                let off = delta - 0.5 / b;
                &off * &off
            }
        };
        let mut loss = mean(&losses);
        let mut nll = t.number(0.0);
        if self.cpo_alpha != 0.0 {
            nll = -t.mean_of_window(&t.logp, &t.mask_of(0..n));
            loss = loss + &nll * self.cpo_alpha;
        }
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
        ];
        Objective { loss, metrics }
    }
}
