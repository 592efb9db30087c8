//! petgraph's algorithms on the graph as it is.

use crate::sample::every_op;
use astrai_ir::{DType, Dim, Graph, GraphView, NodeId};
use petgraph::algo::{dominators::simple_fast, has_path_connecting, is_cyclic_directed, toposort};
use petgraph::visit::{NodeCount, NodeIndexable, Reversed};

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
    let order = toposort(&view, None).unwrap();
    assert_eq!(order.len(), view.node_count());
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(i, id)| place[view.to_index(*id)] = i);
    for id in g.ids() {
        assert!(view.args(id).iter().all(|a| place[a.index()] < place[id.index()]));
        assert!(view.users(id).iter().all(|u| view.args(*u).contains(&id)));
    }
    assert!(!is_cyclic_directed(&view));
}

#[test]
fn reachability_and_dominators() {
    let (g, [x, w, y, n, s]) = diamond();
    let view = GraphView::new(&g);
    assert!(has_path_connecting(&view, x, s, None));
    assert!(!has_path_connecting(&view, s, x, None));
    assert!(!has_path_connecting(&view, x, w, None));
    let after = simple_fast(&view, x);
    assert_eq!(after.immediate_dominator(s), Some(y));
    assert_eq!(after.immediate_dominator(w), None);
    let before = simple_fast(Reversed(&view), s);
    assert_eq!(before.immediate_dominator(x), Some(y));
    assert_eq!(before.immediate_dominator(n), Some(s));
}
