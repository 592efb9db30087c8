//! Mixed precision: chooses the storage type of every value. In: a graph whose arithmetic is all f32. Out: the same graph with
//! narrow weights, a narrow residual stream, and narrow operands and results of dots, of attention and of the loss; every
//! rounding is an explicit cast. Pointwise arithmetic, accumulation, statistics and a router's logits stay f32. States of which
//! rows are stored (pages of keys and values) are narrow, too: keys and values are rounded before they are stored, where attention
//! without a cache rounds them; so are the factors of adapters. Weights that say so keep their types, as do pages of codes and their
//! scales. What the policy names stays f32: operators, whose operands and results are then not rounded, and weights.

use crate::stack::STACKED;
use crate::uses::Uses;
use crate::version_leaf;
use astrai_ir::ops::{Call, Input, Op, RecvFrom, State, Weight};
use astrai_ir::{Block, BlockId, DType, Graph, IrError, NodeId, Type};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The storage types of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy<'a> {
    /// Type of weights and activations in memory; f32 changes nothing.
    pub storage: DType,
    /// What stays f32.
    pub wide: &'a Wide,
}

/// What stays f32 where all else is stored narrow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wide {
    /// Operators of [`ROUNDED`]: neither what they read nor their results are rounded for them.
    pub operators: BTreeSet<String>,
    /// Checkpoint tensors.
    pub weights: BTreeSet<String>,
}

/// Operators whose operands and results are stored narrow.
pub const ROUNDED: [&str; 4] = ["dot", "grouped_dot", "attention", "linear_cross_entropy"];

/// The graph with `policy.storage` in memory.
///
/// # Errors
/// Some of the tensors that are one weight, or one parameter of a kind of layer, are to stay f32, and others not.
pub fn precision(graph: &Graph, policy: Policy) -> Result<Graph, IrError> {
    if policy.storage == DType::F32 {
        return Ok(graph.clone());
    }
    let own = wide_weights(graph, &policy.wide.weights)?;
    let operators = &policy.wide.operators;
    let narrow_block = |(i, b): (usize, &Arc<Block>)| {
        let stream = |name: &str| b.graph.output(name).is_some();
        let (g, inner) = (&b.graph, b.graph.blocks().to_vec());
        let weights = wide_params(graph, BlockId(i as u32), &own)?;
        let kept = Kept { operators, weights, caches: caches(g, &[]) };
        Ok(Arc::new(b.with(rebuild(g, policy.storage, &stream, true, &kept, inner)?)))
    };
    let blocks = graph.blocks().iter().enumerate().map(narrow_block).collect::<Result<Vec<_>, IrError>>()?;
    let kept = Kept { operators, weights: own, caches: caches(graph, &blocks) };
    rebuild(graph, policy.storage, &|_| false, false, &kept, blocks)
}

/// What of one body is not stored as all else is: operators and weights that stay f32, and states that are caches.
struct Kept<'a> {
    operators: &'a BTreeSet<String>,
    weights: BTreeSet<NodeId>,
    caches: BTreeSet<NodeId>,
}

impl Kept<'_> {
    fn has(&self, op: &Op) -> bool {
        self.operators.contains(op.name())
    }
}

/// The weights of a graph that hold these checkpoint tensors.
fn wide_weights(g: &Graph, names: &BTreeSet<String>) -> Result<BTreeSet<NodeId>, IrError> {
    let mut found = BTreeSet::new();
    for id in g.ids().filter(|_| !names.is_empty()) {
        let Op::Weight(w) = &g.node(id).op else { continue };
        let rows = w.rows();
        let left: Vec<&str> = rows.iter().map(|r| r.name.as_str()).filter(|n| !names.contains(*n)).collect();
        match left.len() {
            0 => _ = found.insert(id),
            n if n == rows.len() => {}
            _ => {
                let left = left.join(", ");
                return Err(
                    g.error(format!("{left} and tensors that stay f32 are one weight: name all or none"))
                );
            }
        }
    }
    Ok(found)
}

/// The parameters of a block that are bound to these weights: by every call of it, or by none.
fn wide_params(g: &Graph, block: BlockId, wide: &BTreeSet<NodeId>) -> Result<BTreeSet<NodeId>, IrError> {
    let body = g.block(block);
    let (mut found, mut calls) = (vec![0; body.params.len()], 0);
    for node in g.nodes().iter().filter(|n| matches!(&n.op, Op::Call(c) if c.block == block)) {
        calls += 1;
        found.iter_mut().zip(&node.args).for_each(|(n, arg)| *n += usize::from(wide.contains(arg)));
    }
    let mut leaves = BTreeSet::new();
    for (param, count) in body.params.iter().zip(found).filter(|(_, count)| *count > 0) {
        if count < calls {
            let message =
                format!("`{param}` stays f32 in some layers of a kind and not in others: name all or none");
            return Err(g.error(message));
        }
        leaves.extend(body.leaf(param));
    }
    Ok(leaves)
}

/// States that are caches: those of which rows are stored, here or in the bodies of called blocks, but for the scales of codes.
fn caches(g: &Graph, blocks: &[Arc<Block>]) -> BTreeSet<NodeId> {
    let mut found = BTreeSet::new();
    for id in g.ids() {
        let node = g.node(id);
        if g.stores_rows(id) {
            found.extend(version_leaf(g, node.args[0]));
        }
        let Op::Call(c) = &node.op else { continue };
        let block = &blocks[c.block.0 as usize];
        let of_body = self::caches(&block.graph, &[]);
        let cached = |p: &String| block.leaf(p).is_some_and(|l| of_body.contains(&l));
        let args = node.args.iter().zip(&block.params).filter(|(_, p)| cached(p));
        found.extend(args.filter_map(|(a, _)| version_leaf(g, *a)));
    }
    let scales: BTreeSet<NodeId> = g.ids().filter_map(|id| scaled(g, id)).collect();
    found.retain(|id| matches!(g.node(*id).op, Op::State(_)) && !scales.contains(id));
    found
}

/// The state that holds the scales of what this node makes numbers of: it keeps its type.
fn scaled(g: &Graph, id: NodeId) -> Option<NodeId> {
    let (Op::Dequant(_), [_, scales, ..]) = (&g.node(id).op, g.node(id).args.as_slice()) else { return None };
    let mut at = *scales;
    while g.node(at).op.is_view() || matches!(g.node(at).op, Op::Gather(_)) {
        at = g.node(at).args[0];
    }
    version_leaf(g, at)
}

/// True for numbers that are codes in pages: attention reads those.
fn lie_in_pages(g: &Graph, id: NodeId) -> bool {
    matches!(g.node(id).op, Op::Dequant(_)) && g.stores_rows(g.node(id).args[0])
}

fn rebuild(
    g: &Graph,
    to: DType,
    stream: &dyn Fn(&str) -> bool,
    narrow_outputs: bool,
    kept: &Kept,
    blocks: Vec<Arc<Block>>,
) -> Result<Graph, IrError> {
    let rounded = rounding_points(g, kept);
    let outs: BTreeSet<NodeId> = g.outputs().iter().map(|(_, id)| *id).collect();
    g.rebuild_with(blocks, |out, id, args| {
        let node = g.node(id);
        let args = &match node.op {
            Op::Store(_) | Op::Call(_) | Op::Part(_) => args.to_vec(),
            _ => widened(g, id, out, args, to)?,
        }[..];
        let made = match &node.op {
            Op::State(s)
                if s.ty.dtype == DType::F32 && (kept.caches.contains(&id) || s.name.starts_with(STACKED)) =>
            {
                return out.push(State { ty: s.ty.with(to), ..s.clone() }, &[]);
            }
            Op::Store(op) => {
                let mut args = args.to_vec();
                let (dtype, last) = (out.ty(args[0]).dtype, args.len() - 1);
                args[last] = narrowed(out, args[last], dtype)?;
                return out.push(op.clone(), &args);
            }
            Op::Part(p) if matches!(g.node(node.args[0]).op, Op::Call(_) | Op::AllToAll(_)) => {
                let part = out.push(p.clone(), args)?;
                let stream = version_leaf(g, id).is_none() && out.ty(part).dtype == to;
                return if stream { out.cast(part, DType::F32) } else { Ok(part) };
            }
            Op::Weight(w) if w.ty.dtype == DType::F32 && !w.keeps_type && !kept.weights.contains(&id) => {
                let w = out.push(Weight { ty: w.ty.with(to), ..w.clone() }, &[])?;
                out.note_sharding(w, &node.sharding);
                return out.cast(w, DType::F32);
            }
            Op::Input(i) if i.ty.dtype == DType::F32 && stream(&i.name) => {
                let x = out.push(Input { name: i.name.clone(), ty: i.ty.with(to) }, &[])?;
                return out.cast(x, DType::F32);
            }
            Op::Gather(op) => {
                // Rows are gathered before they are widened.
                match stored_below(out, args[0], to)? {
                    Some(narrow) => {
                        let rows = out.push(op.clone(), &[narrow, args[1]])?;
                        return out.cast(rows, DType::F32);
                    }
                    None => out.push(op.clone(), args)?,
                }
            }
            Op::Call(c) => return call(out, c, args, to),
            op @ (Op::Dot(_) | Op::GroupedDot(_)) if !kept.has(op) => {
                // The left argument is narrow, as matrix units need it; accumulation stays f32.
                let left = match out.node(args[0]).op {
                    Op::FakeQuant(_) => args[0],
                    _ => rounded_to(out, args[0], to)?,
                };
                out.push(op.clone(), &[&[left], &args[1..]].concat())?
            }
            // What adapters add is made of the numbers that their layers' dots read.
            Op::LowRank(op) if !kept.operators.contains(ROUNDED[0]) => {
                let x = rounded_to(out, args[0], to)?;
                out.push(op.clone(), &[&[x], &args[1..]].concat())?
            }
            Op::FakeQuant(op) => {
                let x = rounded_to(out, args[0], to)?;
                out.push(op.clone(), &[x])?
            }
            Op::AllToAll(op) if !op.back => {
                // The grouped dots round these rows anyway, so they are sent narrow.
                let rows = narrowed(out, args[0], to)?;
                return out.push(op.clone(), &[rows, args[1]]);
            }
            // The residual stream is sent between stages in its storage type; scalars and integers keep their types.
            Op::SendTo(op) if is_stream(g.ty(node.args[0])) => {
                let narrow = narrowed(out, args[0], to)?;
                return out.push(op.clone(), &[narrow]);
            }
            Op::SendTo(op) => return out.push(op.clone(), args),
            Op::RecvFrom(op) => {
                let ty = if is_stream(&op.ty) { op.ty.with(to) } else { op.ty.clone() };
                let narrow = ty != op.ty;
                let arrived = out.push(RecvFrom { ty, ..op.clone() }, &[])?;
                out.note_sharding(arrived, &node.sharding);
                return if narrow { out.cast(arrived, DType::F32) } else { Ok(arrived) };
            }
            op if op.collective_axes().is_some() => {
                // A value that is stored narrow is communicated narrow.
                let mut args = args.to_vec();
                match stored(out, args[0], to) {
                    Some(narrow) => {
                        args[0] = narrow;
                        let met = out.push(op.clone(), &args)?;
                        return out.cast(met, DType::F32);
                    }
                    None => out.push(op.clone(), &args)?,
                }
            }
            Op::LinearCrossEntropy(op) if to == DType::BF16 && !kept.has(&node.op) => {
                // Narrow hidden states and weights imply that the logits' gradient is narrow, too.
                let mut args = args.to_vec();
                for a in &mut args[..2] {
                    *a = narrowed(out, *a, to)?;
                }
                out.push(op.clone(), &args)?
            }
            op => out.push(op.clone(), args)?,
        };
        if narrow_outputs && outs.contains(&id) && out.ty(made).dtype == DType::F32 {
            return out.cast(made, to);
        }
        if rounded.contains(&id) && out.node(made).types.len() == 1 {
            let narrow = out.cast(made, to)?;
            return out.cast(narrow, DType::F32);
        }
        Ok(made)
    })
}

/// True for the type of a residual stream, which is stored narrow between layers.
fn is_stream(ty: &Type) -> bool {
    ty.dtype == DType::F32 && ty.rank() > 0
}

/// The arguments of a node, with casts to f32 of those that have become narrow.
fn widened(
    g: &Graph,
    id: NodeId,
    out: &mut Graph,
    args: &[NodeId],
    to: DType,
) -> Result<Vec<NodeId>, IrError> {
    let widen = |(&a, old): (&NodeId, &NodeId)| match (g.ty(*old).dtype, out.ty(a).dtype) {
        (DType::F32, narrow) if narrow == to => out.cast(a, DType::F32),
        _ => Ok(a),
    };
    args.iter().zip(&g.node(id).args).map(widen).collect()
}

/// A call with its arguments cast to the present types of the block's parameters, and a narrow result cast to f32.
fn call(out: &mut Graph, c: &Call, args: &[NodeId], to: DType) -> Result<NodeId, IrError> {
    let block = out.block(c.block).clone();
    let mut bound = Vec::with_capacity(args.len());
    for (&a, want) in args.iter().zip(block.param_types()?) {
        bound.push(match out.ty(a).dtype == want.dtype {
            true => a,
            false => narrowed(out, a, want.dtype)?,
        });
    }
    let y = out.push(c.clone(), &bound)?;
    match out.node(y).types.as_slice() {
        [one] if one.dtype == to => out.cast(y, DType::F32),
        _ => Ok(y),
    }
}

/// The argument of `id`, if `id` is a cast from this type.
fn stored(g: &Graph, id: NodeId, dtype: DType) -> Option<NodeId> {
    let node = g.node(id);
    let x = *node.args.first()?;
    (matches!(node.op, Op::Cast(_)) && g.node(x).types.len() == 1 && g.ty(x).dtype == dtype).then_some(x)
}

/// The value in this type: the argument of the cast that widened it, or a new cast.
fn narrowed(g: &mut Graph, id: NodeId, dtype: DType) -> Result<NodeId, IrError> {
    stored(g, id, dtype).map_or_else(|| g.cast(id, dtype), Ok)
}

/// The value as numbers of this type, in f32.
fn rounded_to(g: &mut Graph, id: NodeId, to: DType) -> Result<NodeId, IrError> {
    if is_widened(g, id, to) {
        return Ok(id);
    }
    let narrow = g.cast(id, to)?;
    g.cast(narrow, DType::F32)
}

/// True when `id` is a cast from this type, under views.
fn is_widened(g: &Graph, id: NodeId, dtype: DType) -> bool {
    let node = g.node(id);
    if node.op.is_view() { is_widened(g, node.args[0], dtype) } else { stored(g, id, dtype).is_some() }
}

/// The argument of the cast from this type of which `id` is a reshape, reshaped alike.
fn stored_below(g: &mut Graph, id: NodeId, dtype: DType) -> Result<Option<NodeId>, IrError> {
    let node = g.node(id).clone();
    let Op::Reshape(_) = node.op else { return Ok(stored(g, id, dtype)) };
    match stored_below(g, node.args[0], dtype)? {
        Some(narrow) => g.push(node.op, &[narrow]).map(Some),
        None => Ok(None),
    }
}

/// Nodes whose values would be stored as f32 and are rounded instead: results of dots with their pointwise epilogue, results and
/// arguments of attention.
fn rounding_points(g: &Graph, kept: &Kept) -> BTreeSet<NodeId> {
    let uses = Uses::of(g);
    let mut points = BTreeSet::new();
    for id in g.ids().filter(|id| !kept.has(&g.node(*id).op)) {
        match &g.node(id).op {
            Op::Dot(_) | Op::GroupedDot(_) => {
                let end = *uses.tail(g, id).last().unwrap_or(&id);
                // A router's choice depends on small differences: its logits stay f32.
                let routes = uses.of_node(end).iter().any(|u| matches!(g.node(*u).op, Op::Route(_)));
                if !uses.is_output(end) && !routes {
                    points.insert(end);
                }
            }
            // Codes that are gathered become numbers in memory.
            Op::Dequant(_) if scaled(g, id).is_some() && !lie_in_pages(g, id) => _ = points.insert(id),
            Op::Attention(_) => {
                let args = g.node(id).args[..3].iter().map(|&a| g.below_views(a));
                points.extend(args.filter(|&a| !lie_in_pages(g, a)));
                points.extend(
                    uses.of_node(id)
                        .iter()
                        .filter(|u| matches!(&g.node(**u).op, Op::Part(p) if p.index == 0)),
                );
            }
            _ => {}
        }
    }
    points.retain(|&p| g.ty(p).dtype == DType::F32 && g.node(p).op.leaf_name().is_none());
    points
}
