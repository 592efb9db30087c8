//! A toy run whose every byte is a function of its step, and what a save must survive: see the modules.

mod damage;
mod faults;
mod hostile;
mod ordinary;

use std::path::Path;

use astrai_ir::DType;
use astrai_runtime::weights::{Checkpoint, Entry};

use super::*;
use crate::settings::Settings;

pub(super) const LLAMA: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": true}"#;

/// A run at a step.
pub(super) struct Toy {
    pub step: u64,
    pub tokenizer: Vec<Attachment>,
    /// Elements of the larger tensor.
    pub size: usize,
}

pub(super) fn toy(step: u64) -> Toy {
    let tokenizer =
        vec![Attachment { name: "tokenizer.json".to_string(), bytes: b"{\"model\": 1}".to_vec() }];
    Toy { step, tokenizer, size: 60 }
}

pub(super) fn settings() -> Settings {
    Settings {
        data: vec!["a.bin".into()],
        out: "o".into(),
        config: Some("c.json".into()),
        ..Settings::default()
    }
}

/// Bytes of a tensor at a step.
fn bytes(name: &str, step: u64, elements: usize) -> Vec<u8> {
    (0..elements).flat_map(|i| ((step as f32) + (name.len() * 1000 + i) as f32).to_le_bytes()).collect()
}

impl Contents for Toy {
    fn config(&self) -> String {
        LLAMA.to_string()
    }

    fn tokenizer(&self) -> &[Attachment] {
        &self.tokenizer
    }

    fn trainer(&self) -> TrainerState {
        let mut state = TrainerState::new(settings(), 100, "data-1".to_string(), "cc 1".to_string());
        (state.step, state.sample, state.tokens) = (self.step, 8 * self.step, 2048 * self.step);
        state.random.step = self.step;
        state
    }

    fn entries(&self, part: Part) -> Vec<Entry> {
        let names: &[&str] = match part {
            Part::Model => &["w", "norm"],
            Part::Optimizer => &["exp_avg.w", "exp_avg_sq.w", "empty"],
        };
        let shape = |name: &str| match name {
            "norm" => vec![3],
            "empty" => vec![0, 4],
            _ => vec![self.size / 4, 4],
        };
        let entry = |name: &&str| Entry { name: name.to_string(), dtype: DType::F32, shape: shape(name) };
        names.iter().map(entry).collect()
    }

    fn write(&mut self, _: Part, entry: &Entry, sink: &mut Sink) -> Result<(), FileError> {
        let all = bytes(&entry.name, self.step, entry.shape.iter().product());
        all.chunks(28).try_for_each(sink)
    }
}

/// Holds every byte of a checkpoint to the toy of its step.
pub(super) fn assert_whole(checkpoint: &Opened, step: u64) {
    assert_eq!(checkpoint.step(), step);
    let toy = toy(step);
    assert_eq!(checkpoint.trainer, toy.trainer());
    assert_eq!(checkpoint.config, LLAMA);
    assert_eq!(checkpoint.tokenizer, toy.tokenizer);
    let holds = |weights: &Checkpoint, part: Part| {
        let entries = toy.entries(part);
        assert_eq!(weights.names().len(), entries.len());
        for entry in entries {
            let view = weights.get(&entry.name).expect("the tensor");
            assert_eq!((view.dtype(), view.shape()), (entry.dtype, entry.shape.as_slice()));
            assert_eq!(view.bytes(), bytes(&entry.name, step, view.elements()));
        }
    };
    holds(&checkpoint.model, Part::Model);
    holds(&checkpoint.optimizer, Part::Optimizer);
}

/// A run's folder with sound checkpoints of these steps.
pub(super) fn run(steps: &[u64]) -> tempfile::TempDir {
    let out = tempfile::tempdir().expect("a temporary folder");
    let folder = RunFolder::create(out.path()).expect("created");
    for &step in steps {
        folder.save(step, &mut toy(step), 0).expect("saved");
    }
    out
}

/// Names in a folder, but for the lock.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("listed");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    let mut all: Vec<String> = entries.map(|e| name(e).to_string_lossy().into_owned()).collect();
    all.retain(|name| name != ".lock");
    all.sort();
    all
}
