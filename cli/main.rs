//! The `astrai` program.
fn main() {}
