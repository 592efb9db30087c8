//! Which way a node goes along one axis. In: its operator, and where its arguments are. Out: the way whose arguments cost the
//! fewest bytes to bring there.

use super::is_data;
use astrai_ir::dim::Factor;
use astrai_ir::ops::{Op, ReduceKind};
use astrai_ir::plan::bound;
use astrai_ir::shard::{Way, Ways};
use astrai_ir::{Axis, Dim, Graph, Placement, Type};

/// What is known of a node.
pub struct At<'a> {
    pub op: &'a Op,
    pub args: &'a [&'a Type],
    pub outs: &'a [Type],
    pub placed: &'a [Placement],
}

/// Name of the symbol that counts on all ranks of an axis together what `symbol` counts on one.
pub fn of_all(symbol: &str, axis: &Axis) -> String {
    format!("{symbol}_{}", axis.name)
}

/// True for a type with a dimension that is data.
fn symbolic(ty: &Type) -> bool {
    ty.shape.iter().any(|d| d.literal().is_none())
}

/// The way of a node along `axis`; `Err` says what cannot be done there.
pub fn choose(g: &Graph, at: &At, axis: &Axis) -> Result<Way, String> {
    let data = is_data(axis) && at.placed.iter().any(|p| matches!(p, Placement::Own | Placement::Routed));
    if data {
        return of_tokens(at, axis);
    }
    let mut way = cheapest(g, at, axis);
    let tokens = is_data(axis) && at.outs.iter().any(symbolic);
    if tokens && way.outs.iter().all(|p| *p == Placement::Whole) {
        way.outs = vec![Placement::Own; at.outs.len()];
    }
    Ok(way)
}

/// The way whose arguments cost the least; all whole where none costs less.
fn cheapest(g: &Graph, at: &At, axis: &Axis) -> Way {
    let whole =
        Way { args: vec![Placement::Whole; at.args.len()], outs: vec![Placement::Whole; at.outs.len()] };
    if at.placed.iter().all(|p| *p == Placement::Whole) {
        return whole;
    }
    let cx = Ways { args: at.args, outs: at.outs, placed: at.placed, n: axis.size };
    let fits = |p: &Placement, ty: &Type| match p {
        Placement::Split(cut) => cut.fits(ty, axis.size),
        _ => true,
    };
    let possible = |way: &Way| {
        way.args.iter().zip(at.args).all(|(p, ty)| fits(p, ty))
            && way.outs.iter().zip(at.outs).all(|(p, ty)| fits(p, ty))
    };
    let price = |way: &Way| {
        let one = |(i, to): (usize, &Placement)| cost(g, &at.placed[i], to, at.args[i]);
        way.args.iter().enumerate().map(one).try_fold(0u128, |sum, c| Some(sum + c?))
    };
    let ways = at.op.ways(&cx).into_iter().filter(possible);
    let priced = ways.filter_map(|w| Some((price(&w)?, w))).min_by_key(|(cost, _)| *cost);
    match (priced, price(&whole)) {
        (Some((cost, way)), Some(most)) if cost <= most => way,
        (Some((_, way)), None) => way,
        _ => whole,
    }
}

/// Bytes that bringing a value from one placement to another costs, in sixteenths; `None` when there is no way.
fn cost(g: &Graph, from: &Placement, to: &Placement, ty: &Type) -> Option<u128> {
    use Placement::*;
    let bytes = u128::from(bound(&g.symbols, &ty.bytes()).unwrap_or(u64::MAX));
    Some(match (from, to) {
        _ if from == to => 0,
        (Whole, Split(_)) => bytes.div_ceil(1024),
        // One rank has it, the others zero; done with no more than a number.
        (Whole, Partial) if ty.rank() == 0 => bytes,
        (Split(_), Whole) | (Partial, Split(_)) => 16 * bytes,
        (Partial, Whole) | (Split(_), Split(_)) => 32 * bytes,
        _ => return None,
    })
}

/// The way of a node some of whose arguments are of the rank's own tokens.
fn of_tokens(at: &At, axis: &Axis) -> Result<Way, String> {
    use Placement::*;
    let routed = |p: &Placement| *p == Routed;
    if let (Op::GroupedDot(_), Split(cut)) = (at.op, at.placed.get(1).unwrap_or(&Whole)) {
        let here = cut.fits(at.args[1], axis.size).then(|| Split(cut.clone()));
        let w = here.ok_or_else(|| format!("has matrices that do not divide by {axis}"))?;
        return Ok(Way { args: vec![Routed, w, Routed], outs: vec![Routed] });
    }
    let row_by_row = at.op.is_pointwise() || matches!(at.op, Op::Slice(s) if s.axis > 0);
    if at.placed.iter().any(routed) && row_by_row {
        let args = at.placed.iter().map(|p| if *p == Whole { Whole } else { Routed }).collect();
        return Ok(Way { args, outs: vec![Routed] });
    }
    let own = |p: &Placement| if matches!(p, Own | Routed) { Own } else { Whole };
    let out = if sums_tokens(at)? { Partial } else { Own };
    Ok(Way { args: at.placed.iter().map(own).collect(), outs: vec![out; at.outs.len()] })
}

/// True for a sum over tokens: the ranks' results are summands.
fn sums_tokens(at: &At) -> Result<bool, String> {
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

/// A size of the rank's own rows as that of the rows it is sent.
pub fn sent(d: &Dim, axis: &Axis) -> Dim {
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
        symbols.fold(coef, |p, s| &p * &Dim::symbol(&of_all(s, axis)))
    };
    d.products().map(product).fold(Dim::from(0), |a, b| &a + &b)
}
