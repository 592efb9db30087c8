//! Why opening, planning or checking a model failed, in one line for a person; and what such a person may like to hear meanwhile.

use astrai_ir::IrError;
use astrai_runtime::weights::WeightsError;
use std::fmt;

/// Why something failed, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl From<String> for Error {
    fn from(line: String) -> Error {
        Error(line)
    }
}

impl From<&str> for Error {
    fn from(line: &str) -> Error {
        Error(line.to_string())
    }
}

impl From<astrai_runtime::Error> for Error {
    fn from(e: astrai_runtime::Error) -> Error {
        Error(e.to_string())
    }
}

impl From<IrError> for Error {
    fn from(e: IrError) -> Error {
        Error(e.to_string())
    }
}

impl From<WeightsError> for Error {
    fn from(e: WeightsError) -> Error {
        Error(e.to_string())
    }
}

/// What a person may like to hear while something long goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note<'a> {
    /// Something was noticed that changes nothing.
    Warning(&'a str),
    /// So much of some work is done.
    Progress {
        /// The work, a few words.
        what: &'static str,
        /// How much is done.
        done: u64,
        /// How much there is.
        total: u64,
    },
}

/// What hears them.
pub type Hear<'h> = &'h mut dyn FnMut(Note);

/// Hears notes and says nothing.
pub fn unheard(_: Note) {}
