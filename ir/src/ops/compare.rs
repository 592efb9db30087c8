//! `compare`: truth of a relation, element by element.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, same};
use crate::shard::{Propagate, ShardingRule};
use crate::{DType, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// Relation between two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the relations
pub enum CompareKind {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

use CompareKind::*;

impl CompareKind {
    /// Every kind.
    pub const ALL: [CompareKind; 6] = [Eq, Ne, Lt, Le, Gt, Ge];

    /// The relation; with NaN only `Ne` holds.
    pub fn apply(self, a: f64, b: f64) -> bool {
        match self {
            Eq => a == b,
            Ne => a != b,
            Lt => a < b,
            Le => a <= b,
            Gt => a > b,
            Ge => a >= b,
        }
    }
}

/// Truth of a relation between two tensors of one type, element by element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compare {
    /// The relation.
    pub kind: CompareKind,
}

impl Operator for Compare {
    const NAME: &'static str = "compare";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [a, b] = cx.exactly()?;
        same("arguments", a, b)?;
        Ok(vec![a.with(DType::Bool)])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        cx.pointwise()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [a, b] = cx.args else { return Err("takes 2 arguments".into()) };
        if !a.dtype.is_float() {
            // Differences of 64-bit integers can be lost in f64; their sign is not.
            return cx
                .each(|i| self.kind.apply(a.int_at(i).cmp(&b.int_at(i)) as i8 as f64, 0.0) as u8 as f64);
        }
        cx.each(|i| self.kind.apply(a.at(i), b.at(i)) as u8 as f64)
    }

    fn vjp(&self, _: &mut Vjp) -> Cotangents {
        Ok(vec![None, None])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn nan_is_only_unequal_and_integers_are_exact() {
        let (a, b) = (Tensor::f32(&[3], &[1.0, 2.0, f32::NAN]), Tensor::f32(&[3], &[2.0, 2.0, f32::NAN]));
        let run = |kind| apply(Compare { kind }, &[a.clone(), b.clone()])[0].reals();
        assert_eq!(run(Lt), [1.0, 0.0, 0.0]);
        assert_eq!(run(Ge), [0.0, 1.0, 0.0]);
        assert_eq!(run(Ne), [1.0, 0.0, 1.0]);
        let i = |v| Tensor::int(DType::I64, &[1], vec![v]);
        assert_eq!(apply(Compare { kind: Lt }, &[i(i64::MAX - 1), i(i64::MAX)])[0].int_at(0), 1);
    }
}
