//! Keys and values of a model in pages. In: a configuration, sizes. Out: the memory that sessions of prefill and decode share.
//! Who owns which page is decided elsewhere.

use astrai_builders::{Cache, ModelConfig, Windows};
use astrai_ir::{Code, DType};
use astrai_runtime::{Buffers, Device, Error};
use std::sync::Arc;

/// What pages hold, by name: codes, or numbers of this type.
pub fn stored(code: Option<Code>, storage: DType) -> &'static str {
    code.map_or(storage.name(), Code::name)
}

/// The pages of all layers.
#[derive(Clone)]
pub struct KvCache {
    buffers: Buffers,
}

impl KvCache {
    /// Zeroed pages, in the type that a program compiled for this storage has them in.
    pub fn new(
        config: &ModelConfig,
        sizes: Cache,
        storage: DType,
        device: &Arc<dyn Device>,
    ) -> Result<KvCache, Error> {
        let states = sizes.all_states(config, storage);
        let need = bytes(&states);
        let have = device.available();
        if need > have {
            let what =
                format!("{} pages of keys and values in {}", sizes.pages, stored(config.pages, storage));
            let remedy = match config.pages {
                Some(_) => "take fewer pages",
                None => "take fewer pages, or --kv-cache-dtype int8",
            };
            return Err(Error::Memory { what, need, have, remedy: remedy.into() });
        }
        let mut buffers = Buffers::new(device);
        buffers.add_all(states.into_iter().map(|(name, dtype, shape)| (name, dtype, shape.to_vec())))?;
        Ok(KvCache { buffers })
    }

    /// Bytes of all pages, each group's as many as it has.
    pub fn bytes(config: &ModelConfig, sizes: Cache, storage: DType) -> u64 {
        bytes(&sizes.all_states(config, storage))
    }

    /// Bytes of a page of all layers: keys and values, or the latents they are made of; of codes with their scales.
    pub fn page_bytes(config: &ModelConfig, page: usize, storage: DType) -> u64 {
        let [whole, windowed] = KvCache::page_bytes_apart(config, page, storage);
        whole + windowed
    }

    /// Bytes of a page of layers that see all that came before, and of a page of windowed layers.
    pub fn page_bytes_apart(config: &ModelConfig, page: usize, storage: DType) -> [u64; 2] {
        let windows = Some(Windows { pages: 1, window: 1, every: false });
        let one = Cache { page, pages: 1, table: 1, windows };
        let (windowed, whole): (Vec<_>, Vec<_>) = one
            .all_states(config, storage)
            .into_iter()
            .partition(|(name, ..)| name.starts_with(Cache::WINDOWED));
        [bytes(&whole), bytes(&windowed)]
    }

    /// The memory to open sessions over.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }
}

/// Bytes of these states.
fn bytes(states: &[(String, DType, [usize; 3])]) -> u64 {
    let each = states
        .iter()
        .map(|(_, dtype, shape)| shape.iter().fold(dtype.bytes() as u64, |n, d| n.saturating_mul(*d as u64)));
    each.fold(0, u64::saturating_add)
}
