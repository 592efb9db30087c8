//! `weight`: a tensor of the checkpoint. One buffer may hold the concatenation of several as consecutive rows (q|k|v, gate|up):
//! then the concatenated buffer is the storage and the checkpoint names are views of it. Training updates every weight that is
//! not frozen.

use crate::op::{Infer, Inferred, Operator};
use crate::{Dim, Type};
use serde::{Deserialize, Serialize};

/// A tensor of the checkpoint, by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weight {
    /// Name of the buffer: the checkpoint's name, or one made of the names of its parts.
    pub name: String,
    /// Its type.
    pub ty: Type,
    /// Checkpoint tensors whose rows follow one another in the buffer; empty when the buffer is the one of that name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Rows>,
    /// Frozen: training does not update the weight. It has no gradient, no moments and no decay.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// The weight keeps its own type whatever the storage type of other weights is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_type: bool,
    /// The optimiser skips a part whose gradient is zero throughout: neither decay nor moments change in that step, as if the part
    /// had no gradient. All parts then have equally many rows. It is set for experts that are checkpoint tensors of their own,
    /// which have no gradient in a step in which no token was routed to them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skip_zero_grad: bool,
}

/// Consecutive rows (outermost dimension) of a concatenated buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// Checkpoint name.
    pub name: String,
    /// Number of rows.
    pub rows: usize,
}

impl Weight {
    /// A buffer that is one checkpoint tensor.
    pub fn new(name: &str, ty: Type) -> Weight {
        let name = name.to_string();
        Weight { name, ty, parts: vec![], frozen: false, keeps_type: false, skip_zero_grad: false }
    }

    /// A buffer that is one checkpoint tensor which no model trains or rounds: a constant of its maker's.
    pub fn fixed(name: &str, ty: Type) -> Weight {
        Weight { frozen: true, keeps_type: true, ..Weight::new(name, ty) }
    }

    /// Checkpoint tensors in the buffer, with their rows.
    pub fn rows(&self) -> Vec<Rows> {
        if !self.parts.is_empty() {
            return self.parts.clone();
        }
        let rows = self.ty.shape.first().and_then(Dim::size).unwrap_or(1);
        vec![Rows { name: self.name.clone(), rows }]
    }
}

impl Operator for Weight {
    const NAME: &'static str = "weight";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        if let Some(d) = self.ty.shape.iter().find(|d| d.size().is_none()) {
            return Err(format!("`{}` has the size {d}; weights have literal sizes", self.name));
        }
        let rows: usize = self.parts.iter().map(|p| p.rows).sum();
        if !self.parts.is_empty() && self.ty.shape.first().and_then(Dim::size) != Some(rows) {
            return Err(format!("`{}` has parts of {rows} rows in all, its type is {}", self.name, self.ty));
        }
        if self.skip_zero_grad && self.parts.windows(2).any(|p| p[0].rows != p[1].rows) {
            return Err(format!(
                "`{}` has parts of different rows, which cannot be skipped one by one",
                self.name
            ));
        }
        Ok(vec![self.ty.clone()])
    }
}
