//! `astrai quickstart`: a small random model made, compiled, and run, with a word on each step; the shortest way to see the
//! whole.

use crate::failure::{Done, Failure, warn};
use crate::flags::DTypeName;
use crate::greedy;
use crate::machine::Machine;
use crate::measure;
use crate::model::{Model, plan, read_config};
use crate::summary::{describe, summary};
use astrai_builders::{Logits, ModelConfig, Program};
use astrai_ir::DType;
use astrai_runtime::{Device, weights};
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Tokens of a sequence that the program shown is made for.
const SEQ: u64 = 64;
/// What is continued.
const PROMPT: [i64; 5] = [1, 7, 42, 11, 5];
/// Tokens generated.
const NEW: usize = 16;

/// Make a small random model, compile it, generate from it
///
/// Needs no download. Without a C compiler the interpreter runs a still smaller model.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai quickstart
  astrai quickstart my-model      keeps the model in my-model/, to try the other commands on")]
pub struct Quickstart {
    /// Folder to make the model in, which is kept [default: a temporary one, removed at the end]
    folder: Option<PathBuf>,
    /// Keep the temporary folder
    #[arg(long, conflicts_with = "folder")]
    keep: bool,
    /// One JSON object instead of the tour
    #[arg(long)]
    json: bool,
    /// How weights and activations are stored
    #[arg(long, value_enum, default_value_t = DTypeName::F32)]
    dtype: DTypeName,
    /// Threads; 0 means one a core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
}

impl Quickstart {
    /// Walks through everything.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let machine = Machine::new(Device::Host, self.threads.into())?;
        warn(&machine.warnings);
        let temporary = match self.folder {
            Some(_) => None,
            None => Some(tempfile::tempdir().map_err(|e| format!("a temporary folder: {e}"))?),
        };
        let folder = match (&self.folder, &temporary) {
            (Some(given), _) => given.clone(),
            (None, Some(t)) => t.path().to_path_buf(),
            (None, None) => return Err("no folder to make the model in".into()),
        };
        let report = self.tour(out, &machine, &folder)?;
        let kept = self.keep || self.folder.is_some();
        if let (Some(t), true) = (temporary, self.keep) {
            // From here on nobody removes it.
            let _kept = t.keep();
        }
        match self.json {
            true => writeln!(out, "{report}")?,
            false => out.write_all(what_next(&folder, kept).as_bytes())?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn tour(&self, out: &mut dyn Write, machine: &Machine, folder: &Path) -> Result<Value, Failure> {
        let quiet = self.json;
        let mut tell = |text: String| match quiet {
            true => Ok(()),
            false => writeln!(out, "{text}"),
        };
        make_model(folder, machine.device == Device::Host)?;
        let (config, _) = read_config(folder, false)?;
        let parameters = config.parameter_count();
        tell(format!(
            "1. A model is a folder: config.json says what is computed, model.safetensors holds the weights.\n   \
             This one is a random llama of {parameters} parameters in {}.\n",
            folder.display()
        ))?;
        let storage = self.dtype.storage();
        let program = Program { logits: Logits::Last, ..Program::full(1, SEQ) };
        let (planned, seconds) = measure::once(|| plan(&config, &program, storage, machine))?;
        let report = summary(&planned, parameters, seconds)?;
        tell(format!(
            "2. Compiled for one sequence of {SEQ} tokens: the config becomes a graph, passes rewrite it, and regions of\n   \
             it become kernels. What a run costs is known before anything runs:\n\n{}",
            describe(&report)
        ))?;
        let model = Model::open(folder, false)?;
        let length = (PROMPT.len() + NEW) as u64;
        let (mut session, loading) =
            measure::once(|| model.session(&greedy::program(length), storage, machine, &mut |_, _| {}))?;
        let (chosen, running) = measure::once(|| {
            greedy::continue_greedily(&mut session, &PROMPT, NEW, config.vocab_size, &mut |_| {})
        })?;
        let tokens: Vec<i64> = chosen.iter().map(|c| c.token).collect();
        let how = match machine.device {
            Device::Host => "kernels built by the C compiler (cached for next time)",
            _ => "the interpreter, for want of a C compiler",
        };
        tell(format!(
            "3. Run by {how}: ready in {loading:.2} s, {NEW} tokens in {running:.3} s,\n   each by a full pass over all \
             tokens before it. The weights are random, and so is what they say:\n   {PROMPT:?} -> {tokens:?}\n"
        ))?;
        Ok(json!({
            "folder": (self.keep || self.folder.is_some()).then(|| folder.display().to_string()),
            "summary": report, "prompt": PROMPT, "tokens": tokens,
            "load_seconds": loading, "generate_seconds": running,
        }))
    }
}

/// Writes the model and token ids to try it on: five million parameters, or few where the interpreter has to run them.
fn make_model(folder: &Path, large: bool) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    if std::fs::read_dir(folder).is_ok_and(|mut list| list.next().is_some()) {
        let line = format!("{}: the folder is not empty; give one that is, or a new name", folder.display());
        return Err(line.into());
    }
    let (vocab, hidden, inner, layers) = if large { (8192, 256, 704, 4) } else { (256, 64, 176, 2) };
    let config = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "torch_dtype": "float32",
    });
    let reading = ModelConfig::parse(&config.to_string(), "quickstart").map_err(|e| e.to_string())?;
    Model::fresh(reading.config, vec![], 0).save(folder)?;
    let ids: Vec<u8> = (0..2 * SEQ as i64).flat_map(|i| (i * 37 % 251).to_le_bytes()).collect();
    let shape = [2, SEQ as usize];
    let tensor = ("input_ids", DType::I64, shape.as_slice(), ids.as_slice());
    Ok(weights::write(&folder.join("inputs.safetensors"), [tensor], &BTreeMap::new())?)
}

fn what_next(folder: &Path, kept: bool) -> String {
    if !kept {
        return "Next, keep the model to try the other commands on:\n  astrai quickstart my-model\n  \
                astrai models\n"
            .to_string();
    }
    let dir = quoted(folder);
    format!(
        "Next:\n  \
         astrai compile {dir} -o {dir}/compiled        graphs, plan and kernels as files\n  \
         astrai compile {dir} --dump-after merge       the graph after a pass\n  \
         astrai run {dir} --inputs {dir}/inputs.safetensors --outputs {dir}/out.safetensors --want logits,loss --profile\n  \
         astrai bench prefill --shape {dir}/config.json --seq 64\n"
    )
}

/// A path as a shell reads it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}
