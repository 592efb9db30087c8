//! Reverse-mode differentiation of a graph. In: outputs with their cotangents, and the nodes to differentiate by. Out:
//! the cotangents of those, as new nodes of the same graph. The gradient rules (`vjp`) stand with the operators; here the graph
//! is traversed in reverse topological order and cotangents are accumulated.

use crate::DType;
use crate::graph::{Graph, IrError, NodeId};
use crate::op::{Cotangents, Vjp};
use crate::ops::{BinaryKind, Op, ScatterKind};
use std::collections::HashSet;
use std::sync::{Arc, LazyLock};

/// Cotangents of `wrt`, in their order; `None` where no output depends on the node. `outputs` pairs nodes with their
/// cotangents, which have the same types. A `call` on a differentiated path is an error: blocks are differentiated as blocks.
pub fn gradient(
    graph: &mut Graph,
    outputs: &[(NodeId, NodeId)],
    wrt: &[NodeId],
) -> Result<Vec<Option<NodeId>>, IrError> {
    gradient_with(graph, outputs, wrt, &GradientOptions::default(), &mut refuse_calls)
}

/// The call rule of graphs without calls: an error.
pub fn refuse_calls(graph: &mut Graph, id: NodeId, _: &[Option<NodeId>]) -> Cotangents {
    let Op::Call(c) = &graph.node(id).op else { return Ok(vec![]) };
    let name = graph.block(c.block).name.clone();
    Err(graph.error(format!(
        "the call of block `{name}` has no gradient here; differentiate the block, or inline its calls"
    )))
}

/// What differentiation does at particular nodes.
#[derive(Clone, Copy)]
pub struct GradientOptions<'a> {
    /// Leaves of narrow type whose cotangents are f32: cotangents are accumulated before anything is rounded.
    pub wide: &'a HashSet<NodeId>,
}

impl Default for GradientOptions<'_> {
    fn default() -> Self {
        static NONE: LazyLock<HashSet<NodeId>> = LazyLock::new(HashSet::new);
        GradientOptions { wide: &NONE }
    }
}

/// The gradient rule of a `call`: from the graph, the call and the cotangents of its outputs, the cotangents of its arguments.
pub type CallRule<'a> = dyn FnMut(&mut Graph, NodeId, &[Option<NodeId>]) -> Cotangents + 'a;

/// [`gradient`] with options, and with the gradient rule of `call` nodes.
pub fn gradient_with(
    graph: &mut Graph,
    outputs: &[(NodeId, NodeId)],
    wrt: &[NodeId],
    options: &GradientOptions,
    call: &mut CallRule,
) -> Result<Vec<Option<NodeId>>, IrError> {
    check(graph, outputs, wrt)?;
    let on_path = reached(graph, wrt);
    let grads = graph.nodes().iter().map(|n| vec![None; n.types.len()]).collect();
    let mut accumulators = Accumulators { grads, wide: options.wide };
    for &(y, cotangent) in outputs.iter().filter(|(y, _)| on_path[y.index()]) {
        accumulators.add(graph, y, 0, cotangent)?;
    }
    for i in (0..accumulators.grads.len()).rev() {
        let id = NodeId(i as u32);
        let inner = graph.node(id).args.iter().any(|a| on_path[a.index()]);
        if inner && accumulators.grads[i].iter().any(Option::is_some) {
            let origin: Arc<str> = match &*graph.node(id).origin {
                "" => "grad".into(),
                o => format!("{o}.grad").into(),
            };
            graph.with_origin(&origin, |g| accumulators.step(g, id, &on_path, call))?;
        }
    }
    Ok(wrt.iter().map(|w| accumulators.grads[w.index()][0]).collect())
}

fn check(graph: &Graph, outputs: &[(NodeId, NodeId)], wrt: &[NodeId]) -> Result<(), IrError> {
    let ids = outputs.iter().flat_map(|(y, c)| [y, c]).chain(wrt);
    for &id in ids {
        let node = graph.nodes().get(id.index());
        let node = node.ok_or_else(|| graph.error(format!("gradient: {id} does not exist")))?;
        if node.types.len() != 1 {
            return Err(graph.error(format!("gradient: {id} has several outputs; take a `part` of it")));
        }
    }
    for &(y, c) in outputs {
        let (ty, tc) = (graph.ty(y), graph.ty(c));
        if ty != tc || !ty.dtype.is_float() {
            return Err(graph.error(format!("gradient: the output {y} is {ty}, its cotangent {tc}")));
        }
    }
    Ok(())
}

/// For each node whether it is in `wrt`, or depends on one of `wrt` by a path without a `detach`.
fn reached(graph: &Graph, wrt: &[NodeId]) -> Vec<bool> {
    let mut on_path = vec![false; graph.nodes().len()];
    wrt.iter().for_each(|w| on_path[w.index()] = true);
    for id in graph.ids().filter(|id| !matches!(graph.node(*id).op, Op::Detach(_))) {
        if graph.node(id).args.iter().any(|a| on_path[a.index()]) {
            on_path[id.index()] = true;
        }
    }
    on_path
}

/// The cotangents accumulated so far: one for each output of each forward node.
struct Accumulators<'a> {
    grads: Vec<Vec<Option<NodeId>>>,
    wide: &'a HashSet<NodeId>,
}

impl Accumulators<'_> {
    fn add(&mut self, graph: &mut Graph, id: NodeId, output: usize, g: NodeId) -> Result<(), IrError> {
        let g = if self.wide.contains(&id) { widen(graph, g)? } else { g };
        let sum = match self.grads[id.index()][output] {
            Some(before) => plus(graph, before, g)?,
            None => g,
        };
        self.grads[id.index()][output] = Some(sum);
        Ok(())
    }

    /// Propagates the cotangents of `id` to its arguments by its gradient rule.
    fn step(
        &mut self,
        graph: &mut Graph,
        id: NodeId,
        on_path: &[bool],
        call: &mut CallRule,
    ) -> Result<(), IrError> {
        let grads = self.grads[id.index()].clone();
        let node = graph.node(id);
        let args = node.args.clone();
        match node.op.clone() {
            Op::Part(p) => match grads[0] {
                Some(g) => self.add(graph, args[0], p.index as usize, g),
                None => Ok(()),
            },
            Op::Call(_) => {
                let back = call(graph, id, &grads)?;
                self.accumulate(graph, &args, back, on_path)
            }
            op => {
                let outs: Result<Vec<NodeId>, IrError> =
                    (0..grads.len() as u32).map(|i| graph.part(id, i)).collect();
                let back = op.vjp(&mut Vjp { graph, args: &args, outs: &outs?, grads: &grads })?;
                self.accumulate(graph, &args, back, on_path)
            }
        }
    }

    /// Accumulates the cotangents that a gradient rule gives for the arguments.
    fn accumulate(
        &mut self,
        graph: &mut Graph,
        args: &[NodeId],
        back: Vec<Option<NodeId>>,
        on_path: &[bool],
    ) -> Result<(), IrError> {
        for (&a, g) in args.iter().zip(back).filter(|(a, _)| on_path[a.index()]) {
            let Some(g) = g else { continue };
            let wanted = match self.wide.contains(&a) {
                true => graph.ty(a).with(graph.ty(g).dtype),
                false => graph.ty(a).clone(),
            };
            if *graph.ty(g) != wanted {
                let (tg, ta) = (graph.ty(g), graph.ty(a));
                return Err(graph.error(format!("a gradient rule gives {tg} for an argument {ta}")));
            }
            self.add(graph, a, 0, g)?;
        }
        Ok(())
    }
}

/// a + b. A scatter-add into zeros on one side becomes a scatter-add into the other side, so that no table of zeros is made.
fn plus(graph: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId, IrError> {
    for (sum, rows) in [(a, b), (b, a)] {
        let node = graph.node(rows);
        if let Op::Scatter(s) = &node.op
            && s.kind == ScatterKind::Add
            && is_zero(graph, node.args[0])
        {
            let (op, args) = (node.op.clone(), [sum, node.args[1], node.args[2]]);
            return graph.push(op, &args);
        }
    }
    graph.add(a, b)
}

fn is_zero(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    match &node.op {
        Op::Const(c) => c.as_scalar() == Some(0.0),
        Op::Expand(_) | Op::Reshape(_) => is_zero(graph, node.args[0]),
        _ => false,
    }
}

/// A cotangent as f32. A final rounding that was made for a narrow leaf only is removed instead of being widened again.
fn widen(graph: &mut Graph, g: NodeId) -> Result<NodeId, IrError> {
    let (node, ty) = (graph.node(g), graph.ty(g).clone());
    if ty.dtype == DType::F32 {
        return Ok(g);
    }
    let (op, args) = (node.op.clone(), node.args.clone());
    match &op {
        Op::Cast(_) if graph.ty(args[0]).dtype == DType::F32 => Ok(args[0]),
        Op::Reshape(_) | Op::Permute(_) | Op::Expand(_) => {
            let x = widen(graph, args[0])?;
            graph.push(op, &[x])
        }
        Op::Binary(b) if b.kind == BinaryKind::Add => {
            let (x, y) = (widen(graph, args[0])?, widen(graph, args[1])?);
            graph.add(x, y)
        }
        Op::Scatter(s) if s.kind == ScatterKind::Add => {
            let (x, updates) = (widen(graph, args[0])?, widen(graph, args[2])?);
            graph.push(op, &[x, args[1], updates])
        }
        Op::Const(c) if c.as_scalar().is_some() => {
            graph.constant(ty.with(DType::F32), c.as_scalar().unwrap_or(0.0))
        }
        _ => graph.cast(g, DType::F32),
    }
}
