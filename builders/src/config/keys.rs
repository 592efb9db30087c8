//! The one table of keys that no model type reads (law 4). In: a raw configuration and its type. Out: nothing for keys
//! that mean nothing to computation, a warning for unknown ones, an error for those that would change the result.

use super::error::{ConfigError, show};
use super::raw::Raw;
use serde_json::Value;

/// A key outside the model types' own.
struct Row {
    key: &'static str,
    /// Values that change nothing; `null` never does.
    harmless: fn(&Value) -> bool,
    otherwise: Otherwise,
}

enum Otherwise {
    /// The result stays the same, but the user may expect something else.
    Warn(&'static str),
    /// The result would differ.
    Refuse,
}

fn null(_: &Value) -> bool {
    false
}

fn off(v: &Value) -> bool {
    *v == Value::Bool(false)
}

fn on(v: &Value) -> bool {
    *v == Value::Bool(true)
}

fn zero(v: &Value) -> bool {
    v.as_f64() == Some(0.0)
}

fn one(v: &Value) -> bool {
    v.as_f64() == Some(1.0)
}

/// An empty list or object.
fn empty(v: &Value) -> bool {
    v.as_array().is_some_and(Vec::is_empty) || v.as_object().is_some_and(|m| m.is_empty())
}

/// Only full attention.
fn full(v: &Value) -> bool {
    v.as_array().is_some_and(|list| list.iter().all(|t| t == "full_attention"))
}

/// Where the file comes from, how it is run, how text is generated: never what the model computes.
const INERT: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

const fn refuse(key: &'static str, harmless: fn(&Value) -> bool) -> Row {
    Row { key, harmless, otherwise: Otherwise::Refuse }
}

const fn warn(key: &'static str, harmless: fn(&Value) -> bool, why: &'static str) -> Row {
    Row { key, harmless, otherwise: Otherwise::Warn(why) }
}

const DROPOUT: &str = "no dropout is applied, neither in training nor in inference";
const TRAINING: &str = "it belongs to the training configuration and was ignored here";

const ROWS: &[Row] = &[
    warn("attention_dropout", zero, DROPOUT),
    warn("attention_probs_dropout_prob", zero, DROPOUT),
    warn("attn_pdrop", zero, DROPOUT),
    warn("classifier_dropout", zero, DROPOUT),
    warn("embd_pdrop", zero, DROPOUT),
    warn("hidden_dropout", zero, DROPOUT),
    warn("hidden_dropout_prob", zero, DROPOUT),
    warn("mlp_dropout", zero, DROPOUT),
    warn("resid_pdrop", zero, DROPOUT),
    warn("residual_dropout", zero, DROPOUT),
    warn("neftune_alpha", zero, TRAINING),
    warn("auto_map", empty, "code that comes with a checkpoint is never run"),
    warn("pretraining_tp", one, "it only splits products, up to rounding the result is the same"),
    refuse("add_cross_attention", off),
    refuse("alibi", off),
    refuse("attention_bias", off),
    refuse("attention_chunk_size", null),
    refuse("attention_multiplier", null),
    refuse("attn_logit_softcapping", null),
    refuse("attn_output_gate", off),
    refuse("attn_type", |v| v == "gqa"),
    refuse("chunk_size_feed_forward", zero),
    refuse("clip_qkv", null),
    refuse("compression_config", null),
    refuse("cross_attention_hidden_size", null),
    refuse("embedding_multiplier", one),
    refuse("expert_layer_period", null),
    refuse("ffn_type", |v| v == "mlp"),
    refuse("final_logit_softcapping", null),
    refuse("first_k_dense_replace", null),
    refuse("full_attention_interval", null),
    refuse("is_causal", on),
    refuse("is_encoder_decoder", off),
    refuse("kv_lora_rank", null),
    refuse("layer_types", full),
    refuse("linear_num_key_heads", null),
    refuse("linear_num_value_heads", null),
    refuse("logit_scale", one),
    refuse("logits_scaling", one),
    refuse("mlp_bias", off),
    refuse("moe_intermediate_size", null),
    refuse("n_group", null),
    refuse("n_routed_experts", zero),
    refuse("n_shared_experts", zero),
    refuse("no_rope_layer_interval", null),
    refuse("no_rope_layers", empty),
    refuse("num_experts", zero),
    refuse("num_experts_per_tok", zero),
    refuse("num_local_experts", zero),
    refuse("parallel_attn", off),
    refuse("per_layer_config", empty),
    refuse("pruned_heads", empty),
    refuse("q_lora_rank", null),
    refuse("qk_layernorm", off),
    refuse("qk_norm", off),
    refuse("qk_nope_head_dim", null),
    refuse("qk_rope_head_dim", null),
    refuse("qkv_bias", off),
    refuse("query_pre_attn_scalar", null),
    refuse("residual_multiplier", one),
    refuse("rope_interleave", off),
    refuse("rope_interleaved", off),
    refuse("rope_local_base_freq", null),
    refuse("rotary_pct", one),
    refuse("routed_scaling_factor", one),
    refuse("router_jitter_noise", zero),
    refuse("scale_attn_weights", on),
    refuse("scale_emb", one),
    refuse("scoring_func", null),
    refuse("shared_expert_intermediate_size", zero),
    refuse("sliding_window", null),
    refuse("sliding_window_pattern", null),
    refuse("swiglu_limit", null),
    refuse("text_config", null),
    refuse("tie_encoder_decoder", off),
    refuse("topk_group", null),
    refuse("topk_method", null),
    refuse("use_bias", off),
    refuse("use_bidirectional_attention", off),
    refuse("use_gated_attention", off),
    refuse("use_qk_norm", off),
    refuse("use_sliding_window", off),
    refuse("v_head_dim", null),
    refuse("vision_config", null),
];

/// Walks the keys of `raw` that the model type of this name does not know.
pub(crate) fn check(raw: &Raw, model: &str, known: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
    for (key, value) in raw.entries() {
        if known(key) || INERT.contains(&key) {
            continue;
        }
        match ROWS.iter().find(|row| row.key == key) {
            Some(row) if value.is_null() || (row.harmless)(value) => {}
            Some(Row { otherwise: Otherwise::Warn(why), .. }) => {
                raw.warn(format!("key `{key}` is {}: {why}", show(value)));
            }
            Some(_) => {
                let problem = format!("is {}, which {model} does not compute here", show(value));
                return Err(raw.refuse(key, problem, "the result would differ, so the model is refused"));
            }
            None => raw.ignore(key),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stands_once() {
        let mut keys: Vec<&str> = INERT.iter().copied().chain(ROWS.iter().map(|r| r.key)).collect();
        keys.sort_unstable();
        let count = keys.len();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }
}
