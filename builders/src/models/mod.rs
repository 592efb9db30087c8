//! One file per model family: its registration, how its keys resolve, how its weights are named. What the families of
//! transformers share is in `decoder`, what Gemma 2 and 3 share in `gemma`.

pub mod astrai;
mod decoder;
mod deepseek;
mod deepseek_moe;
pub mod deepseek_v2;
pub mod deepseek_v3;
mod experts;
mod gemma;
pub mod gemma2;
pub mod gemma3;
pub mod glm4;
mod latent;
pub mod llama;
pub mod mistral;
pub mod mixtral;
pub mod olmo2;
pub mod phi3;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_moe;
