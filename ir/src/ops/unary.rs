//! `unary`: functions of one number, element by element.

use crate::front::{Tape, Value};
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::shard::{Propagate, ShardingRule};
use crate::{DType, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// Function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the functions
pub enum UnaryKind {
    Neg,
    Abs,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Sin,
    Cos,
    Tanh,
    Erf,
    Sigmoid,
    Floor,
    /// Logical not, of bool.
    Not,
}

use UnaryKind::*;

impl UnaryKind {
    /// Every kind.
    pub const ALL: [UnaryKind; 13] =
        [Neg, Abs, Exp, Log, Sqrt, Rsqrt, Sin, Cos, Tanh, Erf, Sigmoid, Floor, Not];

    /// The function, in f64.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Neg => -x,
            Abs => x.abs(),
            Exp => x.exp(),
            Log => x.ln(),
            Sqrt => x.sqrt(),
            Rsqrt => 1.0 / x.sqrt(),
            Sin => x.sin(),
            Cos => x.cos(),
            Tanh => x.tanh(),
            Erf => erf(x),
            Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Floor => x.floor(),
            Not => (x == 0.0) as u8 as f64,
        }
    }
}

/// A function of one number, element by element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unary {
    /// The function.
    pub kind: UnaryKind,
}

impl Operator for Unary {
    const NAME: &'static str = "unary";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        match self.kind {
            Not if x.dtype != DType::Bool => return Err(format!("not takes bool, got {x}")),
            Neg | Abs if x.dtype == DType::Bool => {
                return Err(format!("{:?} takes numbers, got {x}", self.kind));
            }
            Not | Neg | Abs => {}
            _ => float("its argument", x)?,
        }
        Ok(vec![x.clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let sums: &[&[usize]] = if self.kind == Neg { &[&[0]] } else { &[] };
        [cx.pointwise(), cx.linear(sums)].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        if !x.dtype.is_float() && self.kind != Not {
            let f = if self.kind == Neg { i64::wrapping_neg } else { i64::wrapping_abs };
            let values = (0..x.len()).map(|i| f(x.int_at(i))).collect();
            return Ok(vec![Tensor::int(x.dtype, cx.shape(), values)]);
        }
        cx.each(|i| self.kind.apply(x.at(i)))
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (x, y, g) = (cx.args[0], cx.outs[0], cx.grad());
        if !cx.graph.ty(x).dtype.is_float() || self.kind == Floor {
            return Ok(vec![None]);
        }
        let grads = Tape::extend(cx.graph, [x, y, g], |[x, y, g]| [g * derivative(self.kind, &x, y)])?;
        Ok(grads.map(Some).to_vec())
    }
}

/// dy/dx from x and y.
fn derivative(kind: UnaryKind, x: &Value, y: Value) -> Value {
    let one = x.full_like(1.0);
    match kind {
        Neg => x.full_like(-1.0),
        Abs => {
            let (zero, minus) = (x.full_like(0.0), x.full_like(-1.0));
            x.greater_equal(&zero).where_(&one, &minus)
        }
        Exp => y,
        Log => one / x,
        Sqrt => 0.5 / y,
        Rsqrt => y / x * -0.5,
        Sin => x.cos(),
        Cos => -x.sin(),
        Tanh => one - &y * &y,
        Erf => (-(x * x)).exp() * std::f64::consts::FRAC_2_SQRT_PI,
        Sigmoid => &y * (one - &y),
        Floor | Not => x.full_like(0.0),
    }
}

/// The error function to about 1e-15: series near zero, continued fraction of the complement beyond.
pub fn erf(x: f64) -> f64 {
    let a = x.abs();
    if x.is_nan() {
        return x;
    }
    if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > sum.abs() * 1e-17 && n < 200.0 {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
        }
        return (std::f64::consts::FRAC_2_SQRT_PI * sum).copysign(x);
    }
    if a > 6.0 {
        return 1f64.copysign(x);
    }
    let f = (1..=60).rev().fold(a, |f, k| a + (k as f64 / 2.0) / f);
    (1.0 - (-a * a).exp() / (f * std::f64::consts::PI.sqrt())).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close, try_apply};

    #[test]
    fn every_kind_at_a_point() {
        let x = Tensor::f32(&[1], &[0.25]);
        let want = [
            (Neg, -0.25),
            (Abs, 0.25),
            (Exp, 1.2840254166877414),
            (Log, -1.3862943611198906),
            (Sqrt, 0.5),
            (Rsqrt, 2.0),
            (Sin, 0.24740395925452294),
            (Cos, 0.9689124217106447),
            (Tanh, 0.24491866240370913),
            (Erf, 0.2763263901682369),
            (Sigmoid, 0.5621765008857981),
            (Floor, 0.0),
        ];
        assert_eq!(want.len() + 1, UnaryKind::ALL.len());
        for (kind, y) in want {
            close(&apply(Unary { kind }, std::slice::from_ref(&x))[0], &[y]);
        }
        let b = Tensor::int(DType::Bool, &[2], vec![0, 1]);
        assert_eq!(apply(Unary { kind: Not }, std::slice::from_ref(&b))[0].reals(), [1.0, 0.0]);
        assert!(try_apply(Unary { kind: Neg }, &[b]).is_err());
    }

    #[test]
    fn erf_matches_tables() {
        for (x, y) in [
            (0.5, 0.5204998778130465),
            (1.0, 0.8427007929497149),
            (2.4, 0.9993114861033549),
            (3.0, 0.9999779095030014),
        ] {
            assert!((super::erf(x) - y).abs() < 1e-14, "{x}: {}", super::erf(x));
            assert_eq!(super::erf(-x), -super::erf(x));
        }
    }
}
