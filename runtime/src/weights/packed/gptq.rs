//! GPTQ. Inputs run through the words of `qweight` `[k / per, n]`, outputs through those of `qzeros` `[groups, n / per]`; `scales` are
//! `[groups, n]`, and `g_idx` says which group an input is in.

use super::words::{Along, bits, transposed, unpack};
use super::{Format, Kind, Module, Stored};
use astrai_ir::DType;
use astrai_ir::packing::Gptq;

impl Format for Gptq {
    fn stored(&self, [n, k]: [usize; 2], has: &dyn Fn(&str) -> bool) -> Vec<Stored> {
        let per = 32 / bits(self.code);
        let groups = if self.share.group() == 0 { 1 } else { k.div_ceil(self.share.group()) };
        let one = |end, shape: &[usize], kind| Stored { end, shape: shape.to_vec(), kind };
        let words = || Kind::Only(DType::I32);
        let mut all = vec![
            one("qweight", &[k.div_ceil(per), n], words()),
            one("qzeros", &[groups, n.div_ceil(per)], words()),
            one("scales", &[groups, n], Kind::Float),
        ];
        if self.act_order || has("g_idx") {
            all.push(one("g_idx", &[k], Kind::Integer));
        }
        all
    }

    fn codes(&self, of: &Module) -> Option<Vec<u8>> {
        let [n, k] = of.shape;
        let bits = bits(self.code);
        let raw = unpack(of.get("qweight")?.bytes(), [k, n], Along::Rows, bits, None)?;
        let mut out = transposed(&raw, [k, n]);
        out.iter_mut().for_each(|c| *c = c.wrapping_sub(1 << (bits - 1)));
        Some(out)
    }

    fn scales(&self, of: &Module) -> Option<Vec<f32>> {
        Some(transposed(&of.floats("scales")?, [of.groups, of.shape[0]]))
    }

    fn zeros(&self, of: &Module) -> Option<Vec<i32>> {
        let shape = [of.groups, of.shape[0]];
        let bits = bits(self.code);
        let raw = unpack(of.get("qzeros")?.bytes(), shape, Along::Columns, bits, None)?;
        let less = i32::from(self.less_one) - (1 << (bits - 1));
        Some(transposed(&raw, shape).iter().map(|z| i32::from(*z) + less).collect())
    }

    fn index(&self, of: &Module) -> Option<Vec<usize>> {
        let groups = of.get("g_idx")?.to_i64().ok()?;
        Some(groups.iter().map(|g| usize::try_from(*g).unwrap_or(usize::MAX)).collect())
    }
}
