//! The text and DOT forms.

use crate::sample::{every_op, layer, symbols, tokens};
use astrai_ir::graphviz::to_dot;
use astrai_ir::ops::{Attention, Call};
use astrai_ir::{DType, Dim, Graph, Real};
use std::sync::Arc;

fn small() -> Graph {
    let mut g = Graph::new(symbols());
    let block = g.add_block(Arc::new(layer()));
    let x = g.input("x", DType::F32, vec![tokens(), Dim::from(8)]).unwrap();
    let norm = g.weight("norm", DType::F32, &[8]).unwrap();
    let w = g.weight("w", DType::F32, &[8, 8]).unwrap();
    let y = g.scope("layers.0", |g| g.push(Call { block, layer: 3 }, &[x, norm, w])).unwrap();
    let y = g.part(y, 0).unwrap();
    let last = g.slice(y, 0, &tokens() - &Dim::from(1), Dim::from(1)).unwrap();
    let half = g.scope("head", |g| g.scale(last, 0.5)).unwrap();
    g.set_output("logits", half).unwrap();
    g
}

#[test]
fn text_of_a_small_graph() {
    let want = "\
graph (tokens in 1..=8192, sequences in 8..=64 by 8)
  block layer (x, norm, w)
    block residual (a, b)
      %0 = input a: f32[tokens, 8]
      %1 = input b: f32[tokens, 8]
      %2 = binary %0, %1 kind=add : f32[tokens, 8]
      return y = %2
    %0 = input x: f32[tokens, 8]
    %1 = weight norm: f32[8]
    %2 = weight w: f32[8, 8]
    %3 = rms_norm %0, %1 eps=1e-6 : f32[tokens, 8]   # norm
    %4 = dot %3, %2 contract=[(1,1)] : f32[tokens, 8]   # proj
    %5 = call %0, %4 block=residual layer=0 : f32[tokens, 8]
    return y = %5, n = %3
  %0 = input x: f32[tokens, 8]
  %1 = weight norm: f32[8]
  %2 = weight w: f32[8, 8]
  %3 = call %0, %1, %2 block=layer layer=3 : f32[tokens, 8], f32[tokens, 8]   # layers.0
  %4 = part %3 index=0 : f32[tokens, 8]
  %5 = slice %4 axis=0 start=tokens-1 len=1 : f32[1, 8]
  %6 = const 0.5 : f32[]   # head
  %7 = reshape %6 shape=[1,1] : f32[1, 1]   # head
  %8 = expand %7 shape=[1,8] : f32[1, 8]   # head
  %9 = binary %5, %8 kind=mul : f32[1, 8]   # head
  return logits = %9
";
    assert_eq!(small().to_string(), want);
    let text = every_op().to_string();
    for line in [
        "= const [-0, NaN, inf, 0.10009765625] : bf16[4]   # ends",
        "= iota axis=0 : i64[tokens, 2]   # ends",
        "= state s: f32[16, 8]   # ends",
        "= pad %0 axis=0 before=sequences after=0 value=-inf : f32[sequences + tokens, 8]   # ends",
        "= weight qk parts=[{name=q rows=4},{name=k rows=4}]: f32[8, 8]   # ends",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[test]
fn names_with_line_breaks_stay_on_their_line() {
    let mut g = Graph::new(vec![]);
    let x = g.input("a\n\"b\\", DType::F32, vec![]).unwrap();
    g.set_output("y", x).unwrap();
    assert_eq!(g.to_string(), "graph\n  %0 = input a\\n\"b\\: f32[]\n  return y = %0\n");
    assert!(to_dot(&g).contains(r#"n0 [label="%0 input a\\n\"b\\\nf32[]", fillcolor=lightblue];"#));
}

#[test]
fn dot_form_has_a_cluster_a_block() {
    let dot = to_dot(&small());
    let lines: Vec<&str> = dot.lines().map(str::trim).collect();
    for want in [
        "digraph {",
        "subgraph cluster_nb0_ {",
        "label=\"block layer\";",
        "subgraph cluster_nb0_b0_ {",
        "nb0_1 [label=\"%1 weight norm\\nf32[8]\", fillcolor=khaki];",
        "nb0_4 [label=\"%4 dot contract=[(1,1)]\\nf32[tokens, 8]\"];",
        "nb0_3 -> nb0_4 [label=\"0\"];",
        "n3 -> nb0_5 [style=dashed, lhead=cluster_nb0_];",
        "n3 -> n4;",
        "n9 -> nout0;",
    ] {
        assert!(lines.contains(&want), "{want} is not in\n{dot}");
    }
    assert_eq!(dot.matches('{').count(), dot.matches('}').count());
    assert_eq!(to_dot(&small()), dot);
}

#[test]
fn attention_shows_what_is_set() {
    let mut g = Graph::new(symbols());
    let q = g.input("q", DType::F32, vec![tokens(), Dim::from(4), Dim::from(8)]).unwrap();
    let starts = g.input("starts", DType::I32, vec![Dim::symbol("sequences")]).unwrap();
    let op = Attention {
        scale: Real(0.125),
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        span: Dim::parse("2*tokens + 1").unwrap(),
        page: None,
    };
    g.push(op, &[q, q, q, starts]).unwrap();
    let want = "%2 = attention %0, %0, %0, %1 scale=0.125 causal span=2*tokens+1 : f32[tokens, 4, 8], f32[tokens, 4]";
    assert_eq!(g.to_string().lines().last().unwrap().trim(), want);
}
