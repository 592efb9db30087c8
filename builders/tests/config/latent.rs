//! What latent attention resolves to, DeepSeek's and AstrAI's; what is refused; that saving keeps it.

use astrai_builders::config::{ConfigError, Hidden, ModelConfig, RopeKey, RopeLayout};
use astrai_builders::{Cache, Program, build};
use astrai_ir::{Code, DType, DType::*};
use serde_json::{Value, json};

/// A small configuration of a type, with keys replaced; `null` stays, `"-"` takes the key out.
fn text(model_type: &str, changes: Value) -> String {
    let mut value = json!({"model_type": model_type, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 48, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5});
    let own = match model_type {
        "autoregressive_lm" => json!({"attn_type": "mla", "num_key_value_heads": 2}),
        _ => json!({"q_lora_rank": 12, "v_head_dim": 5, "n_routed_experts": 16, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "first_k_dense_replace": 1}),
    };
    let map = value.as_object_mut().unwrap();
    for (k, v) in own.as_object().unwrap().iter().chain(changes.as_object().unwrap()) {
        match v.as_str() {
            Some("-") => _ = map.remove(k),
            _ => _ = map.insert(k.clone(), v.clone()),
        }
    }
    value.to_string()
}

fn parse(model_type: &str, changes: Value) -> Result<ModelConfig, ConfigError> {
    Ok(ModelConfig::parse(&text(model_type, changes), "config.json")?.config)
}

fn read(model_type: &str, changes: Value) -> ModelConfig {
    crate::read::read_again(&text(model_type, changes))
}

fn shape(c: &ModelConfig, name: &str) -> Option<Vec<usize>> {
    c.tensors().into_iter().find(|t| t.name == name).map(|t| t.shape)
}

#[test]
fn deepseek() {
    for model_type in ["deepseek_v2", "deepseek_v3"] {
        let c = read(model_type, json!({}));
        let a = &c.layers[0].attention;
        let l = a.latent.as_ref().unwrap();
        assert_eq!((l.q_rank, l.rank, l.nope, l.rope, l.value), (Some(12), 10, 6, 2, 5));
        assert_eq!((l.rope_key, l.norm_eps, c.norm_eps), (RopeKey::Shared, 1e-6, 1e-5));
        assert_eq!((c.heads, c.kv_heads, c.head_dim, a.rope.dim), (4, 4, 8, 2));
        assert_eq!((a.rope.layout, a.scale), (RopeLayout::Interleaved, 1.0 / 8f64.sqrt()));
        let attention = "model.layers.2.self_attn.";
        for (name, want) in [
            ("q_a_proj.weight", vec![12, 32]),
            ("q_a_layernorm.weight", vec![12]),
            ("q_b_proj.weight", vec![32, 12]),
            ("kv_a_proj_with_mqa.weight", vec![12, 32]),
            ("kv_a_layernorm.weight", vec![10]),
            ("kv_b_proj.weight", vec![44, 10]),
            ("o_proj.weight", vec![32, 20]),
        ] {
            assert_eq!(shape(&c, &format!("{attention}{name}")), Some(want), "{name}");
        }
        assert_eq!(shape(&c, &format!("{attention}q_proj.weight")), None);
        let whole = read(model_type, json!({"q_lora_rank": null, "attention_bias": true}));
        assert_eq!(shape(&whole, &format!("{attention}q_proj.weight")), Some(vec![32, 32]));
        assert_eq!(shape(&whole, &format!("{attention}kv_a_proj_with_mqa.bias")), Some(vec![12]));
        assert_eq!(shape(&whole, &format!("{attention}o_proj.bias")), Some(vec![32]));
    }
    let half = read("deepseek_v3", json!({"rope_interleave": false}));
    assert_eq!(half.layers[0].attention.rope.layout, RopeLayout::Half);
}

#[test]
fn yarn_scales_the_scores_too() {
    let scale = |scaling: Value| {
        read("deepseek_v3", json!({"rope_scaling": scaling})).layers[0].attention.scale * 8f64.sqrt()
    };
    let yarn = |all: f64| json!({"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale_all_dim": all});
    assert!((scale(yarn(1.0)) - (0.1 * 40f64.ln() + 1.0).powi(2)).abs() < 1e-12);
    assert!((scale(yarn(0.5)) - (0.05 * 40f64.ln() + 1.0).powi(2)).abs() < 1e-12);
    assert!((scale(yarn(0.0)) - 1.0).abs() < 1e-12);
}

#[test]
fn astrai() {
    let c = read("autoregressive_lm", json!({"use_qk_norm": true, "use_gated_attention": true}));
    let a = &c.layers[0].attention;
    let l = a.latent.as_ref().unwrap();
    assert_eq!((l.q_rank, l.rank, l.nope, l.rope, l.value), (None, 10, 6, 2, 8));
    assert_eq!((l.rope_key, l.norm_eps, a.rope.dim), (RopeKey::OfLatent, 1e-5, 2));
    assert!(!c.caches_latents());
    for (name, want) in [
        ("q_proj.weight", vec![32, 32]),
        ("kv_a_proj.weight", vec![10, 32]),
        ("kv_norm.weight", vec![10]),
        ("kv_b_proj.weight", vec![2 * 16, 10]),
        ("q_norm.weight", vec![8]),
        ("gate.weight", vec![32, 32]),
        ("o_proj.weight", vec![32, 32]),
    ] {
        assert_eq!(shape(&c, &format!("layers.1.attention.{name}")), Some(want), "{name}");
    }
}

/// One line that names the key, for whatever is half there or makes no sense.
#[test]
fn nonsense_is_refused_by_its_key() {
    let cases = [
        ("deepseek_v3", json!({"num_nextn_predict_layers": -1}), "`num_nextn_predict_layers` is -1"),
        ("deepseek_v3", json!({"kv_lora_rank": "-"}), "`kv_lora_rank` is missing"),
        ("deepseek_v3", json!({"kv_lora_rank": null}), "`kv_lora_rank` is missing"),
        ("deepseek_v3", json!({"kv_lora_rank": 0}), "`kv_lora_rank` is 0"),
        ("deepseek_v3", json!({"kv_lora_rank": -3}), "`kv_lora_rank` is -3"),
        ("deepseek_v3", json!({"kv_lora_rank": 1u64 << 40}), "`kv_lora_rank` is"),
        ("deepseek_v3", json!({"q_lora_rank": "-"}), "`q_lora_rank` is missing"),
        ("deepseek_v3", json!({"q_lora_rank": 0}), "`q_lora_rank` is 0"),
        ("deepseek_v3", json!({"qk_nope_head_dim": "-"}), "`qk_nope_head_dim` is missing"),
        ("deepseek_v3", json!({"qk_nope_head_dim": 1 << 14}), "`qk_nope_head_dim` is 16384"),
        ("deepseek_v2", json!({"qk_rope_head_dim": 3}), "`qk_rope_head_dim` is 3"),
        ("deepseek_v2", json!({"v_head_dim": "-"}), "`v_head_dim` is missing"),
        ("deepseek_v2", json!({"v_head_dim": true}), "`v_head_dim` is true"),
        ("deepseek_v2", json!({"qk_head_dim": 9}), "`qk_head_dim` is 9"),
        ("deepseek_v2", json!({"num_key_value_heads": 2}), "`num_key_value_heads` is 2"),
        (
            "deepseek_v2",
            json!({"rope_scaling": {"type": "bananas", "factor": 2.0}}),
            "`rope_scaling.type` is",
        ),
        ("autoregressive_lm", json!({"kv_lora_rank": "-"}), "`kv_lora_rank` is missing"),
        ("autoregressive_lm", json!({"qk_rope_head_dim": "-"}), "`qk_rope_head_dim` is missing"),
        ("autoregressive_lm", json!({"qk_nope_head_dim": 4}), "`qk_nope_head_dim` is 4"),
        ("autoregressive_lm", json!({"attn_type": "mqa"}), "`attn_type` is"),
    ];
    for (model_type, changes, says) in cases {
        let e = parse(model_type, changes).unwrap_err().to_string();
        assert!(e.contains(says) && !e.contains('\n'), "{e}");
    }
    // Of grouped attention the keys are known and without effect.
    let grouped = parse("autoregressive_lm", json!({"attn_type": "gqa"})).unwrap();
    assert_eq!(grouped.layers[0].attention.latent, None);
}

/// Pages hold what keys and values are made of; of AstrAI's, whose heads turn their own keys, keys and values.
#[test]
fn states_and_inputs_of_pages() {
    let cache = Cache { page: 4, pages: 6, table: 3, windows: None };
    let (latent, head) = (("kv.1.latent", BF16, 12), [("kv.1.k", BF16, 8), ("kv.1.v", BF16, 8)]);
    let codes = [("kv.1.latent#codes", I8, 12), ("kv.1.latent#scales", F32, 6)];
    let of_heads =
        ["k", "v"].map(|x| [(format!("kv.1.{x}#codes"), F8E4M3, 8), (format!("kv.1.{x}#scales"), F32, 1)]);
    let own = |list: &[(&str, DType, usize)]| list.iter().map(|s| (s.0.to_string(), s.1, s.2)).collect();
    for (model_type, pages, heads, states) in [
        ("deepseek_v3", None, 1, own(&[latent])),
        ("autoregressive_lm", None, 2, own(&head)),
        // A latent of ten numbers beside a rotated part of two: none of two neighbours are of both.
        ("deepseek_v3", Some(Code::Int8), 1, own(&codes)),
        ("autoregressive_lm", Some(Code::Fp8), 2, of_heads.concat()),
    ] {
        let c = ModelConfig { pages, ..parse(model_type, json!({})).unwrap() };
        let shaped = |(name, dtype, width)| (name, dtype, [24, heads, width]);
        let states: Vec<_> = Vec::into_iter(states).map(shaped).collect();
        assert_eq!(cache.states(&c, 1, BF16), states);
        assert!(cache.states(&c, 3, BF16).is_empty());
        let g = build(&c, &Program::paged(5, 2, cache)).unwrap();
        let listed = g.nodes().iter().any(|n| n.op.leaf_name() == Some("pages"));
        assert_eq!(listed, c.caches_latents());
        let named = |name: &str| g.outputs().iter().any(|(n, _)| n == name);
        assert!(states.iter().all(|(name, ..)| named(name)));
    }
}

/// The first module of multi-token prediction is a model of one layer, with the embedding and the head of its own model.
#[test]
fn a_module_stands_behind_the_layers() {
    let c = read("deepseek_v3", json!({"num_nextn_predict_layers": 1}));
    assert_eq!(parse("deepseek_v3", json!({"num_nextn_predict_layers": 0})).unwrap().module(), None);
    assert_eq!(
        (c.clone().module(), c.tensors().len()),
        (c.module(), read("deepseek_v3", json!({})).tensors().len())
    );
    let module = c.module().unwrap();
    let layer = format!("model.layers.{}.", c.num_layers);
    for (name, want) in [
        ("enorm.weight", vec![32]),
        ("hnorm.weight", vec![32]),
        ("eh_proj.weight", vec![32, 64]),
        ("self_attn.kv_b_proj.weight", vec![44, 10]),
        ("mlp.gate.weight", shape(&c, "model.layers.2.mlp.gate.weight").unwrap()),
        ("shared_head.norm.weight", vec![32]),
    ] {
        assert_eq!(shape(&module, &format!("{layer}{name}")), Some(want), "{name}");
    }
    assert!(c.module_tensors().iter().all(|t| t.name.starts_with(&layer)));
    let cache = Cache { page: 4, pages: 6, table: 3, windows: None };
    let kept = ModelConfig { hidden: Some(Hidden::Kept), ..c.clone() };
    let states =
        |c: &ModelConfig| cache.all_states(c, BF16).into_iter().map(|(name, ..)| name).collect::<Vec<_>>();
    let added = ["kv.hidden".to_string(), format!("kv.{}.latent", c.num_layers)];
    assert_eq!(states(&kept), [states(&c), added.to_vec()].concat());
}

#[test]
fn published_parameters() {
    let Some(shared) = crate::shared::shared() else { return };
    for (name, parameters) in [("deepseek-v2-lite", 15_706_484_224), ("deepseek-v3", 671_026_404_352)] {
        let c = ModelConfig::read(&shared.join(format!("configs/{name}.json"))).unwrap();
        assert_eq!((c.config.parameter_count(), c.warnings), (parameters, vec![]), "{name}");
    }
}
