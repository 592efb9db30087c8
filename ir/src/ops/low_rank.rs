//! `low_rank`: what adapters add to the result of a linear layer (LoRA, arXiv:2106.09685), each row by the factors of its own adapter. A
//! composite, because a kernel reads factors where they lie, keeps what is between the two products at hand, and does nothing for rows
//! without an adapter.

use super::grouped_dot::{groups, groups_of};
use crate::op::{Infer, Inferred, Operator, float, integer};
use crate::ops::{CompareKind, Concat, GroupedDot};
use crate::{Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Arguments: `x` `[tokens, k]`; of all slots, one after another, the factors A `[slots * k, layers * rank]` and B `[slots * rank, n]`, both
/// transposed; i32 `slots` `[tokens]`, that of each token's adapter, or negative; `rows` `[adapted]`, tokens with an adapter in the order of
/// slots; `places` `[tokens]`, where among these each stands, or 0; `offsets` `[slots + 1]`, where those of each slot begin. Output
/// `[tokens, n]`: (x·A)·B, and −0 for tokens without an adapter, which changes no number that it is added to.
///
/// Several layers may be joined, whose results stand side by side, as those of their weights do: each has as many columns of A as its
/// adapter's rank, and its own columns of B.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LowRank {
    /// Columns of each layer's result.
    pub columns: Vec<usize>,
}

impl LowRank {
    /// The first column of each layer, and the end of all.
    fn bounds(&self) -> Vec<usize> {
        let mut end = 0;
        let ends = self.columns.iter().map(|n| {
            end += n;
            end
        });
        [0].into_iter().chain(ends).collect()
    }

    /// Slots, the length of a row, the rank and the columns of the result, from the types of the arguments.
    pub fn sizes(&self, args: &[&Type]) -> Result<[usize; 4], String> {
        let (x, a, b, slots) = match args {
            [x, a, b, .., offsets] if [x, a, b].iter().all(|t| t.rank() == 2) => (x, a, b, groups(offsets)?),
            _ => return Err("takes rows, two factors, and four lists of integers".into()),
        };
        let (n, layers) = (self.columns.iter().sum::<usize>(), self.columns.len());
        let sizes = [&a.shape[0], &a.shape[1], &b.shape[0], &b.shape[1], &x.shape[1]].map(Dim::size);
        let [Some(down), Some(lanes), Some(up), Some(columns), Some(k)] = sizes else {
            return Err(format!("factors {a} and {b} of rows {x} have literal sizes"));
        };
        let rank = up / slots;
        if down != slots * k
            || up != slots * rank
            || lanes != layers * rank
            || columns != n
            || lanes * k * n == 0
        {
            return Err(format!(
                "factors {a} and {b} are not those of {slots} slots and {layers} layers of {n} columns together, over {x}"
            ));
        }
        Ok([slots, k, rank, n])
    }
}

impl Operator for LowRank {
    const NAME: &'static str = "low_rank";
    const TOLERANCE: [f64; 2] = [16.0, 1e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, a, b, slots, rows, places, _] = cx.exactly()?;
        float("rows", x)?;
        let [.., n] = self.sizes(cx.args)?;
        [slots, rows, places].into_iter().try_for_each(|list| integer("a list", list))?;
        let tokens = &x.shape[..1];
        if a.dtype != x.dtype
            || b.dtype != x.dtype
            || slots.shape != tokens
            || places.shape != tokens
            || rows.rank() != 1
        {
            return Err(format!(
                "factors {a} and {b} and lists {slots}, {rows} and {places} do not go with {x}"
            ));
        }
        Ok(vec![Type::new(x.dtype, [tokens[0].clone(), Dim::from(n)])])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x, a, b, slots, rows, places, offsets] = cx.args else { return Err("takes 7 arguments".into()) };
        let (k, n, bounds) = (x.shape[1], cx.shape()[1], self.bounds());
        let (groups, lanes) = (groups_of(offsets, rows.len())?, a.shape[1]);
        let rank = lanes / self.columns.len();
        let (xv, av, bv) = (x.reals(), a.reals(), b.reals());
        // What is between the products, once for a row: `[tokens, lanes]`.
        let mut low: Vec<Option<(usize, Vec<f64>)>> = Vec::with_capacity(slots.len());
        for token in (0..slots.len()).map(|t| (slots.int_at(t) >= 0).then(|| places.int_at(t))) {
            let Some(place) = token else {
                low.push(None);
                continue;
            };
            let at = usize::try_from(place).ok().filter(|at| *at < groups.len());
            let row =
                at.and_then(|at| usize::try_from(rows.int_at(at)).ok()).filter(|row| *row < slots.len());
            let (Some(at), Some(row)) = (at, row) else {
                return Err(format!("place {place} is outside the {} rows", groups.len()));
            };
            let sum = |lane| (0..k).map(|i| xv[row * k + i] * av[(groups[at] * k + i) * lanes + lane]).sum();
            low.push(Some((groups[at], (0..lanes).map(sum).collect())));
        }
        cx.each(|i| {
            let (Some((slot, low)), column) = (&low[i / n], i % n) else { return -0.0 };
            let layer = bounds.partition_point(|first| *first <= column) - 1;
            (0..rank).map(|r| low[layer * rank + r] * bv[(slot * rank + r) * n + column]).sum()
        })
    }

    /// Products of rows in groups: those of tokens with an adapter, slot by slot.
    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        let &[x, a, b, slots, rows, places, offsets] = args else { return None };
        let mut build = || {
            let rank = g.ty(a).shape[1].size().unwrap_or(0) / self.columns.len();
            let by_group = GroupedDot { transposed: true };
            let x = g.gather(x, rows, 0)?; // [adapted, k]
            let low = g.push(by_group.clone(), &[x, a, offsets])?; // [adapted, layers * rank]
            let mut each = Vec::with_capacity(self.columns.len());
            for (i, (&n, first)) in self.columns.iter().zip(self.bounds()).enumerate() {
                let low = g.slice(low, 1, Dim::from(i * rank), Dim::from(rank))?;
                let b = g.slice(b, 1, Dim::from(first), Dim::from(n))?;
                each.push(g.push(by_group.clone(), &[low, b, offsets])?);
            }
            let more = if let [one] = each[..] { one } else { g.push(Concat { axis: 1 }, &each)? };
            let more = g.gather(more, places, 0)?; // [tokens, n]
            let zero = g.fill(slots, 0.0)?;
            let has = g.compare(CompareKind::Ge, slots, zero)?;
            let shape = g.ty(more).shape.to_vec();
            let has = g.reshape(has, vec![shape[0].clone(), Dim::from(1)])?;
            let has = g.broadcast(has, &shape)?;
            let none = g.fill(more, -0.0)?;
            Ok(vec![g.select(has, more, none)?])
        };
        Some(build())
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        let [_, k, rank, n] = self.sizes(args).unwrap_or_default();
        let rows = args.get(4).map_or_else(Dim::default, |rows| rows.elements());
        &rows * &Dim::from(2 * rank * (self.columns.len() * k + n))
    }
}
