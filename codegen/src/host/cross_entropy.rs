//! The slots of `cross_entropy.c` and of the dots that it runs. In: a region around cross-entropy of a linear layer, or its
//! gradient. Out: the template's `#define`s around its text and three inclusions of `dot_free.c`, and how much scratch it
//! takes.

use super::dots::{
    BLOCK, TILE, matrix_places, matrix_way, paired, panel_slots, row_bytes, rows_slot, split_bytes,
};
use super::{element, over_dims, undefine};
use astrai_ir::ops::{LinearCrossEntropy, Op};
use astrai_ir::plan::bound;
use astrai_ir::{DType, Dim, Node, NodeId, Region};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("cross_entropy.c");
const DOT: &str = include_str!("dot_free.c");

/// Logits that exist at once, 64 MiB of them.
const LOGITS: usize = 16 << 20;
/// Fewest and most tokens of a chunk: the sums of the weight's gradient go through memory once a chunk.
const CHUNK: (usize, usize) = (32, 512);
/// Rows of the weight that one round's products take, so that their packed sides stay in the caches; as many of bf16 as
/// the matrix unit adds up in its own registers.
const SLICE: usize = 1536;

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
        let mut text = format!(
            "#define NAME(x) {name}_{dot}_##x\n#define DOT_M {m}\n#define DOT_N {n}\n#define DOT_K {k}\n\
             #define LEFT_AT(i, k) {}\n#define RIGHT_AT(i, k) {}\n\
             {blocks}#define EPILOGUE(m, n0, acc, valid) {name}_{}\n",
            left.at, right.at, self.epilogue
        );
        if narrow(left.narrow) == narrow(right.narrow) {
            let place = |at: &str, line: &str| (at.to_string(), line.to_string());
            let (left_place, right_place) =
                (place("LEFT_AT(m, k)", left.line), place("RIGHT_AT(n0, k)", right.line));
            let narrow = narrow(left.narrow);
            text.push_str(&matrix_places(Some((rows, left_place)), (panel, right_place), narrow));
            text.push_str(matrix_way(narrow));
        }
        text + DOT + "#undef LEFT_AT\n#undef RIGHT_AT\n"
    }
}

/// The node of the region, its forward operator, and whether it is the gradient.
struct Found<'a> {
    node: &'a Node,
    forward: &'a LinearCrossEntropy,
    gradient: bool,
    vocab: usize,
    width: usize,
}

fn found(region: &Region) -> Result<Found<'_>, String> {
    let g = &region.graph;
    let node = g.nodes().iter().find_map(|node| match &node.op {
        Op::LinearCrossEntropy(forward) => Some((node, forward, false)),
        Op::LinearCrossEntropyGrad(gradient) => Some((node, &gradient.forward, true)),
        _ => None,
    });
    let (node, forward, gradient) = node.ok_or("no cross-entropy in the region")?;
    let size = |axis: usize| g.ty(node.args[1]).shape[axis].size().ok_or("sizes of a weight are literal");
    Ok(Found { node, forward, gradient, vocab: size(0)?, width: size(1)? })
}

impl Found<'_> {
    /// Most tokens whose logits exist at once.
    fn chunk(&self, tokens: usize) -> usize {
        let rows = (LOGITS / self.vocab).clamp(CHUNK.0, CHUNK.1);
        // Sums over whole blocks of a packed row, where there are several.
        let whole = if rows < BLOCK { CHUNK.0 } else { BLOCK };
        (rows / whole * whole).min(tokens.max(1))
    }

    /// Rows of the weight in a round; forward all of them.
    fn slice(&self) -> usize {
        if self.gradient { self.vocab.min(SLICE) } else { self.vocab }
    }

    /// Elements from one row of logits to the next: an odd number of cache lines, so that a column is not in few sets.
    fn row(&self) -> usize {
        self.vocab.next_multiple_of(64) + 16
    }
}

/// Upper bound of the tokens.
fn most_tokens(region: &Region, found: &Found) -> Result<usize, String> {
    let most = bound(&region.graph.symbols, &region.graph.ty(found.node.args[0]).shape[0]);
    most.map(|n| n as usize).map_err(|e| e.to_string())
}

/// The kernel's text, how many phases it has.
pub(super) fn kernel(region: &Region, name: &str) -> Result<(String, usize), String> {
    let f = found(region)?;
    let results = results(region, &f);
    let defines = sizes(region, &f, results.len())? + &values(region, &f, &results)?;
    let mut source = format!("{defines}#define NAME(x) {name}_##x\n{TEMPLATE}#undef NAME\n");
    let narrow = |key: &str| defines.lines().any(|l| l == format!("#define {key} 1"));
    for p in &PRODUCTS {
        if p.result.is_empty() || results.iter().any(|(key, _)| *key == p.result) {
            source.push_str(&p.text(name, &narrow));
        }
    }
    Ok((source + &undefine(&defines), if f.gradient { 5 } else { 3 }))
}

/// Definitions of the sizes of the region and of a round.
fn sizes(region: &Region, f: &Found, results: usize) -> Result<String, String> {
    let (symbols, slice) = (region.graph.symbols.len(), f.slice());
    let tokens = over_dims(region, &region.graph.ty(f.node.args[0]).shape[0]);
    let mut text = format!("#define TOKENS {tokens}\n");
    for (key, value) in [
        ("SYMBOLS", symbols),
        ("BUFFERS", region.layouts.len() + results),
        ("VOCAB", f.vocab),
        ("WIDTH", f.width),
        ("CHUNK", f.chunk(most_tokens(region, f)?)),
        ("SLICE", slice),
        ("SLICES", f.vocab.div_ceil(slice)),
        ("LOGITS_ROW", f.row()),
    ] {
        let _ = writeln!(text, "#define {key} {value}");
    }
    for (i, key) in ["FIRST", "COUNT", "VOCAB0", "VOCABS"].into_iter().enumerate() {
        let _ = writeln!(text, "#define {key} dims[{}]", symbols + i);
    }
    Ok(text)
}

/// Definitions of where values lie and of the operator's attributes.
fn values(region: &Region, f: &Found, results: &[(&str, usize)]) -> Result<String, String> {
    let mut text = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(text, "#define {key} {value}");
    for (letter, arg, first) in [("HIDDEN", 0, "FIRST + "), ("WEIGHT", 1, "")] {
        let (buffer, dtype) = whole(region, f.node.args[arg])?;
        let row = format!("({first}(row)) * WIDTH + (column)");
        let at = format!("((const {} *)bufs[{buffer}] + {row})", element(dtype));
        define(&format!("{letter}_AT(row, column)"), at);
        define(&format!("{letter}_BF16"), u8::from(dtype == DType::BF16).to_string());
    }
    let narrow = f.gradient && region.graph.ty(f.node.args[0]).dtype == DType::BF16;
    let (element, steps) = if narrow { ("bf16", 2) } else { ("float", 1) };
    define("NARROW", u8::from(narrow).to_string());
    define("DLOGITS_ROW", format!("({steps} * LOGITS_ROW)"));
    let at = format!("((const {element} *)bufs[BUFFERS] + (row) * DLOGITS_ROW + VOCAB0 + (column))");
    define("DLOGITS_AT(row, column)", at);
    define("TARGETS_BUF", whole(region, f.node.args[2])?.0.to_string());
    if f.gradient {
        define("GRAD_BUF", whole(region, f.node.args[3])?.0.to_string());
    }
    results.iter().for_each(|(key, at)| define(key, at.to_string()));
    define("SMOOTHING", format!("{:?}f", f.forward.label_smoothing.0 as f32));
    define("SOFTCAP", format!("{:?}f", f.forward.softcap.map_or(0.0, |c| c.0 as f32)));
    Ok(text)
}

/// Which results are written, to which buffers.
fn results(region: &Region, f: &Found) -> Vec<(&'static str, usize)> {
    let g = &region.graph;
    let name = |id: NodeId| match (&g.node(id).op, f.gradient) {
        (Op::Part(p), true) => ["DHIDDEN_BUF", "DWEIGHT_BUF", "LOSSES_BUF"][p.index.min(2) as usize],
        _ => "LOSSES_BUF",
    };
    let outputs = g.outputs().iter().enumerate();
    outputs.map(|(i, (_, id))| (name(*id), region.layouts.len() + i)).collect()
}

/// The buffer of a value that is read as it lies, and its element type there.
fn whole(region: &Region, id: NodeId) -> Result<(usize, DType), String> {
    let node = region.graph.node(id);
    match &node.op {
        Op::Input(i) => {
            let buffer = i.name.strip_prefix('r').and_then(|s| s.parse().ok());
            Ok((buffer.ok_or("a leaf is no buffer")?, i.ty.dtype))
        }
        Op::Cast(_) | Op::Reshape(_) => whole(region, node.args[0]),
        op => Err(format!("cross-entropy reads `{}`, which is not in memory", op.name())),
    }
}

/// Bytes of scratch: a chunk's logits, and the packed left sides of the products.
pub(super) fn scratch(region: &Region) -> Dim {
    let Ok(f) = found(region) else { return Dim::from(0) };
    let Ok(tokens) = most_tokens(region, &f) else { return Dim::from(0) };
    let (rows, slice) = (f.chunk(tokens), f.slice());
    let packed = |m: usize, k: usize| (m * row_bytes(k)).max(m.next_multiple_of(TILE) * split_bytes(k));
    let products = if f.gradient { packed(rows, slice) + packed(slice, rows) } else { 0 };
    Dim::from(rows * f.row() * size_of::<f32>() + products.max(packed(rows, f.width)) + 64)
}
