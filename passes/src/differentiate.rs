//! Adds the gradient of a scalar output to a graph. In: a graph with calls of blocks and an output such as `loss`. Out: the
//! same outputs and `grad.<buffer>` for every weight that is not fixed. It works per block: each body becomes a forward body,
//! which also puts out what is saved, and a gradient body, which recomputes the rest. By default saved are ends of dots,
//! attention's result with its log-sum-exp, and routes; norms and pointwise chains are recomputed. Gradients of narrow
//! weights are f32.

use crate::regions::{Uses, is_free};
use crate::share_loss::share_loss;
use astrai_ir::ops::{AllReduce, Call, CompareKind, Input, Op, RecvFrom, ReduceOp, SendTo, State, Store};
use astrai_ir::shard::STAGES;
use astrai_ir::{
    Axis, Block, BlockId, DType, Graph, IrError, NodeId, Placement, Type, Walk, gradient_through,
    refuse_calls,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Prefix of a gradient's output.
pub const GRAD: &str = "grad.";

/// Name of the input that says whether gradients are added to what their states hold: 0 in the first run of a sum, else 1.
pub const KEEP: &str = "keep";

/// Where gradients go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Destination {
    /// Outputs `grad.<buffer>`.
    #[default]
    Results,
    /// States `grad.<buffer>`, overwritten by each run.
    States,
    /// States `grad.<buffer>`, added up from run to run: where the scalar input [`KEEP`] is 0, what they held is forgotten.
    Sums,
}

/// Which values of the forward bodies the gradient's bodies compute again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// None: whatever the gradient needs is saved.
    None,
    /// What is cheap: norms and pointwise chains.
    #[default]
    Selective,
    /// All: only the arguments of the blocks are kept.
    Full,
}

/// How a graph is differentiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gradients {
    /// Where gradients go.
    pub to: Destination,
    /// What is computed again.
    pub recompute: Recompute,
}

/// A block taken apart for the gradient.
struct Split {
    forward: Arc<Block>,
    backward: Arc<Block>,
    /// Outputs of the block before values were saved.
    outputs: usize,
    /// For each parameter whether a gradient flows to it, in the order of the backward body's results.
    flows: Vec<bool>,
}

/// The graph with gradients of the output `of` by every weight.
pub fn differentiate(graph: &Graph, of: &str, how: Gradients) -> Result<Graph, IrError> {
    differentiate_over(graph, of, how, &[])
}

/// [`differentiate`] for ranks that have tokens of their own along the axes `over`: gradients of weights that are whole there
/// are sums over the ranks.
pub fn differentiate_over(graph: &Graph, of: &str, how: Gradients, over: &[Axis]) -> Result<Graph, IrError> {
    let of_block = |(i, b)| split(b, &given_weights(graph, BlockId(i as u32)), how.recompute);
    let splits = graph.blocks().iter().enumerate().map(of_block).collect::<Result<Vec<_>, IrError>>()?;
    let mut next = splits.iter();
    let mut g = graph.rebuild(
        |b| Ok(next.next().map_or(b.clone(), |s| s.forward.clone())),
        |out, id, args| {
            let made = out.push(graph.node(id).op.clone(), args)?;
            let single = graph.node(id).types.len() == 1;
            if single && out.node(made).types.len() > 1 { out.part(made, 0) } else { Ok(made) }
        },
    )?;
    let arrived = |id: &NodeId| matches!(&g.node(*id).op, Op::RecvFrom(r) if r.ty.dtype.is_float());
    let arrived: Vec<NodeId> = g.ids().filter(arrived).collect();
    let backward: Vec<BlockId> = splits.iter().map(|s| g.add_block(s.backward.clone())).collect();
    let mut begins = cotangents_of_links(&mut g)?;
    match g.output(of) {
        Some(loss) => begins.push((loss, g.fill(loss, 1.0)?)),
        None if begins.is_empty() => {
            return Err(g.error(format!("there is no output `{of}` to differentiate")));
        }
        None => {}
    }
    let trained = |id: &NodeId| matches!(&g.node(*id).op, Op::Weight(w) if !w.fixed);
    let weights: Vec<NodeId> = g.ids().filter(trained).collect();
    let wide: HashSet<NodeId> = weights.iter().copied().collect();
    let walk = Walk { wide: &wide, ..Walk::default() };
    let wanted = [&weights[..], &arrived].concat();
    let mut grads = gradient_through(&mut g, &begins, &wanted, &walk, &mut |g, id, grads| {
        call_back(g, id, grads, &splits, &backward)
    })?;
    for (r, d) in arrived.iter().zip(grads.split_off(weights.len())) {
        send_back(&mut g, *r, d)?;
    }
    let keep = match how.to {
        Destination::Sums => Some(g.input(KEEP, DType::F32, vec![])?),
        _ => None,
    };
    for (w, d) in weights.iter().zip(grads) {
        let origin = g.node(*w).origin.clone();
        g.with_origin(&origin, |g| {
            let d = d.map(|d| summed(g, *w, d, over)).transpose()?;
            let d = summed_over_stages(g, *w, d)?;
            put_out(g, *w, d, how.to, keep)
        })?;
    }
    share_loss(&g)
}

/// What was sent to a later stage has a cotangent there, which comes back by the same link: (value, cotangent).
fn cotangents_of_links(g: &mut Graph) -> Result<Vec<(NodeId, NodeId)>, IrError> {
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

/// The cotangent of what a stage received goes to the one that sent it.
fn send_back(g: &mut Graph, received: NodeId, d: Option<NodeId>) -> Result<(), IrError> {
    let node = g.node(received).clone();
    let Op::RecvFrom(r) = &node.op else { return Ok(()) };
    let d = match d {
        Some(d) => d,
        None => g.constant(r.ty.clone(), 0.0)?,
    };
    let (over, label) = (r.over.clone(), format!("{GRAD}{}", r.label));
    let output = format!("send.{}.{label}", r.from);
    g.with_origin(&node.origin, |g| {
        let sent = g.push(SendTo { over, to: r.from, label }, &[d])?;
        g.note_sharding(sent, &node.sharding);
        g.set_output(&output, sent)
    })
}

/// The sum of the gradients that the stages of a weight have of it, in the order of the stages: each sends its own to the others.
fn summed_over_stages(g: &mut Graph, w: NodeId, d: Option<NodeId>) -> Result<Option<NodeId>, IrError> {
    let node = g.node(w).clone();
    let placed = node.sharding.iter().find(|(axis, _)| axis == STAGES);
    let (Some((_, Placement::Stages(stages))), Some((over, here))) = (placed, stage_of_graph(g)) else {
        return Ok(d);
    };
    if stages.len() < 2 {
        return Ok(d);
    }
    let d = match d {
        Some(d) => d,
        None => g.constant(g.ty(w).with(DType::F32), 0.0)?,
    };
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
        sum = Some(match sum {
            Some(sum) => g.add(sum, term)?,
            None => term,
        });
    }
    Ok(sum)
}

/// The axis of stages and which of them the graph is: what it sends and receives is noted to be there.
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

/// The gradient of a weight from what each rank's tokens give, along the axes where the weight is whole.
fn summed(g: &mut Graph, w: NodeId, d: NodeId, over: &[Axis]) -> Result<NodeId, IrError> {
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
    match axes.is_empty() {
        true => Ok(d),
        false => g.push(AllReduce { kind: ReduceOp::Sum, over: axes }, &[d]),
    }
}

/// Makes the gradient `d` of a weight an output, or the next version of its state.
fn put_out(
    g: &mut Graph,
    w: NodeId,
    d: Option<NodeId>,
    to: Destination,
    keep: Option<NodeId>,
) -> Result<(), IrError> {
    let ty = g.ty(w).with(DType::F32);
    let name = format!("{GRAD}{}", g.node(w).op.leaf_name().unwrap_or_default());
    let mut d = match d {
        Some(d) => d,
        None => g.constant(ty.clone(), 0.0)?,
    };
    if to != Destination::Results {
        let state = g.push(State { name: name.clone(), ty: ty.clone() }, &[])?;
        if let Some(keep) = keep {
            d = added(g, state, d, keep, &ty)?;
        }
        d = g.push(Store {}, &[state, d])?;
    }
    g.set_output(&name, d)
}

/// `d` on top of what the state holds. A state that held an infinity counts for nothing when it is not kept.
fn added(g: &mut Graph, state: NodeId, d: NodeId, keep: NodeId, ty: &Type) -> Result<NodeId, IrError> {
    let zero = g.constant(Type::scalar(DType::F32), 0.0)?;
    let kept = g.compare(CompareKind::Gt, keep, zero)?;
    let kept = g.broadcast(kept, &ty.shape)?;
    let none = g.constant(ty.clone(), 0.0)?;
    let before = g.select(kept, state, none)?;
    g.add(before, d)
}

/// Parameters of a block that every call binds to a weight.
fn given_weights(graph: &Graph, block: BlockId) -> HashSet<usize> {
    let params = 0..graph.block(block).params.len();
    let calls = || graph.nodes().iter().filter(|n| matches!(&n.op, Op::Call(c) if c.block == block));
    let weight = |id: &NodeId| matches!(graph.node(*id).op, Op::Weight(_));
    params.filter(|&p| calls().all(|n| n.args.get(p).is_some_and(weight))).collect()
}

/// Cotangents of a call's arguments: the gradient body called on what it needs.
fn call_back(
    g: &mut Graph,
    id: NodeId,
    grads: &[Option<NodeId>],
    splits: &[Split],
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
    let mut results = Vec::with_capacity(s.flows.len());
    let mut at = 0;
    for &flows in &s.flows {
        results.push(match flows {
            true => {
                at += 1;
                Some(g.part(call, at - 1)?)
            }
            false => None,
        });
    }
    Ok(results)
}

const SAVED: &str = "saved.";
const COTANGENT: &str = "d.";

fn name_index(name: &str, prefix: &str) -> Option<usize> {
    name.strip_prefix(prefix)?.parse().ok()
}

/// The forward body that saves and the gradient body that uses what was saved.
fn split(block: &Arc<Block>, weights: &HashSet<usize>, recompute: Recompute) -> Result<Split, IrError> {
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
    let float: Vec<NodeId> = params.iter().copied().filter(|p| body.ty(*p).dtype.is_float()).collect();
    let wide = weights.iter().map(|&p| params[p]).collect();
    let walk = Walk { wide: &wide, ..Walk::default() };
    let grads = gradient_through(&mut both, &pairs, &float, &walk, &mut refuse_calls)?;
    let by_leaf: HashMap<NodeId, Option<NodeId>> = float.into_iter().zip(grads).collect();
    let roots: Vec<Option<NodeId>> = params.iter().map(|p| by_leaf.get(p).copied().flatten()).collect();
    let worth = match recompute {
        Recompute::None => computed(&both, body),
        Recompute::Selective => worth_saving(&both, body),
        Recompute::Full => BTreeSet::new(),
    };
    let needed = needed(&both, &roots, &worth);
    let saved: Vec<NodeId> = needed.iter().copied().filter(|id| worth.contains(id)).collect();
    let mut forward = body.clone();
    for (i, id) in saved.iter().enumerate() {
        // The log-sum-exp may be asked for only by the gradient: then the forward body lacks its `part`.
        let here = match &both.node(*id).op {
            Op::Part(p) => forward.part(both.node(*id).args[0], p.index)?,
            _ => *id,
        };
        forward.set_output(&format!("{SAVED}{i}"), here)?;
    }
    let backward = backward_body(&both, &needed, &saved, block, &roots)?;
    Ok(Split {
        forward: Arc::new(Block { name: block.name.clone(), graph: forward, params: block.params.clone() }),
        backward: Arc::new(Block::new(&format!("{}.grad", block.name), backward)),
        outputs: outputs.len(),
        flows: roots.iter().map(Option::is_some).collect(),
    })
}

/// Values of the forward body that cost much to compute again; `both` begins with its nodes.
fn worth_saving(both: &Graph, body: &Graph) -> BTreeSet<NodeId> {
    let uses = Uses::of(body);
    let mut worth = BTreeSet::new();
    for id in both.ids() {
        match &both.node(id).op {
            Op::Dot(_) | Op::GroupedDot(_) if id.index() < body.nodes().len() => {
                worth.insert(id);
                worth.extend(uses.tail(body, id).last());
            }
            // What was sent once is not sent again.
            op if op.collective_axes().is_some()
                && id.index() < body.nodes().len()
                && both.node(id).types.len() == 1 =>
            {
                worth.insert(id);
                worth.extend(uses.tail(body, id).last());
            }
            Op::Part(p) => {
                let many = &both.node(both.node(id).args[0]).op;
                let sent =
                    matches!(many, Op::AllToAll(_)) && both.node(id).args[0].index() < body.nodes().len();
                if matches!(many, Op::Attention(_)) && p.index < 2 || matches!(many, Op::Route(_)) || sent {
                    worth.insert(id);
                }
            }
            _ => {}
        }
    }
    worth
}

/// Everything that the forward body computes, but views and casts of what is in memory anyway.
fn computed(both: &Graph, body: &Graph) -> BTreeSet<NodeId> {
    let forward = |id: NodeId| id.index() < body.nodes().len();
    let computes = |id: &NodeId| {
        let node = both.node(*id);
        match &node.op {
            Op::Part(_) => forward(node.args[0]),
            Op::Const(_) => false,
            op => forward(*id) && node.types.len() == 1 && op.leaf_name().is_none() && !is_free(both, *id),
        }
    };
    both.ids().filter(computes).collect()
}

/// Nodes that the gradient body holds: everything behind the roots, up to what is saved.
fn needed(both: &Graph, roots: &[Option<NodeId>], worth: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
    let mut needed = BTreeSet::new();
    let mut todo: Vec<NodeId> = roots.iter().flatten().copied().collect();
    while let Some(id) = todo.pop() {
        if needed.insert(id) && !worth.contains(&id) {
            todo.extend(&both.node(id).args);
        }
    }
    needed
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
