//! The slots of `grouped.c` and `grouped_outer.c`. In: a region around a product of rows in groups, or around its gradient by
//! the matrices. Out: the templates' `#define`s around their texts, and how much scratch they take.

use super::dots::{
    Source, TILE, buffer, dot_epilogue, dot_prologue, is_widened, matrix_slots, matrix_way, paired,
    row_bytes, split_bytes,
};
use super::{over_dims, undefine};
use astrai_ir::ops::Op;
use astrai_ir::{DType, Dim, GroupedForm, Layout, NodeId, Region};
use std::fmt::Write;

const GROUPED: &str = include_str!("grouped.c");
const OUTER: &str = include_str!("grouped_outer.c");
const AMX: &str = include_str!("grouped_amx.c");

/// The grouped product of a region.
fn product(region: &Region) -> Result<NodeId, String> {
    let grouped = |id: &NodeId| matches!(region.graph.node(*id).op, Op::GroupedDot(_) | Op::GroupedOuter(_));
    region.graph.ids().find(grouped).ok_or_else(|| "no grouped product in the region".into())
}

fn offsets(region: &Region, product: NodeId) -> Result<usize, String> {
    let offsets = region.graph.node(product).args[2];
    buffer(region, offsets).ok_or_else(|| "the offsets of groups are no buffer".into())
}

/// The matrix unit's way, in front of the template: the dot of one group, its rows, columns and sums, the C expression of the
/// row of the result where a group's begin, and the slots of its sides.
fn matrix_unit(
    region: &Region,
    name: &str,
    sizes: [String; 3],
    row: &str,
    slots: &str,
    narrow: bool,
) -> String {
    let symbols = region.graph.symbols.len();
    let mut d = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_amx_##x"));
    for (i, key) in ["GROUP", "FIRST", "COUNT"].into_iter().enumerate() {
        define(key, format!("dims[{}]", symbols + i));
    }
    for (key, size) in ["DOT_M", "DOT_N", "DOT_K"].into_iter().zip(sizes) {
        define(key, format!("((int64_t){size})"));
    }
    define("EPILOGUE(m, n0, acc, valid)", format!("{name}_store(bufs, dims, {row} + (m), n0, acc, valid)"));
    d.push_str(slots);
    let end = undefine(&d);
    let own = format!("#define NAME(x) {name}_##x\n#define SYMBOLS {symbols}\n");
    let way = matrix_way(narrow);
    format!("{d}{way}{own}{AMX}#undef DOT_MATRIX_UNIT\n#undef DOT_SPLIT_SIDES\n{}{end}", undefine(&own))
}

/// The kernel of a region around a grouped dot.
pub(super) fn kernel(region: &Region, name: &str) -> Result<String, String> {
    let id = product(region)?;
    let form = GroupedForm::of(&region.graph, id).ok_or("a grouped dot without a form")?;
    let right = buffer(region, form.right.base).ok_or("the matrices of a grouped dot are no buffer")?;
    let mut d = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    define("ROWS", format!("((int64_t){})", over_dims(region, &form.rows)));
    define("OFFSETS", format!("((const int32_t *)bufs[{}])", offsets(region, id)?));
    for (key, value) in [("GROUPS", form.groups), ("DOT_N", form.n), ("DOT_K", form.k)] {
        define(key, value.to_string());
    }
    define("PROLOGUE_ROW(m, row)", format!("{name}_load(bufs, dims, m, row)"));
    define("EPILOGUE(m, n0, acc, valid)", format!("{name}_store(bufs, dims, m, n0, acc, valid)"));
    let narrow = form.right.dtype == DType::BF16;
    let x = region.graph.node(id).args[0];
    let mut matrix = String::new();
    let alike = !narrow || is_widened(&region.graph, x);
    let both = narrow && alike;
    if region.layouts[right] == Layout::Panels {
        define(if narrow { "DOT_WEIGHT_BF16" } else { "DOT_WEIGHT_F32" }, format!("bufs[{right}]"));
    } else {
        let mut s = Source::new(region, &form.right, right, "n0");
        s.step_by("e", region, &form.group);
        d.push_str(&s.panel_slots("e, ", both));
        if alike {
            let mut s = Source::new(region, &form.right, right, "n0");
            s.step_by("GROUP", region, &form.group);
            let rows = format!("#define DOT_ROW {}\n#define PROLOGUE_ROW(m, row)\n", form.k);
            let slots = rows + &matrix_slots(None, &s, ["FIRST + ", ""]);
            let sizes = ["COUNT".into(), form.n.to_string(), form.k.to_string()];
            matrix = matrix_unit(region, name, sizes, "FIRST", &slots, narrow);
        }
    }
    d.push_str(paired(both));
    let load = dot_prologue(region, name, x)?;
    let store = dot_epilogue(region, name, id)?;
    Ok(format!("{load}{store}{matrix}{d}{GROUPED}{}", undefine(&d)))
}

/// The kernel of a region around sums of outer products by groups.
pub(super) fn outer_kernel(region: &Region, name: &str) -> Result<String, String> {
    let id = product(region)?;
    let node = region.graph.node(id);
    let (sides, groups) =
        GroupedForm::outer(&region.graph, id).ok_or("a grouped outer product without a form")?;
    let source = |side: usize, free| {
        let at = buffer(region, sides[side].base).ok_or("a side of an outer product is no buffer")?;
        Ok::<_, String>(Source::new(region, &sides[side], at, free))
    };
    let width =
        |side: usize| region.graph.ty(node.args[side]).shape[1].size().ok_or("widths of rows are literal");
    let (left, right, m, n) = (source(0, "m")?, source(1, "n0")?, width(0)?, width(1)?);
    let both = left.is_narrow() && right.is_narrow();
    let mut d = left.rows_slot(both) + &right.panel_slots("", both);
    d.push_str(paired(both));
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    define("OFFSETS", format!("((const int32_t *)bufs[{}])", offsets(region, id)?));
    for (key, value) in [("GROUPS", groups), ("DOT_M", m), ("DOT_N", n)] {
        define(key, value.to_string());
    }
    define("EPILOGUE(m, n0, acc, valid)", format!("{name}_store(bufs, dims, m, n0, acc, valid)"));
    let mut matrix = String::new();
    if left.narrow == right.narrow {
        let slots = matrix_slots(Some(&left), &right, ["", "FIRST + "]) + "#define ROWS_NEAR 1\n";
        let sizes = [m.to_string(), n.to_string(), "COUNT".into()];
        matrix = matrix_unit(region, name, sizes, &format!("GROUP * {m}"), &slots, left.is_narrow());
    }
    let store = dot_epilogue(region, name, id)?;
    Ok(format!("{store}{matrix}{d}{OUTER}{}", undefine(&d)))
}

/// Bytes of scratch: the packed rows; beside f32 matrices that nobody packed, of each block so many more as make whole tiles.
pub(super) fn scratch(region: &Region) -> Dim {
    let form = product(region).ok().and_then(|id| GroupedForm::of(&region.graph, id));
    form.map_or(Dim::from(0), |f| {
        let packed = buffer(region, f.right.base).is_some_and(|b| region.layouts[b] == Layout::Panels);
        if packed || f.right.dtype == DType::BF16 {
            return &f.rows * &Dim::from(row_bytes(f.k));
        }
        let (row, eighth) = (split_bytes(f.k).max(row_bytes(f.k)), split_bytes(f.k) / 8);
        &(&f.rows * &Dim::from(row + eighth)) + &Dim::from((f.groups + 2) * TILE * split_bytes(f.k))
    })
}
