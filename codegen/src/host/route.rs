//! The slots of `route.c`. In: a region around a choice of experts. Out: the template's `#define`s around its text, and how
//! much scratch it takes.

use super::dots::buffer;
use super::{over_dims, undefine};
use astrai_ir::ops::{GroupScore, Op, Route, Scores};
use astrai_ir::{Dim, Node, Region};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("route.c");

fn found(region: &Region) -> Result<(&Route, &Node), String> {
    let route = region.graph.nodes().iter().find_map(|n| match &n.op {
        Op::Route(r) => Some((r, n)),
        _ => None,
    });
    route.ok_or_else(|| "no route in the region".into())
}

/// The kernel's text.
pub(super) fn kernel(region: &Region, name: &str) -> Result<String, String> {
    let (op, node) = found(region)?;
    let ty = region.graph.ty(node.args[0]);
    let mut d = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    define("TOKENS", format!("((int64_t){})", over_dims(region, &ty.shape[0])));
    define("EXPERTS", ty.shape[1].size().ok_or("the number of experts is literal")?.to_string());
    define("CHOSEN", op.k.to_string());
    let whole = |arg: usize| buffer(region, node.args[arg]).ok_or("a router's logits are no buffer");
    define("LOGITS", format!("((const float *)bufs[{}])", whole(0)?));
    if node.args.len() > 1 {
        define("CORRECTION", format!("((const float *)bufs[{}])", whole(1)?));
    }
    let flag = |on: bool| u8::from(on).to_string();
    define("SIGMOID", flag(op.scores == Scores::Sigmoid));
    define("SOFTMAX_ALL", flag(op.scores == Scores::Softmax));
    define("BY_LOGITS", flag(op.by_logits() && node.args.len() == 1));
    define("NORMALISE", flag(op.normalise));
    define("FACTOR", format!("{:?}f", op.scale.0 as f32));
    if let Some(groups) = op.groups {
        define("GROUPS", groups.count.to_string());
        define("GROUPS_KEPT", groups.kept.to_string());
        define("BEST_TWO", flag(groups.score == GroupScore::BestTwo));
    }
    for (i, (_, id)) in region.graph.outputs().iter().enumerate() {
        let Op::Part(p) = &region.graph.node(*id).op else {
            return Err("a route's results are parts".into());
        };
        let (key, ty) = [
            ("CHOICE_OUT", "int32_t"),
            ("WEIGHTS_OUT", "float"),
            ("SLOTS_OUT", "int32_t"),
            ("PLACES_OUT", "int32_t"),
            ("OFFSETS_OUT", "int32_t"),
        ][p.index.min(4) as usize];
        define(key, format!("(({ty} *)bufs[{}])", region.layouts.len() + i));
    }
    let undef = undefine(&d);
    Ok(format!("{d}{TEMPLATE}{undef}"))
}

/// Bytes of scratch: the chosen experts.
pub(super) fn scratch(region: &Region) -> Dim {
    let Ok((op, node)) = found(region) else { return Dim::from(0) };
    &region.graph.ty(node.args[0]).shape[0] * &Dim::from(op.k * size_of::<i32>())
}
