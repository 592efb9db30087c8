//! A CUDA program: one kernel's text, self-contained, and how it is launched. In: a region, the functions that its phases call, the
//! body of each phase. Out: a [`Kernel`].
//!
//! **How a kernel is called.** Every entry is `extern "C" __global__` and takes the same parameters, in this order:
//!
//! | parameters | type | where |
//! |---|---|---|
//! | buffers read, then buffers written, in the region's order | pointers | always |
//! | workspace, at least as many bytes as the kernel says, aligned as buffers are | `unsigned char *` | where its size is not the literal 0 |
//! | values of the region's symbols, in the order of its graph | 64-bit integers | always |
//! | number of the round, from 0 | 64-bit integer | where there is not literally one |
//!
//! Entries run one after another, rounds around them. A launch has as many blocks as the entry's grid says, in x alone, and none
//! where that is 0; fewer blocks give the same bits, because blocks take units until none is left. It asks for the entry's bytes of
//! shared memory.

use crate::kernel_ir::comment;
use crate::kernel_ir::print::{Dialect, Printer, element, symbol};
use astrai_ir::kernel::{Entry, Grid, Kernel, Products};
use astrai_ir::plan::bound;
use astrai_ir::{Dim, Layout, Operand, Region};
use std::fmt::Write;

const PRELUDE: &str = include_str!("prelude.cu");
const SCALAR: &str = include_str!("../scalar.c");
const BLOCK: &str = include_str!("block.cu");

/// Lanes of a warp, the smallest block.
pub(super) const WARP: usize = 32;
/// Registers of a multiprocessor.
const FILE: u32 = 1 << 16;
/// Blocks that a grid can have along x.
const MOST_BLOCKS: usize = 0x7fff_ffff;

/// A program while it is written.
pub(super) struct Program<'a> {
    region: &'a Region,
    name: &'a str,
    block: u32,
    /// Registers of a thread, at most.
    registers: u32,
    workspace: Dim,
    rounds: Dim,
    text: String,
    entries: Vec<Entry>,
}

impl<'a> Program<'a> {
    /// Of the kernel `name`, whose blocks have so many threads, each of which may have so many registers.
    pub fn new(region: &'a Region, name: &'a str, block: u32, registers: u32) -> Program<'a> {
        let (workspace, rounds) = (Dim::from(0), Dim::from(1));
        Program { region, name, block, registers, workspace, rounds, text: String::new(), entries: vec![] }
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.block as usize
    }

    /// With so many bytes between the phases.
    pub fn workspace(self, bytes: Dim) -> Program<'a> {
        Program { workspace: bytes, ..self }
    }

    /// With so many rounds.
    pub fn rounds(self, rounds: Dim) -> Program<'a> {
        Program { rounds, ..self }
    }

    /// Text before the phases that follow.
    pub fn text(&mut self, text: &str) {
        self.text.push('\n');
        self.text.push_str(text);
    }

    /// The next phase: so many blocks, which share so many bytes that the launch asks for.
    pub fn entry(&mut self, blocks: &Dim, shared: usize, body: impl FnOnce(&mut Printer)) {
        let name = format!("{}_phase{}", self.name, self.entries.len());
        let mut p = Printer::new(Dialect::Blocks, 0);
        p.line("");
        let params = self.parameters().join(", ");
        // What bounds registers is said as blocks of a multiprocessor; unsaid, ptxas spills sums for what it takes to be enough.
        let least = FILE / (self.registers * self.block);
        let head = format!("extern \"C\" __global__ void __launch_bounds__(BLOCK, {least}) {name}({params})");
        p.braces(&head, |p| {
            for (i, s) in self.region.graph().symbols.iter().enumerate() {
                p.line(&format!("const index_t {} = (index_t)n{i}; (void){0};", symbol(&s.name)));
            }
            body(p);
        });
        self.text.push_str(&p.finish());
        let grid = Grid::Units(blocks.at_most(&Dim::from(MOST_BLOCKS)));
        self.entries.push(Entry { symbol: name, grid, block: self.block, shared: Dim::from(shared) });
    }

    /// Parameters of every entry.
    fn parameters(&self) -> Vec<String> {
        let piece = &self.region.piece;
        // What is read and written in one place is not promised to be apart.
        let apart = |alone: bool| if alone { "__restrict__ " } else { "" };
        let read = |(i, t): (usize, astrai_ir::Type)| {
            let alone = piece.in_place.iter().all(|(_, r)| *r != Operand(i));
            format!("const {} *{}r{i}", element(t.dtype), apart(alone))
        };
        let write = |(i, t): (usize, astrai_ir::Type)| {
            let alone = piece.in_place.iter().all(|(w, _)| *w != i);
            format!("{} *{}w{i}", element(t.dtype), apart(alone))
        };
        let mut all: Vec<String> = piece.read_types().into_iter().enumerate().map(read).collect();
        all.extend(piece.write_types().into_iter().enumerate().map(write));
        if self.workspace.literal() != Some(0) {
            all.push("unsigned char *__restrict__ workspace".into());
        }
        all.extend((0..self.region.graph().symbols.len()).map(|i| format!("int64_t n{i}")));
        if !self.rounds.is_one() {
            all.push("int64_t round".into());
        }
        all
    }

    /// The kernel, before it has an identity.
    pub fn finish(self) -> Kernel {
        let index = if narrow(self.region) { "int32_t" } else { "int64_t" };
        let mut source = comment(self.region);
        let _ = writeln!(source, "#define BLOCK {}\n#define INDEX {index}\n", self.block);
        let _ = writeln!(source, "{PRELUDE}\ntypedef INDEX index_t;\n\n{SCALAR}\n{BLOCK}{}", self.text);
        let (workspace, rounds, entries) = (self.workspace, self.rounds, self.entries);
        Kernel {
            identity: String::new(),
            preludes: 0,
            source,
            entries,
            workspace,
            rounds,
            products: Products::Native,
        }
    }
}

/// True when every index that the kernel computes fits 32 bits, grid strides included.
fn narrow(region: &Region) -> bool {
    let g = region.graph();
    let small = |d: &Dim| bound(&g.symbols, d).is_ok_and(|n| n < 1 << 30);
    let rows = region.piece.reads.iter().all(|r| r.layout == Layout::Rows);
    rows && g.nodes().iter().flat_map(|n| &n.types).all(|t| small(&t.elements()))
}
