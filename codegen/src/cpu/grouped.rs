//! The slots of `grouped.c` and `grouped_outer.c`. In: a region around a product of rows in groups, or around its gradient by
//! the matrices. Out: the templates' `#define`s around their texts, and how much scratch they take.

use super::dot::{
    Source, TILE, code_slots, dot_epilogue, dot_prologue, epilogue_slots, integer_bytes, is_widened,
    matrix_slots, matrix_way, paired, row_bytes, split_bytes,
};
use super::{Emitted, over_dims, undefine};
use crate::archetype::dot::left;
use astrai_ir::region::{GroupedForm, OuterForm};
use astrai_ir::{DType, Dim, Region};
use std::fmt::Write;

const GROUPED: &str = include_str!("bodies/grouped.c");
const OUTER: &str = include_str!("bodies/grouped_outer.c");
const AMX: &str = include_str!("bodies/grouped_amx.c");

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
    let symbols = region.graph().symbols.len();
    let mut d = epilogue_slots(name, &format!("{row} + (m)"));
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_amx_##x"));
    for (i, key) in ["GROUP", "FIRST", "COUNT"].into_iter().enumerate() {
        define(key, format!("dims[{}]", symbols + i));
    }
    for (key, size) in ["DOT_M", "DOT_N", "DOT_K"].into_iter().zip(sizes) {
        define(key, format!("((int64_t){size})"));
    }
    d.push_str(slots);
    let end = undefine(&d);
    let own = format!("#define NAME(x) {name}_##x\n#define SYMBOLS {symbols}\n");
    let (way, _) = matrix_way(narrow);
    format!("{d}{way}{own}{AMX}#undef DOT_MATRIX_UNIT\n#undef DOT_SPLIT_SIDES\n{}{end}", undefine(&own))
}

/// The kernel of a region around a grouped dot.
pub(super) fn kernel(region: &Region, f: &GroupedForm, name: &str) -> Result<Emitted, String> {
    let packed = region.piece.layout(f.right.at).is_packed();
    let mut d = epilogue_slots(name, "m");
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    define("ROWS", format!("((int64_t){})", over_dims(region, &f.rows)));
    define("OFFSETS", format!("((const int32_t *)bufs[{}])", f.offsets.0));
    for (key, value) in [("GROUPS", f.groups), ("DOT_N", f.n), ("DOT_K", f.k)] {
        define(key, value.to_string());
    }
    define("PROLOGUE_ROW(m, row)", format!("{name}_load(bufs, dims, m, row)"));
    let narrow = f.right.dtype == DType::BF16;
    let x = left(region.graph(), f.node, &f.codes);
    let mut matrix = String::new();
    let alike = !narrow || is_widened(region.graph(), x);
    let both = narrow && alike;
    if let Some(codes) = &f.codes {
        d.push_str(&code_slots(codes, f.right.at.0));
    } else if packed {
        define(if narrow { "DOT_WEIGHT_BF16" } else { "DOT_WEIGHT_F32" }, format!("bufs[{}]", f.right.at.0));
    } else {
        let mut s = Source::new(region, &f.right, "n0");
        s.step_by("e", region, &f.group);
        d.push_str(&s.panel_slots("e, ", both));
        if alike {
            let mut s = Source::new(region, &f.right, "n0");
            s.step_by("GROUP", region, &f.group);
            let rows = format!("#define DOT_ROW {}\n#define PROLOGUE_ROW(m, row)\n", f.k);
            let slots = rows + &matrix_slots(None, &s, ["FIRST + ", ""]);
            let sizes = ["COUNT".into(), f.n.to_string(), f.k.to_string()];
            matrix = matrix_unit(region, name, sizes, "FIRST", &slots, narrow);
        }
    }
    d.push_str(paired(both));
    let load = dot_prologue(region, name, x)?;
    let store = dot_epilogue(region, name, f.node)?;
    let made = Emitted::counted(format!("{load}{store}{matrix}{d}{GROUPED}{}", undefine(&d)), name, 2);
    let way = (!matrix.is_empty()).then_some(matrix_way(narrow).1);
    let (workspace, codes) = (workspace(f, packed), f.codes.is_some());
    let integers = f.codes.as_ref().is_some_and(|c| c.rounded.is_some());
    Ok(Emitted { workspace, tiles: true, codes, matrix: way, pairs: both || integers, ..made })
}

/// The kernel of a region around sums of outer products by groups.
pub(super) fn outer_kernel(region: &Region, f: &OuterForm, name: &str) -> Result<Emitted, String> {
    let [m, n] = f.size;
    let (left, right) = (Source::new(region, &f.sides[0], "m"), Source::new(region, &f.sides[1], "n0"));
    let both = left.narrow && right.narrow;
    let mut d = epilogue_slots(name, "m") + &left.rows_slot(both) + &right.panel_slots("", both);
    d.push_str(paired(both));
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    define("OFFSETS", format!("((const int32_t *)bufs[{}])", f.offsets.0));
    for (key, value) in [("GROUPS", f.groups), ("DOT_M", m), ("DOT_N", n)] {
        define(key, value.to_string());
    }
    let mut matrix = String::new();
    if left.narrow == right.narrow {
        let slots = matrix_slots(Some(&left), &right, ["", "FIRST + "]) + "#define ROWS_NEAR 1\n";
        let sizes = [m.to_string(), n.to_string(), "COUNT".into()];
        matrix = matrix_unit(region, name, sizes, &format!("GROUP * {m}"), &slots, left.narrow);
    }
    let store = dot_epilogue(region, name, f.node)?;
    let made = Emitted::counted(format!("{store}{matrix}{d}{OUTER}{}", undefine(&d)), name, 1);
    let way = (!matrix.is_empty()).then_some(matrix_way(left.narrow).1);
    Ok(Emitted { tiles: true, matrix: way, pairs: both, ..made })
}

/// Bytes between the phases: the packed rows; beside f32 matrices that nobody packed, of each block so many more as make whole
/// tiles.
fn workspace(f: &GroupedForm, packed: bool) -> Dim {
    if packed || f.right.dtype == DType::BF16 {
        // Offsets are multiplied by the sums of the rows' groups.
        let sums = f.codes.as_ref().filter(|c| c.offsets.is_some()).map_or(0, |c| f.k / c.group);
        let rounded = f.codes.as_ref().and_then(|c| c.rounded);
        let row = rounded.map_or(row_bytes(f.k), |group| integer_bytes(f.k, group));
        return &f.rows * &Dim::from(row + sums * size_of::<f32>());
    }
    let (row, eighth) = (split_bytes(f.k).max(row_bytes(f.k)), split_bytes(f.k) / 8);
    &(&f.rows * &Dim::from(row + eighth)) + &Dim::from((f.groups + 2) * TILE * split_bytes(f.k))
}
