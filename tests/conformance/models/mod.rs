//! Models without a golden case: an encoder, and weights in MXFP4.

mod encoder;
mod packed;
