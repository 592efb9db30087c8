//! The slots of `route.c`. In: a region around a choice of experts. Out: the template's `#define`s around its text, and how
//! much scratch it takes.

use super::{Emitted, over_dims, undefine};
use astrai_ir::ops::{GroupScore, Scores};
use astrai_ir::region::RouteForm;
use astrai_ir::{Dim, Region};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("bodies/route.c");

/// The kernel's text, its phases and workspace: the chosen experts.
pub(super) fn kernel(region: &Region, f: &RouteForm, name: &str) -> Emitted {
    let op = &f.op;
    let mut d = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    define("TOKENS", format!("((int64_t){})", over_dims(region, &f.tokens)));
    define("EXPERTS", f.experts.to_string());
    define("CHOSEN", op.k.to_string());
    define("LOGITS", format!("((const float *)bufs[{}])", f.logits.0));
    if let Some(at) = f.correction {
        define("CORRECTION", format!("((const float *)bufs[{}])", at.0));
    }
    let flag = |on: bool| u8::from(on).to_string();
    define("SIGMOID", flag(op.scores == Scores::Sigmoid));
    define("SOFTMAX_ALL", flag(op.scores == Scores::Softmax));
    define("BY_LOGITS", flag(op.by_logits() && f.correction.is_none()));
    define("NORMALISE", flag(op.normalise));
    define("FACTOR", format!("{:?}f", op.scale.0 as f32));
    if let Some(groups) = op.groups {
        define("GROUPS", groups.count.to_string());
        define("GROUPS_KEPT", groups.kept.to_string());
        define("BEST_TWO", flag(groups.score == GroupScore::BestTwo));
    }
    for (i, (result, _)) in f.results.iter().enumerate() {
        let (key, ty) = [
            ("CHOICE_OUT", "int32_t"),
            ("WEIGHTS_OUT", "float"),
            ("SLOTS_OUT", "int32_t"),
            ("PLACES_OUT", "int32_t"),
            ("OFFSETS_OUT", "int32_t"),
        ][(*result).min(4) as usize];
        define(key, format!("(({ty} *)bufs[{}])", region.piece.reads.len() + i));
    }
    let undef = undefine(&d);
    let workspace = &f.tokens * &Dim::from(op.k * size_of::<i32>());
    Emitted { workspace, ..Emitted::counted(format!("{d}{TEMPLATE}{undef}"), name, 2) }
}
