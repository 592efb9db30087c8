//! petgraph's algorithms on the graph as it is.

use crate::sample::every_op;
use astrai_ir::{DType, Dim, Graph, GraphView, NodeId};
use petgraph::algo::dominators::simple_fast;
use petgraph::visit::Reversed;

/// x, w, and x·wᵀ + neg(x·wᵀ).
fn diamond() -> (Graph, [NodeId; 5]) {
    let mut g = Graph::default();
    let x = g.input("x", DType::F32, vec![Dim::from(2), Dim::from(4)]).unwrap();
    let w = g.weight("w", DType::F32, &[4, 4]).unwrap();
    let y = g.linear(x, w).unwrap();
    let n = g.unary(astrai_ir::ops::UnaryKind::Neg, y).unwrap();
    let s = g.add(y, n).unwrap();
    g.set_output("s", s).unwrap();
    (g, [x, w, y, n, s])
}

#[test]
fn topological_order_puts_arguments_first() {
    let g = every_op();
    let view = GraphView::new(&g);
    let order = view.topological_order().unwrap();
    assert_eq!(order.len(), g.nodes().len());
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(i, id)| place[id.index()] = i);
    for id in g.ids() {
        assert!(view.predecessors(id).iter().all(|a| place[a.index()] < place[id.index()]));
        assert!(view.successors(id).iter().all(|u| view.predecessors(*u).contains(&id)));
    }
}

#[test]
fn reachability_and_dominators() {
    let (g, [x, w, y, n, s]) = diamond();
    let view = GraphView::new(&g);
    assert!(view.has_path(x, s) && !view.has_path(s, x) && !view.has_path(x, w));
    let after = simple_fast(&view, x);
    assert_eq!(after.immediate_dominator(s), Some(y));
    assert_eq!(after.immediate_dominator(w), None);
    let before = simple_fast(Reversed(&view), s);
    assert_eq!(before.immediate_dominator(x), Some(y));
    assert_eq!(before.immediate_dominator(n), Some(s));
}

#[test]
fn further_edges_order_nodes_or_make_a_cycle() {
    let (g, [x, w, _, _, s]) = diamond();
    let order = GraphView::with_edges(&g, &[(w, x)]).topological_order().unwrap();
    assert_eq!(order[..2], [w, x]);
    let cyclic = GraphView::with_edges(&g, &[(s, x)]);
    assert!(cyclic.has_path(s, x) && cyclic.topological_order().is_none());
}
