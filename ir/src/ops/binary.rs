//! `binary`: functions of two numbers, element by element.

use crate::front::Tape;
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float, same};
use crate::shard::{Propagate, ShardingRule};
use crate::{DType, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// Function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the functions
pub enum BinaryKind {
    Add,
    Sub,
    Mul,
    Div,
    /// The larger; NaN when either is.
    Max,
    /// The smaller; NaN when either is.
    Min,
    Pow,
    /// Logical and, of bool.
    And,
    /// Logical or, of bool.
    Or,
}

use BinaryKind::*;

impl BinaryKind {
    /// Every kind.
    pub const ALL: [BinaryKind; 9] = [Add, Sub, Mul, Div, Max, Min, Pow, And, Or];

    /// The function, in f64.
    pub fn apply(self, a: f64, b: f64) -> f64 {
        match self {
            Add => a + b,
            Sub => a - b,
            Mul => a * b,
            Div => a / b,
            Max if a.is_nan() || b.is_nan() => f64::NAN,
            Min if a.is_nan() || b.is_nan() => f64::NAN,
            Max => a.max(b),
            Min => a.min(b),
            Pow => a.powf(b),
            And => (a != 0.0 && b != 0.0) as u8 as f64,
            Or => (a != 0.0 || b != 0.0) as u8 as f64,
        }
    }

    /// The function on integers, wrapping; `None` for a division by zero or a negative power.
    pub fn apply_int(self, a: i64, b: i64) -> Option<i64> {
        Some(match self {
            Add => a.wrapping_add(b),
            Sub => a.wrapping_sub(b),
            Mul => a.wrapping_mul(b),
            Div => a.checked_div(b)?,
            Max => a.max(b),
            Min => a.min(b),
            Pow => a.wrapping_pow(u32::try_from(b).ok()?),
            And => (a != 0 && b != 0) as i64,
            Or => (a != 0 || b != 0) as i64,
        })
    }
}

/// A function of two numbers of one type, element by element. Integer division truncates.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binary {
    /// The function.
    pub kind: BinaryKind,
}

impl Operator for Binary {
    const NAME: &'static str = "binary";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [a, b] = cx.exactly()?;
        same("arguments", a, b)?;
        match (self.kind, a.dtype) {
            (And | Or, DType::Bool) => {}
            (And | Or, _) => return Err(format!("{:?} takes bool, got {a}", self.kind)),
            (_, DType::Bool) => return Err(format!("{:?} takes numbers, got {a}", self.kind)),
            (Pow, _) => float("arguments of pow", a)?,
            _ => {}
        }
        Ok(vec![a.clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let float = cx.outs[0].dtype.is_float();
        let sums: &[&[usize]] = match self.kind {
            Add | Sub => &[&[0, 1]],
            Mul => &[&[0], &[1]],
            Div if float => &[&[0]],
            _ => &[],
        };
        [cx.pointwise(), cx.linear(sums)].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [a, b] = cx.args else { return Err("takes 2 arguments".into()) };
        if cx.dtype().is_float() {
            return cx.each(|i| self.kind.apply(a.at(i), b.at(i)));
        }
        let values: Option<Vec<i64>> =
            (0..a.len()).map(|i| self.kind.apply_int(a.int_at(i), b.int_at(i))).collect();
        let values = values.ok_or("divides by zero")?;
        Ok(vec![Tensor::int(cx.dtype(), cx.shape(), values)])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let [a, b] = [cx.args[0], cx.args[1]];
        if !cx.graph.ty(a).dtype.is_float() {
            return Ok(vec![None, None]);
        }
        let grads =
            Tape::extend(cx.graph, [a, b, cx.outs[0], cx.grad()], |[a, b, y, grad]| match self.kind {
                Add | And | Or => [grad.clone(), grad],
                Sub => [grad.clone(), -grad],
                Mul => [&grad * b, grad * a],
                Div => {
                    let da = grad / b;
                    [da.clone(), -(da * y)]
                }
                Max | Min => {
                    let first = if self.kind == Max { a.greater_equal(&b) } else { a.less_equal(&b) };
                    let zero = grad.full_like(0.0);
                    [first.where_(&grad, &zero), first.where_(&zero, &grad)]
                }
                Pow => {
                    // d(a^b) = b·a^(b-1) da + ln(a)·a^b db
                    let (pb, ly) = (a.both(Pow, &(&b - 1.0)) * &b, a.log() * y);
                    [&grad * pb, grad * ly]
                }
            })?;
        Ok(grads.map(Some).to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, try_apply};

    #[test]
    fn floats_and_integers() {
        let (a, b) = (Tensor::f32(&[3], &[6.0, f32::NAN, -8.0]), Tensor::f32(&[3], &[4.0, 1.0, 3.0]));
        let run = |kind| apply(Binary { kind }, &[a.clone(), b.clone()])[0].reals();
        assert_eq!(run(Div)[0], 1.5);
        assert_eq!(run(Pow)[2], -512.0);
        assert_eq!((run(Max)[0], run(Min)[2]), (6.0, -8.0));
        assert!(run(Max)[1].is_nan() && run(Min)[1].is_nan());
        let i = |v: i64| Tensor::int(DType::I32, &[1], vec![v]);
        assert_eq!(apply(Binary { kind: Div }, &[i(-7), i(2)])[0], i(-3));
        assert_eq!(apply(Binary { kind: Add }, &[i(i32::MAX as i64), i(1)])[0], i(i32::MIN as i64));
        assert!(try_apply(Binary { kind: Div }, &[i(1), i(0)]).is_err());
        assert!(try_apply(Binary { kind: Pow }, &[i(1), i(0)]).is_err());
    }
}
