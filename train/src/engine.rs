//! A model under training. In: a configuration, a recipe, weights. Out: optimiser steps on batches. Three compiled programs over
//! one set of buffers: `grad` (forward and backward, gradients into states), `update` (norm, clip, optimiser), `score`
//! (the loss alone). A step on batches of the same shape as the last one's allocates nothing.

mod inputs;
mod objective;
mod plan;

use crate::batch::PackedBatch;
use crate::router::{ExpertLoads, RouterLosses, RouterStats};
use crate::scaler::LossScale;
use crate::strategies::Strategy;
use crate::update::{EMA, MASTER, MOMENT_SUMS, Optimizer, signal_to_noise};
use astrai_ir::DType;
use astrai_ir::ops::Weight;
use astrai_runtime::{Adapter, Buffers, Compiled, Device, Error, Profile, Recompute, Session, WeightSource};
use inputs::{Inputs, LOSS_SCALE, LR, UPDATE_END};
use objective::Metrics;
use plan::shape;
use std::sync::Arc;
use std::time::Instant;

pub use plan::Plan;
pub(crate) use plan::wide;

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
    /// What stays f32 where that is narrower: operators, and patterns of the names of checkpoint tensors.
    pub wide: Vec<String>,
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

/// What an optimiser step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepResult {
    /// Mean loss over the targets that count, or the objective's, before the step.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub grad_norm: f64,
    /// False when a gradient was infinite, not a number, or larger than the optimiser allows, so that the step changed nothing.
    pub applied: bool,
    /// Signal over noise in the gradient, in decibels, where it is measured.
    pub grad_snr: Option<f64>,
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
    /// Seconds of the last step's update.
    updated_in: f64,
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
        buffers.make_room(&plan.programs())?;
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
            updated_in: 0.0,
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
            // There is nothing to learn, and the mean over nothing is no loss.
            self.steps += 1;
            return Ok(StepResult {
                loss: f64::NAN,
                loss_scale: self.loss_scale.map(|s| s.scale),
                ..StepResult::default()
            });
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
        let begun = Instant::now();
        if let Some(seed) = self.recipe.optimizer.stochastic {
            let trained = self.weights.iter().filter(|w| !w.frozen).count();
            self.inputs.rounding(seed, self.steps, trained);
        }
        self.inputs.run(&mut self.update, LR..UPDATE_END)?;
        self.updated_in = begun.elapsed().as_secs_f64();
        let grad_norm = f64::from(self.update.scalar("grad_norm").unwrap_or(f32::NAN));
        let sum = |name| self.update.scalar(name).map_or(f64::NAN, f64::from);
        let signal = self.recipe.optimizer.signal;
        let grad_snr = signal.then(|| signal_to_noise(MOMENT_SUMS.map(sum))).flatten();
        self.steps += 1;
        let applied = grad_norm <= self.recipe.optimizer.most();
        let loss_scale = self.loss_scale.map(|s| s.scale);
        if let Some(scale) = &mut self.loss_scale {
            scale.note(grad_norm.is_finite());
        }
        Ok(StepResult {
            loss,
            grad_norm,
            applied,
            grad_snr,
            targets,
            router: self.loads.stats(count),
            loss_scale,
        })
    }

    /// Sum of the losses of a batch and the number of its targets that count.
    pub fn score(&mut self, batch: &PackedBatch) -> Result<(f64, usize), Error> {
        self.inputs.set(batch);
        self.inputs.scalar(LOSS_SCALE, 1.0);
        self.inputs.run(&mut self.score, 0..LOSS_SCALE + 1)?;
        Ok((f64::from(self.score.scalar("loss").unwrap_or(f32::NAN)), batch.valid()))
    }

    /// Seconds that the last step's update took: norm, clip, the optimiser's rule.
    pub fn update_seconds(&self) -> f64 {
        self.updated_in
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
