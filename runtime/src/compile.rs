//! The hall. In: a graph. Out: a program: its plan and the source of its kernels. Every stage is named here in order.

use crate::Error;
use crate::buffers::Buffers;
use crate::memory::available_memory;
use crate::pack::packed_bytes;
use crate::stages::{Dump, Stage, Stages};
use astrai_codegen::{Kernel, host};
use astrai_ir::ops::Op;
use astrai_ir::plan::{PlannedWeight, bound};
use astrai_ir::{Anchor, DType, Graph, IrError, Layout, Plan, Target, TargetKind, Type};
use astrai_passes as passes;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// What runs the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Kernels in C on this machine's processor.
    Host,
    /// The reference interpreter.
    Interpreter,
    /// Nothing: programs are planned and their kernels written, but never built or run.
    Null,
}

/// How a graph is compiled.
#[derive(Clone, Debug)]
pub struct Options {
    /// Type of weights and activations in memory.
    pub storage: DType,
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
            dump: Dump::None,
            gradient_of: None,
            gradients: passes::Gradients::default(),
            saturate: passes::Saturate::default(),
            trained: false,
            shards: passes::MeshSharding::default(),
        }
    }
}

/// A compiled graph.
#[derive(Clone, Debug)]
pub struct Program {
    /// The graph after the stages that change what is computed where; the interpreter runs it.
    pub graph: Graph,
    /// What runs in which order.
    pub plan: Plan,
    /// One kernel a region of the plan; `None` where the interpreter runs the region.
    pub kernels: Vec<Option<Kernel>>,
    /// What was found when the bodies' equal forms were looked for.
    pub searched: Vec<passes::SaturationReport>,
    /// Weights that are computed from others when they are loaded.
    pub derived: Vec<passes::Derived>,
    /// What each stage did.
    pub stages: Vec<Stage>,
}

/// Compiles a graph for a target.
pub fn compile(graph: &Graph, target: &Target, options: &Options) -> Result<Program, Error> {
    let policy = passes::Policy { storage: options.storage };
    let mut stages = Stages::new(&options.dump);
    let g = stages.graph("build", || Ok(graph.clone()))?;
    let over = options.shards.data_axes();
    let g = match options.shards.stages() {
        Some(axis) => stages.graph("pipeline", || passes::pipeline(&g, axis, options.shards.stage))?,
        None => g,
    };
    let g = match options.shards.axes().next() {
        Some(_) => stages.graph("shard", || passes::shard(&g, &options.shards))?,
        None => g,
    };
    let g = stages.graph("flatten", || passes::flatten(&g))?;
    let g = stages.graph("merge", || passes::merge(&g))?;
    let g = stages.graph("precision", || passes::precision(&g, policy))?;
    let g = match &options.gradient_of {
        Some(output) => {
            let how = options.gradients;
            stages.graph("differentiate", || passes::differentiate_over(&g, output, how, &over))?
        }
        None => g,
    };
    let g = stages.graph("canonicalise", || passes::canonicalise(&g))?;
    let trained = options.trained || options.gradient_of.is_some();
    let mut searched = Vec::new();
    let g = stages.graph("saturate", || {
        let (g, found) = passes::saturate(&g, target, options.saturate, trained)?;
        searched = found;
        Ok(g)
    })?;
    let mut derived = Vec::new();
    let g = match options.saturate.folds(trained) {
        true => stages.graph("fold", || {
            let (g, found) = passes::fold(&g)?;
            derived = found;
            Ok(g)
        })?,
        false => g,
    };
    let g = stages.graph("decompose", || passes::decompose(&g, &native))?;
    let plan = stages.other("fuse", || Ok(passes::fuse(&g, trained)?), |p| p.regions.len())?;
    let plan = stages.other("place", || Ok(passes::place(&plan)?), |p| p.launches())?;
    let kernels = stages.other("emit", || emit(&plan, target), |k| k.len())?;
    Ok(Program { graph: g, plan, kernels, searched, derived, stages: stages.done })
}

/// Composites that have a kernel of their own; every other operator that says how is split into simpler ones.
fn native(op: &Op) -> bool {
    matches!(
        op,
        Op::RmsNorm(_)
            | Op::Softmax(_)
            | Op::Rope(_)
            | Op::GatedAct(_)
            | Op::GroupedDot(_)
            | Op::GroupedOuter(_)
            | Op::LinearCrossEntropy(_)
            | Op::LinearCrossEntropyGrad(_)
    )
}

fn emit(plan: &Plan, target: &Target) -> Result<Vec<Option<Kernel>>, Error> {
    if let TargetKind::Cuda { .. } = target.kind {
        let message =
            "programs run on the host; CUDA has kernels of single regions only (codegen::cuda)".into();
        return Err(Error::Codegen { origin: target.name.clone(), message });
    }
    let mut kernels = Vec::with_capacity(plan.regions.len());
    for region in &plan.regions {
        if matches!(region.anchor, Anchor::Eval | Anchor::Collective) {
            kernels.push(None);
            continue;
        }
        let mut hash = DefaultHasher::new();
        region.key().hash(&mut hash);
        let name = format!("k{:016x}", hash.finish());
        let kernel = host::emit(region, &name)
            .map_err(|message| Error::Codegen { origin: region.origin.clone(), message })?;
        kernels.push(Some(kernel));
    }
    Ok(kernels)
}

/// Bytes of a weight in its layout.
pub(crate) fn weight_bytes(w: &PlannedWeight) -> u64 {
    let shape: Vec<usize> = w.weight.ty.shape.iter().map(|d| d.size().unwrap_or(1)).collect();
    let dtype = w.weight.ty.dtype;
    match w.layout {
        Layout::Rows => shape.iter().map(|n| *n as u64).product::<u64>() * dtype.bytes() as u64,
        Layout::Panels => packed_bytes(dtype, &shape) as u64,
    }
}

/// Predicted cost of a program at the upper bounds of its symbols.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Kernel launches of a run.
    pub launches: u64,
    /// Floating-point operations of a run.
    pub flops: u64,
    /// Bytes that kernels read and write in a run.
    pub bytes: u64,
    /// Bytes of weights as stored.
    pub weight_bytes: u64,
    /// Bytes of values between kernels and of results, scratch of kernels included.
    pub arena_bytes: u64,
    /// Bytes of keys and values that one token leaves behind.
    pub kv_bytes_per_token: u64,
}

impl Program {
    /// Predicted cost at the symbols' upper bounds.
    pub fn cost(&self) -> Result<Cost, Error> {
        let mut cost = Cost::default();
        for (_, r) in self.plan.each_launch() {
            let region = &self.plan.regions[r];
            cost.launches += 1;
            cost.flops = cost.flops.saturating_add(self.plan.bound(&region.flops())?);
            cost.bytes = cost.bytes.saturating_add(self.plan.bound(&region.bytes())?);
            cost.kv_bytes_per_token += kv_bytes(region);
        }
        cost.weight_bytes = self.plan.weights.iter().map(weight_bytes).sum();
        cost.arena_bytes = self.arena_bytes()?;
        Ok(cost)
    }

    /// Collectives of a run by kind: how many, and the bytes that a rank sends in them at the symbols' upper bounds.
    pub fn collectives(&self) -> Result<BTreeMap<&'static str, [u64; 2]>, Error> {
        let mut found = BTreeMap::new();
        for (_, r) in self.plan.each_launch() {
            let g = &self.plan.regions[r].graph;
            for n in g.nodes() {
                let args: Vec<&Type> = n.args.iter().map(|a| g.ty(*a)).collect();
                if let Some(traffic) = n.op.traffic(&args, &n.types) {
                    let sent = traffic.sent(self.plan.bound(&traffic.bytes)?);
                    let [count, bytes] = found.entry(n.op.name()).or_insert([0u64, 0]);
                    (*count, *bytes) = (*count + 1, bytes.saturating_add(sent));
                }
            }
        }
        Ok(found)
    }

    /// Bytes of values between kernels and of results, scratch of kernels included.
    pub fn arena_bytes(&self) -> Result<u64, Error> {
        let mut bytes = self.plan.main.arena + self.plan.scratch + self.scratch_bytes()?;
        for (_, id) in self.graph.outputs() {
            if !passes::is_version(&self.graph, *id) {
                bytes += self.plan.bound(&self.graph.ty(*id).bytes())?;
            }
        }
        Ok(bytes)
    }

    /// Refuses a program that needs more memory than the machine has left, before anything is loaded.
    pub fn check_memory(&self) -> Result<(), Error> {
        self.check_memory_beside(&Buffers::new(), None)
    }

    /// Bytes of memory that a session of this program takes beside one of the other.
    pub fn bytes_beside(&self, other: &Program) -> Result<u64, Error> {
        Ok(self.fresh_weights(&Buffers::new(), Some(other)).saturating_add(self.arena_bytes()?))
    }

    /// Bytes of the weights that are not in memory yet, where these buffers and the other program's weights are.
    pub(crate) fn fresh_weights(&self, buffers: &Buffers, other: Option<&Program>) -> u64 {
        let known = |w: &PlannedWeight| {
            buffers.get(&w.weight.name).is_some() || other.is_some_and(|o| o.plan.weights.contains(w))
        };
        self.plan.weights.iter().filter(|w| !known(w)).map(weight_bytes).sum()
    }

    /// [`check_memory`](Self::check_memory) of what is not in memory yet: weights in these buffers and of the other program are.
    pub(crate) fn check_memory_beside(
        &self,
        buffers: &Buffers,
        other: Option<&Program>,
    ) -> Result<(), Error> {
        let weights = self.fresh_weights(buffers, other);
        let (need, have) = (weights.saturating_add(self.arena_bytes()?), available_memory());
        if need <= have {
            return Ok(());
        }
        Err(Error::Memory {
            what: "this program".into(),
            need,
            have,
            remedy: "use a smaller model, --batch or --seq, or --dtype bf16".into(),
        })
    }

    /// Bytes that the most demanding kernel keeps between its phases.
    pub(crate) fn scratch_bytes(&self) -> Result<u64, IrError> {
        let mut most = 0;
        for (region, kernel) in self.plan.regions.iter().zip(&self.kernels) {
            if kernel.as_ref().is_some_and(|k| k.scratch) {
                most = most.max(bound(&self.plan.symbols, &host::scratch(region))?);
            }
        }
        Ok(most)
    }
}

/// Bytes of keys and values (or latents) a token: what a region stores of it in a state, or what attention without pages reads
/// of it.
fn kv_bytes(region: &astrai_ir::Region) -> u64 {
    let g = &region.graph;
    let mut bytes = 0;
    for n in g.nodes() {
        let kept = match (&n.op, n.args.as_slice()) {
            (Op::Attention(a), args) if a.page.is_none() => &args[1..3],
            (Op::Store(_), args @ [_, _, _]) => &args[..1],
            _ => &[],
        };
        for &a in kept {
            let per_token = g.ty(a).shape[1..].iter().filter_map(|d| d.size()).product::<usize>();
            bytes += (per_token * stored_dtype(g, a).bytes()) as u64;
        }
    }
    bytes
}

fn stored_dtype(g: &Graph, id: astrai_ir::NodeId) -> DType {
    let node = g.node(id);
    match (&node.op, node.args.first()) {
        (Op::Input(i), _) => i.ty.dtype,
        (_, Some(a)) => stored_dtype(g, *a),
        _ => node.ty().dtype,
    }
}
