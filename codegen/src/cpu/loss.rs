//! The slots of `loss.c` and of the dots that it runs. In: a region around cross-entropy of a linear layer, or its
//! gradient. Out: the template's `#define`s around its text and three inclusions of `dot_free.c`, and how much scratch it
//! takes.

use super::dot::{
    BLOCK, TILE, matrix_places, matrix_way, paired, panel_slots, row_bytes, rows_slot, split_bytes,
};
use super::{Emitted, element, over_dims, undefine};
use astrai_ir::region::LossForm;
use astrai_ir::{DType, Dim, Region};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("bodies/loss.c");
const DOT: &str = include_str!("bodies/dot_free.c");

/// Logits that exist at once, 104 MiB of them.
const LOGITS: usize = 26 << 20;
/// Fewest and most tokens of a chunk: the sums of the weight's gradient go through memory once a chunk.
const CHUNK: (usize, usize) = (32, 512);
/// Rows of the weight that one round's products take, so that their packed sides stay in the caches; as many of bf16 as
/// the matrix unit adds up in its own registers.
const SLICE: usize = 1536;

/// Macros that name the results' buffers: the gradients', then those of the forward operator.
const RESULTS: [&str; 8] = [
    "DHIDDEN_BUF",
    "DWEIGHT_BUF",
    "LOSSES_BUF",
    "LSE_BUF",
    "MEAN_BUF",
    "ENTROPY_BUF",
    "SQUARES_BUF",
    "TOP_BUF",
];

/// One side of a product: `[free, sum]` in memory where `along`, else `[sum, free]`.
struct Side {
    /// Address of the element (`i`, `k`).
    at: &'static str,
    along: bool,
    /// Length of a row in memory.
    line: &'static str,
    /// Macro that is 1 for bf16 elements.
    narrow: &'static str,
}

/// One product as slots of the dot; its rows `m`, columns `n` and sums `k` are expressions over a round's `dims`.
struct Product {
    name: &'static str,
    result: &'static str,
    sizes: [&'static str; 3],
    left: Side,
    right: Side,
    epilogue: &'static str,
}

/// logits = hidden · weightᵀ, d hidden = d logits · weight, d weight = d logitsᵀ · hidden.
const PRODUCTS: [Product; 3] = [
    Product {
        name: "logits",
        result: "",
        sizes: ["COUNT", "((int64_t)VOCAB)", "((int64_t)WIDTH)"],
        left: Side { at: "HIDDEN_AT(i, k)", along: true, line: "WIDTH", narrow: "HIDDEN_BF16" },
        right: Side { at: "WEIGHT_AT(i, k)", along: true, line: "WIDTH", narrow: "WEIGHT_BF16" },
        epilogue: "keep(bufs, m, n0, acc, valid)",
    },
    Product {
        name: "dhidden",
        result: "DHIDDEN_BUF",
        sizes: ["COUNT", "((int64_t)WIDTH)", "VOCABS"],
        left: Side { at: "DLOGITS_AT(i, k)", along: true, line: "DLOGITS_ROW", narrow: "NARROW" },
        right: Side { at: "WEIGHT_AT(VOCAB0 + (k), i)", along: false, line: "WIDTH", narrow: "WEIGHT_BF16" },
        epilogue: "add_hidden(bufs, dims, m, n0, acc, valid)",
    },
    Product {
        name: "dweight",
        result: "DWEIGHT_BUF",
        sizes: ["VOCABS", "((int64_t)WIDTH)", "COUNT"],
        left: Side { at: "DLOGITS_AT(k, i)", along: false, line: "DLOGITS_ROW", narrow: "NARROW" },
        right: Side { at: "HIDDEN_AT(k, i)", along: false, line: "WIDTH", narrow: "HIDDEN_BF16" },
        epilogue: "add_weight(bufs, dims, m, n0, acc, valid)",
    },
];

impl Product {
    /// The dot of the kernel `name`; sides of one type go through the matrix unit where there is one.
    fn text(&self, name: &str, narrow: &dyn Fn(&str) -> bool) -> String {
        let (dot, [m, n, k], left, right) = (self.name, self.sizes, &self.left, &self.right);
        let rows = if left.along { "mk" } else { "km" };
        let panel = if right.along { "nk" } else { "kn" };
        let both = narrow(left.narrow) && narrow(right.narrow);
        let blocks = rows_slot(rows, ["LEFT_AT(m, k0)", left.narrow, left.line], both)
            + &panel_slots("", panel, ["RIGHT_AT(n0, k0)", right.narrow, right.line], both)
            + paired(both);
        // Where results lie far apart the epilogue prefetches for itself, on the matrix unit's way too.
        let mut text = format!(
            "#define NAME(x) {name}_{dot}_##x\n#define DOT_M {m}\n#define DOT_N {n}\n#define DOT_K {k}\n\
             #define LEFT_AT(i, k) {}\n#define RIGHT_AT(i, k) {}\n\
             {blocks}#define EPILOGUE(m, n0, acc, valid) {name}_{}\n#define PREFETCH(m, n0) ((void)0)\n",
            left.at, right.at, self.epilogue
        );
        if narrow(left.narrow) == narrow(right.narrow) {
            let place = |at: &str, line: &str| (at.to_string(), line.to_string());
            let (left_place, right_place) =
                (place("LEFT_AT(m, k)", left.line), place("RIGHT_AT(n0, k)", right.line));
            let narrow = narrow(left.narrow);
            text.push_str(&matrix_places(Some((rows, left_place)), (panel, right_place), narrow));
            text.push_str(matrix_way(narrow).0);
        }
        text + DOT + "#undef LEFT_AT\n#undef RIGHT_AT\n"
    }
}

/// Most tokens whose logits exist at once.
fn chunk(f: &LossForm) -> usize {
    let rows = (LOGITS / f.size[0]).clamp(CHUNK.0, CHUNK.1);
    // Sums over whole blocks of a packed row, where there are several.
    let whole = if rows < BLOCK { CHUNK.0 } else { BLOCK };
    (rows / whole * whole).min(f.tokens.1.max(1))
}

/// Rows of the weight in a round; forward all of them.
fn slice(f: &LossForm) -> usize {
    if f.gradient { f.size[0].min(SLICE) } else { f.size[0] }
}

/// Elements from one row of logits to the next: an odd number of cache lines, so that a column is not in few sets.
fn row(f: &LossForm) -> usize {
    f.size[0].next_multiple_of(64) + 16
}

/// The kernel's text, its phases, rounds and workspace.
pub(super) fn kernel(region: &Region, f: &LossForm, name: &str) -> Emitted {
    let key = |result: u32| RESULTS[(result as usize).min(RESULTS.len() - 1)];
    let buffers = region.piece.reads.len()..;
    let results: Vec<(&str, usize)> = f.results.iter().map(|r| key(r.0)).zip(buffers).collect();
    let defines = sizes(region, f, results.len()) + &values(f, &results);
    let mut source = format!("{defines}#define NAME(x) {name}_##x\n{TEMPLATE}#undef NAME\n");
    let narrow = |key: &str| defines.lines().any(|l| l == format!("#define {key} 1"));
    for p in &PRODUCTS {
        if p.result.is_empty() || results.iter().any(|(key, _)| *key == p.result) {
            source.push_str(&p.text(name, &narrow));
        }
    }
    let phases = if f.gradient { 5 } else { 3 };
    let made = Emitted::counted(source + &undefine(&defines), name, phases);
    let chunks = f.tokens.0.ceil_div(&Dim::from(chunk(f))).at_least(&Dim::from(1));
    let rounds = &chunks * &Dim::from(f.size[0].div_ceil(slice(f)));
    let [hidden, weight] = [f.hidden.1, f.weight.1].map(|dtype| dtype == DType::BF16);
    let matrix = (hidden == weight).then_some(matrix_way(weight).1);
    let workspace = Dim::from(areas(f)[2]);
    Emitted { rounds, workspace, tiles: true, matrix, pairs: hidden && weight, ..made }
}

/// Definitions of the sizes of the region and of a round.
fn sizes(region: &Region, f: &LossForm, results: usize) -> String {
    let (symbols, slice) = (region.graph().symbols.len(), slice(f));
    let mut text = format!("#define TOKENS {}\n", over_dims(region, &f.tokens.0));
    for (key, value) in [
        ("SYMBOLS", symbols),
        ("BUFFERS", region.piece.reads.len() + results),
        ("VOCAB", f.size[0]),
        ("WIDTH", f.size[1]),
        ("CHUNK", chunk(f)),
        ("SLICE", slice),
        ("SLICES", f.size[0].div_ceil(slice)),
        ("LOGITS_ROW", row(f)),
        ("PACKED", areas(f)[0]),
        ("SECOND", areas(f)[1]),
    ] {
        let _ = writeln!(text, "#define {key} {value}");
    }
    for (i, key) in ["FIRST", "COUNT", "VOCAB0", "VOCABS"].into_iter().enumerate() {
        let _ = writeln!(text, "#define {key} dims[{}]", symbols + i);
    }
    text
}

/// Definitions of where values lie and of the operator's attributes.
fn values(f: &LossForm, results: &[(&str, usize)]) -> String {
    let mut text = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(text, "#define {key} {value}");
    for (letter, (buffer, dtype), first) in [("HIDDEN", f.hidden, "FIRST + "), ("WEIGHT", f.weight, "")] {
        let row = format!("({first}(row)) * WIDTH + (column)");
        let at = format!("((const {} *)bufs[{}] + {row})", element(dtype), buffer.0);
        define(&format!("{letter}_AT(row, column)"), at);
        define(&format!("{letter}_BF16"), u8::from(dtype == DType::BF16).to_string());
    }
    let narrow = f.gradient && f.dtype == DType::BF16;
    let (element, steps) = if narrow { ("bf16", 2) } else { ("float", 1) };
    define("NARROW", u8::from(narrow).to_string());
    define("DLOGITS_ROW", format!("({steps} * LOGITS_ROW)"));
    let at = format!("((const {element} *)bufs[BUFFERS] + (row) * DLOGITS_ROW + VOCAB0 + (column))");
    define("DLOGITS_AT(row, column)", at);
    define("TARGETS_BUF", f.targets.0.to_string());
    let cotangents = ["GRAD_BUF", "LSE_GRAD_BUF", "MEAN_GRAD_BUF", "ENTROPY_GRAD_BUF"];
    cotangents.iter().zip(&f.cotangents).for_each(|(key, at)| define(key, at.0.to_string()));
    define("STATISTICS", u8::from(f.op.statistics).to_string());
    results.iter().for_each(|(key, at)| define(key, at.to_string()));
    define("SMOOTHING", format!("{:?}f", f.op.label_smoothing.0 as f32));
    define("SOFTCAP", format!("{:?}f", f.op.softcap.map_or(0.0, |c| c.0 as f32)));
    text
}

/// Where areas of the workspace begin behind a chunk's logits, in bytes: the packed left side of the first product, or of the second;
/// the packed left side of the last; the end.
fn areas(f: &LossForm) -> [usize; 3] {
    let (rows, slice) = (chunk(f), slice(f));
    let packed = |m: usize, k: usize| (m * row_bytes(k)).max(m.next_multiple_of(TILE) * split_bytes(k));
    let first = rows * row(f) * size_of::<f32>();
    let second = if f.gradient { (first + packed(rows, slice)).next_multiple_of(64) } else { first };
    let last = if f.gradient { second + packed(slice, rows) } else { second };
    [first, second, last.max(first + packed(rows, f.size[1]))]
}
