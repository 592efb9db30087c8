//! Where an axis is cut: rope, concat and pad change their formula along it, and a loop whose every position lies in one
//! piece needs no choice inside. In: a node. Out: stretches of its last axis.

use super::Lower;
use crate::index::{Index, Var};
use astrai_ir::ops::Op;
use astrai_ir::{Dim, NodeId};

/// A stretch of an axis in which every piecewise operator stays in one piece: positions `start + step·p + c`.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// First position.
    pub start: Dim,
    /// Number of positions.
    pub len: Dim,
    /// Positions an iteration covers.
    pub step: usize,
}

impl Lower<'_> {
    /// The loop variable of a segment and the positions an iteration covers.
    pub fn positions(&mut self, s: &Segment) -> (Var, Vec<Index>) {
        let step = Dim::from(s.step);
        let var = self.var(s.len.div_exact(&step).unwrap_or(s.len.clone()));
        let first = Index::var(&var).times(&step).plus(&s.start);
        let positions = (0..s.step).map(|c| first.plus(&Dim::from(c))).collect();
        (var, positions)
    }

    /// Segments of the last axis of a node, from the piecewise operators below it.
    pub fn segments(&self, id: NodeId) -> Vec<Segment> {
        let n = self.ty(id).shape.last().cloned().unwrap_or(Dim::from(1));
        let Some(len) = n.size() else { return vec![Segment { start: Dim::from(0), len: n, step: 1 }] };
        let (mut cuts, mut paired) = (vec![0, len], 0);
        self.cuts(id, 0, len, &mut cuts, &mut paired, 0);
        cuts.sort_unstable();
        cuts.dedup();
        let step = |a: usize, b: usize| {
            if b <= paired && (b - a).is_multiple_of(2) && a.is_multiple_of(2) { 2 } else { 1 }
        };
        let segment =
            |w: &[usize]| Segment { start: w[0].into(), len: (w[1] - w[0]).into(), step: step(w[0], w[1]) };
        cuts.windows(2).map(segment).collect()
    }

    /// Collects piece boundaries inside `0 .. len`, for values read at `position + shift`.
    fn cuts(
        &self,
        id: NodeId,
        shift: usize,
        len: usize,
        cuts: &mut Vec<usize>,
        paired: &mut usize,
        deep: usize,
    ) {
        let node = self.region.graph.node(id);
        let mut add = |at: usize| {
            if at > shift && at < shift + len {
                cuts.push(at - shift);
            }
        };
        let last = node.ty().rank().saturating_sub(1);
        let same_last = |a: &NodeId| self.ty(*a).shape.last() == node.ty().shape.last();
        match &node.op {
            Op::Rope(r) => {
                add(r.dim);
                match r.layout {
                    astrai_ir::ops::RopeLayout::Half => add(r.dim / 2),
                    astrai_ir::ops::RopeLayout::Interleaved if shift == 0 => *paired = r.dim,
                    astrai_ir::ops::RopeLayout::Interleaved => {}
                }
            }
            Op::Concat(c) if c.axis == last => {
                let mut end = 0;
                for a in &node.args {
                    end += self.ty(*a).shape[last].size().unwrap_or(0);
                    add(end);
                }
            }
            Op::Pad(p) if p.axis == last => {
                if let (Some(before), Some(n)) = (p.before.size(), self.ty(node.args[0]).shape[last].size()) {
                    add(before);
                    add(before + n);
                }
            }
            Op::Slice(s) if s.axis == last && deep < 32 => {
                if let Some(start) = s.start.size() {
                    self.cuts(node.args[0], shift + start, len, cuts, paired, deep + 1);
                }
            }
            Op::Input(_) | Op::Gather(_) | Op::Reduce(_) | Op::Dot(_) => {}
            _ if deep < 32 => {
                for a in node.args.iter().filter(|a| same_last(a)) {
                    self.cuts(*a, shift, len, cuts, paired, deep + 1);
                }
            }
            _ => {}
        }
    }
}
