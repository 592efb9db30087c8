//! `all_reduce`: the summands that ranks hold become their sum, which all hold.

use crate::eval::{Eval, Meet};
use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::shard::{Axis, Traffic, Way, Ways};
use crate::{Dim, Graph, NodeId, Op, Tensor, Type};
use serde::{Deserialize, Serialize};

/// What the values of the ranks become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Joint {
    /// Their sum.
    Sum,
    /// Their maximum, element by element.
    Max,
}

/// The sum or maximum of the ranks' arguments, on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduce {
    /// What is made of the values.
    pub kind: Joint,
    /// The axes along which ranks meet.
    pub over: Vec<Axis>,
}

impl Operator for AllReduce {
    const NAME: &'static str = "all_reduce";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![(*x).clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        cx.alone(&self.over)
    }

    fn meet(&self, ranks: &[Vec<&Tensor>], cx: &Meet) -> Result<Vec<Vec<Tensor>>, String> {
        let first = ranks[0][0];
        let mut sum = first.reals();
        for r in &ranks[1..] {
            for (s, x) in sum.iter_mut().zip(r[0].reals()) {
                *s = match self.kind {
                    Joint::Sum => *s + x,
                    Joint::Max => super::ReduceKind::Max.step(*s, x),
                };
            }
        }
        let sum = match (first.dtype.is_float(), cx.exact) {
            (false, _) => Tensor::int(first.dtype, &first.shape, sum.into_iter().map(|x| x as i64).collect()),
            (_, true) => Tensor::exact(first.dtype, &first.shape, sum),
            _ => Tensor::float(first.dtype, &first.shape, sum),
        };
        Ok(vec![vec![sum]; ranks.len()])
    }

    /// Every summand has the cotangent of the sum. A maximum is a shift that cancels and has no gradient.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        Ok(vec![(self.kind == Joint::Sum).then(|| cx.grad())])
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let Op::AllReduce(inner) = &graph.node(args[0]).op else { return None };
        if inner.kind != self.kind {
            return None;
        }
        let over = [&inner.over[..], &self.over].concat();
        let op = AllReduce { kind: self.kind, over };
        Some(Simpler::Op(Box::new(op.into()), graph.node(args[0]).args.clone()))
    }

    fn ways(&self, cx: &Ways) -> Vec<Way> {
        let sums: &[&[usize]] = if self.kind == Joint::Sum { &[&[0]] } else { &[] };
        [cx.pointwise(), cx.linear(sums)].concat()
    }

    fn traffic(&self, _args: &[&Type], outs: &[Type]) -> Option<Traffic> {
        Some(Traffic {
            bytes: outs[0].bytes(),
            times: 2,
            ranks: self.over.iter().map(|a| a.size as u64).product(),
        })
    }

    fn flops(&self, _: &[&Type], outs: &[Type]) -> Dim {
        outs[0].elements()
    }
}
