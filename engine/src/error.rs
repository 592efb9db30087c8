//! Why opening, planning or checking a model failed, in one line for a person; and what such a person may like to hear meanwhile.

use astrai_ir::IrError;
use astrai_runtime::weights::WeightsError;

/// Why something failed, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

macro_rules! as_lines {
    ($($cause:ty),*) => {
        $(impl From<$cause> for Error {
            fn from(cause: $cause) -> Error {
                Error(cause.to_string())
            }
        })*
    };
}

as_lines!(String, &str, astrai_runtime::Error, IrError, WeightsError);

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
