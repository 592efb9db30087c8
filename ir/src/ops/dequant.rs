//! `dequant`: the numbers that codes and scales stand for. The kernels of a dot and of attention over pages read the codes where they
//! lie; there the numbers never exist whole.

use crate::narrow::Code;
use crate::op::{Infer, Inferred, Operator, same};
use crate::shard::{Label, Propagate, ShardingRule};
use crate::{DType, Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// `scale · value(code) + offset`, f32 `[…, k]`; arguments codes `[…, k / per_element]`, scales and, where there are any, offsets
/// `[…, k / group]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dequant {
    /// What a code stands for.
    pub code: Code,
}

impl Dequant {
    /// Rows of a matrix, numbers of a row, and neighbours that share a scale.
    ///
    /// # Errors
    /// The types are not those of a matrix of codes and its scales.
    pub fn sizes(&self, codes: &Type, scales: &Type) -> Result<[usize; 3], String> {
        let [k, group] = self.row(codes, scales)?;
        match codes.shape.as_slice() {
            [n, _] => Ok([n.size().ok_or("rows are not counted")?, k, group]),
            _ => Err(format!("wants a matrix, got {codes}")),
        }
    }

    /// Numbers of a row, and neighbours that share a scale.
    fn row(&self, codes: &Type, scales: &Type) -> Result<[usize; 2], String> {
        let last = |t: &Type| {
            let (last, rest) = t.shape.split_last()?;
            Some((last.size().filter(|n| *n > 0)?, rest.to_vec()))
        };
        let (Some((k, rows)), Some((groups, scaled))) = (last(codes), last(scales)) else {
            return Err(format!("takes rows of literal sizes, got {codes} and {scales}"));
        };
        let k = k.checked_mul(self.code.per_element()).ok_or("rows are too long")?;
        if codes.dtype != self.code.dtype() || !scales.dtype.is_float() || scales.dtype.bytes() < 2 {
            return Err(format!(
                "takes codes of {} and floating scales, got {codes} and {scales}",
                self.code.dtype()
            ));
        }
        if rows != scaled || k % groups != 0 {
            return Err(format!("scales {scales} do not divide rows of codes {codes}"));
        }
        Ok([k, k / groups])
    }
}

impl Operator for Dequant {
    const NAME: &'static str = "dequant";

    fn infer(&self, cx: &Infer) -> Inferred {
        let (codes, scales) = match cx.args {
            [codes, scales] => (codes, scales),
            [codes, scales, offsets] => {
                same("scales and offsets", scales, offsets)?;
                (codes, scales)
            }
            args => return Err(format!("takes 2 or 3 arguments, got {}", args.len())),
        };
        let [k, _] = self.row(codes, scales)?;
        let rows = &codes.shape[..codes.rank() - 1];
        Ok(vec![Type::new(DType::F32, [rows, &[Dim::from(k)]].concat())])
    }

    /// Rows apart, each whole.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let rank = cx.args[0].rank();
        let labels: Vec<Label> = (0..rank).map(|d| (d + 1 < rank).then_some(d)).collect();
        cx.labelled(&vec![labels.clone(); cx.args.len()], &[labels], &[])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [codes, scales, offsets @ ..] = cx.args else { return Err("takes 2 or 3 arguments".into()) };
        let group = cx.shape().iter().product::<usize>() / scales.len().max(1);
        let four = |i: usize| (codes.int_at(i / 2) >> (4 * (i % 2))) & 15;
        let value = |i: usize| match self.code {
            Code::Int4 => four(i) as f64 - 8.0,
            Code::Fp4 => {
                let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][four(i) as usize & 7];
                if four(i) < 8 { magnitude } else { -magnitude }
            }
            Code::Int8 => codes.int_at(i) as f64,
            Code::Fp8 => codes.at(i),
        };
        let offset = |i: usize| offsets.first().map_or(0.0, |o| o.at(i / group));
        cx.each(|i| scales.at(i / group) * value(i) + offset(i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn codes_are_scaled_by_their_group() {
        let codes = Tensor::int(DType::U8, &[1, 2], vec![0x0f, 0x98]);
        let scales = Tensor::f32(&[1, 2], &[2.0, 0.5]);
        let out = &apply(Dequant { code: Code::Int4 }, &[codes.clone(), scales.clone()])[0];
        assert_eq!(out.reals(), [14.0, -16.0, 0.0, 0.5]);
        let offsets = Tensor::f32(&[1, 2], &[1.0, -3.0]);
        let out = &apply(Dequant { code: Code::Int4 }, &[codes, scales, offsets])[0];
        assert_eq!(out.reals(), [15.0, -15.0, -3.0, -2.5]);
        let codes = Tensor::int(DType::U8, &[1, 2], vec![0x6f, 0x18]);
        let out = &apply(Dequant { code: Code::Fp4 }, &[codes, Tensor::f32(&[1, 1], &[2.0])])[0];
        assert_eq!(out.reals(), [-12.0, 8.0, 0.0, 1.0]);
        let codes = Tensor::int(DType::I8, &[2, 1], vec![-127, 3]);
        let out = &apply(Dequant { code: Code::Int8 }, &[codes, Tensor::f32(&[2, 1], &[2.0, 0.5])])[0];
        assert_eq!(out.reals(), [-254.0, 1.5]);
        // Heads of two tokens in eight bits.
        let codes = Tensor::float(DType::F8E4M3, &[2, 1, 2], vec![448.0, -0.5, 1.0, 0.0]);
        let out = &apply(Dequant { code: Code::Fp8 }, &[codes, Tensor::f32(&[2, 1, 1], &[0.5, 3.0])])[0];
        assert_eq!((out.shape.clone(), out.reals()), (vec![2, 1, 2], vec![224.0, -0.25, 3.0, 0.0]));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let ty = |dtype, n: usize, k: usize| Type::new(dtype, [Dim::from(n), Dim::from(k)]);
        let sizes = |code, codes: &Type, scales: &Type| Dequant { code }.sizes(codes, scales);
        assert_eq!(sizes(Code::Int4, &ty(DType::U8, 3, 32), &ty(DType::F16, 3, 2)), Ok([3, 64, 32]));
        assert!(sizes(Code::Int4, &ty(DType::I8, 3, 32), &ty(DType::F16, 3, 2)).is_err());
        assert!(sizes(Code::Int8, &ty(DType::I8, 3, 32), &ty(DType::F32, 2, 2)).is_err());
        assert!(sizes(Code::Int8, &ty(DType::I8, 3, 32), &ty(DType::F32, 3, 5)).is_err());
    }
}
