//! `astrai bench train`: one optimiser step on fresh random weights, as the peer's script measures it; of all weights, or of an adapter.

use super::breakdown::breakdown;
use super::{Bench, Runs, beside, draw, largest, launch_costs};
use crate::allocations::counted;
use crate::failure::Failure;
use crate::measure::{Seconds, once, rounded};
use crate::run::profile_table;
use astrai_engine::machine::Machine;
use astrai_engine::model::Model;
use astrai_runtime::Dump;
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::lora::Fresh;
use astrai_train::settings::{Optimizer, Settings};
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;

/// What is trained, and how.
#[derive(Args, Clone, Debug, PartialEq)]
pub(super) struct TrainFlags {
    /// Train a low-rank adapter of this rank on all linear layers (train)
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    lora_rank: Option<u64>,
    /// Rule of the update (train) [default: adamw]
    #[arg(long, value_enum, value_name = "NAME")]
    optimizer: Option<Optimizer>,
}

impl TrainFlags {
    /// The first that is given.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [("--lora-rank", self.lora_rank.is_some()), ("--optimizer", self.optimizer.is_some())];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }
}

impl Bench {
    pub(super) fn train(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let (config, batch, seq) = self.shape(0)?;
        let storage = self.machine.storage();
        let tokens = batch * seq;
        // The defaults are the peer's optimiser.
        let settings = Settings {
            optimizer: self.trained.optimizer.unwrap_or(Optimizer::Adamw),
            lora_rank: self.trained.lora_rank.map(|rank| rank as usize),
            ..Settings::of_sizes(batch, seq)
        };
        let adapter = settings.lora().map(|lora| lora.adapter(&config)).transpose()?;
        let recipe = Recipe { storage, adapter: adapter.clone(), ..settings.recipe() };
        let plan = Plan::new(&config, &recipe, machine.backend(), Dump::None)?;
        let mut costs = launch_costs(&plan.grad)?;
        costs.extend(launch_costs(&plan.update)?);
        let parts = [&plan.grad, &plan.update].map(|p| self.predicted(p, &largest(p), 1.0));
        let [grad, update] = parts;
        let expected = grad?.zip(update?).map(|(grad, update)| grad + update);
        let vocab = config.vocab_size as u64;
        let token = |i: u64| (draw(i) % vocab) as i32;
        let ids: Vec<i32> = (0..=tokens).map(token).collect();
        let mut batches = [PackedBatch::default()];
        for first in (0..tokens as usize).step_by(seq as usize) {
            let next = first + seq as usize;
            batches[0].push(&ids[first..next], &ids[first + 1..=next]);
        }
        let model = Model::fresh(config, vec![], 0);
        let factors = adapter.map(|a| Fresh::new(&model.config, &a, model.source(), 0)).transpose()?;
        let source = factors.as_ref().map_or(model.source(), |f| f);
        let mut engine = Engine::open(plan, source, &machine.device, &mut |_, _| {})?;
        let (mut allocated, mut updates) = (0, Vec::new());
        let mut runs = Runs::new(machine);
        let seconds = runs.repeat(
            self.repeat,
            &mut engine,
            |_| vec![],
            |engine, counts| {
                let (done, count) = counted(|| engine.step(&batches, 1e-4));
                allocated = count;
                updates.extend(counts.then(|| engine.update_seconds()));
                done
            },
        )?;
        let mut line = self.line(machine, &seconds, runs.peak_rss_mb());
        line.insert("tokens_per_s".into(), json!(rounded(tokens as f64 / seconds.median, 2)));
        let update = Seconds::of(updates).median;
        line.insert("update_of_step".into(), json!(rounded(update / seconds.median, 4)));
        line.extend(beside(expected, &seconds));
        line.insert("allocations_per_step".into(), json!(allocated));
        line.extend(runs.floor(&[(&costs, 1.0)], storage));
        writeln!(out, "{}", Value::Object(line))?;
        if self.profile {
            engine.start_profile();
            let (_, seconds) = once(|| engine.step(&batches, 1e-4))?;
            let [grad, update] = engine.take_profile().map(|p| p.unwrap_or_default().by_kernel());
            eprint!("\ngrad\n{}\nupdate\n{}", profile_table(&grad), profile_table(&update));
            if let Some(peaks) = runs.last() {
                let programs = [(None, &grad[..]), (Some("update"), &update)];
                eprint!("\n{}", breakdown(&programs, peaks, storage, seconds));
            }
        }
        Ok(())
    }
}
