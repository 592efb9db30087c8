//! The programs of a model over paged keys and values. In: a configuration and sizes. Out: the program that computes steps, and,
//! where another form is cheaper for one token of each sequence, the one for tokens of answers; then sessions of both over the
//! same memory.

use crate::machine::Machine;
use crate::model::{Model, plan_within};
use astrai_builders::{Cache, ModelConfig, Program};
use astrai_ir::DType;
use astrai_passes::Fidelity;
use astrai_runtime::{Buffers, Compiled as Planned, Error, Session};

/// One program, or two over the same pages.
pub struct Programs {
    /// For tokens of prompts; without another, for all.
    pub first: Planned,
    /// For tokens of answers, as many as there may be sequences.
    pub answers: Option<Planned>,
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
            let program = Program::paged(tokens, sequences, cache);
            plan_within(config, &program, storage, machine, fidelity)
        };
        let first = plan(tokens)?;
        if fidelity == Fidelity::Exact || tokens <= sequences || first.kernels.iter().all(Option::is_none) {
            return Ok(Programs { first, answers: None });
        }
        let answers = plan(sequences)?;
        let same = kernels(&first).eq(kernels(&answers));
        Ok(Programs { first, answers: (!same).then_some(answers) })
    }

    /// Bytes of memory that the second program takes beside the first: weights that it reads otherwise, values between kernels.
    pub fn bytes_beside(&self) -> Result<u64, Error> {
        self.answers.as_ref().map_or(Ok(0), |p| p.bytes_beside(&self.first))
    }

    /// The first program's session over these pages, and the second's beside it.
    pub fn start(
        self,
        model: &Model,
        pages: &Buffers,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Session, Option<Session>), Error> {
        let session = model.start_over(self.first, pages, progress)?;
        let beside = match self.answers {
            Some(planned) => Some(session.beside(planned.into(), model.source(), progress)?),
            None => None,
        };
        Ok((session, beside))
    }
}

/// Names of a run's kernels in order.
fn kernels(planned: &Planned) -> impl Iterator<Item = Option<&str>> {
    let launches = planned.plan.each_launch().into_iter();
    launches.map(|(_, region)| planned.kernels[region.0].as_ref().map(|k| k.identity.as_str()))
}
