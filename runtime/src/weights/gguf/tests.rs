//! Files made by hand: what is read, and what is refused.

use super::*;
use crate::source::WeightSource;
use astrai_ir::Code;
use astrai_ir::narrow::Part;
use proptest::prelude::*;

/// A file of three keys and one tensor `[2, 32]` of Q8_0.
fn small() -> Vec<u8> {
    let mut f = b"GGUF".to_vec();
    let text = |f: &mut Vec<u8>, s: &str| {
        f.extend((s.len() as u64).to_le_bytes());
        f.extend(s.as_bytes());
    };
    f.extend(3u32.to_le_bytes());
    f.extend(1u64.to_le_bytes());
    f.extend(3u64.to_le_bytes());
    text(&mut f, "general.architecture");
    f.extend(8u32.to_le_bytes());
    text(&mut f, "llama");
    text(&mut f, "list");
    f.extend(9u32.to_le_bytes());
    f.extend(4u32.to_le_bytes());
    f.extend(2u64.to_le_bytes());
    f.extend([7u32.to_le_bytes(), 8u32.to_le_bytes()].concat());
    text(&mut f, "text");
    f.extend(9u32.to_le_bytes());
    f.extend(8u32.to_le_bytes());
    f.extend(2u64.to_le_bytes());
    text(&mut f, "a");
    f.extend(1u64.to_le_bytes());
    f.push(0xff);
    text(&mut f, "blk.0.attn_q.weight");
    f.extend(2u32.to_le_bytes());
    f.extend([32u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
    f.extend(8u32.to_le_bytes());
    f.extend(0u64.to_le_bytes());
    f.resize(f.len().next_multiple_of(32), 0);
    for row in 0..2u8 {
        f.extend(half::f16::from_f32(0.5).to_le_bytes());
        f.extend((0..32).map(|i| i + row * 32));
    }
    f
}

fn opened(bytes: &[u8]) -> Result<Gguf, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&path).map_err(|e| e.to_string())
}

#[test]
fn keys_and_numbers_are_read_and_rows_put_in_order() {
    let file = opened(&small()).unwrap();
    assert_eq!(file.metadata()["list"], serde_json::json!([7, 8]));
    assert_eq!(file.texts("text").unwrap().collect::<Vec<_>>(), ["a", "\u{fffd}"]);
    assert!(file.texts("list").is_none() && !file.metadata().contains_key("text"));
    assert_eq!(file.shape("blk.0.attn_q.weight"), Some(&[2, 32][..]));
    assert_eq!(file.floats("blk.0.attn_q.weight").unwrap()[33], 16.5);
    let source = OfGguf::new(
        file,
        Box::new(|name| InFile::of(name, &Layers { interleaved: Some([1, 1]), ..Layers::default() })),
    );
    let t = source.tensor("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_eq!((t.dtype, &t.shape[..], DType::F32.decode(&t.bytes[4..8])), (DType::F32, &[2, 32][..], 0.5));
    let part = |part: Part| source.tensor(&part.of("model.layers.0.self_attn.q_proj.weight"));
    let (codes, scales) = (part(Part::Codes).unwrap(), part(Part::Scales).unwrap());
    assert_eq!((codes.dtype, &codes.shape[..], codes.bytes[33]), (DType::I8, &[2, 32][..], 33));
    assert_eq!(
        (scales.dtype, &scales.shape[..], DType::F16.decode(&scales.bytes[2..])),
        (DType::F16, &[2, 1][..], 0.5)
    );
    assert!(part(Part::Offsets).is_none());
}

/// A file of these tensors: name, type, shape outermost first, bytes.
fn of_tensors(tensors: &[(&str, u32, &[u64], Vec<u8>)]) -> Vec<u8> {
    let mut f = b"GGUF".to_vec();
    f.extend(3u32.to_le_bytes());
    f.extend((tensors.len() as u64).to_le_bytes());
    f.extend(0u64.to_le_bytes());
    let mut at = 0u64;
    for (name, kind, shape, bytes) in tensors {
        f.extend((name.len() as u64).to_le_bytes());
        f.extend(name.as_bytes());
        f.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|n| f.extend(n.to_le_bytes()));
        f.extend(kind.to_le_bytes());
        f.extend(at.to_le_bytes());
        at = (at + bytes.len() as u64).next_multiple_of(32);
    }
    for (.., bytes) in tensors {
        f.resize(f.len().next_multiple_of(32), 0);
        f.extend(bytes);
    }
    f
}

#[test]
fn matrices_of_experts_are_transposed_and_gates_alternate_with_what_they_let_through() {
    let numbers =
        |from: u32, count: u32| (from..from + count).flat_map(|x| (x as f32).to_le_bytes()).collect();
    // Q8_0: a scale of 1, then codes.
    let eighths = |from: u8| [&[0, 0x3c][..], &(from..from + 32).collect::<Vec<_>>()].concat();
    let name = |of: &str| format!("blk.0.ffn_{of}");
    let [gate, up, down] = ["gate_exps.weight", "up_exps.weight", "down_exps.weight"].map(name);
    let [gate_bias, up_bias] = ["gate_exps.bias", "up_exps.bias"].map(name);
    let file = opened(&of_tensors(&[
        (&gate, 0, &[2, 1, 3], numbers(0, 6)),
        (&up, 0, &[2, 1, 3], numbers(10, 6)),
        (&down, 0, &[1, 2, 3], numbers(20, 6)),
        (&gate_bias, 8, &[1, 32], eighths(0)),
        (&up_bias, 8, &[1, 32], eighths(50)),
        ("output_norm.weight", 8, &[32], eighths(3)),
    ]));
    let source = OfGguf::new(file.unwrap(), Box::new(|name| InFile::of(name, &Layers::default())));
    let read = |of: &str| {
        let t = source.tensor(&format!("model.layers.0.mlp.experts.{of}")).unwrap();
        let n = t.dtype.bytes();
        (t.shape.clone(), t.bytes.chunks(n).map(|x| t.dtype.decode(x)).collect::<Vec<_>>())
    };
    let pairs = vec![0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0, 4.0, 14.0, 5.0, 15.0];
    assert_eq!(read("gate_up_proj"), (vec![2, 3, 2], pairs));
    assert_eq!(read("down_proj"), (vec![1, 3, 2], vec![20.0, 23.0, 21.0, 24.0, 22.0, 25.0]));
    let (shape, biases) = read("gate_up_proj_bias");
    assert_eq!((shape, &biases[..4], biases.len()), (vec![1, 64], &[0.0, 50.0, 1.0, 51.0][..], 64));
    let norm = source.tensor("model.norm.weight").unwrap();
    assert_eq!((norm.bytes.len(), norm.dtype.decode(&norm.bytes[4..])), (32 * 4, 4.0));
}

#[test]
fn what_is_wrong_is_one_line() {
    let good = small();
    let with = |at: usize, bytes: &[u8]| {
        let mut f = good.clone();
        f[at..at + bytes.len()].copy_from_slice(bytes);
        opened(&f).unwrap_err()
    };
    let at = |what: &[u8]| good.windows(what.len()).position(|w| w == what).unwrap();
    let (list, text) = (at(b"list"), at(b"text"));
    let tensor = at(b"blk.0.attn_q.weight") + 19;
    for (line, says) in [
        (with(0, b"GGML"), "does not begin"),
        (with(4, &[1]), "version 1"),
        (with(8, &[9]), "0 dimensions"),
        (with(16, &[0xff; 8]), "ends too early"),
        (with(list, b"text"), "key \"text\" is there twice"),
        (with(text, b"list"), "key \"list\" is there twice"),
        (with(text + 12, &[0xff; 8]), "does not fit"),
        (with(text + 20, &[0xff; 8]), "ends too early"),
        (with(tensor, &[9]), "9 dimensions"),
        (with(tensor + 4, &[31]), "no whole blocks of Q8_0"),
        (with(tensor + 12, &[0xff; 7]), "lies beyond"),
        (with(tensor + 20, &[99]), "of type 99"),
        (with(tensor + 24, &[8]), "multiple of the alignment"),
        (opened(&good[..good.len() - 1]).unwrap_err(), "beyond the end"),
        (opened(b"GGUF").unwrap_err(), "no GGUF file"),
    ] {
        assert!(line.contains(says) && line.lines().count() == 1, "{says}: {line}");
    }
}

/// Codes, scales and offsets of blocks.
fn made(blocks: &blocks::Blocks, bytes: &[u8]) -> [Vec<u8>; 3] {
    let mut made = blocks.sizes(bytes.len()).map(|size| vec![0; size]);
    blocks.parts([bytes].into_iter(), made.each_mut().map(Vec::as_mut_slice));
    made
}

proptest! {
    /// Of every type that stays codes.
    #[test]
    fn codes_stand_for_the_numbers_of_their_block(bytes in proptest::collection::vec(any::<u8>(), 256)) {
        for blocks in blocks::TABLE.iter() {
            let Some(of) = blocks.codes() else { continue };
            let count = if blocks.bytes(&[32]).is_some() { 32 } else { 256 };
            let block = &bytes[..blocks.bytes(&[count]).unwrap() as usize];
            let numbers = blocks.floats(block);
            let most = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
            if numbers.iter().any(|x| !x.is_finite()) || most > 1e4 {
                continue;
            }
            let parts = made(blocks, block);
            let real = |i: usize, at: usize| {
                let n = of.scales.bytes();
                parts[i].get(at * n..at * n + n).map_or(0.0, |bytes| of.scales.decode(bytes))
            };
            for (i, want) in numbers.iter().enumerate() {
                let code = match of.code {
                    Code::Int4 => f64::from(parts[0][i / 2] >> (4 * (i % 2)) & 15) - 8.0,
                    Code::Fp4 => super::super::mxfp4::value(parts[0][i / 2] >> (4 * (i % 2)) & 15),
                    _ => f64::from(parts[0][i] as i8),
                };
                let got = code * real(1, i / of.group) + real(2, i / of.group);
                prop_assert!((got - f64::from(*want)).abs() <= 1e-5 * f64::from(most), "{} {i}: {got}, not {want}", blocks.name);
            }
        }
    }

    /// Whatever a file holds, opening it answers.
    #[test]
    fn any_change_is_answered(at in 0usize..256, byte: u8, cut in 0usize..300) {
        let mut f = small();
        let n = f.len();
        f[at % n] = byte;
        f.truncate(n.saturating_sub(cut));
        if let Ok(file) = opened(&f) {
            file.head.tensors.values().for_each(|t| {
                made(t.blocks, &file.map[t.begin..t.end]);
            });
            file.head.tensors.keys().for_each(|name| drop(file.floats(name)));
        }
    }
}
