//! A model under training. In: a configuration, a recipe, weights. Out: optimiser steps on batches. Three compiled programs over
//! one set of buffers: `grad` (forward and backward, gradients into states), `update` (norm, clip, optimiser), `score`
//! (the loss alone). A step on batches of the same shape as the last one's allocates nothing.

mod inputs;
mod objective;

use crate::batch::PackedBatch;
use crate::router::{ExpertLoads, RouterLosses, RouterStats};
use crate::scaler::LossScale;
use crate::strategies::{self, Sizes, Strategy};
use crate::update::{self, EMA, MASTER, Optimizer, Rule, Stages, matches};
use astrai_builders::{Logits, Loss, ModelConfig, Program as Built, placements};
use astrai_ir::ops::{Op, Weight};
use astrai_ir::shard::{STAGES, Shard};
use astrai_ir::{Backend, DType, Dim, Graph, Mesh, Node, Placement, Sharding, Type, inline_calls};
use astrai_runtime::{
    Adapter, Buffers, Compiled, Destination, Device, Dump, Error, GRAD, Gradients, MeshSharding, Noise,
    Options, Profile, Recompute, Session, WeightSource, compile,
};
use inputs::{Inputs, LOSS_SCALE, LR};
use objective::Metrics;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// How a model is trained; batches may be smaller than these sizes.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Most tokens in a batch, of all sequences together.
    pub tokens: u64,
    /// Most sequences in a batch.
    pub sequences: u64,
    /// Longest sequence.
    pub span: u64,
    /// Type of weights and activations; gradients, moments and master weights are f32.
    pub storage: DType,
    /// Gradient accumulation: a step may take several micro-batches.
    pub accumulate: bool,
    /// Activation checkpointing: which activations the backward pass recomputes.
    pub recompute: Recompute,
    /// The optimiser.
    pub optimizer: Optimizer,
    /// Auxiliary losses of the routers of a model with experts.
    pub router: RouterLosses,
    /// What is trained in the place of the model's weights.
    pub adapter: Option<Adapter>,
    /// Patterns of the names of checkpoint tensors that stay as they are.
    pub frozen: Vec<String>,
    /// Noise on embeddings under training (NEFTune): alpha, and the seed of the noise.
    pub neftune: Option<(f64, u64)>,
    /// Checkpoints are written from a copy while the run goes on.
    pub async_save: bool,
    /// What is learnt of a batch, which then has as many sequences as said here; the mean cross-entropy of all targets where there is none.
    pub objective: Option<Arc<dyn Strategy>>,
}

impl Recipe {
    /// Prefixes of the states that outlive a run: moments, and master weights where weights are narrow.
    pub fn kept(&self) -> impl Iterator<Item = &'static str> {
        let narrow = self.storage != DType::F32;
        self.optimizer.kept().into_iter().chain(narrow.then_some(MASTER))
    }
}

/// The programs of a model under training, planned.
pub struct Plan {
    /// Forward and backward.
    pub grad: Compiled,
    /// Norm, clip and optimiser.
    pub update: Compiled,
    /// The loss of a batch.
    pub score: Compiled,
    /// Buffers of the weights, fixed ones included, in the type in which kernels read them.
    pub weights: Vec<Weight>,
    recipe: Recipe,
    of_update: (Graph, Options),
}

impl Plan {
    /// Plans the programs of a model for a backend. `dump` says which stages of `grad` are kept.
    pub fn new(
        config: &ModelConfig,
        recipe: &Recipe,
        backend: &dyn Backend,
        dump: Dump,
    ) -> Result<Plan, Error> {
        Plan::on_ranks(config, recipe, backend, dump, (&Mesh::default(), 0))
    }

    /// [`new`](Self::new) for one of the ranks of a mesh, at a stage of its pipeline; its batches are of the recipe's sizes.
    pub fn on_ranks(
        config: &ModelConfig,
        recipe: &Recipe,
        backend: &dyn Backend,
        dump: Dump,
        (mesh, stage): (&Mesh, usize),
    ) -> Result<Plan, Error> {
        if mesh.ranks() > 1 && matches!(recipe.optimizer.rule, Rule::Muon { .. }) {
            return Err(Error::Input(
                "Muon reads whole matrices, which ranks share; use one rank or adamw".into(),
            ));
        }
        if mesh.ranks() > 1 && recipe.optimizer.narrow_moments {
            return Err(Error::Input("moments of eight bits are of one rank; use --moments f32".into()));
        }
        if mesh.ranks() > 1 && recipe.adapter.is_some() {
            return Err(Error::Input("adapters are trained on one rank".into()));
        }
        let [graph, alone] = graphs(config, recipe)?;
        let to = if recipe.accumulate { Destination::Accumulators } else { Destination::States };
        let leaves = placements(config, mesh, &graph);
        let shards = MeshSharding { mesh: mesh.clone(), leaves, stage, trained: false };
        let (storage, adapter) = (recipe.storage, recipe.adapter.clone());
        let frozen = frozen(config, recipe)?;
        let score = Options { storage, adapter, frozen, trained: true, shards, ..Options::default() };
        let grad = Options {
            shards: MeshSharding { trained: true, ..score.shards.clone() },
            dump,
            gradient_of: Some("loss".into()),
            gradients: Gradients { to, recompute: recipe.recompute },
            noise: noise(config, recipe),
            ..score.clone()
        };
        let (grad, score) = (compile(&graph, backend, &grad)?, compile(&alone, backend, &score)?);
        let weights = weights(&grad);
        let (whole, leaves) = whole_weights(&grad, mesh, recipe)?;
        let stages = stages_of_norm(&whole, &leaves, (mesh, stage));
        let mut update = update::build(&whole, &recipe.optimizer, stages.as_ref())?;
        if mesh.ranks() > 1 {
            // A partial sum would be reduced where it leaves a block: once a tensor instead of once.
            update = inline_calls(&update)?;
        }
        // The update has no layers to put on stages.
        let axes = mesh.axes.iter().filter(|a| a.name != STAGES).cloned().collect();
        let shards = MeshSharding { mesh: Mesh { axes }, leaves, ..MeshSharding::default() };
        let of_update = Options { shards, ..Options::default() };
        let compiled = compile(&update, backend, &of_update)?;
        Ok(Plan {
            grad,
            update: compiled,
            score,
            weights,
            recipe: recipe.clone(),
            of_update: (update, of_update),
        })
    }

    /// The update once more, its stages kept.
    pub fn update_dumped(&self, backend: &dyn Backend, dump: Dump) -> Result<Compiled, Error> {
        let (graph, options) = &self.of_update;
        compile(graph, backend, &Options { dump, ..options.clone() })
    }

    /// Names and types of the buffers beside the weights: gradients, moments, master weights of those that are trained.
    pub fn states(&self) -> Vec<(String, DType, Vec<usize>)> {
        let prefixes: Vec<&str> = [GRAD].into_iter().chain(self.recipe.kept()).collect();
        let one = |p: &str, w: &Weight| {
            let ty = self.recipe.optimizer.state(p, w);
            (format!("{p}{}", w.name), ty.dtype, sizes(&ty))
        };
        let trained = || self.weights.iter().filter(|w| !w.frozen);
        let optimizer = &self.recipe.optimizer;
        let of = |p: &'static str| trained().filter(move |w| optimizer.keeps(p, w)).map(move |w| one(p, w));
        prefixes.into_iter().flat_map(of).collect()
    }

    /// Elements of the weights that are trained.
    pub fn trained_parameters(&self) -> u64 {
        let elements = |w: &Weight| shape(w).iter().product::<usize>() as u64;
        self.weights.iter().filter(|w| !w.frozen).map(elements).sum()
    }

    /// Bytes that training holds: (weights, gradients and optimiser, activations and scratch).
    pub fn memory(&self) -> Result<[u64; 3], Error> {
        let bytes = |dtype: DType, shape: &[usize]| (shape.iter().product::<usize>() * dtype.bytes()) as u64;
        let weights = self.weights.iter().map(|w| bytes(w.ty.dtype, &shape(w))).sum();
        let states = self.states().iter().map(|(_, d, s)| bytes(*d, s)).sum();
        // The programs run one after another, but each session keeps its arena.
        let mut arenas = 0;
        for p in [&self.grad, &self.update, &self.score] {
            arenas += p.arena_bytes()?;
        }
        Ok([weights, states, arenas])
    }

    /// Bytes of the copy from which a checkpoint is written while the run goes on; 0 where it waits.
    pub fn copy_bytes(&self) -> u64 {
        if !self.recipe.async_save {
            return 0;
        }
        let bytes = |dtype: DType, shape: &[usize]| (shape.iter().product::<usize>() * dtype.bytes()) as u64;
        let weights: u64 = match self.recipe.adapter {
            Some(_) => 4 * self.trained_parameters(),
            None => self.weights.iter().map(|w| bytes(w.ty.dtype, &shape(w))).sum(),
        };
        let kept = self.states().into_iter().filter(|(name, ..)| !name.starts_with(GRAD));
        weights + kept.map(|(_, dtype, shape)| bytes(dtype, &shape)).sum::<u64>()
    }

    /// Refuses what does not fit the memory that the device has left.
    pub fn check_memory(&self, device: &dyn Device) -> Result<(), Error> {
        let (need, have) = (self.memory()?.iter().sum::<u64>() + self.copy_bytes(), device.available());
        if need <= have {
            return Ok(());
        }
        let remedy = "use a smaller model, --batch or --seq, --recompute full, or --dtype bf16".into();
        Err(Error::Memory { what: "training this model".into(), need, have, remedy })
    }
}

/// The checkpoint tensors that a recipe freezes.
fn frozen(config: &ModelConfig, recipe: &Recipe) -> Result<Option<BTreeSet<String>>, Error> {
    if recipe.frozen.is_empty() {
        return Ok(None);
    }
    let (mut names, all) = (BTreeSet::new(), config.tensors());
    for pattern in &recipe.frozen {
        let hits: Vec<_> = all.iter().filter(|t| matches(pattern, &t.name)).map(|t| t.name.clone()).collect();
        if hits.is_empty() {
            return Err(Error::Input(format!("freeze: `{pattern}` names no weight of this model")));
        }
        names.extend(hits);
    }
    if names.len() == all.len() {
        return Err(Error::Input("freeze: nothing is left to train".into()));
    }
    Ok(Some(names))
}

fn noise(config: &ModelConfig, recipe: &Recipe) -> Option<Noise> {
    let (alpha, _) = recipe.neftune?;
    Some(Noise { table: config.names.embed.into(), scale: alpha / (config.hidden_size as f64).sqrt() })
}

/// The loss that a step differentiates, and the one that is only computed, without those of the routers.
fn graphs(config: &ModelConfig, recipe: &Recipe) -> Result<[Graph; 2], Error> {
    if let Some(objective) = &recipe.objective {
        let sizes = Sizes { tokens: recipe.tokens, sequences: recipe.sequences as usize, span: recipe.span };
        let graph = |balanced| strategies::graph(config, &**objective, &sizes, balanced);
        return Ok([graph(recipe.router.balanced())?, graph(false)?]);
    }
    let built = Built {
        tokens: recipe.tokens,
        sequences: recipe.sequences,
        span: recipe.span,
        logits: Logits::None,
        loss: recipe.router.loss(),
        cache: None,
    };
    let graph = |loss| astrai_builders::build(config, &Built { loss, ..built.clone() });
    Ok([graph(recipe.router.loss())?, graph(Loss::Scaled)?])
}

fn weights(program: &Compiled) -> Vec<Weight> {
    let weight = |n: &Node| if let Op::Weight(w) = &n.op { Some(w.clone()) } else { None };
    program.graph.nodes().iter().filter_map(weight).collect()
}

/// For weights, and the states that follow them, what a rank holds along each axis.
type Leaves = HashMap<String, Vec<(String, Placement)>>;

/// The stages over which the norm of all gradients is summed, and the weights that an earlier one counts in it.
fn stages_of_norm(weights: &[Weight], leaves: &Leaves, (mesh, stage): (&Mesh, usize)) -> Option<Stages> {
    let axis = mesh.axes.iter().find(|a| a.name == STAGES && a.size > 1)?.clone();
    let earlier = |w: &&Weight| {
        let placed = leaves.get(&w.name).into_iter().flatten();
        placed.into_iter().any(|(_, p)| matches!(p, Placement::Stages(at) if at.first() < Some(&stage)))
    };
    Some(Stages { axis, counted: weights.iter().filter(earlier).map(|w| w.name.clone()).collect() })
}

/// The weights of a program as they are on all ranks together, and where they and their states lie.
fn whole_weights(program: &Compiled, mesh: &Mesh, recipe: &Recipe) -> Result<(Vec<Weight>, Leaves), Error> {
    let (mut all, mut leaves) = (weights(program), Leaves::new());
    all.retain(|w| !w.frozen);
    if mesh.ranks() == 1 {
        return Ok((all, leaves));
    }
    let prefixes: Vec<&str> = ["", GRAD].into_iter().chain(recipe.kept()).collect();
    let sharded = |n: &Node| Some((n.op.leaf_name()?.to_string(), n.sharding.clone()));
    let mut shardings: HashMap<String, Sharding> = program.graph.nodes().iter().filter_map(sharded).collect();
    for w in &mut all {
        let mut placed = Vec::new();
        for (axis, p) in shardings.remove(&w.name).unwrap_or_default() {
            // The sections of a concatenated weight do not matter to pointwise updates.
            let p = match p {
                Placement::Shard(shard) => {
                    w.ty.shape[shard.dim] = &w.ty.shape[shard.dim] * &Dim::from(mesh.size(&axis));
                    Placement::Shard(Shard::of(shard.dim))
                }
                p => p,
            };
            placed.push((axis, p));
        }
        w.parts.clear();
        let kept = prefixes.iter().filter(|p| recipe.optimizer.keeps(p, w));
        kept.for_each(|p| _ = leaves.insert(format!("{p}{}", w.name), placed.clone()));
    }
    Ok((all, leaves))
}

fn shape(w: &Weight) -> Vec<usize> {
    sizes(&w.ty)
}

fn sizes(ty: &Type) -> Vec<usize> {
    ty.shape.iter().filter_map(|d| d.size()).collect()
}

/// What an optimiser step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss over the targets that count, or the objective's, before the step.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub grad_norm: f64,
    /// False when a gradient was infinite, not a number, or larger than the optimiser allows, so that the step changed nothing.
    pub applied: bool,
    /// Targets that counted.
    pub targets: usize,
    /// Router metrics, where expert loads are counted.
    pub router: Option<RouterStats>,
    /// What the loss was multiplied by for its gradient, where weights are stored as f16.
    pub loss_scale: Option<f64>,
}

/// A model under training.
pub struct Engine {
    buffers: Buffers,
    weights: Vec<Weight>,
    recipe: Recipe,
    grad: Session,
    update: Session,
    score: Session,
    inputs: Inputs,
    loads: ExpertLoads,
    metrics: Metrics,
    /// What the loss is multiplied by for its gradient, where weights are stored as f16.
    pub loss_scale: Option<LossScale>,
    /// Steps taken, over all runs.
    pub steps: u64,
}

impl Engine {
    /// A model with these weights (by checkpoint name), no step taken yet. `progress` hears (bytes done, bytes in all).
    pub fn open(
        plan: Plan,
        source: &dyn WeightSource,
        device: &Arc<dyn Device>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine, Error> {
        plan.check_memory(&**device)?;
        let mut buffers = Buffers::new(device);
        let weights = plan.weights.iter().map(|w| (w.name.clone(), w.ty.dtype, shape(w)));
        buffers.add_all(weights.chain(plan.states()))?;
        for (i, w) in plan.weights.iter().enumerate() {
            if plan.recipe.optimizer.keeps(MASTER, w) && !w.frozen {
                buffers.load(&format!("{MASTER}{}", w.name), w, source)?;
            }
            if plan.recipe.optimizer.ema.is_some() && !w.frozen {
                buffers.load(&format!("{EMA}{}", w.name), w, source)?;
            }
            buffers.load(&w.name, w, source)?;
            progress(i as u64 + 1, plan.weights.len() as u64);
        }
        let session = |program: Compiled| Session::over(Arc::new(program), source, &buffers, &mut |_, _| {});
        let (grad, update, score) = (session(plan.grad)?, session(plan.update)?, session(plan.score)?);
        let (weights, recipe) = (plan.weights, plan.recipe);
        let (inputs, loads, metrics) = (Inputs::new(), ExpertLoads::default(), Metrics::of(&grad));
        let loss_scale = recipe.optimizer.scaled.then(LossScale::default);
        let steps = 0;
        Ok(Engine {
            grad,
            update,
            score,
            buffers,
            weights,
            recipe,
            inputs,
            loads,
            metrics,
            loss_scale,
            steps,
        })
    }

    /// One optimiser step: the gradient of the mean loss over all targets of these batches, and of the mean over batches of the
    /// routers' losses, then the update.
    pub fn step(&mut self, batches: &[PackedBatch], lr: f64) -> Result<StepResult, Error> {
        self.next_tokens(batches.iter(), lr)
    }

    fn next_tokens<'a>(
        &mut self,
        batches: impl Iterator<Item = &'a PackedBatch> + Clone,
        lr: f64,
    ) -> Result<StepResult, Error> {
        let (count, targets) = (batches.clone().count(), batches.clone().map(PackedBatch::valid).sum());
        self.check(count)?;
        if targets == 0 {
            return Err(Error::Input("no target in a step counts".into()));
        }
        let (mut loss, scale) = (0.0, self.scale());
        for (i, batch) in batches.enumerate() {
            self.inputs.set(batch);
            self.noise(&batch.starts, i);
            self.inputs.scalar(LOSS_SCALE, scale / targets as f64);
            self.inputs.of_micro_batch(i, count, &self.recipe.router, scale);
            self.inputs.run(&mut self.grad, 0..LR)?;
            let alone = self.grad.scalar("cross_entropy").or(self.grad.scalar("loss"));
            loss += f64::from(alone.unwrap_or(f32::NAN)) / scale;
            self.loads.add(&self.grad);
        }
        self.update(loss, targets, count, lr)
    }

    /// Refuses a number of micro-batches that the programs do not take; begins a step.
    fn check(&mut self, count: usize) -> Result<(), Error> {
        if count > 1 && !self.recipe.accumulate || count == 0 {
            return Err(Error::Input(format!("{count} batches in a step")));
        }
        self.loads.clear();
        Ok(())
    }

    /// The noise of a micro-batch: each step, also one that is left out, draws its own.
    fn noise(&mut self, starts: &[i32], micro_batch: usize) {
        if let Some((_, seed)) = self.recipe.neftune {
            self.inputs.noise(starts, seed, (self.steps << 20) + micro_batch as u64);
        }
    }

    /// What the loss is multiplied by for its gradient.
    fn scale(&self) -> f64 {
        self.loss_scale.map_or(1.0, |s| s.scale)
    }

    fn update(&mut self, loss: f64, targets: usize, count: usize, lr: f64) -> Result<StepResult, Error> {
        let t = self.loss_scale.map_or(self.steps, |s| s.updates) as f64 + 1.0;
        self.inputs.scalar(LR, lr);
        self.inputs.scalar(LR + 3, 1.0 / self.scale());
        if let Some([beta1, beta2]) = self.recipe.optimizer.betas() {
            self.inputs.scalar(LR + 1, 1.0 / (1.0 - beta1.powf(t)));
            self.inputs.scalar(LR + 2, 1.0 / (1.0 - beta2.powf(t)));
        }
        self.inputs.run(&mut self.update, LR..LR + 4)?;
        let grad_norm = f64::from(self.update.scalar("grad_norm").unwrap_or(f32::NAN));
        self.steps += 1;
        let applied = grad_norm <= self.recipe.optimizer.most();
        let loss_scale = self.loss_scale.map(|s| s.scale);
        if let Some(scale) = &mut self.loss_scale {
            scale.note(grad_norm.is_finite());
        }
        Ok(StepResult { loss, grad_norm, applied, targets, router: self.loads.stats(count), loss_scale })
    }

    /// Sum of the losses of a batch and the number of its targets that count.
    pub fn score(&mut self, batch: &PackedBatch) -> Result<(f64, usize), Error> {
        self.inputs.set(batch);
        self.inputs.scalar(LOSS_SCALE, 1.0);
        self.inputs.run(&mut self.score, 0..LOSS_SCALE + 1)?;
        Ok((f64::from(self.score.scalar("loss").unwrap_or(f32::NAN)), batch.valid()))
    }

    /// Memory of weights, gradients, moments and master weights, by buffer name.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Buffers of the weights, each with the checkpoint tensors in it.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// The recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Times every launch from here on.
    pub fn start_profile(&mut self) {
        [&mut self.grad, &mut self.update].into_iter().for_each(Session::start_profile);
    }

    /// What was timed since, of `grad` and of `update`.
    pub fn take_profile(&mut self) -> [Option<Profile>; 2] {
        [self.grad.take_profile(), self.update.take_profile()]
    }
}
