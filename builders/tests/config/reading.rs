//! Configurations read as intended: families, spellings, rope layouts, counts, checkpoint tensors, saving.

use crate::models::{ASTRAI, LLAMA, QWEN3};
use crate::shared::shared;
use astrai_builders::Reading;
use astrai_builders::config::{
    Init, InitStyle, MlpSpec, ModelConfig, QkNorm, RopeLayout, RopeScaling, TensorSpec,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn read(text: &str) -> Reading {
    ModelConfig::parse(text, "config.json").unwrap_or_else(|e| panic!("{e}"))
}

/// `text` with keys replaced; `null` in `changes` stays `null`.
fn with(text: &str, changes: Value) -> String {
    let mut value: Value = serde_json::from_str(text).unwrap();
    let map = value.as_object_mut().unwrap();
    for (k, v) in changes.as_object().unwrap() {
        map.insert(k.clone(), v.clone());
    }
    value.to_string()
}

#[test]
fn llama_resolves() {
    let r = read(LLAMA);
    let c = &r.config;
    assert_eq!((r.warnings.len(), r.unknown.len()), (0, 0), "{:?}", r.warnings);
    assert_eq!(c.model_type, "llama");
    assert_eq!((c.heads, c.kv_heads, c.head_dim, c.num_layers, c.layers.len()), (4, 2, 32, 2, 2));
    assert_eq!((c.bos, c.eos.as_slice(), c.pad), (Some(1), &[2][..], Some(0)));
    let a = &c.layers[0].attention;
    assert_eq!(
        (a.qkv_bias, a.o_bias, a.gate, a.qk_norm, a.window),
        (false, false, false, QkNorm::None, None)
    );
    assert_eq!((a.rope.theta, a.rope.dim, a.rope.layout), (500000.0, 32, RopeLayout::Half));
    assert!((a.scale - 1.0 / 32f64.sqrt()).abs() < 1e-15);
    assert_eq!(c.layer_kinds().1, [0, 0]);
    let biased = read(&with(LLAMA, json!({"attention_bias": true, "mlp_bias": true}))).config;
    let l = &biased.layers[1];
    assert!(l.attention.qkv_bias && l.attention.o_bias && matches!(l.mlp, MlpSpec::Dense { bias: true, .. }));
    let extra = 2 * (4 * 32 + 2 * 2 * 32 + 64 + 2 * 112 + 64);
    assert_eq!(biased.parameter_count(), c.parameter_count() + extra);
}

#[test]
fn qwen3_resolves_with_windows_and_the_newer_rope_layout() {
    let c = read(QWEN3).config;
    let windows: Vec<_> = c.layers.iter().map(|l| l.attention.window).collect();
    assert_eq!(windows, [None, Some(8), Some(8)]);
    assert_eq!(c.layer_kinds().1, [0, 1, 1]);
    assert_eq!(c.layers[0].attention.qk_norm, QkNorm::BeforeRope);
    assert_eq!(c.eos, [2, 5]);
    let rope = &c.layers[0].attention.rope;
    assert_eq!(rope.theta, 1e6);
    assert!(
        matches!(&rope.scaling, RopeScaling::Yarn(y) if y.original_max_positions == 64 && y.beta_fast == 32.0)
    );
    let listed = json!({"layer_types": ["sliding_attention", "full_attention", "full_attention"]});
    let c = read(&with(QWEN3, listed)).config;
    assert_eq!(c.layers[0].attention.window, Some(8));
    assert_eq!(c.layers[2].attention.window, None);
    let c = read(&with(QWEN3, json!({"use_sliding_window": false}))).config;
    assert!(c.layers.iter().all(|l| l.attention.window.is_none()));
}

#[test]
fn astrai_reads_both_spellings_alike() {
    let newer = r#"{"model_type": "autoregressive_lm", "hidden_size": 64, "intermediate_size": 112,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": {"type": "ntk", "factor": 4.0},
        "tie_word_embeddings": true, "use_gated_attention": true, "use_qk_norm": true, "vocab_size": 320,
        "n_routed_experts": null, "topk_method": "greedy", "attn_type": "gqa", "ffn_type": "mlp"}"#;
    let (a, b) = (read(ASTRAI), read(newer));
    assert_eq!(a.config, b.config);
    assert!(a.warnings.is_empty() && b.warnings.is_empty());
    let c = a.config;
    let attention = &c.layers[0].attention;
    assert_eq!((attention.qk_norm, attention.gate), (QkNorm::AfterRope, true));
    assert_eq!(attention.rope.layout, RopeLayout::Interleaved);
    assert_eq!(c.init_style, InitStyle::ScaledOutputs);
    let std = |name: &str| c.tensors().into_iter().find(|t| t.name == name).map(|t| t.init);
    assert_eq!(std("layers.1.attention.o_proj.weight"), Some(Init::Normal(0.02 / 2.0)));
    assert_eq!(std("layers.1.mlp.down.weight"), Some(Init::Normal(0.02 / 2.0)));
    assert_eq!(std("layers.1.mlp.up.weight"), Some(Init::Normal(0.02)));
    assert_eq!(std("norm.weight"), Some(Init::Ones));
    let both = with(ASTRAI, json!({"hidden_size": 64}));
    assert_eq!(read(&both).config, c);
}

#[test]
fn inference_falls_back_to_architectures() {
    let mut value: Value = serde_json::from_str(LLAMA).unwrap();
    value.as_object_mut().unwrap().remove("model_type");
    assert_eq!(read(&value.to_string()).config, read(LLAMA).config);
    assert_eq!(read(&format!("\u{feff}{LLAMA}")).config, read(LLAMA).config);
}

#[test]
fn rope_without_a_type_is_the_default() {
    let plain = read(&with(LLAMA, json!({"rope_scaling": null}))).config;
    assert_eq!(read(&with(LLAMA, json!({"rope_scaling": {"partial_rotary_factor": 1.0}}))).config, plain);
    assert_eq!(read(&with(LLAMA, json!({"rope_scaling": {"rope_type": "default"}}))).config, plain);
    let newer =
        json!({"rope_scaling": null, "rope_theta": null, "rope_parameters": {"rope_theta": 500000.0}});
    assert_eq!(read(&with(LLAMA, newer)).config, plain);
}

#[test]
fn rows_of_law_four() {
    let quiet = json!({"use_cache": true, "transformers_version": "4.40", "resid_pdrop": 0.0, "sliding_window": null,
        "quantization_config": null, "num_experts": 0, "layer_types": ["full_attention", "full_attention"]});
    assert_eq!(read(&with(LLAMA, quiet)).warnings, Vec::<String>::new());
    let r = read(&with(LLAMA, json!({"foo": 1, "attention_dropout": 0.1, "rope_scaling": {"bar": 2}})));
    assert_eq!(r.unknown, ["rope_scaling.bar", "foo"]);
    assert!(r.warnings.iter().any(|w| w == "config.json: key `foo` is not known and was ignored"), "{r:?}");
    assert!(r.warnings.iter().any(|w| w.contains("attention_dropout") && w.contains("0.1")), "{r:?}");
    let e = r.deny_unknown().err().map(|e| e.to_string()).unwrap_or_default();
    assert!(e.contains("rope_scaling.bar, foo"), "{e}");
    let dropout = read(&with(LLAMA, json!({"attention_dropout": 0.1})));
    assert!(dropout.deny_unknown().is_ok(), "a dropout is known");
}

#[test]
fn saving_and_parsing_gives_the_same() {
    let mistral = with(
        LLAMA,
        json!({"model_type": "mistral", "architectures": null, "sliding_window": 8,
        "rope_scaling": {"type": "linear", "factor": 2}, "hidden_act": "gelu_pytorch_tanh"}),
    );
    let qwen2 = with(
        LLAMA,
        json!({"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0,
        "attention_factor": 1.25, "truncate": false, "mscale": 0.7, "mscale_all_dim": 1.0}, "eos_token_id": null}),
    );
    let biased = with(LLAMA, json!({"attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true}));
    for text in [LLAMA, QWEN3, ASTRAI, &mistral, &qwen2, &biased] {
        let c = read(text).config;
        let again = read(&c.save().to_string());
        assert_eq!(again.config, c);
        assert!(again.warnings.is_empty(), "{:?}", again.warnings);
    }
}

#[test]
fn published_parameter_counts() {
    let Some(shared) = shared() else { return };
    for (name, count) in [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b-v0.1", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gpt-oss-120b", 116_829_156_672),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("olmo-2-1b", 1_484_916_736),
        ("glm-4-9b", 9_400_279_040),
        ("phi-3-mini", 3_821_079_552),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-1b", 999_885_952),
    ] {
        let r =
            ModelConfig::read(&shared.join(format!("configs/{name}.json"))).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(r.config.parameter_count(), count, "{name}");
        let tensors = r.config.tensors();
        let parameters = tensors.iter().filter(|t| !t.fixed).map(TensorSpec::elements);
        assert_eq!(parameters.sum::<u64>(), count, "{name}");
        assert!(r.warnings.is_empty(), "{:?}", r.warnings);
    }
}

/// Names and shapes in the header of a safetensors file.
fn header(path: &std::path::Path) -> BTreeMap<String, Vec<usize>> {
    let bytes = std::fs::read(path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let map: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let shape =
        |v: &Value| v["shape"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect();
    map.iter().filter(|(k, _)| *k != "__metadata__").map(|(k, v)| (k.clone(), shape(v))).collect()
}

#[test]
fn tensors_are_those_of_the_golden_checkpoints() {
    let Some(shared) = shared() else { return };
    let names = ["llama", "llama3_rope", "mistral", "qwen2", "qwen3", "astrai_gqa", "astrai_gqa_older"];
    let later = [
        "astrai_strategies",
        "olmo2",
        "glm4",
        "phi3",
        "gemma2",
        "gemma3",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "astrai_mla_moe",
    ];
    for name in names.into_iter().chain(later) {
        let dir = shared.join("golden").join(name);
        let r = ModelConfig::read(&dir).unwrap_or_else(|e| panic!("{e}"));
        assert!(r.warnings.is_empty(), "{:?}", r.warnings);
        let ours: BTreeMap<_, _> = r.config.tensors().into_iter().map(|t| (t.name, t.shape)).collect();
        assert_eq!(ours, header(&dir.join("model.safetensors")), "{name}");
        assert_eq!(ModelConfig::parse(&r.config.save().to_string(), "saved").unwrap().config, r.config);
    }
}

#[test]
fn other_published_models_are_refused_by_name() {
    let e = ModelConfig::parse(r#"{"model_type": "mamba2"}"#, "config.json").unwrap_err().to_string();
    assert!(e.contains("key `model_type` is \"mamba2\"") && e.contains("known model types:"), "{e}");
}
