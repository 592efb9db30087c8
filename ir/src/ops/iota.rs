//! `iota`: 0, 1, 2, … along one axis.

use crate::op::{Infer, Inferred, Operator, axis_in};
use crate::tensor::unravel;
use crate::{Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Position along `axis`, repeated over the other axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iota {
    /// Type of the result.
    pub ty: Type,
    /// The axis that counts.
    pub axis: usize,
}

impl Operator for Iota {
    const NAME: &'static str = "iota";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        axis_in(self.axis, &self.ty)?;
        Ok(vec![self.ty.clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        cx.each(|i| unravel(i, cx.shape())[self.axis] as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::Dim;
    use crate::check::apply;

    #[test]
    fn counts_along_its_axis() {
        let ty = Type::new(DType::I32, [Dim::from(2), Dim::from(3)]);
        assert_eq!(apply(Iota { ty: ty.clone(), axis: 1 }, &[])[0].reals(), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
        assert_eq!(apply(Iota { ty, axis: 0 }, &[])[0].reals(), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    }
}
