//! In: settings as given, then completed. Out: nothing, or one line with the first that contradicts another, does nothing
//! or is beyond reason.

use std::path::Path;

use super::{Error, Optimizer, Partial, Settings, Storage, Strategy};
use crate::hooks::Commands;
use crate::schedule::Decay;

/// Most tokens of one update; beyond it, a size is a slip of the keyboard.
const TOKENS: usize = 1 << 36;

fn refuse<T>(line: impl Into<String>) -> Result<T, Error> {
    Err(Error(line.into()))
}

/// Refuses what was given and would do nothing.
pub(super) fn refuse_unused(given: &Partial) -> Result<(), Error> {
    let optimizer = given.optimizer.unwrap_or(Optimizer::Adamw);
    let name = format!("{optimizer:?}").to_lowercase();
    let (sgd, muon) = (optimizer == Optimizer::Sgd, optimizer == Optimizer::Muon);
    for (key, is_given, has, other) in [
        ("momentum", given.momentum.is_some(), sgd || muon, "sgd or muon"),
        ("nesterov", given.nesterov.is_some(), sgd || muon, "sgd or muon"),
        ("muon_scale", given.muon_scale.is_some(), muon, "muon"),
        ("adamw_lr", given.adamw_lr.is_some(), muon, "muon"),
        ("beta1", given.beta1.is_some(), !sgd, "adamw"),
        ("beta2", given.beta2.is_some(), !sgd, "adamw"),
        ("eps", given.eps.is_some(), !sgd, "adamw"),
        ("moments", given.moments.is_some(), !sgd, "adamw"),
        ("grad_snr", given.grad_snr.is_some(), !sgd, "adamw"),
    ] {
        if is_given && !has {
            return refuse(format!("{key}: {name} has none; remove it, or choose optimizer {other}"));
        }
    }
    for (key, is_given) in [
        ("lora_alpha", given.lora_alpha.is_some()),
        ("lora_targets", given.lora_targets.is_some()),
        ("rslora", given.rslora.is_some()),
        ("dora", given.dora.is_some()),
    ] {
        if is_given && given.lora_rank.is_none() {
            return refuse(format!("{key}: no adapter is trained; remove it, or give lora_rank"));
        }
    }
    let strategy = given.strategy.unwrap_or(Strategy::Seq);
    let (cuts, groups) = (matches!(strategy, Strategy::Seq | Strategy::Sft), strategy == Strategy::Grpo);
    for (key, is_given, has, why) in [
        ("stride", given.stride.is_some(), cuts, "its records are never cut into windows"),
        ("packing", given.packing.is_some(), cuts, "each of its answers is a sequence of its own"),
        ("old", given.old.is_some(), groups, "only grpo reads the policy that wrote the answers"),
    ] {
        if is_given && !has {
            return refuse(format!("{key}: strategy {} has none, {why}; remove it", strategy.name()));
        }
    }
    let decay = given.schedule.unwrap_or(Decay::Cosine);
    for (key, is_given, has, other) in [
        ("stable", given.stable.is_some(), decay.is_wsd(), "wsd"),
        ("cycle", given.cycle.is_some(), decay == Decay::Sgdr, "sgdr"),
        ("cycle_mult", given.cycle_mult.is_some(), decay == Decay::Sgdr, "sgdr"),
    ] {
        if is_given && !has {
            return refuse(format!("{key}: only schedule {other} has it; remove it, or choose that"));
        }
    }
    if !decay.has_floor() && given.min_lr.is_some() {
        let name = if decay == Decay::Constant { "constant" } else { "inverse-sqrt" };
        return refuse(format!(
            "min_lr: schedule {name} has no end rate; remove it, or choose cosine, linear or wsd"
        ));
    }
    Ok(())
}

/// Drops what [`refuse_unused`] would refuse.
pub(super) fn drop_unused(mut given: Partial) -> Partial {
    match given.optimizer.unwrap_or(Optimizer::Adamw) {
        Optimizer::Sgd => {
            (given.beta1, given.beta2, given.eps, given.moments, given.grad_snr) =
                (None, None, None, None, None);
        }
        Optimizer::Muon => {}
        _ => given.momentum = None,
    }
    if given.schedule.is_some_and(|decay| !decay.has_floor()) {
        given.min_lr = None;
    }
    if !matches!(given.strategy, None | Some(Strategy::Seq | Strategy::Sft)) {
        given.packing = None;
    }
    given
}

/// Refuses settings that no run can have.
pub(super) fn check_values(s: &Settings) -> Result<(), Error> {
    for text in s.group.iter().flatten() {
        super::recipe::group(text).map_err(Error)?;
    }
    for text in s.precision.iter().flatten() {
        super::recipe::stays_wide(text).map_err(Error)?;
    }
    if s.precision.is_some() && s.dtype == Storage::F32 {
        return refuse("precision: with dtype f32 all is f32; remove it, or choose bf16 or f16");
    }
    if s.rounding.is_some() && s.dtype != Storage::Bf16 {
        return refuse("rounding: only weights of bf16 are rounded so; remove it, or choose dtype bf16");
    }
    if s.rounding.is_some() && s.lora_rank.is_some() {
        return refuse("rounding: an adapter is f32 in its files; remove it, or lora_rank");
    }
    Commands::new(s.on.as_deref().unwrap_or_default()).map_err(Error)?;
    let objective = s.objective([true; 2])?;
    if s.eval_task.is_some() && objective.is_some() {
        return refuse(
            "eval_task: this strategy's program scores records, not texts; evaluate a checkpoint with `astrai eval`",
        );
    }
    let reads = objective.map_or([false; 2], |objective| objective.frozen());
    for (key, given, read) in [("reference", &s.reference, reads[0]), ("old", &s.old, reads[1])] {
        if given.is_some() && !read {
            return refuse(format!(
                "{key}: strategy {} reads none with these options; remove it",
                s.strategy.name()
            ));
        }
    }
    if s.ema.is_some_and(|x| !(0.0..1.0).contains(&x)) {
        return refuse("ema: it is a decay in [0, 1)");
    }
    if s.adamw_lr.is_some_and(|x| !x.is_finite() || x <= 0.0) || s.cycle == Some(0) || s.cycle_mult == Some(0)
    {
        return refuse("adamw_lr, cycle and cycle_mult are above 0");
    }
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
    if s.lora_rank.is_some() && s.model.is_none() {
        return refuse("lora_rank: an adapter belongs to a model; give it with --model");
    }
    if s.lora_rank.is_some() && s.freeze.is_some() {
        return refuse("freeze: beside an adapter all weights of the model are frozen; remove it");
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
    if s.eval_task.is_some() && s.eval_every == 0 {
        return refuse("eval_task: there are no validations; remove it, or give eval_every");
    }
    if s.keep_every.is_some() && s.keep == 0 {
        return refuse("keep_every: with keep 0 all checkpoints stay; remove it");
    }
    if s.data.is_empty() {
        return refuse("no data: give files or folders with --data, or `data` in the file");
    }
    if s.out.as_os_str().is_empty() {
        return refuse("no output folder: give --out DIR, or `out` in the file");
    }
    let paths = [&s.config, &s.model, &s.tokenizer, &s.reference, &s.old]
        .into_iter()
        .flatten()
        .chain([&s.out])
        .chain(&s.data);
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
    within("lora_rank", s.lora_rank.unwrap_or(1) as u64, 1, 1 << 16)?;
    for (key, value) in [("steps", s.steps), ("epochs", s.epochs), ("keep_every", s.keep_every)] {
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
    let skip = s.skip_norm.unwrap_or(1.0);
    hold("skip_norm", skip, skip > 0.0, "a norm above 0")?;
    hold("clip", s.clip, s.clip >= 0.0, "a norm: above 0, or 0 for no limit")?;
    let momentum = s.momentum.unwrap_or(0.0);
    for (key, value) in [("beta1", s.beta1), ("beta2", s.beta2), ("momentum", momentum)] {
        hold(key, value, (0.0..1.0).contains(&value), "at least 0 and below 1")?;
    }
    for (key, value) in
        [("router_aux_loss_coef", s.router_aux_loss_coef), ("router_z_loss_coef", s.router_z_loss_coef)]
    {
        hold(key, value, (0.0..=1e3).contains(&value), "a factor of at least 0, for example 0.001")?;
    }
    let noise = s.neftune_alpha.unwrap_or(1.0);
    hold("neftune_alpha", noise, noise > 0.0 && noise <= 1e3, "a width above 0, for example 5")?;
    let alpha = s.lora_alpha.unwrap_or(1.0);
    hold("lora_alpha", alpha, alpha > 0.0 && alpha <= 1e6, "a factor above 0, for example 32")?;
    hold("eps", s.eps, s.eps > 0.0 && s.eps < 1.0, "above 0 and below 1")
}
