//! The choice of experts. In: a form. Out: a phase that chooses, tokens apart, and one that sorts by expert, an expert a block.

use super::dot::VALUES;
use super::program::{Program, WARP};
use super::rows::REGISTERS;
use crate::kernel_ir::print::dim;
use astrai_ir::ops::{GroupScore, Scores};
use astrai_ir::region::RouteForm;
use astrai_ir::{Dim, Kernel, Region};

const ROUTE: &str = include_str!("bodies/route.cu");
/// Threads of a block.
const THREADS: usize = 256;
/// Bytes of shared memory in which a block chooses for several tokens at once.
const ROOM: usize = 48 << 10;

/// The kernel.
pub(super) fn kernel(region: &Region, f: &RouteForm, name: &str) -> Kernel {
    let op = &f.op;
    let groups = op.groups.as_ref();
    let count = groups.map_or(0, |g| g.count);
    let floats = 2 * f.experts + count.max(1) + op.k + (f.experts + count.max(1)).div_ceil(4);
    let bytes = floats * size_of::<f32>();
    let warps = (ROOM / bytes).clamp(1, THREADS / WARP);
    let constants = [
        ("EXPERTS", f.experts),
        ("CHOSEN", op.k),
        ("SIGMOID", usize::from(op.scores == Scores::Sigmoid)),
        ("SOFTMAX_ALL", usize::from(op.scores == Scores::Softmax)),
        ("BY_LOGITS", usize::from(op.by_logits() && f.correction.is_none())),
        ("NORMALISE", usize::from(op.normalise)),
        ("GROUPS", count),
        ("GROUPS_KEPT", groups.map_or(0, |g| g.kept)),
        ("BEST_TWO", groups.map_or(0, |g| usize::from(g.score == GroupScore::BestTwo))),
    ];
    let mut text = format!("constexpr float FACTOR = {:?}f;\n", op.scale.0 as f32);
    constants.iter().for_each(|(key, value)| text += &format!("constexpr int {key} = {value};\n"));
    let slots = &f.tokens * &Dim::from(op.k);
    let mut program = Program::new(region, name, THREADS as u32, REGISTERS)
        .workspace(&slots * &Dim::from(size_of::<i32>()));
    [VALUES, &text, ROUTE].into_iter().for_each(|text| program.text(text));
    let written = |which: u32| {
        let at = f.results.iter().position(|r| r.0 == which);
        at.map_or("nullptr".to_string(), |i| format!("w{i}"))
    };
    let blocks = f.tokens.ceil_div(&Dim::from(warps));
    program.entry(&blocks, warps * bytes, |p| {
        p.line("DYNAMIC_SHARED(shared);");
        p.line("const int warp = (int)threadIdx.x / 32;");
        p.line(&format!("if (warp >= {warps}) return;"));
        let stride = format!("(index_t)gridDim.x * {warps}");
        let head = format!(
            "for (index_t t = (index_t)blockIdx.x * {warps} + warp; t < {}; t += {stride})",
            dim(&f.tokens)
        );
        p.braces(&head, |p| {
            let correction = f.correction.map_or("nullptr".into(), |at| format!("r{}", at.0));
            let room = format!("shared + warp * {floats}");
            p.line(&format!(
                "route_token(r{}, {correction}, t, {}, (int32_t *)workspace, {}, {room});",
                f.logits.0,
                written(0),
                written(1)
            ));
        });
    });
    if f.results.iter().any(|r| r.0 > 1) {
        program.entry(&Dim::from(f.experts), 0, |p| {
            p.line("__shared__ int32_t found[BLOCK], counts[BLOCK / 32];");
            let head = format!("for (int e = (int)blockIdx.x; e < {}; e += (int)gridDim.x)", f.experts);
            p.braces(&head, |p| {
                p.line(&format!(
                    "route_sort((const int32_t *)workspace, {}, e, {}, {}, {}, found, counts);",
                    dim(&slots),
                    written(2),
                    written(3),
                    written(4)
                ));
            });
        });
    }
    program.finish()
}
