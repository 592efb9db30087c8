//! Preprocessing: records of text become records of token ids with masks. In: JSON lines (chats, text, preferences, answers with
//! rewards), a tokenizer, a declarative [`Config`]. Out: a folder with shards of a [`Store`](super::Store) for each domain,
//! packed, and `dataset.json`, which says what they are. All cores work; records are written in the order of the input; a run
//! that was killed goes on where its last shard ended.

mod build;
mod chat;
mod config;
mod fields;
mod run;
mod state;
#[cfg(test)]
mod tests;

pub use build::{Builder, Nothing, Prepared, Values};
pub use config::{
    Action, Config, Degenerate, Fields, Input, MaskBy, Output, Positions, Processing, Section, Source,
};
pub use run::{Preprocess, Summary, arrange};
pub use state::{DATASET, Domain, State};
