//! The program as its users meet it: commands, servers and their clients, the page, examples, documents; and the house's own rules.

mod answers;
mod browser;
#[path = "../conformance/cases/mod.rs"]
mod cases;
mod cli;
mod cuda;
mod data;
mod documents;
#[path = "../emulated/mod.rs"]
mod emulated;
mod estimate;
mod eval;
mod extend;
mod faults;
mod hostile;
mod layering;
mod lora;
mod narrow;
mod numbers;
mod objectives;
mod openai;
mod optimizers;
mod page;
mod playground;
#[path = "../quick/mod.rs"]
mod quick;
mod train;
