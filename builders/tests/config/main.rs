//! Configurations: what is read, kept, saved and refused.

mod families;
mod hostile;
mod latent;
mod models;
mod read;
mod reading;
mod rope;
mod shared;
