//! Direct preference optimisation (arXiv:2305.18290) and its loss types, as TRL names and computes them.

use super::terms::{Objective, Terms, log_sigmoid, mean, truth};
use super::{Batch, Column, Entry, Frozen, Strategy, lengths, read, share, sums};
use crate::batch::PackedBatch;
use astrai_ir::Value;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;

pub(super) const DPO: Entry = Entry {
    name: "dpo",
    description: "pairs of a better and a worse answer, against a reference policy",
    make: |o| Ok(Box::new(read::<Dpo>(o)?.checked()?)),
};

/// A loss of pairs. Let w and l be the summed log-ratios of the better and the worse answer to the reference, Δ = w - l.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// -(1-ε)·log σ(βΔ) - ε·log σ(-βΔ): with ε > 0 conservative DPO.
    Sigmoid,
    /// max(0, 1 - βΔ): SLiC (arXiv:2305.10425).
    Hinge,
    /// (Δ of means over tokens - 1/2β)² (arXiv:2310.12036).
    Ipo,
    /// arXiv:2403.00409.
    Robust,
    /// arXiv:2402.00856.
    ExoPair,
    /// arXiv:2402.05369.
    NcaPair,
    /// arXiv:2404.04656.
    BcoPair,
    /// arXiv:2405.00675.
    SppoHard,
    /// Sorted over the batch (arXiv:2406.05882).
    Aot,
    /// The same, better and worse answers sorted apart.
    AotUnpaired,
    /// arXiv:2408.06266.
    ApoZero,
    /// The same, for models better than the better answers.
    ApoDown,
    /// arXiv:2406.08414.
    Discopop,
    /// Cross-entropy of the better answers.
    Sft,
    /// Sigmoid of means over tokens.
    SigmoidNorm,
}

/// What the log-ratio of an answer is turned into before it is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Divergence {
    #[default]
    ReverseKl,
    ForwardKl,
    #[serde(rename = "js_divergence")]
    JensenShannon,
    #[serde(rename = "alpha_divergence")]
    Alpha,
}

/// Whether answers are compared by the sum over their tokens or by the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reduction {
    #[default]
    Sum,
    Mean,
}

/// One loss type, or a list.
fn kinds<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Kind>, D::Error> {
    let list = match Json::deserialize(d)? {
        Json::Array(list) => list,
        one => vec![one],
    };
    list.into_iter().map(|kind| Kind::deserialize(kind).map_err(D::Error::custom)).collect()
}

/// Options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Dpo {
    #[serde(deserialize_with = "kinds")]
    loss_type: Vec<Kind>,
    /// Of several loss types; 1 each where absent.
    loss_weights: Option<Vec<f64>>,
    beta: f64,
    label_smoothing: f64,
    f_divergence_type: Divergence,
    f_alpha_divergence_coef: f64,
    discopop_tau: f64,
    /// Weight of the log-probabilities beyond the shorter answer's length (LD-DPO, arXiv:2409.06411).
    ld_alpha: Option<f64>,
    /// Weighted by how likely the policy finds the answers (WPO, arXiv:2406.11827).
    use_weighting: bool,
    reduction: Reduction,
}

impl Default for Dpo {
    fn default() -> Dpo {
        Dpo {
            loss_type: vec![Kind::Sigmoid],
            loss_weights: None,
            beta: 0.1,
            label_smoothing: 0.0,
            f_divergence_type: Divergence::ReverseKl,
            f_alpha_divergence_coef: 0.5,
            discopop_tau: 0.05,
            ld_alpha: None,
            use_weighting: false,
            reduction: Reduction::Sum,
        }
    }
}

/// Values of pairs, `[B]` each.
struct Pairs {
    n: usize,
    /// Log-probabilities of the better and the worse answers, under the policy and under the reference.
    logps: [Value; 2],
    references: [Value; 2],
    /// Log-ratios as the divergence has them.
    scores: [Value; 2],
    /// Completion tokens.
    lengths: [Value; 2],
}

impl Dpo {
    fn checked(self) -> Result<Dpo, String> {
        let (kinds, e) = (&self.loss_type, self.label_smoothing);
        if !(0.0..0.5).contains(&e) {
            return Err(format!("label_smoothing {e} is not in [0, 0.5)"));
        }
        if self.beta.is_nan() || self.beta <= 0.0 {
            return Err(format!("beta {} is not positive", self.beta));
        }
        if kinds.contains(&Kind::ExoPair) && e == 0.0 {
            return Err("exo_pair takes a logarithm of label_smoothing: give one above 0".into());
        }
        if kinds.is_empty() || self.loss_weights.as_ref().is_some_and(|w| w.len() != kinds.len()) {
            return Err(format!("{} loss types need a weight each", kinds.len()));
        }
        if self.ld_alpha.is_some_and(|a| !(0.0..=1.0).contains(&a)) {
            return Err("ld_alpha is not in [0, 1]".into());
        }
        Ok(self)
    }

    fn score(&self, ratio: &Value, n: usize) -> Value {
        let a = self.f_alpha_divergence_coef - 1.0;
        match self.f_divergence_type {
            Divergence::ForwardKl => -(-ratio).exp(),
            Divergence::JensenShannon => log_sigmoid(ratio, n),
            Divergence::Alpha if a.abs() > 1e-6 => (ratio * a).exp() / a,
            _ => ratio.clone(),
        }
    }

    /// The loss of each pair, `[B]`.
    fn loss(&self, kind: Kind, p: &Pairs, t: &Terms) -> Value {
        let (b, e, n) = (self.beta, self.label_smoothing, p.n);
        let [w, l] = &p.scores;
        let delta = w - l;
        let logs = |x: &Value| log_sigmoid(x, n);
        let smoothed = |x: Value| logs(&x) * (e - 1.0) - logs(&-&x) * e;
        let by_length = || w / &p.lengths[0] - l / &p.lengths[1];
        let sort = |x: &Value| x.topk(n).0;
        match kind {
            Kind::Sigmoid => smoothed(delta * b),
            Kind::Hinge => (1.0 - delta * b).relu(),
            Kind::Ipo => {
                let off = by_length() - 0.5 / b;
                &off * &off
            }
            Kind::Robust => {
                let x = delta * b;
                (logs(&x) * (e - 1.0) + logs(&-&x) * e) / (1.0 - 2.0 * e)
            }
            Kind::ExoPair => {
                let x = delta * b;
                let away = -&x;
                x.sigmoid() * (logs(&x) - (1.0 - e).ln()) + away.sigmoid() * (logs(&away) - e.ln())
            }
            Kind::NcaPair => {
                let (w, l) = (w * b, l * b);
                -logs(&w) - logs(&-&w) * 0.5 - logs(&-&l) * 0.5
            }
            Kind::BcoPair => -logs(&(w * b)) - logs(&(l * -b)),
            Kind::SppoHard => {
                let (w, l) = (w - 0.5 / b, l + 0.5 / b);
                &w * &w + &l * &l
            }
            Kind::Aot => {
                let own = sort(&(&p.logps[0] - &p.logps[1]));
                smoothed((own - sort(&(&p.references[0] - &p.references[1]))) * b)
            }
            Kind::AotUnpaired => smoothed((sort(w) - sort(l)) * b),
            Kind::ApoZero => 1.0 - (w * b).sigmoid() + (l * b).sigmoid(),
            Kind::ApoDown => (w * b).sigmoid() + 1.0 - (delta * b).sigmoid(),
            Kind::Discopop => {
                let x = delta * b;
                let gate = (&x / self.discopop_tau).sigmoid();
                (-&x).exp() * &gate - logs(&x) * (1.0 - &gate)
            }
            Kind::Sft => {
                let chosen = t.mask_of(0..n);
                (-t.mean_of_window(&t.logp, &chosen)).reshape([1]).expand([n])
            }
            Kind::SigmoidNorm => -logs(&(by_length() * b)),
        }
    }

    /// 1 up to the shorter completion of each pair, beyond it `ld_alpha`.
    fn tail(&self, alpha: f64, all: &PackedBatch) -> Vec<f32> {
        let (n, counts) = (all.sequences() / 2, lengths(all));
        let mut weights = Vec::with_capacity(all.tokens());
        for (i, b) in all.starts.windows(2).enumerate() {
            let (shorter, mut seen) = (counts[i].min(counts[(i + n) % (2 * n)]), 0.0);
            for target in &all.targets[b[0] as usize..b[1] as usize] {
                seen += if *target >= 0 { 1.0 } else { 0.0 };
                weights.push(if seen <= shorter { 1.0 } else { alpha as f32 });
            }
        }
        weights
    }
}

impl Strategy for Dpo {
    fn frozen(&self) -> [bool; 2] {
        [true, false]
    }

    fn columns(&self, batch: &Batch, frozen: &Frozen, window: &[Batch]) -> Result<Vec<Column>, String> {
        let Batch::Pairs(pairs) = batch else { return Err("dpo learns from pairs of answers".into()) };
        let all = batch.sequences();
        let tail = self.ld_alpha.map(|alpha| self.tail(alpha, &all));
        let reference =
            match (&frozen.reference, &tail) {
                (Some(logps), None) => sums(&all, logps),
                (Some(logps), Some(tail)) => {
                    sums(&all, &logps.iter().zip(tail).map(|(x, w)| x * w).collect::<Vec<_>>())
                }
                (None, None) if pairs.reference.len() == pairs.pairs() => {
                    [0, 1].iter().flat_map(|side| pairs.reference.iter().map(move |r| r[*side])).collect()
                }
                (None, Some(_)) => {
                    return Err(
                        "ld_alpha needs a reference model, sums of log-probabilities are not enough".into()
                    );
                }
                _ => return Err(
                    "dpo needs a reference: a model, or ref_chosen_logps and ref_rejected_logps in the data"
                        .into(),
                ),
            };
        let mut columns = vec![("ref_logps", vec![all.sequences()], reference)];
        columns.extend(tail.map(|tail| ("tail", vec![all.tokens()], tail)));
        if self.loss_type.contains(&Kind::Sft) {
            columns.push(share(window, |b| if let Batch::Pairs(b) = b { b.chosen.valid() } else { 0 }));
        }
        Ok(columns)
    }

    fn objective(&self, t: &Terms) -> Objective {
        let n = t.sequences / 2;
        let halves = |x: &Value| [x.slice(0, 0..n), x.slice(0, n..2 * n)];
        let each = match self.ld_alpha {
            Some(_) => &t.logp * t.of_tokens("tail"),
            None => t.logp.clone(),
        };
        let (mut logps, mut reference) = (t.sum(&each), t.of("ref_logps", 2 * n));
        let lengths = t.lengths();
        if self.reduction == Reduction::Mean {
            (logps, reference) = (logps / &lengths, reference / &lengths);
        }
        let [w, l] = halves(&(&logps - &reference));
        let scores = [self.score(&w, n), self.score(&l, n)];
        let (references, lengths) = (halves(&reference), halves(&lengths));
        let pairs = Pairs { n, logps: halves(&logps), references, scores, lengths };
        let weights = self.loss_weights.clone().unwrap_or_else(|| vec![1.0; self.loss_type.len()]);
        let losses = self.loss_type.iter().zip(weights).map(|(kind, by)| self.loss(*kind, &pairs, t) * by);
        let mut loss = losses.reduce(|a, b| a + b).unwrap_or_else(|| t.number(0.0));
        if self.use_weighting {
            let sure = t.sum(&(&t.logp - &t.log_sum_square)) / t.lengths();
            let [w, l] = halves(&sure);
            let weight = (w + l).exp();
            loss = loss * weight.minimum(&weight.full_like(1.0)).detach();
        }
        let rewards = [w * self.beta, l * self.beta];
        let metrics = vec![
            ("entropy", t.mean(&t.entropy)),
            ("logits/chosen", t.mean_where(&t.mean_logit, &t.mask_of(0..n))),
            ("logits/rejected", t.mean_where(&t.mean_logit, &t.mask_of(n..2 * n))),
            ("mean_token_accuracy", t.mean_where(&t.top, &t.mask_of(0..n))),
            ("rewards/chosen", mean(&rewards[0])),
            ("rewards/rejected", mean(&rewards[1])),
            ("rewards/accuracies", mean(&truth(rewards[0].greater(&rewards[1])))),
            ("rewards/margins", mean(&(&rewards[0] - &rewards[1]))),
            ("logps/chosen", mean(&pairs.logps[0])),
            ("logps/rejected", mean(&pairs.logps[1])),
        ];
        Objective { loss: mean(&loss), metrics }
    }
}
