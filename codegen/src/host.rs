//! Host C of a region. In: a region. Out: functions for the runtime's pool: `units` work items a phase, any split of which
//! over threads gives the same bits. Several kernels share a translation unit behind one prelude.

mod attention_grad;
mod cross_entropy;
mod dots;
mod grouped;
mod route;

use crate::columns::columns_kernel;
use crate::index::{Index, Var};
use crate::kernel::Stmt;
use crate::loops::{Loops, loops};
use crate::print::{Dialect, Printer, dim, element, symbol};
use crate::store::store_kernel;
use crate::{Kernel, comment};
use astrai_ir::ops::{Attention, Op};
use astrai_ir::{Anchor, DType, Dim, Node, NodeId, Region, Simd};
use std::fmt::Write;

const PRELUDE: &str = include_str!("host/prelude.c");
const SCALAR: &str = include_str!("scalar.c");
const DOT_CORE: &str = include_str!("host/dot_core.c");
const DOT_AMX: &str = include_str!("host/dot_amx.c");
const DOT_BLOCKS: &str = include_str!("host/dot_blocks.c");
const DOT_PAIRS: &str = include_str!("host/dot_pairs.c");
const DOT_WORDS: &str = include_str!("host/dot_words.c");
const ATTENTION_CORE: &str = include_str!("host/attention_core.c");
const ATTENTION: [&str; 5] = [
    include_str!("host/attention.c"),
    include_str!("host/attention_rows.c"),
    include_str!("host/attention_one.c"),
    include_str!("host/attention_tiles.c"),
    include_str!("host/attention_phases.c"),
];

/// Flags with which a unit is compiled, beside those that choose its instructions; never `-ffast-math`.
pub const FLAGS: &[&str] = &[
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fPIC",
    "-shared",
    "-w",
];

/// Flags that let a unit use these instructions, and no others. Plain C takes what the architecture's compiler assumes of
/// every processor, which on x86-64 it has to be told: some systems' compilers assume more.
pub fn instructions(simd: Simd) -> &'static [&'static str] {
    match simd {
        Simd::Plain if cfg!(target_arch = "x86_64") => &["-march=x86-64"],
        Simd::Plain => &[],
        Simd::Neon => &["-march=armv8-a"],
        Simd::Avx2 => &["-march=x86-64-v3"],
        Simd::Avx512 => &["-march=x86-64-v4", WIDE],
        Simd::Avx512Bf16 => &["-march=x86-64-v4", WIDE, "-mavx512bf16"],
        Simd::Amx => &["-march=x86-64-v4", WIDE, "-mamx-tile", "-mamx-bf16"],
    }
}

/// Flags with which a processor without these instructions has their results nevertheless, slowly; for those where there is a
/// model in the kernels' text.
pub fn model(simd: Simd) -> Option<&'static [&'static str]> {
    (simd == Simd::Amx).then_some(&["-march=x86-64-v4", WIDE, "-DDOT_AMX_MODEL"])
}

/// Flags that let a unit use all that this processor has at this level: AVX-512 alone is without products of bf16, which
/// are slow where it is the best level.
pub fn native(simd: Simd) -> &'static [&'static str] {
    match simd {
        Simd::Avx512 => &["-march=native", WIDE, "-mno-avx512bf16"],
        _ if cfg!(target_arch = "x86_64") => &["-march=native", WIDE],
        _ => &["-march=native"],
    }
}

/// Compilers of x86-64 halve the vectors of their own accord on processors that once ran slower with whole ones.
const WIDE: &str = "-mprefer-vector-width=512";

/// One translation unit of several kernels.
pub fn unit(kernels: &[&Kernel]) -> String {
    let mut text = format!("{PRELUDE}\n{SCALAR}\n");
    let dots = [Anchor::Dot, Anchor::CrossEntropy, Anchor::Grouped, Anchor::GroupedOuter];
    let tiled = |k: &Kernel| k.anchor == Anchor::Attention && k.source.contains("\n#define Q_BF16 ");
    if kernels.iter().any(|k| dots.contains(&k.anchor) || tiled(k)) {
        text.push_str(DOT_CORE);
        text.push_str(DOT_AMX);
        text.push_str(DOT_BLOCKS);
        text.push_str(DOT_PAIRS);
        text.push_str(DOT_WORDS);
    }
    if kernels.iter().any(|k| matches!(k.anchor, Anchor::Attention | Anchor::AttentionGrad)) {
        text.push_str(ATTENTION_CORE);
    }
    for k in kernels {
        text.push('\n');
        text.push_str(&k.source);
    }
    text
}

/// The kernel of a region.
pub fn emit(region: &Region, name: &str) -> Result<Kernel, String> {
    let (body, phases, scratch) = match region.anchor {
        Anchor::Loops => (loops_kernel(region, name)?, 1, false),
        Anchor::Dot => (dots::dot_kernel(region, name)?, 2, true),
        Anchor::Attention => attention_kernel(region, name)?,
        Anchor::AttentionGrad => (attention_grad::kernel(region, name)?, 2, true),
        Anchor::CrossEntropy => {
            let (body, phases) = cross_entropy::kernel(region, name)?;
            (body, phases, true)
        }
        Anchor::Grouped => (grouped::kernel(region, name)?, 2, true),
        Anchor::GroupedOuter => (grouped::outer_kernel(region, name)?, 1, false),
        Anchor::Route => (route::kernel(region, name)?, 2, true),
        Anchor::Eval | Anchor::Collective => return Err("the region has no kernel".into()),
    };
    let source = format!("{}{body}", comment(region));
    let rounds = region.anchor == Anchor::CrossEntropy;
    Ok(Kernel { name: name.to_string(), anchor: region.anchor, source, phases, scratch, rounds })
}

/// Sizes and buffers as locals.
pub(crate) fn prologue(p: &mut Printer, region: &Region) {
    for (i, s) in region.graph.symbols.iter().enumerate() {
        p.line(&format!("const int64_t {} = dims[{i}]; (void){0};", symbol(&s.name)));
    }
    let reads = region.reads();
    for (i, t) in reads.iter().enumerate() {
        p.line(&read_pointer(region, i, t.dtype));
    }
    for (i, t) in region.writes().iter().enumerate() {
        let at = reads.len() + i;
        let alone = if region.in_place.iter().any(|(w, _)| *w == i) { "" } else { "restrict " };
        p.line(&format!("{0} *{alone}w{i} = ({0} *)bufs[{at}]; (void)w{i};", element(t.dtype)));
    }
}

/// The local through which a buffer is read; `restrict` unless the kernel writes there too.
fn read_pointer(region: &Region, i: usize, dtype: DType) -> String {
    let alone = if region.in_place.iter().any(|(_, r)| *r == i) { "" } else { "restrict " };
    format!("const {0} *{alone}r{i} = (const {0} *)bufs[{i}]; (void)r{i};", element(dtype))
}

pub(crate) const PHASE: &str =
    "(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)";

/// An expression over `dims`, for use outside a kernel's body.
pub(crate) fn over_dims(region: &Region, d: &Dim) -> String {
    let mut text = dim(d);
    for (i, s) in region.graph.symbols.iter().enumerate() {
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

fn loops_kernel(region: &Region, name: &str) -> Result<String, String> {
    if let Some(made) = store_kernel(region, name).or_else(|| columns_kernel(region, name)) {
        return made;
    }
    let l = loops(region, true)?;
    let rows = over_dims(region, &l.rows);
    let units = match l.chunk {
        Some(n) => format!("({rows} + {}) / {n}", n - 1),
        None => rows,
    };
    let mut p = Printer::new(Dialect::Host, 0);
    p.line(&format!("int64_t {name}_units0(const int64_t *dims) {{ return {units}; }}"));
    p.braces(&format!("void {name}_phase0{PHASE}"), |p| {
        prologue(p, region);
        p.statements(&l.before);
        p.braces("for (int64_t row = begin; row < end; row++)", |p| row(p, &l));
    });
    Ok(p.finish())
}

/// The statements of one row.
fn row(p: &mut Printer, l: &Loops) {
    if let Some(n) = l.chunk {
        // The only loop runs over a piece of the axis.
        if let [Stmt::Loop { var, body }] = l.body.as_slice() {
            let (v, total) = (&var.name, dim(&l.rows));
            p.line(&format!("const int64_t stop = i_min((row + 1) * {n}, {total});"));
            p.line("#pragma GCC ivdep");
            p.braces(&format!("for (int64_t {v} = row * {n}; {v} < stop; {v}++)"), |p| p.statements(body));
            return;
        }
    }
    lead(p, &l.row, &l.leading);
    p.statements(&l.body);
}

/// Indices of the leading axes from the row.
fn lead(p: &mut Printer, row: &Var, leading: &[(Var, Dim, Dim)]) {
    for (v, divisor, size) in leading.iter().filter(|(v, ..)| v != row) {
        p.line(&format!("const int64_t {} = row / {} % {}; (void){0};", v.name, dim(divisor), dim(size)));
    }
}

fn reads_only(p: &mut Printer, region: &Region) {
    for (i, s) in region.graph.symbols.iter().enumerate() {
        p.line(&format!("const int64_t {} = dims[{i}]; (void){0};", symbol(&s.name)));
    }
    for (i, t) in region.reads().iter().enumerate() {
        p.line(&read_pointer(region, i, t.dtype));
    }
}

/// Its text, its phases, and whether it has scratch.
fn attention_kernel(region: &Region, name: &str) -> Result<(String, usize, bool), String> {
    let g = &region.graph;
    let (node, a) = attention(region).ok_or("no attention in the region")?;
    let size = |t: NodeId, axis: usize| g.ty(t).shape[axis].size().ok_or("sizes of a head are literal");
    let (q, k, v, starts) = (node.args[0], node.args[1], node.args[2], node.args[3]);
    let mut d = String::new();
    let mut define = |key: &str, value: String| _ = writeln!(d, "#define {key} {value}");
    define("NAME(x)", format!("{name}_##x"));
    for (letter, id) in [("Q", q), ("K", k), ("V", v)] {
        let s = strided(region, id)?;
        define(&format!("{letter}_BUF"), s.buf.to_string());
        define(&format!("{letter}_T"), element(s.dtype).into());
        define(
            &format!("LOAD_{letter}(x)"),
            if s.dtype == DType::F32 { "(x)".into() } else { format!("{}_to_f32(x)", element(s.dtype)) },
        );
        define(&format!("{letter}_OFF"), over_dims(region, &s.offset));
        define(&format!("{letter}_ROW"), over_dims(region, &s.row));
        define(&format!("{letter}_HEAD"), over_dims(region, &s.head));
    }
    let starts_at = strided_vector(region, starts)?;
    define("STARTS_BUF", starts_at.to_string());
    define("TOKENS", over_dims(region, &g.ty(q).shape[0]));
    define("SEQUENCES", over_dims(region, &(&g.ty(starts).shape[0] - &Dim::from(1))));
    define("THREADS", format!("dims[{}]", g.symbols.len() + 1));
    define("HEADS", size(q, 1)?.to_string());
    define("KV_HEADS", size(k, 1)?.to_string());
    define("D", size(q, 2)?.to_string());
    let both = &[k, v][..];
    for (name, all, dtype) in
        [("KV_BF16", both, DType::BF16), ("KV_F32", both, DType::F32), ("Q_BF16", &[q], DType::BF16)]
    {
        if all.iter().all(|id| strided(region, *id).is_ok_and(|s| s.dtype == dtype)) {
            define(name, "1".into());
        }
    }
    define("DV", size(v, 2)?.to_string());
    define("SCALE", format!("{:?}f", a.scale.0 as f32));
    define("SOFTCAP", format!("{:?}f", a.softcap.map_or(0.0, |c| c.0 as f32)));
    define("CAUSAL", u8::from(a.causal).to_string());
    define("WINDOW", a.window.unwrap_or(0).to_string());
    if let Some(page) = a.page {
        define("PAGES_BUF", strided_vector(region, node.args[4])?.to_string());
        define("KV_LENS_BUF", strided_vector(region, node.args[5])?.to_string());
        define("PAGE", page.to_string());
        define("TABLE_PAGES", size(node.args[4], 1)?.to_string());
    }
    let keys = a.page.map_or(Ok(0), |page| size(node.args[4], 1).map(|pages| pages * page))?;
    define("CHUNKS", chunks(keys).to_string());
    define("SPLITS", SPLITS.to_string());
    if a.sinks {
        let sinks = node.args[a.sinks_at()];
        define("SINK_BUF", strided_vector(region, sinks)?.to_string());
        let t = vector_type(region, sinks);
        define("SINK_T", element(t).into());
        define(
            "LOAD_SINK(x)",
            if t == DType::F32 { "(x)".into() } else { format!("{}_to_f32(x)", element(t)) },
        );
    }
    let mut wrote = false;
    for (i, (_, id)) in g.outputs().iter().enumerate() {
        let at = (region.layouts.len() + i).to_string();
        let ty = g.ty(*id);
        if part_of(region, *id) == 1 {
            define("LSE_BUF", at);
        } else {
            wrote = true;
            define("O_BUF", at);
            define("O_T", element(ty.dtype).into());
            define(
                "STORE_O(x)",
                if ty.dtype == DType::F32 {
                    "(x)".into()
                } else {
                    format!("f32_to_{}(x)", element(ty.dtype))
                },
            );
        }
    }
    if !wrote {
        return Err("attention whose result nobody reads".into());
    }
    let undef = undefine(&d);
    let text = ATTENTION.concat();
    // Over pages, the keys of a query may be several units', which a second phase joins.
    let phases = if a.page.is_some() { 2 } else { 1 };
    Ok((format!("{d}{text}{undef}"), phases, a.page.is_some()))
}

fn attention(region: &Region) -> Option<(&Node, &Attention)> {
    region.graph.nodes().iter().find_map(|n| match &n.op {
        Op::Attention(a) => Some((n, a)),
        _ => None,
    })
}

/// Bytes of scratch of attention: the sums of each chunk of keys, for rows whose chunks are units of their own.
fn attention_scratch(region: &Region) -> Dim {
    let size = |t: NodeId, axis: usize| region.graph.ty(t).shape[axis].size();
    let bytes = attention(region).and_then(|(node, a)| {
        let keys = a.page? * size(node.args[4], 1)?;
        let row = size(node.args[2], 2)?.next_multiple_of(16) + 2;
        Some(SPLITS / 2 * chunks(keys) * size(node.args[0], 1)? * row * size_of::<f32>())
    });
    Dim::from(bytes.unwrap_or(0))
}

/// Units at most that share the keys of all queries; two for each query at least.
const SPLITS: usize = 16;

/// Chunks of so many keys, as `attn_chunk` counts them.
fn chunks(keys: usize) -> usize {
    let mut length = 512;
    let mut doubled = 0;
    while keys.saturating_sub(1) / 16 >= length {
        length *= 2;
        doubled += 1;
    }
    8 * doubled + keys.saturating_sub(1) / length + 1
}

/// Takes the definitions of a template's slots back.
fn undefine(defines: &str) -> String {
    let name = |l: &str| l["#define ".len()..].split(['(', ' ']).next().unwrap_or("").to_string();
    defines.lines().map(|l| format!("#undef {}\n", name(l))).collect()
}

/// Which output of the attention an output of the region is.
fn part_of(region: &Region, id: NodeId) -> u32 {
    match &region.graph.node(id).op {
        Op::Part(p) => p.index,
        _ => region.graph.node(id).args.first().map_or(0, |a| part_of(region, *a)),
    }
}

/// A `[tokens, heads, d]` value as strides over a buffer.
struct Strided {
    buf: usize,
    dtype: DType,
    offset: Dim,
    row: Dim,
    head: Dim,
}

fn strided(region: &Region, id: NodeId) -> Result<Strided, String> {
    let shape = &region.graph.ty(id).shape;
    let var = |name: &str, i: usize| Var { name: name.into(), extent: shape[i].clone(), depth: 1 };
    let vars = [var("t", 0), var("h", 1), var("j", 2)];
    // An axis of one element stands at its beginning, whatever views make of it.
    let index = |v: &Var| match v.extent.is_one() {
        true => Index::default(),
        false => Index::atom(crate::index::Atom::Var(v.clone())),
    };
    let at: Vec<Index> = vars.iter().map(index).collect();
    let (buf, dtype, address) = address(region, id, &at)?;
    let c = |v: &Var| address.coefficient(v).ok_or("attention reads through a view that is not strided");
    let (row, head, last) = (c(&vars[0])?, c(&vars[1])?, c(&vars[2])?);
    if !last.is_one() && !shape[2].is_one() {
        return Err("attention wants the elements of a head one after another".into());
    }
    Ok(Strided { buf, dtype, offset: address.offset, row, head })
}

/// The buffer in which a vector, or a table, lies whole.
fn strided_vector(region: &Region, id: NodeId) -> Result<usize, String> {
    let shape = &region.graph.ty(id).shape;
    let var = |(i, n): (usize, &Dim)| Var { name: format!("i{i}").into(), extent: n.clone(), depth: 1 };
    let at: Vec<Index> = shape.iter().enumerate().map(|x| Index::var(&var(x))).collect();
    let (buf, _, found) = address(region, id, &at)?;
    if found == Index::linear(&at, shape) { Ok(buf) } else { Err("attention wants whole vectors".into()) }
}

fn vector_type(region: &Region, id: NodeId) -> DType {
    let node = region.graph.node(id);
    match (&node.op, node.args.first()) {
        (Op::Input(i), _) => i.ty.dtype,
        (_, Some(a)) => vector_type(region, *a),
        _ => DType::F32,
    }
}

/// (buffer, element type, position) of an element behind views and widening casts.
fn address(region: &Region, id: NodeId, at: &[Index]) -> Result<(usize, DType, Index), String> {
    let g = &region.graph;
    let node = g.node(id);
    let arg = |i: usize| node.args[i];
    match &node.op {
        Op::Input(i) => {
            let buf = i.name.trim_start_matches('r').parse().map_err(|_| "a leaf is no buffer")?;
            Ok((buf, i.ty.dtype, Index::linear(at, &i.ty.shape)))
        }
        Op::Cast(_) => address(region, arg(0), at),
        Op::Reshape(_) => {
            let flat = Index::linear(at, &node.ty().shape);
            address(region, arg(0), &flat.unravel(&g.ty(arg(0)).shape))
        }
        Op::Permute(p) => {
            let mut inner = vec![Index::default(); at.len()];
            p.axes.iter().enumerate().for_each(|(i, &a)| inner[a] = at[i].clone());
            address(region, arg(0), &inner)
        }
        Op::Slice(s) => {
            let mut inner = at.to_vec();
            inner[s.axis] = inner[s.axis].plus(&s.start);
            address(region, arg(0), &inner)
        }
        op => Err(format!("attention reads `{}`, which is not in memory", op.name())),
    }
}

/// Bytes that a kernel of this region keeps between its phases.
pub fn scratch(region: &Region) -> Dim {
    match region.anchor {
        Anchor::Attention => attention_scratch(region),
        Anchor::AttentionGrad => attention_grad::scratch(region),
        Anchor::CrossEntropy => cross_entropy::scratch(region),
        Anchor::Grouped => grouped::scratch(region),
        Anchor::Route => route::scratch(region),
        _ => dots::scratch(region),
    }
}

#[cfg(test)]
mod tests {
    use super::chunks;

    #[test]
    fn chunks_grow_with_what_lies_before_them() {
        let counted = [1, 512, 513, 8192, 8193, 9216, 9217, 16_384, 16_385, 131_072].map(chunks);
        assert_eq!(counted, [1, 1, 2, 16, 17, 17, 18, 24, 25, 48]);
    }
}
