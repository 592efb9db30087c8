//! The stages between a graph and a plan, each told the backend. In: a graph of native operators. Out, stage by stage: which
//! values have memory and which kernels compute them (`form_regions`), which states they overwrite (`alias_states`), how weights
//! lie (`assign_layouts`), what runs in which order on which buffers (`schedule`), and where those lie (`place`).

mod alias_states;
mod assign_layouts;
mod form_regions;
mod place;
mod schedule;

pub use alias_states::{alias_states, is_version, version_leaf};
pub use assign_layouts::assign_layouts;
pub use form_regions::form_regions;
pub use place::place;
pub use schedule::schedule;

use crate::uses::Uses;
use alias_states::Versions;
use astrai_ir::backend::Root;
use astrai_ir::ops::Op;
use astrai_ir::{Graph, IrError, Layout, NodeId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A graph's bodies while a plan is made of them: those of its blocks in order, then its own.
#[derive(Clone)]
pub struct Draft<'g> {
    bodies: Vec<BodyDraft<'g>>,
}

/// What is decided of one body so far.
#[derive(Clone)]
struct BodyDraft<'g> {
    name: &'g str,
    graph: &'g Graph,
    /// Names of the parameters of a block, or of the inputs and states of the program.
    params: Vec<String>,
    uses: Uses,
    /// What the backend's kernels around each node take along.
    roots: Vec<Option<Root>>,
    /// For each node whether its value has memory.
    stored: Vec<bool>,
    versions: Versions,
    /// Weights that are not read row-major.
    layouts: BTreeMap<NodeId, Layout>,
}

impl Draft<'_> {
    /// Number of values that have memory.
    pub fn values(&self) -> usize {
        self.bodies.iter().map(|b| b.stored.iter().filter(|s| **s).count()).sum()
    }

    /// What was decided, a value a line, for the reader.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for b in &self.bodies {
            let _ = writeln!(out, "body `{}`", b.name);
            for id in b.graph.ids().filter(|id| b.stored[id.index()]) {
                let node = b.graph.node(id);
                let _ = write!(out, "  {id} {} {}", node.op.name(), node.ty());
                let home = b.versions.home(id);
                if home != id {
                    let _ = write!(out, " in {home}");
                }
                if let Some(together) = b.versions.together(id) {
                    let all: Vec<String> = together.iter().map(ToString::to_string).collect();
                    let _ = write!(out, " with {}", all.join(" "));
                }
                if let Some(layout) = b.layouts.get(&id) {
                    let _ = write!(out, " as {layout}");
                }
                let _ = writeln!(out, "   # {}", node.origin);
            }
        }
        out
    }

    /// `Ok` when every value that a kernel reads from memory has some, no value is computed in its own place by a detour, and
    /// only weights are packed.
    pub fn verify(&self) -> Result<(), IrError> {
        for b in &self.bodies {
            let g = b.graph;
            let live = g.live();
            let memory = |id: NodeId| b.stored[id.index()] || is_leaf(g, id);
            for id in g.ids().filter(|id| live[id.index()]) {
                for take in b.roots[id.index()].iter().flat_map(|r| &r.takes) {
                    if let astrai_ir::backend::Takes::Memory(read) = take
                        && !memory(*read)
                    {
                        return Err(b.error(id, format!("reads {read}, which has no memory")));
                    }
                }
            }
            for (_, id) in g.outputs() {
                if !memory(*id) && !matches!(g.node(*id).op, Op::Call(_)) {
                    return Err(b.error(*id, "is a result without memory".into()));
                }
            }
            let packed = b.layouts.keys().find(|id| g.node(**id).op.leaf_name().is_none());
            if let Some(id) = packed {
                return Err(b.error(*id, "is packed and no weight".into()));
            }
            b.versions
                .verify()
                .map_err(|id| b.error(id, "is computed in its own memory by a detour".into()))?;
        }
        Ok(())
    }
}

impl BodyDraft<'_> {
    fn error(&self, id: NodeId, message: String) -> IrError {
        let origin = self.graph.node(id).origin.to_string();
        IrError { origin, message: format!("{id} of `{}` {message}", self.name) }
    }
}

/// Values that have memory without a kernel of their graph.
fn is_leaf(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match &node.op {
        Op::Input(_) | Op::Weight(_) | Op::State(_) | Op::Const(_) => true,
        Op::Part(_) => matches!(g.node(node.args[0]).op, Op::Call(_)),
        _ => false,
    }
}

/// Nodes of the region that computes `roots`, with the stored values it reads, ascending. Of a `store` of a whole state only
/// the value counts.
fn cone(g: &Graph, stored: &[bool], roots: &[NodeId]) -> BTreeSet<NodeId> {
    let mut inside = BTreeSet::new();
    let mut todo = roots.to_vec();
    while let Some(id) = todo.pop() {
        if !inside.insert(id) {
            continue;
        }
        let stop = (stored[id.index()] || is_leaf(g, id)) && !roots.contains(&id);
        let node = g.node(id);
        match (&node.op, node.args.as_slice()) {
            _ if stop => {}
            (Op::Call(_), _) => {}
            (Op::Store(_), [_, value]) => todo.push(*value),
            (_, args) => todo.extend(args),
        }
    }
    inside
}
