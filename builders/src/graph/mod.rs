//! Graph building. In: a configuration and a program. Out: the graph. Dependencies go one way: `components` ← `cache`, `latent`
//! ← `attention`; `components` ← `router` ← `experts` ← `stacked`; all ← `layer` ← `model`.

mod attention;
mod cache;
mod components;
mod experts;
mod latent;
mod layer;
mod model;
mod mtp;
mod pool;
mod router;
mod stacked;

pub use model::build;
