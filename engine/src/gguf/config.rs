//! The configuration of a GGUF file. In: its metadata. Out: a configuration as transformers has it, and how its layers lie.

use astrai_runtime::weights::{Gguf, Layers, NORMS_BEHIND, OF_GPT_OSS};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// An architecture that is read.
struct Architecture {
    name: &'static str,
    /// What transformers calls it; of `llama` with experts `mixtral`, of `deepseek2` with sigmoids in routers `deepseek_v3`.
    model_type: &'static str,
    /// Whether the halves of queries and keys are interleaved.
    interleaved: bool,
    /// Keys of its own that are read.
    keys: &'static [&'static str],
    /// Names of modules that other files have for something else.
    own: &'static [(&'static str, &'static str)],
    /// Texts of tokens that end a turn, which files do not always name.
    ends: &'static [&'static str],
}

/// What most have in common.
const PLAIN: Architecture = Architecture {
    name: "",
    model_type: "",
    interleaved: false,
    keys: &[],
    own: &[],
    ends: &["<end_of_turn>", "<|end|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|eom_id|>"],
};

const WINDOW: &str = "attention.sliding_window";
const SCORES_CAP: &str = "attn_logit_softcapping";
const LOGITS_CAP: &str = "final_logit_softcapping";

const ARCHITECTURES: [Architecture; 11] = [
    Architecture { name: "llama", model_type: "llama", interleaved: true, ..PLAIN },
    Architecture { name: "qwen2", model_type: "qwen2", ..PLAIN },
    Architecture { name: "qwen3", model_type: "qwen3", ..PLAIN },
    Architecture {
        name: "qwen3moe",
        model_type: "qwen3_moe",
        keys: &["expert_feed_forward_length"],
        ..PLAIN
    },
    Architecture {
        name: "gemma2",
        model_type: "gemma2",
        keys: &[WINDOW, SCORES_CAP, LOGITS_CAP],
        own: NORMS_BEHIND,
        ..PLAIN
    },
    Architecture {
        name: "gemma3",
        model_type: "gemma3_text",
        keys: &[WINDOW, LOGITS_CAP, "rope.freq_base_swa"],
        own: NORMS_BEHIND,
        ..PLAIN
    },
    Architecture { name: "phi3", model_type: "phi3", keys: &[WINDOW, "rope.scaling.attn_factor"], ..PLAIN },
    // A turn ends where another's begins.
    Architecture {
        name: "glm4",
        model_type: "glm4",
        ends: &["<|endoftext|>", "<|user|>", "<|observation|>"],
        ..PLAIN
    },
    Architecture { name: "olmo2", model_type: "olmo2", own: NORMS_BEHIND, ..PLAIN },
    Architecture {
        name: "gpt-oss",
        model_type: "gpt_oss",
        keys: &[WINDOW, "expert_feed_forward_length"],
        own: OF_GPT_OSS,
        // It goes on after `<|end|>`.
        ends: &["<|return|>", "<|call|>", "<|endoftext|>"],
        ..PLAIN
    },
    Architecture {
        name: "deepseek2",
        model_type: "deepseek_v2",
        keys: &[
            "attention.key_length_mla",
            "attention.kv_lora_rank",
            "attention.q_lora_rank",
            "attention.value_length_mla",
            "expert_feed_forward_length",
            "expert_gating_func",
            "expert_group_count",
            "expert_group_used_count",
            "expert_shared_count",
            "expert_weights_norm",
            "expert_weights_scale",
            "leading_dense_block_count",
            "rope.scaling.yarn_log_multiplier",
        ],
        ..PLAIN
    },
];

/// Keys that are read of every architecture, or say nothing of the computation.
const READ: [&str; 21] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "expert_count",
    "expert_used_count",
    "vocab_size",
    "tensor_data_layout",
];
/// Keys that would change what is computed.
const COMPUTED: [&str; 17] = [
    WINDOW,
    SCORES_CAP,
    LOGITS_CAP,
    "attention.scale",
    "attention.causal",
    "attention.max_alibi_bias",
    "attention.sliding_window_pattern",
    "expert_weights_norm",
    "attention.clamp_kqv",
    "attention.temperature_scale",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
    "rope.dimension_sections",
    "embedding_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
];

/// Keys that would change what is computed, but for this value.
const USUAL: [(&str, f64); 7] = [
    ("expert_gating_func", 1.0),
    ("expert_group_count", 1.0),
    ("expert_group_used_count", 1.0),
    ("rope.scale_linear", 1.0),
    ("rope.scaling.alpha", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
];

/// The keys of an architecture.
pub(super) struct Keys<'a> {
    all: &'a Map<String, Value>,
    architecture: &'static Architecture,
}

impl<'a> Keys<'a> {
    pub(super) fn of(file: &'a Gguf) -> Result<Keys<'a>, String> {
        let all = file.metadata();
        let name = all.get("general.architecture").and_then(Value::as_str).unwrap_or_default();
        let known = ARCHITECTURES.each_ref().map(|a| a.name).join(", ");
        let found = ARCHITECTURES.iter().find(|a| a.name == name);
        let architecture =
            found.ok_or_else(|| format!("architecture `{name}` is not read; known are {known}"))?;
        Ok(Keys { all, architecture })
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.all.get(&format!("{}.{key}", self.architecture.name))
    }

    fn needed(&self, key: &str) -> Result<&'a Value, String> {
        let found = self.get(key).filter(|v| v.is_number());
        let name = self.architecture.name;
        found.ok_or_else(|| format!("has no number `{name}.{key}`; convert the model again"))
    }

    /// A count, `usual` where there is none.
    fn count(&self, key: &str, usual: u64) -> u64 {
        self.get(key).and_then(Value::as_u64).unwrap_or(usual)
    }

    /// Layers to look at: no more than models have, whatever a file says.
    fn layer_numbers(&self) -> std::ops::Range<u64> {
        0..self.count("block_count", 0).min(1 << 12)
    }

    /// How the file's layers lie.
    pub(super) fn layers(&self, file: &Gguf, heads: [usize; 2]) -> Layers {
        let split = file.shape("blk.0.attn_k_b.weight").zip(file.shape("blk.0.attn_v_b.weight"));
        let latents = match split {
            Some((&[heads, _, keys], &[_, values, _])) => Some([heads, keys, values]),
            _ => None,
        };
        let one_more = matches!(self.architecture.name, "gemma2" | "gemma3");
        let Architecture { interleaved, own, .. } = *self.architecture;
        Layers { interleaved: interleaved.then_some(heads), own, one_more, latents }
    }

    /// True for a key that says what is computed anyway.
    fn harmless(&self, key: &str, value: Option<&Value>) -> bool {
        let name = self.architecture.name;
        match key {
            "attention.causal" => value == Some(&json!(true)),
            "expert_weights_norm" => name == "qwen3moe" && value == Some(&json!(true)),
            "attention.sliding_window_pattern" => {
                value.and_then(Value::as_u64) == Some(if name == "gemma3" { 6 } else { 2 })
            }
            _ => false,
        }
    }

    /// Refuses what changes the numbers and is not computed; names what is not known.
    pub(super) fn check(&self) -> Result<Vec<String>, String> {
        let mut unknown = Vec::new();
        let front = format!("{}.", self.architecture.name);
        let own = |key: &&str| !self.architecture.keys.contains(key);
        for key in self.all.keys().filter_map(|key| key.strip_prefix(&front)).filter(own) {
            let value = self.get(key);
            let usual = USUAL.iter().find(|(of, _)| *of == key).map(|(_, usual)| *usual);
            if usual.is_some() && value.and_then(Value::as_f64) == usual || self.harmless(key, value) {
                continue;
            }
            if COMPUTED.contains(&key) || usual.is_some() {
                return Err(format!("`{front}{key}` changes what is computed, and is not supported"));
            }
            if !READ.contains(&key) {
                unknown.push(format!("`{front}{key}` is not known and not read"));
            }
        }
        let routed = self.architecture.name == "deepseek2" && self.count("expert_count", 0) >= 160;
        if routed && self.get("expert_group_count").is_none() {
            unknown.push(format!("has no `{front}expert_group_count`: experts are chosen among all"));
        }
        Ok(unknown)
    }

    /// The configuration as transformers has it.
    pub(super) fn config(&self, file: &Gguf) -> Result<Value, String> {
        let (heads, width) = (self.needed("attention.head_count")?, self.needed("embedding_length")?);
        let of_one = width.as_u64().zip(heads.as_u64().filter(|h| *h > 0)).map(|(w, h)| w / h);
        let rows =
            file.shape("token_embd.weight").and_then(|s| s.first()).ok_or("has no `token_embd.weight`")?;
        let head_dim = self.get("attention.key_length").cloned().unwrap_or(json!(of_one));
        let latents = self.architecture.name == "deepseek2";
        if !latents && self.get("attention.value_length").is_some_and(|v| *v != head_dim) {
            return Err("heads of values are not as wide as those of keys".into());
        }
        let bias = file.shape("blk.0.attn_q.bias").is_some();
        let mut config = json!({
            "model_type": self.architecture.model_type,
            "vocab_size": rows,
            "hidden_size": width,
            "num_hidden_layers": self.needed("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("attention.head_count_kv").unwrap_or(heads),
            "head_dim": head_dim,
            "intermediate_size": self.needed("feed_forward_length")?,
            "max_position_embeddings": self.needed("context_length")?,
            "rms_norm_eps": self.needed("attention.layer_norm_rms_epsilon")?,
            "rope_theta": self.get("rope.freq_base").cloned().unwrap_or(json!(10000.0)),
            "hidden_act": "silu",
            "tie_word_embeddings": file.shape("output.weight").is_none(),
        });
        if self.architecture.name != "qwen2" {
            config["attention_bias"] = bias.into();
        }
        if let Some(scaling) = self.scaling(file, &config)? {
            config["rope_scaling"] = scaling;
        }
        match self.architecture.name {
            "llama" if self.count("expert_count", 0) > 0 => self.mixtral(&mut config),
            "qwen3moe" => self.qwen3_moe(file, &mut config)?,
            "gemma2" | "gemma3" => self.gemma(&mut config),
            "phi3" => self.phi3(&mut config),
            "glm4" => self.partial(&mut config),
            "gpt-oss" => self.gpt_oss(&mut config)?,
            "deepseek2" => self.deepseek(file, &mut config)?,
            name if self.count("expert_count", 0) > 0 => {
                return Err(format!("mixtures of experts of `{name}` are not read from GGUF"));
            }
            _ => {}
        }
        let head = config["head_dim"].clone();
        let turned = self.get("rope.dimension_count").filter(|w| !latents && **w != head);
        if let Some(width) = turned.filter(|_| config["partial_rotary_factor"].is_null()) {
            return Err(format!("rotates {width} of {head} components of a head"));
        }
        let token = |id: &str| self.all.get(&format!("tokenizer.ggml.{id}_token_id"));
        for (key, id) in [("bos_token_id", "bos"), ("pad_token_id", "padding")] {
            if let Some(id) = token(id) {
                config[key] = id.clone();
            }
        }
        let mut ends: Vec<Value> = ["eos", "eot", "eom"].into_iter().filter_map(token).cloned().collect();
        ends.extend(self.ends(file));
        let mut seen = Vec::new();
        ends.retain(|id| {
            !seen.contains(id) && {
                seen.push(id.clone());
                true
            }
        });
        if !ends.is_empty() {
            config["eos_token_id"] = json!(ends);
        }
        Ok(config)
    }

    /// Control tokens whose texts say that they end a turn.
    fn ends(&self, file: &Gguf) -> Vec<Value> {
        let kinds = self.all.get("tokenizer.ggml.token_type").and_then(Value::as_array);
        let ends = |(i, t): &(usize, Cow<str>)| {
            let kind = kinds.and_then(|k| k.get(*i)?.as_u64());
            matches!(kind, Some(3 | 4)) && self.architecture.ends.contains(&&**t)
        };
        let tokens = file.texts("tokenizer.ggml.tokens");
        tokens.into_iter().flatten().enumerate().filter(ends).map(|(i, _)| json!(i)).collect()
    }

    fn mixtral(&self, config: &mut Value) {
        config["model_type"] = json!("mixtral");
        config["num_local_experts"] = json!(self.count("expert_count", 0));
        config["num_experts_per_tok"] = json!(self.count("expert_used_count", 2));
        unstated(config, "attention_bias");
    }

    fn qwen3_moe(&self, file: &Gguf, config: &mut Value) -> Result<(), String> {
        let dense = |i: &u64| file.shape(&format!("blk.{i}.ffn_gate_inp.weight")).is_none();
        let dense: Vec<u64> = self.layer_numbers().filter(dense).collect();
        config["num_experts"] = json!(self.count("expert_count", 0));
        config["num_experts_per_tok"] = json!(self.count("expert_used_count", 8));
        config["moe_intermediate_size"] = self.needed("expert_feed_forward_length")?.clone();
        // As every model of the architecture, and llama.cpp, does.
        config["norm_topk_prob"] = json!(true);
        config["mlp_only_layers"] = json!(dense);
        Ok(())
    }

    /// What files of Gemma leave out is as llama.cpp has it: the windows' places, and the scale of the scores, which is another in the largest model
    /// (of 46 layers, of 62 in Gemma 3).
    fn gemma(&self, config: &mut Value) {
        let (third, number) =
            (self.architecture.name == "gemma3", |v: &Value| v.as_u64().unwrap_or(1).max(1));
        let largest = config["num_hidden_layers"] == if third { 62 } else { 46 };
        let of_width = number(&config["hidden_size"]) / number(&config["num_attention_heads"]);
        config["query_pre_attn_scalar"] = if largest { of_width.into() } else { config["head_dim"].clone() };
        unstated(config, "hidden_act");
        config["hidden_activation"] = json!("gelu_pytorch_tanh");
        if third {
            config["final_logit_softcapping"] = json!(self.get(LOGITS_CAP));
            config["rope_local_base_freq"] = json!(self.get("rope.freq_base_swa").unwrap_or(&json!(10000.0)));
        } else {
            // The first files have neither; then it is the family's.
            for (key, cap) in
                [("attn_logit_softcapping", SCORES_CAP), ("final_logit_softcapping", LOGITS_CAP)]
            {
                if let Some(cap) = self.get(cap) {
                    config[key] = cap.clone();
                }
            }
        }
        let window = self.count(WINDOW, if third { 0 } else { 4096 });
        config["sliding_window"] = json!(window);
        if window == 0 {
            let each: Vec<_> = self.layer_numbers().map(|_| "full_attention").collect();
            config["layer_types"] = json!(each);
            unstated(config, "sliding_window");
        }
    }

    fn phi3(&self, config: &mut Value) {
        config["sliding_window"] = json!(Some(self.count(WINDOW, 0)).filter(|w| *w > 0));
        if let Some(original) = self.get("rope.scaling.original_context_length") {
            config["original_max_position_embeddings"] = original.clone();
        }
        self.partial(config);
        unstated(config, "attention_bias");
    }

    /// The part of a head that is rotated.
    fn partial(&self, config: &mut Value) {
        let turned = self.get("rope.dimension_count").and_then(Value::as_f64);
        if let Some((turned, head)) = turned.zip(config["head_dim"].as_f64()).filter(|(t, h)| t < h) {
            let share = turned / head;
            // Such that truncating gives the number again.
            config["partial_rotary_factor"] =
                json!(if (head * share).trunc() == turned { share } else { share.next_up() });
        }
    }

    fn gpt_oss(&self, config: &mut Value) -> Result<(), String> {
        config["num_local_experts"] = json!(self.count("expert_count", 0));
        config["num_experts_per_tok"] = json!(self.count("expert_used_count", 4));
        config["intermediate_size"] = self.needed("expert_feed_forward_length")?.clone();
        config["sliding_window"] = self.needed(WINDOW)?.clone();
        match config["rope_scaling"].is_null() {
            true => config["rope_scaling"] = json!({ "rope_type": "default" }),
            // As of all published models; files do not say so.
            false => config["rope_scaling"]["truncate"] = json!(false),
        }
        Ok(())
    }

    fn deepseek(&self, file: &Gguf, config: &mut Value) -> Result<(), String> {
        // Older files have keys and values of each head, newer ones what latents are taken for.
        let length = |key: &str| {
            self.get(&format!("attention.{key}_mla"))
                .map_or_else(|| self.needed(&format!("attention.{key}")), Ok)
        };
        let number = |v: &Value| v.as_u64().unwrap_or(0);
        let (turned, whole) = (self.needed("rope.dimension_count")?, number(length("key_length")?));
        let groups = self.count("expert_group_count", 1);
        let biased = |i: u64| file.shape(&format!("blk.{i}.exp_probs_b.bias")).is_some();
        let biased = self.layer_numbers().any(biased);
        let sigmoid = match self.count("expert_gating_func", 0) {
            2 => true,
            1 if biased => {
                return Err("routes by softmax and has biases of choice, which no model has".into());
            }
            1 => false,
            0 => biased,
            other => return Err(format!("routes by the function {other}, which is not known")),
        };
        let stated = json!({
            "model_type": if sigmoid { "deepseek_v3" } else { self.architecture.model_type },
            "num_key_value_heads": config["num_attention_heads"],
            "q_lora_rank": self.get("attention.q_lora_rank"),
            "kv_lora_rank": self.needed("attention.kv_lora_rank")?,
            "qk_rope_head_dim": turned,
            "qk_nope_head_dim": whole.saturating_sub(number(turned)),
            "v_head_dim": length("value_length")?,
            "moe_intermediate_size": self.needed("expert_feed_forward_length")?,
            "n_routed_experts": self.needed("expert_count")?,
            "num_experts_per_tok": self.needed("expert_used_count")?,
            "n_shared_experts": self.count("expert_shared_count", 0),
            "first_k_dense_replace": self.count("leading_dense_block_count", 0),
            "norm_topk_prob": self.get("expert_weights_norm").unwrap_or(&json!(false)),
            "routed_scaling_factor": self.get("expert_weights_scale").unwrap_or(&json!(1.0)),
            "n_group": groups,
            "topk_group": self.count("expert_group_used_count", 1),
        });
        for (key, value) in stated.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        if !sigmoid {
            config["topk_method"] = json!(if groups > 1 { "group_limited_greedy" } else { "greedy" });
        }
        unstated(config, "head_dim");
        Ok(())
    }
}

/// Leaves a key out.
fn unstated(config: &mut Value, key: &str) {
    config.as_object_mut().map(|config| config.remove(key));
}
