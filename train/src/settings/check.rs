//! In: settings as given, then completed. Out: nothing, or one line with the first that contradicts another, does nothing
//! or is beyond reason.

use std::path::Path;

use super::{Error, Optimizer, Partial, Settings};
use crate::schedule::Decay;

/// Most tokens of one update; beyond it, a size is a slip of the keyboard.
const TOKENS: usize = 1 << 36;

fn refuse<T>(line: impl Into<String>) -> Result<T, Error> {
    Err(Error(line.into()))
}

/// Refuses what was given and would do nothing.
pub(super) fn refuse_unused(given: &Partial) -> Result<(), Error> {
    match given.optimizer.unwrap_or(Optimizer::Adamw) {
        Optimizer::Adamw if given.momentum.is_some() => {
            return refuse("momentum: adamw has none; remove it, or choose optimizer sgd");
        }
        Optimizer::Sgd => {
            let adam = [("beta1", given.beta1), ("beta2", given.beta2), ("eps", given.eps)];
            if let Some((key, _)) = adam.iter().find(|(_, value)| value.is_some()) {
                return refuse(format!("{key}: sgd has none; remove it, or choose optimizer adamw"));
            }
        }
        Optimizer::Adamw => {}
    }
    if given.schedule == Some(Decay::Constant) && given.min_lr.is_some() {
        return refuse(
            "min_lr: schedule constant has no end rate; remove it, or choose cosine, linear or wsd",
        );
    }
    Ok(())
}

/// Drops what [`refuse_unused`] would refuse.
pub(super) fn drop_unused(mut given: Partial) -> Partial {
    match given.optimizer.unwrap_or(Optimizer::Adamw) {
        Optimizer::Adamw => given.momentum = None,
        Optimizer::Sgd => (given.beta1, given.beta2, given.eps) = (None, None, None),
    }
    if given.schedule == Some(Decay::Constant) {
        given.min_lr = None;
    }
    given
}

/// Refuses settings that no run can have.
pub(super) fn check_values(s: &Settings) -> Result<(), Error> {
    choices(s)?;
    sizes(s)?;
    rates(s)
}

fn choices(s: &Settings) -> Result<(), Error> {
    match (&s.config, &s.model) {
        (None, None) => {
            return refuse("nothing to train: give a config.json with --config, or a model with --model");
        }
        (Some(_), Some(_)) => return refuse("config and model are both given: choose one"),
        _ => {}
    }
    if s.tokenizer.is_some() && s.vocab.is_some() {
        return refuse("tokenizer and vocab are both given: choose one");
    }
    if s.special_tokens.is_some() && s.vocab.is_none() {
        return refuse("special_tokens: no tokenizer is trained; remove it, or give vocab");
    }
    if s.steps.is_some() && s.epochs.is_some() {
        return refuse("steps and epochs are both given: choose one");
    }
    if s.data.is_empty() {
        return refuse("no data: give files or folders with --data, or `data` in the file");
    }
    if s.out.as_os_str().is_empty() {
        return refuse("no output folder: give --out DIR, or `out` in the file");
    }
    let paths = [&s.config, &s.model, &s.tokenizer].into_iter().flatten().chain([&s.out]).chain(&s.data);
    for path in paths {
        if path.as_os_str().is_empty() {
            return refuse("a path is empty: give a file or a folder");
        }
        recordable(path)?;
    }
    Ok(())
}

/// Checkpoints keep the settings as JSON, which has no place for other names.
fn recordable(path: &Path) -> Result<(), Error> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => refuse(format!("{}: the name is not UTF-8; rename it", path.display())),
    }
}

fn sizes(s: &Settings) -> Result<(), Error> {
    let within = |key: &str, value: u64, least: u64, most: u64| {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        refuse(format!("{key}: {value} is outside {least} to {most}"))
    };
    within("batch", s.batch as u64, 1, 1 << 20)?;
    within("seq", s.seq as u64, 1, 1 << 24)?;
    within("stride", s.stride.unwrap_or(s.seq) as u64, 1, 1 << 24)?;
    within("accum", s.accum as u64, 1, 1 << 20)?;
    within("threads", s.threads as u64, 0, 1024)?;
    for (key, value) in [("steps", s.steps), ("epochs", s.epochs)] {
        value.map_or(Ok(()), |value| within(key, value, 1, 1_000_000_000_000))?;
    }
    if let Some(vocab) = s.vocab {
        within("vocab", vocab as u64, 256, 1 << 24)?;
    }
    let tokens = s.batch.checked_mul(s.seq).and_then(|n| n.checked_mul(s.accum));
    if tokens.is_none_or(|n| n > TOKENS) {
        let (batch, seq, accum) = (s.batch, s.seq, s.accum);
        return refuse(format!(
            "batch {batch} × seq {seq} × accum {accum}: more than {TOKENS} tokens an update"
        ));
    }
    match (s.warmup, s.steps) {
        (Some(warmup), Some(steps)) if warmup > steps => {
            refuse(format!("warmup: {warmup} steps exceed the run's {steps}; shorten it"))
        }
        _ => Ok(()),
    }
}

fn rates(s: &Settings) -> Result<(), Error> {
    let hold = |key: &str, value: f64, fits: bool, what: &str| {
        if value.is_finite() && fits { Ok(()) } else { refuse(format!("{key}: {value} is not {what}")) }
    };
    hold("lr", s.lr, s.lr > 0.0 && s.lr <= 1e3, "a rate above 0, for example 3e-4")?;
    if let Some(min_lr) = s.min_lr {
        hold("min_lr", min_lr, (0.0..=s.lr).contains(&min_lr), "between 0 and lr (it is absolute)")?;
    }
    let decay = s.weight_decay;
    hold("weight_decay", decay, (0.0..=100.0).contains(&decay), "between 0 and 100")?;
    hold("clip", s.clip, s.clip >= 0.0, "a norm: above 0, or 0 for no limit")?;
    for (key, value) in [("beta1", s.beta1), ("beta2", s.beta2), ("momentum", s.momentum)] {
        hold(key, value, (0.0..1.0).contains(&value), "at least 0 and below 1")?;
    }
    for (key, value) in
        [("router_aux_loss_coef", s.router_aux_loss_coef), ("router_z_loss_coef", s.router_z_loss_coef)]
    {
        hold(key, value, (0.0..=1e3).contains(&value), "a factor of at least 0, for example 0.001")?;
    }
    hold("eps", s.eps, s.eps > 0.0 && s.eps < 1.0, "above 0 and below 1")
}
