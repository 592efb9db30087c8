//! Next tokens: all of running text (`seq`), or those of answers (`sft`). The loss of a step is the sum over the tokens that count, of all its
//! micro-batches, over their number.

use super::terms::{Objective, Terms};
use super::{Batch, Column, Entry, Frozen, Strategy, read};
use astrai_ir::Value;
use serde::Deserialize;

pub(super) const SEQ: Entry = Entry {
    name: "seq",
    description: "every next token of running text",
    make: |o| Ok(Box::new(read::<Sft>(o)?.checked()?)),
};

pub(super) const SFT: Entry = Entry {
    name: "sft",
    description: "the next tokens that a mask names, of packed documents kept apart",
    make: |o| Ok(Box::new(read::<Sft>(o)?.checked()?)),
};

/// How a token's loss is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Cross-entropy.
    #[default]
    Nll,
    /// Times the probability of the target, a constant to the gradient: dynamic fine-tuning (arXiv:2508.05629).
    Dft,
}

/// Options.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Sft {
    loss_type: Kind,
    /// (1 - s)·nll + s·mean over the vocabulary of -log p.
    #[serde(alias = "label_smoothing")]
    label_smoothing_factor: f64,
    /// z·lse² is added to the loss of a token (PaLM, arXiv:2204.02311).
    z_loss: f64,
}

impl Sft {
    fn checked(self) -> Result<Sft, String> {
        match self.label_smoothing_factor {
            s if !(0.0..1.0).contains(&s) => Err(format!("label_smoothing_factor {s} is not in [0, 1)")),
            s if s != 0.0 && self.loss_type == Kind::Dft => Err("dft has no label smoothing".into()),
            _ => Ok(self),
        }
    }
}

impl Strategy for Sft {
    fn denominator(&self, window: &[Batch]) -> f64 {
        window.iter().map(|b| b.sequences().valid()).sum::<usize>().max(1) as f64
    }

    fn columns(&self, batch: &Batch, _: &Frozen, _: &[Batch]) -> Result<Vec<Column>, String> {
        match batch {
            Batch::Tokens(_) => Ok(vec![]),
            _ => Err("this strategy learns from sequences with targets".into()),
        }
    }

    fn objective(&self, t: &Terms) -> Objective {
        let s = self.label_smoothing_factor;
        let nll = -&t.logp;
        let mut each: Value = match self.loss_type {
            Kind::Dft => &nll * t.logp.exp().detach(),
            Kind::Nll if s == 0.0 => nll.clone(),
            Kind::Nll => nll * (1.0 - s) + (&t.lse - &t.mean_logit) * s,
        };
        if self.z_loss != 0.0 {
            each = each + &t.lse * &t.lse * self.z_loss;
        }
        let loss = (each * &t.mask).sum(&[], false);
        let metrics = vec![
            ("entropy", t.mean(&t.entropy)),
            ("mean_token_accuracy", t.mean(&t.top)),
            ("valid_tokens", t.mask.sum(&[], false)),
        ];
        Objective { loss, metrics }
    }
}
