//! `astrai quantize`: a model in, a model directory with rounded weights out.

use crate::export::size;
use crate::failure::{Done, Failure, warn};
use crate::progress::tell;
use crate::table::bytes;
use astrai_engine::calibrate::{Codes, calibrate};
use astrai_engine::export::{Form, export, rounded};
use astrai_engine::serving::Published;
use astrai_engine::{Kind, Machine, Model};
use astrai_ir::Narrow;
use astrai_train::evaluation::{Question, Task};
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Tokens of a sequence that calibrates, at most.
const WINDOW: usize = 512;

/// Round the weights of linear layers and write a compressed-tensors checkpoint
///
/// In: a model directory. Out: one whose linear layers and experts have codes and scales as vLLM, transformers and astrai read them;
/// embedding, norms, routers and the head stay as they are. Weights are rounded to nearest: the logits are those of `--quantize TYPE:head=none` (of
/// an asymmetric type with groups up to the rounding of offsets, which this keeps exact). With --calibrate they are rounded (GPTQ) so that
/// the layers give what is nearest to their own results on texts.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai quantize model/ --to int4 --out model-int4/ --calibrate texts.jsonl
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
    /// JSON lines with a `text` each, like those that the model will read: round for them
    #[arg(long, value_name = "FILE")]
    calibrate: Option<PathBuf>,
    /// Most tokens of those texts, from the first on
    #[arg(long, value_name = "N", requires = "calibrate", default_value_t = 32768, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    calibrate_tokens: u32,
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
        let codes = self.calibrate.as_deref().map(|file| self.codes(&model, file)).transpose()?;
        let form =
            Form { dtype: None, shard: self.max_shard_size, narrow: Some(self.to), codes: codes.as_ref() };
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

    /// What the weights are rounded to for a file's texts.
    fn codes(&self, model: &Model, file: &Path) -> Result<Codes, Failure> {
        let task = Task::open(file, None).map_err(astrai_train::Error::from)?;
        let names = rounded(&model.config, self.to)?;
        let tokenizer = Published::read(&self.model, &mut |_| {})?.tokenizer;
        let (window, mut left) = (WINDOW.min(model.config.max_positions), self.calibrate_tokens as usize);
        let mut sequences = Vec::new();
        for line in task.lines().map_err(astrai_train::Error::from)? {
            let line = line.map_err(astrai_train::Error::from)?;
            let Question::Text(text) = &line.question else {
                let why = "--calibrate takes texts alone";
                return Err(Failure::Message(task.refused(line.number, why).to_string()));
            };
            let ids = tokenizer.encode(text, true).map_err(|e| e.to_string())?;
            let ids: Vec<i64> = ids.into_iter().take(left).map(i64::from).collect();
            left -= ids.len();
            sequences.extend(ids.chunks(window).map(<[i64]>::to_vec));
            if left == 0 {
                break;
            }
        }
        let machine = Machine::new(Kind::Cpu, 0)?;
        warn(&machine.warnings);
        Ok(calibrate(model, (self.to, &names), &sequences, &machine, &mut tell())?)
    }
}
