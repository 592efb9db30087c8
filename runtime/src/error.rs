//! What can go wrong between a graph and its results, each in one line.

use crate::weights::WeightsError;
use astrai_ir::IrError;
use std::io;
use std::path::PathBuf;

/// An error of compiling or running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The graph is wrong.
    #[error("{0}")]
    Ir(#[from] IrError),
    /// A region could not be written as a kernel.
    #[error("no kernel for `{origin}`: {message}")]
    Codegen {
        /// Where the region comes from.
        origin: String,
        /// What is missing.
        message: String,
    },
    /// The C compiler refused a unit.
    #[error("the C compiler failed on {unit}: {message}")]
    Compiler {
        /// Source file.
        unit: PathBuf,
        /// Its last words.
        message: String,
    },
    /// A device's library could not be loaded, or refused a program.
    #[error("{library}: {program}: {message}")]
    Library {
        /// The library.
        library: &'static str,
        /// The program, or the library.
        program: String,
        /// Its words.
        message: String,
    },
    /// A device failed; everything in its memory is lost.
    #[error("{device}: {message}")]
    Device {
        /// Which.
        device: String,
        /// What happened, where.
        message: String,
    },
    /// A file could not be used.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Weights are missing or wrong.
    #[error("{0}")]
    Weights(#[from] WeightsError),
    /// What was asked for does not fit the program.
    #[error("{0}")]
    Input(String),
    /// More memory than there is.
    #[error("{what} needs {} but {} are available; {remedy}", bytes(*.need), bytes(*.have))]
    Memory {
        /// What would be allocated.
        what: String,
        /// Bytes needed.
        need: u64,
        /// Bytes available.
        have: u64,
        /// What to do.
        remedy: String,
    },
}

/// `12.3 GiB`.
fn bytes(n: u64) -> String {
    let mut x = n as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if x < 1024.0 {
            return format!("{x:.1} {unit}");
        }
        x /= 1024.0;
    }
    format!("{x:.1} TiB")
}
