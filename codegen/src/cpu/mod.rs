//! The backend of processors. In: regions. Out: C for the system's compiler: functions over `units` of work, any split of which over
//! threads gives the same bits. Several kernels share a translation unit behind one prelude.

mod attention;
mod attention_grad;
mod backend;
mod columns;
mod dot;
mod grouped;
pub mod isa;
mod loss;
mod low_rank;
mod route;
mod rows;
mod store;

pub use backend::{Cpu, LIMITS};
pub use isa::Isa;

use crate::kernel_ir::print::{Printer, dim, element, symbol};
use astrai_ir::kernel::{Entry, Grid, Products};
use astrai_ir::region::Heads;
use astrai_ir::{DType, Dim, Operand, Region};

/// A kernel's text and its launch, before it has an identity.
struct Emitted {
    source: String,
    entries: Vec<Entry>,
    workspace: Dim,
    rounds: Dim,
    /// It uses the register tiles of dots.
    tiles: bool,
    /// It reads codes of weights.
    codes: bool,
    /// On what it multiplies where there is a matrix unit; `None` where it has no way there.
    matrix: Option<Products>,
    /// Its sides are bf16 values, of which instructions may add pairs.
    pairs: bool,
}

impl Emitted {
    /// One phase of so many units, without workspace.
    fn one(source: String, units: Dim) -> Emitted {
        let symbol = format!("{}_phase0", astrai_ir::kernel::UNNAMED);
        let shared = Dim::from(0);
        Emitted::new(source, vec![Entry { symbol, grid: Grid::Units(units), block: 1, shared }])
    }

    /// Phases whose units the kernel's own functions count.
    fn counted(source: String, name: &str, phases: usize) -> Emitted {
        let entry = |i| Entry {
            symbol: format!("{name}_phase{i}"),
            grid: Grid::Counted(format!("{name}_units{i}")),
            block: 1,
            shared: Dim::from(0),
        };
        Emitted::new(source, (0..phases).map(entry).collect())
    }

    fn new(source: String, entries: Vec<Entry>) -> Emitted {
        let [workspace, rounds] = [0, 1].map(Dim::from);
        let (tiles, codes, matrix, pairs) = (false, false, None, false);
        Emitted { source, entries, workspace, rounds, tiles, codes, matrix, pairs }
    }
}

/// Sizes and buffers as locals.
pub(crate) fn prologue(p: &mut Printer, region: &Region) {
    reads_only(p, region);
    for (i, t) in region.piece.write_types().iter().enumerate() {
        let at = region.piece.reads.len() + i;
        let alone = if region.piece.in_place.iter().any(|(w, _)| *w == i) { "" } else { "restrict " };
        p.line(&format!("{0} *{alone}w{i} = ({0} *)bufs[{at}]; (void)w{i};", element(t.dtype)));
    }
}

pub(crate) const PHASE: &str =
    "(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)";

/// An expression over `dims`, for use outside a kernel's body.
pub(crate) fn over_dims(region: &Region, d: &Dim) -> String {
    let mut text = dim(d);
    for (i, s) in region.graph().symbols.iter().enumerate() {
        text = replace_word(&text, &symbol(&s.name), &format!("dims[{i}]"));
    }
    text
}

fn replace_word(text: &str, word: &str, with: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, after) = (&rest[..at], &rest[at + word.len()..]);
        let whole = !before.ends_with(is_word) && !after.starts_with(is_word);
        out.push_str(before);
        out.push_str(if whole { with } else { word });
        rest = after;
    }
    out + rest
}

/// Sizes and the buffers read as locals; `restrict` unless the kernel writes there too.
fn reads_only(p: &mut Printer, region: &Region) {
    for (i, s) in region.graph().symbols.iter().enumerate() {
        p.line(&format!("const int64_t {} = dims[{i}]; (void){0};", symbol(&s.name)));
    }
    for (i, t) in region.piece.read_types().iter().enumerate() {
        let alone =
            if region.piece.in_place.iter().any(|(_, r)| *r == Operand(i)) { "" } else { "restrict " };
        p.line(&format!("const {0} *{alone}r{i} = (const {0} *)bufs[{i}]; (void)r{i};", element(t.dtype)));
    }
}

/// What a load makes of an element of this type.
fn load(dtype: DType) -> String {
    match dtype {
        DType::F32 => "(x)".into(),
        _ if dtype.is_float() => format!("{}_to_f32(x)", element(dtype)),
        _ => "((float)(x))".into(),
    }
}

/// What a store makes of a number.
fn store(dtype: DType) -> String {
    if dtype == DType::F32 { "(x)".into() } else { format!("f32_to_{}(x)", element(dtype)) }
}

/// Slots of a `[tokens, heads, d]` argument.
fn heads(region: &Region, letter: &str, s: &Heads, define: &mut impl FnMut(&str, String)) {
    define(&format!("{letter}_BUF"), s.at.0.to_string());
    define(&format!("{letter}_T"), element(s.dtype).into());
    define(&format!("LOAD_{letter}(x)"), load(s.dtype));
    define(&format!("{letter}_OFF"), over_dims(region, &s.offset));
    define(&format!("{letter}_ROW"), over_dims(region, &s.row));
    define(&format!("{letter}_HEAD"), over_dims(region, &s.head));
}

/// Takes the definitions of a template's slots back.
fn undefine(defines: &str) -> String {
    let name = |l: &str| l["#define ".len()..].split(['(', ' ']).next().unwrap_or("").to_string();
    defines.lines().map(|l| format!("#undef {}\n", name(l))).collect()
}
