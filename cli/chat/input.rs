//! Lines from a user. In: a terminal, with a line editor, or a pipe. Out: one line after the other. And Ctrl-C: it ends an answer
//! while there is one; otherwise it does what it does to any program.

use crate::failure::Failure;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::io::{self, BufRead, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the user did.
pub(super) enum InputEvent {
    Line(String),
    /// Ctrl-C where there was no answer to end.
    Interrupt,
    /// Ctrl-D, or the end of the pipe.
    End,
}

/// Where lines come from.
pub(super) enum Input {
    Terminal(Box<DefaultEditor>),
    Pipe,
}

impl Input {
    pub(super) fn open() -> Result<Input, Failure> {
        if !io::stdin().is_terminal() {
            return Ok(Input::Pipe);
        }
        let editor = DefaultEditor::new().map_err(|e| format!("the terminal: {e}"))?;
        Ok(Input::Terminal(Box::new(editor)))
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next line, without its end.
    pub(super) fn read(&mut self) -> Result<InputEvent, Failure> {
        match self {
            Input::Pipe => {
                let mut line = String::new();
                match io::stdin().lock().read_line(&mut line) {
                    Ok(0) => Ok(InputEvent::End),
                    Ok(_) => Ok(InputEvent::Line(line)),
                    Err(e) => Err(format!("standard input: {e}").into()),
                }
            }
            Input::Terminal(editor) => match editor.readline("> ") {
                Ok(line) => {
                    // The history is a comfort: without room for a line there is none of it.
                    let _ = editor.add_history_entry(&line);
                    Ok(InputEvent::Line(line))
                }
                Err(ReadlineError::Interrupted) => Ok(InputEvent::Interrupt),
                Err(ReadlineError::Eof) => Ok(InputEvent::End),
                Err(e) => Err(format!("the terminal: {e}").into()),
            },
        }
    }
}

/// Ctrl-C.
pub(super) struct Interrupt {
    /// Set while there is no answer to end.
    idle: Arc<AtomicBool>,
    came: Arc<AtomicBool>,
}

impl Interrupt {
    pub(super) fn register() -> io::Result<Interrupt> {
        let interrupt = Interrupt { idle: Arc::new(AtomicBool::new(true)), came: Arc::default() };
        flag::register_conditional_default(SIGINT, interrupt.idle.clone())?;
        flag::register(SIGINT, interrupt.came.clone())?;
        Ok(interrupt)
    }

    /// From here on it is noted.
    pub(super) fn arm(&self) {
        self.came.store(false, Ordering::Relaxed);
        self.idle.store(false, Ordering::Relaxed);
    }

    /// From here on it ends the program.
    pub(super) fn disarm(&self) {
        self.idle.store(true, Ordering::Relaxed);
    }

    pub(super) fn came(&self) -> bool {
        self.came.load(Ordering::Relaxed)
    }
}
