//! Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a module of one decoder layer behind a model's, which says from the
//! model's last hidden state of a token, and from the token behind it, what comes after that. In: what the family states of it. Out: the module as
//! a configuration of its own, from which its graph and the names of its weights follow as those of any model do.

use super::names::Names;
use super::spec::{LayerSpec, ModelConfig};
use super::tensors::TensorSpec;

/// What a family's module has.
#[derive(Clone, Debug, PartialEq)]
pub struct MtpSpec {
    /// Its decoder layer.
    pub layer: LayerSpec,
    /// Names of its weights.
    pub names: &'static MtpNames,
}

/// The checkpoint's names of a module's weights.
#[derive(Debug, PartialEq)]
pub struct MtpNames {
    /// Those that a model has, too: embedding and head are the model's own, `{i}` of the last norm is the module's layer.
    pub model: Names,
    /// Norm of the token's embedding, `[hidden]`, within the layer.
    pub token_norm: &'static str,
    /// Norm of the hidden state, `[hidden]`, within the layer.
    pub hidden_norm: &'static str,
    /// From both, the token's first, to the layer's input, `[hidden, 2 * hidden]`, within the layer.
    pub join: &'static str,
}

/// What the programs over pages of a model have to do with hidden states: those behind the last norm, as vLLM's `deepseek_mtp.py` is handed
/// them; a module's own are normed by its last norm, too, before they stand for the model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// The model keeps those of its tokens in pages.
    Kept,
    /// A module, whose layer has this number, reads them there, and keeps its own as those of the tokens that it proposes.
    Read(usize),
}

impl ModelConfig {
    /// The module as a model of one layer over pages where hidden states are kept; none where the model has no module.
    pub fn module(&self) -> Option<ModelConfig> {
        let mtp = self.mtp.clone()?;
        Some(ModelConfig {
            names: &mtp.names.model,
            num_layers: 1,
            layers: vec![mtp.layer.clone()],
            hidden: Some(Hidden::Read(self.num_layers)),
            mtp: Some(mtp),
            packed: None,
            adapters: None,
            ..self.clone()
        })
    }

    /// Tensors of the checkpoint that are the module's alone; none without one.
    pub fn module_tensors(&self) -> Vec<TensorSpec> {
        let all = self.module().map(|module| module.tensors()).unwrap_or_default();
        all.into_iter().filter(|t| t.name != self.names.embed && t.name != self.names.head).collect()
    }

    /// The number of the first layer: a module's stands behind those of its model.
    pub fn first_layer(&self) -> usize {
        match self.hidden {
            Some(Hidden::Read(layer)) => layer,
            _ => 0,
        }
    }

    /// Name of the last norm's weight.
    pub fn final_norm(&self) -> String {
        self.names.final_norm.replace("{i}", &self.first_layer().to_string())
    }
}
