//! Inlining of calls. In: a graph with blocks. Out: a flat graph of the same values, for nested blocks, tests and hand-written
//! graphs; programs keep their blocks.

use crate::graph::{Graph, IrError, NodeId};
use crate::ops::{Call, Op};
use std::collections::HashMap;
use std::sync::Arc;

/// The graph with every call replaced by the nodes of its body: leaves of the body become the arguments, origins begin
/// with the origin of the call. Calls inside bodies are replaced too. Symbols of bodies join those of the graph.
pub fn inline_calls(graph: &Graph) -> Result<Graph, IrError> {
    let mut out = Graph::new(graph.symbols.clone());
    let outputs = copy(&mut out, graph, None, "")?;
    for ((name, _), id) in graph.outputs().iter().zip(outputs) {
        out.set_output(name, id)?;
    }
    Ok(out)
}

/// Copies the live nodes of `from`, in a body with leaves replaced by `bind`; returns the outputs.
fn copy(
    out: &mut Graph,
    from: &Graph,
    bind: Option<&HashMap<&str, NodeId>>,
    prefix: &str,
) -> Result<Vec<NodeId>, IrError> {
    let live = from.live();
    // A call becomes several nodes, every other node one.
    let mut map: Vec<Vec<NodeId>> = vec![Vec::new(); from.nodes().len()];
    for id in from.ids().filter(|id| live[id.index()]) {
        let node = from.node(id);
        let origin: Arc<str> = match (prefix, &*node.origin) {
            ("", _) => node.origin.clone(),
            (p, "") => p.into(),
            (p, o) => format!("{p}.{o}").into(),
        };
        let first = |a: &NodeId| map[a.index()][0];
        map[id.index()] = out.with_origin(&origin, |g| match (&node.op, bind) {
            (Op::Call(c), _) => {
                let args: Vec<NodeId> = node.args.iter().map(first).collect();
                body(g, from, c, &args, &origin)
            }
            (Op::Part(p), _) if matches!(from.node(node.args[0]).op, Op::Call(_)) => {
                Ok(vec![map[node.args[0].index()][p.index as usize]])
            }
            (op, Some(bind)) if op.leaf_name().is_some() => {
                let name = op.leaf_name().unwrap_or_default();
                let bound = bind.get(name).copied();
                bound
                    .map(|b| vec![b])
                    .ok_or_else(|| g.error(format!("leaf `{name}` is no parameter of its block")))
            }
            (op, _) => {
                let args: Vec<NodeId> = node.args.iter().map(first).collect();
                Ok(vec![g.push(op.clone(), &args)?])
            }
        })?;
    }
    Ok(from.outputs().iter().map(|(_, id)| map[id.index()][0]).collect())
}

/// Inlines one call; returns its outputs.
fn body(out: &mut Graph, from: &Graph, c: &Call, args: &[NodeId], at: &str) -> Result<Vec<NodeId>, IrError> {
    let block = from.block(c.block);
    for s in &block.graph.symbols {
        if out.symbols.iter().all(|o| o.name != s.name) {
            out.symbols.push(s.clone());
        }
    }
    let bind = block.params.iter().map(String::as_str).zip(args.iter().copied()).collect();
    copy(out, &block.graph, Some(&bind), at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Block, DType, Dim, Precision, Sizes, Tensor, eval, gradient};

    /// `twice(x, w) = (x·w, x + w)` inside `outer(x, w) = twice(twice(x, w)) `, called two times.
    fn nested() -> Result<Graph, IrError> {
        let shape = || vec![Dim::from(2)];
        let mut g = Graph::new(vec![]);
        let (x, w) = (g.input("x", DType::F32, shape())?, g.weight("w", DType::F32, &[2])?);
        let (p, s) = (g.mul(x, w)?, g.add(x, w)?);
        g.set_output("p", p)?;
        g.set_output("s", s)?;
        let inner = Arc::new(Block::new("twice", g));

        let mut g = Graph::new(vec![]);
        let (x, w) = (g.input("x", DType::F32, shape())?, g.weight("w", DType::F32, &[2])?);
        let block = g.add_block(inner);
        let c = g.scope("inner", |g| g.push(Call { block, layer: 0 }, &[x, w]))?;
        let (p, s) = (g.part(c, 0)?, g.part(c, 1)?);
        let d = g.push(Call { block, layer: 1 }, &[p, s])?;
        let y = g.part(d, 0)?;
        g.set_output("y", y)?;
        let outer = Arc::new(Block::new("outer", g));

        let mut g = Graph::new(vec![]);
        let (a, b) = (g.input("a", DType::F32, shape())?, g.weight("b", DType::F32, &[2])?);
        let block = g.add_block(outer);
        let y = g.scope("layers.0", |g| g.push(Call { block, layer: 0 }, &[a, b]))?;
        let y = g.scope("layers.1", |g| g.push(Call { block, layer: 1 }, &[y, b]))?;
        g.set_output("y", y)?;
        Ok(g)
    }

    #[test]
    fn values_stay_and_calls_go() {
        let g = nested().unwrap();
        let flat = inline_calls(&g).unwrap();
        assert!(!flat.nodes().iter().any(|n| matches!(n.op, Op::Call(_))));
        assert!(flat.nodes().iter().any(|n| &*n.origin == "layers.1.inner"), "{:?}", flat.nodes());
        let leaves = HashMap::from([
            ("a".to_string(), Tensor::f32(&[2], &[1.0, 2.0])),
            ("b".to_string(), Tensor::f32(&[2], &[3.0, -0.5])),
        ]);
        let run = |g: &Graph| eval(g, &leaves, &Sizes::new(), Precision::default()).unwrap();
        // y = a·b·(a + b): 12, -1.5; again: 12·3·15 = 540, -1.5·-0.5·-2 = -1.5
        assert_eq!(run(&flat)[0].1.reals(), [540.0, -1.5]);
        assert_eq!(run(&flat), run(&g));
    }

    #[test]
    fn a_call_has_no_gradient_with_stops_it_is_inlined() {
        let mut g = nested().unwrap();
        let (y, a) = (g.outputs()[0].1, NodeId(0));
        let one = g.fill(y, 1.0).unwrap();
        let e = gradient(&mut g, &[(y, one)], &[a]).unwrap_err();
        assert!(e.to_string().contains("layers.1.grad: the call of block `outer`"), "{e}");
        let mut flat = inline_calls(&g).unwrap();
        let y = flat.outputs()[0].1;
        let one = flat.fill(y, 1.0).unwrap();
        assert!(gradient(&mut flat, &[(y, one)], &[NodeId(0)]).unwrap()[0].is_some());
    }
}
