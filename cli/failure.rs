//! Why a command ended early, and how the user hears of it: one line on standard error that begins with `astrai:`.

use astrai_ir::IrError;
use astrai_runtime::Error;
use astrai_runtime::weights::WeightsError;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
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

/// What a model's folder is made of; other files in one may be written again.
const OF_A_MODEL: [&str; 6] = ["gguf", "bin", "json", "jinja", "model", "txt"];

/// Refuses a file to be written that is one of those read, or a model's own in a folder that is read.
pub fn spare<'a>(flag: &str, file: &Path, read: impl IntoIterator<Item = &'a Path>) -> Result<(), Failure> {
    // What is not there yet is nobody's.
    let Ok(whole) = file.canonicalize() else { return Ok(()) };
    for path in read.into_iter().filter_map(|path| path.canonicalize().ok()) {
        let kind = whole.extension().and_then(OsStr::to_str).unwrap_or_default();
        // Weights are those of a name such as `model-00001-of-00002` and `adapter_model`; vectors, logits and gradients
        // are safetensors files, too, and often written beside their model.
        let weights = || whole.file_stem().is_some_and(|name| name.to_string_lossy().contains("model"));
        let of_a_model = OF_A_MODEL.contains(&kind) || kind == "safetensors" && weights();
        let inside = whole.parent() == Some(&path) && of_a_model;
        if whole == path || inside {
            bail!("{flag}: {} is read, or part of what is; name another file", file.display());
        }
    }
    Ok(())
}

/// Refuses an output whose folder is not there, before anything is computed.
pub fn check_folder(file: &Path) -> Result<(), Failure> {
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match folder.is_dir() {
        true => Ok(()),
        false => Err(format!("{}: the folder does not exist; make it first", folder.display()).into()),
    }
}

/// One line on standard error, control characters of hostile files replaced.
pub fn say(line: &str) {
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Where standard error is closed nobody can be told.
    let _unheard = writeln!(io::stderr(), "astrai: {line}");
}

/// What is wrong with a command line, in one line on standard error: what the parser prints, its tips behind it, without its usage.
pub fn say_misused(e: &clap::Error) {
    // Where standard error is closed nobody can be told.
    let _unheard = writeln!(io::stderr(), "{}", misused(&e.render().to_string()));
}

fn misused(text: &str) -> String {
    let mut line = String::new();
    let paragraphs = text.lines().map(str::trim).filter(|part| !part.is_empty());
    for part in paragraphs.take_while(|part| !part.starts_with("Usage:") && !part.starts_with("For more")) {
        line += match () {
            () if line.is_empty() => "",
            () if part.starts_with("tip:") => "; ",
            // Possible values, and the first of a list.
            () if part.starts_with('[') || line.ends_with(':') => " ",
            () => ", ",
        };
        line += part;
    }
    line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
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
