//! `cast`: another element type. Every rounding in a graph is one of these.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::shard::{Propagate, ShardingRule};
use crate::{DType, Graph, NodeId, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// Elements converted to `dtype`: floats round to nearest even, floats to integers truncate, anything to bool tests for
/// non-zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cast {
    /// Element type of the result.
    pub dtype: DType,
}

impl Operator for Cast {
    const NAME: &'static str = "cast";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![x.with(self.dtype)])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let float = cx.args[0].dtype.is_float() && self.dtype.is_float();
        let sums: &[&[usize]] = if float { &[&[0]] } else { &[] };
        [cx.pointwise(), cx.linear(sums)].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        if self.dtype == DType::Bool {
            return cx.each(|i| (x.at(i) != 0.0) as u8 as f64);
        }
        if !self.dtype.is_float() {
            let n = x.len();
            return Ok(vec![Tensor::int(self.dtype, cx.shape(), (0..n).map(|i| x.int_at(i)).collect())]);
        }
        cx.each(|i| x.at(i))
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let dtype = cx.graph.ty(cx.args[0]).dtype;
        if !dtype.is_float() || !self.dtype.is_float() {
            return Ok(vec![None]);
        }
        cx.through(Cast { dtype })
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        (graph.ty(x).dtype == self.dtype).then_some(Simpler::Node(x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn rounding_truncation_and_truth() {
        let x = Tensor::f32(&[4], &[1.0 + 0.00390625, -2.7, 0.0, 3.5]);
        let run = |dtype| apply(Cast { dtype }, std::slice::from_ref(&x))[0].reals();
        assert_eq!(run(DType::BF16), [1.0, -2.703125, 0.0, 3.5]);
        assert_eq!(run(DType::I32), [1.0, -2.0, 0.0, 3.0]);
        assert_eq!(run(DType::Bool), [1.0, 1.0, 0.0, 1.0]);
        let wide = Tensor::int(DType::I64, &[1], vec![300]);
        assert_eq!(apply(Cast { dtype: DType::U8 }, &[wide])[0].int_at(0), 44);
    }
}
