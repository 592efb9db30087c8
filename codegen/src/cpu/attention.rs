//! The slots of the attention templates. In: a form. Out: `#define`s around their text, and how much workspace they take.

use super::{Emitted, load, over_dims, store, undefine};
use crate::kernel_ir::print::element;
use astrai_ir::kernel::Products;
use astrai_ir::region::AttentionForm;
use astrai_ir::{Code, DType, Dim, Region};
use std::fmt::Write;

const TEMPLATES: [&str; 5] = [
    include_str!("bodies/attention.c"),
    include_str!("bodies/attention_rows.c"),
    include_str!("bodies/attention_one.c"),
    include_str!("bodies/attention_tiles.c"),
    include_str!("bodies/attention_phases.c"),
];

/// The kernel's text, its phases and workspace.
pub(super) fn kernel(region: &Region, f: &AttentionForm, name: &str) -> Emitted {
    let a = &f.op;
    let [heads, kv_heads, d_size, dv] = f.sizes;
    let mut d = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    let scales = f.codes.iter().flat_map(|(_, scales)| scales);
    let kind = match &f.codes {
        None => 0,
        Some((Code::Fp8, _)) => 2,
        Some(_) => 1,
    };
    for (letter, s) in ["Q", "K", "V", "KS", "VS"].into_iter().zip(f.qkv.iter().chain(scales)) {
        super::heads(region, letter, s, &mut |key, value| match key {
            "LOAD_K(x)" | "LOAD_V(x)" if kind > 0 => {
                define(key, format!("({value} * (1.0f / ATTN_UNIT({kind})))"))
            }
            _ => define(key, value),
        });
    }
    define("KV_CODES", kind.to_string());
    define("STARTS_BUF", f.starts.0.to_string());
    define("TOKENS", over_dims(region, &f.tokens));
    define("SEQUENCES", over_dims(region, &f.sequences));
    define("THREADS", format!("dims[{}]", region.graph().symbols.len() + 1));
    define("HEADS", heads.to_string());
    define("KV_HEADS", kv_heads.to_string());
    define("D", d_size.to_string());
    let [q, keys_and_values @ ..] = &f.qkv;
    let both = |dtype| keys_and_values.iter().all(|s| s.dtype == dtype);
    let narrow_queries = q.dtype == DType::BF16;
    // Products of bf16 values by tiles, or by pairs.
    let paired =
        narrow_queries && (both(DType::BF16) || kind > 0) && [d_size, dv].iter().all(|n| n % 32 == 0);
    let kinds = [
        ("KV_BF16", both(DType::BF16)),
        ("KV_F32", both(DType::F32)),
        ("Q_BF16", narrow_queries),
        ("TILED", paired),
    ];
    kinds.iter().filter(|(_, holds)| *holds).for_each(|(key, _)| define(key, "1".into()));
    define("DV", dv.to_string());
    define("SCALE", format!("{:?}f", a.scale.0 as f32));
    define("SOFTCAP", format!("{:?}f", a.softcap.map_or(0.0, |c| c.0 as f32)));
    define("CAUSAL", u8::from(a.causal).to_string());
    define("WINDOW", a.window.unwrap_or(0).to_string());
    let mut keys = 0;
    if let (Some((tables, width, lens)), Some(page)) = (f.pages, a.page) {
        define("PAGES_BUF", tables.0.to_string());
        define("KV_LENS_BUF", lens.0.to_string());
        define("PAGE", page.to_string());
        define("TABLE_PAGES", width.to_string());
        keys = width * page;
    }
    define("CHUNKS", chunks(keys).to_string());
    define("SPLITS", SPLITS.to_string());
    if let Some((at, dtype)) = f.sinks {
        define("SINK_BUF", at.0.to_string());
        define("SINK_T", element(dtype).into());
        define("LOAD_SINK(x)", load(dtype));
    }
    for (i, (result, dtype)) in f.results.iter().enumerate() {
        let at = (region.piece.reads.len() + i).to_string();
        if *result == 1 {
            define("LSE_BUF", at);
        } else {
            define("O_BUF", at);
            define("O_T", element(*dtype).into());
            define("STORE_O(x)", store(*dtype));
        }
    }
    let undef = undefine(&d);
    // Over pages, the keys of a query may be several units', which a second phase joins.
    let phases = if f.pages.is_some() { 2 } else { 1 };
    let made = Emitted::counted(format!("{d}{}{undef}", TEMPLATES.concat()), name, phases);
    let matrix = paired.then_some(Products::Native);
    Emitted { workspace: workspace(f), tiles: narrow_queries, matrix, pairs: paired, ..made }
}

/// Bytes of workspace: the sums of each chunk of keys, for rows whose chunks are units of their own.
fn workspace(f: &AttentionForm) -> Dim {
    let (Some((_, width, _)), Some(page)) = (f.pages, f.op.page) else { return Dim::from(0) };
    let row = f.sizes[3].next_multiple_of(16) + 2;
    Dim::from(SPLITS / 2 * chunks(width * page) * f.sizes[0] * row * size_of::<f32>())
}

/// Units at most that share the keys of all queries; two for each query at least.
const SPLITS: usize = 16;

/// Chunks of so many keys, as `attn_chunk` counts them.
fn chunks(keys: usize) -> usize {
    let mut length = 512;
    let mut doubled = 0;
    while keys.saturating_sub(1) / 16 >= length {
        length *= 2;
        doubled += 1;
    }
    8 * doubled + keys.saturating_sub(1) / length + 1
}

#[cfg(test)]
mod tests {
    use super::chunks;

    #[test]
    fn chunks_grow_with_what_lies_before_them() {
        let counted = [1, 512, 513, 8192, 8193, 9216, 9217, 16_384, 16_385, 131_072].map(chunks);
        assert_eq!(counted, [1, 1, 2, 16, 17, 17, 18, 24, 25, 48]);
    }
}
