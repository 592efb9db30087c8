//! The backend of CUDA devices. In: graphs and pieces of plans. Out: the archetypes' answers within the limits of these kernels, and
//! their text: CUDA C++ for NVRTC, a self-contained program a kernel ([`program`] says how it is called).

mod attention;
mod columns;
mod dot;
mod fours;
mod loss;
mod program;
mod route;
mod rows;
mod sample;

use crate::archetype::{self, Limits};
use astrai_ir::backend::{Backend, Root};
use astrai_ir::kernel::UNNAMED;
use astrai_ir::ops::Op;
use astrai_ir::region::{LoopsForm, Matched, Piece};
use astrai_ir::{Form, Graph, IrError, Kernel, Layout, NodeId, Region, Target};

/// Options with which NVRTC compiles a kernel, beside the architecture; never `--use_fast_math`.
pub const OPTIONS: &[&str] = &["--std=c++17", "--fmad=false", "--disable-warnings"];

/// What the kernels take: heads whose sums fit the registers of a block, experts whose scores fit its shared memory, weights as they
/// lie.
pub const LIMITS: Limits =
    Limits { head: 1024, row: 1 << 17, experts: 8192, panels: None, codes: true, pages: true, without: &[] };

/// The backend of a CUDA device.
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
        archetype::native(op) && !matches!(op, Op::LowRank(_))
    }

    fn root(&self, g: &Graph, id: NodeId) -> Option<Root> {
        archetype::root(g, id, &LIMITS)
    }

    fn reads_codes(&self) -> bool {
        LIMITS.codes
    }

    fn samples(&self) -> bool {
        LIMITS.has("sample")
    }

    fn loops(&self, op: &Op) -> bool {
        archetype::loops::computes(op)
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
        let (name, processors) = (UNNAMED, self.target.units);
        let made = match region.form() {
            Form::Collective | Form::Interpreted => return Ok(None),
            Form::Loops(LoopsForm::Rows) => rows::kernel(region, name)?,
            Form::Loops(LoopsForm::Columns(id, reduce)) => columns::reduce(region, name, *id, reduce)?,
            Form::Loops(LoopsForm::ScatterAdd(root)) => columns::scatter(region, name, *root)?,
            Form::Loops(LoopsForm::StoreRows(root)) => columns::store(region, name, *root)?,
            Form::Dot(f) => dot::kernel(region, f, name, processors)?,
            Form::Grouped(f) => dot::grouped(region, f, name, processors)?,
            Form::Outer(f) => dot::outer(region, f, name, processors)?,
            Form::LowRank(_) => return Err("products of rows in groups take the place of low ranks".into()),
            Form::Attention(f) => attention::forward(region, f, name, &self.target),
            Form::AttentionGrad(f) => attention::backward(region, f, name),
            Form::Loss(f) => loss::kernel(region, f, name, processors),
            Form::Route(f) => route::kernel(region, f, name),
            Form::Sample(f) => sample::kernel(region, f, name),
        };
        Ok(Some(made.named()))
    }

    /// Kernels one after another, to be read: each is a program of its own, and devices build each alone.
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
