//! A model for tests that knows what comes after each byte: `a` to `z` in a circle, digits up to `9` and then the end of the
//! text, a face in its four bytes after `!`. So every test can say beforehand what an answer must be.

use std::sync::mpsc::Receiver;
use std::time::Duration;

use astrai_builders::config::Pooling;

use crate::engine::{Engine, Model, ModelError, PageStorage, Patch, Settings, Sizes};
use crate::scheduler::batch::StepBatch;
use crate::scheduler::plan::{Embedding, ProgramKind, StepEntry, StepPlan};
use crate::tokenizer::{Tokenizer, tests};

/// Ends a text; `<|end|>` in the tokenizer.
pub const EOS: u32 = 257;

pub const SIZES: Sizes = Sizes {
    vocabulary: 258,
    page_size: 4,
    pages: 256,
    windows: None,
    positions: 256,
    tokens: 64,
    sequences: 16,
};

pub struct Alphabet {
    logits: Vec<f32>,
    /// If there, each step waits for a message, or for the sender to go.
    gate: Option<Receiver<()>>,
    /// What each step takes.
    pace: Duration,
    /// If there, it gives vectors.
    pooling: Option<Pooling>,
    vectors: Vec<f32>,
    /// What the adapter of each slot adds to a letter.
    adapters: [u32; 4],
}

impl Alphabet {
    pub fn new() -> Alphabet {
        Alphabet {
            logits: Vec::new(),
            gate: None,
            pace: Duration::ZERO,
            pooling: None,
            vectors: Vec::new(),
            adapters: [0; 4],
        }
    }

    pub fn gated(gate: Receiver<()>) -> Alphabet {
        Alphabet { gate: Some(gate), ..Alphabet::new() }
    }

    pub fn paced(pace: Duration) -> Alphabet {
        Alphabet { pace, ..Alphabet::new() }
    }

    /// One that also gives vectors.
    pub fn pooling(pooling: Pooling) -> Alphabet {
        Alphabet { pooling: Some(pooling), ..Alphabet::new() }
    }

    pub fn start(self, settings: Settings) -> Engine {
        Engine::start(self, &Settings { eos: vec![EOS], ..settings }).unwrap()
    }
}

/// What comes after a token. After 7 there is nothing but NaN.
fn next(token: u32) -> u32 {
    match u8::try_from(token) {
        Ok(b'a'..=b'y' | b'0'..=b'8') => token + 1,
        Ok(b'9') => EOS,
        Ok(b'!') => 0xF0,
        Ok(0xF0) => 0x9F,
        Ok(0x9F) => 0x99,
        Ok(0x99) => 0x82,
        // `ab`
        Err(_) if token == 256 => u32::from(b'c'),
        _ => u32::from(b'a'),
    }
}

/// Numbers of a vector.
pub const WIDTH: usize = 3;

/// The state of a token, in which all before it count.
fn state(ids: &[i32], at: usize) -> [f64; WIDTH] {
    let last = f64::from(ids[at]);
    [1.0, last / 100.0, (at % 5) as f64 - last % 7.0]
}

/// A text's vector, computed at once.
pub fn vector(ids: &[i32], pooling: Pooling) -> Vec<f64> {
    let from = if pooling == Pooling::Mean { 0 } else { ids.len() - 1 };
    let mut sum = vec![0.0; WIDTH];
    (from..ids.len()).for_each(|at| sum.iter_mut().zip(state(ids, at)).for_each(|(sum, x)| *sum += x));
    let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
    sum.into_iter().map(|x| x / length).collect()
}

impl Alphabet {
    /// What a program of vectors gives of the rows of a batch.
    fn embed(&mut self, batch: &StepBatch, pooling: Pooling) {
        let [ids, positions, starts] = ["input_ids", "positions", "starts"].map(|name| batch.list(name));
        self.vectors.clear();
        for ends in starts.windows(2) {
            let (from, to) = (ends[0] as usize, ends[1] as usize);
            let first = if pooling == Pooling::Mean { from } else { to - 1 };
            let mut sum = [0.0; WIDTH];
            for row in first..to {
                // The state of a token that stands where it stands.
                let mut before = vec![0; positions[row] as usize];
                before.push(ids[row]);
                let state = state(&before, before.len() - 1);
                sum.iter_mut().zip(state).for_each(|(sum, x)| *sum += x);
            }
            self.vectors.extend(sum.map(|x| (x / (to - first) as f64) as f32));
        }
    }
}

impl Model for Alphabet {
    fn sizes(&self) -> Sizes {
        SIZES
    }

    fn page_storage(&self) -> PageStorage {
        let bytes = 10 * SIZES.page_size as u64;
        PageStorage { name: "int8", tokens: SIZES.page_size, bytes, all: bytes * SIZES.pages as u64 }
    }

    fn plan(&self) -> StepPlan {
        let batch = StepBatch::new(SIZES.page_size, SIZES.positions / SIZES.page_size);
        let embed = |pooling| ProgramKind::Embed(Embedding { pooling, width: WIDTH, whole: false });
        let kinds = [Some(ProgramKind::Mixed), self.pooling.map(embed)].into_iter().flatten();
        StepPlan::new(kinds.map(|kind| StepEntry::new(kind, batch.clone())).collect())
    }

    fn adapt(&mut self, slot: usize, patch: &Patch) -> Result<(), ModelError> {
        self.adapters[slot] = patch.factors[0].bytes[0].into();
        Ok(())
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        let batch = &plan.entries()[0].batch;
        if let Some(gate) = &self.gate {
            let _ = gate.recv_timeout(Duration::from_secs(20));
        }
        std::thread::sleep(self.pace);
        self.logits.clear();
        let [ids, adapters] = ["input_ids", "adapters"].map(|name| batch.list(name));
        for last in batch.list("last") {
            let token = ids[last as usize] as u32;
            let more = usize::try_from(adapters[last as usize]).map_or(0, |slot| self.adapters[slot]);
            let next = match next(token) {
                letter @ 0x61..=0x7A => 0x61 + (letter - 0x61 + more) % 26,
                other => other,
            };
            let row = self.logits.len();
            self.logits.extend((0..SIZES.vocabulary).map(|id| id as f32 * -1e-3));
            self.logits[row + next as usize] = 30.0;
            if token == 7 {
                self.logits[row] = f32::NAN;
            }
        }
        if let Some((pooling, entry)) = self.pooling.zip(plan.entries().get(1)) {
            self.embed(&entry.batch, pooling);
        }
        for (entry, output) in plan.entries().iter().zip([&mut self.logits, &mut self.vectors]) {
            logits.extend((!entry.rows.is_empty()).then_some(&mut output[..]));
        }
        Ok(())
    }
}

/// Every byte a token, `ab` another, and the end of the text.
pub fn tokenizer() -> Tokenizer {
    tests::open(&tests::byte_level())
}
