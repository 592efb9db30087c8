//! A model type as a row of a table. In: nothing. Out: the type's names, defaults and weight names, and the functions
//! that read and save it where the row alone does not say how.

use super::windows::Windows;
use crate::config::rope_keys::{LayerType, RopeKeys, ScalingName};
use crate::config::{
    Activation, ConfigError, ModelConfig, Names, NormPlacement, QkNorm, Raw, RopeLayout, keys,
};
use serde_json::{Map, Value};
use std::fmt;

/// One registered model type.
pub struct ModelType {
    /// Value of `model_type`.
    pub name: &'static str,
    /// Values of `architectures` that mean this type; the first, if any, is written on saving.
    pub architectures: &'static [&'static str],
    /// One line for listings.
    pub description: &'static str,
    /// Pairs of a key and its other spelling.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Keys of the family that mean nothing for what is built here.
    pub inert: &'static [&'static str],
    /// Names of the weights.
    pub names: &'static Names,
    /// The model when a key is absent, and which optional keys the family has.
    pub defaults: Defaults,
    /// Raw keys to the resolved configuration.
    pub resolve: fn(&Raw, &ModelType) -> Result<ModelConfig, ConfigError>,
    /// The resolved configuration to raw keys.
    pub save: fn(&ModelConfig, &ModelType) -> Map<String, Value>,
}

/// What differs between families when a key is absent, as in transformers, and which optional keys they have.
#[derive(Clone, Copy)]
pub struct Defaults {
    /// True when an absent `num_key_value_heads` means all heads; else the key has to be stated (`null` means all heads).
    pub kv_heads_all: bool,
    /// Head width; `None` is `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Context, tokens; `None` has to be stated.
    pub max_positions: Option<usize>,
    /// RMSNorm's epsilon; `None` has to be stated.
    pub norm_eps: Option<f64>,
    /// Rope pairs.
    pub layout: RopeLayout,
    /// Rope scaling types that the family's reference computes.
    pub scalings: &'static [ScalingName],
    /// Share of a head that rope rotates; `None`: whole heads, and nothing else is accepted.
    pub rotary: Option<f64>,
    /// Context of the original training, to which rope scalings refer; `None` is the context.
    pub original: Option<usize>,
    /// Where rope differs between types of layers: the type that is read for all layers.
    pub layer_type: Option<LayerType>,
    /// The head is the embedding.
    pub tie: bool,
    /// Function of the MLP's gate.
    pub activation: Activation,
    /// Where the residual branches are normed.
    pub norms: NormPlacement,
    /// RMSNorm of queries and keys.
    pub qk_norm: QkNorm,
    /// Biases of attention.
    pub bias: AttentionBias,
    /// The family has the key `mlp_bias`; false when the key is absent.
    pub mlp_bias: bool,
    /// Which layers have a sliding window.
    pub windows: Windows,
}

/// Biases of the projections of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBias {
    /// None, and no key for them.
    None,
    /// Always on queries, keys and values.
    Qkv,
    /// On queries, keys and values if `attention_bias` says so; the value is what an absent key means.
    QkvKey(bool),
    /// On all four projections if `attention_bias` says so; the value is what an absent key means.
    AllKey(bool),
}

impl Defaults {
    /// How rope is read.
    pub(super) fn rope(&self) -> RopeKeys {
        RopeKeys {
            layout: self.layout,
            allowed: self.scalings,
            share: self.rotary,
            original: self.original,
            layer_type: self.layer_type,
        }
    }
}

impl AttentionBias {
    /// Whether queries, keys and values, and whether the output projection have a bias.
    pub(super) fn read(self, raw: &Raw) -> Result<(bool, bool), ConfigError> {
        let flag = |default| raw.flag(ATTENTION_BIAS[0], default);
        Ok(match self {
            AttentionBias::None => (false, false),
            AttentionBias::Qkv => (true, false),
            AttentionBias::QkvKey(default) => (flag(default)?, false),
            AttentionBias::AllKey(default) => (flag(default)?, flag(default)?),
        })
    }

    /// Keys that [`AttentionBias::read`] looks at.
    pub(super) fn keys(self) -> &'static [&'static str] {
        if matches!(self, AttentionBias::QkvKey(_) | AttentionBias::AllKey(_)) { ATTENTION_BIAS } else { &[] }
    }
}

const ATTENTION_BIAS: &[&str] = &["attention_bias"];

impl ModelType {
    /// Warns of keys of `raw` that resolving has not read, or refuses them.
    pub(crate) fn check_keys(&self, raw: &Raw) -> Result<(), ConfigError> {
        // The type itself was read when it was inferred.
        let known = |key: &str| key == "model_type" || raw.was_read(key) || self.inert.contains(&key);
        let other_spelling = |key: &str| self.aliases.iter().any(|(_, other)| *other == key);
        keys::check(raw, self.name, |key| known(key) || other_spelling(key))
    }
}

impl fmt::Debug for ModelType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}
