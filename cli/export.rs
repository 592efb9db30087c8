//! `astrai export`: a model or a run in, a model directory for others out.

use crate::failure::{Done, Failure, warn};
use crate::progress::tell;
use crate::table::bytes;
use astrai_engine::Model;
use astrai_engine::export::{Form, export};
use astrai_engine::serving::KvMemory;
use astrai_ir::DType;
use astrai_train::checkpoint::open_latest;
use clap::{Args, ValueEnum};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// Values of `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stored {
    /// 32-bit floats
    F32,
    /// bfloat16
    Bf16,
    /// IEEE half precision
    F16,
}

/// Write a model as Hugging Face lays it out
///
/// In: a model directory, a GGUF file, an adapter's folder, or a run of `astrai train`, whose newest checkpoint is taken. Out: config.json, weights
/// of one type, in shards with an index where one file would be too large, and the tokenizer's files. An adapter is merged into the weights.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai export run/ --out model/ --dtype bf16
  astrai import model.gguf --out model/ --dtype bf16
  astrai export base/ --adapter adapter/ --out merged/ --max-shard-size 2GB")]
pub struct Export {
    /// A model directory, a GGUF file, an adapter's folder, or a run's
    model: PathBuf,
    /// The folder to write, which must not be there yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// An adapter in PEFT's layout to merge into the weights
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Type of the weights [default: as the embedding is stored]
    #[arg(long, value_enum)]
    dtype: Option<Stored>,
    /// Most bytes of a file of weights
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    max_shard_size: u64,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

pub(crate) fn size(text: &str) -> Result<u64, String> {
    match KvMemory::from_str(text) {
        Ok(KvMemory::Bytes(n)) => Ok(n),
        _ => Err("give a size, 5GB or 500MiB say".into()),
    }
}

/// The newest sound checkpoint of a run's folder; any other folder itself.
fn newest(folder: &Path) -> Result<PathBuf, Failure> {
    // A model may lie beside damaged checkpoints of another.
    let latest = match open_latest(folder) {
        Err(e) if folder.is_dir() && !folder.join("config.json").exists() => return Err(e.into()),
        found => found.ok().flatten(),
    };
    Ok(latest.map_or_else(|| folder.to_path_buf(), |latest| latest.checkpoint.path))
}

impl Export {
    /// Writes and says what.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let from = newest(&self.model)?;
        let model = Model::open_adapted(&from, self.adapter.as_deref())?;
        warn(&model.warnings);
        let dtype = self.dtype.map(|d| match d {
            Stored::F32 => DType::F32,
            Stored::Bf16 => DType::BF16,
            Stored::F16 => DType::F16,
        });
        let form = Form { dtype, shard: self.max_shard_size, narrow: None, codes: None };
        let made = export(&model, &from, &self.out, form, &mut tell())?;
        let (to, dtype) = (self.out.display().to_string(), made.dtype.name());
        match self.json {
            true => writeln!(
                out,
                "{}",
                json!({"out": to, "files": made.files, "bytes": made.bytes, "dtype": dtype})
            )?,
            false => {
                let files = if made.files == 1 { "file" } else { "files" };
                writeln!(out, "{} of {dtype} weights in {} {files} in {to}", bytes(made.bytes), made.files)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
