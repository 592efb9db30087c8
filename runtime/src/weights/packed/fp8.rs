//! Codes of e4m3 in the weight's own shape, and `weight_scale_inv`, a factor a block, or `[]` of a whole matrix.

use super::{Format, Kind, Module, Stored};
use astrai_ir::DType;
use astrai_ir::packing::Blocks;

impl Format for Blocks {
    fn stored(&self, [n, k]: [usize; 2], _has: &dyn Fn(&str) -> bool) -> Vec<Stored> {
        let blocks = match self.columns {
            0 => vec![],
            columns => vec![n.div_ceil(self.rows), k.div_ceil(columns)],
        };
        vec![
            Stored { end: "weight", shape: vec![n, k], kind: Kind::Only(DType::F8E4M3) },
            Stored { end: "weight_scale_inv", shape: blocks, kind: Kind::Float },
        ]
    }

    fn codes(&self, of: &Module) -> Option<Vec<u8>> {
        Some(of.get("weight")?.bytes().to_vec())
    }

    fn stored_codes<'a>(&self, of: &Module<'a>) -> Option<&'a [u8]> {
        Some(of.get("weight")?.bytes())
    }

    fn scales(&self, of: &Module) -> Option<Vec<f32>> {
        let blocks = of.floats("weight_scale_inv")?;
        if self.columns == 0 {
            return Some(vec![*blocks.first()?; of.shape[0]]);
        }
        let row = |r: usize| blocks[r / self.rows * of.groups..][..of.groups].iter().copied();
        Some((0..of.shape[0]).flat_map(row).collect())
    }

    fn zeros(&self, _of: &Module) -> Option<Vec<i32>> {
        Some(vec![])
    }
}
