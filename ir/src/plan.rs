//! What the passes hand to the runtime: which kernels run in which order on which buffers. Plain data, so that its makers and
//! readers stay strangers.

mod text;
mod verify;

use crate::graph::{IrError, NodeId};
use crate::ops::Weight;
use crate::region::{Layout, Region};
use crate::{Dim, Symbol, Type};
use std::fmt;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

/// Declares an index of its own into a list.
macro_rules! ids {
    ($($(#[$doc:meta])* $id:ident => $of:ty),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
        #[serde(transparent)]
        pub struct $id(pub usize);

        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl Index<$id> for Vec<$of> {
            type Output = $of;
            fn index(&self, id: $id) -> &$of {
                &self[id.0]
            }
        }

        impl IndexMut<$id> for Vec<$of> {
            fn index_mut(&mut self, id: $id) -> &mut $of {
                &mut self[id.0]
            }
        }
    )*};
}

ids! {
    /// A region of a plan.
    RegionId => Arc<Region>,
    /// A buffer of a body.
    BufferId => Buffer,
    /// A block's body.
    BodyId => Body,
    /// A weight of a plan.
    WeightId => PlannedWeight,
}

/// Where a buffer's memory comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a block: parameter of the call. In the main body: input of the program.
    Param(usize),
    /// In a block: result of the call. In the main body: output of the program.
    Result(usize),
    /// Weight of the plan.
    Weight(WeightId),
    /// Literal numbers.
    Const(Vec<u8>),
    /// Bytes of the arena (of the main body, or of the scratch that calls share), from this offset.
    Arena(u64),
}

/// A value in memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Its type.
    pub ty: Type,
    /// Its memory.
    pub place: Place,
    /// Where it was made.
    pub origin: Arc<str>,
}

/// One thing to do.
#[derive(Clone, Debug)]
pub enum Step {
    /// Run a kernel.
    Run {
        /// Index into the plan's regions.
        region: RegionId,
        /// Buffers read, as the region numbers them.
        reads: Vec<BufferId>,
        /// Buffers written.
        writes: Vec<BufferId>,
        /// Nodes of the planned graph that are computed here, for the reader.
        nodes: Vec<NodeId>,
        /// Where the computation was made.
        origin: Arc<str>,
    },
    /// Run a block.
    Call {
        /// Index into the plan's bodies.
        body: BodyId,
        /// Buffers bound to its parameters.
        args: Vec<BufferId>,
        /// Buffers bound to its results.
        results: Vec<BufferId>,
        /// Where the call was made.
        origin: Arc<str>,
    },
}

/// An ordered list of steps and the buffers they use: a block's, or the program's own.
#[derive(Clone, Debug, Default)]
pub struct Body {
    /// Name of the kind; empty for the program's own.
    pub name: String,
    /// Names and layouts of the parameters (of a block) or inputs (of the program).
    pub params: Vec<(String, Layout)>,
    /// Names of the results.
    pub results: Vec<String>,
    /// Values in memory.
    pub buffers: Vec<Buffer>,
    /// What to do, in order.
    pub steps: Vec<Step>,
    /// Bytes of arena that its own buffers need at the symbols' upper bounds.
    pub arena: u64,
}

/// A weight in the layout in which kernels read it.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedWeight {
    /// The buffer and the checkpoint tensors in it.
    pub weight: Weight,
    /// Its layout.
    pub layout: Layout,
}

/// A program before its kernels are written.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Symbols, in the order in which kernels take their values.
    pub symbols: Vec<Symbol>,
    /// Distinct regions.
    pub regions: Vec<Arc<Region>>,
    /// Bodies of the blocks.
    pub bodies: Vec<Body>,
    /// The program's own body.
    pub main: Body,
    /// Weights, each in each layout it is read in.
    pub weights: Vec<PlannedWeight>,
    /// Bytes of scratch that calls share, at the symbols' upper bounds.
    pub scratch: u64,
}

impl Plan {
    /// Value of a size at the symbols' upper bounds.
    pub fn bound(&self, d: &Dim) -> Result<u64, IrError> {
        bound(&self.symbols, d)
    }

    /// Number of kernel launches of one run.
    pub fn launches(&self) -> usize {
        self.main
            .steps
            .iter()
            .map(|s| match s {
                Step::Run { .. } => 1,
                Step::Call { body, .. } => self.bodies[*body].steps.len(),
            })
            .sum()
    }

    /// Every kernel launch of one run in order: (origin prefix of the call, region).
    pub fn each_launch(&self) -> Vec<(Arc<str>, RegionId)> {
        let mut out = Vec::new();
        let mut add = |prefix: &str, steps: &[Step]| {
            for s in steps {
                if let Step::Run { region, origin, .. } = s {
                    let at =
                        if prefix.is_empty() { origin.to_string() } else { format!("{prefix}.{origin}") };
                    out.push((at.into(), *region));
                }
            }
        };
        for s in &self.main.steps {
            match s {
                Step::Call { body, origin, .. } => add(origin, &self.bodies[*body].steps),
                step => add("", std::slice::from_ref(step)),
            }
        }
        out
    }
}

/// Value of a size at the upper bounds of the symbols.
pub fn bound(symbols: &[Symbol], d: &Dim) -> Result<u64, IrError> {
    d.eval(&|s| symbols.iter().find(|x| &*x.name == s).map(|x| x.max))
        .map_err(|message| IrError { origin: String::new(), message })
}
