//! The short training run of a golden file: losses and gradient norms of a reference implementation, beside ours.

use crate::machine::Machine;
use crate::model::Model;
use astrai_ir::DType;
use astrai_runtime::{Adapter, Dump, Recompute, WeightSource};
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe, StepResult};
use astrai_train::lora::Beside;
use astrai_train::router::RouterLosses;
use astrai_train::update::{Optimizer, Rule};

/// What is trained on, and how.
pub struct Course<'a> {
    /// Token ids `[steps, batch, seq]`.
    pub ids: &'a [i64],
    /// Steps, sequences of a step, tokens of a sequence.
    pub sizes: [usize; 3],
    /// The optimiser.
    pub optimizer: Optimizer,
    /// Its learning rate, the same at every step.
    pub lr: f64,
    /// Type of weights and activations.
    pub storage: DType,
    /// An adapter that is trained in the place of the model, and its factors.
    pub adapter: Option<(&'a Adapter, &'a dyn WeightSource)>,
}

impl<'a> Course<'a> {
    /// The run of a golden file.
    pub fn golden(ids: &'a [i64], sizes: [usize; 3], storage: DType) -> Course<'a> {
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-4 };
        Course {
            ids,
            sizes,
            optimizer: Optimizer::new(rule, 0.1, Some(1.0)),
            lr: 1e-2,
            storage,
            adapter: None,
        }
    }
}

/// Trains a model on batches, each sequence of which predicts its next tokens; answers what the steps did, and the engine after them.
pub fn train(
    model: &Model,
    course: Course,
    machine: &Machine,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Vec<StepResult>, Engine), String> {
    let ([steps, batch, seq], vocab) = (course.sizes, model.config.vocab_size as i64);
    if let Some(bad) = course.ids.iter().find(|t| !(0..vocab).contains(*t)) {
        return Err(format!("token {bad} of `train.batches` is outside the vocabulary of {vocab}"));
    }
    let recipe = Recipe {
        tokens: (batch * (seq - 1)) as u64,
        sequences: batch as u64,
        span: seq as u64 - 1,
        storage: course.storage,
        wide: vec![],
        accumulate: false,
        recompute: Recompute::Selective,
        optimizer: course.optimizer,
        router: RouterLosses::default(),
        adapter: course.adapter.map(|(adapter, _)| adapter.clone()),
        frozen: vec![],
        async_save: false,
        neftune: None,
        objective: None,
    };
    let plan = Plan::new(&model.config, &recipe, machine.backend(), Dump::None).map_err(|e| e.to_string())?;
    let beside = course.adapter.map(|(_, factors)| Beside { base: model.source(), factors });
    let source: &dyn WeightSource = beside.as_ref().map_or(model.source(), |b| b);
    let mut engine =
        Engine::open(plan, source, &machine.device, &mut |_, _| {}).map_err(|e| e.to_string())?;
    let mut done = Vec::with_capacity(steps);
    for (i, ids) in course.ids.chunks(batch * seq).enumerate() {
        done.push(engine.step(&[of(ids, seq)], course.lr).map_err(|e| e.to_string())?);
        progress(i as u64 + 1, steps as u64);
    }
    Ok((done, engine))
}

/// A batch of equally long sequences.
fn of(ids: &[i64], seq: usize) -> PackedBatch {
    let mut batch = PackedBatch::default();
    for row in ids.chunks(seq) {
        let row: Vec<i32> = row.iter().map(|t| *t as i32).collect();
        batch.push(&row[..seq - 1], &row[1..]);
    }
    batch
}
