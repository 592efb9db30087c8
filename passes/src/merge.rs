//! Horizontal fusion of sibling dots: dots of several weights on one input become one dot on the concatenated weight, and slices of
//! its result. In: a graph whose blocks have siblings (q|k|v|gate, gate|up). Out: the same values bit for bit (every output element
//! keeps its own sum) from fewer kernels. From here on the concatenated buffer is the storage; checkpoint names are rows of it.

use crate::eliminate_dead_nodes;
use astrai_ir::ops::{BinaryKind, Call, Dot, Op, Rows, Weight};
use astrai_ir::{Block, BlockId, Dim, Graph, IrError, Narrow, NodeId, Sharding, Storage, Type};
use std::collections::HashMap;
use std::sync::Arc;

/// Leaves that are concatenated: their names, and the name of the result.
struct Concatenation {
    names: Vec<String>,
    name: String,
}

/// One group of sibling dots in a graph.
struct Siblings {
    dots: Vec<NodeId>,
    weights: Vec<NodeId>,
    /// Where every dot feeds one addition of a bias: the additions and the bias leaves.
    biases: Option<(Vec<NodeId>, Vec<NodeId>)>,
}

/// How a leaf is stored, in each call of a block.
type Stored<'a> = dyn Fn(&Weight) -> Vec<Option<Narrow>> + 'a;

/// The graph with sibling dots merged in every block and at the top.
pub fn merge(graph: &Graph) -> Result<Graph, IrError> {
    merge_alike(graph, None)
}

/// The same, but for siblings whose weights are to be stored in different ways.
pub fn merge_alike(graph: &Graph, storage: Option<&Storage>) -> Result<Graph, IrError> {
    let of = |w: &Weight| storage.and_then(|s| s.of(w.rows().iter().map(|r| r.name.as_str())));
    let of_head = |w: &Weight| vec![of(w)];
    let weight = |id: NodeId| if let Op::Weight(w) = &graph.node(id).op { of(w) } else { None };
    let mut concatenations: Vec<Vec<Concatenation>> = Vec::new();
    let mut blocks: Vec<Arc<Block>> = Vec::new();
    let users = graph.users();
    for (i, block) in graph.blocks().iter().enumerate() {
        let bound = bound_to_weights(graph, &users, BlockId(i as u32));
        let at = |name: &str| block.params.iter().position(|p| p == name);
        let calls: Vec<_> = graph
            .nodes()
            .iter()
            .filter(|n| matches!(&n.op, Op::Call(c) if c.block.0 as usize == i))
            .collect();
        let stored =
            |w: &Weight| calls.iter().map(|n| at(&w.name).and_then(|at| weight(n.args[at]))).collect();
        let allowed = |name: &str| at(name).is_some_and(|at| bound[at]);
        let (body, done) = merge_siblings(&block.graph, &allowed, &stored)?;
        let params = after(&block.params, &done, String::clone, |j| Ok(j.name.clone()))?;
        let same = body.is_copy_of(&block.graph);
        let merged = || Arc::new(Block { name: block.name.clone(), graph: body, params });
        blocks.push(if same { block.clone() } else { merged() });
        concatenations.push(done);
    }
    if concatenations.iter().all(Vec::is_empty) {
        return Ok(merge_siblings(&graph.with_blocks(blocks)?, &|_| true, &of_head)?.0);
    }
    let outer = graph.rebuild_with(blocks, |out, id, args| match &graph.node(id).op {
        Op::Call(c) => {
            let (params, done) = (&graph.block(c.block).params, &concatenations[c.block.0 as usize]);
            let args = concatenate_args(out, params, done, args)?;
            out.push(Call { block: c.block, layer: c.layer }, &args)
        }
        op => out.push(op.clone(), args),
    })?;
    // Removes weights that only the replaced calls used.
    Ok(merge_siblings(&eliminate_dead_nodes(&outer)?, &|_| true, &of_head)?.0)
}

/// For each parameter of a block whether every call binds it to a weight that has no other user.
fn bound_to_weights(graph: &Graph, users: &[Vec<NodeId>], id: BlockId) -> Vec<bool> {
    let mut bound = graph.params_bound_to_weights(id);
    for node in graph.nodes().iter().filter(|n| matches!(&n.op, Op::Call(c) if c.block == id)) {
        bound.iter_mut().zip(&node.args).for_each(|(b, arg)| *b &= users[arg.index()].len() == 1);
    }
    bound
}

/// For parameters whose leaves were concatenated what `whole` makes of the result, in the position of the first leaf; for others what
/// `own` makes of them.
fn after<T>(
    params: &[String],
    concatenations: &[Concatenation],
    own: impl Fn(&String) -> T,
    mut whole: impl FnMut(&Concatenation) -> Result<T, IrError>,
) -> Result<Vec<T>, IrError> {
    let mut out = Vec::new();
    for p in params {
        match concatenations.iter().find(|j| j.names.contains(p)) {
            Some(j) if &j.names[0] == p => out.push(whole(j)?),
            Some(_) => {}
            None => out.push(own(p)),
        }
    }
    Ok(out)
}

/// Arguments of a call after its block's leaves were concatenated.
fn concatenate_args(
    g: &mut Graph,
    params: &[String],
    concatenations: &[Concatenation],
    args: &[NodeId],
) -> Result<Vec<NodeId>, IrError> {
    let by_name: HashMap<&String, NodeId> = params.iter().zip(args.iter().copied()).collect();
    after(
        params,
        concatenations,
        |p| by_name[p],
        |j| {
            let leaves: Vec<NodeId> = j.names.iter().map(|n| by_name[n]).collect();
            let made = g.push(concatenated_weight(g, &leaves)?, &[])?;
            let sharding = concatenated_sharding(g, &leaves);
            g.note_sharding(made, &sharding);
            Ok(made)
        },
    )
}

/// Merges every group of siblings whose weights are `allowed`.
fn merge_siblings(
    g: &Graph,
    allowed: &dyn Fn(&str) -> bool,
    stored: &Stored,
) -> Result<(Graph, Vec<Concatenation>), IrError> {
    let groups = find(g, allowed, stored);
    if groups.is_empty() {
        return Ok((eliminate_dead_nodes(g)?, vec![]));
    }
    let mut concatenations = Vec::new();
    let mut made: HashMap<NodeId, NodeId> = HashMap::new(); // member -> its slice in the new graph
    let mut first: HashMap<NodeId, usize> = HashMap::new();
    for (i, s) in groups.iter().enumerate() {
        let members = s.biases.as_ref().map_or(&s.dots, |(adds, _)| adds);
        members.iter().for_each(|m| _ = first.insert(*m, i));
    }
    let out = g.rebuild(|out, id, args| {
        let Some(&i) = first.get(&id) else { return out.push(g.node(id).op.clone(), args) };
        if let Some(done) = made.get(&id) {
            return Ok(*done);
        }
        let s = &groups[i];
        // The shared input precedes all of the dots: it is an argument of the first one, which is rebuilt here.
        let dot_args = match &s.biases {
            None => args.to_vec(),
            Some(_) => {
                let dot = args.iter().find(|a| matches!(out.node(**a).op, Op::Dot(_)));
                dot.map(|d| out.node(*d).args.clone()).unwrap_or_default()
            }
        };
        let slices = merged_dot(g, out, s, dot_args[0], &mut concatenations)?;
        let members = s.biases.as_ref().map_or(&s.dots, |(adds, _)| adds);
        made.extend(members.iter().copied().zip(slices));
        Ok(made[&id])
    })?;
    // Removes the separate dots.
    Ok((eliminate_dead_nodes(&out)?, concatenations))
}

/// One dot on the concatenated weight, plus the concatenated bias, and each member's slice of the result.
fn merged_dot(
    g: &Graph,
    out: &mut Graph,
    s: &Siblings,
    x: NodeId,
    concatenations: &mut Vec<Concatenation>,
) -> Result<Vec<NodeId>, IrError> {
    let origin = common_origin(g, &s.dots);
    out.with_origin(&origin, |out| {
        let w = concatenate_leaves(g, out, &s.weights, concatenations)?;
        let mut y = out.linear(x, w)?;
        if let Some((_, leaves)) = &s.biases {
            let b = concatenate_leaves(g, out, leaves, concatenations)?;
            y = out.add(y, b)?;
        }
        let axis = out.ty(y).rank() - 1;
        let mut start = Dim::from(0);
        let mut slices = Vec::new();
        for &d in &s.dots {
            let len = g.ty(d).shape[axis].clone();
            let end = &start + &len;
            slices.push(out.slice(y, axis, start, len)?);
            start = end;
        }
        Ok(slices)
    })
}

/// A leaf for the concatenation of these leaves of `g` along rows.
fn concatenate_leaves(
    g: &Graph,
    out: &mut Graph,
    leaves: &[NodeId],
    concatenations: &mut Vec<Concatenation>,
) -> Result<NodeId, IrError> {
    let weight = concatenated_weight(g, leaves)?;
    let names = leaves.iter().filter_map(|l| g.node(*l).op.leaf_name().map(str::to_string)).collect();
    concatenations.push(Concatenation { names, name: weight.name.clone() });
    let made = out.push(weight, &[])?;
    out.note_sharding(made, &concatenated_sharding(g, leaves));
    Ok(made)
}

/// The concatenation of these weights along rows.
fn concatenated_weight(g: &Graph, leaves: &[NodeId]) -> Result<Weight, IrError> {
    let frozen = leaves.iter().all(|l| is_frozen(&g.node(*l).op));
    let mut parts: Vec<Rows> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for &l in leaves {
        let Op::Weight(w) = &g.node(l).op else {
            return Err(g.error("only weights can be concatenated".into()));
        };
        parts.extend(w.rows());
        names.push(&w.name);
    }
    let rows: usize = parts.iter().map(|p| p.rows).sum();
    let mut ty: Type = g.ty(leaves[0]).clone();
    ty.shape[0] = Dim::from(rows);
    Ok(Weight { parts, frozen, ..Weight::new(&merged_name(&names), ty) })
}

/// The sharding of the concatenated weight: that of its parts, if all are sharded alike.
fn concatenated_sharding(g: &Graph, leaves: &[NodeId]) -> Sharding {
    let first = &g.node(leaves[0]).sharding;
    let alike = leaves.iter().all(|l| g.node(*l).sharding == *first);
    if alike { first.clone() } else { Sharding::new() }
}

/// `attn.{q_proj,k_proj}.weight` for names that differ in one dotted part; `a+b` otherwise.
fn merged_name(names: &[&str]) -> String {
    let split: Vec<Vec<&str>> = names.iter().map(|n| n.split('.').collect()).collect();
    let n = split[0].len();
    let same_len = split.iter().all(|s| s.len() == n);
    let differ: Vec<usize> =
        (0..n).filter(|&i| same_len && split.iter().any(|s| s[i] != split[0][i])).collect();
    let [at] = differ.as_slice() else { return names.join("+") };
    let mut parts: Vec<String> = split[0].iter().map(|s| s.to_string()).collect();
    parts[*at] = format!("{{{}}}", split.iter().map(|s| s[*at]).collect::<Vec<_>>().join(","));
    parts.join(".")
}

fn common_origin(g: &Graph, nodes: &[NodeId]) -> Arc<str> {
    let origins: Vec<&str> = nodes.iter().map(|d| &*g.node(*d).origin).collect();
    merged_name(&origins).into()
}

/// Groups of two or more plain dots of weights on one input.
fn find(g: &Graph, allowed: &dyn Fn(&str) -> bool, stored: &Stored) -> Vec<Siblings> {
    let users = g.users();
    let mut by_input: Vec<(NodeId, Vec<NodeId>)> = Vec::new();
    for id in g.ids() {
        let node = g.node(id);
        let Op::Dot(Dot { batch, contract }) = &node.op else { continue };
        let (x, w) = (node.args[0], node.args[1]);
        let rank = g.ty(x).rank();
        let Op::Weight(leaf) = &g.node(w).op else { continue };
        // A router's logits stay f32 where its siblings are narrow, so its dot is not merged.
        let routes = users[id.index()].iter().any(|u| matches!(g.node(*u).op, Op::Route(_)));
        let plain = batch.is_empty() && *contract == [(rank - 1, 1)] && g.ty(w).rank() == 2 && !routes;
        if !plain
            || leaf.keeps_type
            || leaf.skip_zero_grad
            || users[w.index()].len() != 1
            || is_output(g, w)
            || !allowed(&leaf.name)
        {
            continue;
        }
        // The parts of a concatenated weight must be sharded alike, trained alike and stored alike.
        let alike = |dots: &[NodeId]| {
            let first = g.node(g.node(dots[0]).args[1]);
            let same = matches!(&first.op, Op::Weight(w) if stored(w) == stored(leaf));
            first.sharding == g.node(w).sharding && is_frozen(&first.op) == leaf.frozen && same
        };
        match by_input.iter_mut().find(|(i, dots)| *i == x && alike(dots)) {
            Some((_, dots)) => dots.push(id),
            None => by_input.push((x, vec![id])),
        }
    }
    by_input.retain(|(_, dots)| dots.len() > 1);
    let group = |(_, dots): (NodeId, Vec<NodeId>)| {
        let weights = dots.iter().map(|d| g.node(*d).args[1]).collect();
        let biases = dots.iter().map(|d| bias_of(g, &users, *d, allowed)).collect::<Option<Vec<_>>>();
        Siblings { dots, weights, biases: biases.map(|b| b.into_iter().unzip()) }
    };
    by_input.into_iter().map(group).collect()
}

fn is_frozen(op: &Op) -> bool {
    matches!(op, Op::Weight(w) if w.frozen)
}

fn is_output(g: &Graph, id: NodeId) -> bool {
    g.outputs().iter().any(|(_, o)| *o == id)
}

/// The addition of a one-dimensional weight that is the only use of this dot, and that weight.
fn bias_of(
    g: &Graph,
    users: &[Vec<NodeId>],
    dot: NodeId,
    allowed: &dyn Fn(&str) -> bool,
) -> Option<(NodeId, NodeId)> {
    let [add] = users[dot.index()].as_slice() else { return None };
    let node = g.node(*add);
    let Op::Binary(b) = &node.op else { return None };
    let mut leaf = *node.args.iter().find(|a| **a != dot)?;
    let last = g.ty(dot).shape.last()?;
    // The bias must be broadcast along rows only and have no other user, since the separate leaf is removed.
    while users[leaf.index()].len() == 1
        && matches!(g.node(leaf).op, Op::Reshape(_) | Op::Expand(_))
        && g.ty(leaf).shape.last() == Some(last)
    {
        leaf = g.node(leaf).args[0];
    }
    let Op::Weight(w) = &g.node(leaf).op else { return None };
    let own = users[leaf.index()].len() == 1 && !is_output(g, leaf) && !is_output(g, dot);
    let ok = b.kind == BinaryKind::Add && g.ty(leaf).rank() == 1 && own && allowed(&w.name);
    let alike = !w.keeps_type && w.frozen == is_frozen(&g.node(g.node(dot).args[1]).op);
    (ok && alike && g.ty(leaf).shape[0] == *last).then_some((*add, leaf))
}
