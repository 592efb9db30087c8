//! The `astrai` library: what the commands call. One file a subcommand; the rest is what they share.

pub mod allocations;
pub mod bench;
pub mod chat;
pub mod compile;
#[cfg(feature = "coverage")]
pub mod coverage;
pub mod data;
pub mod devices;
pub mod explain;
pub mod failure;
pub mod flags;
pub mod generate;
pub mod measure;
pub mod models;
pub mod output;
pub mod page;
pub mod preprocess;
pub mod progress;
pub mod quickstart;
pub mod run;
pub mod serve;
pub mod summary;
pub mod table;
pub mod train;
pub mod verify;
pub mod watch;
