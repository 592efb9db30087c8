//! Gradients under the checkpoint's own names. In: the results of a gradient program, whose buffers may hold several
//! checkpoint tensors as rows. Out: the other results, and `grad.<checkpoint name>` for every tensor.

use astrai_ir::Op;
use astrai_ir::ops::Weight;
use astrai_runtime::{Compiled, Value};

/// Prefix of a gradient's name.
pub const GRAD: &str = "grad.";

/// Results with every joined gradient taken apart.
pub fn by_checkpoint_name(results: Vec<(String, Value)>, program: &Compiled) -> Vec<(String, Value)> {
    let mut out = Vec::with_capacity(results.len());
    for (name, value) in results {
        match name.strip_prefix(GRAD).and_then(|buffer| weight(program, buffer)) {
            Some(w) => out.extend(rows(w, &value)),
            None => out.push((name, value)),
        }
    }
    out
}

fn weight<'a>(program: &'a Compiled, buffer: &str) -> Option<&'a Weight> {
    program.graph.nodes().iter().find_map(|n| match &n.op {
        Op::Weight(w) if w.name == buffer => Some(w),
        _ => None,
    })
}

/// Each checkpoint tensor's rows of the buffer's gradient.
fn rows(w: &Weight, value: &Value) -> Vec<(String, Value)> {
    let width = value.shape.iter().skip(1).product::<usize>() * value.dtype.bytes();
    let mut at = 0;
    let mut out = Vec::new();
    for part in w.rows() {
        let bytes = value.bytes[at..at + part.rows * width].to_vec();
        at += part.rows * width;
        let mut shape = value.shape.clone();
        shape[0] = part.rows;
        out.push((format!("{GRAD}{}", part.name), Value { dtype: value.dtype, shape, bytes }));
    }
    out
}
