//! `astrai generate`: a prompt in, its continuation out as it comes; or a file of prompts in, a line for each out, many computed
//! at once. Both go through the engine that serves.

mod batch;

use crate::failure::{Done, Failure};
use crate::flags::{RoomFlags, SamplingFlags, SpeculateFlag, as_flag};
use crate::progress::tell;
use astrai_engine::serving::{Published, Room, chat_ids};
use astrai_serve::answer::{Answer, Delta, Ended};
use astrai_serve::engine::{End, Usage};
use astrai_serve::request::{Limits, Request, Sampling};
use astrai_serve::stop::StopStrings;
use astrai_serve::template::Message;
use clap::Args;
use serde_json::json;
use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Tokens added unless told otherwise.
const NEW: usize = 128;

/// Continue a prompt, or a file of prompts
///
/// The model directory holds config.json, the weights and tokenizer.json. With --chat the prompt is a user's message, put
/// through the model's chat template. The same --seed gives the same text. Sampling that no flag names is as the model's
/// generation_config.json recommends.
///
/// With --batch the prompts are lines of a file, each a JSON object with `prompt` or `messages` and, where they differ from the
/// flags, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`, `stop`. For each there is a line
/// with `text`, or `error`, in the same order; with an error among them the exit code is 1.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai generate model/ --prompt 'Once upon a time' --max-tokens 64
  echo 'Say hello.' | astrai generate model/ --prompt - --chat --temperature 0
  astrai generate model/ --batch questions.jsonl --dtype bf16 > answers.jsonl")]
pub struct Generate {
    /// A model directory
    model: PathBuf,
    /// The text to continue; - reads standard input
    #[arg(long, value_name = "TEXT", required_unless_present = "batch")]
    prompt: Option<String>,
    /// A file of prompts, a JSON object a line; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "json"])]
    batch: Option<PathBuf>,
    /// Most prompts of the file that are computed at once [default: 32]
    #[arg(long, value_name = "N", conflicts_with = "prompt", value_parser = clap::value_parser!(u16).range(1..=4096))]
    max_seqs: Option<u16>,
    /// Put the prompt through the model's chat template
    #[arg(long)]
    chat: bool,
    /// Most tokens to add [default: 128, or what the context leaves]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// One JSON object at the end instead of the text as it comes
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    speculate: SpeculateFlag,
    #[command(flatten)]
    room: RoomFlags,
}

impl Generate {
    /// Generates and prints.
    pub fn run(self, out: &mut dyn Write) -> Done {
        // The process ends behind the answer: to free a vocabulary's texts one by one takes as long as to compute some tokens.
        let published = ManuallyDrop::new(self.room.published(&self.model)?);
        self.sampling.check(published.model.config.vocab_size)?;
        let stops = StopStrings::new(&self.stop, false).map_err(|e| format!("--{e}"))?;
        match &self.batch {
            Some(path) => batch::run(&self, path, &published, &stops, out),
            None => self.one(&published, &stops, out),
        }
    }

    fn one(&self, published: &Published, stops: &StopStrings, out: &mut dyn Write) -> Done {
        let prompt = self.prompt(published)?;
        let speculation = self.speculate.asked();
        let mut room = Room { prefix_cache: false, speculation, ..self.room.of_one() };
        let positions = published.model.config.max_positions;
        let context = room.context.unwrap_or(positions);
        let left = context.saturating_sub(prompt.len());
        let most = self.max_tokens.map_or_else(|| NEW.min(left.max(1)), |n| n as usize);
        // No more pages than this text can fill.
        room.context.get_or_insert(positions.min(prompt.len().saturating_add(most)));
        let mut request = Request::new(prompt);
        request.sampling = Sampling {
            seed: self.sampling.seed,
            max_tokens: Some(most),
            ..published.recommended.fill(&self.sampling.asked())
        };
        // What the engine would refuse is known before the weights are read.
        let limits = Limits { vocabulary: published.model.config.vocab_size, context };
        request.clone().checked(limits).map_err(|e| as_flag(&e))?;
        let machine = self.room.machine.machine()?;
        let engine =
            published.start_drafted(self.speculate.draft.as_deref(), &room, &machine, &mut tell())?;
        let started = Instant::now();
        let stream = engine.handle().submit(request).map_err(|e| e.to_string())?;
        let mut answer = Answer::new(stream, &published.tokenizer, 1, stops, true);
        let mut all = Text::default();
        while let Some(step) = answer.blocking_next() {
            let piece = all.take(step)?;
            if !self.json {
                out.write_all(piece.as_bytes())?;
                out.flush()?;
            }
        }
        if !self.json {
            writeln!(out)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut line = all.report();
        let first = answer.first_token().map(|at| (at - started).as_secs_f64());
        line["seconds_to_first_token"] = json!(first);
        line["seconds"] = json!(started.elapsed().as_secs_f64());
        writeln!(out, "{line}")?;
        Ok(ExitCode::SUCCESS)
    }

    /// Ids of the prompt.
    fn prompt(&self, published: &Published) -> Result<Vec<u32>, Failure> {
        let mut text = self.prompt.clone().unwrap_or_default();
        if text == "-" {
            text.clear();
            std::io::stdin().read_to_string(&mut text).map_err(|e| format!("standard input: {e}"))?;
        }
        let ids = match self.chat {
            true => {
                let template = published.template("generate without --chat")?;
                chat_ids(template, &published.tokenizer, &[Message::text("user", &text)])?
            }
            false => published.tokenizer.encode(&text, true).map_err(|e| e.to_string())?,
        };
        if ids.is_empty() {
            return Err("the prompt has no tokens; give some text with --prompt".into());
        }
        Ok(ids)
    }
}

/// An answer of one choice, as it adds up.
#[derive(Default)]
struct Text {
    whole: Delta,
    usage: Usage,
}

impl Text {
    /// Adds a step; gives what is new of the text.
    fn take(&mut self, step: astrai_serve::answer::Chunk) -> Result<String, String> {
        let mut piece = String::new();
        for delta in step.deltas {
            piece.push_str(&delta.text);
            self.whole.append(delta);
        }
        match step.end {
            None => {}
            Some(End::Finished(usage) | End::Cancelled(usage)) => self.usage = usage,
            Some(End::Refused(why) | End::Failed(why)) => return Err(why),
        }
        Ok(piece)
    }

    fn report(&self) -> serde_json::Value {
        let Delta { text, tokens, ended, .. } = &self.whole;
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        json!({
            "text": text, "token_ids": ids, "finish_reason": ended.map(Ended::name),
            "prompt_tokens": self.usage.prompt, "completion_tokens": self.usage.output,
        })
    }
}
