//! `astrai preprocess`: records of text in, shards of token ids with masks out.

use crate::failure::{Done, Failure, bail};
use crate::progress::Progress;
use crate::table::table;
use astrai_serve::tokenizer::Tokenizer;
use astrai_train::data::preprocess::{Config, Preprocess as Run};
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Make token ids and masks of records of text
///
/// The configuration says which fields of a JSON record are read, whose turns of a conversation are learnt, how long sequences are, how
/// they are packed and stored (docs/training.md). The conversation is rendered once and whole by the tokenizer's chat template. A
/// run that is stopped, however, goes on where its last shard ended when it is started again; a wrong record ends it with
/// file and line.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai preprocess --config chat.json --input chats.jsonl --tokenizer model/ --out prepared
  astrai data show prepared --limit 3
  astrai train --strategy sft --data prepared --model model/ --out tuned")]
pub struct Preprocess {
    /// The configuration, JSON
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Folder for the results; one that holds part of them is gone on with
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Files of JSON lines, or folders of such; may be repeated [default: `input.files` of the configuration]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    input: Vec<PathBuf>,
    /// tokenizer.json, or the folder of one, with its chat template [default: `tokenizer` of the configuration]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// What was made as one JSON object
    #[arg(long)]
    json: bool,
}

impl Preprocess {
    /// Prepares.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let config = Config::read(&self.config).map_err(astrai_train::Error::from)?;
        let inputs = if self.input.is_empty() { config.input.files.clone() } else { self.input.clone() };
        if inputs.is_empty() {
            bail!("no input: give --input FILE, or `input.files` in the configuration");
        }
        let tokenizer = self.tokenizer.clone().or(config.tokenizer.clone());
        let tokenizer =
            tokenizer.ok_or("no tokenizer: give --tokenizer PATH, or `tokenizer` in the configuration")?;
        let tokenizer = Tokenizer::open(&tokenizer).map_err(|e| Failure::from(e.to_string()))?;
        let run = Run::new(config, tokenizer, &inputs, &self.out).map_err(astrai_train::Error::from)?;
        let made = Progress::during("preprocessing", |progress| run.run(progress));
        let made = made.map_err(astrai_train::Error::from)?;
        if self.json {
            let how = json!({"cached": made.cached, "resumed": made.resumed, "dataset": made.state});
            writeln!(out, "{how}")?;
            return Ok(ExitCode::SUCCESS);
        }
        let row = |(name, d): (&String, &astrai_train::data::preprocess::Domain)| {
            let numbers = [d.shards as u64, d.records, d.sequences, d.tokens, d.learnt];
            [vec![name.clone()], numbers.map(|n| n.to_string()).to_vec()].concat()
        };
        let rows: Vec<_> = made.state.domains.iter().map(row).collect();
        write!(out, "{}", table(&["domain", "shards", "records", "sequences", "tokens", "learnt"], &rows))?;
        for (why, n) in &made.state.dropped {
            writeln!(out, "left out: {n} ({why})")?;
        }
        if made.state.cut > 0 {
            writeln!(out, "cut at their end: {} records longer than max_seq_len", made.state.cut)?;
        }
        if made.cached {
            writeln!(out, "{}: was complete already", self.out.display())?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
