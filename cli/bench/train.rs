//! `astrai bench train`: one optimiser step on fresh random weights, as the peer's script measures it.

use super::{Bench, draw, floor, launch_costs};
use crate::allocations;
use crate::failure::Failure;
use crate::machine::Machine;
use crate::measure::{after_warm_up, rounded};
use crate::model::{Model, check_sizes, read_config};
use crate::peaks::Peaks;
use crate::run::profile_table;
use astrai_ir::DType;
use astrai_runtime::{Dump, Recompute};
use astrai_train::batch::Batch;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::update::{Optimizer, Rule};
use serde_json::{Value, json};
use std::io::Write;

/// The peer's optimiser.
pub(super) fn recipe(batch: u64, seq: u64, storage: DType) -> Recipe {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
    let optimizer = Optimizer { rule, weight_decay: 0.1, clip: Some(1.0) };
    let recompute = Recompute::Selective;
    Recipe {
        tokens: batch * seq,
        sequences: batch,
        span: seq,
        storage,
        accumulate: false,
        recompute,
        optimizer,
    }
}

impl Bench {
    pub(super) fn train(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let path =
            self.shape.as_ref().ok_or("--shape FILE is needed: the config.json of the model to measure")?;
        let (config, warnings) = read_config(path, false)?;
        crate::failure::warn(&warnings);
        let (batch, seq) = (self.batch.unwrap_or(1), self.seq.unwrap_or(super::SEQ));
        check_sizes(&config, batch, seq)?;
        let tokens = batch * seq;
        let plan =
            Plan::new(&config, &recipe(batch, seq, self.machine.storage()), &machine.target, Dump::None)?;
        let mut costs = launch_costs(&plan.grad)?;
        costs.extend(launch_costs(&plan.update)?);
        let vocab = config.vocab_size as u64;
        let token = |i: u64| (draw(i) % vocab) as i32;
        let batches = [Batch {
            input_ids: (0..tokens).map(token).collect(),
            positions: (0..tokens).map(|i| (i % seq) as i32).collect(),
            starts: (0..=batch).map(|s| (s * seq) as i32).collect(),
            targets: (0..tokens).map(|i| token(i + 1)).collect(),
        }];
        let model = Model::fresh(config, vec![], 0);
        let mut engine = Engine::open(plan, model.source(), &machine.runner(), &mut |_, _| {})?;
        let mut allocated = 0;
        let seconds = after_warm_up(self.repeat as usize, || {
            let before = allocations::count();
            let done = engine.step(&batches, 1e-4);
            allocated = allocations::count() - before;
            done
        })?;
        let mut line = self.line(machine, &seconds);
        line.insert("tokens_per_s".into(), json!(rounded(tokens as f64 / seconds.median, 2)));
        line.insert("allocations_per_step".into(), json!(allocated));
        if let Some(peaks) = Peaks::measure(&machine.pool) {
            let least = costs.iter().map(|(flops, bytes)| peaks.floor(*flops, *bytes)).sum();
            line.extend(floor(least, &seconds));
        }
        writeln!(out, "{}", Value::Object(line))?;
        if self.profile {
            engine.start_profile();
            engine.step(&batches, 1e-4)?;
            let [grad, update] = engine.take_profile();
            for (name, profile) in [("grad", grad), ("update", update)] {
                let rows = profile.unwrap_or_default().by_kernel();
                eprint!("\n{name}\n{}", profile_table(&rows));
            }
        }
        Ok(())
    }
}
