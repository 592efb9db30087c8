//! The `astrai` library: what the commands call. One file a subcommand; the rest is what they share.

pub mod batch;
pub mod machine;
pub mod model;
