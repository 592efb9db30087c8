//! runtime

pub mod weights;
