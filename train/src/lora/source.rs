//! Weights of adapters. In: weights of a base model by checkpoint name, and factors. Out: both side by side; factors that begin, under which
//! the model is what it was; or the base with the factors merged into it, one tensor in memory at a time.

use super::{Folder, layers};
use astrai_builders::ModelConfig;
use astrai_ir::DType;
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Adapter, Factors, Random, Source, Value, WeightSource};
use std::borrow::Cow;
use std::collections::HashMap;

/// A base model's weights, and factors under their own names.
pub struct Beside<'a> {
    /// The base.
    pub base: &'a dyn WeightSource,
    /// The factors.
    pub factors: &'a dyn WeightSource,
}

impl WeightSource for Beside<'_> {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        self.factors.tensor(name).or_else(|| self.base.tensor(name))
    }

    fn done(&self, name: &str) {
        self.base.done(name);
    }

    fn loaded(&self) {
        self.base.loaded();
    }
}

/// Factors as PEFT begins them: A as wide as uniform draws within ±1/√in, B zero, magnitudes the norms of the base's rows.
pub struct Fresh<'a> {
    base: &'a dyn WeightSource,
    drawn: Random,
    /// Shapes of what is zero.
    zeros: HashMap<String, Vec<usize>>,
    /// The weights whose rows' norms are wanted.
    norms: HashMap<String, String>,
}

impl<'a> Fresh<'a> {
    /// Factors of a model's adapter.
    ///
    /// # Errors
    /// The configuration makes no graph.
    pub fn new(
        config: &ModelConfig,
        adapter: &Adapter,
        base: &'a dyn WeightSource,
        seed: u64,
    ) -> Result<Fresh<'a>, String> {
        let (mut tensors, mut zeros, mut norms) = (HashMap::new(), HashMap::new(), HashMap::new());
        for (module, shape) in layers(config)? {
            for (i, (name, own)) in adapter.tensors(&module, shape).into_iter().enumerate() {
                match i {
                    0 => _ = tensors.insert(name, (own, 0.0, (1.0 / (3.0 * shape[1] as f32)).sqrt())),
                    1 => _ = zeros.insert(name, own),
                    _ => _ = norms.insert(name, format!("{module}.weight")),
                }
            }
        }
        Ok(Fresh { base, drawn: Random { tensors, seed }, zeros, norms })
    }
}

impl WeightSource for Fresh<'_> {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        if let Some(shape) = self.zeros.get(name) {
            return Some(source(shape.clone(), &vec![0.0; shape.iter().product()]));
        }
        if let Some(of) = self.norms.get(name) {
            let (shape, w) = floats(self.base.tensor(of)?)?;
            let norm = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
            let norms: Vec<f32> = w.chunks(shape[1].max(1)).map(norm).collect();
            return Some(source(vec![norms.len()], &norms));
        }
        self.drawn.tensor(name).or_else(|| self.base.tensor(name))
    }

    fn done(&self, name: &str) {
        self.base.done(name);
    }

    fn loaded(&self) {
        self.base.loaded();
    }
}

/// A base model's weights with an adapter merged into them: W + s·B·A, with DoRA each row scaled to its magnitude. Merged weights are f32.
pub struct Merged {
    base: Box<dyn WeightSource>,
    adapter: Adapter,
    factors: Checkpoint,
}

impl Merged {
    /// The base with this adapter, which was held to the base's model.
    pub fn new(base: Box<dyn WeightSource>, folder: Folder) -> Merged {
        Merged { base, adapter: folder.adapter, factors: folder.factors }
    }

    fn merged(&self, module: &str, factors: Factors, base: Source) -> Option<Source<'static>> {
        let (shape, mut w) = floats(base)?;
        let &[rows, columns] = shape.as_slice() else { return None };
        let names = self.adapter.tensors(module, [rows, columns]);
        let read = |at: usize| floats(self.factors.tensor(&names.get(at)?.0)?).map(|(_, x)| x);
        let (a, b) = (read(0)?, read(1)?);
        let magnitude = if self.adapter.dora { Some(read(2)?) } else { None };
        let merge = |first: usize, part: &mut [f32]| {
            for (i, row) in (first..).zip(part.chunks_mut(columns)) {
                for (k, b) in b[i * factors.rank..][..factors.rank].iter().enumerate() {
                    let by = b * factors.scale as f32;
                    row.iter_mut().zip(&a[k * columns..]).for_each(|(w, a)| *w += by * a);
                }
                if let Some(m) = &magnitude {
                    let norm = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
                    let by = (f64::from(m[i]) / norm) as f32;
                    row.iter_mut().for_each(|w| *w *= by);
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let each = rows.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (i, part) in w.chunks_mut((each * columns).max(1)).enumerate() {
                scope.spawn(move || merge(i * each, part));
            }
        });
        Some(source(shape, &w))
    }
}

impl WeightSource for Merged {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        let base = self.base.tensor(name)?;
        let module = name.strip_suffix(".weight");
        match module.and_then(|m| Some((m, self.adapter.modules.get(m)?))) {
            Some((module, factors)) => self.merged(module, *factors, base),
            None => Some(base),
        }
    }

    fn done(&self, name: &str) {
        self.base.done(name);
    }

    fn loaded(&self) {
        self.base.loaded();
    }
}

fn floats(s: Source) -> Option<(Vec<usize>, Vec<f32>)> {
    if !s.dtype.is_float() {
        return None;
    }
    let value = Value { dtype: s.dtype, shape: s.shape, bytes: s.bytes.into_owned() };
    Some((value.shape.clone(), value.to_f32()))
}

fn source(shape: Vec<usize>, x: &[f32]) -> Source<'static> {
    let bytes = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    Source { dtype: DType::F32, shape, bytes: Cow::Owned(bytes) }
}
