//! A tiny configuration of every family, and values for the leaves of its graphs.

use astrai_builders::{Logits, Loss, ModelConfig, Program};
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::ops::Op;
use astrai_ir::{DType, Graph, Precision, Sizes, Tensor, eval};
use std::collections::HashMap;

/// Model type and configuration.
pub const FAMILIES: [(&str, &str); 18] = [
    (
        "autoregressive_lm",
        r#"{"model_type": "autoregressive_lm", "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "use_gated_attention": true, "use_qk_norm": true, "vocab_size": 50}"#,
    ),
    (
        "autoregressive_lm",
        r#"{"model_type": "autoregressive_lm", "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "ffn_type": "moe",
        "n_routed_experts": 6, "n_activated_experts": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 24, "vocab_size": 50}"#,
    ),
    (
        "llama",
        r#"{"model_type": "llama", "head_dim": 8, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "vocab_size": 50}"#,
    ),
    (
        "mistral",
        r#"{"model_type": "mistral", "head_dim": 8, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4, "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "mixtral",
        r#"{"model_type": "mixtral", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "qwen2",
        r#"{"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 50}"#,
    ),
    (
        "qwen3",
        r#"{"model_type": "qwen3", "head_dim": 8, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "olmo2",
        r#"{"model_type": "olmo2", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "glm4",
        r#"{"model_type": "glm4", "head_dim": 12, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "attention_bias": true, "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "vocab_size": 50}"#,
    ),
    (
        "phi3",
        r#"{"model_type": "phi3", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "original_max_position_embeddings": 10, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-6, "sliding_window": 5,
        "rope_scaling": {"type": "longrope", "short_factor": [1, 1.25, 1.5], "long_factor": [2, 3, 4]},
        "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "gemma2",
        r#"{"model_type": "gemma2", "head_dim": 12, "hidden_size": 32, "intermediate_size": 48, "sliding_window": 4,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "max_position_embeddings": 128,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "query_pre_attn_scalar": 10,
        "rms_norm_eps": 1e-6, "vocab_size": 50}"#,
    ),
    (
        "gemma3_text",
        r#"{"model_type": "gemma3_text", "head_dim": 12, "hidden_size": 32, "intermediate_size": 48, "sliding_window": 4,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "query_pre_attn_scalar": 10, "rms_norm_eps": 1e-6, "sliding_window_pattern": 2, "vocab_size": 50}"#,
    ),
    (
        "gemma3",
        r#"{"model_type": "gemma3", "text_config": {"head_dim": 12, "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 4, "sliding_window_pattern": 2,
        "vocab_size": 50}, "vision_config": {"hidden_size": 16}}"#,
    ),
    (
        "qwen3_moe",
        r#"{"model_type": "qwen3_moe", "head_dim": 8, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "gpt_oss",
        r#"{"model_type": "gpt_oss", "head_dim": 8, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128,
        "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "num_local_experts": 4, "rms_norm_eps": 1e-6, "sliding_window": 4, "swiglu_limit": 0.5, "vocab_size": 50}"#,
    ),
    (
        "deepseek_v2",
        r#"{"model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "kv_lora_rank": 12, "q_lora_rank": null, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "deepseek_v3",
        r#"{"model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 1.0}, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 50}"#,
    ),
    (
        "autoregressive_lm",
        r#"{"model_type": "autoregressive_lm", "attn_type": "mla", "kv_lora_rank": 12, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "use_qk_norm": true, "vocab_size": 50}"#,
    ),
];

/// The encoder, whose programs have no loss.
pub const ENCODER: (&str, &str) = (
    "embedding",
    r#"{"model_type": "embedding", "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128,
    "normalize_embeddings": true, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "pooling_type": "mean", "rms_norm_eps": 1e-5, "use_gated_attention": true, "use_qk_norm": true, "vocab_size": 50}"#,
);

/// The resolved configuration.
pub fn config(text: &str) -> ModelConfig {
    ModelConfig::parse(text, "config.json").unwrap_or_else(|e| panic!("{e}")).config
}

/// Logits and loss of up to two sequences.
pub fn program(tokens: u64) -> Program {
    Program { tokens, sequences: 2, span: tokens, logits: Logits::All, loss: Loss::Mean, cache: None }
}

/// A machine on which nothing runs.
pub fn machine() -> Machine {
    Machine::new(Kind::Null, 1).unwrap()
}

/// Outputs of a model's graph for two sequences of 4 and 8 tokens, weights drawn by checkpoint name.
pub fn evaluate(g: &Graph) -> Vec<(String, Tensor)> {
    evaluate_with(g, &leaves(g), Precision::default())
}

/// The same with these leaves.
pub fn evaluate_with(
    g: &Graph,
    leaves: &HashMap<String, Tensor>,
    precision: Precision,
) -> Vec<(String, Tensor)> {
    let sizes = Sizes::from([("tokens".to_string(), 12), ("sequences".to_string(), 2)]);
    eval(g, leaves, &sizes, precision).unwrap_or_else(|e| panic!("{e}"))
}

/// Inputs of two sequences, and weights.
pub fn leaves(g: &Graph) -> HashMap<String, Tensor> {
    let int = |v: Vec<i64>| Tensor::int(DType::I32, &[v.len()], v);
    let mut leaves: HashMap<String, Tensor> = HashMap::from([
        ("input_ids".into(), int((0..12).map(|i| i * 17 % 50).collect())),
        ("positions".into(), int((0..4).chain(0..8).collect())),
        ("starts".into(), int(vec![0, 4, 12])),
        ("targets".into(), int((0..12).map(|i| i * 29 % 51 - 1).collect())),
    ]);
    for n in g.nodes() {
        let Op::Weight(w) = &n.op else { continue };
        let shape: Vec<usize> = w.ty.shape.iter().map(|d| d.size().unwrap()).collect();
        let width: usize = shape[1..].iter().product();
        let values = w.rows().iter().flat_map(|r| drawn(&r.name, r.rows * width)).collect();
        leaves.insert(w.name.clone(), Tensor::float(w.ty.dtype, &shape, values));
    }
    leaves
}

/// `n` numbers between -0.3 and 0.3 that follow from a name.
pub fn drawn(name: &str, n: usize) -> Vec<f64> {
    let mut state = name.bytes().fold(7u64, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    (0..n).map(|_| (next() - 0.5) * 0.6).collect()
}
