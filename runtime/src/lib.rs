//! runtime

pub mod pool;
pub mod weights;
