//! Weight folding: constant folding of expressions of weights alone. In: a graph whose weights are frozen. Out: the same values,
//! with each such expression (a product of two weights, a scaled weight) replaced by a derived weight, and the expressions, which
//! are evaluated when weights are loaded. Parameters and weights that have no user left are removed.

use astrai_ir::ops::{Call, Op, Weight};
use astrai_ir::{Block, BlockId, Graph, IrError, NodeId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// A derived weight: computed from other weights once, when they are loaded.
#[derive(Clone, Debug)]
pub struct Derived {
    /// Its name and type.
    pub weight: Weight,
    /// The expression: leaves are weights of the checkpoint, the only output is the value.
    pub graph: Graph,
}

/// An expression of weights alone in a body, and the parameter that replaces it.
struct Expression {
    at: NodeId,
    param: String,
    graph: Graph,
}

/// The graph with derived weights, and the derived weights.
pub fn fold(graph: &Graph) -> Result<(Graph, Vec<Derived>), IrError> {
    let mut of_block = Vec::new();
    for (i, block) in graph.blocks().iter().enumerate() {
        let bound = graph.params_bound_to_weights(BlockId(i as u32));
        let is_weight = |name: &str| block.params.iter().zip(&bound).any(|(p, weight)| *weight && p == name);
        of_block.push(expressions(&block.graph, &is_weight)?);
    }
    let of_graph = expressions(graph, &|_| true)?;
    if of_graph.is_empty() && of_block.iter().all(Vec::is_empty) {
        return Ok((graph.clone(), vec![]));
    }
    let blocks = graph.blocks().iter().zip(&of_block).map(|(b, found)| fold_block(b, found));
    let blocks = blocks.collect::<Result<Vec<_>, IrError>>()?;
    let mut derived = BTreeMap::new();
    let folded = graph.rebuild_with(blocks.clone(), |out, id, args| {
        match (&graph.node(id).op, of_graph.iter().find(|e| e.at == id)) {
            (_, Some(e)) => derive(&e.graph, out, &mut derived),
            (Op::Call(c), None) => {
                let at = c.block.0 as usize;
                let old = graph.block(c.block).params.iter().map(String::as_str);
                let bound: HashMap<&str, NodeId> = old.zip(args.iter().copied()).collect();
                let mut all = Vec::with_capacity(blocks[at].params.len());
                for p in &blocks[at].params {
                    all.push(match of_block[at].iter().find(|e| e.param == *p) {
                        Some(e) => derive(&substitute_params(&e.graph, out, &bound)?, out, &mut derived)?,
                        None => bound[p.as_str()],
                    });
                }
                out.push_exact(Call { block: c.block, layer: c.layer }.into(), &all)
            }
            (op, None) => out.push_exact(op.clone(), args),
        }
    })?;
    // Weights that only folded expressions used are dead now.
    Ok((crate::eliminate_dead_nodes(&folded)?, derived.into_values().collect()))
}

/// A block whose expressions are replaced by parameters, without the parameters that only they used.
fn fold_block(block: &Arc<Block>, found: &[Expression]) -> Result<Arc<Block>, IrError> {
    if found.is_empty() {
        return Ok(block.clone());
    }
    let g = &block.graph;
    let body = g.rebuild(|out, id, args| match found.iter().find(|e| e.at == id) {
        Some(e) => out.push(Weight::new(&e.param, g.ty(id).clone()), &[]),
        None => out.push_exact(g.node(id).op.clone(), args),
    })?;
    let body = crate::eliminate_dead_nodes(&body)?;
    let has = |p: &String| body.nodes().iter().any(|n| n.op.leaf_name() == Some(p));
    let params =
        block.params.iter().chain(found.iter().map(|e| &e.param)).filter(|p| has(p)).cloned().collect();
    Ok(Arc::new(Block { name: block.name.clone(), graph: body, params }))
}

/// The maximal expressions of weights and constants alone that compute something.
fn expressions(g: &Graph, given: &dyn Fn(&str) -> bool) -> Result<Vec<Expression>, IrError> {
    let live = g.live();
    let mut alone = vec![false; g.nodes().len()];
    let mut computes = vec![false; g.nodes().len()];
    let mut of_weight = vec![false; g.nodes().len()];
    for id in g.ids().filter(|id| live[id.index()]) {
        let node = g.node(id);
        let literal = node.types.len() == 1 && node.ty().shape.iter().all(|d| d.size().is_some());
        let args = || node.args.iter();
        alone[id.index()] = literal
            && match &node.op {
                Op::Weight(w) => given(&w.name),
                Op::Const(_) => true,
                // Codes stay as narrow as they are.
                Op::Call(_) | Op::Store(_) | Op::Random(_) | Op::Part(_) | Op::Dequant(_) => false,
                _ => !node.args.is_empty() && args().all(|a| alone[a.index()]),
            };
        let free = node.op.leaf_name().is_some() || matches!(node.op, Op::Const(_)) || is_view(g, id);
        of_weight[id.index()] = matches!(node.op, Op::Weight(_)) || args().any(|a| of_weight[a.index()]);
        computes[id.index()] = alone[id.index()] && (!free || args().any(|a| computes[a.index()]));
    }
    let users = g.users();
    let outputs: HashSet<NodeId> = g.outputs().iter().map(|(_, id)| *id).collect();
    let output = |id: NodeId| outputs.contains(&id);
    let mut found: Vec<Expression> = Vec::new();
    for id in g.ids().filter(|id| computes[id.index()] && of_weight[id.index()]) {
        let needed = |u: &NodeId| live[u.index()] && !alone[u.index()];
        if !output(id) && !users[id.index()].iter().any(needed) {
            continue;
        }
        // Views and widening casts stay with the user: they are free there and would enlarge the derived weight.
        let mut at = id;
        while is_view(g, at) {
            at = g.node(at).args[0];
        }
        if found.iter().all(|e| e.at != at) {
            let param = format!("derived.{}", found.len());
            found.push(Expression { at, param, graph: expression(g, at)? });
        }
    }
    Ok(found)
}

/// True for reshapes, broadcasts and widening casts.
fn is_view(g: &Graph, id: NodeId) -> bool {
    match &g.node(id).op {
        Op::Cast(c) => c.dtype.represents(g.ty(g.node(id).args[0]).dtype),
        Op::Reshape(_) | Op::Expand(_) => true,
        _ => false,
    }
}

/// The expression of a node as a graph of its own.
fn expression(g: &Graph, at: NodeId) -> Result<Graph, IrError> {
    let mut out = Graph::new(vec![]);
    let mut map: BTreeMap<NodeId, NodeId> = BTreeMap::new();
    for id in g.ancestors([at], |_, _| true) {
        let args: Vec<NodeId> = g.node(id).args.iter().map(|a| map[a]).collect();
        map.insert(id, out.push_exact(g.node(id).op.clone(), &args)?);
    }
    out.set_output("value", map[&at])?;
    Ok(out)
}

/// An expression over a block's parameters, as one over the weights that a call binds to them.
fn substitute_params(e: &Graph, outer: &Graph, bound: &HashMap<&str, NodeId>) -> Result<Graph, IrError> {
    e.rebuild(|g, id, args| {
        let op = &e.node(id).op;
        let leaf = op.leaf_name().and_then(|name| bound.get(name));
        g.push_exact(leaf.map_or(op, |l| &outer.node(*l).op).clone(), args)
    })
}

/// The leaf of a derived weight, whose name is a hash of its expression.
fn derive(e: &Graph, g: &mut Graph, derived: &mut BTreeMap<String, Derived>) -> Result<NodeId, IrError> {
    let mut hash = DefaultHasher::new();
    e.to_string().hash(&mut hash);
    let names: Vec<&str> = e.nodes().iter().filter_map(|n| n.op.leaf_name()).collect();
    let name = format!("derived.{:016x}({})", hash.finish(), names.join(", "));
    let weight = Weight::new(&name, e.ty(e.outputs()[0].1).clone());
    derived.entry(name).or_insert_with(|| Derived { weight: weight.clone(), graph: e.clone() });
    g.push(weight, &[])
}
