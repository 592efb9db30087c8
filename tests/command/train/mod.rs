//! `astrai train` held to what it promises: a run that is killed and resumed is the run that was not, threads and memory
//! presets change nothing, updates are what their formulas say, and whatever is wrong is one clear line.

mod bad;
mod engine;
pub mod fixture;
mod leave;
mod model;
mod resume;
mod router;
mod same;
pub mod strategies;
mod types;
mod update;
mod watched;
