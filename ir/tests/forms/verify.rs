//! Laws that a graph can break although every `push` was checked.

use crate::sample::{every_op, layer, symbols, tokens};
use astrai_ir::ops::{Slice, UnaryKind};
use astrai_ir::{Block, DType, Dim, Graph, NodeId, Symbol, verify, verify_since};
use std::sync::Arc;

fn broken(g: &Graph) -> String {
    verify(g).unwrap_err().to_string()
}

fn with(block: Block) -> Graph {
    let mut g = Graph::new(symbols());
    g.add_block(Arc::new(block));
    g
}

#[test]
fn whole_graphs_pass() {
    verify(&every_op()).unwrap();
    verify(&layer().graph).unwrap();
    verify(&Graph::default()).unwrap();
}

#[test]
fn names_symbols_and_outputs() {
    let mut g = Graph::new(symbols());
    let x = g.input("x", DType::F32, vec![tokens()]).unwrap();
    g.scope("a.b", |g| g.input("x", DType::F32, vec![])).unwrap();
    assert_eq!(broken(&g), "a.b: %1 `input` has the name of %0");
    let mut g = Graph::new(symbols());
    g.scope("embed", |g| g.input("x", DType::F32, vec![Dim::symbol("pages")])).unwrap();
    assert_eq!(broken(&g), "embed: %0 `input` uses the symbol `pages`, which the graph does not declare");
    let mut g = Graph::new(symbols());
    g.input("x", DType::F32, vec![tokens()]).unwrap();
    g.push(Slice { axis: 0, start: Dim::symbol("pages"), len: Dim::from(1) }, &[x]).unwrap();
    assert!(broken(&g).contains("%1 `slice` uses the symbol `pages`"));
    let mut g = Graph::new(symbols());
    g.input("", DType::F32, vec![]).unwrap();
    assert!(broken(&g).contains("`` is no name for a leaf"));
    let mut g = Graph::new(symbols());
    g.set_output("y", NodeId(7)).unwrap();
    assert_eq!(broken(&g), "output `y` is %7, which does not exist");
    for (min, max, multiple_of) in [(0, 8, 1), (4, 2, 1), (1, 8, 0), (1, 8, 3), (2, 8, 4)] {
        let g = Graph::new(vec![Symbol { name: "t".into(), min, max, multiple_of }]);
        assert!(broken(&g).contains("symbol `t` wants 1 <= min <= max"));
    }
    assert!(broken(&Graph::new([symbols(), symbols()].concat())).contains("`tokens` is declared twice"));
    assert!(
        broken(&Graph::new(vec![Symbol { name: "2t".into(), ..symbols()[0].clone() }])).contains("no name")
    );
}

#[test]
fn several_outputs_are_no_result() {
    let mut g = every_op();
    let both = g.ids().find(|id| g.node(*id).op.name() == "attention").unwrap();
    g.set_output("both", both).unwrap();
    assert!(broken(&g).contains("is the output `both` and has several outputs; take a `part`"));
}

/// What stages of the compiler leave as it was is verified once; a copy that grows is its own.
#[test]
fn copies_share_until_one_of_them_grows() {
    let g = every_op();
    let mut copy = g.clone();
    assert!(copy.is_copy_of(&g));
    let before = g.nodes().len();
    let more = copy.input("more", DType::F32, vec![]).unwrap();
    assert!(!copy.is_copy_of(&g) && copy.nodes().len() == before + 1 && g.nodes().len() == before);
    verify_since(&copy, &g).unwrap();
    copy.set_output("more", NodeId(more.0 + 1)).unwrap();
    assert!(verify_since(&copy, &g).unwrap_err().to_string().contains("does not exist"));
    let mut blocks = with(layer());
    let changed = blocks.clone();
    let mut wrong = layer();
    wrong.params.push("x".into());
    blocks = blocks.with_blocks(vec![Arc::new(wrong)]).unwrap();
    assert!(verify_since(&blocks, &changed).unwrap_err().to_string().contains("listed twice"));
}

#[test]
fn bodies_keep_the_laws_too() {
    let mut b = layer();
    b.params.swap(0, 2);
    verify(&with(b)).unwrap();
    let mut b = layer();
    b.params.push("x".into());
    assert_eq!(broken(&with(b)), "in block `layer`: parameter `x` is listed twice");
    let mut b = layer();
    b.params.pop();
    assert_eq!(broken(&with(b)), "in block `layer`: leaf `w` of the body is no parameter");
    let mut b = layer();
    b.params[1] = "bias".into();
    assert_eq!(broken(&with(b)), "in block `layer`: parameter `bias` has no leaf in the body");
    let mut b = layer();
    let x = b.leaf("x").unwrap();
    b.graph.set_output("bad", NodeId(99)).unwrap();
    assert_eq!(broken(&with(b)), "in block `layer`: output `bad` is %99, which does not exist");
    let mut b = layer();
    b.graph.unary(UnaryKind::Neg, x).unwrap();
    b.graph.symbols.remove(1);
    assert!(broken(&with(b)).contains("in block `layer`: in block `residual`: the graph around it"));
    assert!(broken(&with(Block::new("empty", Graph::default()))).contains("the body has no output"));
    let mut g = with(layer());
    g.add_block(Arc::new(layer()));
    assert_eq!(broken(&g), "two blocks are called `layer`");
    let mut nested = layer();
    for i in 0..20 {
        let mut outer = layer();
        outer.name = format!("outer{i}");
        outer.graph.add_block(Arc::new(nested));
        nested = outer;
    }
    assert!(broken(&with(nested)).contains("nest more than 16 deep"));
}
