//! runtime

pub mod pool;
