//! Users' commands at hook points. In: pairs of a moment and a command of the shell. Out: the command run at that moment, where the run
//! waits for it; on its standard input one line of JSON about the moment, what it prints goes to standard error. A command that fails is told.

use super::{At, Hook};
use crate::error::Error;
use crate::metrics::{StepMetrics, Validation};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// A moment at which a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The run begins or goes on.
    Begin,
    /// This update was made.
    Step(u64),
    /// So many updates were made, again and again.
    Every(u64),
    /// All of the data were read.
    Epoch,
    /// A validation was made.
    Eval,
    /// A checkpoint was published.
    Checkpoint,
    /// The run ends in order.
    End,
    /// The run ends with an error.
    Error,
}

impl When {
    /// Reads `begin`, `step:N`, `every:N`, `epoch`, `eval`, `checkpoint`, `end` or `error`.
    ///
    /// # Errors
    /// It is none of them.
    pub fn parse(text: &str) -> Result<When, String> {
        let number = |n: &str| n.parse().ok().filter(|n| *n > 0);
        let found = match text.split_once(':') {
            Some(("step", n)) => number(n).map(When::Step),
            Some(("every", n)) => number(n).map(When::Every),
            Some(_) => None,
            None => Some(match text {
                "begin" => When::Begin,
                "epoch" => When::Epoch,
                "eval" => When::Eval,
                "checkpoint" => When::Checkpoint,
                "end" => When::End,
                "error" => When::Error,
                _ => return Err(wrong(text)),
            }),
        };
        found.ok_or_else(|| wrong(text))
    }

    fn is_at_step(self, step: u64) -> bool {
        match self {
            When::Step(n) => n == step,
            When::Every(n) => step.is_multiple_of(n),
            _ => false,
        }
    }
}

fn wrong(text: &str) -> String {
    format!(
        "on: `{text}` is no moment; there are begin, step:N, every:N, epoch, eval, checkpoint, end and error, with N from 1"
    )
}

/// The commands of a run.
#[derive(Clone, Debug, Default)]
pub struct Commands {
    all: Vec<(When, String, String)>,
}

impl Commands {
    /// Commands from a list of moments, each followed by its command.
    ///
    /// # Errors
    /// A moment is none, or has no command.
    pub fn new(pairs: &[String]) -> Result<Commands, String> {
        let pair = |pair: &[String]| match pair {
            [when, command] if !command.trim().is_empty() => {
                Ok((When::parse(when)?, when.clone(), command.clone()))
            }
            _ => Err(format!("on: `{}` has no command", pair[0])),
        };
        Ok(Commands { all: pairs.chunks(2).map(pair).collect::<Result<_, _>>()? })
    }

    /// Runs the commands of a moment, each with a line about it; `more` are further fields. All run, whichever fails.
    fn run(
        &self,
        at: &At,
        event: &str,
        is: impl Fn(When) -> bool,
        more: &impl Serialize,
    ) -> Result<(), Error> {
        let mut wrong = Vec::new();
        for (_, when, command) in self.all.iter().filter(|(when, ..)| is(*when)) {
            let told = line(at, event, more).and_then(|line| shell(command, &line));
            wrong.extend(told.err().map(|why| format!("on {when}: `{command}` {why}, the run goes on")));
        }
        if wrong.is_empty() { Ok(()) } else { Err(Error::Refused(wrong.join("; "))) }
    }
}

/// A moment as JSON: which it is, where the run stands, and what else there is to say.
fn line(at: &At, event: &str, more: &impl Serialize) -> Result<String, String> {
    let (out, state) = (at.out.to_string_lossy(), at.state);
    let mut fields = Map::new();
    for (key, value) in [
        ("event", json!(event)),
        ("out", json!(out)),
        ("step", json!(state.step)),
        ("total_steps", json!(state.total_steps)),
        ("epoch", json!(state.epoch)),
        ("tokens", json!(state.tokens)),
    ] {
        fields.insert(key.into(), value);
    }
    let more = serde_json::to_value(more).map_err(|e| format!("is told nothing: {e}"))?;
    if let Value::Object(more) = more {
        fields.extend(more);
    }
    Ok(format!("{}\n", Value::Object(fields)))
}

fn shell(command: &str, line: &str) -> Result<(), String> {
    let mut sh = Command::new("sh");
    // Standard output is the program's own: with --json it holds rows.
    sh.arg("-c").arg(command).stdin(Stdio::piped()).stdout(Stdio::from(io::stderr()));
    let mut child = sh.spawn().map_err(|e| format!("cannot be started: {e}"))?;
    if let Some(mut input) = child.stdin.take() {
        // A command may end without having read it.
        let _unread = input.write_all(line.as_bytes());
    }
    let status = child.wait().map_err(|e| format!("cannot be waited for: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("failed ({status})")) }
}

impl Hook for Commands {
    fn on_train_begin(&mut self, at: &At) -> Result<(), Error> {
        self.run(at, "begin", |w| w == When::Begin, &())
    }

    fn on_optimizer_step(&mut self, at: &At, row: &StepMetrics) -> Result<(), Error> {
        self.run(at, "step", |w| w.is_at_step(at.state.step), row)
    }

    fn on_validation(&mut self, at: &At, row: &Validation) -> Result<(), Error> {
        self.run(at, "eval", |w| w == When::Eval, row)
    }

    fn on_checkpoint(&mut self, at: &At, path: &Path) -> Result<(), Error> {
        self.run(at, "checkpoint", |w| w == When::Checkpoint, &json!({"checkpoint": path.to_string_lossy()}))
    }

    fn on_epoch_end(&mut self, at: &At) -> Result<(), Error> {
        self.run(at, "epoch", |w| w == When::Epoch, &())
    }

    fn on_error(&mut self, at: &At, error: &Error) -> Result<(), Error> {
        self.run(at, "error", |w| w == When::Error, &json!({"error": error.to_string()}))
    }

    fn on_train_end(&mut self, at: &At) -> Result<(), Error> {
        let complete = at.state.step >= at.state.total_steps;
        self.run(at, "end", |w| w == When::End, &json!({"complete": complete}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TrainerState;
    use crate::settings::Settings;

    #[test]
    fn moments_are_read_and_others_refused() {
        assert_eq!(When::parse("step:100"), Ok(When::Step(100)));
        assert_eq!(When::parse("every:7"), Ok(When::Every(7)));
        for text in ["step", "step:0", "step:x", "every:-1", "checkpoint:3", "", "saved"] {
            assert!(When::parse(text).unwrap_err().contains("is no moment"), "{text}");
        }
        let pairs = |list: &[&str]| Commands::new(&list.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert!(pairs(&["end", " "]).unwrap_err().contains("`end` has no command"));
        assert!(pairs(&["end"]).unwrap_err().contains("`end` has no command"));
        let due = |when: When| (1..=9).filter(|step| when.is_at_step(*step)).collect::<Vec<_>>();
        assert_eq!((due(When::Step(4)), due(When::Every(4))), (vec![4], vec![4, 8]));
    }

    #[test]
    fn a_command_hears_its_moment_and_a_failing_one_keeps_no_other_from_running() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("heard");
        let state = TrainerState::new(Settings::default(), 9, "data".into(), "compiler".into());
        let at = At { out: dir.path(), state: &state };
        let append = format!("cat >> '{}'", file.display());
        let pairs = ["begin", "exit 3", "begin", &append, "end", &append, "eval", &append];
        let mut commands = Commands::new(&pairs.map(String::from)).unwrap();
        let why = commands.on_train_begin(&at).unwrap_err().to_string();
        assert_eq!(why, "on begin: `exit 3` failed (exit status: 3), the run goes on");
        commands.on_batch_begin(&at).unwrap();
        commands.on_train_end(&at).unwrap();
        let heard = std::fs::read_to_string(file).unwrap();
        let lines: Vec<Value> = heard.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{heard}");
        assert_eq!((&lines[0]["event"], &lines[0]["total_steps"]), (&json!("begin"), &json!(9)));
        assert_eq!((&lines[1]["event"], &lines[1]["complete"]), (&json!("end"), &json!(false)));
        // A line that nobody reads is longer than a pipe holds.
        let deaf = Commands::new(&["end", "exec 0<&-; true"].map(String::from)).unwrap();
        deaf.run(&at, "end", |_| true, &json!({"long": "x".repeat(1 << 20)})).unwrap();
    }
}
