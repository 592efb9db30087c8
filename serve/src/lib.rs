//! Requests in, token streams out. The engine, the schedulers and the HTTP APIs are built on `astrai_runtime::Session`; greedy
//! generation without a cache is `astrai quickstart`'s, in the root package.

pub mod stop;
pub mod template;
pub mod tokenizer;
