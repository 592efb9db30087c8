//! What OLMo 2, GLM 4, Phi-3, Gemma 2, Gemma 3, gpt-oss, AstrAI's experts and its encoder resolve to, what they refuse, and
//! that saving keeps it.

use astrai_builders::config::{
    Activation, EncoderSpec, Init, MlpSpec, ModelConfig, NormPlacement, Pooling, QkNorm, RopeLayout,
    RopeScaling, SharedSpec,
};
use astrai_builders::{Program, build};
use serde_json::{Value, json};

/// A small configuration of a type, with keys replaced; `null` stays.
fn text(model_type: &str, changes: Value) -> String {
    let mut value = json!({"model_type": model_type, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 12});
    let map = value.as_object_mut().unwrap();
    for (k, v) in changes.as_object().unwrap() {
        map.insert(k.clone(), v.clone());
    }
    value.to_string()
}

fn read(model_type: &str, changes: Value) -> ModelConfig {
    crate::read::read_again(&text(model_type, changes))
}

fn refused(model_type: &str, changes: Value, says: &str) {
    let e = ModelConfig::parse(&text(model_type, changes), "config.json").unwrap_err().to_string();
    assert!(e.contains(says) && !e.contains('\n'), "{e}");
}

fn windows(c: &ModelConfig) -> Vec<Option<usize>> {
    c.layers.iter().map(|l| l.attention.window).collect()
}

fn init(c: &ModelConfig, name: &str) -> Option<(Vec<usize>, Init)> {
    c.tensors().into_iter().find(|t| t.name == name).map(|t| (t.shape, t.init))
}

#[test]
fn olmo2() {
    let c = read("olmo2", json!({"attention_bias": true}));
    let l = &c.layers[0];
    assert_eq!((l.norms, l.attention.qk_norm), (NormPlacement::Post, QkNorm::WholeBeforeRope));
    assert!(l.attention.qkv_bias && l.attention.o_bias && c.norm_eps == 1e-5);
    assert_eq!(init(&c, "model.layers.1.self_attn.k_norm.weight"), Some((vec![24], Init::Ones)));
    assert_eq!(init(&c, "model.layers.1.input_layernorm.weight"), None);
    refused("olmo2", json!({"partial_rotary_factor": 0.5}), "this model type rotates whole heads");
    refused("olmo2", json!({"clip_qkv": 8.0}), "`clip_qkv` is 8.0");
}

#[test]
fn glm4() {
    let c = read("glm4", json!({}));
    let l = &c.layers[0];
    assert_eq!((l.norms, l.attention.rope.dim), (NormPlacement::Sandwich, 6));
    assert_eq!(l.attention.rope.layout, RopeLayout::Interleaved);
    assert!(l.attention.qkv_bias && !l.attention.o_bias);
    assert_eq!(c.norm_eps, 1.5625e-7);
    assert_eq!(init(&c, "model.layers.0.mlp.gate_up_proj.weight").map(|t| t.0), Some(vec![96, 32]));
    let whole = read("glm4", json!({"partial_rotary_factor": 1.0, "attention_bias": false}));
    assert_eq!(whole.layers[0].attention.rope.dim, 12);
    // A share that truncation alone would not give back.
    let odd = read("glm4", json!({"head_dim": 98, "rope_parameters": {"partial_rotary_factor": 0.0205}}));
    assert_eq!(odd.layers[0].attention.rope.dim, 2);
    refused("glm4", json!({"partial_rotary_factor": 0.25}), "is 0.25, which is 3 of 12 components");
    refused("glm4", json!({"partial_rotary_factor": 1.5}), "at most 1");
    refused(
        "glm4",
        json!({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}),
        "`partial_rotary_factor` is 0.5 while `rope_parameters.partial_rotary_factor` is 1",
    );
}

#[test]
fn phi3() {
    let c = read("phi3", json!({"sliding_window": 2047, "rope_scaling": {"partial_rotary_factor": 1.0}}));
    assert_eq!(windows(&c), [Some(2047); 4]);
    assert_eq!(c.layers[0].attention.rope.scaling, RopeScaling::None);
    assert_eq!(init(&c, "model.layers.3.self_attn.qkv_proj.weight").map(|t| t.0), Some(vec![96, 32]));
    let factors = |n: usize| vec![2.0; n];
    let long =
        |name: &str, n: usize| json!({"type": name, "short_factor": vec![1.0; n], "long_factor": factors(n)});
    for name in ["longrope", "su"] {
        let c = read(
            "phi3",
            json!({"rope_scaling": long(name, 6), "max_position_embeddings": 131072,
                "original_max_position_embeddings": 2048}),
        );
        let RopeScaling::LongRope(l) = &c.layers[0].attention.rope.scaling else { panic!("{name}") };
        assert_eq!((l.original_max_positions, l.max_positions, l.long.len()), (2048, 131072, 6));
    }
    let part = read(
        "phi3",
        json!({"partial_rotary_factor": 0.75, "head_dim": 128, "rope_scaling": long("longrope", 48)}),
    );
    assert_eq!(part.layers[0].attention.rope.dim, 96);
    let RopeScaling::LongRope(l) = &part.layers[0].attention.rope.scaling else { panic!("no longrope") };
    assert_eq!(l.original_max_positions, 4096);
    refused(
        "phi3",
        json!({"rope_scaling": long("longrope", 5)}),
        "lists 5 numbers; there are 6 rotated pairs",
    );
    refused(
        "phi3",
        json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        "supports: default, longrope, su",
    );
    let mut zero = long("su", 6);
    zero["long_factor"][2] = json!(0);
    refused("phi3", json!({"rope_scaling": zero}), "`rope_scaling.long_factor` lists 0");
    let mut words = long("su", 6);
    words["short_factor"] = json!(["1"]);
    refused("phi3", json!({"rope_scaling": words}), "it must be a number in that list");
    refused(
        "phi3",
        json!({"rope_scaling": {"type": "su", "long_factor": factors(6)}}),
        "short_factor` is missing",
    );
}

#[test]
fn gemma2() {
    let c = read("gemma2", json!({"query_pre_attn_scalar": 144, "sliding_window": 8}));
    assert_eq!(windows(&c), [Some(8), None, Some(8), None]);
    let a = &c.layers[1].attention;
    assert_eq!((a.scale, a.softcap, c.logit_softcap), (1.0 / 12.0, Some(50.0), Some(30.0)));
    assert!(c.norm_offset && c.tie_embeddings && c.embed_scale == 32f64.sqrt());
    assert_eq!((c.layers[0].norms, c.activation), (NormPlacement::Sandwich, Activation::GeluTanh));
    assert_eq!(init(&c, "model.layers.0.pre_feedforward_layernorm.weight"), Some((vec![32], Init::Zeros)));
    let plain = read(
        "gemma2",
        json!({"attn_logit_softcapping": null, "final_logit_softcapping": null, "sliding_window": null,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
            "layer_types": vec!["full_attention"; 4], "tie_word_embeddings": false, "attention_bias": true}),
    );
    assert_eq!((plain.layers[0].attention.softcap, plain.logit_softcap), (None, None));
    assert!(!plain.tie_embeddings && plain.layers[0].attention.o_bias);
    read("gemma2", json!({"hidden_activation": "silu"}));
    refused("gemma2", json!({"hidden_act": "gelu"}), "states its activation as hidden_activation");
    refused("gemma2", json!({"attn_logit_softcapping": 0.0}), "`attn_logit_softcapping` is 0");
    refused("gemma2", json!({"sliding_window": null}), "is null while there are sliding layers");
    refused("gemma2", json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention` is true");
}

#[test]
fn gemma3_in_three_layouts() {
    let older = json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 8, "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let c = read("gemma3_text", older.clone());
    assert_eq!(windows(&c), [Some(8), Some(8), None, Some(8)]);
    let [local, global] = [0, 2].map(|i| &c.layers[i].attention.rope);
    assert_eq!((local.theta, &local.scaling), (1e4, &RopeScaling::None));
    assert_eq!((global.theta, &global.scaling), (1e6, &RopeScaling::Linear { factor: 8.0 }));
    assert_eq!(c.layers[0].attention.qk_norm, QkNorm::BeforeRope);
    assert_eq!((c.layers[0].attention.softcap, c.logit_softcap), (None, None));
    let types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"];
    let newer = json!({"layer_types": types, "sliding_window": 8, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
    assert_eq!(read("gemma3_text", newer).layers, c.layers);
    let both = json!({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}});
    let both = read("gemma3_text", both);
    assert_eq!(both.layers[0].attention.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    // Nested, with sizes left to the defaults of published files.
    let nested = |text: Value, outer: Value| {
        let mut all = json!({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 16},
            "boi_token_index": 255999, "mm_tokens_per_image": 256, "torch_dtype": "bfloat16"});
        outer.as_object().unwrap().iter().for_each(|(k, v)| all[k] = v.clone());
        ModelConfig::parse(&all.to_string(), "config.json")
    };
    let sparse = json!({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "sliding_window": 8,
        "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}});
    let r = nested(sparse.clone(), json!({})).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(r.warnings, Vec::<String>::new());
    let c = r.config;
    assert_eq!((c.vocab_size, c.heads, c.kv_heads, c.head_dim), (262_208, 8, 4, 256));
    assert_eq!(windows(&c).iter().position(Option::is_none), Some(5));
    assert!(init(&c, "language_model.model.layers.6.mlp.up_proj.weight").is_some() && c.tie_embeddings);
    assert_eq!(ModelConfig::parse(&c.save().to_string(), "saved").unwrap().config, c);
    let says = |r: Result<_, astrai_builders::ConfigError>, what: &str| {
        let e = r.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains(what), "{e}");
    };
    let with = |key: &str, v: Value| {
        let mut text = sparse.clone();
        text[key] = v;
        text
    };
    says(nested(with("num_experts", json!(4)), json!({})), "`text_config.num_experts` is 4");
    says(nested(with("model_type", json!("llama")), json!({})), "`text_config.model_type` is \"llama\"");
    says(nested(sparse.clone(), json!({"tie_word_embeddings": 3})), "must be true or false");
    says(nested(with("tie_word_embeddings", json!(false)), json!({})), "state the same in both");
    says(nested(json!(3), json!({})), "`text_config`");
    let unknown = nested(with("surprise", json!(1)), json!({})).unwrap();
    assert_eq!(unknown.unknown, ["text_config.surprise"]);
    refused("gemma3_text", json!({"rope_parameters": {"rope_theta": 1e6}}), "has the key `rope_theta`");
}

#[test]
fn gpt_oss() {
    let c = read("gpt_oss", json!({}));
    assert_eq!(windows(&c), [Some(128), None, Some(128), None]);
    let a = &c.layers[0].attention;
    assert!(a.sinks && a.qkv_bias && a.o_bias);
    let RopeScaling::Yarn(y) = &a.rope.scaling else { panic!("no yarn") };
    assert_eq!(
        (a.rope.theta, y.factor, y.truncate, y.original_max_positions),
        (150_000.0, 32.0, false, 4096)
    );
    let MlpSpec::Stacked(e) = &c.layers[3].mlp else { panic!("no experts") };
    assert_eq!((e.count, e.chosen, e.limit, e.alpha), (128, 4, 7.0, 1.702));
    let small = json!({"num_local_experts": 6, "experts_per_token": 3, "swiglu_limit": 2.5, "swiglu_alpha": 1.5,
        "sliding_window": 9, "attention_bias": false, "layer_types": ["full_attention", "full_attention",
        "sliding_attention", "full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "initial_context_length": 4096, "router_aux_loss_coef": 0.9});
    let c = read("gpt_oss", small);
    assert_eq!(windows(&c), [None, None, Some(9), None]);
    let rope = &c.layers[0].attention.rope;
    assert_eq!((rope.theta, &rope.scaling), (1e4, &RopeScaling::None));
    let shape = |name: &str| init(&c, &format!("model.layers.1.{name}")).map(|t| t.0);
    assert_eq!(shape("self_attn.sinks"), Some(vec![4]));
    assert_eq!(shape("self_attn.q_proj.bias"), None);
    assert_eq!(shape("mlp.router.bias"), Some(vec![6]));
    assert_eq!(shape("mlp.experts.gate_up_proj"), Some(vec![6, 32, 96]));
    assert_eq!(shape("mlp.experts.gate_up_proj_bias"), Some(vec![6, 96]));
    assert_eq!(shape("mlp.experts.down_proj"), Some(vec![6, 48, 32]));
    assert_eq!(shape("mlp.experts.down_proj_bias"), Some(vec![6, 32]));
    assert_eq!(read("gpt_oss", json!({"rope_theta": 5e4})).layers[0].attention.rope.theta, 5e4);
    let packed = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
    assert_eq!(read("gpt_oss", json!({"quantization_config": packed})), read("gpt_oss", json!({})));
    let other = json!({"quantization_config": {"quant_method": "awq"}});
    refused("gpt_oss", other, "`quantization_config` has the quant_method \"awq\"; supported: mxfp4");
    refused("gpt_oss", json!({"quantization_config": 4}), "`quantization_config`");
    refused("gpt_oss", json!({"num_experts_per_tok": 129}), "is 129, more than the 128 experts");
    refused("gpt_oss", json!({"num_experts_per_tok": 2, "experts_per_token": 3}), "both mean the same");
    refused("gpt_oss", json!({"sliding_window": null}), "is null while there are sliding layers");
    refused("gpt_oss", json!({"swiglu_limit": 0}), "`swiglu_limit` is 0");
    refused("gpt_oss", json!({"hidden_act": "gelu"}), "`hidden_act` is not silu");
    refused("gpt_oss", json!({"layer_types": ["full_attention"]}), "lists 1 layers of 4");
}

#[test]
fn embedding() {
    let text = |more: &str| {
        format!(
            r#"{{"model_type": "embedding", "vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
            "dim_ffn": 48, "max_len": 64, "norm_eps": 1e-5 {more}}}"#
        )
    };
    let parse = |more: &str| ModelConfig::parse(&text(more), "config.json");
    let plain = parse("").unwrap().config;
    assert_eq!(plain.encoder, Some(EncoderSpec { pooling: Pooling::Mean, normalise: false }));
    assert!(plain.tensors().iter().all(|t| t.name != "lm_head.weight"));
    for (name, pooling) in [("mean", Pooling::Mean), ("cls", Pooling::Cls), ("last", Pooling::Last)] {
        let more = format!(
            r#", "pooling_type": "{name}", "normalize_embeddings": true, "use_qk_norm": true, "use_gated_attention": true,
            "tie_weight": true, "rope_scaling": {{"type": "ntk", "factor": 2.0}}"#
        );
        let r = parse(&more).unwrap();
        assert!(r.warnings.is_empty(), "{:?}", r.warnings);
        assert_eq!(r.config.encoder, Some(EncoderSpec { pooling, normalise: true }));
        let saved = r.config.save();
        assert!(saved.get("tie_word_embeddings").is_none() && saved.get("ffn_type").is_none());
        let again = ModelConfig::parse(&saved.to_string(), "saved").unwrap();
        assert_eq!((again.config, again.warnings.len()), (r.config, 0));
    }
    let says = |more: &str, what: &str| {
        let e = parse(more).map(|_| ()).unwrap_err().to_string();
        assert!(e.contains(what) && !e.contains('\n'), "{e}");
    };
    says(
        r#", "pooling_type": "max""#,
        "`pooling_type` is \"max\", which is not supported; supported: mean, cls, last",
    );
    says(r#", "normalize_embeddings": 1"#, "`normalize_embeddings`");
    says(r#", "ffn_type": "moe""#, "`ffn_type` is \"moe\"");
    let wants = Program::full(1, 8);
    let e = build(&plain, &wants).unwrap_err().to_string();
    assert!(e.contains("`embedding` is an encoder") && e.contains("--want embedding"), "{e}");
}

#[test]
fn experts_of_astrai() {
    let plain = json!({"head_dim": null, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "ffn_type": "moe",
        "n_routed_experts": 6, "n_activated_experts": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]});
    let c = read("autoregressive_lm", plain.clone());
    let with = |changes: Value| {
        let mut all = plain.as_object().unwrap().clone();
        all.extend(changes.as_object().unwrap().clone());
        Value::Object(all)
    };
    let experts = |c: &ModelConfig, i: usize| match &c.layers[i].mlp {
        MlpSpec::Experts(e) => Some(e.clone()),
        _ => None,
    };
    assert_eq!([0, 1, 2, 3].map(|i| experts(&c, i).is_some()), [false, true, false, false]);
    let e = experts(&c, 1).unwrap();
    assert!(e.normalise && e.shared.is_none() && e.intermediate == 48);
    let shared = json!({"n_shared_experts": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "norm_topk_prob": false});
    let c = read("autoregressive_lm", with(shared));
    let e = experts(&c, 1).unwrap();
    assert_eq!((e.intermediate, e.shared), (24, Some(SharedSpec { count: 2, intermediate: 40 })));
    assert!(!e.normalise);
    // 4 layers; two shared experts are averaged, two chosen ones weighed.
    let down = Init::Normal(0.02 / (8f64 * (1.0 / 2.0 + 1.0 / 2.0)).sqrt());
    assert_eq!(init(&c, "layers.1.mlp.shared_experts.1.down.weight"), Some((vec![32, 40], down)));
    assert_eq!(init(&c, "layers.1.mlp.routed_experts.5.down.weight"), Some((vec![32, 24], down)));
    assert_eq!(init(&c, "layers.1.mlp.router.weight").map(|t| t.0), Some(vec![6, 32]));
    assert_eq!(init(&c, "layers.0.mlp.down.weight").map(|t| t.1), Some(Init::Normal(0.02 / 8f64.sqrt())));
    refused(
        "autoregressive_lm",
        with(json!({"n_activated_experts": null})),
        "`n_activated_experts` is missing",
    );
    refused("autoregressive_lm", with(json!({"n_activated_experts": 7})), "at most `n_routed_experts`");
    let r = ModelConfig::parse(&text("autoregressive_lm", with(json!({"moe_topk_method": "other"}))), "t")
        .unwrap();
    assert!(
        r.warnings[0].contains("`moe_topk_method` is \"other\": AstrAI never reads it"),
        "{:?}",
        r.warnings
    );
}
