//! compressed-tensors. Codes stand in `weight`, or in `weight_packed` with inputs running through its words; `weight_scale` is `[n, groups]`, of
//! a whole matrix `[1]`. Zero points stand in `weight_zero_point` `[n, groups]`, packed ones with outputs running through its words.

use super::words::{Along, bits, unpack};
use super::{Format, Kind, Module, Stored, TensorView};
use astrai_ir::packing::{Compressed, Share};
use astrai_ir::{Code, DType};

impl Format for Compressed {
    fn stored(&self, [n, k]: [usize; 2], _has: &dyn Fn(&str) -> bool) -> Vec<Stored> {
        let per = 32 / bits(self.code);
        let groups = if self.share.group() == 0 { 1 } else { k.div_ceil(self.share.group()) };
        let one = |end, shape: &[usize], kind| Stored { end, shape: shape.to_vec(), kind };
        let words = || Kind::Only(DType::I32);
        let mut all = match self.packed {
            true => vec![
                one("weight_packed", &[n, k.div_ceil(per)], words()),
                one("weight_shape", &[2], Kind::Integer),
            ],
            false => vec![one("weight", &[n, k], Kind::Only(self.code.dtype()))],
        };
        let scales: &[usize] = if self.share == Share::Tensor { &[1] } else { &[n, groups] };
        all.push(one("weight_scale", scales, Kind::Float));
        match (self.zeros, self.packed) {
            (true, true) => all.push(one("weight_zero_point", &[n.div_ceil(per), groups], words())),
            (true, false) => all.push(one("weight_zero_point", &[n, groups], Kind::Only(DType::I8))),
            (false, _) => {}
        }
        all
    }

    fn codes(&self, of: &Module) -> Option<Vec<u8>> {
        if !self.packed {
            return Some(of.get("weight")?.bytes().to_vec());
        }
        let bits = bits(self.code);
        let mut out = unpack(of.get("weight_packed")?.bytes(), of.shape, Along::Columns, bits, None)?;
        out.iter_mut().for_each(|c| *c = c.wrapping_sub(1 << (bits - 1)));
        Some(out)
    }

    fn stored_codes<'a>(&self, of: &Module<'a>) -> Option<&'a [u8]> {
        let (end, whole) = match (self.packed, self.code) {
            (true, Code::Int4) => ("weight_packed", of.shape[1].is_multiple_of(8)),
            (packed, code) => ("weight", !packed && code != Code::Int4),
        };
        of.get(end).filter(|_| whole).map(|t| t.bytes())
    }

    fn scales(&self, of: &Module) -> Option<Vec<f32>> {
        let scales = of.floats("weight_scale")?;
        match self.share {
            Share::Tensor => Some(vec![*scales.first()?; of.shape[0]]),
            _ => Some(scales),
        }
    }

    fn stored_scales<'a>(&self, of: &Module<'a>) -> Option<TensorView<'a>> {
        of.get("weight_scale").filter(|_| !matches!(self.share, Share::Tensor))
    }

    fn zeros(&self, of: &Module) -> Option<Vec<i32>> {
        if !self.zeros {
            return Some(vec![]);
        }
        let t = of.get("weight_zero_point")?;
        if !self.packed {
            return Some(t.bytes().iter().map(|b| i32::from(*b as i8)).collect());
        }
        let bits = bits(self.code);
        let raw = unpack(t.bytes(), [of.shape[0], of.groups], Along::Rows, bits, None)?;
        Some(raw.iter().map(|z| i32::from(*z) - (1 << (bits - 1))).collect())
    }
}
