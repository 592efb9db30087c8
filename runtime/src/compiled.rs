//! What compiling takes and gives: options, and a graph with its plan, its kernels, and what each stage did.

use crate::Error;
use crate::stages::{Dump, Stage};
use astrai_ir::{Backend, DType, Graph, Kernel, Plan, Storage};
use astrai_passes as passes;
use std::collections::BTreeSet;

/// How a graph is compiled.
#[derive(Clone, Debug)]
pub struct Options {
    /// Type of weights and activations in memory.
    pub storage: DType,
    /// What stays f32 where that is narrower.
    pub wide: passes::Wide,
    /// What is trained in the place of the graph's own weights, which are then frozen.
    pub adapter: Option<passes::Adapter>,
    /// Checkpoint tensors that training leaves as they are.
    pub frozen: Option<BTreeSet<String>>,
    /// Noise on embeddings.
    pub noise: Option<passes::Noise>,
    /// Room for adapters that are chosen token by token.
    pub stack: Option<passes::Stack>,
    /// How the weights of linear layers are stored, where not as numbers of their own.
    pub narrow: Option<Storage>,
    /// Which stages are kept for the reader.
    pub dump: Dump,
    /// The scalar output whose gradient by every weight is added, as `grad.<buffer>`.
    pub gradient_of: Option<String>,
    /// Where gradients go and what is computed again for them.
    pub gradients: passes::Gradients,
    /// Which equal forms of the graph are looked for.
    pub saturate: passes::Saturate,
    /// Weights change between runs: they are read row-major, nothing derived from them is kept.
    pub trained: bool,
    /// The ranks that run the program, and where its weights lie on them; no axes: one rank.
    pub shards: passes::MeshSharding,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            storage: DType::F32,
            wide: passes::Wide::default(),
            adapter: None,
            frozen: None,
            noise: None,
            stack: None,
            narrow: None,
            dump: Dump::None,
            gradient_of: None,
            gradients: passes::Gradients::default(),
            saturate: passes::Saturate::default(),
            trained: false,
            shards: passes::MeshSharding::default(),
        }
    }
}

impl Options {
    /// The storage types of the program.
    pub(crate) fn policy(&self) -> passes::Policy<'_> {
        passes::Policy { storage: self.storage, wide: &self.wide }
    }

    /// True where weights change between runs, as they do wherever their gradients are wanted.
    pub(crate) fn is_trained(&self) -> bool {
        self.trained || self.gradient_of.is_some()
    }
}

/// A compiled graph.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The graph after the stages that change what is computed where.
    pub graph: Graph,
    /// What runs in which order.
    pub plan: Plan,
    /// One kernel a region of the plan; `None` where the interpreter runs the region.
    pub kernels: Vec<Option<Kernel>>,
    /// Weights that are computed from others when they are loaded.
    pub derived: Vec<passes::Derived>,
    /// What each stage did.
    pub report: Report,
}

/// What the stages of a compilation did.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was found when the bodies' equal forms were looked for.
    pub searched: Vec<passes::SaturationReport>,
    /// Time and size of each stage, and what it left where a dump was asked for.
    pub stages: Vec<Stage>,
}

/// The kernels of a plan's regions.
pub(crate) fn emit(plan: &Plan, backend: &dyn Backend) -> Result<Vec<Option<Kernel>>, Error> {
    let one = |region: &std::sync::Arc<astrai_ir::Region>| {
        let origin = || region.origin.clone();
        backend.emit(region).map_err(|message| Error::Codegen { origin: origin(), message })
    };
    plan.regions.iter().map(one).collect()
}
