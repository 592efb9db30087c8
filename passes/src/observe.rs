//! What the linear layers of one layer read. In: the graph of a model, a layer. Out: the graph of that layer alone, between what the layer
//! before gives and what it gives itself, which also puts out the Gram matrix of the inputs of each product with a weight, of experts one
//! for each of them: all that a solver has to know of inputs to round a weight for them.

use crate::adapt::linear;
use crate::quantise::experts;
use crate::{eliminate_dead_nodes, flatten, merge};
use astrai_ir::ops::{Call, Dot, GroupedOuter, Op};
use astrai_ir::{Block, Graph, IrError, NodeId};
use std::sync::Arc;

/// A layer by itself.
#[derive(Clone, Debug)]
pub struct Observed {
    /// Inputs: those of the model that it reads, and what the layer before gave under its [`carried`] name. Outputs: what it gives under its
    /// own, and for each of `tensors` the output [`gram`], f32 `[matrices * k, k]`, summed over tokens.
    pub graph: Graph,
    /// For each matrix of each Gram output the checkpoint tensors `[n, k]` that are multiplied by those inputs.
    pub tensors: Vec<Vec<Vec<String>>>,
}

/// A value that weights are multiplied by.
struct Read {
    x: NodeId,
    /// Where the rows of each expert begin, and how many there are.
    experts: Option<(NodeId, usize)>,
    /// The parameters that are those weights.
    params: Vec<String>,
}

/// Name of what a layer gives to the next.
pub fn carried(layer: u32) -> String {
    format!("carried.{layer}")
}

/// Name of the output that is the Gram matrix of the inputs of the tensors of this number.
pub fn gram(of: usize) -> String {
    format!("gram.{of}")
}

/// The layer of this number in a model's graph as it is built.
///
/// # Errors
/// There is none, or it gives more than one value.
pub fn observe(graph: &Graph, layer: u32) -> Result<Observed, IrError> {
    let mut graph = merge(&flatten(graph)?)?.without_outputs();
    let of_layer = |id: NodeId| match &graph.node(id).op {
        Op::Call(c) if c.layer == layer => Some((id, c.clone())),
        _ => None,
    };
    let found = graph.ids().find_map(of_layer).filter(|(id, _)| graph.node(*id).types.len() == 1);
    let (call, op) = found.ok_or_else(|| graph.error(format!("there is no layer {layer} of one value")))?;
    let block = graph.block(op.block);
    let (body, read) = with_grams(&block.graph)?;
    let weight = |param: &String| {
        let at = block.params.iter().position(|p| p == param)?;
        let Op::Weight(w) = &graph.node(*graph.node(call).args.get(at)?).op else { return None };
        Some(w.rows())
    };
    let tensors = |read: &Read| {
        let count = read.experts.map_or(1, |(_, count)| count);
        let mut all = vec![Vec::new(); count];
        for rows in read.params.iter().filter_map(weight) {
            let each = rows.len().div_ceil(count).max(1);
            all.iter_mut()
                .zip(rows.chunks(each))
                .for_each(|(to, r)| to.extend(r.iter().map(|r| r.name.clone())));
        }
        all
    };
    let tensors = read.iter().map(tensors).collect();
    let mut blocks = graph.blocks().to_vec();
    blocks[op.block.0 as usize] = Arc::new(Block { graph: body, ..(**block).clone() });
    graph.set_output(&carried(layer), call)?;
    let alone = graph.rebuild_with(blocks, |out, id, args| match &graph.node(id).op {
        Op::Call(Call { layer, .. }) if id != call => {
            let ty = graph.ty(id);
            out.input(&carried(*layer), ty.dtype, ty.shape.clone())
        }
        op @ Op::Call(_) => {
            let made = out.push_exact(op.clone(), args)?;
            out.part(made, 0)
        }
        op => out.push_exact(op.clone(), args),
    })?;
    let mut alone = eliminate_dead_nodes(&alone)?;
    if let Some(call) = alone.ids().find(|id| matches!(alone.node(*id).op, Op::Call(_))) {
        for i in 0..read.len() {
            let part = alone.part(call, i as u32 + 1)?;
            alone.set_output(&gram(i), part)?;
        }
    }
    Ok(Observed { graph: alone, tensors })
}

/// The body with an output more for each value that weights of linear layers or experts are multiplied by.
fn with_grams(body: &Graph) -> Result<(Graph, Vec<Read>), IrError> {
    let (users, mut read) = (body.users(), Vec::<Read>::new());
    for leaf in body.ids() {
        let (Op::Weight(w), Some(product)) = (&body.node(leaf).op, users[leaf.index()].first()) else {
            continue;
        };
        let args = &body.node(*product).args;
        let of_experts = match (linear(body, &users, leaf), experts(body, &users, leaf)) {
            (Some(_), _) => None,
            (None, Some(_)) => Some((args[2], body.ty(args[2]).shape[0].size().map_or(1, |n| n - 1))),
            (None, None) => continue,
        };
        match read.iter_mut().find(|r| r.x == args[0] && r.experts == of_experts) {
            Some(r) => r.params.push(w.name.clone()),
            None => read.push(Read { x: args[0], experts: of_experts, params: vec![w.name.clone()] }),
        }
    }
    let mut out = body.clone();
    for (i, &Read { x, experts, .. }) in read.iter().enumerate() {
        let contract = (0..out.ty(x).rank() - 1).map(|axis| (axis, axis)).collect();
        let sums = match experts {
            Some((offsets, _)) => out.push(GroupedOuter {}, &[x, x, offsets])?,
            None => out.push(Dot { batch: vec![], contract }, &[x, x])?,
        };
        out.set_output(&gram(i), sums)?;
    }
    Ok((out, read))
}
