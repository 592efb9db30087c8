//! Kahneman-Tversky optimisation (arXiv:2402.01306): answers that are wanted or not, each alone, against a reference policy.

use super::terms::{Objective, Terms, mean};
use super::{Batch, Column, Entry, Frozen, Strategy, read, sums};
use serde::Deserialize;

pub(super) const KTO: Entry = Entry {
    name: "kto",
    description: "answers that are wanted or not, against a reference policy",
    make: |o| Ok(Box::new(read::<Kto>(o)?)),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Kto,
    /// Without the estimate of the divergence (arXiv:2408.06266).
    ApoZeroUnpaired,
}

/// Options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Kto {
    loss_type: Kind,
    beta: f64,
    desirable_weight: f64,
    undesirable_weight: f64,
}

impl Default for Kto {
    fn default() -> Kto {
        Kto { loss_type: Kind::Kto, beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0 }
    }
}

impl Strategy for Kto {
    fn frozen(&self) -> [bool; 2] {
        [true, false]
    }

    fn columns(&self, batch: &Batch, frozen: &Frozen, _: &[Batch]) -> Result<Vec<Column>, String> {
        let Batch::Labelled(labelled) = batch else {
            return Err("kto learns from answers with a label".into());
        };
        let reference = frozen.reference.as_ref().ok_or("kto needs a reference model")?;
        let all = batch.sequences();
        let label: Vec<f32> = labelled.desirable.iter().map(|d| if *d { 1.0 } else { 0.0 }).collect();
        Ok(vec![
            ("ref_logps", vec![all.sequences()], sums(&all, reference)),
            ("desirable", vec![label.len()], label),
        ])
    }

    fn objective(&self, t: &Terms) -> Objective {
        let (n, b) = (t.sequences / 2, self.beta);
        let logps = t.sum(&t.logp);
        let ratios = &logps - t.of("ref_logps", 2 * n);
        let (ratio, mismatched) = (ratios.slice(0, 0..n), ratios.slice(0, n..2 * n));
        let wanted = t.of("desirable", n);
        let unwanted = 1.0 - &wanted;
        let kl = match self.loss_type {
            Kind::Kto => mean(&mismatched).detach().relu(),
            Kind::ApoZeroUnpaired => t.number(0.0),
        };
        let away = (&ratio - kl.reshape([1]).expand([n])) * b;
        let losses = (1.0 - away.sigmoid()) * &wanted * self.desirable_weight
            + (1.0 - (-&away).sigmoid()) * &unwanted * self.undesirable_weight;
        let reward = ratio * b;
        let logps = logps.slice(0, 0..n);
        let of = |x: &astrai_ir::Value, which: &astrai_ir::Value| {
            let count = which.sum(&[], false);
            (x * which).sum(&[], false) / count.maximum(&count.full_like(1.0))
        };
        // Of the tokens of the answers themselves, not of the mismatched ones.
        let own = t.mask_of(0..n);
        let both = wanted.concat(&[&wanted.full_like(0.0)], 0);
        let chosen = t.spread(&both) * &own;
        let (better, worse) = (of(&reward, &wanted), of(&reward, &unwanted));
        let metrics = vec![
            ("kl", kl),
            ("entropy", t.mean_where(&t.entropy, &own)),
            ("logits/chosen", t.mean_where(&t.mean_logit, &chosen)),
            ("logits/rejected", t.mean_where(&t.mean_logit, &(own - &chosen))),
            ("rewards/margins", &better - &worse),
            ("rewards/chosen", better),
            ("rewards/rejected", worse),
            ("logps/chosen", of(&logps, &wanted)),
            ("logps/rejected", of(&logps, &unwanted)),
        ];
        Objective { loss: mean(&losses), metrics }
    }
}
