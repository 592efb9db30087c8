//! The written forms of a graph and the laws it keeps: JSON, text, DOT, the verifier, petgraph's view.

mod json;
mod sample;
mod shown;
mod verify;
mod view;
