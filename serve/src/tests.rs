//! Models that tests of several modules run, and that need no weights.

pub mod alphabet;
pub mod fake;
pub mod script;
