//! `reshape`: the same elements in the same order under other sizes.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::ty::show;
use crate::{Dim, Graph, NodeId, Op, Shape, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// The same elements, row-major, under other sizes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reshape {
    /// New sizes.
    pub shape: Shape,
}

impl Operator for Reshape {
    const NAME: &'static str = "reshape";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        if Dim::product(&self.shape) != x.elements() {
            return Err(format!("cannot make {} of {x}: the numbers of elements differ", show(&self.shape)));
        }
        Ok(vec![Type { dtype: x.dtype, shape: self.shape.clone() }])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        Ok(vec![cx.args[0].pick(cx.shape(), |i| i)])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let shape = cx.graph.ty(cx.args[0]).shape.clone();
        let g = cx.grad();
        Ok(vec![Some(cx.graph.push(Reshape { shape }, &[g])?)])
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        let node = graph.node(x);
        if node.types.len() == 1 && node.ty().shape == self.shape {
            return Some(Simpler::Node(x));
        }
        match &node.op {
            Op::Reshape(_) => Some(Simpler::Op(Box::new(self.clone().into()), node.args.clone())),
            _ => None,
        }
    }

    fn flops(&self, _: &[&Type], _: &[Type]) -> Dim {
        Dim::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, try_apply};

    #[test]
    fn order_stays() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let y = apply(Reshape { shape: vec![Dim::from(6)] }, std::slice::from_ref(&x));
        assert_eq!((y[0].shape.as_slice(), y[0].reals()), (&[6][..], x.reals()));
        assert!(try_apply(Reshape { shape: vec![Dim::from(4)] }, &[x]).is_err());
    }
}
