//! Sharding as plain data: a mesh of ranks with named axes, the placement of each value on each axis (replicated, sharded,
//! partial, …, as in GSPMD, arXiv:2105.04663, and PyTorch's DTensor), and the sharding rules of operators. Each operator
//! states its rules in its own file ([`Operator::sharding_rules`](crate::op::Operator::sharding_rules)); the pass `shard`
//! propagates placements through the graph by them, one axis at a time.

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

/// A device mesh: ranks in a grid. Ranks along the last axis have consecutive numbers.
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

    /// The coordinate of a rank on each axis.
    pub fn coordinates(&self, rank: usize) -> Vec<usize> {
        let sizes: Vec<usize> = self.axes.iter().map(|a| a.size).collect();
        crate::tensor::unravel(rank, &sizes)
    }

    /// The process groups of a collective over these axes: the ranks of each group in the order of the axes. `None` when an
    /// axis is not of this mesh or has another size.
    pub fn groups(&self, over: &[Axis]) -> Option<Vec<Vec<usize>>> {
        let at = |a: &Axis| self.axes.iter().position(|b| a == b);
        let along = over.iter().map(at).collect::<Option<Vec<usize>>>()?;
        // Keyed by the coordinates on the other axes: ranks with their coordinates on these.
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

/// One dimension sharded evenly over the ranks of an axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// The dimension.
    pub dim: usize,
    /// Lengths of consecutive sections of the dimension, each of which is sharded by itself; a shard is the concatenation of
    /// one piece of each section. Empty: the dimension is one section. Sections keep the gate and up rows of a concatenated
    /// `gate|up` weight together on every rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sections: Vec<usize>,
}

impl Shard {
    /// A dimension sharded as one section.
    pub fn of(dim: usize) -> Shard {
        Shard { dim, sections: vec![] }
    }

    /// A dimension sharded in sections; a single section is stored as none.
    pub fn sections(dim: usize, sections: Vec<usize>) -> Shard {
        Shard { dim, sections: if sections.len() > 1 { sections } else { vec![] } }
    }

    /// True when the dimension, and every section of it, of a value of this type divides by `n` ranks.
    pub fn divides(&self, ty: &Type, n: usize) -> bool {
        let Some(d) = ty.shape.get(self.dim).and_then(Dim::size) else { return false };
        let total = self.sections.iter().try_fold(0usize, |a, s| a.checked_add(*s));
        let even = |s: &usize| s.is_multiple_of(n);
        d.is_multiple_of(n)
            && (self.sections.is_empty() || total == Some(d) && self.sections.iter().all(even))
    }

    /// [`local_type`](Self::local_type), or why the value cannot be sharded so.
    pub fn checked_local_type(&self, ty: &Type, n: usize) -> Result<Type, String> {
        match self.divides(ty, n) {
            true => Ok(self.local_type(ty, n)),
            false => Err(format!("cannot shard {ty} along {self:?} over {n} ranks")),
        }
    }

    /// The type of a rank's shard of a value of this type; the dimension must [divide](Self::divides).
    pub fn local_type(&self, ty: &Type, n: usize) -> Type {
        let mut ty = ty.clone();
        ty.shape[self.dim] = Dim::from(ty.shape[self.dim].size().unwrap_or(0) / n);
        ty
    }

    /// The shard of rank `i` of `n`.
    pub fn slice(&self, x: &Tensor, i: usize, n: usize) -> Tensor {
        let mut shape = x.shape.clone();
        shape[self.dim] /= n;
        let from = self.order(x.shape[self.dim], n);
        let each = shape[self.dim];
        let outer = x.shape.clone();
        x.gather_with(&shape, |at| {
            let mut index = crate::tensor::unravel(at, &shape);
            index[self.dim] = from[i * each + index[self.dim]];
            crate::tensor::ravel(&index, &outer)
        })
    }

    /// The value whose shards these are, in the order of the ranks: the inverse of [`slice`](Self::slice).
    pub fn gather(&self, shards: &[&Tensor]) -> Tensor {
        let n = shards.len();
        let mut shape = shards[0].shape.clone();
        let each = shape[self.dim];
        shape[self.dim] *= n;
        let mut place = vec![0; shape[self.dim]];
        self.order(shape[self.dim], n).into_iter().enumerate().for_each(|(p, from)| place[from] = p);
        let all = shards[1..].iter().fold(shards[0].clone(), |a, b| a.append(b));
        let (small, len) = (shards[0].shape.clone(), shards[0].len());
        all.gather_with(&shape, |at| {
            let mut index = crate::tensor::unravel(at, &shape);
            let p = place[index[self.dim]];
            index[self.dim] = p % each;
            p / each * len + crate::tensor::ravel(&index, &small)
        })
    }

    /// Positions along a dimension of size `d`, shard after shard.
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
    /// Every rank holds the whole value.
    Replicate,
    /// Every rank holds its shard of the value.
    Shard(Shard),
    /// Every rank holds a summand; the value is the sum over the ranks.
    Partial,
    /// Every rank holds a value of its own: that of its own tokens and sequences (data parallelism).
    Local,
    /// Every rank holds the rows, of all ranks' tokens, that were dispatched to its experts (expert parallelism).
    Dispatched,
    /// The ranks at these coordinates of the axis hold the whole value, the others nothing: stages of a pipeline.
    Stages(Vec<usize>),
}

/// The axis whose ranks are the stages of a pipeline.
pub const STAGES: &str = "pp";

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate => f.write_str("replicate"),
            Placement::Partial => f.write_str("partial"),
            Placement::Local => f.write_str("local"),
            Placement::Dispatched => f.write_str("dispatched"),
            Placement::Stages(list) => write!(f, "stage({})", plus_separated(list)),
            Placement::Shard(s) if s.sections.is_empty() => write!(f, "shard({})", s.dim),
            Placement::Shard(s) => write!(f, "shard({}:{})", s.dim, plus_separated(&s.sections)),
        }
    }
}

/// `1+2+3`.
fn plus_separated(list: &[usize]) -> String {
    list.iter().map(usize::to_string).collect::<Vec<_>>().join("+")
}

/// The numbers of `1+2+3`.
fn parse_plus_separated(text: &str) -> Result<Vec<usize>, std::num::ParseIntError> {
    text.split('+').filter(|s| !s.is_empty()).map(str::parse).collect()
}

impl Placement {
    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Result<Placement, String> {
        let bad = || {
            let known = "replicate, shard(dim), partial, local, dispatched, stage(number)";
            format!("`{text}` is no placement; known: {known}")
        };
        let inside = |name: &str| text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')');
        let numbers = |list: &str| parse_plus_separated(list).map_err(|_| bad());
        if let Some(list) = inside("stage") {
            let list = numbers(list)?;
            return if list.is_empty() { Err(bad()) } else { Ok(Placement::Stages(list)) };
        }
        if let Some(inside) = inside("shard") {
            let (dim, sections) = inside.split_once(':').unwrap_or((inside, ""));
            let dim = dim.parse().map_err(|_| bad())?;
            return Ok(Placement::Shard(Shard { dim, sections: numbers(sections)? }));
        }
        let plain = [Placement::Replicate, Placement::Partial, Placement::Local, Placement::Dispatched];
        plain.into_iter().find(|p| p.to_string() == text).ok_or_else(bad)
    }

    /// The type of what a rank holds of a value of this type; a sharded dimension must [divide](Shard::divides).
    pub fn local_type(&self, ty: &Type, n: usize) -> Type {
        match self {
            Placement::Shard(shard) => shard.local_type(ty, n),
            _ => ty.clone(),
        }
    }
}

/// Placements of a value, axis by axis in the order in which the axes were sharded; empty when nothing is known of it.
pub type Sharding = Vec<(String, Placement)>;

/// `tp=shard(0) dp=local`.
pub fn show_sharding(sharding: &Sharding) -> String {
    sharding.iter().map(|(axis, p)| format!("{axis}={p}")).collect::<Vec<_>>().join(" ")
}

/// A sharding rule of an operator along one axis: with these placements of its arguments, its results have those.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingRule {
    /// Placement of each argument.
    pub args: Vec<Placement>,
    /// Placement of each result.
    pub outs: Vec<Placement>,
}

/// What an operator sees when it states its sharding rules: its types, and the placements to propagate.
pub struct Propagate<'a> {
    /// Global types of the arguments.
    pub args: &'a [&'a Type],
    /// Global types of the results.
    pub outs: &'a [Type],
    /// Placements of the arguments on this axis.
    pub placements: &'a [Placement],
    /// Ranks along the axis.
    pub n: usize,
}

/// What one rank sends in a ring collective: `times · (ranks - 1) / ranks` of the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of the whole value.
    pub bytes: Dim,
    /// Passes around the ring.
    pub times: u64,
    /// Ranks of the group.
    pub ranks: u64,
}

impl Traffic {
    /// All of the bytes sent to one other rank: twice around a ring of two.
    pub fn point_to_point(bytes: Dim) -> Traffic {
        Traffic { bytes, times: 2, ranks: 2 }
    }

    /// Bytes sent, for a number of bytes of the value.
    pub fn sent(&self, bytes: u64) -> u64 {
        let all = u128::from(bytes) * u128::from(self.times) * u128::from(self.ranks.saturating_sub(1));
        u64::try_from(all / u128::from(self.ranks.max(1))).unwrap_or(u64::MAX)
    }
}

/// The label of a dimension of an argument or result, as in an einsum: dimensions of equal labels are sharded alike; a
/// dimension with `None` cannot be sharded.
pub type Label = Option<usize>;

impl Propagate<'_> {
    /// How argument `i` is sharded, if it is.
    pub fn shard(&self, i: usize) -> Option<&Shard> {
        match self.placements.get(i) {
            Some(Placement::Shard(shard)) => Some(shard),
            _ => None,
        }
    }

    /// The rules of an operator whose dimensions have labels: a dimension that is sharded in one argument is sharded alike
    /// wherever its label stands, and arguments without the label are replicated. Results without the label are partial sums
    /// if the label is one of `sums`, the contracted labels.
    pub fn labelled(&self, args: &[Vec<Label>], outs: &[Vec<Label>], sums: &[usize]) -> Vec<ShardingRule> {
        let mut rules: Vec<ShardingRule> = Vec::new();
        for i in 0..args.len() {
            let Some(shard) = self.shard(i) else { continue };
            let Some(label) = args[i].get(shard.dim).copied().flatten() else { continue };
            let place = |dims: &Vec<Label>| {
                let dim = dims.iter().position(|l| *l == Some(label));
                dim.map(|dim| Placement::Shard(Shard { dim, sections: shard.sections.clone() }))
            };
            let results = |dims: &Vec<Label>| match place(dims) {
                None if sums.contains(&label) => Some(Placement::Partial),
                other => other,
            };
            let Some(results) = outs.iter().map(results).collect::<Option<Vec<_>>>() else { continue };
            let args = args.iter().map(|dims| place(dims).unwrap_or(Placement::Replicate)).collect();
            let rule = ShardingRule { args, outs: results };
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
        rules
    }

    /// The rules of a pointwise operator: any dimension, alike in all arguments and the result.
    pub fn pointwise(&self) -> Vec<ShardingRule> {
        let labels: Vec<Label> = (0..self.outs[0].rank()).map(Some).collect();
        self.labelled(&vec![labels.clone(); self.args.len()], &[labels], &[])
    }

    /// The rules of an operator of one argument that mixes elements along `axes` only: any other dimension, alike in the
    /// argument and all results.
    pub fn except(&self, axes: &[usize]) -> Vec<ShardingRule> {
        let labels: Vec<Label> =
            (0..self.args[0].rank()).map(|d| (!axes.contains(&d)).then_some(d)).collect();
        self.labelled(std::slice::from_ref(&labels), &vec![labels.clone(); self.outs.len()], &[])
    }

    /// The rules of an operator that is linear in each of these sets of arguments: partial sums in a set, with the other
    /// arguments replicated, give partial sums.
    pub fn linear(&self, sets: &[&[usize]]) -> Vec<ShardingRule> {
        let partial = |i: &usize| self.placements.get(*i) == Some(&Placement::Partial);
        let rule = |set: &&[usize]| ShardingRule {
            args: (0..self.args.len())
                .map(|i| if set.contains(&i) { Placement::Partial } else { Placement::Replicate })
                .collect(),
            outs: vec![Placement::Partial; self.outs.len()],
        };
        sets.iter().filter(|set| set.iter().any(partial)).map(rule).collect()
    }
}

/// What an operator sees when it is partitioned: [`Operator::partition`](crate::op::Operator::partition).
pub struct Partition<'a> {
    /// The rule that was chosen.
    pub rule: &'a ShardingRule,
    /// Global types of the arguments.
    pub args: &'a [Type],
    /// Global types of the results.
    pub outs: &'a [Type],
    /// The axis.
    pub axis: &'a Axis,
}

impl Partition<'_> {
    /// Type of result `i` on a rank.
    pub fn local_type(&self, i: usize) -> Type {
        self.rule.outs[i].local_type(&self.outs[i], self.axis.size)
    }

    /// How argument `i` is sharded, if it is.
    pub fn shard(&self, i: usize) -> Option<&Shard> {
        match &self.rule.args[i] {
            Placement::Shard(shard) => Some(shard),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_gather_to_the_value() {
        let x = Tensor::f32(&[6, 2], &(0..12).map(|i| i as f32).collect::<Vec<_>>());
        for shard in [Shard::of(0), Shard::of(1), Shard::sections(0, vec![4, 2])] {
            let n = 2;
            let shards: Vec<Tensor> = (0..n).map(|i| shard.slice(&x, i, n)).collect();
            assert_eq!(shard.gather(&shards.iter().collect::<Vec<_>>()), x, "{shard:?}");
        }
        let rows = Shard::sections(0, vec![4, 2]).slice(&x, 1, 2);
        assert_eq!(rows.reals(), [4.0, 5.0, 6.0, 7.0, 10.0, 11.0]);
    }

    #[test]
    fn placements_and_axes_are_read_back_and_nonsense_is_not() {
        use Placement::*;
        let sections = Shard(super::Shard { dim: 1, sections: vec![8, 16] });
        for p in [Replicate, Partial, Local, Dispatched, sections, Stages(vec![0, 3])] {
            assert_eq!(Placement::parse(&p.to_string()), Ok(p));
        }
        for bad in ["", "shard", "shard(x)", "shard(1:a)", "half", "stage()", "stage(x)"] {
            assert!(Placement::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(Axis::parse("tp=8"), Ok(Axis::new("tp", 8)));
        for bad in ["tp", "tp=0", "=2", "tp=x", "t p=2", "tp=99999999999"] {
            assert!(Axis::parse(bad).unwrap_err().contains("is no axis"), "{bad}");
        }
    }

    #[test]
    fn groups_are_in_the_order_of_the_axes() {
        let mesh = Mesh { axes: vec![Axis::new("dp", 2), Axis::new("tp", 3)] };
        assert_eq!(mesh.groups(&mesh.axes[1..]).unwrap(), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(mesh.groups(&mesh.axes[..1]).unwrap(), [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(mesh.groups(&[Axis::new("tp", 2)]), None);
    }
}
