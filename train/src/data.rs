//! Text in, items of a batch out. Files are found and read as a stream ([`text`]), a tokenizer is trained on them if there is
//! none ([`bpe`]), the text becomes shards of token ids once ([`shards`]); or records of any kind are prepared ([`preprocess`])
//! and lie in a [`store`] with several keys. Either is cut into windows ([`Windows`]) or read record by record
//! ([`Records`]), several make a [`Mixture`], and a [`Sampler`] says which item comes when. Only the last four are at work
//! while a model trains; on windows of bare ids none of them allocates.

pub mod bpe;
mod documents;
mod error;
mod meta;
mod mixture;
pub mod packing;
pub mod preprocess;
mod records;
mod sampler;
pub mod shards;
pub mod store;
#[cfg(test)]
pub(crate) mod tests;
pub mod text;
mod tokens;
mod windows;

pub use documents::{Documents, Piece};
pub(crate) use documents::{LINE, next_line};
pub use error::DataError;
pub use meta::{Meta, Shard, Width};
pub use mixture::{Mixture, Subset};
pub use records::{IDS, Kind, LOGPS, REFERENCE, Records, padded};
pub use sampler::Sampler;
pub use shards::{ShardOptions, Tokenised, prepare};
pub use store::{Column, Store};
pub use text::Corpus;
pub use tokens::Tokens;
pub use windows::{Packing, Row, Rows, Window, WindowOptions, Windows};

/// Told how much is done, and of how much; the unit is the caller's to name.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);
