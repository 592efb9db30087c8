//! What processors have kernels for. In: graphs and pieces of plans. Out: the archetypes' answers within the limits of the C kernels,
//! and their text.

use super::{
    Emitted, attention, attention_grad, columns, dot, grouped, isa, loss, low_rank, route, rows, store,
};
use crate::archetype::{self, Limits};
use crate::kernel_ir::comment;
use astrai_ir::backend::{Backend, Root};
use astrai_ir::kernel::{Products, UNNAMED};
use astrai_ir::ops::Op;
use astrai_ir::region::{LoopsForm, Matched, Piece};
use astrai_ir::{Form, Graph, IrError, Kernel, Layout, NodeId, Region, Target};

const PRELUDE: &str = include_str!("micro/prelude.c");
const SCALAR: &str = include_str!("../scalar.c");
const TILES: [&str; 5] = [
    include_str!("micro/dot_core.c"),
    include_str!("micro/dot_blocks.c"),
    include_str!("micro/dot_amx.c"),
    include_str!("micro/dot_pairs.c"),
    include_str!("micro/dot_bf16_pairs.c"),
];
const ATTENTION: &str = include_str!("micro/attention_core.c");
const CODES: [&str; 2] = [include_str!("micro/dot_codes.c"), include_str!("micro/dot_integers.c")];

/// Bits of [`Kernel::preludes`]: register tiles of dots, what attention's kernels share, codes of weights.
const WITH_TILES: u32 = 1;
const WITH_ATTENTION: u32 = 2;
const WITH_CODES: u32 = 4;

/// What the C kernels take: heads, rows and experts that lie on a thread's stack, panels of 32 rows whose bf16 come in pairs, as
/// instructions multiply them. Tokens are drawn outside of programs, where logits lie in the same memory.
pub const LIMITS: Limits = Limits {
    head: 1024,
    row: 1 << 17,
    experts: 8192,
    panels: Some([(32, 1), (32, 2)]),
    codes: true,
    pages: true,
    without: &["sample"],
};

/// The backend of a processor.
#[derive(Clone, Debug)]
pub struct Cpu {
    target: Target,
}

impl Cpu {
    /// For a processor of these instructions, so many threads and bytes of memory.
    pub fn new(isa: isa::Isa, threads: u32, memory: u64) -> Cpu {
        Cpu { target: isa::target(isa, threads, memory) }
    }

    /// The same with peaks that were measured.
    pub fn with(target: Target) -> Cpu {
        Cpu { target }
    }
}

impl Backend for Cpu {
    fn target(&self) -> &Target {
        &self.target
    }

    fn native(&self, op: &Op) -> bool {
        archetype::native(op) || archetype::dot::rounds(op)
    }

    fn root(&self, g: &Graph, id: NodeId) -> Option<Root> {
        archetype::root(g, id, &LIMITS)
    }

    fn reads_codes(&self) -> bool {
        LIMITS.codes
    }

    fn multiplies_codes(&self) -> bool {
        LIMITS.codes
    }

    fn loops(&self, op: &Op) -> bool {
        archetype::loops::computes(op) || archetype::dot::rounds(op)
    }

    fn accumulates(&self, g: &Graph, id: NodeId) -> bool {
        archetype::loops::adds_rows(g, id)
    }

    fn layouts(&self, g: &Graph, id: NodeId) -> Vec<(NodeId, Layout)> {
        archetype::layouts(g, id, &LIMITS)
    }

    fn matched(&self, piece: &Piece) -> Result<Matched, IrError> {
        archetype::matched(piece, &LIMITS)
    }

    fn emit(&self, region: &Region) -> Result<Option<Kernel>, String> {
        let name = UNNAMED;
        let made = match region.form() {
            Form::Collective | Form::Interpreted => return Ok(None),
            Form::Sample(_) => return Err("processors draw tokens without a kernel".into()),
            Form::Loops(LoopsForm::Rows) => rows::kernel(region, name)?,
            Form::Loops(LoopsForm::Columns(id, reduce)) => columns::reduce_kernel(region, name, *id, reduce)?,
            Form::Loops(LoopsForm::ScatterAdd(root)) => columns::scatter_kernel(region, name, *root)?,
            Form::Loops(LoopsForm::StoreRows(root)) => store::kernel(region, name, *root)?,
            Form::Dot(f) => dot::kernel(region, f, name)?,
            Form::Grouped(f) => grouped::kernel(region, f, name)?,
            Form::Outer(f) => grouped::outer_kernel(region, f, name)?,
            Form::LowRank(f) => low_rank::kernel(region, f, name)?,
            Form::Attention(f) => attention::kernel(region, f, name),
            Form::AttentionGrad(f) => attention_grad::kernel(region, f, name),
            Form::Loss(f) => loss::kernel(region, f, name),
            Form::Route(f) => route::kernel(region, f, name),
        };
        let Emitted { source, entries, workspace, rounds, tiles, codes, matrix, pairs } = made;
        let attends = matches!(region.form(), Form::Attention(_) | Form::AttentionGrad(_));
        let with = [(tiles, WITH_TILES), (attends, WITH_ATTENTION), (codes, WITH_CODES)];
        let preludes = with.iter().filter(|w| w.0).fold(0, |all, w| all | w.1);
        let source = format!("{}{source}", comment(region));
        let identity = String::new();
        let products = match matrix {
            Some(way) if self.target.matrix_unit => way,
            _ if pairs && isa::adds_pairs(&self.target.isa) => Products::Pairs,
            _ => Products::Vectors,
        };
        Ok(Some(Kernel { identity, preludes, source, entries, workspace, rounds, products }.named()))
    }

    fn unit(&self, kernels: &[&Kernel]) -> String {
        let mut text = format!("{PRELUDE}\n{SCALAR}\n");
        let any = |prelude: u32| kernels.iter().any(|k| k.preludes & prelude != 0);
        if any(WITH_TILES) {
            TILES.iter().for_each(|part| text.push_str(part));
        }
        if any(WITH_CODES) {
            CODES.iter().for_each(|part| text.push_str(part));
        }
        if any(WITH_ATTENTION) {
            text.push_str(ATTENTION);
        }
        for k in kernels {
            text.push('\n');
            text.push_str(&k.source);
        }
        text
    }

    fn extension(&self) -> &'static str {
        "c"
    }

    fn alignment(&self) -> u64 {
        64
    }
}
