//! How values lie on a mesh of ranks, as plain data: axes with their sizes, a placement of each value on each axis, and the
//! ways in which an operator can work on pieces. The rules stand with the operators ([`Operator::ways`](crate::op::Operator::ways));
//! the pass `shard` chooses among them, one axis at a time.

use crate::ty::Type;
use crate::{Dim, Tensor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::collections::BTreeMap;
use std::fmt;

/// Most ranks of a mesh.
pub const MAX_RANKS: usize = 1 << 20;

/// One axis of a mesh: `tp=8`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Ranks along it, at least 1.
    pub size: usize,
}

impl Axis {
    /// An axis by name and size.
    pub fn new(name: &str, size: usize) -> Axis {
        Axis { name: name.to_string(), size }
    }

    /// Reads `tp=8`.
    pub fn parse(text: &str) -> Result<Axis, String> {
        let bad = || format!("`{text}` is no axis; write a name and a number of ranks, such as tp=8");
        let (name, size) = text.trim().split_once('=').ok_or_else(bad)?;
        let size: usize = size.trim().parse().map_err(|_| bad())?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_';
        if name.is_empty() || name.len() > 64 || !name.chars().all(plain) || !(1..=MAX_RANKS).contains(&size)
        {
            return Err(bad());
        }
        Ok(Axis::new(name, size))
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.size)
    }
}

impl Serialize for Axis {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Axis {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Axis, D::Error> {
        Axis::parse(&String::deserialize(d)?).map_err(D::Error::custom)
    }
}

/// Ranks in a grid; the last axis has neighbouring ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mesh {
    /// The axes, outermost first.
    pub axes: Vec<Axis>,
}

impl Mesh {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|a| a.size).product()
    }

    /// Ranks along the axis of this name; 1 where there is none.
    pub fn size(&self, name: &str) -> usize {
        self.axes.iter().find(|a| a.name == name).map_or(1, |a| a.size)
    }

    /// Where a rank stands on each axis.
    pub fn coordinates(&self, rank: usize) -> Vec<usize> {
        let sizes: Vec<usize> = self.axes.iter().map(|a| a.size).collect();
        crate::tensor::unravel(rank, &sizes)
    }

    /// The ranks in groups that meet in a collective over these axes, each in the order of the axes. `None` when an axis is
    /// not of this mesh or has another size.
    pub fn groups(&self, over: &[Axis]) -> Option<Vec<Vec<usize>>> {
        let at = |a: &Axis| self.axes.iter().position(|b| a == b);
        let along = over.iter().map(at).collect::<Option<Vec<usize>>>()?;
        // By place on the other axes, the ranks and their places on these.
        let mut groups: BTreeMap<Vec<usize>, Vec<(Vec<usize>, usize)>> = BTreeMap::new();
        for rank in 0..self.ranks() {
            let c = self.coordinates(rank);
            let rest = (0..c.len()).filter(|i| !along.contains(i)).map(|i| c[i]).collect();
            let place = along.iter().map(|&i| c[i]).collect();
            groups.entry(rest).or_default().push((place, rank));
        }
        let sorted = |mut list: Vec<(Vec<usize>, usize)>| {
            list.sort();
            list.into_iter().map(|(_, rank)| rank).collect()
        };
        Some(groups.into_values().map(sorted).collect())
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.axes.iter().map(Axis::to_string).collect::<Vec<_>>().join(","))
    }
}

/// A dimension cut into as many pieces as an axis has ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// The dimension.
    pub dim: usize,
    /// Lengths along it that are each cut for themselves, a piece being one piece of each; empty: all as one. So the rows
    /// of a fused `gate|up` give every rank rows of both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sections: Vec<usize>,
}

impl Cut {
    /// A dimension cut as one.
    pub fn of(dim: usize) -> Cut {
        Cut { dim, sections: vec![] }
    }

    /// A dimension cut in sections; one section is none.
    pub fn sections(dim: usize, sections: Vec<usize>) -> Cut {
        Cut { dim, sections: if sections.len() > 1 { sections } else { vec![] } }
    }

    /// True when a value of this type can be cut so into `n` equal pieces.
    pub fn fits(&self, ty: &Type, n: usize) -> bool {
        let Some(d) = ty.shape.get(self.dim).and_then(Dim::size) else { return false };
        let whole = self.sections.iter().try_fold(0usize, |a, s| a.checked_add(*s));
        let even = |s: &usize| s.is_multiple_of(n);
        d.is_multiple_of(n)
            && (self.sections.is_empty() || whole == Some(d) && self.sections.iter().all(even))
    }

    /// The type of one of `n` pieces of a value, or why there are none.
    pub fn one_of(&self, ty: &Type, n: usize) -> Result<Type, String> {
        match self.fits(ty, n) {
            true => Ok(self.piece(ty, n)),
            false => Err(format!("cannot cut {ty} along {self:?} into {n} pieces")),
        }
    }

    /// The type of a piece; the cut must fit.
    pub fn piece(&self, ty: &Type, n: usize) -> Type {
        let mut ty = ty.clone();
        ty.shape[self.dim] = Dim::from(ty.shape[self.dim].size().unwrap_or(0) / n);
        ty
    }

    /// Piece `i` of `n`.
    pub fn take(&self, x: &Tensor, i: usize, n: usize) -> Tensor {
        let mut shape = x.shape.clone();
        shape[self.dim] /= n;
        let from = self.order(x.shape[self.dim], n);
        let each = shape[self.dim];
        let outer = x.shape.clone();
        x.pick(&shape, |at| {
            let mut index = crate::tensor::unravel(at, &shape);
            index[self.dim] = from[i * each + index[self.dim]];
            crate::tensor::ravel(&index, &outer)
        })
    }

    /// The value of which these are all pieces in order.
    pub fn join(&self, pieces: &[&Tensor]) -> Tensor {
        let n = pieces.len();
        let mut shape = pieces[0].shape.clone();
        let each = shape[self.dim];
        shape[self.dim] *= n;
        let mut place = vec![0; shape[self.dim]];
        self.order(shape[self.dim], n).into_iter().enumerate().for_each(|(p, from)| place[from] = p);
        let all = pieces[1..].iter().fold(pieces[0].clone(), |a, b| a.join(b));
        let (small, len) = (pieces[0].shape.clone(), pieces[0].len());
        all.pick(&shape, |at| {
            let mut index = crate::tensor::unravel(at, &shape);
            let p = place[index[self.dim]];
            index[self.dim] = p % each;
            p / each * len + crate::tensor::ravel(&index, &small)
        })
    }

    /// Positions along a dimension of `d`, piece after piece.
    fn order(&self, d: usize, n: usize) -> Vec<usize> {
        let one = [d];
        let sections = if self.sections.is_empty() { &one[..] } else { &self.sections };
        let mut order = Vec::with_capacity(d);
        for i in 0..n {
            let mut start = 0;
            for s in sections {
                order.extend(start + i * (s / n)..start + (i + 1) * (s / n));
                start += s;
            }
        }
        order
    }
}

/// What the ranks along one axis hold of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Each the whole, all the same.
    Whole,
    /// Each a piece.
    Split(Cut),
    /// Each a summand of it.
    Partial,
    /// Each one of its own: of its own tokens and sequences.
    Own,
    /// Each the rows, of all ranks' tokens, that its experts take.
    Routed,
    /// The ranks at these places on the axis the whole, the others nothing: stages of a pipeline.
    Stages(Vec<usize>),
}

/// The axis whose ranks are the stages of a pipeline.
pub const STAGES: &str = "pp";

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Whole => f.write_str("whole"),
            Placement::Partial => f.write_str("partial"),
            Placement::Own => f.write_str("own"),
            Placement::Routed => f.write_str("routed"),
            Placement::Stages(list) => write!(f, "stage({})", joined(list)),
            Placement::Split(c) if c.sections.is_empty() => write!(f, "split({})", c.dim),
            Placement::Split(c) => write!(f, "split({}:{})", c.dim, joined(&c.sections)),
        }
    }
}

/// `1+2+3`.
fn joined(list: &[usize]) -> String {
    list.iter().map(usize::to_string).collect::<Vec<_>>().join("+")
}

fn listed(text: &str) -> Result<Vec<usize>, std::num::ParseIntError> {
    text.split('+').filter(|s| !s.is_empty()).map(str::parse).collect()
}

impl Placement {
    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Result<Placement, String> {
        let bad = || {
            format!("`{text}` is no placement; known: whole, split(dim), partial, own, routed, stage(number)")
        };
        if let Some(list) = text.strip_prefix("stage(").and_then(|t| t.strip_suffix(')')) {
            let list = listed(list).map_err(|_| bad())?;
            return if list.is_empty() { Err(bad()) } else { Ok(Placement::Stages(list)) };
        }
        Ok(match text {
            "whole" => Placement::Whole,
            "partial" => Placement::Partial,
            "own" => Placement::Own,
            "routed" => Placement::Routed,
            _ => {
                let inside = text.strip_prefix("split(").and_then(|t| t.strip_suffix(')')).ok_or_else(bad)?;
                let (dim, rest) = inside.split_once(':').unwrap_or((inside, ""));
                let (dim, sections) = (dim.parse().map_err(|_| bad())?, listed(rest).map_err(|_| bad())?);
                Placement::Split(Cut { dim, sections })
            }
        })
    }

    /// The type of what a rank holds; of splits the cut must fit.
    pub fn local(&self, ty: &Type, n: usize) -> Type {
        match self {
            Placement::Split(cut) => cut.piece(ty, n),
            _ => ty.clone(),
        }
    }
}

/// Placements of a value, axis by axis in the order in which it was cut; empty when nothing is known of it.
pub type Sharding = Vec<(String, Placement)>;

/// `tp=split(0) dp=own`.
pub fn show_sharding(sharding: &Sharding) -> String {
    sharding.iter().map(|(axis, p)| format!("{axis}={p}")).collect::<Vec<_>>().join(" ")
}

/// One way in which an operator works on pieces: what its arguments must be on an axis, and what its results are then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// Placement of each argument.
    pub args: Vec<Placement>,
    /// Placement of each result.
    pub outs: Vec<Placement>,
}

/// What an operator's rule sees.
pub struct Ways<'a> {
    /// Types of the arguments before they are cut.
    pub args: &'a [&'a Type],
    /// Types of the results before they are cut.
    pub outs: &'a [Type],
    /// What the arguments are on this axis.
    pub placed: &'a [Placement],
    /// Ranks along the axis.
    pub n: usize,
}

/// What one rank sends over the link in a collective of the ring kind: `times · (ranks - 1) / ranks` of the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of the whole value.
    pub bytes: Dim,
    /// How often it goes around.
    pub times: u64,
    /// Ranks that meet.
    pub ranks: u64,
}

impl Traffic {
    /// All of the bytes to one other rank: twice around a ring of two.
    pub fn once(bytes: Dim) -> Traffic {
        Traffic { bytes, times: 2, ranks: 2 }
    }

    /// Bytes sent, for a number of bytes of the value.
    pub fn sent(&self, bytes: u64) -> u64 {
        let all = u128::from(bytes) * u128::from(self.times) * u128::from(self.ranks.saturating_sub(1));
        u64::try_from(all / u128::from(self.ranks.max(1))).unwrap_or(u64::MAX)
    }
}

/// A dimension of an argument or result: those of one number go together; `None` cannot be cut.
pub type Label = Option<usize>;

impl Ways<'_> {
    /// The cut of argument `i`, if it has one.
    pub fn cut(&self, i: usize) -> Option<&Cut> {
        match self.placed.get(i) {
            Some(Placement::Split(cut)) => Some(cut),
            _ => None,
        }
    }

    /// The ways by labels: a dimension that is cut in one argument is cut alike wherever its label stands, and other arguments
    /// are whole. Where the label stands in no result, results are summands if it is one of `sums`.
    pub fn labelled(&self, args: &[Vec<Label>], outs: &[Vec<Label>], sums: &[usize]) -> Vec<Way> {
        let mut ways: Vec<Way> = Vec::new();
        for i in 0..args.len() {
            let Some(cut) = self.cut(i) else { continue };
            let Some(label) = args[i].get(cut.dim).copied().flatten() else { continue };
            let place = |dims: &Vec<Label>| {
                let dim = dims.iter().position(|l| *l == Some(label));
                dim.map(|dim| Placement::Split(Cut { dim, sections: cut.sections.clone() }))
            };
            let results = |dims: &Vec<Label>| match place(dims) {
                None if sums.contains(&label) => Some(Placement::Partial),
                other => other,
            };
            let Some(results) = outs.iter().map(results).collect::<Option<Vec<_>>>() else { continue };
            let args = args.iter().map(|dims| place(dims).unwrap_or(Placement::Whole)).collect();
            let way = Way { args, outs: results };
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
        ways
    }

    /// Element by element: any dimension, alike in all.
    pub fn pointwise(&self) -> Vec<Way> {
        let labels: Vec<Label> = (0..self.outs[0].rank()).map(Some).collect();
        self.labelled(&vec![labels.clone(); self.args.len()], &[labels], &[])
    }

    /// All dimensions but `axes`, alike in the one argument and all results.
    pub fn beside(&self, axes: &[usize]) -> Vec<Way> {
        let labels: Vec<Label> =
            (0..self.args[0].rank()).map(|d| (!axes.contains(&d)).then_some(d)).collect();
        self.labelled(std::slice::from_ref(&labels), &vec![labels.clone(); self.outs.len()], &[])
    }

    /// Summands in these arguments, the others whole, give a summand: the operator is linear in them together.
    pub fn linear(&self, sets: &[&[usize]]) -> Vec<Way> {
        let partial = |i: &usize| self.placed.get(*i) == Some(&Placement::Partial);
        let way = |set: &&[usize]| Way {
            args: (0..self.args.len())
                .map(|i| if set.contains(&i) { Placement::Partial } else { Placement::Whole })
                .collect(),
            outs: vec![Placement::Partial; self.outs.len()],
        };
        sets.iter().filter(|set| set.iter().any(partial)).map(way).collect()
    }
}

/// What an operator sees that is put on a rank: [`Operator::local`](crate::op::Operator::local).
pub struct Local<'a> {
    /// The way that was chosen.
    pub way: &'a Way,
    /// Types of the arguments before they were cut.
    pub args: &'a [Type],
    /// Types of the results before they are cut.
    pub outs: &'a [Type],
    /// The axis.
    pub axis: &'a Axis,
}

impl Local<'_> {
    /// Type of result `i` on a rank.
    pub fn ty(&self, i: usize) -> Type {
        self.way.outs[i].local(&self.outs[i], self.axis.size)
    }

    /// The cut of argument `i`, if it has one.
    pub fn cut(&self, i: usize) -> Option<&Cut> {
        match &self.way.args[i] {
            Placement::Split(cut) => Some(cut),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_again() {
        let x = Tensor::f32(&[6, 2], &(0..12).map(|i| i as f32).collect::<Vec<_>>());
        for cut in [Cut::of(0), Cut::of(1), Cut::sections(0, vec![4, 2])] {
            let n = 2;
            let pieces: Vec<Tensor> = (0..n).map(|i| cut.take(&x, i, n)).collect();
            assert_eq!(cut.join(&pieces.iter().collect::<Vec<_>>()), x, "{cut:?}");
        }
        let rows = Cut::sections(0, vec![4, 2]).take(&x, 1, 2);
        assert_eq!(rows.reals(), [4.0, 5.0, 6.0, 7.0, 10.0, 11.0]);
    }

    #[test]
    fn placements_and_axes_are_read_back_and_nonsense_is_not() {
        let split = Placement::Split(Cut { dim: 1, sections: vec![8, 16] });
        let stages = Placement::Stages(vec![0, 3]);
        for p in [Placement::Whole, Placement::Partial, Placement::Own, Placement::Routed, split, stages] {
            assert_eq!(Placement::parse(&p.to_string()), Ok(p));
        }
        for bad in ["", "split", "split(x)", "split(1:a)", "half", "stage()", "stage(x)"] {
            assert!(Placement::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(Axis::parse("tp=8"), Ok(Axis::new("tp", 8)));
        for bad in ["tp", "tp=0", "=2", "tp=x", "t p=2", "tp=99999999999"] {
            assert!(Axis::parse(bad).unwrap_err().contains("is no axis"), "{bad}");
        }
    }

    #[test]
    fn ranks_meet_in_the_order_of_the_axes() {
        let mesh = Mesh { axes: vec![Axis::new("dp", 2), Axis::new("tp", 3)] };
        assert_eq!(mesh.groups(&mesh.axes[1..]).unwrap(), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(mesh.groups(&mesh.axes[..1]).unwrap(), [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(mesh.groups(&[Axis::new("tp", 2)]), None);
    }
}
