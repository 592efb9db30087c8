//! A model for tests that says one text, whatever it is asked, and then ends. It knows where an answer begins by the first token that is
//! computed after a longer run: one request at a time.

use crate::engine::{Engine, Model, ModelError, Settings, Sizes};
use crate::scheduler::plan::StepPlan;
use crate::tests::alphabet::{EOS, SIZES};

pub struct Script {
    text: Vec<u8>,
    begun: Option<i32>,
    logits: Vec<f32>,
}

impl Script {
    /// An engine that says this.
    pub fn start(text: &str) -> Engine {
        let script = Script { text: text.into(), begun: None, logits: Vec::new() };
        let sizes = script.sizes();
        let settings = Settings { eos: vec![EOS], prefix_cache: false, ..Settings::default() };
        assert!(text.len() < sizes.positions);
        Engine::start(script, &settings).unwrap()
    }
}

impl Model for Script {
    fn sizes(&self) -> Sizes {
        Sizes { positions: 4096, pages: 1024, tokens: 2048, ..SIZES }
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        let batch = &plan.entries()[0].batch;
        let (positions, lasts) = (batch.list("positions"), batch.list("last"));
        self.logits.clear();
        for last in lasts {
            let position = positions[last as usize];
            if positions.len() > 1 {
                self.begun = Some(position);
            }
            let at = (position - self.begun.unwrap_or(position)) as usize;
            let next = self.text.get(at).map_or(EOS, |byte| u32::from(*byte));
            let row = self.logits.len();
            self.logits.extend((0..SIZES.vocabulary).map(|id| id as f32 * -1e-3));
            self.logits[row + next as usize] = 30.0;
        }
        logits.push(&mut self.logits);
        Ok(())
    }
}
