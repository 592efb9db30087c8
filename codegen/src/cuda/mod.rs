//! CUDA C++ of a region. In: a region of the archetype `loops`. Out: a self-contained program of one kernel, for NVRTC, and
//! how it is launched; and the same program as host C++ for a shim that runs it without a GPU.

use crate::archetype::{self, Limits};
use crate::kernel_ir::comment;
use crate::kernel_ir::expr::{Part, Stmt, reduces};
use crate::kernel_ir::index::Var;
use crate::kernel_ir::loops::{Loops, loops};
use crate::kernel_ir::print::{Dialect, Printer, digit, dim, element, symbol};
use astrai_ir::backend::{Backend, Root};
use astrai_ir::kernel::{Entry, Grid, UNNAMED};
use astrai_ir::ops::Op;
use astrai_ir::plan::bound;
use astrai_ir::region::{LoopsForm, Matched, Piece};
use astrai_ir::{Dim, Form, Graph, IrError, Kernel, Layout, NodeId, Region, Target};
use std::fmt::Write;

const PRELUDE: &str = include_str!("prelude.cu");
const SCALAR: &str = include_str!("../scalar.c");
const BLOCK: &str = include_str!("block.cu");
const SHIM: &str = include_str!("shim.h");

/// Options with which NVRTC compiles a kernel, beside the architecture; never `--use_fast_math`.
pub const OPTIONS: &[&str] = &["--std=c++17", "--fmad=false", "--disable-warnings"];

/// Threads of a block where rows are long.
const THREADS: usize = 256;
/// Lanes of a warp, the smallest block.
const WARP: usize = 32;
/// Blocks that a grid can have along x.
const MOST_BLOCKS: u64 = 0x7fff_ffff;

/// What the kernels take: nothing but loops so far.
const LIMITS: Limits = Limits {
    head: 0,
    row: 0,
    experts: 0,
    panels: None,
    without: &["dot", "grouped", "outer", "attention", "attention_grad", "loss", "route"],
};

/// The backend of CUDA devices. It has kernels of loops by rows; the interpreter stands in for the rest.
#[derive(Clone, Debug)]
pub struct Cuda {
    target: Target,
}

impl Cuda {
    /// For this device.
    pub fn new(target: Target) -> Cuda {
        Cuda { target }
    }
}

impl Backend for Cuda {
    fn target(&self) -> &Target {
        &self.target
    }

    fn native(&self, op: &Op) -> bool {
        archetype::native(op)
    }

    fn root(&self, g: &Graph, id: NodeId) -> Option<Root> {
        archetype::root(g, id, &LIMITS)
    }

    fn loops(&self, op: &Op) -> bool {
        archetype::loops::computes(op)
    }

    fn accumulates(&self, _: &Graph, _: NodeId) -> bool {
        false
    }

    fn layouts(&self, g: &Graph, id: NodeId) -> Vec<(NodeId, Layout)> {
        archetype::layouts(g, id, &LIMITS)
    }

    fn matched(&self, piece: &Piece) -> Result<Matched, IrError> {
        let matched = archetype::matched(piece, &LIMITS)?;
        let form = match matched.form {
            Form::Loops(LoopsForm::ScatterAdd(_) | LoopsForm::StoreRows(_)) => Form::Interpreted,
            Form::Loops(_) => Form::Loops(LoopsForm::Rows),
            form => form,
        };
        Ok(Matched { form, ..matched })
    }

    fn emit(&self, region: &Region) -> Result<Option<Kernel>, String> {
        if !region.form().has_kernel() {
            return Ok(None);
        }
        let CudaKernel { name, source, block, units, per_block, .. } = emit(region, UNNAMED)?;
        let grid = Grid::Units(
            units.ceil_div(&Dim::from(per_block as usize)).at_most(&Dim::from(MOST_BLOCKS as usize)),
        );
        let entries = vec![Entry { symbol: name, grid, block }];
        let (workspace, rounds) = (Dim::from(0), Dim::from(1));
        Ok(Some(Kernel { identity: String::new(), preludes: 0, source, entries, workspace, rounds }.named()))
    }

    fn unit(&self, kernels: &[&Kernel]) -> String {
        kernels.iter().map(|k| k.source.as_str()).collect()
    }

    fn extension(&self) -> &'static str {
        "cu"
    }

    fn alignment(&self) -> u64 {
        256
    }
}

/// How results are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// A thread an element.
    Flat,
    /// A block a row of the last axis, whose threads share its statistics.
    Rows,
    /// A block an element, whose threads share the reduction that makes it.
    Elements,
}

/// A program of one kernel and how it is launched. Its parameters are pointers to the buffers read, to the buffers written,
/// and the values of `symbols` as 64-bit integers.
#[derive(Clone, Debug)]
pub struct CudaKernel {
    /// Name of the function.
    pub name: String,
    /// The program: CUDA C++ without includes.
    pub source: String,
    /// How results are shared out.
    pub mapping: Mapping,
    /// Threads of a block.
    pub block: u32,
    /// Elements or rows that blocks share out.
    pub units: Dim,
    /// Units that a block takes at once.
    pub per_block: u32,
    /// Symbols whose values are the last parameters, in order.
    pub symbols: Vec<String>,
    /// Element types of the buffers read, then written, in the program's words.
    pointers: Vec<String>,
}

impl CudaKernel {
    /// Blocks of a launch for these values of the symbols; 0 where there is nothing to compute and nothing to launch.
    /// Fewer blocks give the same bits: every block takes units until none is left.
    pub fn grid(&self, size: &dyn Fn(&str) -> Option<u64>) -> Result<u32, String> {
        let blocks = self.units.eval(size)?.div_ceil(u64::from(self.per_block)).min(MOST_BLOCKS);
        u32::try_from(blocks).map_err(|_| format!("a grid of {blocks} blocks"))
    }
}

/// The kernel of a region.
pub fn emit(region: &Region, name: &str) -> Result<CudaKernel, String> {
    if *region.form() != Form::Loops(LoopsForm::Rows) {
        return Err(format!("no CUDA kernel of the archetype {}", region.form().name()));
    }
    let l = loops(region, false)?;
    let mapping = mapping(region, &l);
    let block = threads(&l, mapping);
    let last =
        region.piece.write_types().first().and_then(|t| t.shape.last().cloned()).unwrap_or(Dim::from(1));
    let units = if mapping == Mapping::Rows { l.row.extent.clone() } else { &l.row.extent * &last };
    let index = if narrow(region) { "int32_t" } else { "int64_t" };
    let mut source = comment(region);
    let _ =
        write!(source, "#define BLOCK {block}\n#define INDEX {index}\n\n{PRELUDE}\ntypedef INDEX index_t;\n");
    let _ = write!(source, "\n{SCALAR}\n{BLOCK}\n");
    source.push_str(&function(region, name, &l, mapping));
    let pointers = signature(region).into_iter().map(|(t, _)| t).collect();
    let symbols = region.graph().symbols.iter().map(|s| s.name.to_string()).collect();
    let per_block = if mapping == Mapping::Flat { block } else { 1 };
    Ok(CudaKernel { name: name.into(), source, mapping, block, units, per_block, symbols, pointers })
}

/// Types and names of the buffers.
fn signature(region: &Region) -> Vec<(String, String)> {
    let reads = region.piece.read_types().into_iter().enumerate();
    let reads = reads.map(|(i, t)| (format!("const {} *", element(t.dtype)), format!("r{i}")));
    let writes = region.piece.write_types().into_iter().enumerate();
    reads.chain(writes.map(|(i, t)| (format!("{} *", element(t.dtype)), format!("w{i}")))).collect()
}

fn function(region: &Region, name: &str, l: &Loops, mapping: Mapping) -> String {
    let symbols = &region.graph().symbols;
    let mut params: Vec<String> =
        signature(region).into_iter().map(|(t, n)| format!("{t}__restrict__ {n}")).collect();
    params.extend((0..symbols.len()).map(|i| format!("int64_t n{i}")));
    let mut p = Printer::new(Dialect::Blocks, 0);
    let head = format!("extern \"C\" __global__ void __launch_bounds__(BLOCK) {name}({})", params.join(", "));
    p.braces(&head, |p| {
        for (i, s) in symbols.iter().enumerate() {
            p.line(&format!("const index_t {} = (index_t)n{i}; (void){0};", symbol(&s.name)));
        }
        match mapping {
            Mapping::Flat => p.alone(|p| {
                p.statements(&l.before);
                each_loop(l, |lets, var, body| flat(p, l, lets, var, body));
            }),
            Mapping::Rows => rows(p, l),
            Mapping::Elements => {
                p.statements(&l.before);
                each_loop(l, |lets, var, body| elements(p, l, lets, var, body));
            }
        }
    });
    p.finish()
}

/// Every loop of a row, with the statements of the row before it.
fn each_loop(l: &Loops, mut f: impl FnMut(&[&Stmt], &Var, &[Stmt])) {
    let mut lets = Vec::new();
    for s in &l.body {
        match s {
            Stmt::Loop { var, body } => f(&lets, var, body),
            s => lets.push(s),
        }
    }
}

fn rows(p: &mut Printer, l: &Loops) {
    p.statements(&l.before);
    let rows = dim(&l.row.extent);
    p.braces(&format!("for (index_t row = blockIdx.x; row < {rows}; row += gridDim.x)"), |p| {
        lead(p, l);
        p.statements(&l.body);
    });
}

fn flat(p: &mut Printer, l: &Loops, lets: &[&Stmt], var: &Var, body: &[Stmt]) {
    let first = "(index_t)blockIdx.x * BLOCK + threadIdx.x";
    units(p, l, var, first, "(index_t)gridDim.x * BLOCK", |p| {
        lets.iter().for_each(|s| p.statements(std::slice::from_ref(s)));
        p.statements(body);
    });
}

fn elements(p: &mut Printer, l: &Loops, lets: &[&Stmt], var: &Var, body: &[Stmt]) {
    units(p, l, var, "blockIdx.x", "gridDim.x", |p| {
        for s in lets.iter().copied().chain(body) {
            let one = std::slice::from_ref(s);
            match s {
                Stmt::Store { .. } => p.braces("if (threadIdx.x == 0)", |p| p.statements(one)),
                _ => p.statements(one),
            }
        }
    });
}

/// A loop over the elements of all rows in this loop of the last axis.
fn units(p: &mut Printer, l: &Loops, var: &Var, first: &str, stride: &str, body: impl FnOnce(&mut Printer)) {
    let total = dim(&(&l.row.extent * &var.extent));
    p.braces(&format!("for (index_t unit = {first}; unit < {total}; unit += {stride})"), |p| {
        p.line(&format!("const index_t row = {}; (void)row;", digit("unit", &var.extent, None)));
        let inside = if l.row.extent.is_one() { None } else { Some(&var.extent) };
        p.line(&format!("const index_t {} = {}; (void){0};", var.name, digit("unit", &Dim::from(1), inside)));
        lead(p, l);
        body(p);
    });
}

/// Indices of the leading axes from the row.
fn lead(p: &mut Printer, l: &Loops) {
    for (i, (v, divisor, size)) in l.leading.iter().enumerate().filter(|(_, (v, ..))| *v != l.row) {
        let value = digit("row", divisor, (i > 0).then_some(size));
        p.line(&format!("const index_t {} = {value}; (void){0};", v.name));
    }
}

fn mapping(region: &Region, l: &Loops) -> Mapping {
    let statistic = |s: &Stmt| matches!(s, Stmt::Reduce { .. });
    if l.before.iter().chain(&l.body).any(statistic) {
        return Mapping::Rows;
    }
    let reduced = l.body.iter().any(|s| reduces(std::slice::from_ref(s)));
    if reduced && sums_rows(region) { Mapping::Elements } else { Mapping::Flat }
}

/// True when reductions run along memory and are long enough for a warp; the threads of neighbouring results read
/// neighbouring elements otherwise.
fn sums_rows(region: &Region) -> bool {
    let g = region.graph();
    let has_dot = g.nodes().iter().any(|n| matches!(n.op, Op::Dot(_)));
    let along = |n: &astrai_ir::Node| {
        let Op::Reduce(r) = &n.op else { return false };
        let shape = &g.ty(n.args[0]).shape;
        let count = Dim::product(r.axes.iter().map(|&a| &shape[a]));
        r.axes.last().is_some_and(|a| a + 1 == shape.len()) && count.size().is_none_or(|c| c >= WARP)
    };
    !has_dot && g.nodes().iter().any(along)
}

/// Threads of a block: as many as the longest loop they share has iterations.
fn threads(l: &Loops, mapping: Mapping) -> u32 {
    let mut most = WARP;
    let mut see = |extent: Dim| most = most.max(extent.size().unwrap_or(THREADS));
    match mapping {
        Mapping::Flat => see(Dim::from(THREADS)),
        Mapping::Rows => l.before.iter().chain(&l.body).for_each(|s| shared(s, &mut see)),
        Mapping::Elements => each_loop(l, |lets, _, body| {
            lets.iter().copied().chain(body).for_each(|s| shared(s, &mut see));
        }),
    }
    most.next_power_of_two().min(THREADS) as u32
}

/// Iterations that a statement shares out to the threads of a block.
fn shared(s: &Stmt, see: &mut impl FnMut(Dim)) {
    match s {
        Stmt::Loop { var, .. } => see(var.extent.clone()),
        Stmt::Reduce { outer, parts, .. } => {
            let around = |p: &Part| &Dim::product(outer.iter().map(|v| &v.extent)) * &p.var.extent;
            parts.iter().for_each(|p| see(around(p)));
        }
        _ => {}
    }
}

/// True when every index that the kernel computes fits 32 bits, grid strides included.
fn narrow(region: &Region) -> bool {
    let g = region.graph();
    let small = |d: &Dim| bound(&g.symbols, d).is_ok_and(|n| n < 1 << 30);
    let rows = region.piece.reads.iter().all(|r| r.layout == Layout::Rows);
    rows && g.nodes().iter().flat_map(|n| &n.types).all(|t| small(&t.elements()))
}

/// Kernels as one unit of host C++ behind the shim. For a kernel `k` it has
/// `extern "C" int k_launch(void *const *bufs, const int64_t *sizes, int64_t blocks, uint64_t seed)`, which gives 0, or the
/// line of the barrier that some threads missed. Wants a C++17 compiler and `-ffp-contract=off`.
pub fn shim(kernels: &[&CudaKernel]) -> String {
    let mut text = SHIM.to_string();
    for k in kernels {
        let pointers = k.pointers.iter().enumerate().map(|(i, t)| format!("({t})bufs[{i}]"));
        let sizes = (0..k.symbols.len()).map(|i| format!("dims[{i}]"));
        let args: Vec<String> = pointers.chain(sizes).collect();
        let (name, block) = (&k.name, k.block);
        let _ = write!(
            text,
            "\n#undef BLOCK\n#undef INDEX\nnamespace {name}_program {{\n{}\n\
             static void body(void *const *bufs, const int64_t *dims) {{ {name}({}); (void)dims; }}\n}}\n\
             extern \"C\" int {name}_launch(void *const *bufs, const int64_t *dims, int64_t blocks, uint64_t seed) {{\n\
             \x20   return shim_launch({name}_program::body, bufs, dims, blocks, {block}, seed);\n}}\n",
            k.source,
            args.join(", ")
        );
    }
    text
}
