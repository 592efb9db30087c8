//! Resharding: brings a value from one placement to another. Collectives are inserted here and nowhere else.

use super::choose::dispatched_size;
use super::partition::{Partitioner, Value};
use astrai_ir::ops::{
    AllGather, AllReduce, AllToAll, Const, Expand, LocalSlice, Op, Pvary, ReduceOp, ReduceScatter,
};
use astrai_ir::shard::Shard;
use astrai_ir::{DType, IrError, NodeId, Placement, Tensor};

impl Partitioner<'_> {
    /// The node that holds the value with the placement `to`; `offsets` are where each expert's rows begin in what is dispatched.
    pub(super) fn reshard(
        &mut self,
        value: &Value,
        to: &Placement,
        offsets: Option<NodeId>,
    ) -> Result<NodeId, IrError> {
        use Placement::*;
        let (id, axis) = (value.id, self.axis.clone());
        let made = match (&value.placements[0], to) {
            (from, to) if from == to => return Ok(id),
            (Partial, Replicate) => {
                self.out.push(AllReduce { kind: ReduceOp::Sum, over: vec![axis] }, &[id])?
            }
            (Partial, Shard(s)) => self.out.push(ReduceScatter { shard: s.clone(), over: axis }, &[id])?,
            (Shard(s), Replicate) => self.out.push(AllGather { shard: s.clone(), over: axis }, &[id])?,
            (Replicate, Shard(s)) => self.local_slice(id, s, value.has_gradient)?,
            (Replicate, Partial) => self.first_rank_only(id, value.has_gradient)?,
            (Shard(a), Shard(b)) => {
                let replicated = self.out.push(AllGather { shard: a.clone(), over: axis }, &[id])?;
                self.local_slice(replicated, b, value.has_gradient)?
            }
            (Local, Dispatched) => self.dispatch(id, offsets)?,
            (Dispatched, Local) => {
                let offsets = self.offsets.get(&id).copied();
                let offsets =
                    offsets.ok_or_else(|| self.out.error(format!("{id} was never dispatched to experts")))?;
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

    /// Dispatches rows to the ranks of their experts by an all-to-all, which also gives the offsets of the rows that arrive.
    fn dispatch(&mut self, id: NodeId, offsets: Option<NodeId>) -> Result<NodeId, IrError> {
        let none = || self.out.error(format!("{id} has no offsets by which to dispatch it"));
        let offsets = offsets.ok_or_else(none)?;
        if id == offsets {
            return Err(self.out.error("offsets are sent with their rows".into()));
        }
        let first = self.out.ty(id).shape.first().cloned().unwrap_or_default();
        let rows = dispatched_size(&first, self.axis);
        let node = self.out.node(id);
        // A value that is the same in every row is expanded where it is needed instead of being sent.
        if let Op::Expand(e) = &node.op
            && self.out.ty(node.args[0]).shape.first().is_some_and(|d| d.is_one())
            && self.is_replicated(node.args[0])
        {
            let (mut shape, arg) = (e.shape.clone(), node.args[0]);
            shape[0] = rows;
            return self.out.push(Expand { shape }, &[arg]);
        }
        let both = self.out.push(AllToAll { over: self.axis.clone(), rows, back: false }, &[id, offsets])?;
        self.arrived.insert(offsets, both);
        self.out.part(both, 0)
    }

    /// True for a node that was noted to be replicated.
    fn is_replicated(&self, id: NodeId) -> bool {
        let noted = self.out.node(id).sharding.iter().find(|(axis, _)| *axis == self.axis.name);
        noted.is_some_and(|(_, p)| *p == Placement::Replicate)
    }

    /// A replicated scalar as a partial sum: the value on the first rank, zero on the others.
    fn first_rank_only(&mut self, id: NodeId, has_gradient: bool) -> Result<NodeId, IrError> {
        // Only the use on the first rank gives a cotangent, which all ranks need.
        let id = match has_gradient && self.trained {
            true => self.out.push(Pvary { over: self.axis.clone() }, &[id])?,
            false => id,
        };
        let n = self.axis.size;
        let first = Tensor::float(DType::F32, &[n], (0..n).map(|i| f64::from(i == 0)).collect());
        let first = self.out.push(Const::new(&first), &[])?;
        let factor = self.out.push(LocalSlice { shard: Shard::of(0), over: self.axis.clone() }, &[first])?;
        let factor = self.out.reshape(factor, vec![])?;
        let factor = self.out.cast(factor, self.out.ty(id).dtype)?;
        self.out.mul(id, factor)
    }

    /// A rank's shard of a replicated value. A broadcast along the sharded dimension becomes a shorter broadcast.
    fn local_slice(&mut self, id: NodeId, shard: &Shard, has_gradient: bool) -> Result<NodeId, IrError> {
        let node = self.out.node(id);
        if let Op::Expand(e) = &node.op {
            let (mut shape, arg) = (e.shape.clone(), node.args[0]);
            let repeated = self.out.ty(arg).shape[shard.dim].is_one();
            // Every rank broadcasts the argument to its own shard, so the cotangent is a sum over ranks.
            let arg = match repeated {
                true if has_gradient && self.trained => {
                    self.out.push(Pvary { over: self.axis.clone() }, &[arg])?
                }
                true => arg,
                false => self.local_slice(arg, shard, has_gradient)?,
            };
            shape[shard.dim] = shard.local_type(self.out.ty(id), self.axis.size).shape[shard.dim].clone();
            return self.out.push(Expand { shape }, &[arg]);
        }
        self.out.push(LocalSlice { shard: shard.clone(), over: self.axis.clone() }, &[id])
    }
}
