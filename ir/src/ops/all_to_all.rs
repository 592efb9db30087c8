//! `all_to_all`: dispatches grouped rows to the ranks of their groups (the experts of expert parallelism), or returns them. The
//! number of rows for each rank is data.

use super::grouped_dot::{groups, groups_of};
use crate::eval::EvalCollective;
use crate::op::{Cotangents, Infer, Inferred, Operator, RankOutputs, Vjp};
use crate::shard::{Axis, Label, Propagate, ShardingRule, Traffic};
use crate::{DType, Dim, Tensor, Type};
use serde::{Deserialize, Serialize};

/// Arguments: `x` `[rows, …]` in the order of groups and `offsets` i32 `[groups + 1]`, where each group's rows begin. Rank `r`
/// of `n` has the groups from `r · groups / n` on. Outputs: `[capacity, …]`, the rows of the rank's groups from all ranks, in
/// the order of groups and then of ranks; and i32 `[groups / n + 1]`, where each of the rank's groups begins. Rows beyond the
/// last received one are zeros and belong to the last group (padding).
/// With `back`, `x` is such a result `[capacity, …]`, `offsets` are still those of the rows that the rank dispatched, and the one
/// output `[rows, …]` has every row back in its place.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllToAll {
    /// The mesh axis whose ranks take part.
    pub over: Axis,
    /// Rows of the result: the capacity, an upper bound on received rows; with `back` the rows that were dispatched.
    pub rows: Dim,
    /// Rows are returned to the ranks that dispatched them.
    pub back: bool,
}

/// The offsets of one rank.
type Offsets = Vec<i64>;

impl AllToAll {
    fn offsets(ranks: &[Vec<&Tensor>]) -> Vec<Offsets> {
        ranks.iter().map(|r| (0..r[1].len()).map(|i| r[1].int_at(i)).collect()).collect()
    }

    /// The received rows of rank `to`, in order: (source rank, group, number of rows).
    fn received(offsets: &[Offsets], to: usize) -> Vec<(usize, usize, usize)> {
        let (n, groups) = (offsets.len(), offsets[0].len() - 1);
        let own = to * groups / n..(to + 1) * groups / n;
        let of =
            |g: usize| (0..n).map(move |from| (from, g, (offsets[from][g + 1] - offsets[from][g]) as usize));
        own.flat_map(of).collect()
    }

    fn dispatch(&self, ranks: &[Vec<&Tensor>], to: usize, capacity: usize) -> Result<Vec<Tensor>, String> {
        let offsets = Self::offsets(ranks);
        let mut from: Vec<Option<(usize, usize)>> = Vec::new();
        let mut begins = vec![0i64];
        let received = Self::received(&offsets, to);
        for group in received.chunks(ranks.len()) {
            for &(rank, g, rows) in group {
                from.extend((0..rows).map(|i| Some((rank, offsets[rank][g] as usize + i))));
            }
            begins.push(from.len() as i64);
        }
        if from.len() > capacity {
            return Err(format!("{} rows arrive at a rank with a capacity of {capacity}", from.len()));
        }
        // Padding belongs to the last group, so that the offsets cover all rows.
        if let Some(last) = begins.last_mut() {
            *last = capacity as i64;
        }
        from.resize(capacity, None);
        Ok(vec![rows_of(ranks, to, &from), Tensor::int(DType::I32, &[begins.len()], begins)])
    }

    fn return_rows(&self, ranks: &[Vec<&Tensor>], to: usize) -> Vec<Tensor> {
        let offsets = Self::offsets(ranks);
        let rows = offsets[to].last().copied().unwrap_or(0) as usize;
        let mut from = vec![None; rows];
        for holder in 0..ranks.len() {
            let mut at = 0;
            for (rank, g, count) in Self::received(&offsets, holder) {
                if rank == to {
                    (0..count).for_each(|i| from[offsets[to][g] as usize + i] = Some((holder, at + i)));
                }
                at += count;
            }
        }
        vec![rows_of(ranks, to, &from)]
    }
}

/// Rows for rank `to`, gathered by (rank, row); zeros for `None`.
fn rows_of(ranks: &[Vec<&Tensor>], to: usize, from: &[Option<(usize, usize)>]) -> Tensor {
    let mut shape = ranks[to][0].shape.clone();
    let width: usize = shape[1..].iter().product();
    shape[0] = from.len();
    let mut both = Tensor::zeros(ranks[to][0].dtype, &[1]);
    let mut begins = Vec::new();
    for args in ranks {
        begins.push(both.len());
        both = both.append(args[0]);
    }
    both.gather_with(&shape, |i| match from[i / width.max(1)] {
        Some((rank, row)) => begins[rank] + row * width + i % width,
        None => 0,
    })
}

impl Operator for AllToAll {
    const NAME: &'static str = "all_to_all";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, offsets] = cx.exactly()?;
        let groups = groups(offsets)?;
        if x.rank() == 0 || !groups.is_multiple_of(self.over.size) {
            return Err(format!(
                "cannot send the rows of {x} in {groups} groups to {} ranks",
                self.over.size
            ));
        }
        let mut ty = (*x).clone();
        ty.shape[0] = self.rows.clone();
        if self.back {
            return Ok(vec![ty]);
        }
        Ok(vec![ty, Type::new(DType::I32, [Dim::from(groups / self.over.size + 1)])])
    }

    fn eval_collective(&self, ranks: &[Vec<&Tensor>], cx: &EvalCollective) -> RankOutputs {
        for (r, args) in ranks.iter().enumerate() {
            let sent = if self.back { cx.dim(r, &self.rows)? } else { args[0].shape[0] };
            groups_of(args[1], sent)?;
        }
        let one = |r: usize| match self.back {
            true => Ok(self.return_rows(ranks, r)),
            false => self.dispatch(ranks, r, cx.dim(r, &self.rows)?),
        };
        (0..ranks.len()).map(one).collect()
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let rows = cx.graph.ty(cx.args[0]).shape[0].clone();
        let op = AllToAll { over: self.over.clone(), rows, back: !self.back };
        let Some(grad) = cx.grads[0] else { return Ok(vec![None, None]) };
        let sent = cx.graph.push(op, &[grad, cx.args[1]])?;
        Ok(vec![Some(cx.graph.part(sent, 0)?), None])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let rows: Vec<Label> = (0..cx.args[0].rank()).map(|d| (d > 0).then_some(d)).collect();
        let mut rules = cx.labelled(&[rows.clone(), vec![None]], &[rows], &[]);
        rules.extend(cx.linear(&[&[0]]));
        // The offsets of received rows are replicated along every other axis.
        let replicate = crate::shard::Placement::Replicate;
        rules.iter_mut().filter(|_| !self.back).for_each(|w| {
            w.outs.truncate(1);
            w.outs.push(replicate.clone());
        });
        rules
    }

    /// Counted are the dispatched rows: the received ones are as many on average, whatever the capacity.
    fn traffic(&self, args: &[&Type], outs: &[Type]) -> Option<Traffic> {
        let bytes = if self.back { outs[0].bytes() } else { args[0].bytes() };
        Some(Traffic { bytes, times: 1, ranks: self.over.size as u64 })
    }
}
