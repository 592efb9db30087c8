//! `select`: one of two values by a condition, element by element.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, same};
use crate::shard::{Propagate, ShardingRule};
use crate::{DType, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// `select(c, a, b)`: `a` where `c`, else `b`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Select {}

impl Operator for Select {
    const NAME: &'static str = "select";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [c, a, b] = cx.exactly()?;
        same("choices", a, b)?;
        same("condition and choices as bool", c, &a.with(DType::Bool))?;
        Ok(vec![a.clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        [cx.pointwise(), cx.linear(&[&[1, 2]])].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [c, a, b] = cx.args else { return Err("takes 3 arguments".into()) };
        Ok(vec![a.append(b).gather_with(cx.shape(), |i| if c.at(i) != 0.0 { i } else { a.len() + i })])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (c, g) = (cx.args[0], cx.grad());
        if !cx.graph.ty(cx.args[1]).dtype.is_float() {
            return Ok(vec![None, None, None]);
        }
        let zero = cx.graph.fill(g, 0.0)?;
        let (a, b) = (cx.graph.select(c, g, zero)?, cx.graph.select(c, zero, g)?);
        Ok(vec![None, Some(a), Some(b)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn integers_stay_whole() {
        let i = |v: Vec<i64>| Tensor::int(DType::I64, &[2], v);
        let c = Tensor::int(DType::Bool, &[2], vec![1, 0]);
        let y = apply(Select {}, &[c, i(vec![i64::MAX, 1]), i(vec![0, i64::MIN + 1])]);
        assert_eq!(y[0], i(vec![i64::MAX, i64::MIN + 1]));
    }
}
