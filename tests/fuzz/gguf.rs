//! GGUF files under attack: a whole model of one layer with its tokenizer, edited. Out: whether configuration, tensors and tokenizer are
//! taken.

use crate::mutate::{Draws, bytes};
use crate::targets::Run;
use astrai_engine::gguf;
use astrai_ir::Storage;
use astrai_ir::narrow::Part;
use astrai_runtime::WeightSource;
use astrai_serve::tokenizer::Tokenizer;
use std::fs;
use std::path::Path;

/// Type and shape, innermost first, of each tensor.
const TENSORS: [(&str, u32, &[u64]); 11] = [
    ("token_embd.weight", 8, &[32, 4]),
    ("output_norm.weight", 0, &[32]),
    ("blk.0.attn_norm.weight", 0, &[32]),
    ("blk.0.ffn_norm.weight", 0, &[32]),
    ("blk.0.attn_q.weight", 2, &[32, 32]),
    ("blk.0.attn_k.weight", 3, &[32, 16]),
    ("blk.0.attn_v.weight", 6, &[32, 16]),
    ("blk.0.attn_output.weight", 7, &[32, 32]),
    ("blk.0.ffn_gate.weight", 1, &[32, 32]),
    ("blk.0.ffn_up.weight", 30, &[32, 32]),
    ("blk.0.ffn_down.weight", 8, &[32, 32]),
];

fn text(f: &mut Vec<u8>, s: &str) {
    f.extend((s.len() as u64).to_le_bytes());
    f.extend(s.as_bytes());
}

fn strings(f: &mut Vec<u8>, key: &str, all: &[&str]) {
    text(f, key);
    f.extend([9u32.to_le_bytes(), 8u32.to_le_bytes()].concat());
    f.extend((all.len() as u64).to_le_bytes());
    all.iter().for_each(|s| text(f, s));
}

fn sound() -> Vec<u8> {
    let numbers = [
        ("block_count", 1),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 8),
        ("context_length", 64),
    ];
    let mut f = b"GGUF".to_vec();
    f.extend(3u32.to_le_bytes());
    f.extend((TENSORS.len() as u64).to_le_bytes());
    f.extend((numbers.len() as u64 + 6).to_le_bytes());
    for (key, value) in [("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")] {
        text(&mut f, key);
        f.extend(8u32.to_le_bytes());
        text(&mut f, value);
    }
    for (key, n) in numbers {
        text(&mut f, &format!("llama.{key}"));
        f.extend([4u32.to_le_bytes(), u32::to_le_bytes(n)].concat());
    }
    text(&mut f, "llama.attention.layer_norm_rms_epsilon");
    f.extend([6u32.to_le_bytes(), 1e-5f32.to_le_bytes()].concat());
    text(&mut f, "tokenizer.ggml.pre");
    f.extend(8u32.to_le_bytes());
    text(&mut f, "gpt-2");
    strings(&mut f, "tokenizer.ggml.tokens", &["a", "b", "ab", "<s>"]);
    strings(&mut f, "tokenizer.ggml.merges", &["a b"]);
    let (mut at, mut data) = (0u64, 0);
    for (name, kind, shape) in TENSORS {
        text(&mut f, name);
        f.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|n| f.extend(n.to_le_bytes()));
        f.extend(kind.to_le_bytes());
        f.extend(at.to_le_bytes());
        // No block of 32 numbers is longer than 32 numbers of four bytes.
        let end = at + shape.iter().product::<u64>() * 4;
        (at, data) = (end.next_multiple_of(32), end);
    }
    f.resize(f.len().next_multiple_of(32) + data as usize, 0);
    f
}

/// Files of other architectures, by llama.cpp's converter.
const OTHERS: [&[u8]; 5] = [
    include_bytes!("../golden/gguf_families/qwen3moe-q8.gguf"),
    include_bytes!("../golden/gguf_families/gemma3.gguf"),
    include_bytes!("../golden/gguf_families/phi3-long.gguf"),
    include_bytes!("../golden/gguf_families/deepseek3.gguf"),
    include_bytes!("../golden/gguf_families/gpt-oss-mxfp4.gguf"),
];

/// A file in which something is changed.
pub fn input(d: &mut Draws) -> Vec<u8> {
    let sound = match d.below(9) {
        i @ 0..5 => OTHERS[i].to_vec(),
        _ => sound(),
    };
    // What stands before the numbers decides: keys, a vocabulary of some hundred bytes, names and shapes.
    let head = if sound.len() > 10_000 { 8000 } else { 1400.min(sound.len() - sound.len() / 2) };
    let mut made = bytes(sound[..head].to_vec(), d);
    made.extend(&sound[head..]);
    made
}

/// Reads all that a file shows.
pub fn run(folder: &Path) -> Run {
    let path = folder.join("model.gguf");
    Box::new(move |input| {
        fs::write(&path, input).map_err(|e| e.to_string())?;
        let (reading, weights) = gguf::open(&path)?;
        for t in reading.config.tensors() {
            let read = weights.tensor(&t.name).expect("it was checked");
            assert_eq!(read.shape, t.shape);
            assert_eq!(read.bytes.len(), t.shape.iter().product::<usize>() * read.dtype.bytes());
        }
        if let Some(Storage::Each(kept)) = &reading.config.packed {
            for (name, narrow) in kept.iter() {
                for part in [Part::Codes, Part::Scales] {
                    assert!(weights.tensor(&part.of(name)).is_some(), "{name} {narrow:?}");
                }
            }
        }
        let texts = gguf::texts(&path)?;
        Tokenizer::open(texts.path()).map(drop).map_err(|e| e.to_string())
    })
}
