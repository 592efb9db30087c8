//! Adapters that a server's requests choose among. In: folders in PEFT's layout, hostile. Out: the memory of their slots, and what is written
//! into one when an adapter is loaded.

use astrai_builders::config::Slots;
use astrai_builders::{Cache, ModelConfig, Program, build};
use astrai_ir::DType;
use astrai_passes::{Stack, stackable};
use astrai_runtime::Factors;
use astrai_serve::engine::{Factor, Patch};
use astrai_train::lora::Folder;
use std::collections::BTreeMap;
use std::path::Path;

/// Reads adapters for the slots of a model.
pub struct Reader {
    config: ModelConfig,
    stack: Stack,
    storage: DType,
    /// Linear layers of which factors are stacked, with the `[out, in]` of their weights.
    layers: BTreeMap<String, [usize; 2]>,
}

impl Reader {
    /// For a model that has slots, whose weights have this type in memory.
    ///
    /// # Errors
    /// The configuration makes no graph, or has no slots.
    pub fn new(config: &ModelConfig, storage: DType) -> Result<Reader, String> {
        let Slots { slots, rank } = config.adapters.ok_or("the model has no room for adapters")?;
        let cache = Cache { page: Cache::PAGE, pages: 1, table: 1, windows: None };
        let graph = build(config, &Program::paged(1, 1, cache)).map_err(|e| e.to_string())?;
        let layers = stackable(&graph);
        Ok(Reader { config: config.clone(), stack: Stack { slots, rank }, storage, layers })
    }

    /// Names, types and shapes of the slots' memory.
    pub fn states(&self) -> Vec<(String, DType, Vec<usize>)> {
        let both = self.layers.iter().flat_map(|(module, shape)| self.stack.states(module, *shape));
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
            if !self.layers.contains_key(module) {
                return refuse(format!("`{module}` cannot be adapted beside other adapters"));
            }
        }
        let mut factors = Vec::with_capacity(2 * self.layers.len());
        for (module, shape) in &self.layers {
            factors.extend(self.factors(&adapter, module, *shape)?);
        }
        Ok(Patch { factors })
    }

    /// A and B of a module, each as wide as a slot, B multiplied by the scale.
    fn factors(&self, of: &Folder, module: &str, [rows, columns]: [usize; 2]) -> Result<[Factor; 2], String> {
        let (width, zero) = (self.stack.rank, Factors { rank: 0, scale: 0.0 });
        let Factors { rank, scale } = of.adapter.modules.get(module).copied().unwrap_or(zero);
        let mut parts = [vec![], vec![]];
        for (part, (name, shape)) in parts.iter_mut().zip(of.adapter.tensors(module, [rows, columns])) {
            let view = of.factors.get(&name).ok_or_else(|| format!("`{name}` is missing"))?;
            part.resize(shape.iter().product(), 0.0);
            view.to_f32(part).map_err(|e| e.to_string())?;
        }
        let [a, b] = parts;
        // Both transposed, zeros beyond the rank.
        let encode = |[height, wide]: [usize; 2], at: &dyn Fn(usize, usize) -> f64| {
            let mut bytes = Vec::with_capacity(height * wide * self.storage.bytes());
            let all = (0..height).flat_map(|row| (0..wide).map(move |column| (row, column)));
            all.for_each(|(row, column)| self.storage.encode(at(row, column), &mut bytes));
            bytes
        };
        let down = |row: usize, r: usize| if r < rank { f64::from(a[r * columns + row]) } else { 0.0 };
        let up = |r: usize, row: usize| if r < rank { f64::from(b[row * rank + r]) * scale } else { 0.0 };
        let [(a, _), (b, _)] = self.stack.states(module, [rows, columns]);
        let (down, up) = (encode([columns, width], &down), encode([width, rows], &up));
        Ok([Factor { state: a, bytes: down }, Factor { state: b, bytes: up }])
    }
}
