//! Effects as values. In: a graph whose states (and trained weights) have versions: the leaf, then the result of each `store`,
//! or of each call of a body that stores. Out: the writes, each with the version that it overwrites, and the anti-dependencies
//! (write after read): every reader of a version runs before the writer that overwrites it. The verifier checks that an order
//! of the nodes keeps both data dependencies and anti-dependencies.

use crate::block::Block;
use crate::graph::{Graph, IrError, Node, NodeId};
use crate::ops::Op;
use crate::view::GraphView;

/// The writes and anti-dependencies of a graph's live nodes; dead nodes never run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// (writer, version it overwrites), by writer.
    pub writes: Vec<(NodeId, NodeId)>,
    /// Anti-dependencies: (reader of a version, writer that overwrites it); the reader runs first. A view has no storage of its
    /// own, so a reader of a view of a version reads the version.
    pub anti_dependencies: Vec<(NodeId, NodeId)>,
}

/// The effects of a call of a block on its arguments.
struct BodyEffects {
    /// For each parameter whether the body overwrites it.
    writes: Vec<bool>,
    /// For each output whether it is a version of a state.
    returns_version: Vec<bool>,
}

type IsStore<'a> = &'a dyn Fn(&Node) -> bool;

impl Effects {
    /// The effects of a graph whose nodes, blocks and outputs are well formed. `Err` when something other than the newest
    /// version of a state is overwritten, or no order of the nodes reads every version before it is overwritten.
    pub fn of(graph: &Graph) -> Result<Effects, IrError> {
        Ok(Effects::scan(graph, &|n| n.op.name() == "store")?.0)
    }

    /// The effects, and for each node whether it is a version of a state.
    fn scan(graph: &Graph, is_store: IsStore) -> Result<(Effects, Vec<bool>), IrError> {
        let bodies: Result<Vec<BodyEffects>, IrError> =
            graph.blocks().iter().map(|b| BodyEffects::of(b, is_store)).collect();
        let bodies = bodies?;
        let versions: Vec<bool> = graph.ids().map(|id| is_version(graph, id, &bodies, is_store)).collect();
        let live = graph.live();
        let mut effects = Effects::default();
        let mut writer: Vec<Option<NodeId>> = vec![None; versions.len()];
        for id in graph.ids().filter(|id| live[id.index()]) {
            for v in overwritten(graph.node(id), &bodies, is_store) {
                if !versions[v.index()] {
                    return Err(graph.error_at(id, format!("overwrites {v}, which is no version of a state")));
                }
                if let Some(first) = writer[v.index()] {
                    let message = format!("overwrites {v}, which {first} overwrites; store to that");
                    return Err(graph.error_at(id, message));
                }
                if !is_store(graph.node(id)) && graph.node(id).args.iter().filter(|a| **a == v).count() > 1 {
                    return Err(
                        graph.error_at(id, format!("overwrites {v} and has it as another argument too"))
                    );
                }
                writer[v.index()] = Some(id);
                effects.writes.push((id, v));
            }
        }
        effects.find_anti_dependencies(graph, &live, &writer)?;
        effects.check_order(graph)?;
        Ok((effects, versions))
    }

    /// Fills `anti_dependencies`.
    fn find_anti_dependencies(
        &mut self,
        graph: &Graph,
        live: &[bool],
        writer: &[Option<NodeId>],
    ) -> Result<(), IrError> {
        // For each node the overwritten version that it is, or is a view of.
        let mut viewed: Vec<Option<NodeId>> = vec![None; writer.len()];
        for id in graph.ids().filter(|id| live[id.index()]) {
            let node = graph.node(id);
            for v in node.args.iter().filter_map(|a| viewed[a.index()]) {
                match writer[v.index()] {
                    Some(w) if w != id && self.anti_dependencies.last() != Some(&(id, w)) => {
                        self.anti_dependencies.push((id, w))
                    }
                    _ => {}
                }
            }
            viewed[id.index()] = match node.args.as_slice() {
                _ if writer[id.index()].is_some() => Some(id),
                [a] if node.op.is_view() => viewed[a.index()],
                _ => None,
            };
        }
        for (name, id) in graph.outputs() {
            if let Some((v, w)) = viewed[id.index()].and_then(|v| Some((v, writer[v.index()]?))) {
                let message = format!("is the output `{name}` and shows {v}, which {w} overwrites");
                return Err(graph.error_at(*id, message));
            }
        }
        Ok(())
    }

    /// `Ok` when some order of the nodes keeps data dependencies and anti-dependencies.
    fn check_order(&self, graph: &Graph) -> Result<(), IrError> {
        // The order of ids is one, where each reader comes before its writer.
        if self.anti_dependencies.iter().all(|(reader, writer)| reader < writer) {
            return Ok(());
        }
        let view = GraphView::with_edges(graph, &self.anti_dependencies);
        if view.topological_order().is_some() {
            return Ok(());
        }
        let cyclic = |(reader, writer): &&(NodeId, NodeId)| view.has_path(*writer, *reader);
        self.anti_dependencies.iter().find(cyclic).map_or(Ok(()), |(reader, writer)| {
            let message = format!("reads what {writer} overwrites, but cannot run before it");
            Err(graph.error_at(*reader, message))
        })
    }
}

impl BodyEffects {
    fn of(block: &Block, is_store: IsStore) -> Result<BodyEffects, IrError> {
        let (effects, versions) = Effects::scan(&block.graph, is_store)
            .map_err(|e| IrError { message: format!("in block `{}`: {}", block.name, e.message), ..e })?;
        let written = |p: &String| block.leaf(p).is_some_and(|l| effects.writes.iter().any(|(_, v)| *v == l));
        Ok(BodyEffects {
            writes: block.params.iter().map(written).collect(),
            returns_version: block.graph.outputs().iter().map(|(_, id)| versions[id.index()]).collect(),
        })
    }
}

fn is_version(graph: &Graph, id: NodeId, bodies: &[BodyEffects], is_store: IsStore) -> bool {
    let node = graph.node(id);
    let given = |op: &Op, i: usize| match op {
        Op::Call(c) => bodies[c.block.0 as usize].returns_version.get(i) == Some(&true),
        _ => false,
    };
    match &node.op {
        Op::State(_) | Op::Weight(_) => true,
        Op::Part(p) => given(&graph.node(node.args[0]).op, p.index as usize),
        op => is_store(node) || given(op, 0),
    }
}

/// Arguments whose storage the node overwrites.
fn overwritten(node: &Node, bodies: &[BodyEffects], is_store: IsStore) -> Vec<NodeId> {
    match &node.op {
        Op::Call(c) => {
            let writes = &bodies[c.block.0 as usize].writes;
            node.args.iter().zip(writes).filter(|(_, w)| **w).map(|(a, _)| *a).collect()
        }
        _ if is_store(node) => node.args.first().copied().into_iter().collect(),
        _ => vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Call, Scatter, ScatterKind, State, UnaryKind};
    use crate::{DType, Dim, Type};
    use std::sync::Arc;

    // `scatter` stands for a store here: like a store it makes the next version of its first argument.
    fn effects(g: &Graph) -> Result<Effects, String> {
        match Effects::scan(g, &|n| matches!(n.op, Op::Scatter(_))) {
            Ok((e, _)) => Ok(e),
            Err(e) => Err(e.to_string()),
        }
    }

    fn store(g: &mut Graph, x: NodeId, value: NodeId) -> NodeId {
        let i = g.input("i", DType::I32, vec![Dim::from(4)]).unwrap();
        g.push(Scatter { axis: 0, batch: 0, kind: ScatterKind::Set }, &[x, i, value]).unwrap()
    }

    fn state(g: &mut Graph, name: &str) -> NodeId {
        let ty = Type::new(DType::F32, [Dim::from(4)]);
        g.push(State { name: name.into(), ty }, &[]).unwrap()
    }

    #[test]
    fn readers_run_before_the_writer() {
        let mut g = Graph::default();
        let (s, x) = (state(&mut g, "s"), g.input("x", DType::F32, vec![Dim::from(4)]).unwrap());
        let next = store(&mut g, s, x);
        let late = g.unary(UnaryKind::Neg, s).unwrap();
        g.set_output("s", next).unwrap();
        assert_eq!(effects(&g).unwrap(), Effects { writes: vec![(next, s)], anti_dependencies: vec![] });
        g.set_output("y", late).unwrap();
        assert_eq!(effects(&g).unwrap().anti_dependencies, vec![(late, next)]);
        g.set_output("old", s).unwrap();
        assert!(effects(&g).unwrap_err().contains("output `old`"));
    }

    #[test]
    fn a_reader_that_needs_the_writer_is_refused() {
        let mut g = Graph::default();
        let (s, x) = (state(&mut g, "s"), g.input("x", DType::F32, vec![Dim::from(4)]).unwrap());
        let next = store(&mut g, s, x);
        let view = g.reshape(s, vec![Dim::from(2), Dim::from(2)]).unwrap();
        let flat = g.reshape(next, vec![Dim::from(2), Dim::from(2)]).unwrap();
        let sum = g.add(view, flat).unwrap();
        g.set_output("sum", sum).unwrap();
        let e = effects(&g).unwrap_err();
        assert_eq!(e, format!("{sum} `binary` reads what {next} overwrites, but cannot run before it"));
    }

    #[test]
    fn exchanged_states_have_no_order() {
        let mut g = Graph::default();
        let (a, b) = (state(&mut g, "a"), state(&mut g, "b"));
        let (na, nb) = (store(&mut g, a, b), store(&mut g, b, a));
        g.set_output("a", na).unwrap();
        g.set_output("b", nb).unwrap();
        assert!(effects(&g).unwrap_err().contains("cannot run before it"));
    }

    #[test]
    fn a_version_is_stored_once_and_only_versions_are() {
        let mut g = Graph::default();
        let (s, x) = (state(&mut g, "s"), g.input("x", DType::F32, vec![Dim::from(4)]).unwrap());
        let y = g.unary(UnaryKind::Neg, x).unwrap();
        let (p, q) = (store(&mut g, s, x), store(&mut g, s, y));
        g.set_output("p", p).unwrap();
        assert!(effects(&g).is_ok(), "a dead store does not run");
        g.set_output("q", q).unwrap();
        assert_eq!(
            effects(&g).unwrap_err(),
            format!("{q} `scatter` overwrites {s}, which {p} overwrites; store to that")
        );
        let mut g = Graph::default();
        let x = g.input("x", DType::F32, vec![Dim::from(4)]).unwrap();
        let p = store(&mut g, x, x);
        g.set_output("p", p).unwrap();
        assert!(effects(&g).unwrap_err().contains("no version of a state"));
    }

    #[test]
    fn calls_overwrite_what_their_bodies_store() {
        let mut body = Graph::default();
        let (s, x) = (state(&mut body, "s"), body.input("x", DType::F32, vec![Dim::from(4)]).unwrap());
        let next = store(&mut body, s, x);
        body.set_output("s", next).unwrap();
        let mut g = Graph::default();
        let block = g.add_block(Arc::new(Block::new("layer", body)));
        let (s, x) = (state(&mut g, "s"), g.input("x", DType::F32, vec![Dim::from(4)]).unwrap());
        let i = g.input("i", DType::I32, vec![Dim::from(4)]).unwrap();
        let one = g.push(Call { block, layer: 0 }, &[s, x, i]).unwrap();
        let two = g.push(Call { block, layer: 1 }, &[one, x, i]).unwrap();
        g.set_output("s", two).unwrap();
        assert_eq!(effects(&g).unwrap().writes, vec![(one, s), (two, one)]);
        let again = g.push(Call { block, layer: 2 }, &[s, x, i]).unwrap();
        g.set_output("again", again).unwrap();
        assert!(effects(&g).unwrap_err().contains("store to that"));
        let mut g2 = Graph::default();
        let block = g2.add_block(g.block(block).clone());
        let s = state(&mut g2, "s");
        let i = g2.input("i", DType::I32, vec![Dim::from(4)]).unwrap();
        let both = g2.push(Call { block, layer: 0 }, &[s, s, i]).unwrap();
        g2.set_output("s", both).unwrap();
        assert!(effects(&g2).unwrap_err().contains("another argument"));
    }
}
