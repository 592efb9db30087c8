//! `cast`: another element type. Every rounding in a graph is one of these.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
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
        let g = cx.grad();
        Ok(vec![Some(cx.graph.push(Cast { dtype }, &[g])?)])
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        (graph.ty(*args.first()?).dtype == self.dtype).then(|| Simpler::Node(args[0]))
    }
}
