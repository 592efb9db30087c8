//! A training run on the screen: a bar with loss, tokens a second, MFU and the time left where a person watches; else a line
//! now and then; or every row as JSON.

use astrai_train::metrics::{Step, Validation};
use astrai_train::trainer::Watch;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

/// Between lines where nobody watches.
const PAUSE: Duration = Duration::from_secs(10);

/// The screen.
pub struct Screen {
    json: bool,
    bar: Option<ProgressBar>,
    stage: &'static str,
    last: Option<Instant>,
    validation: Option<f64>,
}

impl Screen {
    /// A screen; as `json`, rows go to standard output.
    pub fn new(json: bool) -> Screen {
        let watched = !json && std::io::stderr().is_terminal();
        let bar = watched.then(|| ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr()));
        Screen { json, bar, stage: "", last: None, validation: None }
    }

    fn style(&mut self, stage: &'static str, template: &str) {
        if let Some(bar) = &self.bar
            && self.stage != stage
        {
            bar.reset();
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
        }
        self.stage = stage;
    }

    fn line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }
}

impl Watch for Screen {
    fn note(&mut self, line: &str) {
        self.line(line);
    }

    fn progress(&mut self, what: &'static str, done: u64, total: u64) {
        self.style(what, "{msg} [{bar:30}] {percent:>3}% {eta}");
        if let Some(bar) = &self.bar {
            bar.set_message(what);
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    fn step(&mut self, row: &Step, total: u64) {
        if self.json {
            if let Ok(line) = serde_json::to_string(row) {
                println!("{line}");
            }
            return;
        }
        let validation = self.validation.map_or(String::new(), |v| format!(" val {v:.4}"));
        let figures = format!(
            "loss {:.4}{validation} | {:.0} tok/s | MFU {:.1}%",
            row.loss,
            row.tokens_per_s,
            100.0 * row.mfu
        );
        self.style("training", "{pos}/{len} [{bar:24}] {msg} | {eta} left");
        match &self.bar {
            Some(bar) => {
                bar.set_length(total);
                bar.set_position(row.step);
                bar.set_message(figures);
            }
            None => {
                let due = self.last.is_none_or(|t| t.elapsed() >= PAUSE) || row.step == total;
                if due {
                    eprintln!(
                        "step {}/{total} {figures} lr {:.2e} grad {:.3}",
                        row.step, row.lr, row.grad_norm
                    );
                    self.last = Some(Instant::now());
                }
            }
        }
    }

    fn validated(&mut self, row: &Validation) {
        self.validation = Some(row.val_loss);
        match self.json {
            true => {
                if let Ok(line) = serde_json::to_string(row) {
                    println!("{line}");
                }
            }
            false => self.line(&format!("step {}: validation loss {:.4}", row.step, row.val_loss)),
        }
    }

    fn saved(&mut self, path: &Path) {
        if !self.json {
            self.line(&format!("saved {}", path.display()));
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
