//! Model families. In: raw keys. Out: a configuration; and back to keys. A family is a row of a table ([`dense`]), or a file with
//! its row and the functions in which it differs. What families share is in `decoder`, `windows`, `experts` and `latent`.

mod decoder;
mod deepseek_moe;
mod experts;
mod latent;
mod model_type;
mod windows;

pub use model_type::ModelType;

macro_rules! families {
    ($($module:ident: $($model:ident)+,)*) => {
        $(mod $module;)*

        /// Every model type that can be built, in the order they are listed to the user.
        pub static MODELS: &[&ModelType] = &[$($(&$module::$model),+),*];
    };
}

// A family is one line: its file and the model types registered there.
families! {
    astrai: ASTRAI,
    dense: LLAMA MISTRAL QWEN2 QWEN3 OLMO2 GLM4 PHI3,
    mixtral: MIXTRAL,
    qwen3_moe: QWEN3_MOE,
    deepseek: DEEPSEEK_V2 DEEPSEEK_V3,
    gemma: GEMMA2,
    gemma3: GEMMA3_TEXT GEMMA3,
    gpt_oss: GPT_OSS,
    embedding: EMBEDDING,
}
