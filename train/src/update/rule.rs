//! Optimisers as data: a rule with its numbers, and which weights it treats otherwise. In: settings. Out: for each weight what is done to
//! it, its rate and its decay.

use super::codes::{self, Codes};
use super::{EMA, EXP_AVG, EXP_AVG_SQ, MASTER, MOMENT_SCALES, MOMENTUM, Muon};
use astrai_ir::ops::Weight;
use astrai_ir::{DType, Type};

/// An optimiser and its hyper-parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    /// The rule.
    pub rule: Rule,
    /// Decoupled weight decay (SGD: added to the gradient, an L2 penalty), on tensors of more than one axis.
    pub weight_decay: f64,
    /// Largest norm of all gradients together; larger ones are scaled down to it.
    pub clip: Option<f64>,
    /// A step whose gradient norm is larger changes nothing.
    pub skip: Option<f64>,
    /// Whether gradients are those of a loss that was multiplied; they are multiplied by the input `unscale` first.
    pub scaled: bool,
    /// Updated weights of bf16 are rounded up or down at random, by draws of this seed, and have no master weights.
    pub stochastic: Option<u64>,
    /// The signal in the gradient is measured by Adam's moments.
    pub signal: bool,
    /// Adam's moments of large weights are codes of eight bits.
    pub narrow_moments: bool,
    /// Decay of the exponential moving average of the weights, which is kept beside them.
    pub ema: Option<f64>,
    /// Weights with a rate or a decay of their own: the first group whose pattern a weight's checkpoint names match.
    pub groups: Vec<Group>,
}

/// Weights by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// A checkpoint name in which `*` stands for any text.
    pub pattern: String,
    /// Factor on the learning rate.
    pub rate: f64,
    /// Their weight decay, where it differs.
    pub weight_decay: Option<f64>,
}

impl Group {
    /// Whether the name matches the pattern.
    pub fn matches(&self, name: &str) -> bool {
        matches(&self.pattern, name)
    }
}

/// Whether a name matches a pattern in which `*` stands for any text.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let Some(mut rest) = pieces.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let pieces: Vec<&str> = pieces.collect();
    let Some((last, between)) = pieces.split_last() else { return rest.is_empty() };
    for piece in between {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// An optimiser's rule.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// Loshchilov and Hutter, arXiv:1711.05101: p -= lr·(m̂/(√v̂ + eps) + decay·p).
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// Adam (arXiv:1412.6980): the decay is added to the gradient.
    Adam {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// AdamW with Nesterov's look ahead: beta1·m + (1 - beta1)·g in the place of m.
    NAdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// b = momentum·b + g; p -= lr·b, or with `nesterov` p -= lr·(g + momentum·b).
    Sgd {
        /// Decay of the velocity; 0 keeps no state.
        momentum: f64,
        /// Whether the velocity looks ahead.
        nesterov: bool,
    },
    /// Muon on the layers' matrices, AdamW on embeddings, head, norms and biases: p -= lr·(direction + decay·p).
    Muon {
        /// Of the matrices.
        matrices: Muon,
        /// Of all else.
        rest: Rest,
    },
}

/// AdamW of what Muon leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Rest {
    /// Decays of the moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Its learning rate over that of the matrices.
    pub rate: f64,
    /// Its weight decay.
    pub weight_decay: f64,
}

/// What is done to a weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Treatment {
    /// The rule.
    pub step: Step,
    /// Factor on the learning rate.
    pub rate: f64,
    /// Weight decay.
    pub decay: f64,
}

/// The rule of one weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    Adam { betas: [f64; 2], eps: f64, coupled: bool, ahead: bool },
    Sgd { momentum: f64, nesterov: bool },
    Muon(Muon),
}

impl Optimizer {
    /// An optimiser without average and groups.
    pub fn new(rule: Rule, weight_decay: f64, clip: Option<f64>) -> Optimizer {
        Optimizer {
            rule,
            weight_decay,
            clip,
            skip: None,
            scaled: false,
            stochastic: None,
            signal: false,
            narrow_moments: false,
            ema: None,
            groups: vec![],
        }
    }

    /// The largest norm of a gradient that is applied.
    pub fn most(&self) -> f64 {
        self.skip.unwrap_or(f64::MAX).min(f64::from(f32::MAX))
    }

    /// Prefixes of the f32 states that this optimiser may keep for a weight, beside master weights.
    pub fn kept(&self) -> Vec<&'static str> {
        let moments: &[&str] = match self.rule {
            Rule::AdamW { .. } | Rule::Adam { .. } | Rule::NAdamW { .. } => &[EXP_AVG, EXP_AVG_SQ],
            Rule::Sgd { momentum, .. } if momentum != 0.0 => &[MOMENTUM],
            Rule::Sgd { .. } => &[],
            Rule::Muon { .. } => &[EXP_AVG, EXP_AVG_SQ, MOMENTUM],
        };
        let scales = if self.narrow_moments && moments.contains(&EXP_AVG) { &MOMENT_SCALES[..] } else { &[] };
        moments.iter().chain(scales).copied().chain(self.ema.map(|_| EMA)).collect()
    }

    /// Whether it keeps the state of this prefix for this weight.
    pub fn keeps(&self, prefix: &str, w: &Weight) -> bool {
        let muon = matches!(self.treatment(w).step, Step::Muon(_));
        match prefix {
            MOMENTUM => muon || !matches!(self.rule, Rule::Muon { .. }),
            EXP_AVG | EXP_AVG_SQ => !muon,
            MASTER => w.ty.dtype != DType::F32 && !self.rounds(w),
            scales if MOMENT_SCALES.contains(&scales) => self.block(w).is_some(),
            _ => true,
        }
    }

    /// Whether the weight is rounded at random when it is updated.
    pub(super) fn rounds(&self, w: &Weight) -> bool {
        self.stochastic.is_some() && w.ty.dtype == DType::BF16
    }

    /// Elements of a block of a weight's moments, where they are codes.
    pub(super) fn block(&self, w: &Weight) -> Option<usize> {
        let adam = self.narrow_moments && matches!(self.treatment(w).step, Step::Adam { .. });
        if adam { codes::block(w) } else { None }
    }

    /// Type of the state of this prefix of a weight.
    pub fn state(&self, prefix: &str, w: &Weight) -> Type {
        match (prefix, self.block(w)) {
            (EXP_AVG, Some(block)) => w.ty.with(Codes { block, signed: true }.dtype()),
            (EXP_AVG_SQ, Some(block)) => w.ty.with(Codes { block, signed: false }.dtype()),
            (scales, Some(block)) if MOMENT_SCALES.contains(&scales) => codes::scales(w, block),
            _ => w.ty.with(DType::F32),
        }
    }

    /// Decays of Adam's moments, wherever it is Adam's.
    pub fn betas(&self) -> Option<[f64; 2]> {
        match self.rule {
            Rule::AdamW { beta1, beta2, .. }
            | Rule::Adam { beta1, beta2, .. }
            | Rule::NAdamW { beta1, beta2, .. } => Some([beta1, beta2]),
            Rule::Muon { ref rest, .. } => Some(rest.betas),
            Rule::Sgd { .. } => None,
        }
    }

    /// What is done to a weight.
    pub(super) fn treatment(&self, w: &Weight) -> Treatment {
        let (step, mut rate, mut decay) = match &self.rule {
            Rule::Sgd { momentum, nesterov } => {
                (Step::Sgd { momentum: *momentum, nesterov: *nesterov }, 1.0, self.weight_decay)
            }
            Rule::Muon { matrices, .. } if is_layer_matrix(w) => {
                (Step::Muon(matrices.clone()), 1.0, self.weight_decay)
            }
            Rule::Muon { rest, .. } => {
                let adam = Step::Adam { betas: rest.betas, eps: rest.eps, coupled: false, ahead: false };
                (adam, rest.rate, rest.weight_decay)
            }
            Rule::AdamW { beta1, beta2, eps }
            | Rule::Adam { beta1, beta2, eps }
            | Rule::NAdamW { beta1, beta2, eps } => {
                let coupled = matches!(self.rule, Rule::Adam { .. });
                let ahead = matches!(self.rule, Rule::NAdamW { .. });
                (Step::Adam { betas: [*beta1, *beta2], eps: *eps, coupled, ahead }, 1.0, self.weight_decay)
            }
        };
        if w.ty.rank() < 2 {
            decay = 0.0;
        }
        if let Some(group) = self.group(w) {
            rate *= group.rate;
            decay = group.weight_decay.unwrap_or(decay);
        }
        Treatment { step, rate, decay }
    }

    fn group(&self, w: &Weight) -> Option<&Group> {
        let first = w.rows().first().map_or(w.name.clone(), |part| part.name.clone());
        self.groups.iter().find(|group| group.matches(&first))
    }

    /// Refuses a pattern that names no weight, or some of the tensors of one buffer and not the others.
    pub(super) fn check(&self, weights: &[Weight]) -> Result<(), String> {
        for group in &self.groups {
            let mut any = false;
            for w in weights {
                let hits = w.rows().iter().filter(|part| group.matches(&part.name)).count();
                if hits != 0 && hits != w.rows().len() {
                    let names: Vec<String> = w.rows().iter().map(|part| part.name.clone()).collect();
                    return Err(format!(
                        "the group `{}` has some of {}, which are trained as one: name all of them",
                        group.pattern,
                        names.join(", ")
                    ));
                }
                any |= hits > 0;
            }
            if !any {
                return Err(format!("the group `{}` names no weight of this model", group.pattern));
            }
        }
        Ok(())
    }
}

/// A matrix between embedding and head.
fn is_layer_matrix(w: &Weight) -> bool {
    let outside = |name: &str| name.contains("embed") || name.contains("lm_head");
    w.ty.rank() > 1 && !w.rows().iter().any(|part| outside(&part.name)) && !outside(&w.name)
}

#[cfg(test)]
mod tests {
    use super::super::build;
    use super::*;
    use astrai_ir::{Dim, Type};

    #[test]
    fn groups_are_found_by_pattern() {
        let group = |pattern: &str| Group { pattern: pattern.into(), rate: 1.0, weight_decay: None };
        for (pattern, name, is) in [
            ("a.weight", "a.weight", true),
            ("a.weight", "a.weights", false),
            ("*.weight", "x.weight", true),
            ("*q_proj*", "layers.0.q_proj.weight", true),
            ("layers.*.mlp.*", "layers.3.mlp.up", true),
            ("layers.*.mlp.*", "layers.3.attn.up", false),
            ("ab*ba", "aba", false),
        ] {
            assert_eq!(group(pattern).matches(name), is, "{pattern} {name}");
        }
        let rest = vec![Group { weight_decay: Some(0.0), ..group("nothing*") }];
        let sgd = Rule::Sgd { momentum: 0.0, nesterov: false };
        let optimizer = Optimizer { groups: rest, ..Optimizer::new(sgd, 0.0, None) };
        let w = Weight::new("own", Type::new(DType::F32, [Dim::from(2)]));
        assert!(build(&[w], &optimizer, None).unwrap_err().to_string().contains("names no weight"));
    }
}
