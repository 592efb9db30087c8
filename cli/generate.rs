//! `astrai generate`: a prompt in, its continuation out as it comes, through the engine that serves.

use crate::failure::{Done, Failure, warn};
use crate::flags::MachineFlags;
use crate::machine::Machine;
use crate::model::{Model, plan};
use crate::progress::Progress;
use astrai_builders::{Cache, Program};
use astrai_serve::cache::KvCache;
use astrai_serve::engine::{End, Engine, Settings};
use astrai_serve::paged::PagedModel;
use astrai_serve::request::{Request, Sampling};
use astrai_serve::stop::{StopStrings, TextStream};
use astrai_serve::template::{Chat, ChatTemplate, Message};
use astrai_serve::tokenizer::Tokenizer;
use clap::Args;
use serde_json::json;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Most tokens of a prompt that one run takes in.
const CHUNK: usize = 512;

/// Continue a prompt
///
/// The model directory holds config.json, the weights and tokenizer.json. With --chat the prompt is a user's message, put
/// through the model's chat template. The same --seed gives the same text.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai generate model/ --prompt 'Once upon a time' --max-tokens 64
  echo 'Say hello.' | astrai generate model/ --prompt - --chat --temperature 0")]
pub struct Generate {
    /// A model directory
    model: PathBuf,
    /// The text to continue; - reads standard input
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Put the prompt through the model's chat template
    #[arg(long)]
    chat: bool,
    /// Most tokens to add
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 takes the likeliest token each time; higher is freer
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f32,
    /// Draw from the fewest tokens that have this probability together
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Draw from the N likeliest tokens; 0 from all
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: u32,
    /// Draw from tokens at least this fraction as likely as the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Makes the text repeatable
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// One JSON object at the end instead of the text as it comes
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineFlags,
}

impl Generate {
    /// Generates and prints.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let tokenizer = Tokenizer::open(&self.model).map_err(|e| e.to_string())?;
        let prompt = self.prompt(&tokenizer)?;
        if prompt.is_empty() {
            return Err("the prompt has no tokens; give some text with --prompt".into());
        }
        let machine = self.machine.machine()?;
        warn(&machine.warnings);
        let most = prompt.len() + self.max_tokens as usize;
        let (model, eos) = open(&self.model, most, &tokenizer, self.machine.storage(), &machine)?;
        let engine = Engine::start(model, &Settings { eos, prefix_cache: false, ..Settings::default() })
            .map_err(|e| e.to_string())?;
        let mut request = Request::new(prompt);
        request.sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed,
            max_tokens: Some(self.max_tokens as usize),
            ..Sampling::default()
        };
        let stops = StopStrings::new(&self.stop, false).map_err(|e| format!("--stop: {e}"))?;
        let started = Instant::now();
        let mut stream = engine.handle().submit(request).map_err(|e| e.to_string())?;
        let mut text = TextStream::new(&tokenizer, true, &stops);
        let mut all = String::new();
        let mut show = |piece: &str, out: &mut dyn Write| -> Result<(), Failure> {
            all.push_str(piece);
            if !self.json {
                out.write_all(piece.as_bytes())?;
                out.flush()?;
            }
            Ok(())
        };
        let mut first = None;
        let mut stopped = false;
        let usage = loop {
            let event = stream.blocking_recv().ok_or("the engine ended without an answer")?;
            for u in &event.updates {
                if stopped {
                    break;
                }
                first.get_or_insert_with(|| started.elapsed());
                let ends = matches!(u.finish, Some(f) if f != astrai_serve::engine::Finish::Length);
                if ends {
                    continue;
                }
                let shown = text.push(u.token).map_err(|e| e.to_string())?;
                show(&shown.text, out)?;
                if shown.stopped.is_some() {
                    stopped = true;
                    stream.stop(u.index);
                }
            }
            match event.end {
                None => {}
                Some(End::Finished(usage) | End::Cancelled(usage)) => break usage,
                Some(End::Failed(why)) => return Err(why.into()),
            }
        };
        let seconds = started.elapsed().as_secs_f64();
        if !stopped {
            let rest = text.finish().map_err(|e| e.to_string())?;
            show(&rest.text, out)?;
        }
        if self.json {
            let first = first.map(|f| f.as_secs_f64());
            let line = json!({
                "text": all, "prompt_tokens": usage.prompt, "completion_tokens": usage.output,
                "seconds_to_first_token": first, "seconds": seconds,
            });
            writeln!(out, "{line}")?;
        } else {
            writeln!(out)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Ids of the prompt.
    fn prompt(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
        let mut text = self.prompt.clone();
        if text == "-" {
            text.clear();
            std::io::stdin().read_to_string(&mut text).map_err(|e| format!("standard input: {e}"))?;
        }
        if !self.chat {
            return Ok(tokenizer.encode(&text, true).map_err(|e| e.to_string())?);
        }
        let template = ChatTemplate::open(&self.model).map_err(|e| e.to_string())?;
        let template = template
            .ok_or_else(|| format!("{}: no chat template; generate without --chat", self.model.display()))?;
        let mut messages = [Message::text("user", &text)];
        template.adapt(&mut messages, None, false).map_err(|e| e.to_string())?;
        let chat = Chat { messages: &messages, add_generation_prompt: true, ..Chat::default() };
        let text = template.render(&chat).map_err(|e| e.to_string())?;
        // The template has put the special tokens there.
        Ok(tokenizer.encode(&text, false).map_err(|e| e.to_string())?)
    }
}

/// A model that takes one sequence of so many tokens, and the ids that end its texts.
fn open(
    folder: &Path,
    tokens: usize,
    tokenizer: &Tokenizer,
    storage: astrai_ir::DType,
    machine: &Machine,
) -> Result<(PagedModel, Vec<u32>), Failure> {
    let model = Model::open(folder, false)?;
    warn(&model.warnings);
    let config = model.config.clone();
    if tokenizer.vocabulary() > config.vocab_size {
        let (has, takes) = (tokenizer.vocabulary(), config.vocab_size);
        return Err(format!("{}: its tokenizer has {has} tokens, the model {takes}", folder.display()).into());
    }
    let positions = config.max_positions.min(tokens);
    let table = positions.div_ceil(Cache::PAGE);
    let cache = Cache { page: Cache::PAGE, pages: table, table };
    let chunk = CHUNK.min(positions);
    let planned = plan(&config, &Program::paged(chunk as u64, 1, cache), storage, machine)?;
    let kv = KvCache::new(&config, cache, storage)?;
    let mut progress = Progress::new("loading weights");
    let session =
        model.start_over(planned, kv.buffers(), machine, &mut |done, all| progress.set(done, all))?;
    let mut eos = config.eos.clone();
    eos.extend(tokenizer.special().eos.as_ref().map(|t| t.id).filter(|id| !eos.contains(id)));
    let sizes = [config.vocab_size, positions, chunk, 1];
    Ok((PagedModel::new(session, cache, sizes), eos))
}
