//! A draft model beside a served one. In: its folder. Out: an engine whose tokens it proposes, where both have the same tokens.

use super::{Published, Room, steps_drafted, with_remedy};
use crate::machine::Machine;
use crate::model::Model;
use crate::programs::Programs;
use crate::{Error, Hear};
use astrai_builders::Cache;
use astrai_passes::Fidelity;
use astrai_serve::cache::KvCache;
use astrai_serve::engine::{DraftModel, Engine, Settings};
use astrai_serve::paged::PagedModel;
use std::path::Path;

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
