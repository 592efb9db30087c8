//! `route`: the router of a mixture of experts: top-k experts of each token and their weights (Shazeer 2017; group-limited
//! routing: DeepSeek-V2, arXiv:2405.04434), with the permutation of rows that grouped products need. A composite, because a kernel
//! computes all of it at once, and because the choice of experts has no gradient.

use super::argmax::rank;
use crate::front::Tape;
use crate::grad::gradient;
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp};
use crate::ops::{Iota, Op, ReduceKind, Softmax, UnaryKind};
use crate::{DType, Dim, Graph, IrError, NodeId, Real, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// The scoring function of the router, relative to the top-k choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// Softmax over all experts before the choice.
    Softmax,
    /// Sigmoid of each logit before the choice.
    Sigmoid,
    /// The choice by logits, then softmax over the chosen experts.
    SoftmaxChosen,
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The score of its best expert.
    Best,
    /// The sum of the scores of its two best experts.
    BestTwo,
}

/// Group-limited routing: experts are chosen from the best groups of consecutive experts only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Groups {
    /// Groups, of equal numbers of experts.
    pub count: usize,
    /// Groups whose experts may be chosen.
    pub kept: usize,
    /// The score of a group.
    pub score: GroupScore,
}

/// Arguments: router logits f32 `[tokens, E]` and, if there is one, a correction f32 `[E]` added to the scores for the choice
/// only. Outputs: `experts` i32 `[tokens, k]`, best first, ties to the lower expert, NaN above every number; `weights` f32
/// `[tokens, k]`; `slots` i32 `[tokens * k]`, the positions in `[tokens, k]` sorted by expert, stable in the order of tokens (a
/// permutation); `places` i32 `[tokens, k]`, the inverse permutation; `offsets` i32 `[E + 1]`, where each expert's slots begin.
/// The rows of expert `e` are `offsets[e] .. offsets[e + 1]`, and row `r` is of token `slots[r] / k`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// Experts of a token.
    pub k: usize,
    /// The scoring function.
    pub scores: Scores,
    /// Group-limited routing, if any.
    pub groups: Option<Groups>,
    /// The weights of a token are divided by their sum plus 1e-20.
    pub normalise: bool,
    /// Factor on the weights, after normalisation.
    pub scale: Real,
}

/// Added to the sum of a token's weights, against division by zero.
const TINY: f64 = 1e-20;

impl Route {
    fn check(&self, experts: usize) -> Result<(), String> {
        let (k, mut open) = (self.k, experts);
        if let Some(g) = self.groups {
            let two = g.score == GroupScore::BestTwo;
            if g.count == 0 || !experts.is_multiple_of(g.count) || two && experts / g.count < 2 {
                return Err(format!("cannot divide {experts} experts into {} groups", g.count));
            }
            if g.kept == 0 || g.kept > g.count {
                return Err(format!("cannot keep {} of {} groups", g.kept, g.count));
            }
            open = experts / g.count * g.kept;
        }
        if k == 0 || k > open {
            return Err(format!("cannot choose {k} of {open} experts"));
        }
        Ok(())
    }

    /// True when the choice may be made by logits: without a correction, scores rank as logits do, and logits have no ties by
    /// rounding.
    pub fn by_logits(&self) -> bool {
        self.groups.is_none_or(|g| g.score == GroupScore::Best)
    }

    /// The experts of one token, best first, by their ranking scores `by`.
    fn choose(&self, by: &[f64]) -> Vec<usize> {
        let best = |list: &[f64], n: usize| {
            let mut order: Vec<usize> = (0..list.len()).collect();
            // A stable sort keeps ties in the order of experts.
            order.sort_by(|&a, &b| rank(list[b], list[a]));
            order.truncate(n);
            order
        };
        let Some(groups) = self.groups else { return best(by, self.k) };
        let size = by.len() / groups.count;
        let score = |of: &[f64]| match groups.score {
            GroupScore::Best => of[best(of, 1)[0]],
            GroupScore::BestTwo => best(of, 2).iter().map(|&e| of[e]).sum(),
        };
        let scores: Vec<f64> = by.chunks(size).map(score).collect();
        let mut kept = best(&scores, groups.kept);
        kept.sort_unstable();
        let open: Vec<usize> = kept.iter().flat_map(|g| g * size..(g + 1) * size).collect();
        let ranks: Vec<f64> = open.iter().map(|&e| by[e]).collect();
        best(&ranks, self.k).into_iter().map(|i| open[i]).collect()
    }

    /// Experts and weights of a token.
    fn token(&self, logits: &[f64], correction: Option<&[f64]>) -> (Vec<usize>, Vec<f64>) {
        let softmax = |x: &[f64]| -> Vec<f64> {
            let top = x.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v));
            let e: Vec<f64> = x.iter().map(|v| (v - top).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.into_iter().map(|v| v / sum).collect()
        };
        let scores = match self.scores {
            Scores::Softmax => softmax(logits),
            Scores::Sigmoid => logits.iter().map(|v| 1.0 / (1.0 + (-v).exp())).collect(),
            Scores::SoftmaxChosen => logits.to_vec(),
        };
        let chosen = match correction {
            Some(c) => self.choose(&scores.iter().zip(c).map(|(s, c)| s + c).collect::<Vec<f64>>()),
            None if self.by_logits() => self.choose(logits),
            None => self.choose(&scores),
        };
        let mut weights: Vec<f64> = chosen.iter().map(|&e| scores[e]).collect();
        if self.scores == Scores::SoftmaxChosen {
            weights = softmax(&weights);
        }
        let sum = if self.normalise { weights.iter().sum::<f64>() + TINY } else { 1.0 };
        (chosen, weights.into_iter().map(|w| w / sum * self.scale.0).collect())
    }

    /// Scores of the chosen experts, by a one-hot comparison with every expert, so that the gradient is a reduction and no
    /// scatter.
    fn picked(&self, g: &mut Graph, scores: NodeId, experts: NodeId) -> Result<NodeId, IrError> {
        let [tokens, n] = [0, 1].map(|axis| g.ty(scores).shape[axis].clone());
        let whole = vec![tokens.clone(), Dim::from(self.k), n.clone()];
        let number = g.push(Iota { ty: Type::new(DType::I32, whole.clone()), axis: 2 }, &[])?;
        let made = Tape::extend(g, [number, experts, scores], |[number, experts, scores]| {
            let one = Dim::from(1);
            let chosen =
                experts.reshape(vec![tokens.clone(), Dim::from(self.k), one.clone()]).expand(&whole[..]);
            let hit = number.equal(&chosen);
            let each = scores.reshape(vec![tokens, one, n]).expand(&whole[..]);
            [hit.where_(&each, &each.full_like(0.0)).sum(&[2], false)]
        });
        made.map(|[scores]| scores)
    }

    /// The weights of chosen experts as nodes.
    fn weights(&self, g: &mut Graph, logits: NodeId, experts: NodeId) -> Result<NodeId, IrError> {
        let scores = match self.scores {
            Scores::Softmax => g.push(Softmax { log: false }, &[logits])?,
            Scores::Sigmoid => g.unary(UnaryKind::Sigmoid, logits)?,
            Scores::SoftmaxChosen => logits,
        };
        let mut w = self.picked(g, scores, experts)?; // [tokens, k]
        if self.scores == Scores::SoftmaxChosen {
            w = g.push(Softmax { log: false }, &[w])?;
        }
        if self.normalise {
            [w] = Tape::extend(g, [w], |[w]| [&w / (w.reduce_last(ReduceKind::Sum) + TINY)])?;
        }
        if self.scale.0 == 1.0 { Ok(w) } else { g.scale(w, self.scale.0) }
    }
}

/// From the chosen experts, token by token: the slots sorted by expert, the inverse permutation, and each expert's offset.
fn sorted(chosen: &[usize], experts: usize) -> [Vec<i64>; 3] {
    let mut slots: Vec<usize> = (0..chosen.len()).collect();
    slots.sort_by_key(|&s| chosen[s]);
    let mut places = vec![0; chosen.len()];
    slots.iter().enumerate().for_each(|(r, &s)| places[s] = r as i64);
    let begins = |e| slots.partition_point(|&s| chosen[s] < e) as i64;
    let offsets = (0..=experts).map(begins).collect();
    [slots.into_iter().map(|s| s as i64).collect(), places, offsets]
}

impl Operator for Route {
    const NAME: &'static str = "route";

    fn infer(&self, cx: &Infer) -> Inferred {
        let (logits, correction) = match cx.args {
            [logits] => (*logits, None),
            [logits, correction] => (*logits, Some(*correction)),
            args => return Err(format!("takes 1 or 2 arguments, got {}", args.len())),
        };
        let [tokens, experts] = logits.shape.as_slice() else {
            return Err(format!("logits are [tokens, experts], got {logits}"));
        };
        let n = experts.size().ok_or_else(|| format!("wants a literal number of experts, got {logits}"))?;
        if logits.dtype != DType::F32 {
            return Err(format!("logits must be f32, got {logits}"));
        }
        if let Some(c) = correction
            && *c != Type::new(DType::F32, [experts.clone()])
        {
            return Err(format!("the correction of {logits} is f32[{n}], got {c}"));
        }
        self.check(n)?;
        let k = Dim::from(self.k);
        let each = Type::new(DType::I32, [tokens.clone(), k.clone()]);
        let slots = Type::new(DType::I32, [tokens * &k]);
        let offsets = Type::new(DType::I32, [Dim::from(n + 1)]);
        Ok(vec![each.clone(), each.with(DType::F32), slots, each, offsets])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let n = cx.args[0].shape[1];
        let logits = cx.args[0].reals();
        let correction = cx.args.get(1).map(|c| c.reals());
        let (mut chosen, mut weights) = (Vec::new(), Vec::new());
        for row in logits.chunks(n) {
            let (experts, w) = self.token(row, correction.as_deref());
            chosen.extend(experts);
            weights.extend(w);
        }
        let [slots, places, offsets] = sorted(&chosen, n);
        let int = |i: usize, v: Vec<i64>| Tensor::int(DType::I32, &cx.outs[i].1, v);
        let experts = int(0, chosen.into_iter().map(|e| e as i64).collect());
        Ok(vec![experts, cx.make(1, weights), int(2, slots), int(3, places), int(4, offsets)])
    }

    /// Neither the chosen experts nor the correction, which affects the choice only, have a gradient.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let none = vec![None; cx.args.len()];
        let Some(grad) = cx.grads[1] else { return Ok(none) };
        let (logits, experts) = (cx.args[0], cx.outs[0]);
        let weights = self.weights(cx.graph, logits, experts)?;
        let found = gradient(cx.graph, &[(weights, grad)], &[logits])?;
        Ok(found.into_iter().chain(none.into_iter().skip(1)).collect())
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        // Scores, then k comparisons with every expert.
        &args[0].elements() * &Dim::from(8 + self.k)
    }
}

/// The slots of a route, if `indices` are its places for all rows of `x`: the inverse permutation of `indices`.
pub(super) fn inverse(g: &mut Graph, x: NodeId, indices: NodeId) -> Result<Option<NodeId>, IrError> {
    const SLOTS: u32 = 2;
    const PLACES: u32 = 3;
    let mut places = indices;
    while let Op::Reshape(_) = g.node(places).op {
        places = g.node(places).args[0];
    }
    let node = g.node(places);
    let (Op::Part(part), Some(&route)) = (&node.op, node.args.first()) else { return Ok(None) };
    let routed = part.index == PLACES && matches!(g.node(route).op, Op::Route(_));
    if routed && g.ty(indices).shape[..] == g.ty(x).shape[..1] {
        g.part(route, SLOTS).map(Some)
    } else {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close, try_apply};

    fn route(k: usize, scores: Scores) -> Route {
        Route { k, scores, groups: None, normalise: false, scale: Real(1.0) }
    }

    #[test]
    fn choices_lists_and_ties() {
        let x = Tensor::f32(&[3, 4], &[0.0, 2.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, f32::NAN, 5.0]);
        let out = apply(route(2, Scores::Sigmoid), &[x]);
        let ints = |i: usize| (0..out[i].len()).map(|j| out[i].int_at(j)).collect::<Vec<_>>();
        assert_eq!(ints(0), [1, 3, 0, 1, 2, 3]);
        assert_eq!(ints(2), [2, 0, 3, 4, 1, 5]);
        assert_eq!(ints(3), [1, 4, 0, 2, 3, 5]);
        assert_eq!(ints(4), [0, 1, 3, 4, 6]);
        let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
        assert!((out[1].at(0) - sigmoid(2.0)).abs() < 1e-6 && out[1].at(4).is_nan());
    }

    #[test]
    fn softmax_before_or_after_the_choice() {
        let x = Tensor::f32(&[1, 3], &[1.0, 2.0, 3.0]);
        let all: f64 = [1f64, 2.0, 3.0].iter().map(|v| v.exp()).sum();
        let two = 2f64.exp() + 3f64.exp();
        let want = |sum: f64| [3f64.exp() / sum, 2f64.exp() / sum];
        close(&apply(route(2, Scores::Softmax), std::slice::from_ref(&x))[1], &want(all));
        close(&apply(route(2, Scores::SoftmaxChosen), std::slice::from_ref(&x))[1], &want(two));
        let normal = Route { normalise: true, scale: Real(2.0), ..route(2, Scores::Softmax) };
        close(&apply(normal, &[x])[1], &want(two).map(|w| 2.0 * w));
    }

    /// Groups {0,1}, {2,3}, {4,5}: by their best the last wins, by the sum of two the first.
    #[test]
    fn groups_limit_and_corrections_only_choose() {
        let x = Tensor::f32(&[1, 6], &[1.0, 1.0, 0.9, 0.8, 1.5, -3.0]);
        let limited = |score, kept| Route {
            groups: Some(Groups { count: 3, kept, score }),
            ..route(2, Scores::SoftmaxChosen)
        };
        let chosen = |op: Route, args: &[Tensor]| {
            let out = apply(op, args);
            [out[0].int_at(0), out[0].int_at(1)]
        };
        assert_eq!(chosen(limited(GroupScore::Best, 1), std::slice::from_ref(&x)), [4, 5]);
        assert_eq!(chosen(limited(GroupScore::BestTwo, 1), std::slice::from_ref(&x)), [0, 1]);
        assert_eq!(chosen(limited(GroupScore::BestTwo, 2), std::slice::from_ref(&x)), [0, 1]);
        let bias = Tensor::f32(&[6], &[0.0, 0.0, 0.0, 9.0, 0.0, 0.0]);
        let out = apply(route(1, Scores::Sigmoid), &[x.clone(), bias]);
        assert_eq!(out[0].int_at(0), 3);
        close(&out[1], &[1.0 / (1.0 + (-0.8f32 as f64).exp())]);
        let bad = [(GroupScore::Best, 4, 1, 2), (GroupScore::Best, 3, 0, 2), (GroupScore::Best, 3, 1, 3)];
        for (score, count, kept, k) in bad {
            let op = Route { groups: Some(Groups { count, kept, score }), ..route(k, Scores::Softmax) };
            assert!(try_apply(op, std::slice::from_ref(&x)).is_err());
        }
    }
}
