//! Adapters that a server's requests choose among. In: folders in PEFT's layout, hostile. Out: the memory of their slots, and what is written
//! into one when an adapter is loaded.

use crate::model::stored;
use astrai_builders::config::Slots;
use astrai_builders::{Cache, ModelConfig, Program, build};
use astrai_ir::{Backend, DType};
use astrai_passes::{Joined, Stack, stackable};
use astrai_runtime::Factors;
use astrai_serve::engine::{Factor, Patch};
use astrai_train::lora::Folder;
use std::path::Path;

/// Reads adapters for the slots of a model.
pub struct Reader {
    config: ModelConfig,
    stack: Stack,
    storage: DType,
    /// Linear layers of which factors are stacked, those together whose weights are joined.
    layers: Vec<Joined>,
}

impl Reader {
    /// For a model that has slots, whose numbers have this type in memory, with the kernels of a backend.
    ///
    /// # Errors
    /// The configuration makes no graph, or has no slots.
    pub fn new(config: &ModelConfig, storage: DType, backend: &dyn Backend) -> Result<Reader, String> {
        let Slots { slots, rank } = config.adapters.ok_or("the model has no room for adapters")?;
        let cache = Cache { page: Cache::PAGE, pages: 1, table: 1, windows: None };
        let graph = build(config, &Program::paged(1, 1, cache)).map_err(|e| e.to_string())?;
        let layers = stackable(&graph, stored(config, backend).as_ref()).map_err(|e| e.to_string())?;
        Ok(Reader { config: config.clone(), stack: Stack { slots, rank }, storage, layers })
    }

    /// Names, types and shapes of the slots' memory.
    pub fn states(&self) -> Vec<(String, DType, Vec<usize>)> {
        let both = self.layers.iter().flat_map(|joined| self.stack.states(joined));
        both.map(|(name, shape)| (name, self.storage, shape.to_vec())).collect()
    }

    /// Bytes of the slots' memory.
    pub fn bytes(&self) -> u64 {
        let elements = self.states().into_iter().map(|(_, _, shape)| shape.iter().product::<usize>() as u64);
        elements.sum::<u64>() * self.storage.bytes() as u64
    }

    /// What a slot holds for an adapter of random factors, each draw another.
    pub fn drawn(&self, draw: impl Fn(u64) -> u64) -> Patch {
        let (slots, mut at) = (self.stack.slots, 0);
        let factor = |(state, dtype, shape): (String, DType, Vec<usize>)| {
            let numbers = shape.iter().product::<usize>() / slots;
            let mut bytes = Vec::with_capacity(numbers * dtype.bytes());
            for _ in 0..numbers {
                at += 1;
                dtype.encode((draw(at) >> 40) as f64 / f64::from(1 << 24) * 0.04 - 0.02, &mut bytes);
            }
            Factor { state, bytes }
        };
        Patch { factors: self.states().into_iter().map(factor).collect() }
    }

    /// What a slot holds for the adapter in a folder: its factors, and zeros where it has none.
    ///
    /// # Errors
    /// The folder is no adapter of this model, or one that has no room; one line says why.
    pub fn read(&self, folder: &Path) -> Result<Patch, String> {
        let adapter = Folder::open(folder, &self.config)?;
        let refuse = |why: String| Err(format!("{}: {why}", folder.display()));
        if adapter.adapter.dora {
            return refuse(
                "magnitudes (DoRA) are not computed beside other adapters; merge it, --adapter DIR".into(),
            );
        }
        for (module, Factors { rank, .. }) in &adapter.adapter.modules {
            if *rank > self.stack.rank {
                let most = self.stack.rank;
                return refuse(format!(
                    "`{module}` has rank {rank}, there is room for {most}: --max-adapter-rank"
                ));
            }
            if !self.layers.iter().flat_map(|j| &j.layers).any(|(name, _)| name == module) {
                return refuse(format!("`{module}` cannot be adapted beside other adapters"));
            }
        }
        let factors = self.layers.iter().map(|joined| self.factors(&adapter, joined));
        let factors = factors.collect::<Result<Vec<_>, String>>()?.into_iter().flatten().collect();
        Ok(Patch { factors })
    }

    /// A and B of joined layers, both transposed, each as wide as a slot, zeros beyond the rank, B multiplied by the scale.
    fn factors(&self, of: &Folder, joined: &Joined) -> Result<[Factor; 2], String> {
        let (width, results) = (self.stack.rank, joined.results());
        let [(a, _), (b, _)] = self.stack.states(joined);
        let mut down = vec![0.0; joined.columns * joined.layers.len() * width];
        let mut up = vec![0.0; width * results];
        let mut first = 0;
        for (at, (module, rows)) in joined.layers.iter().enumerate() {
            let Some(Factors { rank, scale }) = of.adapter.modules.get(module).copied() else {
                first += rows;
                continue;
            };
            let mut parts = [vec![], vec![]];
            let tensors = of.adapter.tensors(module, [*rows, joined.columns]);
            for (part, (name, shape)) in parts.iter_mut().zip(tensors) {
                let view = of.factors.get(&name).ok_or_else(|| format!("`{name}` is missing"))?;
                part.resize(shape.iter().product(), 0.0);
                view.to_f32(part).map_err(|e| e.to_string())?;
            }
            let lanes = joined.layers.len() * width;
            for r in 0..rank {
                for (i, x) in parts[0][r * joined.columns..][..joined.columns].iter().enumerate() {
                    down[i * lanes + at * width + r] = f64::from(*x);
                }
                for row in 0..*rows {
                    up[r * results + first + row] = f64::from(parts[1][row * rank + r]) * scale;
                }
            }
            first += rows;
        }
        let encode = |state: String, numbers: Vec<f64>| {
            let mut bytes = Vec::with_capacity(numbers.len() * self.storage.bytes());
            numbers.into_iter().for_each(|x| self.storage.encode(x, &mut bytes));
            Factor { state, bytes }
        };
        Ok([encode(a, down), encode(b, up)])
    }
}
