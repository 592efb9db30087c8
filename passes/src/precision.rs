//! Chooses what is stored in which type. In: a graph whose arithmetic is all f32. Out: the same graph with narrow weights,
//! narrow residual stream and narrow operands and results of dots and attention and of the loss, each rounding an explicit cast;
//! pointwise arithmetic, sums and statistics stay f32.

use crate::regions::Uses;
use astrai_ir::ops::{Call, Input, Op, Weight};
use astrai_ir::{Block, DType, Graph, IrError, NodeId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Which types are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Type of weights and activations in memory; f32 changes nothing.
    pub storage: DType,
}

/// The graph with `policy.storage` in memory.
pub fn precision(graph: &Graph, policy: Policy) -> Result<Graph, IrError> {
    if policy.storage == DType::F32 {
        return Ok(graph.clone());
    }
    let narrow_block = |b: &Arc<Block>| {
        let stream = |name: &str| b.graph.output(name).is_some();
        let graph = narrow(&b.graph, policy.storage, &stream, true)?;
        Ok(Arc::new(Block { name: b.name.clone(), graph, params: b.params.clone() }))
    };
    let blocks = graph.blocks().iter().map(narrow_block).collect::<Result<Vec<_>, IrError>>()?;
    let mut next = blocks.into_iter();
    let with_blocks = |b: &Arc<Block>| Ok(next.next().unwrap_or_else(|| b.clone()));
    rebuild(graph, policy.storage, &|_| false, false, with_blocks)
}

fn narrow(g: &Graph, to: DType, stream: &dyn Fn(&str) -> bool, outputs: bool) -> Result<Graph, IrError> {
    rebuild(g, to, stream, outputs, |b| Ok(b.clone()))
}

fn rebuild(
    g: &Graph,
    to: DType,
    stream: &dyn Fn(&str) -> bool,
    narrow_outputs: bool,
    on_block: impl FnMut(&Arc<Block>) -> Result<Arc<Block>, IrError>,
) -> Result<Graph, IrError> {
    let rounded = rounding_points(g);
    let outs: BTreeSet<NodeId> = g.outputs().iter().map(|(_, id)| *id).collect();
    g.rebuild(on_block, |out, id, args| {
        let node = g.node(id);
        let made = match &node.op {
            Op::Weight(w) if w.ty.dtype == DType::F32 => {
                let w = out.push(Weight { ty: w.ty.with(to), ..w.clone() }, &[])?;
                return out.cast(w, DType::F32);
            }
            Op::Input(i) if i.ty.dtype == DType::F32 && stream(&i.name) => {
                let x = out.push(Input { name: i.name.clone(), ty: i.ty.with(to) }, &[])?;
                return out.cast(x, DType::F32);
            }
            Op::Gather(op) => {
                // Rows are picked before they are widened.
                match stored(out, args[0], to) {
                    Some(narrow) => {
                        let rows = out.push(op.clone(), &[narrow, args[1]])?;
                        return out.cast(rows, DType::F32);
                    }
                    None => out.push(op.clone(), args)?,
                }
            }
            Op::Call(c) => return call(out, c, args, to),
            Op::Dot(d) => {
                // A narrow left side is what matrix units multiply; the sums stay f32.
                let left = match stored(out, args[0], to) {
                    Some(_) => args[0],
                    None => {
                        let narrow = out.cast(args[0], to)?;
                        out.cast(narrow, DType::F32)?
                    }
                };
                out.push(d.clone(), &[left, args[1]])?
            }
            Op::LinearCrossEntropy(op) if to == DType::BF16 => {
                // Narrow hidden states and weights say that the logits' gradient is narrow too.
                let mut args = args.to_vec();
                for a in &mut args[..2] {
                    *a = match stored(out, *a, to) {
                        Some(narrow) => narrow,
                        None => out.cast(*a, to)?,
                    };
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

/// A call with its arguments in the types that the block's parameters have now; its result widened.
fn call(out: &mut Graph, c: &Call, args: &[NodeId], to: DType) -> Result<NodeId, IrError> {
    let block = out.block(c.block).clone();
    let mut bound = Vec::with_capacity(args.len());
    for (&a, want) in args.iter().zip(block.param_types()?) {
        bound.push(match out.ty(a).dtype == want.dtype {
            true => a,
            false => match stored(out, a, want.dtype) {
                Some(narrow) => narrow,
                None => out.cast(a, want.dtype)?,
            },
        });
    }
    let y = out.push(c.clone(), &bound)?;
    match out.node(y).types.as_slice() {
        [one] if one.dtype == to => out.cast(y, DType::F32),
        _ => Ok(y),
    }
}

/// The value of which `id` is the widened form.
fn stored(g: &Graph, id: NodeId, dtype: DType) -> Option<NodeId> {
    let node = g.node(id);
    let x = *node.args.first()?;
    (matches!(node.op, Op::Cast(_)) && g.node(x).types.len() == 1 && g.ty(x).dtype == dtype).then_some(x)
}

/// Nodes whose value goes to memory as f32 unless it is rounded: ends of dots, results and arguments of attention.
fn rounding_points(g: &Graph) -> BTreeSet<NodeId> {
    let uses = Uses::of(g);
    let mut points = BTreeSet::new();
    for id in g.ids() {
        match &g.node(id).op {
            Op::Dot(_) => {
                let end = *uses.tail(g, id).last().unwrap_or(&id);
                if !uses.is_output(end) {
                    points.insert(end);
                }
            }
            Op::Attention(_) => {
                points.extend(g.node(id).args[..3].iter().map(|&a| base(g, a)));
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

/// The node that views look at.
fn base(g: &Graph, mut id: NodeId) -> NodeId {
    while g.node(id).op.is_view() {
        id = g.node(id).args[0];
    }
    id
}
