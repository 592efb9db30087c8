//! Adds the gradient of a scalar output to a graph. In: a graph with calls of blocks and an output such as `loss`. Out: the
//! same outputs and `grad.<buffer>` for every weight that is not frozen. Differentiation works per block: each body becomes a
//! forward body, which also returns the saved activations, and a gradient body, which recomputes all others (activation
//! recomputation, rematerialisation). By default the results of dots with their pointwise epilogue, the result of attention
//! with its log-sum-exp, and routes are saved; norms and pointwise chains are recomputed. Gradients of narrow weights are f32.

use crate::share_loss::share_loss;
use crate::uses::Uses;
use astrai_ir::ops::{AllReduce, Call, CompareKind, Input, Op, RecvFrom, ReduceOp, SendTo, State, Store};
use astrai_ir::shard::STAGES;
use astrai_ir::{
    Axis, Block, BlockId, DType, GradientOptions, Graph, IrError, NodeId, Placement, Type, gradient_with,
    refuse_calls,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Prefix of a gradient's output.
pub const GRAD: &str = "grad.";

/// Name of the scalar input of gradient accumulation: 0 in the first run, which overwrites the accumulators, 1 in later runs,
/// which add to them.
pub const ACCUMULATE: &str = "accumulate";

/// Where gradients go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Destination {
    /// Outputs `grad.<buffer>`.
    #[default]
    Outputs,
    /// States `grad.<buffer>`, overwritten by each run.
    States,
    /// States `grad.<buffer>`, accumulated from run to run; a run whose scalar input [`ACCUMULATE`] is 0 starts anew. Data-parallel
    /// ranks accumulate their own gradients: the states are partial sums, which whoever reads them sums over the ranks.
    Accumulators,
}

/// Which activations of the forward bodies the gradient bodies recompute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// None: every activation that the gradient needs is saved.
    None,
    /// Cheap ones: norms and pointwise chains.
    #[default]
    Selective,
    /// All: only the arguments of the blocks are saved.
    Full,
}

/// How a graph is differentiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gradients {
    /// Where gradients go.
    pub to: Destination,
    /// Which activations are recomputed.
    pub recompute: Recompute,
}

/// A block split into its forward body and its gradient body.
struct SplitBlock {
    forward: Arc<Block>,
    backward: Arc<Block>,
    /// Number of outputs of the block without saved activations.
    outputs: usize,
    /// For each parameter whether it has a gradient; the gradient body returns those that exist, in this order.
    has_gradient: Vec<bool>,
}

/// The graph with gradients of the output `of` by every weight.
pub fn differentiate(graph: &Graph, of: &str, how: Gradients) -> Result<Graph, IrError> {
    differentiate_over(graph, of, how, &[])
}

/// [`differentiate`] for data-parallel ranks along the axes `over`: gradients of weights that are replicated along these axes
/// are summed over the ranks; those of accumulators are noted as partial sums instead.
pub fn differentiate_over(graph: &Graph, of: &str, how: Gradients, over: &[Axis]) -> Result<Graph, IrError> {
    let of_block = |(i, b)| split(b, &graph.params_bound_to_weights(BlockId(i as u32)), how.recompute);
    let splits = graph.blocks().iter().enumerate().map(of_block).collect::<Result<Vec<_>, IrError>>()?;
    let forward = splits.iter().map(|s| s.forward.clone()).collect();
    let mut g = graph.rebuild_with(forward, |out, id, args| {
        let made = out.push(graph.node(id).op.clone(), args)?;
        let single = graph.node(id).types.len() == 1;
        if single && out.node(made).types.len() > 1 { out.part(made, 0) } else { Ok(made) }
    })?;
    let received = |id: &NodeId| matches!(&g.node(*id).op, Op::RecvFrom(r) if r.ty.dtype.is_float());
    let received: Vec<NodeId> = g.ids().filter(received).collect();
    let backward: Vec<BlockId> = splits.iter().map(|s| g.add_block(s.backward.clone())).collect();
    let mut seeds = cotangents_of_sends(&mut g)?;
    match g.output(of) {
        Some(loss) => seeds.push((loss, g.fill(loss, 1.0)?)),
        None if seeds.is_empty() => {
            return Err(g.error(format!("there is no output `{of}` to differentiate")));
        }
        None => {}
    }
    let trained = |id: &NodeId| matches!(&g.node(*id).op, Op::Weight(w) if !w.frozen);
    let weights: Vec<NodeId> = g.ids().filter(trained).collect();
    let wide: HashSet<NodeId> = weights.iter().copied().collect();
    let options = GradientOptions { wide: &wide };
    let wanted = [&weights[..], &received].concat();
    let mut grads = gradient_with(&mut g, &seeds, &wanted, &options, &mut |g, id, grads| {
        call_back(g, id, grads, &splits, &backward)
    })?;
    for (r, d) in received.iter().zip(grads.split_off(weights.len())) {
        send_cotangent(&mut g, *r, d)?;
    }
    let accumulate = match how.to {
        Destination::Accumulators => Some(g.input(ACCUMULATE, DType::F32, vec![])?),
        _ => None,
    };
    for (w, d) in weights.iter().zip(grads) {
        let origin = g.node(*w).origin.clone();
        g.with_origin(&origin, |g| {
            let axes = summed_axes(g, *w, over)?;
            let d = match d {
                // The sum of all micro-batches is summed over the ranks once.
                Some(d) if accumulate.is_none() => Some(all_reduced(g, d, &axes)?),
                d => d,
            };
            let d = summed_over_stages(g, *w, d)?;
            let accumulator = accumulate.map(|accumulate| Accumulator { accumulate, partial: &axes });
            write_gradient(g, *w, d, how.to, accumulator)
        })?;
    }
    share_loss(&g)
}

/// The cotangents of values that were sent to a later pipeline stage, received from that stage: (value, cotangent).
fn cotangents_of_sends(g: &mut Graph) -> Result<Vec<(NodeId, NodeId)>, IrError> {
    let mut found = Vec::new();
    for id in g.ids().collect::<Vec<_>>() {
        let node = g.node(id).clone();
        let Op::SendTo(s) = &node.op else { continue };
        let ty = g.ty(node.args[0]).clone();
        if !ty.dtype.is_float() {
            continue;
        }
        let op = RecvFrom { over: s.over.clone(), from: s.to, label: format!("{GRAD}{}", s.label), ty };
        let cotangent = g.with_origin(&node.origin, |g| g.push(op, &[]))?;
        g.note_sharding(cotangent, &node.sharding);
        found.push((node.args[0], cotangent));
    }
    Ok(found)
}

/// Sends the cotangent of a received value back to the stage that sent the value.
fn send_cotangent(g: &mut Graph, received: NodeId, d: Option<NodeId>) -> Result<(), IrError> {
    let node = g.node(received).clone();
    let Op::RecvFrom(r) = &node.op else { return Ok(()) };
    let d = d.map_or_else(|| g.constant(r.ty.clone(), 0.0), Ok)?;
    let (over, label) = (r.over.clone(), format!("{GRAD}{}", r.label));
    let output = format!("send.{}.{label}", r.from);
    g.with_origin(&node.origin, |g| {
        let sent = g.push(SendTo { over, to: r.from, label }, &[d])?;
        g.note_sharding(sent, &node.sharding);
        g.set_output(&output, sent)
    })
}

/// The gradient of a weight that several stages use: each sends its own gradient to the others, and all add them in the order of
/// the stages.
fn summed_over_stages(g: &mut Graph, w: NodeId, d: Option<NodeId>) -> Result<Option<NodeId>, IrError> {
    let node = g.node(w).clone();
    let placed = node.sharding.iter().find(|(axis, _)| axis == STAGES);
    let Some((_, Placement::Stages(stages))) = placed else { return Ok(d) };
    let Some((over, here)) = stage_of_graph(g) else { return Ok(d) };
    if stages.len() < 2 {
        return Ok(d);
    }
    let d = d.map_or_else(|| g.constant(g.ty(w).with(DType::F32), 0.0), Ok)?;
    let label = format!("{GRAD}{}", node.op.leaf_name().unwrap_or_default());
    let others = || stages.iter().filter(|s| **s != here);
    for to in others() {
        let sent = g.push(SendTo { over: over.clone(), to: *to, label: label.clone() }, &[d])?;
        g.set_output(&format!("send.{to}.{label}"), sent)?;
    }
    let mut sum = None;
    for from in stages {
        let ty = g.ty(d).clone();
        let term = match *from == here {
            true => d,
            false => g.push(RecvFrom { over: over.clone(), from: *from, label: label.clone(), ty }, &[])?,
        };
        sum = Some(sum.map_or(Ok(term), |sum| g.add(sum, term))?);
    }
    Ok(sum)
}

/// The pipeline axis and the stage of the graph, from the noted placement of its sends and receives.
fn stage_of_graph(g: &Graph) -> Option<(Axis, usize)> {
    g.nodes().iter().find_map(|n| {
        let over = match &n.op {
            Op::SendTo(s) => &s.over,
            Op::RecvFrom(r) => &r.over,
            _ => return None,
        };
        match n.sharding.iter().find(|(axis, _)| *axis == over.name) {
            Some((_, Placement::Stages(at))) => Some((over.clone(), *at.first()?)),
            _ => None,
        }
    })
}

/// The data-parallel axes along which a weight is replicated: each rank has a summand of its gradient.
fn summed_axes(g: &Graph, w: NodeId, over: &[Axis]) -> Result<Vec<Axis>, IrError> {
    let mut axes = Vec::new();
    for axis in over {
        let placed = g.node(w).sharding.iter().find(|(name, _)| *name == axis.name).map(|(_, p)| p);
        match placed {
            Some(Placement::Replicate) => axes.push(axis.clone()),
            Some(_) => {}
            None => {
                return Err(g.error(format!("a weight has no placement along {axis}; shard the graph first")));
            }
        }
    }
    Ok(axes)
}

/// The all-reduce of a gradient over these axes.
fn all_reduced(g: &mut Graph, d: NodeId, axes: &[Axis]) -> Result<NodeId, IrError> {
    match axes.is_empty() {
        true => Ok(d),
        false => g.push(AllReduce { kind: ReduceOp::Sum, over: axes.to_vec() }, &[d]),
    }
}

/// The accumulator of a weight's gradient.
struct Accumulator<'a> {
    /// The input [`ACCUMULATE`].
    accumulate: NodeId,
    /// The axes over whose ranks it is a partial sum.
    partial: &'a [Axis],
}

/// Makes the gradient `d` of a weight an output, or the next version of its state.
fn write_gradient(
    g: &mut Graph,
    w: NodeId,
    d: Option<NodeId>,
    to: Destination,
    accumulator: Option<Accumulator>,
) -> Result<(), IrError> {
    let ty = g.ty(w).with(DType::F32);
    let name = format!("{GRAD}{}", g.node(w).op.leaf_name().unwrap_or_default());
    let mut d = d.map_or_else(|| g.constant(ty.clone(), 0.0), Ok)?;
    if to != Destination::Outputs {
        let state = g.push(State { name: name.clone(), ty: ty.clone() }, &[])?;
        let mut sharding = g.node(w).sharding.clone();
        if let Some(Accumulator { accumulate, partial }) = accumulator {
            let summed = |(axis, _): &&mut (String, Placement)| partial.iter().any(|a| a.name == *axis);
            sharding.iter_mut().filter(summed).for_each(|(_, p)| *p = Placement::Partial);
            d = accumulated(g, state, d, accumulate, &ty)?;
        }
        g.note_sharding(state, &sharding);
        d = g.push(Store {}, &[state, d])?;
    }
    g.set_output(&name, d)
}

/// `d` plus the accumulator if `accumulate` is not 0. A select rather than a product, so that an infinity in an accumulator that
/// starts anew leaves nothing behind.
fn accumulated(
    g: &mut Graph,
    state: NodeId,
    d: NodeId,
    accumulate: NodeId,
    ty: &Type,
) -> Result<NodeId, IrError> {
    let zero = g.constant(Type::scalar(DType::F32), 0.0)?;
    let kept = g.compare(CompareKind::Gt, accumulate, zero)?;
    let kept = g.broadcast(kept, &ty.shape)?;
    let none = g.constant(ty.clone(), 0.0)?;
    let before = g.select(kept, state, none)?;
    g.add(before, d)
}

/// Cotangents of a call's arguments: a call of the gradient body on the saved activations, the cotangents and the parameters it
/// needs.
fn call_back(
    g: &mut Graph,
    id: NodeId,
    grads: &[Option<NodeId>],
    splits: &[SplitBlock],
    backward: &[BlockId],
) -> Result<Vec<Option<NodeId>>, IrError> {
    let node = g.node(id).clone();
    let Op::Call(c) = &node.op else { return Err(g.error("only calls have blocks".into())) };
    let s = splits
        .get(c.block.0 as usize)
        .ok_or_else(|| g.error("a gradient body is not differentiated again".into()))?;
    let mut args = Vec::with_capacity(s.backward.params.len());
    for p in &s.backward.params {
        args.push(match (name_index(p, SAVED), name_index(p, COTANGENT)) {
            (Some(i), _) => g.part(id, (s.outputs + i) as u32)?,
            (_, Some(i)) => match grads[i] {
                Some(d) => d,
                None => {
                    let y = g.part(id, i as u32)?;
                    g.fill(y, 0.0)?
                }
            },
            _ => {
                let at = s.forward.params.iter().position(|q| q == p);
                node.args[at.ok_or_else(|| g.error(format!("parameter `{p}` is not the forward body's")))?]
            }
        });
    }
    let block = backward[c.block.0 as usize];
    let call = g.push(Call { block, layer: c.layer }, &args)?;
    let mut results = (0..).map(|i| g.part(call, i));
    let result = |exists: &bool| if *exists { results.next().transpose() } else { Ok(None) };
    s.has_gradient.iter().map(result).collect()
}

const SAVED: &str = "saved.";
const COTANGENT: &str = "d.";

fn name_index(name: &str, prefix: &str) -> Option<usize> {
    name.strip_prefix(prefix)?.parse().ok()
}

/// The forward body, which also returns the saved activations, and the gradient body, which takes them.
fn split(block: &Arc<Block>, is_weight: &[bool], recompute: Recompute) -> Result<SplitBlock, IrError> {
    let body = &block.graph;
    let outputs = body.outputs().to_vec();
    let mut both = body.clone();
    let mut pairs = Vec::new();
    for (i, (_, y)) in outputs.iter().enumerate() {
        let ty = both.ty(*y).clone();
        pairs.push((*y, both.push(Input { name: format!("{COTANGENT}{i}"), ty }, &[])?));
    }
    let leaf = |p: &String| block.leaf(p).ok_or_else(|| body.error(format!("parameter `{p}` has no leaf")));
    let params = block.params.iter().map(leaf).collect::<Result<Vec<_>, IrError>>()?;
    let frozen = |p: &NodeId| matches!(&body.node(*p).op, Op::Weight(w) if w.frozen);
    let float = |p: &NodeId| body.ty(*p).dtype.is_float() && !frozen(p);
    let float: Vec<NodeId> = params.iter().copied().filter(float).collect();
    let wide = params.iter().zip(is_weight).filter(|(_, w)| **w).map(|(p, _)| *p).collect();
    let options = GradientOptions { wide: &wide };
    let grads = gradient_with(&mut both, &pairs, &float, &options, &mut refuse_calls)?;
    let by_leaf: HashMap<NodeId, Option<NodeId>> = float.into_iter().zip(grads).collect();
    let roots: Vec<Option<NodeId>> = params.iter().map(|p| by_leaf.get(p).copied().flatten()).collect();
    let worth = match recompute {
        Recompute::None => computed(&both, body),
        Recompute::Selective => worth_saving(&both, body),
        Recompute::Full => BTreeSet::new(),
    };
    // The nodes of the gradient body: all that its results depend on, up to the saved values.
    let needed = both.ancestors(roots.iter().flatten().copied(), |user, _| !worth.contains(&user));
    let saved: Vec<NodeId> = needed.iter().copied().filter(|id| worth.contains(id)).collect();
    let mut forward = body.clone();
    for (i, id) in saved.iter().enumerate() {
        // If only the gradient uses the log-sum-exp, the forward body has no `part` of it yet.
        let here = match &both.node(*id).op {
            Op::Part(p) => forward.part(both.node(*id).args[0], p.index)?,
            _ => *id,
        };
        forward.set_output(&format!("{SAVED}{i}"), here)?;
    }
    let backward = backward_body(&both, &needed, &saved, block, &roots)?;
    Ok(SplitBlock {
        forward: Arc::new(block.with(forward)),
        backward: Arc::new(Block::new(&format!("{}.grad", block.name), backward)),
        outputs: outputs.len(),
        has_gradient: roots.iter().map(Option::is_some).collect(),
    })
}

/// Activations of the forward body that are expensive to recompute. The first nodes of `both` are those of the body.
fn worth_saving(both: &Graph, body: &Graph) -> BTreeSet<NodeId> {
    let uses = Uses::of(body);
    let forward = |id: NodeId| id.index() < body.nodes().len();
    let mut worth = BTreeSet::new();
    for id in both.ids() {
        let node = both.node(id);
        // The result of a collective is saved: recomputing it would communicate again.
        let met = node.op.collective_axes().is_some() && node.types.len() == 1;
        match &node.op {
            op if forward(id) && (met || matches!(op, Op::Dot(_) | Op::GroupedDot(_))) => {
                worth.insert(id);
                worth.extend(uses.tail(body, id).last());
            }
            Op::Part(p) => {
                let many = &both.node(node.args[0]).op;
                let sent = matches!(many, Op::AllToAll(_)) && forward(node.args[0]);
                if matches!(many, Op::Attention(_)) && p.index < 2 || matches!(many, Op::Route(_)) || sent {
                    worth.insert(id);
                }
            }
            _ => {}
        }
    }
    worth
}

/// Everything that the forward body computes, except views and casts of values that are in memory anyway.
fn computed(both: &Graph, body: &Graph) -> BTreeSet<NodeId> {
    let forward = |id: NodeId| id.index() < body.nodes().len();
    let computes = |id: &NodeId| {
        let node = both.node(*id);
        match &node.op {
            Op::Part(_) => forward(node.args[0]),
            Op::Const(_) => false,
            op => forward(*id) && node.types.len() == 1 && op.leaf_name().is_none() && !both.is_free(*id),
        }
    };
    both.ids().filter(computes).collect()
}

fn backward_body(
    both: &Graph,
    needed: &BTreeSet<NodeId>,
    saved: &[NodeId],
    block: &Block,
    roots: &[Option<NodeId>],
) -> Result<Graph, IrError> {
    let mut out = Graph::new(both.symbols.clone());
    let mut map: BTreeMap<NodeId, NodeId> = BTreeMap::new();
    for &id in needed {
        let node = both.node(id);
        let made = match saved.iter().position(|s| *s == id) {
            Some(i) => out.push(Input { name: format!("{SAVED}{i}"), ty: node.ty().clone() }, &[])?,
            None => {
                let args: Vec<NodeId> = node.args.iter().map(|a| map[a]).collect();
                out.with_origin(&node.origin, |g| g.push(node.op.clone(), &args))?
            }
        };
        map.insert(id, made);
    }
    for (p, root) in block.params.iter().zip(roots) {
        if let Some(root) = root {
            out.set_output(&format!("{GRAD}{p}"), map[root])?;
        }
    }
    Ok(out)
}
