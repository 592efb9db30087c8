//! What a program will cost. In: a model's configuration, hardware as data, a schedule. Out: the time of every kernel of the plan
//! that would run, what is sent between ranks, memory by kind; and, beside it, the view of the simulator LLMSim with its formulas.

pub mod calibrate;
pub mod check;
pub mod estimate;
pub mod fit;
pub mod hardware;
pub mod lengths;
pub mod llmsim;
pub mod measure;
pub mod model;
pub mod published;
pub mod quantity;
pub mod replay;
pub mod report;
pub mod schedule;
pub mod search;
pub mod server;
mod turns;
pub mod work;
pub mod zero;

/// A refusal in one line that names the file and the key.
pub type Refused = String;
