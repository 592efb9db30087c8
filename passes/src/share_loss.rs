//! Computes the logits of a loss once. In: a graph in which a cross-entropy and its gradient are both live. Out: the same
//! values, with the losses taken from the gradient operator, which computes them anyway, wherever its cotangent does not
//! depend on them.

use astrai_ir::ops::{LinearCrossEntropyGrad, Op};
use astrai_ir::{Graph, GraphView, IrError, NodeId};

/// The output of the gradient operator from which on those of the forward operator follow.
const RESULTS: u32 = 2;

/// The graph in which the losses of every differentiated cross-entropy come from its gradient operator.
pub fn share_loss(graph: &Graph) -> Result<Graph, IrError> {
    let mut g = graph.clone();
    while let Some((forward, gradient)) = find_pair(&g) {
        g = replace_forward(&g, forward, gradient)?;
    }
    Ok(g)
}

/// A live cross-entropy and its live gradient on the same arguments, where the cotangent does not depend on the losses.
fn find_pair(g: &Graph) -> Option<(NodeId, NodeId)> {
    let live = g.live();
    let found = |id: &NodeId| live[id.index()];
    let gradients = g.ids().filter(|id| found(id) && matches!(g.node(*id).op, Op::LinearCrossEntropyGrad(_)));
    let forward = |gradient: NodeId| {
        let node = g.node(gradient);
        let Op::LinearCrossEntropyGrad(LinearCrossEntropyGrad { forward }) = &node.op else { return None };
        let same =
            |n: &astrai_ir::Node| n.op == Op::LinearCrossEntropy(forward.clone()) && n.args == node.args[..3];
        Some((g.ids().filter(found).find(|id| same(g.node(*id)))?, gradient))
    };
    let mut pairs = gradients.filter_map(forward).peekable();
    pairs.peek()?;
    let view = GraphView::new(g);
    // No cotangent may wait for the losses, which would wait for the gradient operator.
    pairs.find(|(forward, gradient)| g.node(*gradient).args[3..].iter().all(|d| !view.has_path(*forward, *d)))
}

/// The graph in which users of `forward` take the losses of `gradient`, which is moved before the first of these users.
fn replace_forward(g: &Graph, forward: NodeId, gradient: NodeId) -> Result<Graph, IrError> {
    let mut out = Graph::new(g.symbols.clone());
    for b in g.blocks() {
        out.add_block(b.clone());
    }
    let live = g.live();
    let mut map: Vec<Option<NodeId>> = vec![None; g.nodes().len()];
    for id in g.ids().filter(|id| live[id.index()] && *id != forward) {
        // Arguments may come later in the old order: missing ones are pushed first.
        let mut todo = vec![id];
        while let Some(&at) = todo.last() {
            let node = g.node(at);
            let part = match &node.op {
                _ if at == forward => Some(0),
                Op::Part(p) if node.args[0] == forward => Some(p.index),
                _ => None,
            };
            let before = if part.is_some() { vec![gradient] } else { node.args.clone() };
            let missing: Vec<NodeId> = before.iter().copied().filter(|a| map[a.index()].is_none()).collect();
            if !missing.is_empty() && map[at.index()].is_none() {
                todo.extend(missing.into_iter().rev());
                continue;
            }
            todo.pop();
            if map[at.index()].is_some() {
                continue;
            }
            let args: Vec<NodeId> = before.iter().filter_map(|a| map[a.index()]).collect();
            let made = out.with_origin(&node.origin, |out| match part {
                Some(i) => out.part(args[0], RESULTS + i),
                None => out.push_exact(node.op.clone(), &args),
            })?;
            out.note_sharding(made, &node.sharding);
            map[at.index()] = Some(made);
        }
    }
    for (name, id) in g.outputs() {
        let made = map[id.index()].ok_or_else(|| g.error(format!("output `{name}` was not rebuilt")))?;
        out.set_output(name, made)?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use astrai_ir::ops::{LinearCrossEntropy, ReduceKind};
    use astrai_ir::{DType, Dim, Precision, Real, Sizes, Tensor, eval};
    use std::collections::HashMap;

    /// Losses of two heads on one hidden state, each with its gradient; `coupled` makes a cotangent of the losses.
    fn graph(coupled: bool) -> Graph {
        let mut g = Graph::new(vec![]);
        let h = g.input("h", DType::F32, vec![Dim::from(2), Dim::from(3)]).unwrap();
        let t = g.input("t", DType::I32, vec![Dim::from(2)]).unwrap();
        let forward = LinearCrossEntropy { label_smoothing: Real(0.1), softcap: None, statistics: false };
        for i in 0..2 {
            let w = g.input(&format!("w{i}"), DType::F32, vec![Dim::from(4), Dim::from(3)]).unwrap();
            let losses = g.push(forward.clone(), &[h, w, t]).unwrap();
            let sum = g.reduce(ReduceKind::Sum, losses, &[0]).unwrap();
            g.set_output(&format!("loss{i}"), sum).unwrap();
            g.set_output(&format!("losses{i}"), losses).unwrap();
            let grad = if coupled { losses } else { g.fill(losses, 0.5).unwrap() };
            let op = LinearCrossEntropyGrad { forward: forward.clone() };
            let both = g.push(op, &[h, w, t, grad]).unwrap();
            let dw = g.part(both, 1).unwrap();
            g.set_output(&format!("dw{i}"), dw).unwrap();
        }
        g
    }

    fn values(g: &Graph) -> Vec<(String, Tensor)> {
        let fill = |n: usize, step: f64| (0..n).map(|i| (i as f64 * step).sin()).collect();
        let leaves = HashMap::from([
            ("h".into(), Tensor::float(DType::F32, &[2, 3], fill(6, 1.3))),
            ("w0".into(), Tensor::float(DType::F32, &[4, 3], fill(12, 0.7))),
            ("w1".into(), Tensor::float(DType::F32, &[4, 3], fill(12, 2.1))),
            ("t".into(), Tensor::int(DType::I32, &[2], vec![3, 0])),
        ]);
        eval(g, &leaves, &Sizes::new(), Precision::default()).unwrap()
    }

    fn forwards(g: &Graph) -> usize {
        let live = g.live();
        g.ids().filter(|id| live[id.index()] && matches!(g.node(*id).op, Op::LinearCrossEntropy(_))).count()
    }

    #[test]
    fn losses_come_from_the_gradients_node() {
        let before = graph(false);
        let after = share_loss(&before).unwrap();
        assert_eq!((forwards(&before), forwards(&after)), (2, 0));
        assert_eq!(values(&before), values(&after));
    }

    #[test]
    fn a_cotangent_of_the_losses_keeps_them() {
        let before = graph(true);
        assert_eq!(forwards(&share_loss(&before).unwrap()), 2);
    }

    /// The first loss scales the second's cotangent and the other way round: only one of them can wait.
    #[test]
    fn no_circle_is_made() {
        let mut g = graph(false);
        let losses = [g.output("losses0").unwrap(), g.output("losses1").unwrap()];
        let args = |g: &Graph, i: usize| g.node(losses[i]).args.clone();
        for i in 0..2 {
            let Op::LinearCrossEntropy(forward) = g.node(losses[i]).op.clone() else { unreachable!() };
            let args = [args(&g, i), vec![losses[1 - i]]].concat();
            let both = g.push(LinearCrossEntropyGrad { forward }, &args).unwrap();
            let dh = g.part(both, 0).unwrap();
            g.set_output(&format!("dh{i}"), dh).unwrap();
        }
        let outputs: Vec<(String, NodeId)> =
            g.outputs().iter().filter(|(n, _)| !n.starts_with("dw")).cloned().collect();
        let mut only = Graph::new(vec![]);
        let mut map = vec![];
        for n in g.nodes() {
            let args: Vec<NodeId> = n.args.iter().map(|a: &NodeId| map[a.index()]).collect();
            map.push(only.push_exact(n.op.clone(), &args).unwrap());
        }
        outputs.iter().for_each(|(n, id)| only.set_output(n, map[id.index()]).unwrap());
        let after = share_loss(&only).unwrap();
        assert_eq!((forwards(&only), forwards(&after)), (2, 1));
        assert_eq!(values(&only), values(&after));
    }
}
