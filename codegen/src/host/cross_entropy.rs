//! The slots of `cross_entropy.c` and of the dots that it runs. In: a region around cross-entropy of a linear layer, or its
//! gradient. Out: the template's `#define`s around its text and three inclusions of `dot_free.c`, and how much scratch it
//! takes.

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
/// Rows of the weight that one round's products take, so that their packed sides stay in the caches.
const SLICE: usize = 2048;
/// Floats in a block of a packed row.
const BLOCK: usize = 256;

/// The products: logits = hidden · weightᵀ, d hidden = d logits · weight, d weight = d logitsᵀ · hidden.
const DOTS: [(&str, &str); 3] = [
    (
        "logits",
        "#define DOT_M COUNT\n#define DOT_N ((int64_t)VOCAB)\n#define DOT_K ((int64_t)WIDTH)\n\
         #define LOAD_A(dst, m, mr, k0, kc) dot_block_mk(dst, HIDDEN_AT(m, k0), HIDDEN_BF16, WIDTH, mr, kc)\n\
         #define LOAD_PANEL(dst, n0, n, k0, kc) dot_panel_nk(dst, WEIGHT_AT(n0, k0), WEIGHT_BF16, WIDTH, kc, n)\n\
         #define EPILOGUE(m, n0, acc, valid) KERNEL_keep(bufs, m, n0, acc, valid)\n",
    ),
    (
        "dhidden",
        "#define DOT_M COUNT\n#define DOT_N ((int64_t)WIDTH)\n#define DOT_K VOCABS\n\
         #define LOAD_A(dst, m, mr, k0, kc) dot_block_mk(dst, DLOGITS_AT(m, k0), NARROW, DLOGITS_ROW, mr, kc)\n\
         #define LOAD_PANEL(dst, n0, n, k0, kc) \
         dot_panel_kn(dst, WEIGHT_AT(VOCAB0 + (k0), n0), WEIGHT_BF16, WIDTH, kc, n)\n\
         #define EPILOGUE(m, n0, acc, valid) KERNEL_add_hidden(bufs, dims, m, n0, acc, valid)\n",
    ),
    (
        "dweight",
        "#define DOT_M VOCABS\n#define DOT_N ((int64_t)WIDTH)\n#define DOT_K COUNT\n\
         #define LOAD_A(dst, m, mr, k0, kc) dot_block_km(dst, DLOGITS_AT(k0, m), NARROW, DLOGITS_ROW, mr, kc)\n\
         #define LOAD_PANEL(dst, n0, n, k0, kc) dot_panel_kn(dst, HIDDEN_AT(k0, n0), HIDDEN_BF16, WIDTH, kc, n)\n\
         #define EPILOGUE(m, n0, acc, valid) KERNEL_add_weight(bufs, dims, m, n0, acc, valid)\n",
    ),
];

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
fn tokens(region: &Region, found: &Found) -> Result<usize, String> {
    let most = bound(&region.graph.symbols, &region.graph.ty(found.node.args[0]).shape[0]);
    most.map(|n| n as usize).map_err(|e| e.to_string())
}

/// The kernel's text, how many phases it has.
pub(super) fn kernel(region: &Region, name: &str) -> Result<(String, usize), String> {
    let f = found(region)?;
    let mut text = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(text, "#define {key} {value}");
    let results = results(region, &f);
    let buffers = region.layouts.len() + results.len();
    let symbols = region.graph.symbols.len();
    define("SYMBOLS", symbols.to_string());
    define("BUFFERS", buffers.to_string());
    define("TOKENS", over_dims(region, &region.graph.ty(f.node.args[0]).shape[0]));
    let slices = f.vocab.div_ceil(f.slice());
    let chunk = f.chunk(tokens(region, &f)?);
    for (key, value) in [
        ("VOCAB", f.vocab),
        ("WIDTH", f.width),
        ("CHUNK", chunk),
        ("SLICE", f.slice()),
        ("SLICES", slices),
        ("LOGITS_ROW", f.row()),
    ] {
        define(key, value.to_string());
    }
    for (i, key) in ["FIRST", "COUNT", "VOCAB0", "VOCABS"].into_iter().enumerate() {
        define(key, format!("dims[{}]", symbols + i));
    }
    for (letter, arg) in [("HIDDEN", 0), ("WEIGHT", 1)] {
        let (buffer, dtype) = whole(region, f.node.args[arg])?;
        let first = if arg == 0 { "FIRST + " } else { "" };
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
    let undef = undefine(&text);
    let mut source = format!("{text}#define NAME(x) {name}_##x\n{TEMPLATE}#undef NAME\n");
    let wanted = |dot: &str| {
        dot == "logits" || results.iter().any(|(key, _)| *key == format!("{}_BUF", dot.to_uppercase()))
    };
    for (dot, slots) in DOTS.into_iter().filter(|(dot, _)| wanted(dot)) {
        let slots = slots.replace("KERNEL", name);
        let _ = write!(source, "#define NAME(x) {name}_{dot}_##x\n{slots}{DOT}");
    }
    Ok((source + &undef, if f.gradient { 5 } else { 3 }))
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
    let Ok(tokens) = tokens(region, &f) else { return Dim::from(0) };
    let (rows, slice) = (f.chunk(tokens), f.slice());
    let packed = |m: usize, k: usize| m * k.next_multiple_of(BLOCK);
    let products = if f.gradient { packed(rows, slice) + packed(slice, rows) } else { 0 };
    Dim::from((rows * f.row() + products.max(packed(rows, f.width))) * size_of::<f32>() + 64)
}
