//! Hostile configurations: each is refused in one line that names file, key, value and remedy, and nothing panics.

use crate::models::{ASTRAI, LLAMA, QWEN3};
use crate::shared::shared;
use astrai_builders::config::ModelConfig;
use proptest::prelude::*;
use serde_json::{Value, json};

/// The error that `text` gives, checked to be one line that opens with the file.
fn refusal(text: &str) -> String {
    let e =
        ModelConfig::parse(text, "config.json").map(|r| format!("accepted: {r:?}")).unwrap_err().to_string();
    assert!(e.starts_with("config.json: ") && !e.contains('\n') && e.contains("; "), "{e}");
    e
}

fn changed(text: &str, key: &str, value: Value) -> String {
    let mut object: Value = serde_json::from_str(text).unwrap();
    object.as_object_mut().unwrap().insert(key.to_owned(), value);
    object.to_string()
}

#[test]
fn files_that_are_no_configuration() {
    for (text, says) in [
        ("", "line 1 column 0"),
        ("[1]", "a list, not a JSON object"),
        ("{\"vocab_size\": NaN}", "line 1 column 16"),
        ("{\"vocab_size\": 1e999}", "out of range"),
        ("{\"model_type\": \"llama\",\n \"model_type\": \"qwen2\"}", "`model_type` appears twice at line 2"),
        ("{}", "does not say which model"),
        ("{\"model_type\": 3}", "`model_type` is 3"),
        ("{\"architectures\": [\"MambaForCausalLM\"]}", "\"MambaForCausalLM\", which is not known"),
        ("{\"model_type\": \"dbrx\"}", "known model types: autoregressive_lm, llama"),
    ] {
        let e = refusal(text);
        assert!(e.contains(says), "{e}");
    }
    let deep = format!("{{\"a\": {}1{}}}", "[".repeat(5000), "]".repeat(5000));
    assert!(refusal(&deep).contains("recursion"));
}

#[test]
fn files_on_disk() {
    let dir = std::env::temp_dir().join(format!("astrai-config-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let e = ModelConfig::read(&dir).unwrap_err().to_string();
    assert!(e.contains("config.json: cannot open it"), "{e}");
    std::fs::write(dir.join("config.json"), b"{\"a\": \"\xff\"}").unwrap();
    let e = ModelConfig::read(&dir).unwrap_err().to_string();
    assert!(e.contains("is not UTF-8 (byte 7)"), "{e}");
    std::fs::write(dir.join("config.json"), LLAMA).unwrap();
    assert!(ModelConfig::read(&dir).is_ok() && ModelConfig::read(&dir.join("config.json")).is_ok());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn values_that_make_no_sense() {
    let rows = [
        ("vocab_size", json!("320"), "is \"320\" (a string); it must be a positive integer"),
        ("vocab_size", json!(null), "is missing"),
        ("vocab_size", json!(-1), "is -1; it must be a positive integer"),
        ("vocab_size", json!(3.5), "is 3.5; it must be a positive integer"),
        ("hidden_size", json!(0), "is 0; it must be a positive integer"),
        ("hidden_size", json!(1u64 << 60), "the largest accepted is 16777216"),
        ("hidden_size", json!([64]), "is a list; it must be a positive integer"),
        ("max_position_embeddings", json!(0), "is 0"),
        ("num_key_value_heads", json!(3), "is 3, which does not divide the 4 heads"),
        ("head_dim", json!(15), "width 15"),
        ("head_dim", json!(true), "is true (a boolean)"),
        ("rms_norm_eps", json!(0.0), "is 0; it must be above 0"),
        ("rms_norm_eps", json!(-1e-5), "it must be above 0 and below 1"),
        ("rope_theta", json!(0), "it must be above 1"),
        ("tie_word_embeddings", json!("yes"), "it must be true or false"),
        ("hidden_act", json!("relu"), "is \"relu\", which is not supported; supported: silu"),
        ("torch_dtype", json!("int4"), "supported: float32"),
        ("eos_token_id", json!("</s>"), "it must be a token id"),
        ("bos_token_id", json!([1, 2]), "lists 2 tokens"),
        ("rope_scaling", json!(2.0), "it must be an object"),
    ];
    for (key, value, says) in rows {
        let e = refusal(&changed(LLAMA, key, value));
        assert!(e.contains(says) && e.contains(&format!("`{key}`")), "{e}");
    }
    let odd = changed(&changed(LLAMA, "head_dim", json!(null)), "hidden_size", json!(66));
    assert!(refusal(&odd).contains("not a multiple of the 4 heads"));
    let two = changed(ASTRAI, "hidden_size", json!(32));
    assert!(refusal(&two).contains("is 64 while `hidden_size` is 32"));
    let mut huge = LLAMA.to_owned();
    for key in ["hidden_size", "intermediate_size"] {
        huge = changed(&huge, key, json!(1 << 24));
    }
    assert!(refusal(&huge).contains("parameters; the most accepted"));
}

#[test]
fn what_would_change_the_result() {
    let rows = [
        ("quantization_config", json!({"bits": 4})),
        ("final_logit_softcapping", json!(30.0)),
        ("num_experts", json!(8)),
        ("sliding_window", json!(4096)),
        ("scoring_func", json!("sigmoid")),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("partial_rotary_factor", json!(0.5)),
        ("rope_interleaved", json!(true)),
        ("use_qk_norm", json!(true)),
    ];
    for (key, value) in rows {
        let e = refusal(&changed(LLAMA, key, value));
        assert!(e.contains(&format!("`{key}`")), "{e}");
    }
    for (scaling, says) in [
        (json!({"type": "dynamic", "factor": 2.0}), "`rope_scaling.type` is \"dynamic\""),
        (json!({"rope_type": "ntk", "factor": 2.0}), "`rope_scaling.rope_type` is \"ntk\""),
        (json!({"type": "yarn", "rope_type": "linear", "factor": 2.0}), "keep one of them"),
        (json!({"type": "linear"}), "`rope_scaling.factor` is missing"),
        (json!({"type": "linear", "factor": 0.5}), "between 1 and 1e6"),
        (json!({"type": "llama3", "factor": 8}), "low_freq_factor"),
        (json!({"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}), "the larger of the two"),
        (json!({"full_attention": {"rope_theta": 1e6}}), "object under `full_attention`"),
        (json!({"rope_theta": 1e4}), "`rope_theta` is 500000"),
    ] {
        let e = refusal(&changed(LLAMA, "rope_scaling", scaling));
        assert!(e.contains(says), "{e}");
    }
    let e = refusal(&changed(ASTRAI, "rope_scaling", json!({"type": "linear", "factor": 2.0})));
    assert!(e.contains("is \"linear\""), "{e}");
    assert!(refusal(&changed(ASTRAI, "ffn_type", json!("moe2"))).contains("`ffn_type` is \"moe2\""));
    let outer = changed(LLAMA, "original_max_position_embeddings", json!(128));
    assert!(refusal(&outer).contains("is 64 while the outer one is 128"));
    let two = changed(QWEN3, "rope_scaling", json!({"type": "yarn", "factor": 2.0}));
    assert!(refusal(&two).contains("disagree"));
    assert!(
        refusal(&changed(QWEN3, "layer_types", json!(["full_attention"]))).contains("lists 1 layers of 3")
    );
}

/// How weights are packed: what is read, and what is refused.
#[test]
fn packing() {
    use astrai_ir::Code::{Fp8, Int4, Int8};
    use astrai_ir::packing::{Awq, Blocks, Compressed, Gptq, Packing, Share};
    let text = |q: &Value| changed(LLAMA, "quantization_config", q.clone());
    let group = |format: &str, weights: Value| {
        json!({"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "sparsity_config": {},
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    };
    let compressed =
        |code, packed, share, zeros| Packing::Compressed(Compressed { code, packed, share, zeros });
    let fp8 = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head"]});
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": false});
    let awq =
        json!({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm"});
    let with = |q: &Value, key: &str, value: Value| {
        let mut q = q.clone();
        q[key] = value;
        q
    };
    let of = |code, share, less_one| Packing::Gptq(Gptq { code, share, act_order: true, less_one });
    let v2 = with(&with(&gptq, "checkpoint_format", json!("gptq_v2")), "group_size", json!(-1));
    let channel =
        json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false});
    let int4 =
        json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": false});
    let int8 = json!({"num_bits": 8, "type": "int", "strategy": "tensor"});
    for (q, packing) in [
        (fp8.clone(), Packing::Fp8(Blocks { rows: 128, columns: 64 })),
        (gptq.clone(), of(Int4, Share::Group(128), true)),
        (with(&v2, "bits", json!(8)), of(Int8, Share::Row, false)),
        (awq.clone(), Packing::Awq(Awq { share: Share::Group(64) })),
        (group("float-quantized", channel.clone()), compressed(Fp8, false, Share::Row, false)),
        (group("pack-quantized", int4.clone()), compressed(Int4, true, Share::Group(32), true)),
        (group("int-quantized", int8.clone()), compressed(Int8, false, Share::Tensor, false)),
    ] {
        let read = ModelConfig::parse(&text(&q), "config.json").unwrap();
        assert_eq!((read.packing, &read.warnings[..], &read.unknown[..]), (Some(packing), &[][..], &[][..]));
    }
    let two = changed(LLAMA, "dtype", json!("bfloat16"));
    let warnings = ModelConfig::parse(&two, "config.json").unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("`torch_dtype` is \"float32\"; the first counts"));
    for (q, says) in [
        (json!({"quant_method": "exl3"}), "quant_method \"exl3\"; supported: fp8"),
        (json!({"quant_method": "mxfp4"}), "quant_method \"mxfp4\""),
        (json!({}), "has no quant_method"),
        (json!("awq"), "`quantization_config`"),
        (with(&fp8, "weight_block_size", json!([128, 0])), "is [128,0]"),
        (with(&fp8, "weight_block_size", json!([128])), "is [128]"),
        (with(&fp8, "fmt", json!("e5m2")), "e5m2"),
        (with(&gptq, "bits", json!(3)), "`quantization_config.bits` is 3"),
        (with(&gptq, "bits", json!(u64::MAX)), "bits"),
        (with(&gptq, "group_size", json!(0)), "`quantization_config.group_size` is 0"),
        (with(&gptq, "group_size", json!(-2)), "group_size` is -2"),
        (with(&gptq, "group_size", json!(1u64 << 40)), "the largest accepted is"),
        (with(&gptq, "checkpoint_format", json!("marlin")), "\"marlin\""),
        (with(&awq, "zero_point", json!(false)), "zero_point"),
        (with(&awq, "version", json!("gemv")), "\"gemv\""),
        (with(&awq, "bits", json!(8)), "awq has integers of 4 bits"),
        (group("marlin-24", int4.clone()), "\"marlin-24\""),
        (group("int-quantized", int4.clone()), "int-quantized has 8 bits"),
        (group("float-quantized", int8), "`quantization_config.config_groups.weights.type`"),
        (group("pack-quantized", with(&int4, "actorder", json!("group"))), "actorder"),
        (group("pack-quantized", with(&int4, "strategy", json!("block"))), "\"block\""),
        (group("float-quantized", with(&channel, "symmetric", json!(false))), "symmetric"),
        (with(&group("pack-quantized", int4), "config_groups", json!({})), "no object of one group"),
        (with(&group("float-quantized", channel), "transform_config", json!({"a": 1})), "transform_config"),
    ] {
        let e = refusal(&text(&q));
        assert!(e.contains(says) && !e.contains('\n'), "{says}: {e}");
    }
}

/// The embedded configurations and, where there are any, the shared ones.
fn corpus() -> Vec<String> {
    let mut texts: Vec<String> = [LLAMA, QWEN3, ASTRAI].map(str::to_owned).to_vec();
    if let Some(dir) = shared() {
        let folders = std::fs::read_dir(dir.join("golden")).into_iter().flatten().flatten();
        texts.extend(folders.filter_map(|f| std::fs::read_to_string(f.path().join("config.json")).ok()));
        texts.sort();
    }
    texts
}

/// Reads a text; whatever is accepted must be usable and survive saving.
fn survive(text: &str) {
    match ModelConfig::parse(text, "config.json") {
        Err(e) => {
            let line = e.to_string();
            assert!(line.starts_with("config.json: ") && !line.contains('\n') && line.len() < 1000, "{line}");
        }
        Ok(r) => {
            let c = r.config;
            let rope = &c.layers[0].attention.rope;
            assert!(rope.inv_freq().iter().all(|f| f.is_finite() && *f >= 0.0), "{rope:?}");
            assert!(rope.attention_factor().is_finite() && c.parameter_count() > 0);
            let again = ModelConfig::parse(&c.save().to_string(), "saved").unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(again.config, c);
        }
    }
}

fn nasty() -> impl Strategy<Value = Value> {
    let fixed = [
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(2),
        json!(3),
        json!(-1),
        json!(0.0),
        json!(0.5),
        json!(1.0),
        json!(4.0),
        json!(1e308),
        json!(5e-324),
        json!(-1e-5),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1u64 << 31),
        json!(1 << 24),
        json!(16384),
        json!(""),
        json!("yarn"),
        json!("ntk"),
        json!("llama3"),
        json!("linear"),
        json!("gelu"),
        json!("a\nb"),
        json!([]),
        json!([1, 2]),
        json!({}),
        json!(["sliding_attention", "full_attention"]),
        json!({"type": "yarn", "factor": 4.0}),
        json!({"rope_type": "linear", "factor": 1e6}),
        json!({"type": "ntk", "factor": 2}),
        json!([[]]),
    ];
    prop_oneof![
        proptest::sample::select(fixed.to_vec()),
        any::<i64>().prop_map(|x| json!(x)),
        any::<f64>().prop_map(|x| json!(x)),
        (1u32..400).prop_map(|x| json!(x)),
        ".{0,80}".prop_map(|x| json!(x)),
    ]
}

/// Replaces, removes or adds the entry at `at`, descending into nested objects when `inner` says so.
fn mutate(value: &mut Value, at: usize, inner: bool, new: Option<Value>) {
    let Some(map) = value.as_object_mut() else { return };
    let Some(key) = map.keys().nth(at % (map.len() + 1)).cloned() else {
        map.insert("surprise\n".to_owned(), new.unwrap_or(Value::Null));
        return;
    };
    match (new, map.get_mut(&key)) {
        (new, Some(child)) if inner && child.is_object() => mutate(child, at / 7, false, new),
        (Some(new), Some(child)) => *child = new,
        _ => {
            map.shift_remove(&key);
        }
    }
}

/// Keys with values that mostly make sense, so that many combinations are accepted.
fn sensible() -> impl Strategy<Value = (&'static str, Value)> {
    let number =
        |key, values: &'static [f64]| (Just(key), proptest::sample::select(values).prop_map(|x| json!(x)));
    let count =
        |key, values: &'static [u64]| (Just(key), proptest::sample::select(values).prop_map(|x| json!(x)));
    let flag = |key| (Just(key), any::<bool>().prop_map(|x| json!(x)));
    let type_ = proptest::sample::select(vec!["linear", "llama3", "yarn", "default"]);
    let yarn =
        (type_, 1.0..64.0f64, 1usize..1000, 0.5..40.0f64, any::<bool>(), prop::option::of(0.0..2.0f64));
    let rope = yarn.prop_map(|(name, factor, original, beta, truncate, scale)| {
        json!({"rope_type": name, "factor": factor, "original_max_position_embeddings": original, "truncate": truncate,
            "low_freq_factor": 1.0, "high_freq_factor": beta, "beta_fast": beta, "mscale": scale, "mscale_all_dim": 1})
    });
    let types =
        prop::collection::vec(proptest::sample::select(vec!["full_attention", "sliding_attention"]), 2);
    prop_oneof![
        (
            Just("model_type"),
            proptest::sample::select(vec!["mistral", "qwen2", "qwen3"]).prop_map(|x| json!(x))
        ),
        (Just("rope_scaling"), rope),
        (Just("layer_types"), types.prop_map(|x| json!(x))),
        count("head_dim", &[2, 4, 6, 16, 128]),
        count("hidden_size", &[4, 60, 64, 66]),
        count("num_attention_heads", &[2, 4, 6, 8]),
        count("num_key_value_heads", &[1, 2, 4]),
        count("sliding_window", &[1, 8, 4096]),
        count("max_window_layers", &[0, 1, 2, 28]),
        count("eos_token_id", &[0, 319, 320, 4_000_000_000]),
        number("rope_theta", &[1.0000001, 2.0, 1e4, 1e15]),
        number("rms_norm_eps", &[1e-300, 1e-6, 0.5]),
        number("initializer_range", &[0.0, 0.006, 1.0]),
        flag("use_sliding_window"),
        flag("attention_bias"),
        flag("mlp_bias"),
        flag("tie_word_embeddings"),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_objects(
        which in any::<usize>(),
        changes in prop::collection::vec((any::<usize>(), any::<bool>(), prop::option::weighted(0.85, nasty())), 1..4),
    ) {
        let texts = corpus();
        let mut value: Value = serde_json::from_str(&texts[which % texts.len()]).unwrap();
        for (at, inner, new) in changes {
            mutate(&mut value, at, inner, new);
        }
        survive(&value.to_string());
    }

    #[test]
    fn sensible_objects(changes in prop::collection::vec(sensible(), 1..8)) {
        let mut text = LLAMA.to_owned();
        for (key, value) in changes {
            text = changed(&text, key, value);
        }
        survive(&text);
    }

    #[test]
    fn mutated_bytes(which in any::<usize>(), edits in prop::collection::vec((any::<usize>(), any::<char>()), 1..6)) {
        let texts = corpus();
        let mut chars: Vec<char> = texts[which % texts.len()].chars().collect();
        for (at, c) in edits {
            let at = at % chars.len();
            match at % 3 {
                0 => chars[at] = c,
                1 => chars.insert(at, c),
                _ => chars.truncate(at.max(1)),
            }
        }
        survive(&chars.into_iter().collect::<String>());
    }
}

#[test]
fn experts_that_make_no_sense() {
    let moe = changed(&changed(QWEN3, "model_type", json!("qwen3_moe")), "rope_parameters", json!(null));
    assert!(ModelConfig::parse(&moe, "config.json").is_ok());
    let rows = [
        ("num_experts", json!(0), "is 0; it must be a positive integer"),
        (
            "num_local_experts",
            json!(4),
            "is 8, more than the 4 experts; it must be at most `num_local_experts`",
        ),
        ("num_experts", json!(1 << 16), "in 3 layers; the most accepted is 65536"),
        (
            "num_experts_per_tok",
            json!(129),
            "is 129, more than the 128 experts; it must be at most `num_experts`",
        ),
        ("moe_intermediate_size", json!("768"), "it must be a positive integer"),
        ("decoder_sparse_step", json!(0), "it must be a positive integer"),
        ("mlp_only_layers", json!([-1]), "is no list of layer numbers"),
        ("mlp_only_layers", json!(1), "is no list of layer numbers"),
        ("norm_topk_prob", json!(1), "it must be true or false"),
        ("n_group", json!(2), "does not compute"),
        ("router_jitter_noise", json!(0.1), "does not compute"),
    ];
    for (key, value, says) in rows {
        let e = refusal(&changed(&moe, key, value));
        assert!(e.contains(says), "{e}");
    }
    let two = changed(&changed(&moe, "num_experts", json!(8)), "num_local_experts", json!(16));
    assert!(refusal(&two).contains("both mean the same"));
}
