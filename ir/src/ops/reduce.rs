//! `reduce`: sum, mean, maximum, … over axes, which are dropped.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp, axis_in};
use crate::ops::CompareKind;
use crate::tensor::{ravel, unravel};
use crate::{DType, Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// What is computed over the axes.
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

    /// Value of the empty reduction.
    pub fn identity(self) -> f64 {
        match self {
            Sum | Mean => 0.0,
            Max => f64::NEG_INFINITY,
            Min => f64::INFINITY,
            Prod => 1.0,
        }
    }

    /// One step.
    pub fn step(self, acc: f64, x: f64) -> f64 {
        match self {
            Sum | Mean => acc + x,
            Max => super::BinaryKind::Max.apply(acc, x),
            Min => super::BinaryKind::Min.apply(acc, x),
            Prod => acc * x,
        }
    }
}

/// A reduction over axes, which the result no longer has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reduce {
    /// What is computed.
    pub kind: ReduceKind,
    /// The axes, ascending.
    pub axes: Vec<usize>,
}

impl Operator for Reduce {
    const NAME: &'static str = "reduce";

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

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        let mut acc = vec![self.kind.identity(); cx.shape().iter().product()];
        for i in 0..x.len() {
            let at = unravel(i, &x.shape);
            let kept: Vec<usize> = (0..at.len()).filter(|d| !self.axes.contains(d)).map(|d| at[d]).collect();
            let o = ravel(&kept, cx.shape());
            acc[o] = self.kind.step(acc[o], x.at(i));
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
        let back = self.spread(g, grad, x)?;
        Ok(vec![Some(match self.kind {
            Sum => back,
            Mean => {
                let count = Dim::product(self.axes.iter().map(|&a| &g.ty(x).shape[a]));
                let n = count.literal().ok_or_else(|| {
                    g.error(format!("the gradient of a mean over {count} elements needs a literal size; use sum"))
                })?;
                g.scale(back, 1.0 / n as f64)?
            }
            Max | Min => {
                let top = self.spread(g, y, x)?;
                let hit = g.compare(CompareKind::Eq, x, top)?;
                let zero = g.fill(x, 0.0)?;
                g.select(hit, back, zero)?
            }
            Prod => {
                let all = self.spread(g, y, x)?;
                let others = g.div(all, x)?;
                g.mul(back, others)?
            }
        })])
    }

    fn simplify(&self, _: &Graph, args: &[NodeId]) -> Option<Simpler> {
        self.axes.is_empty().then(|| Simpler::Node(args[0]))
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        args[0].elements()
    }
}

impl Reduce {
    /// `y` of the reduced shape, repeated to the shape of `x`.
    fn spread(&self, g: &mut Graph, y: NodeId, x: NodeId) -> Result<NodeId, IrError> {
        let shape = g.ty(x).shape.clone();
        let mut kept = shape.clone();
        self.axes.iter().for_each(|&a| kept[a] = Dim::from(1));
        let y = g.reshape(y, kept)?;
        g.broadcast(y, &shape)
    }
}
