//! `astrai generate --batch`: prompts as lines of JSON in, answers as lines in the same order out. As many as the engine
//! computes at once, and as many again, are on their way at any time, so that a long file takes no more memory than a short one.

use super::{Generate, NEW, Text};
use crate::failure::{Done, Failure, say};
use crate::progress::tell;
use astrai_engine::serving::{Published, Room, SEQUENCES, chat_ids};
use astrai_serve::answer::Answer;
use astrai_serve::engine::Engine;
use astrai_serve::recommended::Asked;
use astrai_serve::request::{Request, Sampling};
use astrai_serve::stop::StopStrings;
use astrai_serve::template::Message;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::ExitCode;

/// A line of the file; what it leaves out is as the flags say.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    messages: Option<Value>,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<Stop>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

/// An answer on its way, or why there is none.
type Coming = Result<Answer, String>;

struct Batch<'a> {
    flags: &'a Generate,
    published: &'a Published,
    stops: &'a StopStrings,
    engine: Engine,
}

/// Answers every line.
pub(super) fn run(
    flags: &Generate,
    path: &Path,
    published: &Published,
    stops: &StopStrings,
    out: &mut dyn Write,
) -> Done {
    let stdin = path == Path::new("-");
    let shown = if stdin { "standard input".into() } else { path.display().to_string() };
    let lines: Box<dyn BufRead> = match stdin {
        true => Box::new(std::io::stdin().lock()),
        false => Box::new(BufReader::new(File::open(path).map_err(|e| format!("{shown}: {e}"))?)),
    };
    let sequences = flags.max_seqs.map_or(SEQUENCES, usize::from);
    let machine = flags.room.machine.machine()?;
    let (one, speculation) = (flags.room.of_one(), flags.speculate.asked());
    let room = Room { sequences, queue: 2 * sequences, speculation, ..one };
    let engine = published.start_drafted(flags.speculate.draft.as_deref(), &room, &machine, &mut tell())?;
    let batch = Batch { flags, published, stops, engine };
    let (mut all, mut failed) = (0usize, 0usize);
    let mut coming: VecDeque<Coming> = VecDeque::new();
    let mut finish = |one: Option<Coming>, out: &mut dyn Write| -> Result<(), Failure> {
        let Some(one) = one else { return Ok(()) };
        let line = one.and_then(finish).unwrap_or_else(|why| {
            failed += 1;
            json!({ "error": why })
        });
        all += 1;
        Ok(writeln!(out, "{line}")?)
    };
    for line in lines.lines() {
        let line = line.map_err(|e| format!("{shown}: {e}"))?;
        let line = line.trim_start_matches('\u{feff}');
        if line.trim().is_empty() {
            continue;
        }
        if coming.len() >= 2 * sequences {
            finish(coming.pop_front(), out)?;
        }
        coming.push_back(batch.begin(line));
    }
    while !coming.is_empty() {
        finish(coming.pop_front(), out)?;
    }
    if failed == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    say(&format!("{failed} of {all} prompts have no answer; their lines say why"));
    Ok(ExitCode::FAILURE)
}

/// The whole answer.
fn finish(mut answer: Answer) -> Result<Value, String> {
    let mut text = Text::default();
    while let Some(step) = answer.blocking_next() {
        text.take(step)?;
    }
    Ok(text.report())
}

impl Batch<'_> {
    /// Hands a line to the engine.
    fn begin(&self, line: &str) -> Coming {
        let line: Line = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let prompt = self.ids(&line)?;
        let limits = self.engine.handle().limits();
        let left = limits.context.saturating_sub(prompt.len()).max(1);
        let flags = &self.flags.sampling;
        let all = flags.asked();
        let asked = Asked {
            temperature: line.temperature.or(all.temperature),
            top_p: line.top_p.or(all.top_p),
            top_k: line.top_k.or(all.top_k),
            min_p: line.min_p.or(all.min_p),
            repetition_penalty: line.repetition_penalty.or(all.repetition_penalty),
        };
        let most = line.max_tokens.or(self.flags.max_tokens).map_or(NEW.min(left), |n| n as usize);
        let mut request = Request::new(prompt);
        request.sampling = Sampling {
            seed: line.seed.or(flags.seed),
            max_tokens: Some(most),
            ..self.published.recommended.fill(&asked)
        };
        let own = match line.stop {
            None => None,
            Some(Stop::One(one)) => Some(StopStrings::new(&[one], false)),
            Some(Stop::Many(many)) => Some(StopStrings::new(&many, false)),
        };
        let own = own.transpose().map_err(|e| e.to_string())?;
        let stream = self.engine.handle().submit(request).map_err(|e| e.to_string())?;
        Ok(Answer::new(stream, &self.published.tokenizer, 1, own.as_ref().unwrap_or(self.stops), true))
    }

    fn ids(&self, line: &Line) -> Result<Vec<u32>, String> {
        let tokenizer = &self.published.tokenizer;
        let messages = match (&line.prompt, &line.messages) {
            (Some(text), None) if self.flags.chat => vec![Message::text("user", text)],
            (Some(text), None) => return tokenizer.encode(text, true).map_err(|e| e.to_string()),
            (None, Some(list)) => Message::list(list.clone()).map_err(|e| e.to_string())?,
            _ => return Err("give either `prompt` or `messages`".into()),
        };
        let none = || format!("{}: no chat template; give `prompt`", self.published.folder.display());
        chat_ids(self.published.template.as_ref().ok_or_else(none)?, tokenizer, &messages)
    }
}
