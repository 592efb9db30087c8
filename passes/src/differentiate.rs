//! Adds the gradient of a scalar output to a graph. In: a graph with calls of blocks and an output such as `loss`. Out: the
//! same outputs and `grad.<buffer>` for every weight. It works per block: each body becomes a forward body, which also puts
//! out what is saved, and a gradient body, which recomputes the rest. Saved are ends of dots and attention's result with its
//! log-sum-exp; norms and pointwise chains are recomputed.

use crate::regions::Uses;
use crate::share_loss::share_loss;
use astrai_ir::ops::{Call, Input, Op};
use astrai_ir::{Block, BlockId, Graph, IrError, NodeId, gradient, gradient_through};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Prefix of a gradient's output.
pub const GRAD: &str = "grad.";

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
pub fn differentiate(graph: &Graph, of: &str) -> Result<Graph, IrError> {
    let splits = graph.blocks().iter().map(split).collect::<Result<Vec<_>, IrError>>()?;
    let mut next = splits.iter();
    let mut g = graph.rebuild(
        |b| Ok(next.next().map_or(b.clone(), |s| s.forward.clone())),
        |out, id, args| {
            let made = out.push(graph.node(id).op.clone(), args)?;
            let single = graph.node(id).types.len() == 1;
            if single && out.node(made).types.len() > 1 { out.part(made, 0) } else { Ok(made) }
        },
    )?;
    let backward: Vec<BlockId> = splits.iter().map(|s| g.add_block(s.backward.clone())).collect();
    let loss = g.output(of).ok_or_else(|| g.error(format!("there is no output `{of}` to differentiate")))?;
    let weights: Vec<NodeId> = g.ids().filter(|id| matches!(g.node(*id).op, Op::Weight(_))).collect();
    let one = g.fill(loss, 1.0)?;
    let grads = gradient_through(&mut g, &[(loss, one)], &weights, &HashSet::new(), &mut |g, id, grads| {
        call_back(g, id, grads, &splits, &backward)
    })?;
    for (w, d) in weights.iter().zip(grads) {
        let d = match d {
            Some(d) => d,
            None => g.fill(*w, 0.0)?,
        };
        let name = g.node(*w).op.leaf_name().unwrap_or_default().to_string();
        g.set_output(&format!("{GRAD}{name}"), d)?;
    }
    share_loss(&g)
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
fn split(block: &Arc<Block>) -> Result<Split, IrError> {
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
    let grads = gradient(&mut both, &pairs, &float)?;
    let by_leaf: HashMap<NodeId, Option<NodeId>> = float.into_iter().zip(grads).collect();
    let roots: Vec<Option<NodeId>> = params.iter().map(|p| by_leaf.get(p).copied().flatten()).collect();
    let worth = worth_saving(&both, body);
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
            Op::Dot(_) if id.index() < body.nodes().len() => {
                worth.insert(id);
                worth.extend(uses.tail(body, id).last());
            }
            Op::Part(p) => {
                let many = &both.node(both.node(id).args[0]).op;
                if matches!(many, Op::Attention(_)) && p.index < 2 {
                    worth.insert(id);
                }
            }
            _ => {}
        }
    }
    worth
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
