//! `astrai quantize`: a model in, a model directory with rounded weights out.

use crate::export::size;
use crate::failure::{Done, warn};
use crate::progress::tell;
use crate::table::bytes;
use astrai_engine::Model;
use astrai_engine::export::{Form, export};
use astrai_ir::Narrow;
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Round the weights of linear layers and write a compressed-tensors checkpoint
///
/// In: a model directory. Out: one whose linear layers have codes and scales, rounded to nearest, as vLLM, transformers and astrai read
/// them; embedding, norms, routers, experts and the head stay as they are. Its logits are those of `--quantize TYPE:head=none` (of an
/// asymmetric type with groups up to the rounding of offsets, which this keeps exact).
#[derive(Args)]
#[command(after_help = "Examples:
  astrai quantize model/ --to int4 --out model-int4/
  astrai quantize model/ --to int4:group=128:asymmetric --out model-w4a16/
  astrai quantize model/ --to fp8 --out model-fp8/ --max-shard-size 2GB")]
pub struct Quantize {
    /// A model directory
    model: PathBuf,
    /// int8, int4 or fp8, with a scale for each row (int4: for each 32 neighbours), or by :group=N for each N neighbours; :asymmetric
    /// adds a zero point to the scale
    #[arg(long, value_name = "TYPE", value_parser = without_head)]
    to: Narrow,
    /// The folder to write, which must not be there yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Most bytes of a file of weights
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    max_shard_size: u64,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

fn without_head(text: &str) -> Result<Narrow, String> {
    let narrow: Narrow = text.parse()?;
    if narrow.activations.is_some() {
        return Err(
            "activations are no part of a file: they are rounded when a model runs; leave activations= out"
                .into(),
        );
    }
    match text.split(':').any(|part| part.starts_with("head=") && part != "head=none") {
        true => Err("the head stays as it is; leave head= out".into()),
        false => Ok(Narrow { head: None, ..narrow }),
    }
}

impl Quantize {
    /// Writes and says what.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let model = Model::open(&self.model, false)?;
        warn(&model.warnings);
        let form = Form { dtype: None, shard: self.max_shard_size, narrow: Some(self.to) };
        let made = export(&model, &self.model, &self.out, form, &mut tell())?;
        let (to, narrow) = (self.out.display().to_string(), self.to.to_string());
        let narrow = narrow.trim_end_matches(":head=none");
        match self.json {
            true => writeln!(
                out,
                "{}",
                json!({"out": to, "files": made.files, "bytes": made.bytes, "weights": narrow, "dtype": made.dtype.name()})
            )?,
            false => {
                let files = if made.files == 1 { "file" } else { "files" };
                writeln!(out, "{} of {narrow} weights in {} {files} in {to}", bytes(made.bytes), made.files)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
