//! `concat`: the concatenation of tensors along one axis.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp, axis_in};
use crate::ops::Slice;
use crate::shard::{Label, Propagate, ShardingRule};
use crate::tensor::{ravel, unravel};
use crate::{Dim, Graph, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// The concatenation of the arguments along `axis`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Concat {
    /// The axis.
    pub axis: usize,
}

impl Operator for Concat {
    const NAME: &'static str = "concat";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [first, rest @ ..] = cx.args else { return Err("takes at least one argument".into()) };
        axis_in(self.axis, first)?;
        let mut ty = (*first).clone();
        for t in rest {
            let other = |t: &Type| {
                let mut t = t.clone();
                t.shape.remove(self.axis);
                t
            };
            if t.rank() != ty.rank() || other(t) != other(&ty) {
                return Err(format!("cannot concatenate {first} and {t} along axis {}", self.axis));
            }
            ty.shape[self.axis] = &ty.shape[self.axis] + &t.shape[self.axis];
        }
        Ok(vec![ty])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let labels: Vec<Label> = (0..cx.outs[0].rank()).map(|d| (d != self.axis).then_some(d)).collect();
        let all: Vec<usize> = (0..cx.args.len()).collect();
        [cx.labelled(&vec![labels.clone(); cx.args.len()], &[labels], &[]), cx.linear(&[&all])].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let (first, rest) = cx.args.split_first().ok_or("takes at least one argument")?;
        let all = rest.iter().fold((*first).clone(), |a, b| a.append(b));
        Ok(vec![all.gather_with(cx.shape(), |i| {
            let mut at = unravel(i, cx.shape());
            let (mut k, mut before) = (0, 0);
            while at[self.axis] >= cx.args[k].shape[self.axis] {
                at[self.axis] -= cx.args[k].shape[self.axis];
                before += cx.args[k].len();
                k += 1;
            }
            before + ravel(&at, &cx.args[k].shape)
        })])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let g = cx.grad();
        let mut start = Dim::from(0);
        let mut grads = Vec::new();
        for &a in cx.args {
            let len = cx.graph.ty(a).shape[self.axis].clone();
            let end = &start + &len;
            grads.push(Some(cx.graph.push(Slice { axis: self.axis, start, len }, &[g])?));
            start = end;
        }
        Ok(grads)
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        (args.len() == 1 && self.axis < graph.ty(args[0]).rank()).then(|| Simpler::Node(args[0]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn rows_interleave_on_the_last_axis() {
        let (a, b) = (Tensor::f32(&[2, 1], &[1.0, 2.0]), Tensor::f32(&[2, 2], &[3.0, 4.0, 5.0, 6.0]));
        assert_eq!(apply(Concat { axis: 1 }, &[a, b])[0].reals(), [1.0, 3.0, 4.0, 2.0, 5.0, 6.0]);
    }
}
