//! `gated_act`: activation of a gate times a linear branch (SwiGLU, GeGLU; Shazeer 2020).

use crate::front::{Tape, Value};
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float, same};
use crate::shard::{Propagate, ShardingRule};
use crate::{Graph, IrError, NodeId, Real, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// Activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// x · Φ(x), with the error function.
    Gelu,
    /// x · Φ(x), Φ by tanh.
    GeluTanh,
    /// x · sigmoid(βx), for this β.
    Swish(Real),
}

use std::f64::consts::FRAC_1_SQRT_2;

const ROOT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;

impl Activation {
    /// The function, in f64.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => 0.5 * x * (1.0 + super::unary::erf(x / std::f64::consts::SQRT_2)),
            Activation::GeluTanh => 0.5 * x * (1.0 + (ROOT_2_OVER_PI * (x + 0.044715 * x * x * x)).tanh()),
            Activation::Swish(beta) => x / (1.0 + (-beta.0 * x).exp()),
        }
    }

    /// The function from simpler operators.
    pub(crate) fn of(self, x: &Value) -> Value {
        let phi = match self {
            Activation::Silu => x.sigmoid(),
            Activation::Swish(beta) => (x * beta.0).sigmoid(),
            Activation::Gelu => ((x * FRAC_1_SQRT_2).erf() + 1.0) * 0.5,
            Activation::GeluTanh => (tanh_of_cubic(x) + 1.0) * 0.5,
        };
        x * phi
    }

    /// The derivative at `x`.
    fn slope(self, x: &Value) -> Value {
        let one = x.full_like(1.0);
        match self {
            Activation::Silu | Activation::Swish(_) => {
                // s + βx·s·(1-s)
                let bx = if let Activation::Swish(beta) = self { x * beta.0 } else { x.clone() };
                let s = bx.sigmoid();
                let rest = one - &s;
                &s + bx * &s * rest
            }
            // Φ(x) + x·φ(x)
            Activation::Gelu => {
                let phi = ((x * FRAC_1_SQRT_2).erf() + one) * 0.5;
                phi + x * ((x * x * -0.5).exp() * 0.398_942_280_401_432_7)
            }
            Activation::GeluTanh => {
                // ½(1+t) + ½x(1-t²)·√(2/π)(1+3·0.044715x²)
                let t = tanh_of_cubic(x);
                let first = (&t + &one) * 0.5;
                let rest = &one - &t * &t;
                let q = (x * x * (3.0 * 0.044715) + &one) * (0.5 * ROOT_2_OVER_PI);
                first + x * rest * q
            }
        }
    }
}

/// tanh(√(2/π)·(x + 0.044715x³)).
fn tanh_of_cubic(x: &Value) -> Value {
    ((x + x * x * x * 0.044715) * ROOT_2_OVER_PI).tanh()
}

/// `act(gate) · up`, element by element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatedAct {
    /// The activation of the gate.
    pub act: Activation,
}

impl Operator for GatedAct {
    const NAME: &'static str = "gated_act";
    const FLOPS: usize = 5;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [gate, up] = cx.exactly()?;
        float("gate", gate)?;
        same("gate and up", gate, up)?;
        Ok(vec![(*gate).clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        cx.pointwise()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [gate, up] = cx.args else { return Err("takes 2 arguments".into()) };
        cx.each(|i| self.act.apply(gate.at(i)) * up.at(i))
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let grads = Tape::extend(cx.graph, [cx.args[0], cx.args[1], cx.grad()], |[gate, up, grad]| {
            let dup = &grad * self.act.of(&gate);
            [grad * up * self.act.slope(&gate), dup]
        })?;
        Ok(grads.map(Some).to_vec())
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        let made = Tape::extend(g, [args[0], args[1]], |[gate, up]| [self.act.of(&gate) * up]);
        Some(made.map(|y| y.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close};

    #[test]
    fn values_of_tables() {
        let (x, up) = (Tensor::f32(&[2], &[1.0, -2.0]), Tensor::f32(&[2], &[2.0, 1.0]));
        let run = |act| apply(GatedAct { act }, &[x.clone(), up.clone()]).remove(0);
        close(&run(Activation::Silu), &[2.0 * 0.7310585786300049, -2.0 * 0.11920292202211755]);
        close(&run(Activation::Gelu), &[2.0 * 0.8413447460685429, -2.0 * 0.022750131948179195]);
        close(&run(Activation::Swish(Real(0.5))), &[2.0 * 0.6224593312018546, -2.0 * 0.2689414213699951]);
        close(&run(Activation::GeluTanh), &[2.0 * 0.8411919906082768, -0.04540230591222]);
    }
}
