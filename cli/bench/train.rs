//! `astrai bench train`: one optimiser step on fresh random weights, as the peer's script measures it.

use super::breakdown::breakdown;
use super::{Bench, beside, draw, floor, largest, launch_costs};
use crate::allocations;
use crate::failure::Failure;
use crate::measure::{after_warm_up, once, rounded};
use crate::run::profile_table;
use astrai_engine::machine::Machine;
use astrai_engine::model::Model;
use astrai_runtime::Dump;
use astrai_runtime::device::cpu::peaks::Peaks;
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::settings::Settings;
use serde_json::{Value, json};
use std::io::Write;

impl Bench {
    pub(super) fn train(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let (config, batch, seq) = self.shape(0)?;
        let storage = self.machine.storage();
        let tokens = batch * seq;
        // The defaults are the peer's optimiser.
        let recipe = Recipe { storage, ..Settings::of_sizes(batch, seq).recipe() };
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
        let mut engine = Engine::open(plan, model.source(), &machine.device, &mut |_, _| {})?;
        let mut allocated = 0;
        let seconds = after_warm_up(self.repeat as usize, || {
            let before = allocations::count();
            let done = engine.step(&batches, 1e-4);
            allocated = allocations::count() - before;
            done
        })?;
        let mut line = self.line(machine, &seconds);
        line.insert("tokens_per_s".into(), json!(rounded(tokens as f64 / seconds.median, 2)));
        line.extend(beside(expected, &seconds));
        line.insert("allocations_per_step".into(), json!(allocated));
        let peaks = Peaks::measure(&*machine.device, &[]);
        line.extend(floor(&peaks, &costs, 1.0, &seconds, storage));
        writeln!(out, "{}", Value::Object(line))?;
        if self.profile {
            engine.start_profile();
            let (_, seconds) = once(|| engine.step(&batches, 1e-4))?;
            let [grad, update] = engine.take_profile().map(|p| p.unwrap_or_default().by_kernel());
            eprint!("\ngrad\n{}\nupdate\n{}", profile_table(&grad), profile_table(&update));
            if let Some(peaks) = &peaks {
                let programs = [(None, &grad[..]), (Some("update"), &update)];
                eprint!("\n{}", breakdown(&programs, peaks, storage, seconds));
            }
        }
        Ok(())
    }
}
