//! `reduce`: sum, mean, maximum, … over axes, which are dropped.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp, axis_in};
use crate::ops::CompareKind;
use crate::shard::{Label, Propagate, ShardingRule};
use crate::tensor::{ravel, unravel};
use crate::{DType, Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// The reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the reductions
pub enum ReduceKind {
    Sum,
    Mean,
    Max,
    Min,
    Prod,
}

use ReduceKind::*;

impl ReduceKind {
    /// Every kind.
    pub const ALL: [ReduceKind; 5] = [Sum, Mean, Max, Min, Prod];

    /// The identity element: the value of an empty reduction.
    pub fn identity(self) -> f64 {
        match self {
            Sum | Mean => 0.0,
            Max => f64::NEG_INFINITY,
            Min => f64::INFINITY,
            Prod => 1.0,
        }
    }

    /// One accumulation step.
    pub fn step(self, acc: f64, x: f64) -> f64 {
        match self {
            Sum | Mean => acc + x,
            Max => super::BinaryKind::Max.apply(acc, x),
            Min => super::BinaryKind::Min.apply(acc, x),
            Prod => acc * x,
        }
    }

    /// One accumulation step on integers, wrapping.
    pub fn step_int(self, acc: i64, x: i64) -> i64 {
        match self {
            Sum | Mean => acc.wrapping_add(x),
            Max => acc.max(x),
            Min => acc.min(x),
            Prod => acc.wrapping_mul(x),
        }
    }
}

/// A reduction over axes, which the result no longer has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reduce {
    /// The reduction.
    pub kind: ReduceKind,
    /// The axes, ascending.
    pub axes: Vec<usize>,
}

impl Operator for Reduce {
    const NAME: &'static str = "reduce";
    const REDUCES: bool = true;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        if !self.axes.is_sorted_by(|a, b| a < b) {
            return Err(format!("axes {:?} must ascend, each once", self.axes));
        }
        self.axes.iter().try_for_each(|&a| axis_in(a, x))?;
        if x.dtype == DType::Bool || (self.kind == Mean && !x.dtype.is_float()) {
            return Err(format!("{:?} does not take {x}", self.kind));
        }
        let kept = x.shape.iter().enumerate().filter(|(i, _)| !self.axes.contains(i));
        Ok(vec![Type::new(x.dtype, kept.map(|(_, d)| d.clone()))])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let labels: Vec<Label> = (0..cx.args[0].rank()).map(Some).collect();
        let kept = (0..labels.len()).filter(|d| !self.axes.contains(d)).map(Some).collect();
        let sums = if self.kind == Sum { &self.axes[..] } else { &[] };
        let linear: &[&[usize]] = if matches!(self.kind, Sum | Mean) { &[&[0]] } else { &[] };
        [cx.labelled(&[labels], &[kept], sums), cx.linear(linear)].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        let n = cx.shape().iter().product();
        let place = |i: usize| {
            let at = unravel(i, &x.shape);
            let kept: Vec<usize> = (0..at.len()).filter(|d| !self.axes.contains(d)).map(|d| at[d]).collect();
            ravel(&kept, cx.shape())
        };
        if !x.dtype.is_float() {
            let mut acc = vec![self.kind.identity() as i64; n];
            for i in 0..x.len() {
                let a = &mut acc[place(i)];
                *a = self.kind.step_int(*a, x.int_at(i));
            }
            return Ok(vec![Tensor::int(x.dtype, cx.shape(), acc)]);
        }
        let mut acc = vec![self.kind.identity(); n];
        for i in 0..x.len() {
            let a = &mut acc[place(i)];
            *a = self.kind.step(*a, x.at(i));
        }
        if self.kind == Mean {
            let n = x.len() as f64 / acc.len().max(1) as f64;
            acc.iter_mut().for_each(|a| *a /= n);
        }
        cx.real(acc)
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (x, y, grad) = (cx.args[0], cx.outs[0], cx.grad());
        let g = &mut *cx.graph;
        if !g.ty(x).dtype.is_float() {
            return Ok(vec![None]);
        }
        let back = self.broadcast_back(g, grad, x)?;
        Ok(vec![Some(match self.kind {
            Sum => back,
            Mean => {
                let count = Dim::product(self.axes.iter().map(|&a| &g.ty(x).shape[a]));
                let n = count.literal().ok_or_else(|| {
                    g.error(format!(
                        "the gradient of a mean over {count} elements needs a literal size; use sum"
                    ))
                })?;
                g.scale(back, 1.0 / n as f64)?
            }
            Max | Min => {
                let top = self.broadcast_back(g, y, x)?;
                let hit = g.compare(CompareKind::Eq, x, top)?;
                // Equal elements share the cotangent evenly.
                let (one, zero) = (g.fill(x, 1.0)?, g.fill(x, 0.0)?);
                let ones = g.select(hit, one, zero)?;
                let count = g.reduce(Sum, ones, &self.axes)?;
                let count = self.broadcast_back(g, count, x)?;
                let share = g.div(back, count)?;
                g.select(hit, share, zero)?
            }
            Prod => {
                let others = self.others(g, x)?;
                g.mul(back, others)?
            }
        })])
    }

    fn simplify(&self, _: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        self.axes.is_empty().then_some(Simpler::Node(x))
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        args[0].elements()
    }
}

impl Reduce {
    /// For each element of `x` the product of all other elements. Zeros are excluded from the product and counted instead: the
    /// product of the others is not zero only where the element is the only zero, or where there is no zero.
    fn others(&self, g: &mut Graph, x: NodeId) -> Result<NodeId, IrError> {
        let (one, zero) = (g.fill(x, 1.0)?, g.fill(x, 0.0)?);
        let is_zero = g.compare(CompareKind::Eq, x, zero)?;
        let (factor, mark) = (g.select(is_zero, one, x)?, g.select(is_zero, one, zero)?);
        let (all, zeros) = (g.reduce(Prod, factor, &self.axes)?, g.reduce(Sum, mark, &self.axes)?);
        let (all, zeros) = (self.broadcast_back(g, all, x)?, self.broadcast_back(g, zeros, x)?);
        let others = g.div(all, factor)?;
        let other_zeros = g.sub(zeros, mark)?;
        let clear = g.compare(CompareKind::Eq, other_zeros, zero)?;
        g.select(clear, others, zero)
    }

    /// `y` of the reduced shape, broadcast to the shape of `x`.
    pub(crate) fn broadcast_back(&self, g: &mut Graph, y: NodeId, x: NodeId) -> Result<NodeId, IrError> {
        let shape = g.ty(x).shape.clone();
        let mut kept = shape.clone();
        self.axes.iter().for_each(|&a| kept[a] = Dim::from(1));
        let y = g.reshape(y, kept)?;
        g.broadcast(y, &shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn every_kind_and_wrapping_integers() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 6.0, -4.0, 5.0, 0.5]);
        let run = |kind, axes| apply(Reduce { kind, axes }, std::slice::from_ref(&x))[0].reals();
        assert_eq!(run(Sum, vec![1]), [9.0, 1.5]);
        assert_eq!(run(Mean, vec![0]), [-1.5, 3.5, 3.25]);
        assert_eq!(run(Max, vec![0, 1]), [6.0]);
        assert_eq!(run(Min, vec![1]), [1.0, -4.0]);
        assert_eq!(run(Prod, vec![1]), [12.0, -10.0]);
        let big = Tensor::int(DType::I64, &[2], vec![1 << 60, 1]);
        assert_eq!(apply(Reduce { kind: Sum, axes: vec![0] }, &[big])[0].int_at(0), (1 << 60) + 1);
    }
}
