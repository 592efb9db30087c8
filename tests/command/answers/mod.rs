//! The serving commands as a user meets them: `generate`, `chat` and `serve` on a golden model whose every token is a word.

mod chat;
pub mod fixture;
mod generate;
mod mixture;
mod operate;
pub mod serve;
mod verify;
