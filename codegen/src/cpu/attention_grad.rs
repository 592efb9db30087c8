//! The slots of `attention_grad.c`. In: a form. Out: the template's `#define`s around its text, and how much workspace it takes.

use super::{Emitted, element, load, over_dims, store, undefine};
use astrai_ir::region::AttentionGradForm;
use astrai_ir::{DType, Dim, Region};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("bodies/attention_grad.c");

/// True when the sums of dq grow in dq itself.
fn direct(f: &AttentionGradForm) -> bool {
    let dq = f.results.iter().find(|(result, _)| *result == 0);
    dq.is_some_and(|(_, dtype)| *dtype == DType::F32) && f.sizes[2].is_multiple_of(16)
}

/// The kernel's text, its phases and workspace.
pub(super) fn kernel(region: &Region, f: &AttentionGradForm, name: &str) -> Emitted {
    let a = &f.op;
    let [heads, kv_heads, d, dv] = f.sizes;
    let mut text = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(text, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    for (letter, s) in ["Q", "K", "V", "O", "G"].into_iter().zip(&f.heads) {
        super::heads(region, letter, s, &mut define);
    }
    define("LSE_BUF", f.lse.0.to_string());
    define("STARTS_BUF", f.starts.0.to_string());
    define("TOKENS", over_dims(region, &f.tokens));
    define("SEQUENCES", over_dims(region, &f.sequences));
    for (key, value) in [("HEADS", heads), ("KV_HEADS", kv_heads), ("D", d), ("DV", dv)] {
        define(key, value.to_string());
    }
    define("SCALE", format!("{:?}f", a.scale.0 as f32));
    define("SOFTCAP", format!("{:?}f", a.softcap.map_or(0.0, |c| c.0 as f32)));
    define("CAUSAL", u8::from(a.causal).to_string());
    define("WINDOW", a.window.unwrap_or(0).to_string());
    if let Some((at, dtype)) = f.sinks {
        define("SINK_BUF", at.0.to_string());
        define("SINK_T", element(dtype).into());
        define("LOAD_SINK(x)", load(dtype));
    }
    for (i, (result, dtype)) in f.results.iter().enumerate() {
        let key = ["DQ", "DK", "DV", "DSINK"][(*result).min(3) as usize];
        define(&format!("{key}_BUF"), (region.piece.reads.len() + i).to_string());
        define(&format!("{key}_T"), element(*dtype).into());
        define(&format!("STORE_{key}(x)"), store(*dtype));
    }
    if direct(f) {
        text.push_str("#define DQ_DIRECT\n");
    }
    let undef = undefine(&text);
    Emitted { workspace: workspace(f), ..Emitted::counted(format!("{text}{TEMPLATE}{undef}"), name, 2) }
}

/// Bytes between the phases: sums of dq, dk and dv of heads that share keys, and one number a row.
fn workspace(f: &AttentionGradForm) -> Dim {
    let [heads, kv_heads, d, dv] = f.sizes;
    let (wide, wide_v) = (d.next_multiple_of(16), dv.next_multiple_of(16));
    let sums = if direct(f) { 0 } else { wide };
    let shared = if heads > kv_heads { wide + wide_v } else { 0 };
    &f.tokens * &Dim::from(heads * (sums + shared + 1) * size_of::<f32>())
}
