//! Host kernels against the interpreter: operators, shapes, types and fusions as a table, in few translation units.

#[path = "kernels/attend.rs"]
mod attend;
#[path = "kernels/dots.rs"]
mod dots;
#[path = "kernels/experts.rs"]
mod experts;
#[path = "kernels/free.rs"]
mod free;
#[path = "kernels/losses.rs"]
mod losses;
#[path = "kernels/paged.rs"]
mod paged;
#[path = "kernels/pointwise.rs"]
mod pointwise;
#[path = "kernels/programs.rs"]
mod programs;
#[path = "kernels/random.rs"]
mod random;
#[path = "kernels/row.rs"]
mod row;
#[path = "kernels/states.rs"]
mod states;
#[path = "kernels/table.rs"]
mod table;
#[path = "kernels/views.rs"]
mod views;
