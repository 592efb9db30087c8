//! What is run on how many ranks, and the programs of them. In: a configuration, sizes, a mesh. Out: for every stage of the pipeline
//! the programs that one of its ranks runs, from `shard` and `pipeline`, planned for the hardware on a device that runs nothing.

use crate::Refused;
use crate::lengths::Lengths;
use crate::server::{self, Run, Server};
use crate::work::arrivals;
use astrai_builders::config::MlpSpec;
use astrai_builders::{ModelConfig, Program, Ranks, build, placements};
use astrai_engine::model::{check_sizes, stored};
use astrai_ir::ops::Op;
use astrai_ir::plan::{Place, Step};
use astrai_ir::{Backend, DType, Graph, Mesh, Node, Placement};
use astrai_passes::{Fidelity, MeshSharding, Saturate};
use astrai_runtime::{Compiled, Dump, GRAD, Options, Recompute, compile};
use astrai_train::engine::{Plan, Recipe};
use astrai_train::settings::Settings;
use std::collections::BTreeSet;

/// What is estimated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// An optimiser step.
    Train,
    /// A prompt of each sequence.
    Prefill,
    /// A token of each sequence.
    Decode,
}

impl Purpose {
    /// As flags and files have it.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Train => "train",
            Purpose::Prefill => "prefill",
            Purpose::Decode => "decode",
        }
    }
}

/// What is run, on which ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Which program.
    pub purpose: Purpose,
    /// Sequences of a step on all ranks together.
    pub batch: u64,
    /// Tokens of a sequence; in decode those that are there, of the longest.
    pub seq: u64,
    /// How many of these each sequence has, in decode; none where all have as many.
    pub lengths: Option<Lengths>,
    /// Ranks along each axis.
    pub ranks: Ranks,
    /// Pieces in which a rank's sequences go through the stages one behind another.
    pub micro: u64,
    /// Groups of layers that a stage has, of an interleaved pipeline; 1: one after another.
    pub interleave: u64,
    /// What data-parallel ranks share of training's state (arXiv 1910.02054): 0 nothing, 1 the optimiser's, 2 gradients, 3 weights.
    pub zero: u8,
    /// Type of weights and activations.
    pub storage: DType,
    /// Activations that training computes again.
    pub recompute: Recompute,
    /// What a server's steps have beside one token of each sequence, or beside whole prompts.
    pub server: Server,
    /// How rows come to the ranks of experts.
    pub dispatch: Dispatch,
}

/// How rows come to the ranks of experts, and how unevenly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dispatch {
    /// Rows of the busiest rank beside an even share.
    pub imbalance: f64,
    /// The type in which rows are sent to experts, with a scale in f32 for 128 numbers; none: as they are computed. They come back as computed.
    pub dtype: Option<DType>,
    /// A token goes once to each node where it has experts and on from there, as DeepEP's kernels send it, and not once to each expert.
    pub by_nodes: bool,
}

impl Default for Dispatch {
    fn default() -> Dispatch {
        Dispatch { imbalance: 1.0, dtype: None, by_nodes: false }
    }
}

impl Schedule {
    /// On one rank.
    pub fn of_one(purpose: Purpose, batch: u64, seq: u64, storage: DType) -> Schedule {
        let ranks = Ranks { pp: 1, dp: 1, ep: 1, tp: 1 };
        let recompute = Recompute::default();
        Schedule {
            purpose,
            batch,
            seq,
            lengths: None,
            ranks,
            micro: 1,
            interleave: 1,
            zero: 0,
            storage,
            recompute,
            server: Server::default(),
            dispatch: Dispatch::default(),
        }
    }

    /// Of the keys that sequences would have were all as long as the longest, the part that there are; of a window the part of its keys.
    pub fn part(&self, window: Option<u64>) -> f64 {
        let Some(lengths) = &self.lengths else { return 1.0 };
        let most = window.unwrap_or(u64::MAX).min(self.seq);
        let batch = self.batch.min(Lengths::TELLING);
        let keys: u64 = lengths.of(batch).map(|n| n.min(most)).sum();
        keys as f64 / (batch * most) as f64
    }

    /// Ranks that hold the same dense weights, and the same experts, which ranks of `ep` have divided already.
    pub fn holders(&self) -> [u64; 2] {
        [self.ranks.dp * self.ranks.ep, self.ranks.dp].map(|n| n as u64)
    }

    /// Of so many bytes, dense ones and of experts, what a rank holds where ZeRO shares them from a stage on.
    pub fn shared(&self, from: u8, bytes: [u64; 2]) -> u64 {
        let ranks = if self.zero >= from { self.holders() } else { [1; 2] };
        bytes[0].div_ceil(ranks[0]) + bytes[1].div_ceil(ranks[1])
    }

    /// Whether gradients outlive the backward pass: of several pieces, or shared.
    pub fn accumulates(&self) -> bool {
        self.micro > 1 || self.zero > 1
    }

    /// Part of the weights' states that a rank updates.
    pub fn updates(&self, weights: [u64; 2]) -> f64 {
        self.shared(1, weights) as f64 / weights.iter().sum::<u64>().max(1) as f64
    }

    /// Groups of layers that a stage has computed forward before the first backward (1F1B; arXiv 2104.04473).
    pub fn ahead(&self, stage: usize) -> usize {
        let (p, v) = (self.ranks.pp, self.interleave as usize);
        let ahead = if v > 1 { 2 * (p - stage - 1) + (v - 1) * p } else { p - stage - 1 };
        ahead.min(self.micro as usize * v)
    }

    /// Tokens of a step: of decode those that it gives, of prefill those of prompts whether they are computed or found in the prefix cache.
    pub fn tokens(&self) -> f64 {
        match self.purpose {
            Purpose::Decode => self.batch as f64 * self.server.tokens(),
            _ => self.batch as f64 * self.seq as f64,
        }
    }

    /// Number of ranks.
    pub fn devices(&self) -> usize {
        self.ranks.pp * self.ranks.dp * self.ranks.ep * self.ranks.tp
    }

    /// Sequences of one rank in one piece.
    ///
    /// # Errors
    /// They do not divide; the line names the flag.
    pub fn rank_batch(&self) -> Result<u64, Refused> {
        let shares = (self.ranks.dp * self.ranks.ep) as u64;
        if !self.batch.is_multiple_of(shares) {
            return Err(format!("--batch {} does not divide by the {shares} ranks of dp and ep", self.batch));
        }
        let here = self.batch / shares;
        if here == 0 || !here.is_multiple_of(self.micro) {
            return Err(format!(
                "--micro-batches {}: the {here} sequences of a rank do not divide by it",
                self.micro
            ));
        }
        Ok(here / self.micro)
    }

    /// The mesh, or which key of the configuration does not go with it.
    ///
    /// # Errors
    /// One line.
    pub fn mesh(&self, config: &ModelConfig) -> Result<Mesh, Refused> {
        if self.zero > 0 && self.purpose != Purpose::Train {
            return Err(format!("--zero {}: only training has states to share; leave it out", self.zero));
        }
        if self.interleave > 1 && (self.purpose != Purpose::Train || self.ranks.pp == 1) {
            let n = self.interleave;
            return Err(format!(
                "--interleave {n}: only training over several stages (--pp) interleaves; leave it out"
            ));
        }
        if self.interleave > 1 {
            // As its paper has them (arXiv 2104.04473): as many layers in every group, and pieces as many at a time as there are stages.
            let (n, layers, stages) = (self.interleave, config.layers.len(), self.ranks.pp as u64);
            if !(layers as u64).is_multiple_of(n * stages) {
                let of = format!("num_hidden_layers {layers} do not divide by {n} groups of {stages} stages");
                return Err(format!("--interleave {n}: {of}"));
            }
            if !self.micro.is_multiple_of(stages) {
                let of = format!("--micro-batches {} is no multiple of the {stages} stages", self.micro);
                return Err(format!("--interleave {n}: {of}"));
            }
        }
        self.server.check(config, self)?;
        let (imbalance, ranks) = (self.dispatch.imbalance, self.ranks.ep.max(1));
        if !(1.0..=ranks as f64).contains(&imbalance) {
            let most = format!("{ranks}, all rows on one of the ranks of experts");
            return Err(format!("--expert-imbalance {imbalance}: from 1, an even share, to {most}"));
        }
        let sent = self.dispatch.by_nodes || self.dispatch.dtype.is_some();
        if sent && config.layers.iter().any(|l| matches!(l.mlp, MlpSpec::Stacked(_))) {
            // Biases and results are rows of their own there, as many as tokens have experts.
            return Err("--dispatch and --dispatch-dtype: these experts lie in one tensor, and not only rows of tokens are sent to them; leave them out".into());
        }
        if self.ranks.ep == 1 && self.dispatch != Dispatch::default() {
            return Err("--expert-imbalance, --dispatch and --dispatch-dtype: only ranks of experts (--ep) are sent rows; leave them out".into());
        }
        self.ranks.mesh(config)
    }
}

/// Bytes that one rank holds, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Weights, as kernels read them.
    pub weights: u64,
    /// Keys and values of all sequences.
    pub kv: u64,
    /// Values between kernels.
    pub activations: u64,
    /// Of values between kernels those of rows that may arrive from other ranks (all tokens of all ranks may choose a rank's experts), and
    /// kernels' workspaces.
    pub buffers: u64,
    /// Gradients.
    pub gradients: u64,
    /// Moments and master weights.
    pub optimizer: u64,
    /// What the process takes beside, where its hardware says so.
    pub process: u64,
    /// Keys and values that one token leaves on this rank.
    pub kv_per_token: u64,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> u64 {
        let parts = [
            self.weights,
            self.kv,
            self.activations,
            self.buffers,
            self.gradients,
            self.optimizer,
            self.process,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// The programs of a rank of one stage, in the order in which they run.
pub struct Stage {
    /// Its programs.
    pub runs: Vec<Run>,
    /// What the rank holds.
    pub memory: Memory,
    /// Bytes of its weights before ranks share them: dense ones, and of experts.
    pub weights: [u64; 2],
}

/// The programs of every stage.
///
/// # Errors
/// Sizes that do not divide, or a model that cannot be planned; one line that names the key or flag.
pub fn stages(config: &ModelConfig, s: &Schedule, backend: &dyn Backend) -> Result<Vec<Stage>, Refused> {
    check_sizes(config, s.batch.div_ceil((s.ranks.dp * s.ranks.ep).max(1) as u64), s.seq)?;
    let (mesh, batch) = (s.mesh(config)?, s.rank_batch()?);
    (0..s.ranks.pp).map(|stage| self::stage(config, s, backend, (&mesh, stage), batch)).collect()
}

/// The programs of one stage, for so many sequences of a rank.
///
/// # Errors
/// As [`stages`].
pub fn stage(
    config: &ModelConfig,
    s: &Schedule,
    backend: &dyn Backend,
    (mesh, stage): (&Mesh, usize),
    batch: u64,
) -> Result<Stage, Refused> {
    match s.purpose {
        Purpose::Train => train(config, s, backend, (mesh, stage), batch),
        _ => server::stage(config, s, backend, (mesh, stage), batch),
    }
}

/// A program without gradients, of one stage.
///
/// # Errors
/// As [`stages`].
pub fn forward(
    config: &ModelConfig,
    storage: DType,
    backend: &dyn Backend,
    (mesh, stage): (&Mesh, usize),
    program: &Program,
    fidelity: Fidelity,
) -> Result<Compiled, Refused> {
    let graph = build(config, program).map_err(|e| e.to_string())?;
    let leaves = placements(config, mesh, &graph);
    let options = Options {
        storage,
        saturate: Saturate { fidelity, ..Saturate::default() },
        narrow: stored(config, backend),
        shards: MeshSharding { mesh: mesh.clone(), leaves, stage, trained: false },
        ..Options::default()
    };
    compile(&graph, backend, &options).map_err(|e| e.to_string())
}

/// Bytes of the states of keys and values of these names.
pub fn states(graph: &Graph, these: &dyn Fn(&str) -> bool) -> u64 {
    let kept = graph.nodes().iter().filter(|n| matches!(&n.op, Op::State(s) if these(&s.name)));
    kept.filter_map(|n| n.ty().bytes().size()).map(|b| b as u64).sum()
}

fn train(
    config: &ModelConfig,
    s: &Schedule,
    backend: &dyn Backend,
    (mesh, stage): (&Mesh, usize),
    batch: u64,
) -> Result<Stage, Refused> {
    let recipe = Recipe {
        storage: s.storage,
        recompute: s.recompute,
        accumulate: s.accumulates(),
        ..Settings::of_sizes(batch, s.seq).recipe()
    };
    let plan =
        Plan::on_ranks(config, &recipe, backend, Dump::None, (mesh, stage)).map_err(|e| e.to_string())?;
    let apart = experts(&plan.grad.graph);
    let is_expert = |name: &str| apart.iter().any(|w| name.ends_with(w));
    // The plans hold all states on every rank; sharing them is by the formula of the paper.
    let mut sums = [[0; 2]; 3];
    let weights = plan.weights.iter().map(|w| (0, &w.name, w.ty.bytes().size().unwrap_or(0)));
    let states = plan.states();
    let states = states.iter().map(|(name, d, shape)| {
        (if name.starts_with(GRAD) { 1 } else { 2 }, name, shape.iter().product::<usize>() * d.bytes())
    });
    for (kind, name, bytes) in weights.chain(states) {
        sums[kind][usize::from(is_expert(name))] += bytes as u64;
    }
    let [weights, gradients, optimizer] = sums;
    let arena = |p: &Compiled| p.arena_bytes().map_err(|e| e.to_string());
    // Of the pieces in flight a stage keeps what it saved of each, interleaved of each group of layers.
    let flight = (s.ahead(stage) as u64 + 1).min(s.micro * s.interleave);
    let kept: u64 = saved(&plan.grad.plan, config.layers.len()).iter().sum();
    let activations = arena(&plan.grad)?
        .saturating_add((kept * flight / s.interleave).saturating_sub(kept))
        .max(arena(&plan.update)?);
    let buffers = arrivals(&plan.grad).max(arrivals(&plan.update)).min(activations);
    let memory = Memory {
        weights: s.shared(3, weights),
        activations: activations - buffers,
        buffers,
        gradients: s.shared(2, gradients),
        optimizer: s.shared(1, optimizer),
        ..Memory::default()
    };
    let runs = vec![Run::whole("gradient", plan.grad), Run::whole("update", plan.update)];
    Ok(Stage { runs, memory, weights })
}

/// Names of the weights of which each rank of experts has its own.
pub fn experts(graph: &Graph) -> BTreeSet<String> {
    let own = |n: &&Node| n.sharding.iter().any(|(axis, p)| axis == "ep" && matches!(p, Placement::Shard(_)));
    let weights = graph.nodes().iter().filter(|n| matches!(n.op, Op::Weight(_)));
    weights.filter(own).filter_map(|n| n.op.leaf_name().map(str::to_string)).collect()
}

/// Bytes of what calls of each layer leave for the backward pass.
pub fn saved(plan: &astrai_ir::Plan, layers: usize) -> Vec<u64> {
    let mut bytes = vec![0; layers];
    for step in &plan.main.steps {
        let Step::Call { body, results, origin, .. } = step else { continue };
        if plan.bodies[*body].name.ends_with(".grad") {
            continue;
        }
        let number = origin.split('.').find_map(|part| part.parse::<usize>().ok()).filter(|n| *n < layers);
        let kept =
            results.iter().map(|b| &plan.main.buffers[b.0]).filter(|b| matches!(b.place, Place::Arena(_)));
        let kept = kept.map(|b| plan.bound(&b.ty.bytes()).unwrap_or(0)).sum::<u64>();
        if let Some(layer) = number {
            bytes[layer] += kept;
        }
    }
    bytes
}
