//! Three small configurations.

/// A small Llama, in the layout of published files.
pub const LLAMA: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
  "intermediate_size": 112, "max_position_embeddings": 512, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
  "original_max_position_embeddings": 64, "rope_type": "llama3"}, "rope_theta": 500000.0,
  "tie_word_embeddings": false, "torch_dtype": "float32", "vocab_size": 320 }"#;

/// A small Qwen3 with the newer rope layout and a window on its upper layer.
pub const QWEN3: &str = r#"{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "dtype": "bfloat16", "eos_token_id": [2, 5],
  "head_dim": 16, "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 256,
  "max_window_layers": 1, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 3,
  "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_parameters": {"rope_type": "yarn", "factor": 4.0,
  "original_max_position_embeddings": 64, "rope_theta": 1000000.0}, "sliding_window": 8,
  "tie_word_embeddings": true, "use_sliding_window": true, "vocab_size": 320 }"#;

/// A small AstrAI model in the older spelling.
pub const ASTRAI: &str = r#"{
  "dim": 64, "dim_ffn": 112, "max_len": 128, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "norm_eps": 1e-05,
  "rope_theta": 10000.0, "rope_scaling": {"type": "ntk", "factor": 4.0}, "tie_weight": true,
  "use_gated_attention": true, "use_qk_norm": true, "vocab_size": 320 }"#;
