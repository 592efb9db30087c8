//! A training run on the screen: a bar with loss, tokens a second, MFU and the time left where a person watches; else a line
//! now and then; or every row as JSON. A run does not end because nobody reads.

use astrai_train::Error;
use astrai_train::hooks::{At, Hook};
use astrai_train::metrics::{StepMetrics, Validation};
use astrai_train::trainer::Callbacks;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Between lines where nobody watches.
const PAUSE: Duration = Duration::from_secs(10);
/// Of preparations, and of steps: what matters most comes first, for a narrow terminal cuts the end.
const PREPARING: &str = "{msg} [{bar:30}] {percent:>3}% {eta} left";
/// Metrics of strategies that are shown, and how they are called there.
const SHOWN: [(&str, &str); 5] = [
    ("rewards/accuracies", "accuracy"),
    ("rewards/margins", "margin"),
    ("reward", "reward"),
    ("kl", "kl"),
    ("clip_ratio/region_mean", "clipped"),
];
const TRAINING: &str = "{pos}/{len} [{bar:8}] {eta} left, {wide_msg}";

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
        let watched = !json && io::stderr().is_terminal();
        let bar = watched.then(ProgressBar::hidden);
        Screen { json, bar, stage: "", last: None, validation: None }
    }

    /// Another stage begins, of which so much is done; what was done before it says nothing about the time left.
    fn enter(&mut self, stage: &'static str, template: &str, (done, total): (u64, u64), message: &str) {
        if self.stage == stage {
            return;
        }
        let first = self.stage.is_empty();
        (self.stage, self.last) = (stage, None);
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_message(message.to_string());
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_length(total);
            bar.set_position(done);
            bar.reset_eta();
            if first {
                // Hidden until it had something to show.
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
        }
    }

    fn line(&self, line: &str) {
        let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        // Where standard error is closed nobody can be told.
        let say = || drop(writeln!(io::stderr(), "{line}"));
        match &self.bar {
            Some(bar) => bar.suspend(say),
            None => say(),
        }
    }

    fn row(&self, row: &impl Serialize) {
        if let Ok(line) = serde_json::to_string(row) {
            // The rows are in the run's folder too; a reader who has gone is no reason to end it.
            let _unread = writeln!(io::stdout(), "{line}");
        }
    }
}

impl Callbacks for Screen {
    fn note(&mut self, line: &str) {
        self.line(line);
    }

    fn progress(&mut self, what: &'static str, done: u64, total: u64) {
        self.enter(what, PREPARING, (0, total), what);
        match &self.bar {
            Some(bar) => {
                bar.set_length(total);
                bar.set_position(done);
            }
            None => {
                let last = *self.last.get_or_insert_with(Instant::now);
                if !self.json && last.elapsed() >= PAUSE {
                    self.line(&format!("{what}: {} %", 100 * done / total.max(1)));
                    self.last = Some(Instant::now());
                }
            }
        }
    }
}

impl Hook for Screen {
    fn on_optimizer_step(&mut self, at: &At, row: &StepMetrics) -> Result<(), Error> {
        let total = at.state.total_steps;
        if self.json {
            self.row(row);
            return Ok(());
        }
        let validation = self.validation.map_or(String::new(), |v| format!(", val {v:.4}"));
        let shown =
            SHOWN.iter().filter_map(|(key, name)| Some(format!(", {name} {:.3}", row.metrics.get(*key)?)));
        let figures = format!(
            "loss {:.4}{validation}{}, {:.0} tok/s, MFU {:.1}%",
            row.loss,
            shown.collect::<String>(),
            row.tokens_per_s,
            100.0 * row.mfu
        );
        self.enter("training", TRAINING, (row.step.saturating_sub(1), total), &figures);
        match &self.bar {
            Some(bar) => {
                bar.set_position(row.step);
                bar.set_message(figures);
            }
            None => {
                let due = self.last.is_none_or(|t| t.elapsed() >= PAUSE) || row.step == total;
                if due {
                    let (step, lr, norm) = (row.step, row.lr, row.grad_norm);
                    self.line(&format!("step {step}/{total}: {figures}, lr {lr:.2e}, grad {norm:.3}"));
                    self.last = Some(Instant::now());
                }
            }
        }
        Ok(())
    }

    fn on_validation(&mut self, _: &At, row: &Validation) -> Result<(), Error> {
        self.validation = Some(row.val_loss);
        match self.json {
            true => self.row(row),
            false => {
                let tasks = row.metrics.iter().filter(|(name, _)| !name.ends_with("_stderr"));
                let tasks: String = tasks.map(|(name, value)| format!(", {name} {value:.4}")).collect();
                self.line(&format!("step {}: validation loss {:.4}{tasks}", row.step, row.val_loss));
            }
        }
        Ok(())
    }

    fn on_checkpoint(&mut self, _: &At, path: &Path) -> Result<(), Error> {
        if !self.json {
            self.line(&format!("saved {}", path.display()));
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
