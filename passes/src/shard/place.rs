//! Brings values from one placement to another: the collectives are made here and nowhere else.

use super::choose::sent;
use super::walk::{Value, Walk};
use astrai_ir::ops::{
    AllGather, AllReduce, AllToAll, Const, Expand, Joint, Op, OwnSlice, ReduceScatter, Spread,
};
use astrai_ir::shard::Cut;
use astrai_ir::{DType, IrError, NodeId, Placement, Tensor};

impl Walk<'_> {
    /// The node that holds the value as `to`; `offsets` divide the rows of what is sent to experts.
    pub(super) fn bring(
        &mut self,
        value: &Value,
        to: &Placement,
        offsets: Option<NodeId>,
    ) -> Result<NodeId, IrError> {
        use Placement::*;
        let (id, axis) = (value.id, self.axis.clone());
        let made = match (&value.placed[0], to) {
            (from, to) if from == to => return Ok(id),
            (Partial, Whole) => self.out.push(AllReduce { kind: Joint::Sum, over: vec![axis] }, &[id])?,
            (Partial, Split(cut)) => self.out.push(ReduceScatter { cut: cut.clone(), over: axis }, &[id])?,
            (Split(cut), Whole) => self.out.push(AllGather { cut: cut.clone(), over: axis }, &[id])?,
            (Whole, Split(cut)) => self.narrow(id, cut, value.graded)?,
            (Whole, Partial) => self.on_first(id, value.graded)?,
            (Split(a), Split(b)) => {
                let whole = self.out.push(AllGather { cut: a.clone(), over: axis }, &[id])?;
                self.narrow(whole, b, value.graded)?
            }
            (Own, Routed) => self.send(id, offsets)?,
            (Routed, Own) => {
                let offsets = self.offsets.get(&id).copied();
                let offsets =
                    offsets.ok_or_else(|| self.out.error(format!("{id} was never sent to experts")))?;
                let rows = value.rows.clone().ok_or_else(|| self.out.error(format!("{id} has no rows")))?;
                self.out.push(AllToAll { over: axis, rows, back: true }, &[id, offsets])?
            }
            (from, to) => {
                return Err(self.out.error(format!("{} cannot turn {from} into {to}", self.axis)));
            }
        };
        self.note(made, id, to);
        Ok(made)
    }

    /// Rows to the ranks of their experts; the offsets themselves become those of what arrives.
    fn send(&mut self, id: NodeId, offsets: Option<NodeId>) -> Result<NodeId, IrError> {
        let none = || self.out.error(format!("{id} has no offsets by which to send it"));
        let offsets = offsets.ok_or_else(none)?;
        if id == offsets {
            return Err(self.out.error("offsets are sent with their rows".into()));
        }
        let first = self.out.ty(id).shape.first().cloned().unwrap_or_default();
        let rows = sent(&first, self.axis);
        let node = self.out.node(id);
        // What is the same in every row needs no sending.
        if let Op::Expand(e) = &node.op
            && self.out.ty(node.args[0]).shape.first().is_some_and(|d| d.is_one())
            && self.is_whole(node.args[0])
        {
            let (mut shape, arg) = (e.shape.clone(), node.args[0]);
            shape[0] = rows;
            return self.out.push(Expand { shape }, &[arg]);
        }
        let both = self.out.push(AllToAll { over: self.axis.clone(), rows, back: false }, &[id, offsets])?;
        self.arrived.insert(offsets, both);
        self.out.part(both, 0)
    }

    /// True for what was noted to be the same on all ranks.
    fn is_whole(&self, id: NodeId) -> bool {
        let noted = self.out.node(id).sharding.iter().find(|(axis, _)| *axis == self.axis.name);
        noted.is_some_and(|(_, p)| *p == Placement::Whole)
    }

    /// A number on the first rank, zero on the others.
    fn on_first(&mut self, id: NodeId, graded: bool) -> Result<NodeId, IrError> {
        // Only the first rank's use gives a cotangent, which all ranks need.
        let id = match graded && self.trained {
            true => self.out.push(Spread { over: self.axis.clone() }, &[id])?,
            false => id,
        };
        let n = self.axis.size;
        let first = Tensor::float(DType::F32, &[n], (0..n).map(|i| f64::from(i == 0)).collect());
        let first = self.out.push(Const::new(&first), &[])?;
        let own = self.out.push(OwnSlice { cut: Cut::of(0), over: self.axis.clone() }, &[first])?;
        let own = self.out.reshape(own, vec![])?;
        let own = self.out.cast(own, self.out.ty(id).dtype)?;
        self.out.mul(id, own)
    }

    /// A rank's piece of a value that all hold; of what is repeated along the dimension, fewer repetitions.
    fn narrow(&mut self, id: NodeId, cut: &Cut, graded: bool) -> Result<NodeId, IrError> {
        let node = self.out.node(id);
        if let Op::Expand(e) = &node.op {
            let (mut shape, arg) = (e.shape.clone(), node.args[0]);
            let repeated = self.out.ty(arg).shape[cut.dim].is_one();
            // Every rank repeats it for its own piece, so its cotangent is a sum over ranks.
            let arg = match repeated {
                true if graded && self.trained => {
                    self.out.push(Spread { over: self.axis.clone() }, &[arg])?
                }
                true => arg,
                false => self.narrow(arg, cut, graded)?,
            };
            shape[cut.dim] = cut.piece(self.out.ty(id), self.axis.size).shape[cut.dim].clone();
            return self.out.push(Expand { shape }, &[arg]);
        }
        self.out.push(OwnSlice { cut: cut.clone(), over: self.axis.clone() }, &[id])
    }
}
