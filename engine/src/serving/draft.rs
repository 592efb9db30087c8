//! What proposes tokens beside a served model: a draft model, or the model's own module of multi-token prediction. In: the draft's folder,
//! or nothing. Out: an engine whose tokens it proposes, where both have the same tokens.

use super::{Published, Room, steps_drafted, with_remedy};
use crate::machine::Machine;
use crate::model::{Model, plan_within, served_fidelity};
use crate::programs::Programs;
use crate::{Error, Hear};
use astrai_builders::config::Hidden;
use astrai_builders::{Cache, ModelConfig, Program};
use astrai_passes::Fidelity;
use astrai_runtime::{Session, WeightSource};
use astrai_serve::cache::KvCache;
use astrai_serve::engine::{DraftModel, Engine, Settings};
use astrai_serve::paged::PagedModel;
use astrai_serve::scheduler::plan::ProgramKind;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

/// Speculation: how tokens are proposed that the model then verifies, several in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculation {
    /// Those that followed the last few tokens before, at most so many.
    NGram(usize),
    /// Those that a draft model says, at most so many.
    Draft(usize),
    /// Those that the model's module of multi-token prediction says, at most so many.
    Module(usize),
}

impl Speculation {
    /// Proposed tokens of a step, at most.
    pub fn proposed(self) -> usize {
        let (Speculation::NGram(most) | Speculation::Draft(most) | Speculation::Module(most)) = self;
        most
    }
}

impl FromStr for Speculation {
    type Err = String;

    /// `ngram`, `mtp`, or either with `:N`.
    fn from_str(text: &str) -> Result<Speculation, String> {
        let (how, most) = text.split_once(':').map_or((text, None), |(how, n)| (how, Some(n)));
        let of = |usual| match most {
            Some(n) => n.parse().ok().filter(|n| (1..=16).contains(n)),
            None => Some(usual),
        };
        let found = match how {
            "ngram" => of(4).map(Speculation::NGram),
            "mtp" => of(3).map(Speculation::Module),
            _ => None,
        };
        found.ok_or_else(|| "give ngram or mtp, or either with :N for 1 to 16 tokens".into())
    }
}

impl Published {
    /// The same with the draft model of a folder, where one is given; its vocabulary must be the same.
    pub fn start_drafted(
        &self,
        draft: Option<&Path>,
        room: &Room,
        machine: &Machine,
        hear: Hear,
    ) -> Result<Engine, Error> {
        let draft = draft.map(|folder| self.draft(folder, hear)).transpose()?;
        let (model, draft) = steps_drafted(&self.model, draft.as_ref(), room, machine, hear)?;
        let settings = Settings { eos: self.eos(), ..room.settings() };
        let draft = draft.map(|draft| Box::new(draft) as DraftModel);
        Ok(Engine::start_drafted(model, draft, &settings).map_err(|e| e.to_string())?)
    }

    /// A draft model for this one.
    fn draft(&self, folder: &Path, hear: Hear) -> Result<Model, Error> {
        let draft = Published::read(folder, hear)?;
        let [own, other] = [self, &draft].map(|p| p.model.config.vocab_size);
        let same = |id: &u32| self.tokenizer.token(*id) == draft.tokenizer.token(*id);
        if own != other || !(0..own as u32).all(|id| same(&id)) {
            let line = format!("{other} tokens, not the model's {own} of the same texts");
            return Err(format!("--draft {}: its vocabulary is another: {line}", folder.display()).into());
        }
        Ok(draft.model)
    }
}

/// A draft model over pages of the same numbers.
pub(super) fn draft_steps(
    draft: &Model,
    cache: Cache,
    tokens: usize,
    room: &Room,
    machine: &Machine,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PagedModel, Error> {
    let (config, positions) = (&draft.config, draft.config.max_positions);
    let table = cache.table.min(positions.div_ceil(Cache::PAGE));
    let cache = Cache { table, windows: None, ..cache };
    let sizes = [tokens as u64, room.sequences as u64];
    let programs = Programs::plan(config, sizes, cache, room.storage, machine, Fidelity::Exact)?;
    programs.prefill().check_memory(&*machine.device).map_err(with_remedy)?;
    let kv = KvCache::new(config, cache, room.storage, &machine.device)?;
    let sessions = programs.start(draft, kv.buffers(), progress)?;
    Ok(PagedModel::new(sessions, cache, [config.vocab_size, positions, tokens, room.sequences]))
}

/// The module of a model, which is to keep hidden states for it.
pub(super) fn module(config: &mut ModelConfig) -> Result<ModelConfig, Error> {
    let none = "--speculate mtp: the model has no module of multi-token prediction (num_nextn_predict_layers in its config.json, and the \
                weights of the layer behind its last); leave it out";
    let module = config.module().ok_or(none)?;
    config.hidden = Some(Hidden::Kept);
    Ok(module)
}

/// A module beside a session of its model, over the same pages, with the model's embedding and head.
pub(super) fn module_steps(
    module: &ModelConfig,
    (beside, source): (&Session, &dyn WeightSource),
    (cache, context, tokens): (Cache, usize, usize),
    room: &Room,
    machine: &Machine,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PagedModel, Error> {
    let program = Program::paged(tokens as u64, room.rows() as u64, cache);
    let program = program.drawing(machine.backend().samples());
    let planned = plan_within(module, &program, room.storage, machine, served_fidelity(module))?;
    let session = beside.beside(Arc::new(planned), source, progress)?;
    let sizes = [module.vocab_size, context, tokens, room.rows()];
    Ok(PagedModel::new(vec![(ProgramKind::Mixed, session)], cache, sizes))
}
