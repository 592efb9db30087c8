//! Progress on standard error, for work of more than a moment and only where a person is watching.

use crate::failure::warn;
use astrai_engine::Note;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Work that ends sooner shows no bar.
const PATIENCE: Duration = Duration::from_millis(700);

/// Tells a person of notes: warnings as lines, work as bars.
pub fn tell() -> impl FnMut(Note) {
    let mut bar: Option<(&'static str, Progress)> = None;
    move |note| match note {
        Note::Warning(line) => warn(&[line.to_string()]),
        Note::Progress { what, done, total } => {
            let (_, shown) = match bar.take().filter(|(known, _)| *known == what) {
                Some(known) => bar.insert(known),
                None => bar.insert((what, Progress::new(what))),
            };
            shown.set(done, total);
            if done == total {
                bar = None;
            }
        }
    }
}

/// A bar that appears when the work turns out to be long and goes when it is dropped.
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    shown: bool,
}

impl Progress {
    /// Progress of this work, a few words.
    pub fn new(what: &'static str) -> Progress {
        let bar = ProgressBar::hidden();
        if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {percent:>3}% {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what);
        Progress { bar, started: Instant::now(), shown: false }
    }

    /// Shows the progress of this work, which tells how much of it is done.
    pub fn during<T>(what: &'static str, work: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T) -> T {
        let mut progress = Progress::new(what);
        work(&mut |done, total| progress.set(done, total))
    }

    /// `done` of `total` is done.
    pub fn set(&mut self, done: u64, total: u64) {
        if !self.shown && self.started.elapsed() > PATIENCE && std::io::stderr().is_terminal() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.shown = true;
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
