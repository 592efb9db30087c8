//! Text in, items of a batch out. Files are found and read as a stream ([`text`]), a tokenizer is trained on them if there is
//! none ([`bpe`]), the text becomes memory-mapped shards of token ids once ([`shards`]), the shards are cut into windows
//! ([`Windows`]), and a [`Sampler`] says which window comes when. Only the last two are at work while a model trains, and
//! neither allocates.

pub mod bpe;
mod documents;
mod error;
mod meta;
mod sampler;
pub mod shards;
#[cfg(test)]
mod tests;
pub mod text;
mod tokens;
mod windows;

pub use documents::{Documents, Piece};
pub use error::DataError;
pub use meta::{Meta, Shard, Width};
pub use sampler::Sampler;
pub use shards::{ShardOptions, Tokenised, prepare};
pub use text::Corpus;
pub use tokens::Tokens;
pub use windows::{Packing, WindowOptions, Windows};

/// Told how much is done, and of how much; the unit is the caller's to name.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);
