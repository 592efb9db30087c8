//! `gated_act`: activation of a gate times a linear branch (SwiGLU, GeGLU; Shazeer 2020).

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float, same};
use crate::ops::UnaryKind;
use crate::shard::{Propagate, ShardingRule};
use crate::{Dim, Graph, IrError, NodeId, Real, Tensor, Type, eval::Eval};
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
    pub fn build(self, g: &mut Graph, x: NodeId) -> Result<NodeId, IrError> {
        let phi = match self {
            Activation::Silu => g.unary(UnaryKind::Sigmoid, x)?,
            Activation::Swish(beta) => {
                let s = g.scale(x, beta.0)?;
                g.unary(UnaryKind::Sigmoid, s)?
            }
            Activation::Gelu | Activation::GeluTanh => {
                let t = if self == Activation::Gelu {
                    let s = g.scale(x, std::f64::consts::FRAC_1_SQRT_2)?;
                    g.unary(UnaryKind::Erf, s)?
                } else {
                    let xx = g.mul(x, x)?;
                    let xxx = g.mul(xx, x)?;
                    let c = g.scale(xxx, 0.044715)?;
                    let s = g.add(x, c)?;
                    let s = g.scale(s, ROOT_2_OVER_PI)?;
                    g.unary(UnaryKind::Tanh, s)?
                };
                let one = g.fill(x, 1.0)?;
                let t = g.add(t, one)?;
                g.scale(t, 0.5)?
            }
        };
        g.mul(x, phi)
    }
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
        let (gate, up, grad) = (cx.args[0], cx.args[1], cx.grad());
        let g = &mut *cx.graph;
        let act = self.act.build(g, gate)?;
        let dup = g.mul(grad, act)?;
        let dact = g.mul(grad, up)?;
        let slope = self.slope(g, gate)?;
        Ok(vec![Some(g.mul(dact, slope)?), Some(dup)])
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        Some((|| {
            let a = self.act.build(g, args[0])?;
            Ok(vec![g.mul(a, args[1])?])
        })())
    }

    fn flops(&self, _: &[&Type], outs: &[Type]) -> Dim {
        &outs[0].elements() * &Dim::from(5)
    }
}

impl GatedAct {
    /// act'(x).
    fn slope(&self, g: &mut Graph, x: NodeId) -> Result<NodeId, IrError> {
        let one = g.fill(x, 1.0)?;
        match self.act {
            Activation::Silu => {
                // s + x·s·(1-s)
                let s = g.unary(UnaryKind::Sigmoid, x)?;
                let r = g.sub(one, s)?;
                let xs = g.mul(x, s)?;
                let t = g.mul(xs, r)?;
                g.add(s, t)
            }
            Activation::Swish(beta) => {
                // s + βx·s·(1-s)
                let bx = g.scale(x, beta.0)?;
                let s = g.unary(UnaryKind::Sigmoid, bx)?;
                let r = g.sub(one, s)?;
                let xs = g.mul(bx, s)?;
                let t = g.mul(xs, r)?;
                g.add(s, t)
            }
            Activation::Gelu => {
                // Φ(x) + x·φ(x)
                let s = g.scale(x, std::f64::consts::FRAC_1_SQRT_2)?;
                let e = g.unary(UnaryKind::Erf, s)?;
                let e = g.add(e, one)?;
                let phi = g.scale(e, 0.5)?;
                let xx = g.mul(x, x)?;
                let h = g.scale(xx, -0.5)?;
                let d = g.unary(UnaryKind::Exp, h)?;
                let d = g.scale(d, 0.398_942_280_401_432_7)?;
                let t = g.mul(x, d)?;
                g.add(phi, t)
            }
            Activation::GeluTanh => {
                // ½(1+t) + ½x(1-t²)·√(2/π)(1+3·0.044715x²)
                let xx = g.mul(x, x)?;
                let xxx = g.mul(xx, x)?;
                let c = g.scale(xxx, 0.044715)?;
                let s = g.add(x, c)?;
                let s = g.scale(s, ROOT_2_OVER_PI)?;
                let t = g.unary(UnaryKind::Tanh, s)?;
                let tp = g.add(t, one)?;
                let first = g.scale(tp, 0.5)?;
                let tt = g.mul(t, t)?;
                let r = g.sub(one, tt)?;
                let q = g.scale(xx, 3.0 * 0.044715)?;
                let q = g.add(q, one)?;
                let q = g.scale(q, 0.5 * ROOT_2_OVER_PI)?;
                let xr = g.mul(x, r)?;
                let second = g.mul(xr, q)?;
                g.add(first, second)
            }
        }
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
