//! `astrai chat`: a conversation in the terminal. In: lines of a user, from a terminal or a pipe. Out: the model's answers as they
//! come; what was said so far is part of every prompt, and the engine finds the keys and values of it in its pages.

mod input;

use crate::failure::{Done, Failure, say};
use crate::flags::{RoomFlags, SamplingFlags, SpeculateFlag};
use crate::progress::tell;
use astrai_engine::serving::{Published, Room, chat_ids};
use astrai_serve::answer::{Answer, Delta, Ended};
use astrai_serve::engine::{End, Engine};
use astrai_serve::request::{Request, Sampling};
use astrai_serve::stop::StopStrings;
use astrai_serve::template::{ChatTemplate, Message};
use clap::Args;
use input::{Input, InputEvent, Interrupt};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// How often an answer looks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

const COMMANDS: &str = "/reset begins a new conversation, /system TEXT says how to answer, /exit ends";

/// Talk with a model in the terminal
///
/// Answers come as they are made, and all that was said is remembered. /reset begins a new conversation, /system TEXT
/// sets the system's message, /exit or Ctrl-D ends the program, Ctrl-C ends the answer. Standard input may be a pipe: each
/// line is then a message, and the exit code 1 if one had no answer. Sampling that no flag names is as the model's generation_config.json recommends.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai chat model/
  astrai chat model/ --system 'Answer in one sentence.' --temperature 0.7 --dtype bf16
  printf 'Hello.\\nAnd again?\\n' | astrai chat model/")]
pub struct Chat {
    /// A model directory, with a chat template
    model: PathBuf,
    /// The system's message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens of an answer [default: what the context leaves]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    speculate: SpeculateFlag,
    #[command(flatten)]
    room: RoomFlags,
}

/// A conversation and the engine that answers.
struct Conversation<'a> {
    published: &'a Published,
    template: &'a ChatTemplate,
    engine: Engine,
    sampling: Sampling,
    /// The same, as a wish: an answer may also end where the context does.
    most: Option<usize>,
    stops: StopStrings,
    system: Option<String>,
    messages: Vec<Message>,
    /// Messages without an answer.
    refused: usize,
    interrupt: Interrupt,
    runtime: tokio::runtime::Runtime,
}

/// How a turn went.
enum Turn {
    /// So the model answered; it has not ended where it was interrupted.
    Answered(Delta),
    /// There is no answer, for a reason in one line.
    Refused(String),
}

impl Chat {
    /// Talks until the user ends.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let published = self.room.published(&self.model)?;
        let template = published.template("continue texts with `astrai generate`")?;
        self.sampling.check(published.model.config.vocab_size)?;
        let machine = self.room.machine.machine()?;
        let room = Room { speculation: self.speculate.asked(), ..self.room.of_one() };
        let engine =
            published.start_drafted(self.speculate.draft.as_deref(), &room, &machine, &mut tell())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let mut conversation = Conversation {
            published: &published,
            template,
            engine,
            sampling: Sampling {
                seed: self.sampling.seed,
                ..published.recommended.fill(&self.sampling.asked())
            },
            most: self.max_tokens.map(|n| n as usize),
            stops: StopStrings::new::<&str>(&[], false).map_err(|e| e.to_string())?,
            system: self.system,
            messages: Vec::new(),
            refused: 0,
            interrupt: Interrupt::register().map_err(|e| format!("signals: {e}"))?,
            runtime: runtime.map_err(|e| format!("the runtime did not start: {e}"))?,
        };
        let mut input = Input::open()?;
        if input.is_terminal() {
            writeln!(out, "{COMMANDS}.")?;
        }
        loop {
            match input.read()? {
                InputEvent::Line(line) if line.trim().is_empty() => {}
                InputEvent::Line(line) => {
                    if !conversation.handle_line(line.trim(), out)? {
                        break;
                    }
                }
                InputEvent::Interrupt => say("Ctrl-D or /exit ends the program"),
                InputEvent::End => break,
            }
        }
        // Who types has read why there was no answer; a script reads the exit code.
        let unheard = conversation.refused > 0 && !input.is_terminal();
        Ok(if unheard { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

impl Conversation<'_> {
    /// A command or a message; `false` when the user ends.
    fn handle_line(&mut self, line: &str, out: &mut dyn Write) -> Result<bool, Failure> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match word {
            "/exit" => return Ok(false),
            "/reset" => self.messages.clear(),
            "/system" => {
                let text = rest.trim();
                self.system = (!text.is_empty()).then(|| text.to_string());
            }
            command if command.starts_with('/') => say(&format!("{command} is no command: {COMMANDS}")),
            _ => self.turn(line, out)?,
        }
        Ok(true)
    }

    fn turn(&mut self, line: &str, out: &mut dyn Write) -> Result<(), Failure> {
        self.messages.push(Message::text("user", line));
        self.interrupt.arm();
        let turn = self.answer(out);
        self.interrupt.disarm();
        match turn? {
            Turn::Answered(Delta { text, ended, .. }) => {
                writeln!(out)?;
                self.messages.push(Message::text("assistant", &text));
                if ended == Some(Ended::Length) && self.most.is_none() {
                    say("the context is full; /reset begins a new conversation");
                }
            }
            Turn::Refused(why) => {
                self.messages.pop();
                self.refused += 1;
                say(&why);
            }
        }
        Ok(())
    }

    /// The answer to all that was said, shown as it comes.
    fn answer(&self, out: &mut dyn Write) -> Result<Turn, Failure> {
        let system = self.system.as_deref().map(|text| Message::text("system", text));
        let messages: Vec<Message> = system.into_iter().chain(self.messages.iter().cloned()).collect();
        let ids = match chat_ids(self.template, &self.published.tokenizer, &messages) {
            Ok(ids) => ids,
            Err(why) => return Ok(Turn::Refused(why)),
        };
        let (has, context) = (ids.len(), self.engine.handle().limits().context);
        if has >= context {
            return Ok(Turn::Refused(format!(
                "the conversation has {has} tokens, the context {context}; /reset begins a new one"
            )));
        }
        let mut request = Request::new(ids);
        let most = self.most.map(|n| n.min(context - has));
        request.sampling = Sampling { max_tokens: most, ..self.sampling.clone() };
        let stream = match self.engine.handle().submit(request) {
            Ok(stream) => stream,
            Err(e) => return Ok(Turn::Refused(e.to_string())),
        };
        let mut answer = Answer::new(stream, &self.published.tokenizer, 1, &self.stops, true);
        let mut whole = Delta::default();
        while let Some(step) = self.runtime.block_on(self.next(&mut answer)) {
            for delta in step.deltas {
                out.write_all(delta.text.as_bytes())?;
                whole.append(delta);
            }
            out.flush()?;
            if let Some(End::Refused(why) | End::Failed(why)) = step.end {
                return match self.engine.handle().dead() {
                    Some(_) => Err(why.into()),
                    None => Ok(Turn::Refused(why)),
                };
            }
        }
        Ok(Turn::Answered(whole))
    }

    /// The next step; Ctrl-C makes it the last.
    async fn next(&self, answer: &mut Answer) -> Option<astrai_serve::answer::Chunk> {
        loop {
            if self.interrupt.came() {
                answer.cancel();
            }
            if let Ok(step) = tokio::time::timeout(POLL_INTERVAL, answer.next()).await {
                return step;
            }
        }
    }
}
