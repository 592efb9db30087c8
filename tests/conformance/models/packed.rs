//! Published checkpoints with packed weights: those that a reference wrote against its numbers, and
//! gpt-oss with experts in MXFP4, as it is published, against the same model with the numbers that they stand for.

use crate::machines::{host, on};
use astrai_builders::{ModelConfig, Program};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::calibrate::calibrate;
use astrai_engine::export::{Form, export, rounded};
use astrai_engine::golden::packed::rows as golden;
use astrai_engine::machine::Kind;
use astrai_engine::model::Model;
use astrai_engine::unheard;
use astrai_ir::{DType, Narrow};
use astrai_runtime::Value;
use astrai_runtime::weights::write;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const CONFIG: &str = r#"{"model_type": "gpt_oss", "head_dim": 8, "hidden_size": 32, "intermediate_size": 64,
    "max_position_embeddings": 128, "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_local_experts": 3, "sliding_window": 4, "vocab_size": 50}"#;

struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
}

/// Writes a model with its experts packed, and one with the same numbers in f32.
fn folders() -> [PathBuf; 2] {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packed");
    let config = ModelConfig::parse(CONFIG, "config.json").unwrap().config;
    let mut draw = Draw(5);
    let (mut packed, mut plain) = (Vec::<(String, Value)>::new(), Vec::<(String, Value)>::new());
    for t in config.tensors() {
        let &[groups, k, n] = &t.shape[..] else {
            let values: Vec<f32> =
                (0..t.elements()).map(|_| (draw.next() % 1000) as f32 / 2000.0 - 0.25).collect();
            let v = Value::f32(&t.shape, &values);
            packed.push((t.name.clone(), v.clone()));
            plain.push((t.name, v));
            continue;
        };
        let blocks: Vec<u8> = (0..groups * n * k / 2).map(|_| draw.next() as u8).collect();
        let scales: Vec<u8> = (0..groups * n * k / 32).map(|_| 120 + (draw.next() % 5) as u8).collect();
        let number = |e: usize, i: usize, r: usize| {
            let at = (e * n + r) * k + i;
            let four = blocks[at / 2] >> (4 * (at % 2)) & 15;
            let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(four % 8)];
            let sign = if four < 8 { 1.0 } else { -1.0 };
            sign * size * 2f32.powi(i32::from(scales[at / 32]) - 127)
        };
        let values: Vec<f32> = (0..groups * k * n).map(|x| number(x / (k * n), x / n % k, x % n)).collect();
        plain.push((t.name.clone(), Value::f32(&t.shape, &values)));
        let bytes = |shape: Vec<usize>, bytes| Value { dtype: DType::U8, shape, bytes };
        packed.push((format!("{}_blocks", t.name), bytes(vec![groups, n, k / 32, 16], blocks.clone())));
        packed.push((format!("{}_scales", t.name), bytes(vec![groups, n, k / 32], scales.clone())));
    }
    let quantised = CONFIG
        .replace("{\"model_type", "{\"quantization_config\": {\"quant_method\": \"mxfp4\"}, \"model_type");
    [("mxfp4", quantised, packed), ("f32", CONFIG.to_string(), plain)].map(|(name, text, tensors)| {
        let dir = root.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("config.json"), text).unwrap();
        let all = tensors.iter().map(|(n, v)| (n.as_str(), v.dtype, &v.shape[..], &v.bytes[..]));
        write(&dir.join("model.safetensors"), all, &BTreeMap::new()).unwrap();
        dir
    })
}

/// Tensors, and logits of widened weights and of codes, where weights can stay codes.
#[test]
fn quantised_checkpoints_are_the_references() {
    for (name, codes) in [
        ("fp8_block", false),
        ("fp8_channel", true),
        ("gptq", true),
        ("gptq_act_order", false),
        ("awq", true),
    ] {
        let Some(folder) = crate::cases::case(&format!("quantized/{name}")) else { continue };
        for device in [Kind::Cpu, Kind::Interpreter] {
            let machine = on(device, 2);
            let rows = golden(&folder, &machine, &mut unheard).unwrap();
            assert!(rows.len() >= 3 && rows.iter().all(|r| r.verdict == "ok"), "{name} {rows:#?}");
            assert_eq!(rows.iter().any(|r| r.check == "logits (codes)"), codes, "{name} {rows:#?}");
        }
    }
}

/// What `astrai quantize` writes is read as what rounding at load makes, in shards too; its other files and keys are the model's.
#[test]
fn what_is_rounded_and_written_is_what_is_rounded_when_loaded() {
    let Some(folder) = crate::cases::case("llama") else { return };
    let ids: Vec<i64> = (0..24).map(|i| i * 7 % 50).collect();
    let machine = host(2);
    let logits = |model: &Model| {
        let mut session = model.session(&Program::full(1, 24), DType::F32, &machine, &mut |_, _| {}).unwrap();
        let batch = RaggedBatch::new(&[&ids[..]], model.config.vocab_size).unwrap();
        session.run(&batch.inputs(session.inputs())).unwrap().remove(0).1.to_f32()
    };
    let dir = tempfile::tempdir().unwrap();
    // Offsets of a type with fewer digits are rounded when they are made at load, and exact in a checkpoint; inputs of later layers may
    // then be rounded to other integers.
    for (kind, tolerance) in
        [("int4", 0.0), ("int8", 0.0), ("fp8", 0.0), ("int8:asymmetric", 0.0), ("int4:asymmetric", 5e-2)]
    {
        let narrow = Narrow { head: None, ..kind.parse().unwrap() };
        let to = dir.path().join(kind);
        let form = Form { dtype: None, shard: 20 << 10, narrow: Some(narrow), codes: None };
        let model = Model::open(&folder, false).unwrap();
        let made = export(&model, &folder, &to, form, &mut unheard).unwrap();
        assert!(made.files > 1);
        let read = Model::open(&to, true).unwrap();
        assert!(read.warnings.is_empty() && read.config.narrow.is_none(), "{:?}", read.warnings);
        let kept = Narrow { scales: if narrow.offsets { DType::F32 } else { narrow.scales }, ..narrow };
        assert_eq!(read.config.packed, Some(kept.into()), "{kind}");
        let (got, want) = (logits(&read), logits(&model.quantised(Some(narrow))));
        let top = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        let off = got.iter().zip(&want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off <= tolerance * top, "{kind}: {off} of {top}");
    }
}

/// Of a model whose experts are rounded as well, where there is one; on texts that it was not calibrated with.
#[test]
fn calibrated_models_are_nearer_than_those_rounded_to_nearest() {
    let machine = host(2);
    for case in ["llama", "qwen3_moe"] {
        let Some(folder) = crate::cases::case(case) else { continue };
        let model = Model::open(&folder, false).unwrap();
        let (vocab, mut draw) = (model.config.vocab_size as u64, Draw(3));
        let mut texts = |count: usize| -> Vec<Vec<i64>> {
            (0..count).map(|_| (0..24).map(|_| (draw.next() % vocab) as i64).collect()).collect()
        };
        let (seen, held) = (texts(40), texts(8));
        let logits = |model: &Model| {
            let program = Program::full(8, 24);
            let mut session = model.session(&program, DType::F32, &machine, &mut |_, _| {}).unwrap();
            let rows: Vec<&[i64]> = held.iter().map(Vec::as_slice).collect();
            let batch = RaggedBatch::new(&rows, model.config.vocab_size).unwrap();
            session.run(&batch.inputs(session.inputs())).unwrap().remove(0).1.to_f32()
        };
        let want = logits(&model);
        let dir = tempfile::tempdir().unwrap();
        for kind in ["int4", "int4:asymmetric"] {
            let narrow = Narrow { head: None, ..kind.parse().unwrap() };
            let names = rounded(&model.config, narrow).unwrap();
            assert_eq!(names.iter().any(|name| name.contains("experts.1.")), case == "qwen3_moe");
            let codes = calibrate(&model, (narrow, &names), &seen, &machine, &mut unheard).unwrap();
            assert!(codes.keys().eq(&names), "{case}");
            let off = [None, Some(&codes)].map(|codes| {
                let to = dir.path().join(format!("{kind}{}", codes.is_some()));
                let form = Form { dtype: None, shard: 1 << 30, narrow: Some(narrow), codes };
                export(&model, &folder, &to, form, &mut unheard).unwrap();
                let mut read = Model::open(&to, true).unwrap();
                // Inputs as they are: what is compared is the rounding of weights.
                read.config.packed = read.config.packed.map(|s| s.rounding(false));
                logits(&read).iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
            });
            assert!(off[1] < 0.9 * off[0], "{case} {kind}: {off:?}");
        }
    }
}

#[test]
fn packed_experts_are_the_numbers_they_stand_for() {
    let ids: Vec<i64> = (0..24).map(|i| i * 17 % 50).collect();
    for (device, storage) in
        [(Kind::Cpu, DType::F32), (Kind::Cpu, DType::BF16), (Kind::Interpreter, DType::F32)]
    {
        let logits = folders().map(|dir| {
            let model = Model::open(&dir, true).unwrap();
            assert!(model.warnings.is_empty(), "{:?}", model.warnings);
            assert_eq!(model.config.packed.is_some(), dir.ends_with("mxfp4"));
            let machine = on(device, 2);
            let mut session =
                model.session(&Program::full(1, 24), storage, &machine, &mut |_, _| {}).unwrap();
            let all = &session.program().plan.weights;
            assert_eq!(all.iter().any(|w| w.weight.name.ends_with("#codes")), dir.ends_with("mxfp4"));
            let batch = RaggedBatch::new(&[&ids[..]], 50).unwrap();
            session.run(&batch.inputs(session.inputs())).unwrap().remove(0).1.to_f32()
        });
        // Of codes a sum is that of its groups.
        let most = if storage == DType::F32 { 1e-5 } else { 3e-2 };
        let top = logits[1].iter().fold(0f32, |m, x| m.max(x.abs()));
        let off = logits[0].iter().zip(&logits[1]).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off <= most * top, "{device:?} {storage}: {off} of {top}");
        assert!(logits[0].iter().all(|x| x.is_finite()));
    }
}
