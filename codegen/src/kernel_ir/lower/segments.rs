//! Where an axis is cut: rope, concat and pad change their formula along it, and a loop whose every position lies in one
//! piece needs no choice inside. In: a node. Out: stretches of its last axis.

use super::Lower;
use crate::kernel_ir::index::{Index, Var};
use astrai_ir::ops::{Op, RopeLayout};
use astrai_ir::{Dim, NodeId};
use std::ops::Range;

/// A stretch of an axis in which every piecewise operator stays in one piece: positions `start + step·p + c`.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// First position.
    pub start: Dim,
    /// Number of positions.
    pub len: Dim,
    /// Positions an iteration covers.
    pub step: usize,
    /// The stretch comes so many times, each so far behind the one before.
    pub every: Option<(usize, usize)>,
}

impl Segment {
    /// A whole axis.
    pub fn whole(len: Dim) -> Segment {
        Segment { start: Dim::from(0), len, step: 1, every: None }
    }
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

    /// The loop variables of a segment, the outer one first, and the positions an iteration covers.
    pub fn nest(&mut self, s: &Segment) -> (Vec<Var>, Vec<Index>) {
        let around = s.every.map(|(count, period)| (self.var(count.into()), Dim::from(period)));
        let (var, positions) = self.positions(s);
        let Some((outer, period)) = around else { return (vec![var], positions) };
        let first = Index::var(&outer).times(&period);
        (vec![outer, var], positions.iter().map(|p| p.add(&first)).collect())
    }

    /// Segments of the last axis of a node, from the piecewise operators below it.
    pub fn segments(&self, id: NodeId) -> Vec<Segment> {
        self.pieces(id, None)
    }

    /// The same, where pieces may also come again and again: those of an axis that is the last part of this one.
    pub fn blocks(&self, id: NodeId) -> Vec<Segment> {
        self.pieces(id, Some(vec![]))
    }

    fn pieces(&self, id: NodeId, repeats: Option<Vec<Repeat>>) -> Vec<Segment> {
        let n = self.ty(id).shape.last().cloned().unwrap_or(Dim::from(1));
        let Some(len) = n.size() else { return vec![Segment::whole(n)] };
        let mut cuts = Cuts { points: vec![], paired: 0, repeats };
        self.cuts(id, Window { shift: 0, begin: 0, end: len as i64 }, &mut cuts, 0);
        let mut segments = vec![];
        for piece in cuts.pieces(0, len) {
            let [from, to] = [piece.start, piece.end];
            let repeats = cuts.repeats.iter().flatten();
            let fits = |r: &&Repeat| {
                let inside = r.begin <= from && to <= r.end;
                inside && (from - r.begin).is_multiple_of(r.period) && (to - from).is_multiple_of(r.period)
            };
            let Some(r) = repeats.clone().find(fits) else {
                segments.push(cuts.segment(from, from..to));
                continue;
            };
            let count = (to - from) / r.period;
            segments.extend(r.cuts.pieces(0, r.period).into_iter().map(|p| {
                let inner = r.cuts.segment(from + p.start, p);
                Segment { every: (count > 1).then_some((count, r.period)), ..inner }
            }));
        }
        segments
    }

    /// Collects piece boundaries of values that are read through a window.
    fn cuts(&self, id: NodeId, w: Window, cuts: &mut Cuts, deep: usize) {
        let node = self.region.graph().node(id);
        let mut add = |at: usize| {
            if let Some(at) = w.position(at) {
                cuts.points.push(at);
            }
        };
        let last = node.ty().rank().saturating_sub(1);
        let size = |a: NodeId| self.ty(a).shape.last().and_then(Dim::size);
        match &node.op {
            Op::Rope(r) => {
                add(r.dim);
                match r.layout {
                    RopeLayout::Half => add(r.dim / 2),
                    RopeLayout::Interleaved if w.shift == 0 => cuts.paired = r.dim,
                    RopeLayout::Interleaved => {}
                }
            }
            Op::Concat(c) if c.axis == last => {
                let mut end = 0;
                for a in &node.args {
                    end += size(*a).unwrap_or(0);
                    add(end);
                }
            }
            Op::Pad(p) if p.axis == last => {
                let (Some(before), Some(n)) = (p.before.size(), size(node.args[0])) else { return };
                add(before);
                add(before + n);
                if cuts.repeats.is_some() && deep < DEEPEST {
                    self.cuts(node.args[0], w.within(before, n), cuts, deep + 1);
                }
            }
            Op::Slice(s) if s.axis == last && deep < DEEPEST => {
                if let Some(start) = s.start.size() {
                    self.cuts(node.args[0], Window { shift: w.shift + start as i64, ..w }, cuts, deep + 1);
                }
            }
            Op::Reshape(_) if cuts.repeats.is_some() && deep < DEEPEST && size(node.args[0]) != size(id) => {
                if let Some(repeat) = self.repeat(node.args[0], &w, deep) {
                    cuts.repeats.get_or_insert_default().push(repeat);
                }
            }
            Op::Input(_) | Op::Gather(_) | Op::Reduce(_) | Op::Dot(_) => {}
            _ if deep < DEEPEST => {
                let same_last = |a: &&NodeId| self.ty(**a).shape.last() == node.ty().shape.last();
                for a in node.args.iter().filter(same_last) {
                    self.cuts(*a, w.clone(), cuts, deep + 1);
                }
            }
            _ => {}
        }
    }

    /// Pieces of a value whose last axis is the last part of a longer one, read through a window on that.
    fn repeat(&self, arg: NodeId, w: &Window, deep: usize) -> Option<Repeat> {
        let period = self.ty(arg).shape.last()?.size().filter(|n| *n > 0)?;
        let aligned = [w.begin, w.end].iter().all(|at| (at + w.shift) % period as i64 == 0);
        let mut cuts = Cuts { points: vec![], paired: 0, repeats: None };
        let whole = Window { shift: 0, begin: 0, end: period as i64 };
        self.cuts(arg, whole, &mut cuts, deep + 1);
        let pieces = cuts.pieces(0, period);
        let worth = pieces.len() > 1 && pieces.iter().all(|p| p.len() >= SHORTEST);
        let [begin, end] = [w.begin, w.end].map(|at| at as usize);
        (aligned && worth && begin < end).then_some(Repeat { begin, end, period, cuts })
    }
}

/// Operators below one another that are looked through.
const DEEPEST: usize = 32;
/// Elements of a piece that comes again: a shorter loop within a loop is slower than a choice inside.
const SHORTEST: usize = 16;

/// Positions `begin .. end` of an axis read a value at `position + shift`.
#[derive(Clone)]
struct Window {
    shift: i64,
    begin: i64,
    end: i64,
}

impl Window {
    /// The position that reads this one of the value, inside the window.
    fn position(&self, at: usize) -> Option<usize> {
        let at = at as i64 - self.shift;
        (self.begin < at && at < self.end).then_some(at as usize)
    }

    /// The window on an argument that lies at `before .. before + n` of the value.
    fn within(&self, before: usize, n: usize) -> Window {
        let shift = self.shift - before as i64;
        Window { shift, begin: self.begin.max(-shift), end: self.end.min(n as i64 - shift) }
    }
}

/// Boundaries of pieces.
struct Cuts {
    points: Vec<usize>,
    /// So many positions are pairs that rope turns together.
    paired: usize,
    /// Stretches whose pieces come again, if these are wanted.
    repeats: Option<Vec<Repeat>>,
}

/// From `begin` to `end` pieces come again every `period`.
struct Repeat {
    begin: usize,
    end: usize,
    period: usize,
    cuts: Cuts,
}

impl Cuts {
    fn pieces(&self, begin: usize, end: usize) -> Vec<Range<usize>> {
        let mut points = self.points.clone();
        points.extend([begin, end]);
        points.sort_unstable();
        points.dedup();
        points.windows(2).map(|w| w[0]..w[1]).collect()
    }

    /// A piece as a segment that begins at `start`.
    fn segment(&self, start: usize, piece: Range<usize>) -> Segment {
        let paired =
            piece.end <= self.paired && piece.len().is_multiple_of(2) && piece.start.is_multiple_of(2);
        let step = if paired { 2 } else { 1 };
        Segment { start: start.into(), len: piece.len().into(), step, every: None }
    }
}
