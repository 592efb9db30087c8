//! `astrai compile --for train`. In: a config.json. Out: the two programs of a training step, gradient and update, with what
//! they cost together and what training holds in memory.

use super::{Compile, Made};
use crate::failure::Failure;
use crate::measure;
use crate::summary::{fields, passes, sum_costs};
use astrai_engine::machine::Machine;
use astrai_runtime::{Compiled, Dump};
use astrai_train::engine::{Plan, Recipe};
use astrai_train::settings::Settings;
use serde_json::json;

impl Compile {
    /// Plans a training step as `astrai train` makes it where no flag says otherwise.
    pub(super) fn train(&self, machine: &Machine, dumps: bool) -> Result<Made, Failure> {
        let config = self.config()?;
        let (all, seq) = self.sizes(&config)?;
        let (mesh, batch) = self.mesh(&config, all)?;
        let recipe = Recipe { storage: self.machine.storage(), ..Settings::of_sizes(batch, seq).recipe() };
        let dump = if dumps { Dump::All } else { Dump::None };
        let of_rank =
            || Plan::on_ranks(&config, &recipe, machine.backend(), dump.clone(), (&mesh, self.stage));
        let (plan, seconds) = measure::once(of_rank)?;
        let [weights, states, arenas] = plan.memory()?;
        let update = match dumps {
            // The plan keeps no graphs of this one.
            true => plan.update_dumped(machine.backend(), dump)?,
            false => plan.update,
        };
        let programs = vec![("", plan.grad), ("update/", update)];
        let mut report = fields(json!({"parameters": config.parameter_count()}));
        report.extend(sum_costs(&programs)?);
        report.extend(fields(json!({
            "weight_bytes": weights, "state_bytes": states,
            "planned_bytes": weights.saturating_add(states).saturating_add(arenas), "compile_seconds": seconds,
            "passes": passes(&programs), "model_type": config.model_type, "for": "train", "batch": batch,
            "seq": seq, "dtype": self.machine.storage().name(),
        })));
        if self.mesh.is_some() {
            let all: Vec<&Compiled> = programs.iter().map(|(_, p)| p).collect();
            super::mesh::report(&mut report, &all, &mesh, self.stage)?;
        }
        Ok(Made { programs, report, explained: String::new() })
    }
}
