//! AWQ's `gemm` form. Outputs run through the words of `qweight` `[k, n / 8]` and of `qzeros` `[groups, n / 8]`, even ones before odd;
//! `scales` are `[groups, n]`.

use super::words::{Along, transposed, unpack};
use super::{Format, Kind, Module, Stored};
use astrai_ir::DType;
use astrai_ir::packing::Awq;

/// The lane in which each of eight outputs stands.
const LANES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl Format for Awq {
    fn stored(&self, [n, k]: [usize; 2], _has: &dyn Fn(&str) -> bool) -> Vec<Stored> {
        let groups = if self.share.group() == 0 { 1 } else { k.div_ceil(self.share.group()) };
        let one = |end, shape: [usize; 2], kind| Stored { end, shape: shape.to_vec(), kind };
        vec![
            one("qweight", [k, n.div_ceil(8)], Kind::Only(DType::I32)),
            one("qzeros", [groups, n.div_ceil(8)], Kind::Only(DType::I32)),
            one("scales", [groups, n], Kind::Float),
        ]
    }

    fn codes(&self, of: &Module) -> Option<Vec<u8>> {
        let [n, k] = of.shape;
        let raw = unpack(of.get("qweight")?.bytes(), [k, n], Along::Columns, 4, Some(LANES))?;
        let mut out = transposed(&raw, [k, n]);
        out.iter_mut().for_each(|c| *c = c.wrapping_sub(8));
        Some(out)
    }

    fn scales(&self, of: &Module) -> Option<Vec<f32>> {
        Some(transposed(&of.floats("scales")?, [of.groups, of.shape[0]]))
    }

    fn zeros(&self, of: &Module) -> Option<Vec<i32>> {
        let shape = [of.groups, of.shape[0]];
        let raw = unpack(of.get("qzeros")?.bytes(), shape, Along::Columns, 4, Some(LANES))?;
        Some(transposed(&raw, shape).iter().map(|z| i32::from(*z) - 8).collect())
    }
}
