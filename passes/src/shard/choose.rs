//! Which sharding rule a node takes along one axis. In: its operator, and the placements of its arguments. Out: the rule for
//! which resharding the arguments sends the fewest bytes.

use super::is_data;
use astrai_ir::dim::Factor;
use astrai_ir::ops::{Op, ReduceKind};
use astrai_ir::plan::bound;
use astrai_ir::shard::{Propagate, ShardingRule};
use astrai_ir::{Axis, Dim, Graph, Placement, Type};

/// A node, with global types, and the placements of its arguments.
pub struct PlacedNode<'a> {
    pub op: &'a Op,
    pub args: &'a [&'a Type],
    pub outs: &'a [Type],
    pub placements: &'a [Placement],
}

/// Name of the symbol that counts on all ranks of an axis together what `symbol` counts on one.
pub fn symbol_of_all_ranks(symbol: &str, axis: &Axis) -> String {
    format!("{symbol}_{}", axis.name)
}

/// True for a type with a symbolic dimension: one that counts tokens.
fn symbolic(ty: &Type) -> bool {
    ty.shape.iter().any(|d| d.literal().is_none())
}

/// The sharding rule of a node along `axis`; `Err` says why there is none.
pub fn choose(g: &Graph, at: &PlacedNode, axis: &Axis) -> Result<ShardingRule, String> {
    let data =
        is_data(axis) && at.placements.iter().any(|p| matches!(p, Placement::Local | Placement::Dispatched));
    if data {
        return data_parallel(at, axis);
    }
    let mut rule = cheapest(g, at, axis);
    let tokens = is_data(axis) && at.outs.iter().any(symbolic);
    if tokens && rule.outs.iter().all(|p| *p == Placement::Replicate) {
        rule.outs = vec![Placement::Local; at.outs.len()];
    }
    Ok(rule)
}

/// The rule whose arguments cost the least to reshard; replication where no rule costs less.
fn cheapest(g: &Graph, at: &PlacedNode, axis: &Axis) -> ShardingRule {
    let replicated = ShardingRule {
        args: vec![Placement::Replicate; at.args.len()],
        outs: vec![Placement::Replicate; at.outs.len()],
    };
    if at.placements.iter().all(|p| *p == Placement::Replicate) {
        return replicated;
    }
    let cx = Propagate { args: at.args, outs: at.outs, placements: at.placements, n: axis.size };
    let divides = |p: &Placement, ty: &Type| match p {
        Placement::Shard(shard) => shard.divides(ty, axis.size),
        _ => true,
    };
    let possible = |rule: &ShardingRule| {
        rule.args.iter().zip(at.args).all(|(p, ty)| divides(p, ty))
            && rule.outs.iter().zip(at.outs).all(|(p, ty)| divides(p, ty))
    };
    let price = |rule: &ShardingRule| {
        let one = |(i, to): (usize, &Placement)| reshard_cost(g, &at.placements[i], to, at.args[i]);
        rule.args.iter().enumerate().map(one).try_fold(0u128, |sum, c| Some(sum + c?))
    };
    let rules = at.op.sharding_rules(&cx).into_iter().filter(possible);
    let priced = rules.filter_map(|w| Some((price(&w)?, w))).min_by_key(|(cost, _)| *cost);
    match (priced, price(&replicated)) {
        (Some((cost, rule)), Some(most)) if cost <= most => rule,
        (Some((_, rule)), None) => rule,
        _ => replicated,
    }
}

/// The cost of resharding a value, in sixteenths of a byte sent; `None` when no collective does it.
fn reshard_cost(g: &Graph, from: &Placement, to: &Placement, ty: &Type) -> Option<u128> {
    use Placement::*;
    let bytes = u128::from(bound(&g.symbols, &ty.bytes()).unwrap_or(u64::MAX));
    Some(match (from, to) {
        _ if from == to => 0,
        (Replicate, Shard(_)) => bytes.div_ceil(1024),
        // The first rank keeps the value, the others hold zero; done for scalars only.
        (Replicate, Partial) if ty.rank() == 0 => bytes,
        (Shard(_), Replicate) | (Partial, Shard(_)) => 16 * bytes,
        (Partial, Replicate) | (Shard(_), Shard(_)) => 32 * bytes,
        _ => return None,
    })
}

/// The rule of a node some of whose arguments are local (of the rank's own tokens) or dispatched.
fn data_parallel(at: &PlacedNode, axis: &Axis) -> Result<ShardingRule, String> {
    use Placement::*;
    let dispatched = |p: &Placement| *p == Dispatched;
    if let (Op::GroupedDot(_), Shard(shard)) = (at.op, at.placements.get(1).unwrap_or(&Replicate)) {
        let fits = shard.divides(at.args[1], axis.size);
        let w = fits
            .then(|| Shard(shard.clone()))
            .ok_or_else(|| format!("has matrices that do not divide by {axis}"))?;
        return Ok(ShardingRule { args: vec![Dispatched, w, Dispatched], outs: vec![Dispatched] });
    }
    let row_by_row = at.op.is_pointwise() || matches!(at.op, Op::Slice(s) if s.axis > 0);
    if at.placements.iter().any(dispatched) && row_by_row {
        let args =
            at.placements.iter().map(|p| if *p == Replicate { Replicate } else { Dispatched }).collect();
        return Ok(ShardingRule { args, outs: vec![Dispatched] });
    }
    let local = |p: &Placement| if matches!(p, Local | Dispatched) { Local } else { Replicate };
    let out = if contracts_tokens(at)? { Partial } else { Local };
    Ok(ShardingRule { args: at.placements.iter().map(local).collect(), outs: vec![out; at.outs.len()] })
}

/// True for a sum over tokens: the ranks' results are partial sums.
fn contracts_tokens(at: &PlacedNode) -> Result<bool, String> {
    let gone = |ty: &Type, axes: Vec<usize>| axes.into_iter().any(|a| ty.shape[a].literal().is_none());
    match at.op {
        Op::Reduce(r) if gone(at.args[0], r.axes.clone()) => match r.kind {
            ReduceKind::Sum => Ok(true),
            kind => Err(format!("of {kind:?} over tokens is not known on ranks; divide a sum by a count")),
        },
        Op::Dot(d) => Ok(gone(at.args[0], d.contract.iter().map(|p| p.0).collect())),
        _ => Ok(false),
    }
}

/// The bound on a rank's dispatched rows, from the size of its local rows: the rows of all ranks.
pub fn dispatched_size(d: &Dim, axis: &Axis) -> Dim {
    let product = |(coef, factors): (i64, &[Factor])| {
        let coef = if coef < 0 {
            &Dim::from(0) - &Dim::from(coef.unsigned_abs() as usize)
        } else {
            Dim::from(coef as usize)
        };
        let symbols = factors.iter().filter_map(|f| match f {
            Factor::Symbol(s) => Some(s),
            _ => None,
        });
        symbols.fold(coef, |p, s| &p * &Dim::symbol(&symbol_of_all_ranks(s, axis)))
    };
    d.products().map(product).fold(Dim::from(0), |a, b| &a + &b)
}
