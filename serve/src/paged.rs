//! A compiled model behind the engine. In: a session of a paged program and its pages. Out: logits of each step.

use crate::engine::{Model, ModelError, Sizes};
use crate::scheduler::batch::StepBatch;
use astrai_builders::Cache;
use astrai_runtime::{Session, Value};

/// A session of a program over paged keys and values.
pub struct PagedModel {
    session: Session,
    cache: Cache,
    sizes: Sizes,
    inputs: [(&'static str, Value); 7],
    logits: Vec<f32>,
}

const TABLES: usize = 4;

impl PagedModel {
    /// A model of `vocabulary` tokens and `positions`, whose program takes so many `tokens` and `sequences` a step. The
    /// session was opened over the pages.
    pub fn new(
        session: Session,
        cache: Cache,
        [vocabulary, positions, tokens, sequences]: [usize; 4],
    ) -> PagedModel {
        let sizes = Sizes {
            vocabulary,
            page_size: cache.page,
            pages: cache.pages,
            positions: positions.min(cache.table * cache.page),
            tokens,
            sequences,
        };
        let names = ["input_ids", "positions", "starts", "slots", "tables", "lens", "last"];
        let inputs = names.map(|n| (n, Value::i32(if n == "tables" { &[0, 0] } else { &[0] }, &[])));
        PagedModel { session, cache, sizes, inputs, logits: vec![0.0; sequences * vocabulary] }
    }
}

impl Model for PagedModel {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn step(&mut self, batch: &StepBatch) -> Result<&mut [f32], ModelError> {
        let lists = [&batch.input_ids, &batch.positions, &batch.starts, &batch.slots];
        for ((_, v), list) in self.inputs.iter_mut().zip(lists) {
            fill(v, list);
        }
        fill(&mut self.inputs[TABLES + 1].1, &batch.lens);
        fill(&mut self.inputs[TABLES + 2].1, &batch.last);
        // The program's tables are as wide as its longest sequence; what lies behind a sequence's pages is not read.
        let (width, tables) = (self.cache.table, &mut self.inputs[TABLES].1);
        tables.shape.copy_from_slice(&[batch.sequences(), width]);
        tables.bytes.clear();
        for row in batch.tables.chunks(batch.table.max(1)).take(batch.sequences()) {
            let pages = (0..width).map(|i| row.get(i).copied().unwrap_or(0));
            tables.bytes.extend(pages.flat_map(i32::to_le_bytes));
        }
        let given: [(&str, &Value); 7] = std::array::from_fn(|i| (self.inputs[i].0, &self.inputs[i].1));
        self.session.execute(&given)?;
        let count = batch.sequences() * self.sizes.vocabulary;
        let bytes = self.session.result(0).as_chunks::<4>().0;
        let out = self.logits.get_mut(..count).filter(|_| bytes.len() == count);
        let out = out.ok_or("the program's logits are not those of the batch")?;
        out.iter_mut().zip(bytes).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
        Ok(out)
    }
}

fn fill(v: &mut Value, list: &[i32]) {
    v.shape[0] = list.len();
    v.bytes.clear();
    v.bytes.extend(list.iter().flat_map(|x| x.to_le_bytes()));
}
