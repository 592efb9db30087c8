//! The registry of model types. In: a type's name, an architecture, or the keys of a file. Out: its registration, one
//! file per family under `models/`. A family is added by writing that file and its line in the table of `models/mod.rs`.

use crate::config::{ConfigError, ModelConfig, Raw};
use serde_json::{Map, Value};
use std::fmt;

pub use crate::models::MODELS;

/// One registered model type.
pub struct ModelType {
    /// Value of `model_type`.
    pub name: &'static str,
    /// Values of `architectures` that mean this type; the first, if any, is written on saving.
    pub architectures: &'static [&'static str],
    /// One line for listings.
    pub description: &'static str,
    /// Keys that are read, in groups that families share.
    pub keys: &'static [&'static [&'static str]],
    /// Pairs of a key and its other spelling.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Keys of the family's own that mean nothing for what is built here.
    pub inert: &'static [&'static str],
    /// Names of the weights.
    pub names: &'static Names,
    /// Raw keys to the resolved description.
    pub resolve: fn(&Raw) -> Result<ModelConfig, ConfigError>,
    /// And back.
    pub save: fn(&ModelConfig) -> Map<String, Value>,
}

/// The checkpoint's names. Layer parts stand between the layer's prefix and `.weight` or `.bias`.
#[derive(Debug)]
pub struct Names {
    /// Embedding, `[vocab, hidden]`.
    pub embed: &'static str,
    /// Prefix of layer `{i}`, up to and with its dot.
    pub layer: &'static str,
    /// Norm before attention, `[hidden]`.
    pub input_norm: &'static str,
    /// Query projection, `[heads * head_dim, hidden]`.
    pub q: &'static str,
    /// Key projection, `[kv_heads * head_dim, hidden]`.
    pub k: &'static str,
    /// Value projection, `[kv_heads * head_dim, hidden]`.
    pub v: &'static str,
    /// Where the checkpoint has one tensor for the three: its rows are those of the query, key and value projections.
    pub qkv: Option<&'static str>,
    /// Norm of queries, `[head_dim]` or as wide as they are.
    pub q_norm: &'static str,
    /// Norm of keys, `[head_dim]` or as wide as they are.
    pub k_norm: &'static str,
    /// Gate on the attention output, `[heads * head_dim, hidden]`.
    pub gate: &'static str,
    /// Scores that join each head's softmax, `[heads]`, whole but for the layer's prefix.
    pub sinks: Option<&'static str>,
    /// Output projection, `[hidden, heads * head_dim]`.
    pub o: &'static str,
    /// Norm of what attention adds to the stream, `[hidden]`.
    pub attention_out_norm: &'static str,
    /// Norm before the MLP, `[hidden]`.
    pub post_attention_norm: &'static str,
    /// MLP gate, `[intermediate, hidden]`.
    pub mlp_gate: &'static str,
    /// MLP up, `[intermediate, hidden]`.
    pub mlp_up: &'static str,
    /// Where the checkpoint has one tensor for gate and up: its rows are those of the gate, then of up.
    pub mlp_gate_up: Option<&'static str>,
    /// MLP down, `[hidden, intermediate]`.
    pub mlp_down: &'static str,
    /// Norm of what the MLP adds to the stream, `[hidden]`.
    pub mlp_out_norm: &'static str,
    /// Last norm, `[hidden]`.
    pub final_norm: &'static str,
    /// Head, `[vocab, hidden]`; absent from checkpoints with tied embeddings.
    pub head: &'static str,
    /// How names begin of tensors of parts that are not built, such as an image tower; they are left aside.
    pub beside: &'static [&'static str],
}

impl Names {
    /// Name of a layer's tensor: `in_layer(3, names.q, "weight")`.
    pub fn in_layer(&self, i: usize, part: &str, suffix: &str) -> String {
        format!("{}{part}.{suffix}", self.layer.replace("{i}", &i.to_string()))
    }
}

impl ModelType {
    /// True for a key that this type reads, in either spelling.
    pub fn reads(&self, key: &str) -> bool {
        self.keys.iter().any(|group| group.contains(&key))
            || self.aliases.iter().any(|(_, other)| *other == key)
    }
}

impl PartialEq for ModelType {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for ModelType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The type with this name.
pub fn find(name: &str) -> Option<&'static ModelType> {
    MODELS.iter().copied().find(|m| m.name == name)
}

/// The type whose architectures include this one.
pub fn find_architecture(architecture: &str) -> Option<&'static ModelType> {
    MODELS.iter().copied().find(|m| m.architectures.contains(&architecture))
}

/// Names of all types for messages.
pub fn known() -> String {
    MODELS.iter().map(|m| m.name).collect::<Vec<_>>().join(", ")
}
