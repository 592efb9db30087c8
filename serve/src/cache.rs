//! Keys and values of a model in pages, and the inputs of a run over them. In: a configuration, sizes, which tokens of which
//! sequences come next and which pages are theirs. Out: the memory that sessions of prefill and decode share, and their inputs.
//! Who owns which page is decided elsewhere.

use astrai_builders::{Cache, ModelConfig};
use astrai_ir::{DType, Type};
use astrai_runtime::{Buffers, Error, Value, available_memory};

/// The pages of all layers.
#[derive(Clone)]
pub struct KvCache {
    sizes: Cache,
    buffers: Buffers,
}

impl KvCache {
    /// Zeroed pages, in the type that a program compiled for this storage has them in.
    pub fn new(config: &ModelConfig, sizes: Cache, storage: DType) -> Result<KvCache, Error> {
        let need = KvCache::page_bytes(config, sizes.page, storage).saturating_mul(sizes.pages as u64);
        let have = available_memory();
        if need > have {
            let what = format!("{} pages of keys and values", sizes.pages);
            return Err(Error::Memory {
                what,
                need,
                have,
                remedy: "take fewer pages, or --dtype bf16".into(),
            });
        }
        let mut buffers = Buffers::new();
        for layer in 0..config.num_layers {
            for name in Cache::states(layer) {
                buffers.add(&name, storage, &sizes.shape(config))?;
            }
        }
        Ok(KvCache { sizes, buffers })
    }

    /// Bytes of a page of all layers, keys and values.
    pub fn page_bytes(config: &ModelConfig, page: usize, storage: DType) -> u64 {
        let row =
            Cache { page, pages: 1, table: 1 }.shape(config).into_iter().map(|n| n as u64).product::<u64>();
        2 * config.num_layers as u64 * row * storage.bytes() as u64
    }

    /// The memory to open sessions over.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Pages and their sizes.
    pub fn sizes(&self) -> Cache {
        self.sizes
    }
}

/// Inputs of one run: new tokens of some sequences, each at the end of what its pages hold. Filled again and again without
/// allocating.
#[derive(Clone, Debug)]
pub struct PagedBatch {
    sizes: Cache,
    vocab: usize,
    inputs: [(&'static str, Value); 7],
}

const IDS: usize = 0;
const POSITIONS: usize = 1;
const SLOTS: usize = 2;
const STARTS: usize = 3;
const TABLES: usize = 4;
const LENS: usize = 5;
const LAST: usize = 6;

impl PagedBatch {
    /// No sequences.
    pub fn new(sizes: Cache, vocab: usize) -> PagedBatch {
        let names = ["input_ids", "positions", "slots", "starts", "tables", "lens", "last"];
        let inputs = names.map(|n| (n, Value::i32(if n == "tables" { &[0, 0] } else { &[0] }, &[])));
        let mut batch = PagedBatch { sizes, vocab, inputs };
        batch.clear();
        batch
    }

    /// Takes the sequences out.
    pub fn clear(&mut self) {
        for (_, v) in &mut self.inputs {
            v.bytes.clear();
            v.shape[0] = 0;
        }
        self.inputs[TABLES].1.shape[1] = self.sizes.table;
        self.put(STARTS, 0);
    }

    /// Adds the next `tokens` of a sequence whose first `done` tokens are in `pages`, which have room for these too.
    pub fn push(&mut self, tokens: &[i32], done: usize, pages: &[i32]) -> Result<(), Error> {
        let (page, sequence) = (self.sizes.page, self.sequences());
        let wrong = |what: String| Err(Error::Input(format!("sequence {sequence}: {what}")));
        if let Some(t) = tokens.iter().find(|t| usize::try_from(**t).map_or(true, |t| t >= self.vocab)) {
            return wrong(format!("token {t} is outside the vocabulary of {}", self.vocab));
        }
        if let Some(p) = pages.iter().find(|p| usize::try_from(**p).map_or(true, |p| p >= self.sizes.pages)) {
            return wrong(format!("page {p} is outside the {} pages", self.sizes.pages));
        }
        let end = done.saturating_add(tokens.len());
        if tokens.is_empty() || pages.len() > self.sizes.table || end > pages.len() * page {
            let (n, room, table) = (tokens.len(), pages.len(), self.sizes.table);
            return wrong(format!(
                "{n} tokens behind {done}, {room} pages of {page}: wants tokens, room for them, {table} pages at most"
            ));
        }
        for (at, &token) in (done..end).zip(tokens) {
            self.put(IDS, token);
            self.put(POSITIONS, at as i32);
            self.put(SLOTS, pages[at / page] * page as i32 + (at % page) as i32);
        }
        let all = self.tokens() as i32;
        self.put(STARTS, all);
        self.put(LAST, all - 1);
        self.put(LENS, end as i32);
        let table = &mut self.inputs[TABLES].1;
        for i in 0..self.sizes.table {
            table.bytes.extend(pages.get(i).unwrap_or(&-1).to_le_bytes());
        }
        table.shape[0] += 1;
        Ok(())
    }

    /// Sequences in it.
    pub fn sequences(&self) -> usize {
        self.inputs[LENS].1.shape[0]
    }

    /// Tokens in it.
    pub fn tokens(&self) -> usize {
        self.inputs[IDS].1.shape[0]
    }

    /// The inputs that a program names.
    pub fn inputs(&self, names: &[(String, Type)]) -> Vec<(&'static str, &Value)> {
        let wanted = |n: &str| names.iter().any(|(x, _)| x == n);
        self.inputs.iter().filter(|(n, _)| wanted(n)).map(|(n, v)| (*n, v)).collect()
    }

    fn put(&mut self, i: usize, x: i32) {
        let v = &mut self.inputs[i].1;
        v.bytes.extend(x.to_le_bytes());
        v.shape[0] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ints(b: &PagedBatch, i: usize) -> Vec<i32> {
        b.inputs[i].1.bytes.chunks_exact(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    #[test]
    fn tokens_stand_behind_what_the_pages_hold() {
        let mut b = PagedBatch::new(Cache { page: 4, pages: 9, table: 3 }, 50);
        for _ in 0..2 {
            b.clear();
            b.push(&[5, 6, 7], 3, &[8, 2]).unwrap();
            b.push(&[9], 0, &[1]).unwrap();
            assert_eq!((b.sequences(), b.tokens()), (2, 4));
            assert_eq!(ints(&b, SLOTS), [35, 8, 9, 4]);
            assert_eq!(ints(&b, POSITIONS), [3, 4, 5, 0]);
            assert_eq!(
                (ints(&b, STARTS), ints(&b, LENS), ints(&b, LAST)),
                (vec![0, 3, 4], vec![6, 1], vec![2, 3])
            );
            assert_eq!(ints(&b, TABLES), [8, 2, -1, 1, -1, -1]);
            assert_eq!(b.inputs[TABLES].1.shape, [2, 3]);
        }
        for (tokens, done, pages) in [
            (&[50][..], 0, &[1][..]),
            (&[-1], 0, &[1]),
            (&[1], 4, &[1]),
            (&[], 0, &[1]),
            (&[1], 0, &[9]),
            (&[1], 0, &[1; 4]),
        ] {
            assert!(b.push(tokens, done, pages).is_err(), "{tokens:?} {done} {pages:?}");
            assert_eq!(b.sequences(), 2);
        }
    }
}
