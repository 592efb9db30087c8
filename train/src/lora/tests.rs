//! What is read, resolved and refused.

use super::*;
use astrai_runtime::{Factors, Value, WeightSource};
use std::collections::HashMap;

const MODEL: &str = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16, "tie_word_embeddings": true}"#;

fn model() -> ModelConfig {
    ModelConfig::parse(MODEL, "model").unwrap().config
}

fn parse(more: &str) -> Result<Lora, String> {
    Lora::parse(&format!(
        r#"{{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "loftq_config": {{}}, {more}}}"#
    ))
}

fn modules(more: &str) -> Vec<String> {
    parse(more).unwrap().adapter(&model()).unwrap().modules.into_keys().collect()
}

#[test]
fn targets_are_read_as_peft_reads_them() {
    let of = |layer: usize, end: &str| format!("model.layers.{layer}.{end}");
    let q = |layers: &[usize]| layers.iter().map(|l| of(*l, "self_attn.q_proj")).collect::<Vec<_>>();
    assert_eq!(modules(r#""target_modules": ["q_proj"]"#), q(&[0, 1, 2]));
    assert_eq!(modules(r#""target_modules": ["model.layers.1.self_attn.q_proj"]"#), q(&[1]));
    assert_eq!(modules(r#""target_modules": ".*[02]\\.self_attn\\.q_proj""#), q(&[0, 2]));
    assert_eq!(modules(r#""target_modules": "all-linear""#).len(), 21);
    // A name ends behind a dot only; an expression is of the whole name.
    for none in [r#"["_proj"]"#, r#""q_proj""#, r#"["embed_tokens"]"#, r#"["q_proj", "gate"]"#] {
        let e = parse(&format!(r#""target_modules": {none}"#)).unwrap().adapter(&model()).unwrap_err();
        assert!(e.contains("names no linear layer") && e.contains("q_proj"), "{e}");
    }
}

#[test]
fn ranks_and_scales_differ_by_pattern() {
    let lora = parse(
        r#""target_modules": ["q_proj", "v_proj"], "use_rslora": true, "rank_pattern": {"layers.1.*.v_proj": 16}, "alpha_pattern": {"v_proj": 2}"#,
    );
    let adapter = lora.unwrap().adapter(&model()).unwrap();
    let of = |name: &str| adapter.modules[name];
    assert_eq!(of("model.layers.1.self_attn.v_proj"), Factors { rank: 16, scale: 0.5 });
    assert_eq!(of("model.layers.0.self_attn.v_proj"), Factors { rank: 4, scale: 1.0 });
    assert_eq!(of("model.layers.0.self_attn.q_proj"), Factors { rank: 4, scale: 4.0 });
}

#[test]
fn what_is_not_supported_is_named() {
    for (more, says) in [
        (r#""target_modules": ["q_proj"], "modules_to_save": ["lm_head"]"#, "modules_to_save: "),
        (r#""target_modules": ["q_proj"], "bias": "all""#, "bias: "),
        (r#""target_modules": ["q_proj"], "fan_in_fan_out": true"#, "fan_in_fan_out: "),
        (r#""target_modules": ["q_proj"], "layers_to_transform": [0]"#, "layers_to_transform: "),
        (r#""target_modules": ["q_proj"], "init_lora_weights": "pissa""#, "init_lora_weights: "),
        (r#""target_modules": ["q_proj"], "rank_pattern": {"q_proj": 0}"#, "rank_pattern: "),
        (r#""target_modules": ["q_proj"], "use_dora": 1"#, "use_dora: "),
        (r#""target_modules": ["q_proj"], "lora_alpha": "8""#, "lora_alpha: "),
        (r#""target_modules": ["q_proj"], "something_new": 3"#, "something_new: 3 is not supported"),
        (r#""target_modules": []"#, "target_modules: "),
        (r#""bias": "none""#, "target_modules: "),
        (r#""target_modules": ["q_proj"], "r": 0"#, "r: "),
        (r#""target_modules": ["q_proj"], "peft_type": "IA3""#, "peft_type: "),
    ] {
        let e = parse(more).unwrap_err();
        assert!(e.starts_with(says) && !e.contains('\n'), "{more}: {e}");
    }
    assert!(
        parse(r#""target_modules": "(""#)
            .unwrap()
            .adapter(&model())
            .unwrap_err()
            .contains("no regular expression")
    );
    let drops = parse(r#""target_modules": ["q_proj"], "lora_dropout": 0.05"#).unwrap();
    assert!(drops.check_trainable().unwrap_err().starts_with("lora_dropout: 0.05"));
}

#[test]
fn the_text_reads_back() {
    for more in [
        r#""target_modules": ["q_proj", "v_proj"], "use_dora": true, "base_model_name_or_path": "../m""#,
        r#""target_modules": ".*q_proj", "lora_dropout": 0.1, "rank_pattern": {"q_proj": 2}, "lora_alpha": 2.5"#,
    ] {
        let lora = parse(more).unwrap();
        assert_eq!(Lora::parse(&lora.text(&lora.adapter(&model()).unwrap())).unwrap(), lora);
    }
    let all = parse(r#""target_modules": "all-linear""#).unwrap();
    let adapter = all.adapter(&model()).unwrap();
    assert_eq!(Lora::parse(&all.text(&adapter)).unwrap().adapter(&model()).unwrap(), adapter);
}

/// A model with fresh factors is the model: B is zero, and magnitudes are the norms of rows.
#[test]
fn fresh_factors_change_nothing() {
    let lora = parse(r#""target_modules": ["q_proj"], "use_dora": true"#).unwrap();
    let (config, adapter) = (model(), lora.adapter(&model()).unwrap());
    let weight = "model.layers.0.self_attn.q_proj.weight";
    let w: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
    let base = HashMap::from([(weight.to_string(), Value::f32(&[8, 8], &w))]);
    let fresh = Fresh::new(&config, &adapter, &base, 1).unwrap();
    let read = |name: &str| {
        let t =
            fresh.tensor(&format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{name}")).unwrap();
        (t.shape.clone(), Value { dtype: t.dtype, shape: t.shape, bytes: t.bytes.into_owned() }.to_f32())
    };
    let ((a_shape, a), (b_shape, b), (_, m)) = (read("A.weight"), read("B.weight"), read("magnitude_vector"));
    assert_eq!((a_shape, b_shape, m.len()), (vec![4, 8], vec![8, 4], 8));
    assert!(a.iter().any(|x| *x != 0.0) && b.iter().all(|x| *x == 0.0));
    let norm = w[8..16].iter().map(|x| x * x).sum::<f32>().sqrt();
    assert!((m[1] - norm).abs() < 1e-6);
}
