//! Settings of a run. In: `run.toml` or `run.yaml` and flags, both optional and hostile. Out: one checked [`Settings`]; flags win. One
//! table below makes the flags with their help, the file's keys, the defaults and the record kept in checkpoints.

mod check;
mod file;
mod recipe;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::data::{Kind, Packing};
use crate::schedule::{Decay, Schedule, WarmUp};

/// Why settings are refused: one line that names the key, and the file where it comes from one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub(crate) String);

/// What is learned from the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Every next token of running text
    Seq,
    /// The answers of chats, or what a mask says
    Sft,
    /// Pairs of a better and a worse answer, against a reference
    Dpo,
    /// Groups of answers with rewards
    Grpo,
    /// Answers that are wanted or not, against a reference
    Kto,
    /// Pairs by their odds, without a reference
    Orpo,
    /// Pairs without a reference
    Cpo,
    /// Pairs without a reference, by means over tokens with a margin
    Simpo,
}

impl Strategy {
    /// What the keys of its data are for.
    pub fn kind(self) -> Kind {
        match self {
            Strategy::Seq => Kind::Seq,
            Strategy::Sft => Kind::Sft,
            Strategy::Dpo | Strategy::Orpo | Strategy::Cpo | Strategy::Simpo => Kind::Dpo,
            Strategy::Grpo => Kind::Grpo,
            Strategy::Kto => Kind::Kto,
        }
    }

    /// Its name in the table of strategies.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Rule of the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam whose weight decay is added to the gradient
    Adam,
    /// AdamW with Nesterov's look ahead
    Nadamw,
    /// Muon on the layers' matrices, AdamW on all else
    Muon,
    /// Gradient descent with momentum
    Sgd,
}

/// Factor on Muon's direction of a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum MuonScale {
    /// √max(1, rows / columns)
    Original,
    /// 0.2 √max(rows, columns): rates as AdamW's
    #[default]
    MatchRmsAdamw,
    /// √(rows / columns)
    SpectralUnclamped,
}

/// How weights and activations are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// 32-bit floats
    F32,
    /// bfloat16, with 32-bit master weights, moments and arithmetic
    Bf16,
    /// Half precision, else as bf16, with dynamic scaling of the loss
    F16,
}

/// How an updated weight becomes one of its narrow type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Rounding {
    /// To the nearest, from a master weight of 32 bits that is kept
    Nearest,
    /// Up or down at random, so that the mean is right; no master weight is kept
    Stochastic,
}

/// Which activations the backward pass computes again instead of keeping them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// None: the most memory, the least work
    None,
    /// Those that are cheap to compute again
    Selective,
    /// All inside a layer: the least memory
    Full,
}

/// How Adam's moments are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum Moments {
    /// 32-bit floats
    #[serde(rename = "f32")]
    #[value(name = "f32")]
    F32,
    /// Codes of eight bits and a scale for each block of up to 256, those of large weights
    #[serde(rename = "8bit")]
    #[value(name = "8bit")]
    Bits8,
}

/// What is written of a run's metrics beside `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Measured {
    /// A table, metrics.csv
    Csv,
    /// Event files of TensorBoard, in the folder tensorboard
    Tensorboard,
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Updates.
    Steps(u64),
    /// Passes over the data.
    Epochs(u64),
}

macro_rules! settings {
    (
        required { $($(#[$extra:meta])* $rname:ident: $rkind:ty, $rvalue:literal, $rhelp:literal;)* }
        optional { $($(#[$oextra:meta])* $oname:ident: $okind:ty, $ovalue:literal, $ohelp:literal;)* }
        defaulted { $($name:ident: $kind:ty = $default:expr, $shown:literal, $value:literal, $help:literal;)* }
        of_process { $($(#[$pextra:meta])* $pname:ident: $pkind:ty, $pvalue:literal, $phelp:literal;)* }
    ) => {
        /// Some of the settings: what the flags give, or what a file gives.
        #[derive(Args, Clone, Debug, Default, PartialEq)]
        pub struct Partial {
            $(
                #[doc = $rhelp]
                #[arg(long, value_name = $rvalue, help = $rhelp)]
                $(#[$extra])*
                pub $rname: Option<$rkind>,
            )*
            $(
                #[doc = $ohelp]
                #[arg(long, value_name = $ovalue, help = $ohelp)]
                $(#[$oextra])*
                pub $oname: Option<$okind>,
            )*
            $(
                #[doc = $help]
                #[arg(long, value_name = $value, help = concat!($help, " [default: ", $shown, "]"))]
                pub $name: Option<$kind>,
            )*
            $(
                #[doc = $phelp]
                #[arg(long, value_name = $pvalue, help = $phelp)]
                $(#[$pextra])*
                pub $pname: Option<$pkind>,
            )*
        }

        /// All settings of a run, checked.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Settings {
            $(#[doc = $rhelp] pub $rname: $rkind,)*
            $(#[doc = $ohelp] pub $oname: Option<$okind>,)*
            $(#[doc = $help] pub $name: $kind,)*
            $(#[doc = $phelp] #[serde(skip)] pub $pname: Option<$pkind>,)*
        }

        impl Default for Settings {
            fn default() -> Settings {
                Partial::default().complete()
            }
        }

        /// Keys of the file.
        const KEYS: &[&str] =
            &[$(stringify!($rname),)* $(stringify!($oname),)* $(stringify!($name),)* $(stringify!($pname),)*];

        #[cfg(test)]
        const SHOWN: &[(&str, &str)] = &[$((stringify!($name), $shown),)*];

        impl From<&Settings> for Partial {
            /// All that `settings` say, so that a run can be continued without repeating its flags.
            fn from(settings: &Settings) -> Partial {
                let s = settings.clone();
                check::drop_unused(Partial {
                    $($rname: Some(s.$rname),)*
                    $($oname: s.$oname,)*
                    $($name: Some(s.$name),)*
                    $($pname: s.$pname,)*
                })
            }
        }

        impl Partial {
            /// Takes the keys of a parsed file; they are known to exist.
            fn from_table(mut table: toml::Table, lines: &file::Lines) -> Result<Partial, Error> {
                Ok(Partial {
                    $($rname: file::take(&mut table, stringify!($rname), lines)?,)*
                    $($oname: file::take(&mut table, stringify!($oname), lines)?,)*
                    $($name: file::take(&mut table, stringify!($name), lines)?,)*
                    $($pname: file::take(&mut table, stringify!($pname), lines)?,)*
                })
            }

            /// `self` where it says something, else `other`.
            fn or(self, other: Partial) -> Partial {
                Partial {
                    $($rname: self.$rname.or(other.$rname),)*
                    $($oname: self.$oname.or(other.$oname),)*
                    $($name: self.$name.or(other.$name),)*
                    $($pname: self.$pname.or(other.$pname),)*
                }
            }

            /// Fills the gaps with the defaults.
            fn complete(self) -> Settings {
                Settings {
                    $($rname: self.$rname.unwrap_or_default(),)*
                    $($oname: self.$oname,)*
                    $($name: self.$name.unwrap_or($default),)*
                    $($pname: self.$pname,)*
                }
            }
        }
    };
}

settings! {
    required {
        #[arg(num_args = 1..)]
        data: Vec<PathBuf>, "PATH", "What to train on: text files or folders, .bin shards with their meta.json, HDF5, records; may be repeated";
        out: PathBuf, "DIR", "Folder for checkpoints, metrics.jsonl and loss.svg";
    }
    optional {
        config: PathBuf, "FILE", "config.json of a model to train from scratch; or give --model";
        model: PathBuf, "DIR", "Model directory to start from: config.json, weights and tokenizer";
        tokenizer: PathBuf, "FILE", "tokenizer.json to encode text with; or give --vocab";
        vocab: usize, "N", "Train a byte-level BPE tokenizer of this many tokens on the data first";
        special_tokens: Vec<String>, "TOKEN", "With --vocab: a further special token, which the data's text may spell; may be repeated";
        #[arg(num_args = 1..)]
        data_weights: Vec<f64>, "WEIGHT", "In which ratio several prepared data are mixed, one each; or `weights` when they are prepared";
        #[arg(num_args = 1..)]
        eval_task: Vec<PathBuf>, "FILE", "Tasks (docs/evaluation.md) that each validation scores the model on; may be repeated";
        stride: usize, "TOKENS", "From the start of one window of the data to the next; prepared records are then cut into windows as well [default: --seq]";
        steps: u64, "N", "Length of the run in updates; or give --epochs";
        epochs: u64, "N", "Length of the run in passes over the data [default: 1, unless --steps is given]";
        warmup: u64, "STEPS", "Updates over which the learning rate rises to its peak [default: a twentieth of the run]";
        warmup_form: WarmUp, "NAME", "How the learning rate rises over the warm-up [default: first]";
        stable: u64, "STEPS", "wsd: updates at the peak rate [default: up to the last fifth of the run]";
        cycle: u64, "STEPS", "sgdr: updates of the first cosine [default: a tenth of the run]";
        cycle_mult: u64, "N", "sgdr: how many times as long as the one before a cosine is [default: 2]";
        momentum: f64, "X", "SGD and Muon: decay of the velocity [default: 0.9 for sgd, 0.95 for muon]";
        nesterov: bool, "BOOL", "SGD and Muon: the velocity looks ahead [default: false for sgd, true for muon]";
        muon_scale: MuonScale, "NAME", "Muon: factor on a matrix's direction by its sizes [default: match-rms-adamw]";
        adamw_lr: f64, "RATE", "Muon: peak learning rate of embeddings, head, norms and biases [default: --lr]";
        lora_rank: usize, "RANK", "Train a low-rank adapter (LoRA) of this rank beside the weights of --model, which stay as they are";
        lora_alpha: f64, "X", "LoRA: what the factors' product is scaled by, over the rank [default: twice the rank]";
        #[arg(num_args = 1..)]
        lora_targets: Vec<String>, "NAME", "LoRA: adapted linear layers, by the ends of their names, or one regular expression of whole names [default: all in the layers]";
        #[arg(num_args = 0..=1, default_missing_value = "true")]
        rslora: bool, "BOOL", "LoRA: scale over the root of the rank [default: false]";
        #[arg(num_args = 0..=1, default_missing_value = "true")]
        dora: bool, "BOOL", "LoRA: train the magnitudes of rows apart from their directions [default: false]";
        skip_norm: f64, "NORM", "Leave out a step whose gradient norm is above this; twenty in a row end the run";
        ema: f64, "X", "Decay of a moving average of the weights, kept beside them";
        group: Vec<String>, "PATTERN:KEY=X", "Weights whose names match (* is any text) train otherwise: rate=X times the learning rate, decay=X; both by a comma; may be repeated";
        #[arg(num_args = 1..)]
        metrics: Vec<Measured>, "NAME", "What to write of the metrics beside metrics.jsonl; may be repeated";
        freeze: Vec<String>, "PATTERN", "Weights whose names match (* is any text) stay as they are: no gradient, no moments; may be repeated";
        #[arg(num_args = 0..=1, default_missing_value = "true")]
        grad_snr: bool, "BOOL", "Adam and Muon: measure how much of the gradient is signal, grad_snr in the metrics, in decibels [default: false]";
        rounding: Rounding, "NAME", "bf16: how an updated weight is stored [default: nearest]";
        precision: Vec<String>, "NAME=f32", "With bf16 and f16: an operator, or weights whose names match (* is any text), that stay f32 (a table in the file); may be repeated";
        neftune_alpha: f64, "X", "Noise on embeddings under training (NEFTune): uniform in ±X over the root of a sequence's tokens times the hidden size";
        #[arg(num_args = 0..=1, default_missing_value = "true")]
        async_save: bool, "BOOL", "Write checkpoints from a copy of the state while the run goes on [default: false]";
        keep_every: u64, "STEPS", "Checkpoints at multiples of this many steps stay, whatever --keep says";
        set: Vec<String>, "KEY=VALUE", "An option of the strategy, such as loss_type=ipo (a table in the file); may be repeated";
        reference: PathBuf, "DIR", "Strategies with a reference policy: the model directory of it [default: the model that the run starts from]";
        old: PathBuf, "DIR", "grpo: the model directory of the policy that wrote the answers [default: none, and each ratio is 1]";
        min_lr: f64, "RATE", "Learning rate at which the schedule ends, absolute [default: a tenth of --lr]";
    }
    defaulted {
        strategy: Strategy = Strategy::Seq, "seq", "NAME", "What is learned from the data";
        batch: usize = 8, "8", "N", "Sequences in a micro-batch";
        seq: usize = 256, "256", "TOKENS", "Length of a sequence";
        packing: Packing = Packing::Joined, "joined", "NAME", "How attention treats documents that share a sequence";
        accum: usize = 1, "1", "N", "Micro-batches whose gradients make one update";
        lr: f64 = 3e-4, "0.0003", "RATE", "Peak learning rate";
        schedule: Decay = Decay::Cosine, "cosine", "NAME", "Course of the learning rate after the warm-up";
        optimizer: Optimizer = Optimizer::Adamw, "adamw", "NAME", "Rule of the update";
        weight_decay: f64 = 0.1, "0.1", "RATE", "Decoupled weight decay of matrices, relative to the learning rate";
        clip: f64 = 1.0, "1.0", "NORM", "Largest global norm of the gradient, larger ones are scaled down; 0 means no limit";
        beta1: f64 = 0.9, "0.9", "X", "AdamW: decay of the first moment";
        beta2: f64 = 0.95, "0.95", "X", "AdamW: decay of the second moment";
        eps: f64 = 1e-8, "1e-8", "X", "AdamW: what is added to the root of the second moment";
        router_aux_loss_coef: f64 = 0.0, "0", "FACTOR", "Of models with experts: factor on the loss that evens the experts' loads, whatever the model's config says";
        router_z_loss_coef: f64 = 0.0, "0", "FACTOR", "Of models with experts: factor on the mean square of the log-sum-exp of a router's logits";
        dtype: Storage = Storage::F32, "f32", "TYPE", "How weights and activations are stored";
        moments: Moments = Moments::F32, "f32", "NAME", "How Adam's moments are stored";
        recompute: Recompute = Recompute::Selective, "selective", "PRESET", "Which activations are computed again in the backward pass";
        seed: u64 = 3407, "3407", "N", "Seed of weights and of the order of the data";
        save_every: u64 = 500, "500", "STEPS", "Updates between checkpoints; 0 means at the end only";
        keep: usize = 3, "3", "N", "Newest checkpoints to keep; 0 means all";
        eval_every: u64 = 0, "0", "STEPS", "Updates between validations, one more at the end; 0 means none";
        threads: usize = 0, "0", "N", "Threads; 0 means one a core";
    }
    // A checkpoint is data, and may be a stranger's: what it says is never run.
    of_process {
        #[arg(num_args = 2, value_names = ["WHEN", "COMMAND"])]
        on: Vec<String>, "WHEN", "Run a command of the shell, a line of JSON on its standard input; WHEN is begin, step:N, every:N, epoch, eval, checkpoint, end or error (a table in the file; never kept in checkpoints); may be repeated";
    }
}

impl Partial {
    /// What a file says, and where it is silent what an older run's settings say; of alternatives the file's displaces the
    /// older.
    pub fn over(mut self, mut older: Partial) -> Partial {
        older.drop_alternatives_of(&self);
        self.set = options_over(self.set, &mut older.set);
        self.or(older)
    }

    /// Drops alternatives of what `stronger` gives.
    fn drop_alternatives_of(&mut self, stronger: &Partial) {
        if stronger.config.is_some() || stronger.model.is_some() {
            (self.config, self.model) = (None, None);
        }
        if stronger.tokenizer.is_some() || stronger.vocab.is_some() {
            (self.tokenizer, self.vocab) = (None, None);
        }
        if stronger.tokenizer.is_some() {
            self.special_tokens = None;
        }
        if stronger.steps.is_some() || stronger.epochs.is_some() {
            (self.steps, self.epochs) = (None, None);
        }
    }
}

/// Options of a strategy and those they win over, each key once.
fn options_over(stronger: Option<Vec<String>>, weaker: &mut Option<Vec<String>>) -> Option<Vec<String>> {
    let key = |text: &str| text.split('=').next().map(str::to_string);
    let mut all: Vec<String> = Vec::new();
    for text in weaker.take().into_iter().chain(stronger).flatten() {
        match all.iter_mut().find(|known| key(known) == key(&text)) {
            Some(known) => *known = text,
            None => all.push(text),
        }
    }
    (!all.is_empty()).then_some(all)
}

impl Settings {
    /// Joins what a file and the flags say, flags first, with the defaults, and checks the whole. Of `config` and
    /// `model`, `tokenizer` and `vocab`, `steps` and `epochs`, the one given by flag displaces the file's other.
    ///
    /// # Errors
    /// Settings that contradict each other, do nothing, or are beyond reason: one line with the first.
    pub fn merge(mut file: Partial, mut flags: Partial) -> Result<Settings, Error> {
        file.drop_alternatives_of(&flags);
        flags.set = options_over(flags.set, &mut file.set);
        let given = flags.or(file);
        check::refuse_unused(&given)?;
        let mut settings = given.complete();
        check::check_values(&settings)?;
        // What says the same in other words is the same run to one that resumes it.
        settings.rounding = settings.rounding.filter(|rounding| *rounding != Rounding::Nearest);
        if let Some(names) = &mut settings.precision {
            names.sort();
            names.dedup();
        }
        Ok(settings)
    }

    /// How long the run is.
    pub fn length(&self) -> Length {
        match self.steps {
            Some(steps) => Length::Steps(steps),
            None => Length::Epochs(self.epochs.unwrap_or(1)),
        }
    }

    /// The learning rate over a run of `total` updates.
    ///
    /// # Errors
    /// The warm-up is longer than the run.
    pub fn schedule(&self, total: u64) -> Result<Schedule, Error> {
        let warmup = self.warmup.unwrap_or(total / 20);
        if warmup > total {
            return Err(Error(format!("warmup: {warmup} steps exceed the run's {total}; shorten it")));
        }
        let min_lr = self.min_lr.unwrap_or(self.lr / 10.0);
        let cycle = (self.cycle.unwrap_or(total / 10).max(1), self.cycle_mult.unwrap_or(2));
        let (decay, lr, stable) = (self.schedule, self.lr, self.stable);
        let warm_up = self.warmup_form.unwrap_or_default();
        Ok(Schedule { decay, lr, min_lr, warmup, warm_up, stable, cycle, total })
    }
}
