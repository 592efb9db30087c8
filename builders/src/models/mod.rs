//! One file per model family: its registration, how its keys resolve, how its weights are named. What the families of
//! transformers share is in `decoder`, what Gemma 2 and 3 share in `gemma`, what experts share in `experts`.

mod decoder;
mod deepseek;
mod deepseek_moe;
mod experts;
mod gemma;
mod latent;

use crate::registry::ModelType;

macro_rules! families {
    ($($module:ident: $($model:ident)+,)*) => {
        $(pub mod $module;)*

        /// Every model type that can be built, in the order they are listed to the user.
        pub static MODELS: &[&ModelType] = &[$($(&$module::$model),+),*];
    };
}

// A family is one line: its file and the model types registered there.
families! {
    astrai: ASTRAI,
    llama: LLAMA,
    mistral: MISTRAL,
    mixtral: MIXTRAL,
    qwen2: QWEN2,
    qwen3: QWEN3,
    qwen3_moe: QWEN3_MOE,
    deepseek_v2: DEEPSEEK_V2,
    deepseek_v3: DEEPSEEK_V3,
    olmo2: OLMO2,
    glm4: GLM4,
    phi3: PHI3,
    gemma2: GEMMA2,
    gemma3: GEMMA3_TEXT GEMMA3,
    gpt_oss: GPT_OSS,
    embedding: EMBEDDING,
}
