//! Keys and values of a model in pages. In: a configuration, sizes. Out: the memory that sessions of prefill and decode share.
//! Who owns which page is decided elsewhere.

use astrai_builders::{Cache, ModelConfig, Windows};
use astrai_ir::DType;
use astrai_runtime::{Buffers, Device, Error};
use std::sync::Arc;

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
        let need = KvCache::page_bytes(config, sizes.page, storage).saturating_mul(sizes.pages as u64);
        let have = device.available();
        if need > have {
            let what = format!("{} pages of keys and values", sizes.pages);
            return Err(Error::Memory {
                what,
                need,
                have,
                remedy: "take fewer pages, or --dtype bf16".into(),
            });
        }
        let mut buffers = Buffers::new(device);
        let states = (0..config.num_layers).flat_map(|layer| sizes.states(config, layer));
        buffers.add_all(states.map(|(name, shape)| (name, storage, shape.to_vec())))?;
        Ok(KvCache { buffers })
    }

    /// Bytes of a page of all layers: keys and values, or the latents they are made of.
    pub fn page_bytes(config: &ModelConfig, page: usize, storage: DType) -> u64 {
        let [whole, windowed] = KvCache::page_bytes_apart(config, page, storage);
        whole + windowed
    }

    /// Bytes of a page of layers that see all that came before, and of a page of windowed layers.
    pub fn page_bytes_apart(config: &ModelConfig, page: usize, storage: DType) -> [u64; 2] {
        let windows = Some(Windows { pages: 1, window: 1, every: false });
        let one = Cache { page, pages: 1, table: 1, windows };
        let states = || (0..config.num_layers).flat_map(|layer| one.states(config, layer));
        let bytes = |windowed: bool| {
            let these = states().filter(|(name, _)| name.starts_with(Cache::WINDOWED) == windowed);
            let elements = these.map(|(_, shape)| shape.into_iter().map(|n| n as u64).product::<u64>());
            elements.sum::<u64>() * storage.bytes() as u64
        };
        [bytes(false), bytes(true)]
    }

    /// The memory to open sessions over.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }
}
