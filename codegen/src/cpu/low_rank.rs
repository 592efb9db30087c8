//! The slots of `low_rank.c`. In: a region around what adapters add. Out: the template's `#define`s around its text, and how much scratch
//! it takes.

use super::dot::dot_prologue;
use super::{Emitted, element, load, over_dims, undefine};
use astrai_ir::region::LowRankForm;
use astrai_ir::{DType, Dim, Region};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("bodies/low_rank.c");

/// The kernel's text, its phases and workspace: what is between the two products.
pub(super) fn kernel(region: &Region, f: &LowRankForm, name: &str) -> Result<Emitted, String> {
    let [slots, k, rank, n] = f.sizes;
    let mut text = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(text, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    for (key, size) in ["TOKENS", "ROWS"].into_iter().zip(&f.rows) {
        define(key, format!("((int64_t){})", over_dims(region, size)));
    }
    for (key, size) in [("SLOTS", slots), ("K", k), ("RANK", rank), ("LAYERS", f.columns.len()), ("N", n)] {
        define(key, size.to_string());
    }
    define("COLUMNS", f.columns.iter().map(usize::to_string).collect::<Vec<_>>().join(", "));
    for (letter, (at, dtype)) in ["A", "B"].into_iter().zip(f.factors) {
        define(&format!("{letter}_T"), element(dtype).into());
        define(&format!("LOAD_{letter}(x)"), load(dtype));
        define(&format!("FACTOR_{letter}"), format!("((const {} *)bufs[{}])", element(dtype), at.0));
        for (kind, of) in [("F32", DType::F32), ("BF16", DType::BF16)] {
            define(&format!("{letter}_{kind}"), u8::from(dtype == of).to_string());
        }
    }
    for (key, at) in ["SLOT_OF", "TOKEN_OF", "OFFSETS"].into_iter().zip(f.lists) {
        define(key, format!("((const int32_t *)bufs[{}])", at.0));
    }
    define("RESULT", format!("((float *)bufs[{}])", region.piece.reads.len()));
    define("PROLOGUE_ROW(t, row)", format!("{name}_load(bufs, dims, t, row)"));
    let load = dot_prologue(region, name, region.graph().node(f.node).args[0])?;
    let made = Emitted::counted(format!("{load}{text}{TEMPLATE}{}", undefine(&text)), name, 2);
    let low = Dim::from(f.columns.len() * rank * size_of::<f32>());
    Ok(Emitted { workspace: &f.rows[1] * &low, ..made })
}
