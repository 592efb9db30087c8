//! The short training run of a golden file: losses and gradient norms of a reference implementation, beside ours.

use crate::machine::Machine;
use crate::model::Model;
use astrai_ir::DType;
use astrai_runtime::{Dump, Recompute};
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe, StepResult};
use astrai_train::router::RouterLosses;
use astrai_train::update::{Optimizer, Rule};

/// Learning rate of the run.
const LR: f64 = 1e-2;

/// The optimiser of the run.
fn optimizer() -> Optimizer {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-4 };
    Optimizer { rule, weight_decay: 0.1, clip: Some(1.0) }
}

/// Trains a model on batches of token ids `[steps, batch, seq + 1]`; each predicts its next tokens.
pub fn train(
    model: &Model,
    ids: &[i64],
    [steps, batch, seq]: [usize; 3],
    storage: DType,
    machine: &Machine,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<StepResult>, String> {
    let vocab = model.config.vocab_size as i64;
    if let Some(bad) = ids.iter().find(|t| !(0..vocab).contains(*t)) {
        return Err(format!("token {bad} of `train.batches` is outside the vocabulary of {vocab}"));
    }
    let recipe = Recipe {
        tokens: (batch * (seq - 1)) as u64,
        sequences: batch as u64,
        span: seq as u64 - 1,
        storage,
        accumulate: false,
        recompute: Recompute::Selective,
        optimizer: optimizer(),
        router: RouterLosses::default(),
    };
    let plan = Plan::new(&model.config, &recipe, machine.backend(), Dump::None).map_err(|e| e.to_string())?;
    let mut engine =
        Engine::open(plan, model.source(), &machine.device, &mut |_, _| {}).map_err(|e| e.to_string())?;
    let mut done = Vec::with_capacity(steps);
    for (i, ids) in ids.chunks(batch * seq).enumerate() {
        done.push(engine.step(&[of(ids, seq)], LR).map_err(|e| e.to_string())?);
        progress(i as u64 + 1, steps as u64);
    }
    Ok(done)
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
