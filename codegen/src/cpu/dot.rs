//! Dots on the core. In: a region around one dot. Out: the slots of a template: `dot.c` for a weight that was
//! packed ahead, `dot_free.c` for sides that lie in memory as they were made.

use super::rows::lead;
use super::{Emitted, over_dims, prologue, reads_only, undefine};
use crate::archetype::dot::left;
use crate::kernel_ir::expr::{Expr, Stmt, each_load};
use crate::kernel_ir::index::{Index, Var};
use crate::kernel_ir::loops::row_of;
use crate::kernel_ir::lower::{Lower, narrow};
use crate::kernel_ir::print::{Dialect, Printer, dim, element, index};
use astrai_ir::kernel::Products;
use astrai_ir::ops::Op;
use astrai_ir::region::{DotCodes, DotForm, Side};
use astrai_ir::{DType, Dim, NodeId, Region};
use std::fmt::Write;

const PACKED: &str = include_str!("bodies/dot.c");
const PANELS: &str = include_str!("bodies/dot_panels.c");
const CODES: &str = include_str!("bodies/dot_codes.c");
const INTEGERS: &str = include_str!("bodies/dot_integers.c");
const END: &str = include_str!("bodies/dot_end.c");
const FREE: &str = include_str!("bodies/dot_free.c");
const FREE_AMX: &str = include_str!("bodies/dot_free_amx.c");
const FREE_SPLIT: &str = include_str!("bodies/dot_free_split.c");

/// Whether both sides of a dot are bf16 values, of which pairs may take the place of numbers.
pub(super) fn paired(both: bool) -> &'static str {
    if both { "#define DOT_PAIRED DOT_BF16_PAIRS\n" } else { "#define DOT_PAIRED 0\n" }
}

/// Floats in a block of a packed row.
pub(super) const BLOCK: usize = 256;
/// Rows, and steps of the sum, in a block for the matrix unit.
pub(super) const TILE: usize = 32;
/// Bytes beside the integers of a rounded group: its scale, and what their sum is corrected by.
const INTEGERS_SCALE: usize = 8;
/// Bytes of a number in three pieces.
const SPLIT: usize = 6;

/// The kernel of a region around a dot.
pub(super) fn kernel(region: &Region, f: &DotForm, name: &str) -> Result<Emitted, String> {
    let packed = region.piece.layout(f.right.at).is_packed();
    let mut out = dot_epilogue(region, name, f.node)?;
    let m = over_dims(region, &f.m);
    let _ = write!(
        out,
        "#define NAME(x) {name}_##x\n#define DOT_M ((int64_t){m})\n{}",
        epilogue_slots(name, "m")
    );
    let x = left(region.graph(), f.node, &f.codes);
    if f.left.is_none() || packed {
        out.insert_str(0, &dot_prologue(region, name, x)?);
        let _ = writeln!(out, "#define PROLOGUE_ROW(m, row) {name}_load(bufs, dims, m, row)");
    }
    let widened = is_widened(region.graph(), x);
    let (matrix, pairs) = if packed {
        packed_slots(region, f, widened, &mut out)?
    } else {
        free_slots(region, f, widened, &mut out)
    };
    let (workspace, codes) = (workspace(f, packed), f.codes.is_some());
    Ok(Emitted { workspace, tiles: true, codes, matrix, pairs, ..Emitted::counted(out, name, 2) })
}

/// On what a dot multiplies where there is a matrix unit, and whether pairs of bf16 may take the place of numbers.
type Ways = (Option<Products>, bool);

/// Slots of a weight in panels; `widened` says that the left side's numbers are bf16 values.
fn packed_slots(region: &Region, f: &DotForm, widened: bool, out: &mut String) -> Result<Ways, String> {
    let (Some(n), Some(k)) = (f.n.size(), f.k.size()) else {
        return Err("sizes of a weight are literal".into());
    };
    let narrow = f.right.dtype == DType::BF16;
    let both = narrow && widened;
    // Values of codes are bf16 values, which the matrix unit multiplies, 32 at a time; pairs have no way of their own.
    let tiles = |c: &DotCodes| c.rounded.is_none() && c.group % TILE == 0;
    let coded = f.codes.as_ref().is_some_and(tiles) && widened;
    let (pairs, matrix) = (both && f.codes.is_none(), (both || coded) && k % TILE == 0);
    out.push_str(paired(pairs));
    if matrix {
        out.push_str("#define DOT_A_BF16\n");
        let left = f.left.as_ref().map(|side| Source::new(region, side, "m"));
        if let Some(s) = left.filter(|s| s.narrow && s.along) {
            let _ = writeln!(out, "#define DOT_A_AT(m) ({})", s.begin);
        }
    }
    let at = f.right.at.0;
    let _ = write!(out, "#define DOT_N {n}\n#define DOT_K {k}\n");
    match &f.codes {
        Some(codes) => {
            let slots = code_slots(codes, at);
            let body = if codes.rounded.is_some() { INTEGERS } else { CODES };
            let _ = write!(
                out,
                "{slots}{PACKED}{body}{END}{}#undef DOT_SCALED_AT\n#undef DOT_SCALE_AT\n#undef DOT_OFFSET_AT\n#undef DOT_SUMS_AT\n",
                undefine(&slots)
            );
        }
        None => {
            let kind = if narrow { "DOT_WEIGHT_BF16" } else { "DOT_WEIGHT_F32" };
            let _ = write!(out, "#define {kind} bufs[{at}]\n{PACKED}{PANELS}{END}");
        }
    }
    // Integers are multiplied at least as fast as pairs of bf16.
    let integers = f.codes.as_ref().is_some_and(|c| c.rounded.is_some());
    Ok(((matrix || integers).then_some(Products::Native), pairs || integers))
}

/// Slots of a weight stored as codes, in this buffer.
pub(super) fn code_slots(codes: &DotCodes, at: usize) -> String {
    let kind = codes.code.name().to_uppercase();
    let scales = match codes.dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    };
    let mut slots = format!(
        "#define DOT_CODES bufs[{at}]\n#define DOT_SCALES bufs[{}]\n#define DOT_CODE DOT_{kind}\n\
         #define DOT_GROUP {}\n#define DOT_SCALE_TYPE {scales}\n",
        codes.scales.0, codes.group
    );
    if let Some(offsets) = codes.offsets {
        let _ = writeln!(slots, "#define DOT_OFFSETS bufs[{}]", offsets.0);
    }
    if let Some(rounded) = codes.rounded {
        let _ = writeln!(slots, "#define DOT_ROUNDED {rounded}");
    }
    slots
}

/// Slots of sides in memory.
fn free_slots(region: &Region, f: &DotForm, widened: bool, out: &mut String) -> Ways {
    let (n, k) = (over_dims(region, &f.n), over_dims(region, &f.k));
    let _ = write!(out, "#define DOT_N ((int64_t){n})\n#define DOT_K ((int64_t){k})\n");
    let mut left = f.left.as_ref().map(|side| Source::new(region, side, "m"));
    let mut right = Source::new(region, &f.right, "n0");
    if let Some(b) = &f.batch {
        let _ = writeln!(out, "#define DOT_BATCH ((int64_t){})", over_dims(region, &b.count));
        left.iter_mut().for_each(|s| s.step_by("batch", region, &b.left));
        right.step_by("batch", region, &b.right);
    }
    let alike = left.as_ref().map_or(!right.narrow || widened, |s| s.narrow == right.narrow);
    let both = alike && right.narrow;
    out.push_str(paired(both));
    match &left {
        Some(s) => out.push_str(&s.rows_slot(both)),
        None => _ = writeln!(out, "#define DOT_ROW {k}"),
    }
    out.push_str(&right.panel_slots("", both));
    let matrix = f.batch.is_none() && alike;
    if matrix {
        out.push_str(&matrix_slots(left.as_ref(), &right, ["", ""]));
        out.push_str(matrix_way(right.narrow).0);
    }
    out.push_str(FREE);
    (matrix.then_some(matrix_way(right.narrow).1), both)
}

/// The matrix unit's way of `dot_free.c`, for sides that are both bf16, or both f32.
pub(super) fn matrix_way(narrow: bool) -> (&'static str, Products) {
    if narrow { (FREE_AMX, Products::Native) } else { (FREE_SPLIT, Products::Pieces) }
}

/// Its slots; rows and sums begin at these C expressions, each with its plus.
pub(super) fn matrix_slots(left: Option<&Source>, right: &Source, [row, sum]: [&str; 2]) -> String {
    let k = format!("{sum}(k)");
    let place = |s: &Source| (s.at(&k), s.row.clone());
    let rows = match left {
        Some(s) => Some((s.order("mk", "km"), place(s))),
        // Rows that an expression makes wait in scratch.
        None if right.narrow => {
            let at = format!("(const uint16_t *)scratch + ({row}(m)) * (int64_t)DOT_ROW + (k)");
            Some(("mk", (at, "DOT_ROW".into())))
        }
        None => None,
    };
    matrix_places(rows, (right.order("nk", "kn"), place(right)), right.narrow)
}

/// The same for sides of these orders and places (address of an element, length of a row). Rows that nothing describes are
/// those of the kernel's PROLOGUE_ROW.
pub(super) fn matrix_places(
    rows: Option<(&str, (String, String))>,
    (order, (at, line)): (&str, (String, String)),
    narrow: bool,
) -> String {
    let (kind, next) = if narrow { ("", "") } else { ("_f32", ", next") };
    let mut out = format!(
        "#define PAIRS_AT(n0, k) ({at})\n#define PAIRS_LINE {line}\n#define PAIRS_ALONG {}\n\
         #define PACK_PAIRS(dst, n0, n, k, kc{next}) \
         dot_pairs_{order}{kind}(dst, PAIRS_AT(n0, k), PAIRS_LINE, n, kc{next})\n",
        u8::from(order == "nk")
    );
    if let Some((order, (at, line))) = rows {
        let _ = write!(
            out,
            "#define ROWS_AT(m, k) ({at})\n#define ROWS_LINE {line}\n#define ROWS_ALONG {}\n\
             #define PACK_ROWS(dst, m, mr, k, kc{next}) \
             dot_rows_{order}{kind}(dst, ROWS_AT(m, k), ROWS_LINE, mr, kc{next})\n",
            u8::from(order == "mk")
        );
    }
    out
}

/// A side in memory, as C reads it.
pub(super) struct Source {
    /// Address of an element of the side's first row (left) or column (right) where the sum begins.
    begin: String,
    /// Step along the sum.
    step: String,
    /// Whether the sum runs along rows in memory.
    along: bool,
    /// Length of a row in memory.
    pub(super) row: String,
    /// Whether elements are bf16, else f32.
    pub(super) narrow: bool,
}

impl Source {
    /// A side whose row or column is the C expression `free`.
    pub(super) fn new(region: &Region, side: &Side, free: &str) -> Source {
        let buf = side.at.0;
        let narrow = side.dtype == DType::BF16;
        let ty = if narrow { "uint16_t" } else { "float" };
        let (across, step) = (over_dims(region, &side.free), over_dims(region, &side.along));
        let offset = over_dims(region, &side.offset);
        let begin = format!("(const {ty} *)bufs[{buf}] + {offset} + ({free}) * (int64_t){across}");
        let along = side.along.is_one();
        let row = if along { across } else { step.clone() };
        Source { begin, step, along, row, narrow }
    }

    /// Sides of several dots lie so far apart; `which` of them it is, a C expression.
    pub(super) fn step_by(&mut self, which: &str, region: &Region, step: &Dim) {
        self.begin = format!("{} + ({which}) * (int64_t){}", self.begin, over_dims(region, step));
    }

    /// The address of the element `k` of the sum.
    pub(super) fn at(&self, k: &str) -> String {
        format!("{} + ({k}) * (int64_t){}", self.begin, self.step)
    }

    /// The slot that packs a block of rows of this side; `both` sides are bf16, or not.
    pub(super) fn rows_slot(&self, both: bool) -> String {
        rows_slot(self.order("mk", "km"), self.place().each_ref().map(String::as_str), both)
    }

    /// Slots that pack a block of columns of this side, and that ask for it before; `which` are their first arguments, each
    /// with its comma.
    pub(super) fn panel_slots(&self, which: &str, both: bool) -> String {
        panel_slots(which, self.order("nk", "kn"), self.place().each_ref().map(String::as_str), both)
    }

    fn place(&self) -> [String; 3] {
        [self.at("k0"), u8::from(self.narrow).to_string(), self.row.clone()]
    }

    fn order<'a>(&self, along: &'a str, across: &'a str) -> &'a str {
        if self.along { along } else { across }
    }
}

/// The slot that packs the block of rows at a place (address, whether bf16, length of a row); `both` sides are bf16, or not.
pub(super) fn rows_slot(order: &str, [at, narrow, row]: [&str; 3], both: bool) -> String {
    let call = match both {
        true => format!("dot_both_{order}(dst, {at}, {row}, mr, kc)"),
        false => format!("dot_block_{order}(dst, {at}, {narrow}, {row}, mr, kc)"),
    };
    format!("#define LOAD_A(dst, m, mr, k0, kc) {call}\n")
}

/// Slots that pack the block of columns at a place, and that ask for it before.
pub(super) fn panel_slots(which: &str, order: &str, [at, narrow, row]: [&str; 3], both: bool) -> String {
    let call = match both {
        true => format!("dot_both_panel_{order}(dst, {at}, {row}, kc, n)"),
        false => format!("dot_panel_{order}(dst, {at}, {narrow}, {row}, kc, n)"),
    };
    format!(
        "#define LOAD_PANEL(dst, {which}n0, n, k0, kc) {call}\n\
         #define FETCH_PANEL({which}n0, n, k0, kc, part, parts) \
         dot_fetch_{order}({at}, {narrow}, {row}, kc, n, part, parts)\n"
    )
}

/// True for f32 values that are bf16 values.
pub(super) fn is_widened(g: &astrai_ir::Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match &node.op {
        Op::Cast(_) => g.ty(node.args[0]).dtype == DType::BF16,
        op if op.is_view() => is_widened(g, node.args[0]),
        _ => false,
    }
}

/// The slots that the functions of [`dot_epilogue`] fill; the C expression `row` is the row of the result of row `m`.
pub(super) fn epilogue_slots(name: &str, row: &str) -> String {
    format!(
        "#define EPILOGUE(m, n0, acc, valid) {name}_store(bufs, dims, {row}, n0, acc, valid)\n\
         #define PREFETCH(m, n0) {name}_prefetch(bufs, dims, {row}, n0)\n"
    )
}

/// `row[0..K]`: the left argument of one row.
pub(super) fn dot_prologue(region: &Region, name: &str, x: NodeId) -> Result<String, String> {
    let shape = &region.graph().ty(x).shape;
    let lead_dims = &shape[..shape.len().saturating_sub(1)];
    let mut lower = Lower::new(region);
    let (row, leading, at) = row_of(lead_dims);
    lower.open();
    for s in lower.segments(x) {
        let (var, positions) = lower.positions(&s);
        lower.open();
        for p in positions {
            let mut at = at.clone();
            at.push(p.clone());
            let value = lower.value(x, &at)?;
            lower.push(Stmt::Store { buf: 0, at: p, dtype: DType::F32, value });
        }
        let body = lower.close();
        lower.push(Stmt::Loop { var, body });
    }
    let (body, before) = (lower.close(), lower.close());
    let mut p = Printer::new(Dialect::C, 0);
    let head = format!(
        "static void {name}_load(void *const *bufs, const int64_t *dims, int64_t row, float *restrict w0)"
    );
    p.braces(&head, |p| {
        reads_only(p, region);
        p.statements(&before);
        lead(p, &row, &leading);
        p.statements(&body);
    });
    Ok(p.finish())
}

/// The results of `valid` columns of one row, from their sums; and what prefetches the lines that these are made from and written to.
pub(super) fn dot_epilogue(region: &Region, name: &str, dot: NodeId) -> Result<String, String> {
    let g = region.graph();
    let rank = |side: usize| g.ty(g.node(dot).args[side]).rank();
    let (free, gradient) = match &g.node(dot).op {
        Op::Dot(d) => (d.batch.len() + d.left_free(rank(0)).len(), d.over_rows([rank(0), rank(1)])),
        Op::GroupedDot(_) => (1, false),
        Op::GroupedOuter(_) => (1, true),
        _ => return Err("a dot region without a dot".into()),
    };
    let (lead_dims, column_dims) = g.ty(dot).shape.split_at(free);
    let mut lower = Lower::new(region);
    let (row, leading, mut at) = row_of(lead_dims);
    lower.open();
    let root = g.outputs()[0].1;
    let first = Var { name: "n0".into(), extent: Dim::product(column_dims), depth: 1 };
    let var = lower.var(Dim::from(32));
    lower.open();
    // The sums lie where a buffer beyond the reads would: r<reads>.
    let acc = Expr::Load { buf: region.piece.reads.len(), at: Index::var(&var), dtype: DType::F32 };
    lower.give(dot, narrow(g.ty(dot).dtype, acc));
    at.extend(Index::var(&first).add(&Index::var(&var)).unravel(column_dims));
    let value = lower.value(root, &at)?;
    let ty = g.ty(root);
    // A line is gathered beside the output, w<writes>, and written at once.
    let line = region.piece.write_types().len();
    lower.push(Stmt::Store { buf: line, at: Index::var(&var), dtype: ty.dtype, value });
    at.truncate(leading.len());
    at.extend(Index::var(&first).unravel(column_dims));
    let begin = index(&Index::linear(&at, &ty.shape));
    let (inner, body, before) = (lower.close(), lower.close(), lower.close());
    let acc = region.piece.reads.len();
    // A sum over the rows of both sides is a gradient of weights, which is read when those of all layers are there: no cache keeps it so long.
    let whole = match gradient {
        true => "DOT_FAR_OUT".to_string(),
        false => format!("{} * (int64_t)sizeof(*w0)", dim(&Dim::product(&ty.shape))),
    };
    let mut p = Printer::new(Dialect::C, 0);
    let args = "void *const *bufs, const int64_t *dims, int64_t row, int64_t n0";
    p.braces(&format!("INLINE void {name}_prefetch({args})"), |p| {
        prologue(p, region);
        p.statements(&before);
        lead(p, &row, &leading);
        p.statements(&body);
        p.line(&format!("dot_prefetch(w0 + {begin}, 32 * sizeof *w0, {whole}, 1);"));
        let mut found = Vec::new();
        each_load(&inner, &mut |buf, at| {
            // Elements one behind another; neither the sums, nor what is found by the columns' own values.
            let rest = at.without(&var).filter(|rest| buf < acc && rest.depth() < var.depth);
            found.extend(
                rest.map(|rest| {
                    format!("dot_prefetch(r{buf} + {}, 32 * sizeof *r{buf}, 0, 0);", index(&rest))
                }),
            );
        });
        found.sort();
        found.dedup();
        found.iter().for_each(|l| p.line(l));
    });
    let head = format!("INLINE void {name}_store({args}, const float *restrict r{acc}, int valid)");
    p.braces(&head, |p| {
        prologue(p, region);
        p.statements(&before);
        lead(p, &row, &leading);
        p.statements(&body);
        let (v, t) = (&var.name, element(ty.dtype));
        p.line(&format!("{t} w{line}[32] __attribute__((aligned(64)));"));
        let loop_to = |p: &mut Printer, to: &str| {
            p.line("#pragma GCC ivdep");
            p.braces(&format!("for (int64_t {v} = 0; {v} < {to}; {v}++)"), |p| p.statements(&inner));
        };
        // A whole panel has a literal length, which the compiler turns into straight vector code.
        p.braces("if (valid == 32)", |p| {
            loop_to(p, "32");
            p.line(&format!("dot_put(w0 + {begin}, w{line}, sizeof w{line}, {whole});"));
        });
        p.braces("else", |p| {
            loop_to(p, "valid");
            p.line(&format!("memcpy(w0 + {begin}, w{line}, valid * sizeof *w{line});"));
        });
    });
    Ok(p.finish())
}

/// Bytes between the phases: the packed rows of the left argument, in f32 or in pieces for the matrix unit.
fn workspace(f: &DotForm, packed: bool) -> Dim {
    let one = |n: usize| Dim::from(n);
    let split = !packed && f.batch.is_none() && f.right.dtype == DType::F32;
    let rounded = f.codes.as_ref().and_then(|c| c.rounded);
    let bytes = match f.k.size() {
        Some(k) if split => one(row_bytes(k).max(split_bytes(k))),
        Some(k) => one(rounded.map_or(row_bytes(k), |group| integer_bytes(k, group))),
        None if split => (&f.k.next_multiple_of(BLOCK) * &one(size_of::<f32>()))
            .at_least(&(&f.k.next_multiple_of(TILE) * &one(SPLIT))),
        None => &f.k.next_multiple_of(BLOCK) * &one(size_of::<f32>()),
    };
    let rows = f.batch.as_ref().map_or(f.m.clone(), |b| &b.count * &f.m);
    let rows = if split { rows.next_multiple_of(TILE) } else { rows };
    // Offsets are multiplied by the sums of the left side's groups.
    let sums = f.codes.as_ref().filter(|c| c.offsets.is_some()).and_then(|c| Some(f.k.size()? / c.group));
    &rows * &(&bytes + &one(sums.unwrap_or(0) * size_of::<f32>()))
}

/// Bytes of a packed row of `k` numbers: a whole number of depth blocks of f32.
pub(super) fn row_bytes(k: usize) -> usize {
    k.next_multiple_of(BLOCK) * size_of::<f32>()
}

/// The same of a row of integers, groups of which share a scale.
pub(super) fn integer_bytes(k: usize, group: usize) -> usize {
    k + k / group * INTEGERS_SCALE
}

/// The same of a row in pieces for the matrix unit, which takes whole tiles of rows.
pub(super) fn split_bytes(k: usize) -> usize {
    k.next_multiple_of(TILE) * SPLIT
}
