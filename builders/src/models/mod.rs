//! One file per model family: its registration, how its keys resolve, how its weights are named. What the families of
//! transformers share is in `decoder`.

pub mod astrai;
mod decoder;
mod experts;
pub mod llama;
pub mod mistral;
pub mod mixtral;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_moe;
