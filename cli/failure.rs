//! Why a command ended early, and how the user hears of it: one line on standard error that begins with `astrai:`.

use astrai_ir::IrError;
use astrai_runtime::Error;
use astrai_runtime::weights::WeightsError;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::process::ExitCode;

/// Why a command ended early.
#[derive(Debug)]
pub enum Failure {
    /// For the user, in one line.
    Message(String),
    /// Whoever read standard output has gone (`astrai … | head`); nobody is left to tell.
    Closed,
}

/// What a command gives: its exit code, or why it ended early.
pub type Done = Result<ExitCode, Failure>;

/// Ends a command early with this line.
macro_rules! bail {
    ($($line:tt)*) => {
        return Err(format!($($line)*).into())
    };
}

pub(crate) use bail;

macro_rules! messages {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for Failure {
            fn from(e: $error) -> Failure {
                Failure::Message(e.to_string())
            }
        }
    )*};
}

messages! {
    String, &str, IrError, Error, WeightsError, astrai_engine::Error, astrai_train::Error,
    astrai_files::FileError, astrai_train::settings::Error,
}

/// For writes to standard output; errors of files name their file before they come here.
impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Failure {
        match e.kind() {
            io::ErrorKind::BrokenPipe => Failure::Closed,
            _ => Failure::Message(format!("standard output: {e}")),
        }
    }
}

/// One line on standard error, control characters of hostile files replaced.
pub fn say(line: &str) {
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Where standard error is closed nobody can be told.
    let _unheard = writeln!(io::stderr(), "astrai: {line}");
}

/// Warnings on standard error, each once.
pub fn warn<'a>(lines: impl IntoIterator<Item = &'a String>) {
    let mut said = BTreeSet::new();
    for line in lines {
        if said.insert(line) {
            say(&format!("warning: {line}"));
        }
    }
}
