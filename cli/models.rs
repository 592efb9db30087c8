//! `astrai models`: the model types that can be built.

use crate::failure::Done;
use crate::table::table;
use astrai_builders::MODELS;
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::process::ExitCode;

/// List the model types that can be compiled
///
/// A model is recognised by `model_type`, else by `architectures`, in its config.json.
#[derive(Args)]
#[command(after_help = "Example:\n  astrai models")]
pub struct Models {
    /// One JSON object a line, for scripts
    #[arg(long)]
    json: bool,
}

impl Models {
    /// Prints the list.
    pub fn run(&self, out: &mut dyn Write) -> Done {
        if self.json {
            for m in MODELS {
                let line =
                    json!({"name": m.name, "architectures": m.architectures, "description": m.description});
                writeln!(out, "{line}")?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let row = |m: &&astrai_builders::ModelType| {
            vec![m.name.to_string(), m.architectures.join(", "), m.description.to_string()]
        };
        let rows: Vec<_> = MODELS.iter().map(row).collect();
        write!(out, "{}", table(&["model_type", "architectures", "what"], &rows))?;
        Ok(ExitCode::SUCCESS)
    }
}
