//! The programs of a model over paged keys and values. In: a configuration and sizes. Out: one program for prefill and decode,
//! or, where another form is cheaper for decode (absorbed weights), one for each; then sessions of them over the same memory.

use crate::machine::Machine;
use crate::model::{Model, plan_within};
use astrai_builders::config::Pooling;
use astrai_builders::{Cache, Logits, ModelConfig, Program};
use astrai_ir::DType;
use astrai_passes::Fidelity;
use astrai_runtime::{Buffers, Compiled as Planned, Error, Session};
use astrai_serve::scheduler::plan::{Embedding, ProgramKind};

/// Planned programs over the same pages.
pub struct Programs {
    first: (ProgramKind, Planned),
    /// Programs that share what they can of the first program's weights.
    beside: Vec<(ProgramKind, Planned)>,
}

impl Programs {
    /// Plans programs for so many `tokens` and `sequences` a step. At [`Fidelity::Exact`] there is one, so that a step over pages is
    /// the full forward whatever it computes, as there is where the same kernels suit both.
    pub fn plan(
        config: &ModelConfig,
        [tokens, sequences]: [u64; 2],
        cache: Cache,
        storage: DType,
        machine: &Machine,
        fidelity: Fidelity,
    ) -> Result<Programs, Error> {
        let plan = |tokens| {
            let program = Program::paged(tokens, sequences, cache).drawing(machine.backend().samples());
            plan_within(config, &program, storage, machine, fidelity)
        };
        let first = plan(tokens)?;
        if fidelity == Fidelity::Exact || tokens <= sequences || first.kernels.iter().all(Option::is_none) {
            return Ok(Programs { first: (ProgramKind::Mixed, first), beside: vec![] });
        }
        let decode = plan(sequences)?;
        if kernels(&first).eq(kernels(&decode)) {
            return Ok(Programs { first: (ProgramKind::Mixed, first), beside: vec![] });
        }
        Ok(Programs { first: (ProgramKind::Prefill, first), beside: vec![(ProgramKind::Decode, decode)] })
    }

    /// Adds a program for texts of which vectors are wanted, of the same sizes as the first.
    pub fn embed(
        &mut self,
        config: &ModelConfig,
        [tokens, sequences]: [u64; 2],
        cache: Cache,
        pooling: Pooling,
        (storage, machine, fidelity): (DType, &Machine, Fidelity),
    ) -> Result<(), Error> {
        let program =
            Program { logits: Logits::Embedding(pooling), ..Program::paged(tokens, sequences, cache) };
        let planned = plan_within(config, &program, storage, machine, fidelity)?;
        let embedding = Embedding { pooling, width: config.hidden_size, whole: false };
        self.beside.push((ProgramKind::Embed(embedding), planned));
        Ok(())
    }

    /// The program that computes tokens of prompts.
    pub fn prefill(&self) -> &Planned {
        &self.first.1
    }

    /// The program that computes tokens of outputs; [`prefill`](Self::prefill)'s where one program computes both.
    pub fn decode(&self) -> &Planned {
        self.beside.iter().find(|(kind, _)| kind.decodes()).map_or(&self.first.1, |(_, planned)| planned)
    }

    /// Which programs there are, in the order in which they run.
    pub fn kinds(&self) -> impl Iterator<Item = ProgramKind> {
        [&self.first].into_iter().chain(&self.beside).map(|(kind, _)| *kind)
    }

    /// Bytes of memory that all programs but the first take beside it: weights that they read otherwise, values between kernels.
    pub fn bytes_beside(&self) -> Result<u64, Error> {
        self.beside.iter().map(|(_, planned)| planned.bytes_beside(&self.first.1)).sum()
    }

    /// A session of each program over these pages, in the order in which they run.
    pub fn start(
        self,
        model: &Model,
        pages: &Buffers,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<(ProgramKind, Session)>, Error> {
        let (kind, planned) = self.first;
        let mut sessions = vec![(kind, model.start_over(planned, pages, progress)?)];
        for (kind, planned) in self.beside {
            let session = sessions[0].1.beside(planned.into(), model.source(), progress)?;
            sessions.push((kind, session));
        }
        Ok(sessions)
    }
}

/// Names of a run's kernels in order.
fn kernels(planned: &Planned) -> impl Iterator<Item = Option<&str>> {
    let launches = planned.plan.each_launch().into_iter();
    launches.map(|(_, region)| planned.kernels[region.0].as_ref().map(|k| k.identity.as_str()))
}
