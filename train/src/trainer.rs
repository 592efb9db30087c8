//! A run. In: an engine, data, settings and where the run stands. Out: steps, each with its row of metrics; validations;
//! checkpoints, saved after an update and never before it; a picture of the losses. What comes next is a function of the
//! number of steps made, so a run that was stopped, however, goes on as if it had not been. All that only watches is a [`Hook`].

use crate::batch::PackedBatch;
use crate::checkpoint::{Keep, RunFolder, TrainerState};
use crate::contents::Snapshot;
use crate::data::Sampler;
use crate::dataset::Dataset;
use crate::engine::Engine;
use crate::error::Error;
use crate::hooks::{At, Hook};
use crate::metrics::{self, Csv, Events, Metrics, Recorder, Validation, mfu};
use crate::plot;
use crate::preference::Batch as _;
use crate::saver::{Saver, Written};
use crate::schedule::Schedule;
use crate::settings::{Length, Measured, Settings};
use crate::signals::Stop;
use crate::strategies::Batch;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Name of the metrics in a run's folder.
pub const METRICS: &str = "metrics.jsonl";
/// Name of the same as a table.
pub const TABLE: &str = "metrics.csv";
/// Folder of the same for TensorBoard.
pub const TENSORBOARD: &str = "tensorboard";
/// Name of their picture.
pub const PICTURE: &str = "loss.svg";
/// So many skipped steps in a row, none with a finite gradient, end a run.
const PATIENCE: u64 = 20;

/// The user, who watches a run.
pub trait Callbacks: Hook {
    /// A line for the user.
    fn note(&mut self, line: &str);
    /// A preparation has come so far.
    fn progress(&mut self, what: &'static str, done: u64, total: u64);
}

/// A run about to begin or go on.
pub struct Trainer<'a> {
    /// The model under training, in the state of `state`.
    pub engine: Engine,
    /// What it trains on.
    pub data: Dataset,
    /// How.
    pub settings: Settings,
    /// Text of the model's `config.json`.
    pub config: String,
    /// Where the run stands.
    pub state: TrainerState,
    /// Operations of forward and backward for a token, and what the machine can do in a second: for `mfu`.
    pub flops: (f64, f64),
    /// What hears the run beside the files of metrics and the user, and after them.
    pub hooks: Vec<Box<dyn Hook + 'a>>,
}

/// Updates of a run over `items` windows.
pub fn total_steps(settings: &Settings, items: u64) -> u64 {
    let step = (settings.batch * settings.accum) as u64;
    match settings.length() {
        Length::Steps(n) => n,
        Length::Epochs(n) => items.saturating_mul(n).div_ceil(step).max(1),
    }
}

/// A run under way.
struct Run<'a, 'b> {
    t: Trainer<'a>,
    saver: Saver,
    sampler: Sampler,
    schedule: Schedule,
    /// The files of metrics.
    files: Vec<Box<dyn Hook>>,
    batches: Vec<Batch>,
    callbacks: &'b mut dyn Callbacks,
    /// Step of the newest checkpoint of this process.
    saved: Option<u64>,
    /// Steps in a row skipped for a gradient that is not finite.
    skipped: u64,
}

impl<'a> Trainer<'a> {
    /// Runs to the end, or until `stop` asks for it; then the last state is saved in the run's folder. Answers the number of steps made.
    pub fn run(self, folder: RunFolder, callbacks: &mut dyn Callbacks, stop: &Stop) -> Result<u64, Error> {
        let sampler = Sampler::new(self.data.train.len(), self.settings.seed)?;
        let schedule = self.settings.schedule(self.state.total_steps)?;
        let files = files(folder.path(), &self.settings, self.state.step, callbacks)?;
        let tokens = self.settings.batch * self.settings.seq;
        let empty = |_| Batch::of(self.settings.strategy.kind(), tokens);
        let batches = (0..self.settings.accum).map(empty).collect();
        let saver = Saver::new(folder, Keep { newest: self.settings.keep, every: self.settings.keep_every });
        let mut run =
            Run { t: self, saver, sampler, schedule, files, batches, callbacks, saved: None, skipped: 0 };
        let done = run.all(stop);
        if let Err(e) = &done {
            run.settle(true);
            run.tell(&mut |hook, at| hook.on_error(at, e));
        }
        done
    }
}

/// The files of metrics of a run that stands at this step: rows as JSON, and what the settings ask for beside them.
fn files(
    out: &Path,
    settings: &Settings,
    step: u64,
    callbacks: &mut dyn Callbacks,
) -> Result<Vec<Box<dyn Hook>>, Error> {
    let path = out.join(METRICS);
    let (metrics, notes) = match step {
        0 => (Metrics::create(&path)?, vec![]),
        step => Metrics::resume(&path, step)?,
    };
    notes.iter().for_each(|n| callbacks.note(n));
    let mut files: Vec<Box<dyn Hook>> = vec![Box::new(Recorder::new(metrics))];
    for measured in settings.metrics.iter().flatten() {
        files.push(match measured {
            Measured::Csv => {
                let (rows, _) = metrics::read(&path)?;
                Box::new(Recorder::new(Csv::create(&out.join(TABLE), &rows)?))
            }
            Measured::Tensorboard => {
                Box::new(Recorder::new(Events::create(&out.join(TENSORBOARD), step + 1)?))
            }
        });
    }
    Ok(files)
}

impl Run<'_, '_> {
    fn all(&mut self, stop: &Stop) -> Result<u64, Error> {
        self.tell(&mut |hook, at| hook.on_train_begin(at));
        self.tell(&mut |hook, at| hook.on_epoch_begin(at));
        while self.t.state.step < self.t.state.total_steps && !stop.requested() {
            self.tell(&mut |hook, at| hook.on_batch_begin(at));
            let epoch = self.t.state.epoch;
            self.step()?;
            let step = self.t.state.step;
            let due = |every: u64| every > 0 && step.is_multiple_of(every);
            // The last step is validated whatever its number: the result of a run is what one wants to know.
            let every = self.t.settings.eval_every;
            if due(every) || every > 0 && step == self.t.state.total_steps {
                self.validate()?;
            }
            // Steps that change nothing would in time push out the checkpoints from before the trouble.
            if due(self.t.settings.save_every) && step < self.t.state.total_steps && self.skipped == 0 {
                // The last checkpoint stays good, and there may be room the next time.
                if let Err(e) = self.save(self.t.settings.async_save == Some(true)) {
                    self.not_saved(&e);
                }
            }
            self.settle(false);
            self.tell(&mut |hook, at| hook.on_batch_end(at));
            if self.t.state.epoch > epoch {
                self.tell(&mut |hook, at| hook.on_epoch_end(at));
                if step < self.t.state.total_steps {
                    self.tell(&mut |hook, at| hook.on_epoch_begin(at));
                }
            }
        }
        self.settle(true);
        if self.skipped > 0 && self.skipped == self.t.state.step && !stop.requested() {
            let n = self.skipped;
            return Err(Error::Refused(format!(
                "each of the {n} steps was left out, and nothing was learnt: lower --lr or look at the data and the weights"
            )));
        }
        if self.saved != Some(self.t.state.step) {
            self.save(false)?;
        }
        self.tell(&mut |hook, at| hook.on_train_end(at));
        Ok(self.t.state.step)
    }

    /// Calls a hook point: of the files of metrics, of the user, of all else. What fails there is told.
    fn tell(&mut self, point: &mut dyn FnMut(&mut dyn Hook, &At) -> Result<(), Error>) {
        self.tell_of(None, point);
    }

    /// The same of a state that was.
    fn tell_of(
        &mut self,
        state: Option<&TrainerState>,
        point: &mut dyn FnMut(&mut dyn Hook, &At) -> Result<(), Error>,
    ) {
        let at = At { out: self.saver.path(), state: state.unwrap_or(&self.t.state) };
        for file in &mut self.files {
            if let Err(e) = point(file.as_mut(), &at) {
                self.callbacks.note(&e.to_string());
            }
        }
        if let Err(e) = point(self.callbacks, &at) {
            self.callbacks.note(&e.to_string());
        }
        for hook in &mut self.t.hooks {
            if let Err(e) = point(hook.as_mut(), &at) {
                self.callbacks.note(&e.to_string());
            }
        }
    }

    fn step(&mut self) -> Result<(), Error> {
        let started = Instant::now();
        let s = &self.t.settings;
        let (micro, sample) = (s.batch as u64, self.t.state.sample);
        for (i, batch) in self.batches.iter_mut().enumerate() {
            let first = sample + i as u64 * micro;
            batch.fill(&*self.t.data.train, self.sampler.range(first..first + micro))?;
        }
        let lr = self.schedule.at(self.t.state.step);
        let done = self.t.engine.learn(&self.batches, lr)?;
        let tokens = self.batches.iter().map(Batch::tokens).sum::<usize>() as u64;
        let seconds = started.elapsed().as_secs_f64();
        let state = &mut self.t.state;
        state.step += 1;
        state.random.step = state.step;
        state.sample += micro * self.batches.len() as u64;
        state.epoch = self.sampler.epoch(state.sample);
        state.tokens += tokens;
        state.loss_scale = self.t.engine.loss_scale;
        let mut metrics = self.t.engine.metrics();
        metrics.extend(done.grad_snr.map(|snr| ("grad_snr".to_string(), snr)));
        let tokens_per_s = tokens as f64 / seconds;
        let (flops, peak) = self.t.flops;
        let row = metrics::StepMetrics {
            step: state.step,
            epoch: state.sample as f64 / self.sampler.items() as f64,
            tokens: state.tokens,
            loss: done.loss,
            lr,
            grad_norm: done.grad_norm,
            tokens_per_s,
            seconds,
            mfu: mfu(flops, tokens_per_s, peak),
            loss_scale: done.loss_scale,
            router: done.router,
            metrics,
        };
        self.tell(&mut |hook, at| hook.on_optimizer_step(at, &row));
        self.skipped = if done.applied { 0 } else { self.skipped + 1 };
        let large = row.grad_norm.is_finite();
        let none = done.targets == 0 && !done.applied;
        if self.skipped == 1 || large && !none && self.skipped > 0 {
            let why = match large {
                _ if none => "is of no target: none of its tokens is learnt".to_string(),
                true => format!("of norm {:.3} is above --skip-norm", row.grad_norm),
                false => "is not finite".to_string(),
            };
            let next = self.t.state.loss_scale.filter(|_| !large && !none);
            let next =
                next.map_or(String::new(), |s| format!("; the loss is scaled by {} from here", s.scale));
            self.callbacks
                .note(&format!("step {}: the gradient {why}, the step was left out{next}", row.step));
        }
        if self.skipped >= PATIENCE {
            let none = if none {
                "no target"
            } else if large {
                "every gradient norm was above --skip-norm"
            } else {
                "no finite gradient"
            };
            return Err(Error::Refused(format!(
                "{none} in the last {PATIENCE} steps, up to step {}: lower --lr or look at the data, and go on from the last checkpoint with --resume, or begin anew",
                row.step
            )));
        }
        Ok(())
    }

    fn validate(&mut self) -> Result<(), Error> {
        let Some(validation) = &self.t.data.validation else { return Ok(()) };
        let micro = self.t.settings.batch as u64;
        let parts = (0..validation.len()).step_by(micro as usize);
        let parts = parts.map(|first| first..(first + micro).min(validation.len()));
        let (val_loss, metrics) = if self.t.engine.recipe().objective.is_some() {
            // Held out are a few hundred records: together they are one window, whose loss counts its tokens alike.
            let mut window = Vec::new();
            for items in parts {
                let mut batch = Batch::of(self.t.settings.strategy.kind(), 0);
                batch.fill(&**validation, items)?;
                window.push(batch);
            }
            (self.t.engine.judge(&window)?, self.t.engine.metrics())
        } else {
            let (mut sum, mut count) = (0.0, 0);
            let Some(batch) = self.batches.first_mut() else { return Ok(()) };
            for items in parts {
                batch.fill(&**validation, items)?;
                if let Batch::Tokens(batch) = &*batch {
                    let (loss, targets) = self.t.engine.score(batch)?;
                    sum += loss;
                    count += targets;
                }
            }
            (sum / count.max(1) as f64, Default::default())
        };
        let mut metrics: BTreeMap<String, f64> =
            metrics.into_iter().map(|(name, x)| (format!("val_{name}"), x)).collect();
        let (mut batch, engine) = (PackedBatch::default(), &mut self.t.engine);
        for task in &self.t.data.tasks {
            metrics.append(&mut task.metrics(&mut |scored| {
                batch.clear();
                scored.append_to(&mut batch);
                engine.score(&batch).map(|(loss, _)| -loss)
            })?);
        }
        let row = Validation { step: self.t.state.step, val_loss, metrics };
        self.tell(&mut |hook, at| hook.on_validation(at, &row));
        Ok(())
    }

    /// Saves the state; `behind` the run, the checkpoint is there later, and [`settle`](Self::settle) hears of it.
    fn save(&mut self, behind: bool) -> Result<(), Error> {
        // Never two at once.
        self.settle(true);
        let at = At { out: self.saver.path(), state: &self.t.state };
        self.files.iter_mut().try_for_each(|hook| hook.on_saving(&at))?;
        self.callbacks.on_saving(&at)?;
        self.t.hooks.iter_mut().try_for_each(|hook| hook.on_saving(&at))?;
        let t = &self.t;
        let mut contents = Snapshot::new(&t.engine, &t.config, &t.data.tokenizer, t.state.clone());
        if behind {
            return Ok(self.saver.begin(&mut contents)?);
        }
        let written = self.saver.save(&mut contents);
        self.published(written)
    }

    /// Hears what became of a checkpoint that is written behind the run, if that is known, or after waiting for it.
    fn settle(&mut self, wait: bool) {
        let Some(written) = self.saver.written(wait) else { return };
        if let Err(e) = written.map_err(Error::from).and_then(|written| self.published(written)) {
            self.not_saved(&e);
        }
    }

    fn not_saved(&mut self, e: &Error) {
        self.callbacks.note(&format!("not saved, the run goes on: {e}"));
    }

    fn published(&mut self, written: Written) -> Result<(), Error> {
        let saved = written.saved?;
        saved.notes.iter().for_each(|n| self.callbacks.note(n));
        self.saved = Some(written.state.step);
        let path = self.saver.path();
        // A picture is no reason to end a run.
        match plot::draw(&path.join(METRICS), &path.join(PICTURE)) {
            Ok(notes) => notes.iter().for_each(|n| self.callbacks.note(n)),
            Err(e) => self.callbacks.note(&e.to_string()),
        }
        self.tell_of(Some(&written.state), &mut |hook, at| hook.on_checkpoint(at, &saved.path));
        Ok(())
    }
}
