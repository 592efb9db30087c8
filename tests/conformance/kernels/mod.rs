//! Host kernels against the interpreter: operators, shapes, types and fusions as a table, in few translation units.

mod attend;
pub mod dots;
mod experts;
mod free;
mod losses;
pub mod paged;
mod pointwise;
mod programs;
mod random;
mod row;
mod states;
pub mod table;
mod views;
