//! A model for tests that knows what comes after each byte: `a` to `z` in a circle, digits up to `9` and then the end of the
//! text, a face in its four bytes after `!`. So every test can say beforehand what an answer must be.

use std::sync::mpsc::Receiver;
use std::time::Duration;

use crate::engine::{Engine, Model, ModelError, Settings, Sizes};
use crate::scheduler::plan::StepPlan;
use crate::tokenizer::{Tokenizer, tests};

/// Ends a text; `<|end|>` in the tokenizer.
pub const EOS: u32 = 257;

pub const SIZES: Sizes =
    Sizes { vocabulary: 258, page_size: 4, pages: 256, positions: 256, tokens: 64, sequences: 16 };

pub struct Alphabet {
    logits: Vec<f32>,
    /// If there, each step waits for a message, or for the sender to go.
    gate: Option<Receiver<()>>,
    /// What each step takes.
    pace: Duration,
}

impl Alphabet {
    pub fn new() -> Alphabet {
        Alphabet { logits: Vec::new(), gate: None, pace: Duration::ZERO }
    }

    pub fn gated(gate: Receiver<()>) -> Alphabet {
        Alphabet { gate: Some(gate), ..Alphabet::new() }
    }

    pub fn paced(pace: Duration) -> Alphabet {
        Alphabet { pace, ..Alphabet::new() }
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

impl Model for Alphabet {
    fn sizes(&self) -> Sizes {
        SIZES
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        let batch = &plan.entries()[0].batch;
        if let Some(gate) = &self.gate {
            let _ = gate.recv_timeout(Duration::from_secs(20));
        }
        std::thread::sleep(self.pace);
        self.logits.clear();
        let ids = batch.list("input_ids");
        for last in batch.list("last") {
            let token = ids[last as usize] as u32;
            let row = self.logits.len();
            self.logits.extend((0..SIZES.vocabulary).map(|id| id as f32 * -1e-3));
            self.logits[row + next(token) as usize] = 30.0;
            if token == 7 {
                self.logits[row] = f32::NAN;
            }
        }
        logits.push(&mut self.logits);
        Ok(())
    }
}

/// Every byte a token, `ab` another, and the end of the text.
pub fn tokenizer() -> Tokenizer {
    tests::open(&tests::byte_level())
}
