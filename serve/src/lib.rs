//! Requests in, token streams out. The engine owns a model on a thread of its own; requests reach it as tokens and leave as
//! events, one a step. What text is to tokens is the tokenizer's and the chat template's; what a step computes is the
//! scheduler's, within the pages of the KV state; what token follows from logits is the sampler's.

pub mod answer;
pub mod cache;
pub mod engine;
mod files;
pub mod golden;
pub mod grammar;
pub mod http;
pub mod markup;
pub mod paged;
pub mod pages;
pub mod recommended;
pub mod request;
pub mod sample;
pub mod scheduler;
pub mod stop;
pub mod template;
#[cfg(test)]
mod tests;
pub mod tokenizer;
