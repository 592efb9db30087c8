//! The golden cases by name, for tests of every family.

mod find;

pub use find::case;

/// Families without experts.
pub const DENSE: [&str; 12] = [
    "llama",
    "qwen3",
    "astrai_gqa",
    "llama3_rope",
    "qwen2",
    "mistral",
    "astrai_gqa_older",
    "olmo2",
    "glm4",
    "phi3",
    "gemma2",
    "gemma3",
];

/// Mixtures of experts: routing flips on rounding, so bf16 is held to the interpreter and not to the reference.
pub const EXPERTS: [&str; 6] =
    ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "astrai_mla_moe", "gpt_oss"];
