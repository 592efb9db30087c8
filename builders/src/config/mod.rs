//! The configuration of a model as plain data, and typed access to the raw keys that it is read from. In: the text of a
//! `config.json`. Out: a [`ModelConfig`] in which nothing is left to default, and the tensors that it describes.

mod error;
pub(crate) mod json;
pub(crate) mod keys;
mod mtp;
mod names;
pub(crate) mod packing;
mod raw;
mod rope;
pub(crate) mod rope_keys;
mod spec;
mod tensors;

pub(crate) use error::{excerpt, show};
pub(crate) use tensors::count_parameters;

pub use error::ConfigError;
pub use mtp::{Hidden, MtpNames, MtpSpec};
pub use names::Names;
pub use raw::Raw;
pub use rope::{LongRope, RopeLayout, RopeScaling, RopeSpec, Yarn, yarn_mscale};
pub use spec::{
    Activation, AttentionSpec, Balance, EncoderSpec, ExpertNames, ExpertsSpec, InitStyle, LatentNames,
    LatentSpec, LayerSpec, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_PARAMETERS, MAX_POSITIONS,
    MAX_VOCAB, MAX_WIDTH, MlpSpec, ModelConfig, NormPlacement, Pooling, QkNorm, RopeKey, RouterSpec,
    SharedSpec, Slots, StackedExperts, StackedNames,
};
pub use tensors::{Init, TensorSpec};
