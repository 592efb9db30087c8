//! Datasets in, checkpoints out. The training programs are built from the gradient rules that every operator in `astrai-ir`
//! already has.

pub mod batch;
pub mod data;
