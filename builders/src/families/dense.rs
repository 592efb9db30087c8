//! Families with one gated MLP a layer that differ from Llama by their rows alone. Sources: the `…ForCausalLM` of transformers
//! that each row names as its architecture.

use super::decoder::{self, DECODER, DEFAULTS};
use super::model_type::{AttentionBias, Defaults, ModelType};
use super::windows::Windows;
use crate::config::{Names, NormPlacement, QkNorm, RopeLayout};

/// Llama and its many namesakes: pre-norm, grouped-query attention, rope by halves, SwiGLU.
pub static LLAMA: ModelType = ModelType {
    name: "llama",
    architectures: &["LlamaForCausalLM"],
    description: "Llama 1 to 3.x and models of the same shape: GQA, optional biases, rope scaling",
    defaults: Defaults {
        kv_heads_all: true,
        max_positions: Some(2048),
        bias: AttentionBias::AllKey(false),
        mlp_bias: true,
        ..DEFAULTS
    },
    ..DECODER
};

/// Mistral: Llama without biases, every layer with the same sliding window or none.
pub static MISTRAL: ModelType = ModelType {
    name: "mistral",
    architectures: &["MistralForCausalLM"],
    description: "Mistral 7B and its successors: GQA, sliding window on all layers or none",
    defaults: Defaults {
        max_positions: Some(131_072),
        windows: Windows::AllListed(Some(4096)),
        ..DEFAULTS
    },
    ..DECODER
};

/// Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows on the upper layers if asked for.
pub static QWEN2: ModelType = ModelType {
    name: "qwen2",
    architectures: &["Qwen2ForCausalLM"],
    description: "Qwen2 and Qwen2.5: GQA with biases on q, k and v, optional windows on upper layers",
    defaults: Defaults {
        max_positions: Some(32_768),
        bias: AttentionBias::Qkv,
        windows: Windows::UpperSwitched(4096, 28),
        ..DEFAULTS
    },
    ..DECODER
};

/// Qwen3 (dense): heads of a stated width, queries and keys normed per head before the rotation, no biases by default.
pub static QWEN3: ModelType = ModelType {
    name: "qwen3",
    architectures: &["Qwen3ForCausalLM"],
    description: "Qwen3 dense: GQA with its own head width, q and k normed before rope",
    defaults: Defaults {
        head_dim: Some(128),
        max_positions: Some(32_768),
        qk_norm: QkNorm::BeforeRope,
        bias: AttentionBias::AllKey(false),
        windows: Windows::UpperSwitched(4096, 28),
        ..DEFAULTS
    },
    ..DECODER
};

/// OLMo 2: post-norm, queries and keys normed over all heads together.
pub static OLMO2: ModelType = ModelType {
    name: "olmo2",
    architectures: &["Olmo2ForCausalLM"],
    description: "OLMo 2: norms after attention and MLP, q and k normed over all heads",
    names: &Names {
        attention_out_norm: "post_attention_layernorm",
        mlp_out_norm: "post_feedforward_layernorm",
        ..decoder::NAMES
    },
    defaults: Defaults {
        kv_heads_all: true,
        max_positions: Some(2048),
        norm_eps: Some(1e-5),
        norms: NormPlacement::Post,
        qk_norm: QkNorm::WholeBeforeRope,
        bias: AttentionBias::AllKey(false),
        ..DEFAULTS
    },
    ..DECODER
};

/// GLM 4 (0414): half of each head rotated by interleaved pairs, four norms a layer, biases on queries, keys and values, gate
/// and up in one tensor.
pub static GLM4: ModelType = ModelType {
    name: "glm4",
    architectures: &["Glm4ForCausalLM"],
    description: "GLM 4 (0414): partial interleaved rope, norms before and after attention and MLP",
    names: &Names { mlp_gate_up: Some("mlp.gate_up_proj"), ..decoder::NAMES },
    defaults: Defaults {
        head_dim: Some(128),
        max_positions: Some(131_072),
        norm_eps: Some(1.5625e-7),
        layout: RopeLayout::Interleaved,
        rotary: Some(0.5),
        norms: NormPlacement::Sandwich,
        bias: AttentionBias::QkvKey(true),
        ..DEFAULTS
    },
    ..DECODER
};

/// Phi-3, Phi-3.5 and Phi-4: Llama with queries, keys and values in one tensor, gate and up in another, rope of a part of the
/// head, LongRoPE in models of long contexts, one window on all layers or none.
pub static PHI3: ModelType = ModelType {
    name: "phi3",
    architectures: &["Phi3ForCausalLM"],
    description: "Phi-3, 3.5 and 4: fused projections, LongRoPE, sliding window on all layers or none",
    names: &Names {
        qkv: Some("self_attn.qkv_proj"),
        mlp_gate_up: Some("mlp.gate_up_proj"),
        ..decoder::NAMES
    },
    defaults: Defaults {
        kv_heads_all: true,
        max_positions: Some(4096),
        norm_eps: Some(1e-5),
        scalings: &["longrope", "su"],
        rotary: Some(1.0),
        original: Some(4096),
        windows: Windows::All(None),
        ..DEFAULTS
    },
    ..DECODER
};
