//! The slots of `attention_grad.c`. In: a region whose anchor is the gradient of attention. Out: the template's `#define`s
//! around its text, and how much scratch it takes.

use super::{address, element, over_dims, strided, strided_vector, vector_type};
use crate::index::{Atom, Index, Var};
use astrai_ir::ops::{AttentionGrad, Op};
use astrai_ir::{DType, Dim, Node, NodeId, Region};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("attention_grad.c");

/// The operator of the region and its node.
fn node(region: &Region) -> Result<(&AttentionGrad, &Node), String> {
    let found = region.graph.nodes().iter().find_map(|n| match &n.op {
        Op::AttentionGrad(a) => Some((a, n)),
        _ => None,
    });
    found.ok_or_else(|| "no gradient of attention in the region".into())
}

fn load(dtype: DType) -> String {
    if dtype == DType::F32 { "(x)".into() } else { format!("{}_to_f32(x)", element(dtype)) }
}

fn store(dtype: DType) -> String {
    if dtype == DType::F32 { "(x)".into() } else { format!("f32_to_{}(x)", element(dtype)) }
}

/// (query heads, key heads, d, dv)
fn sizes(region: &Region, node: &Node) -> Result<[usize; 4], String> {
    let size = |arg: usize, axis: usize| {
        region.graph.ty(node.args[arg]).shape[axis].size().ok_or("sizes of a head are literal")
    };
    Ok([size(0, 1)?, size(1, 1)?, size(0, 2)?, size(2, 2)?])
}

/// Which cotangent an output of the region is: the place of the argument it belongs to among q, k, v, sinks.
fn part_of(region: &Region, id: NodeId) -> usize {
    let node = region.graph.node(id);
    match &node.op {
        Op::Part(p) => p.index as usize,
        _ => node.args.first().map_or(0, |a| part_of(region, *a)),
    }
}

/// The type of dq in memory, where it is wanted.
fn dq(region: &Region) -> Option<DType> {
    let wanted = region.graph.outputs().iter().find(|(_, id)| part_of(region, *id) == 0);
    wanted.map(|(_, id)| region.graph.ty(*id).dtype)
}

/// True when the sums of dq grow in dq itself.
fn direct(region: &Region, d: usize) -> bool {
    dq(region) == Some(DType::F32) && d.is_multiple_of(16)
}

/// The kernel's text.
pub(super) fn kernel(region: &Region, name: &str) -> Result<String, String> {
    let (op, node) = node(region)?;
    let [heads, kv_heads, d, dv] = sizes(region, node)?;
    let a = &op.forward;
    let mut text = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(text, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    for (letter, arg) in [("Q", 0), ("K", 1), ("V", 2), ("O", 4), ("G", 6)] {
        let s = strided(region, node.args[arg])?;
        define(&format!("{letter}_BUF"), s.buf.to_string());
        define(&format!("{letter}_T"), element(s.dtype).into());
        define(&format!("LOAD_{letter}(x)"), load(s.dtype));
        define(&format!("{letter}_OFF"), over_dims(region, &s.offset));
        define(&format!("{letter}_ROW"), over_dims(region, &s.row));
        define(&format!("{letter}_HEAD"), over_dims(region, &s.head));
    }
    define("LSE_BUF", whole(region, node.args[5])?.to_string());
    define("STARTS_BUF", strided_vector(region, node.args[3])?.to_string());
    define("TOKENS", over_dims(region, &region.graph.ty(node.args[0]).shape[0]));
    let sequences = &region.graph.ty(node.args[3]).shape[0] - &Dim::from(1);
    define("SEQUENCES", over_dims(region, &sequences));
    for (key, value) in [("HEADS", heads), ("KV_HEADS", kv_heads), ("D", d), ("DV", dv)] {
        define(key, value.to_string());
    }
    define("SCALE", format!("{:?}f", a.scale.0 as f32));
    define("SOFTCAP", format!("{:?}f", a.softcap.map_or(0.0, |c| c.0 as f32)));
    define("CAUSAL", u8::from(a.causal).to_string());
    define("WINDOW", a.window.unwrap_or(0).to_string());
    if a.sinks {
        let dtype = vector_type(region, node.args[7]);
        define("SINK_BUF", strided_vector(region, node.args[7])?.to_string());
        define("SINK_T", element(dtype).into());
        define("LOAD_SINK(x)", load(dtype));
    }
    for (i, (_, id)) in region.graph.outputs().iter().enumerate() {
        let result = ["DQ", "DK", "DV", "DSINK"][part_of(region, *id).min(3)];
        let dtype = region.graph.ty(*id).dtype;
        define(&format!("{result}_BUF"), (region.layouts.len() + i).to_string());
        define(&format!("{result}_T"), element(dtype).into());
        define(&format!("STORE_{result}(x)"), store(dtype));
    }
    if direct(region, d) {
        text.push_str("#define DQ_DIRECT\n");
    }
    let undef = super::undefine(&text);
    Ok(format!("{text}{TEMPLATE}{undef}"))
}

/// The buffer of a value that is read as it lies.
fn whole(region: &Region, id: NodeId) -> Result<usize, String> {
    let shape = &region.graph.ty(id).shape;
    let var = |i: usize| Var { name: format!("i{i}").into(), extent: shape[i].clone(), depth: 1 };
    let at: Vec<Index> = (0..shape.len()).map(|i| Index::atom(Atom::Var(var(i)))).collect();
    let (buf, dtype, address) = address(region, id, &at)?;
    if dtype == DType::F32 && address == Index::linear(&at, shape) {
        Ok(buf)
    } else {
        Err("the gradient of attention wants the log-sum-exp as it was written".into())
    }
}

/// Bytes of scratch: sums of dq, dk and dv of heads that share keys, and one number a row.
pub(super) fn scratch(region: &Region) -> Dim {
    let Ok((_, node)) = node(region) else { return Dim::from(0) };
    let Ok([heads, kv_heads, d, dv]) = sizes(region, node) else { return Dim::from(0) };
    let (wide, wide_v) = (d.next_multiple_of(16), dv.next_multiple_of(16));
    let sums = if direct(region, d) { 0 } else { wide };
    let shared = if heads > kv_heads { wide + wide_v } else { 0 };
    let tokens = region.graph.ty(node.args[0]).shape[0].clone();
    &tokens * &Dim::from(heads * (sums + shared + 1) * size_of::<f32>())
}
