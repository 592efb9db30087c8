//! The programs of a model under training. In: a configuration, a recipe, a backend, perhaps one of a mesh's ranks. Out: the programs of
//! gradient, update and loss, planned; the buffers that they share, and the bytes of all.

use super::Recipe;
use crate::strategies::{self, Sizes};
use crate::update::{self, Rule, Stages, matches};
use astrai_builders::{Logits, Loss, ModelConfig, Program as Built, placements};
use astrai_ir::ops::{Op, Weight};
use astrai_ir::shard::{STAGES, Shard};
use astrai_ir::{Backend, DType, Dim, Graph, Mesh, Node, Placement, Sharding, Target, Type, inline_calls};
use astrai_runtime::{
    Compiled, Destination, Device, Dump, Error, GRAD, Gradients, MeshSharding, Noise, Options, ROUNDED, Wide,
    compile, factor_placements,
};
use std::collections::{BTreeSet, HashMap};

/// The programs of a model under training, planned.
pub struct Plan {
    /// Forward and backward.
    pub grad: Compiled,
    /// The sum of accumulated gradients over ranks, norm, clip and optimiser.
    pub update: Compiled,
    /// The loss of a batch.
    pub score: Compiled,
    /// Buffers of the weights, fixed ones included, in the type in which kernels read them.
    pub weights: Vec<Weight>,
    pub(super) recipe: Recipe,
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
        let sharded = mesh.axes.iter().any(|a| a.size > 1 && a.name != "dp");
        if sharded && recipe.optimizer.stochastic.is_some() {
            return Err(Error::Input(
                "weights in parts are not rounded at random; use --rounding nearest".into(),
            ));
        }
        let [graph, alone] = graphs(config, recipe)?;
        let to = if recipe.accumulate { Destination::Accumulators } else { Destination::States };
        let mut leaves = placements(config, mesh, &graph);
        if let Some(adapter) = &recipe.adapter {
            leaves.extend(factor_placements(&graph, adapter, &leaves)?);
        }
        let shards = MeshSharding { mesh: mesh.clone(), leaves, stage, trained: false };
        let (storage, adapter) = (recipe.storage, recipe.adapter.clone());
        let (frozen, wide) = (frozen(config, recipe)?, wide(config, recipe)?);
        let score = Options { storage, wide, adapter, frozen, trained: true, shards, ..Options::default() };
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
            // A partial sum would be reduced where it leaves a block: the norm's once a tensor instead of once, a gradient's before each call.
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

    /// The programs, which run one after another and share the memory between kernels.
    pub(super) fn programs(&self) -> [&Compiled; 3] {
        [&self.grad, &self.update, &self.score]
    }

    /// Bytes that training holds: (weights, gradients and optimiser, activations and scratch).
    pub fn memory(&self) -> Result<[u64; 3], Error> {
        let bytes = |dtype: DType, shape: &[usize]| (shape.iter().product::<usize>() * dtype.bytes()) as u64;
        let weights = self.weights.iter().map(|w| bytes(w.ty.dtype, &shape(w))).sum();
        let states = self.states().iter().map(|(_, d, s)| bytes(*d, s)).sum();
        Ok([weights, states, Compiled::arena_bytes_of(&self.programs())?])
    }

    /// Bytes of what a checkpoint holds of weights and the optimiser's state.
    pub fn checkpoint_bytes(&self) -> u64 {
        let bytes = |dtype: DType, shape: &[usize]| (shape.iter().product::<usize>() * dtype.bytes()) as u64;
        let weights: u64 = match self.recipe.adapter {
            Some(_) => 4 * self.trained_parameters(),
            None => self.weights.iter().map(|w| bytes(w.ty.dtype, &shape(w))).sum(),
        };
        let kept = self.states().into_iter().filter(|(name, ..)| !name.starts_with(GRAD));
        weights + kept.map(|(_, dtype, shape)| bytes(dtype, &shape)).sum::<u64>()
    }

    /// Bytes of the copy from which a checkpoint is written while the run goes on; 0 where it waits.
    pub fn copy_bytes(&self) -> u64 {
        if self.recipe.async_save { self.checkpoint_bytes() } else { 0 }
    }

    /// Least seconds of a step of so many micro-batches at a target's peaks, kernel by kernel.
    ///
    /// # Errors
    /// A size overflows.
    pub fn least_seconds(&self, target: &Target, micro_batches: usize) -> Result<f64, Error> {
        let of = |p: &Compiled| -> Result<f64, Error> {
            let mut seconds = 0.0;
            for (_, r) in p.plan.each_launch() {
                let region = &p.plan.regions[r];
                let [flops, bytes] = [p.plan.bound(region.flops())?, p.plan.bound(region.bytes())?];
                seconds += target.seconds(flops as f64, bytes as f64, self.recipe.storage) + target.launch;
            }
            Ok(seconds)
        };
        Ok(of(&self.grad)? * micro_batches as f64 + of(&self.update)?)
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

/// The checkpoint tensors of a model whose names match a pattern.
fn named(config: &ModelConfig, pattern: &str) -> Vec<String> {
    let all = config.tensors();
    all.iter().filter(|t| matches(pattern, &t.name)).map(|t| t.name.clone()).collect()
}

/// The checkpoint tensors that a recipe freezes.
fn frozen(config: &ModelConfig, recipe: &Recipe) -> Result<Option<BTreeSet<String>>, Error> {
    if recipe.frozen.is_empty() {
        return Ok(None);
    }
    let mut names = BTreeSet::new();
    for pattern in &recipe.frozen {
        let hits = named(config, pattern);
        if hits.is_empty() {
            return Err(Error::Input(format!("freeze: `{pattern}` names no weight of this model")));
        }
        names.extend(hits);
    }
    if names.len() == config.tensors().len() {
        return Err(Error::Input("freeze: nothing is left to train".into()));
    }
    Ok(Some(names))
}

/// What stays f32 of a recipe's programs.
///
/// # Errors
/// A name is no operator that is rounded, and matches no weight of the model.
pub(crate) fn wide(config: &ModelConfig, recipe: &Recipe) -> Result<Wide, Error> {
    let mut wide = Wide::default();
    for name in &recipe.wide {
        if ROUNDED.contains(&name.as_str()) {
            wide.operators.insert(name.clone());
            continue;
        }
        let hits = named(config, name);
        if hits.is_empty() {
            let known = ROUNDED.join(", ");
            return Err(Error::Input(format!(
                "precision: `{name}` is no operator that is rounded ({known}) and names no weight of this model"
            )));
        }
        wide.weights.extend(hits);
    }
    Ok(wide)
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
    let prefixes: Vec<&str> = [""].into_iter().chain(recipe.kept()).collect();
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
        // An accumulated gradient is a partial sum over ranks that have batches of their own.
        let sums = shardings.remove(&format!("{GRAD}{}", w.name)).unwrap_or_default();
        let gradient = placed.iter().map(|(axis, p)| {
            let partial = sums.iter().any(|(a, p)| a == axis && *p == Placement::Partial);
            (axis.clone(), if partial { Placement::Partial } else { p.clone() })
        });
        leaves.insert(format!("{GRAD}{}", w.name), gradient.collect());
        let kept = prefixes.iter().filter(|p| recipe.optimizer.keeps(p, w));
        kept.for_each(|p| _ = leaves.insert(format!("{p}{}", w.name), placed.clone()));
    }
    Ok((all, leaves))
}

pub(super) fn shape(w: &Weight) -> Vec<usize> {
    sizes(&w.ty)
}

fn sizes(ty: &Type) -> Vec<usize> {
    ty.shape.iter().filter_map(|d| d.size()).collect()
}
