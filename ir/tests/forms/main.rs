//! The written forms of a graph and the laws it keeps: JSON, text, DOT, the verifier, petgraph's view; the front end; gradients.

mod front;
mod gradients;
mod json;
mod sample;
mod shown;
mod verify;
mod view;
