//! The `astrai` library: what the commands call. One file a subcommand; the rest is what they share.

pub mod allocations;
pub mod batch;
pub mod bench;
pub mod compile;
pub mod curve;
pub mod explain;
pub mod failure;
pub mod flags;
pub mod generate;
pub mod gradients;
pub mod greedy;
pub mod machine;
pub mod measure;
pub mod model;
pub mod models;
pub mod output;
pub mod peaks;
pub mod progress;
pub mod quickstart;
pub mod run;
pub mod summary;
pub mod table;
pub mod train;
pub mod verify;
pub mod watch;
