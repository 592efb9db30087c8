//! The frozen policies of a run: which are read, from where, and their log-probabilities, computed once before the first step.

use super::{Begin, start};
use crate::failure::{Failure, bail};
use crate::watch::Screen;
use astrai_engine::machine::Machine;
use astrai_engine::model::{Model, check_sizes};
use astrai_train::dataset::Dataset;
use astrai_train::engine::Recipe;
use astrai_train::frozen::{POLICIES, Scorer, Scores, fingerprint};
use astrai_train::settings::Settings;
use astrai_train::trainer::Callbacks;
use std::path::{Path, PathBuf};

/// The policy that wrote the answers, in [`POLICIES`].
const OLD: usize = 1;

fn given(settings: &Settings, policy: usize) -> Option<&PathBuf> {
    [&settings.reference, &settings.old][policy].as_ref()
}

/// Which policies are to be scored: those that the objective reads and the data do not have.
fn missing(recipe: &Recipe, there: [bool; 2]) -> impl Iterator<Item = usize> {
    let reads = recipe.objective.as_ref().map_or([false; 2], |o| o.frozen());
    (0..POLICIES.len()).filter(move |policy| reads[*policy] && !there[*policy])
}

/// Refuses a policy whose log-probabilities the data have, and one that is nowhere.
pub(super) fn check(settings: &Settings, recipe: &Recipe, there: [bool; 2]) -> Result<(), Failure> {
    for (policy, name) in POLICIES.iter().enumerate() {
        if there[policy] && given(settings, policy).is_some() {
            let keys = settings.strategy.kind().frozen()[policy].join(" and ");
            bail!("{name}: the data have {keys} already; remove the flag, or these keys");
        }
    }
    if missing(recipe, there).any(|policy| policy == OLD) && settings.old.is_none() {
        bail!("set: with old_model, give --old DIR, or `old_logps` in the data");
    }
    Ok(())
}

/// A policy, where its log-probabilities come from, and the bytes that scoring takes, unless they are in the data.
pub(super) type Source = (&'static str, String, Option<u64>);

/// For `--dry-run`: each policy that the objective reads, where it comes from, and the memory that scoring takes.
pub(super) fn shown(begin: &Begin, machine: &Machine) -> Result<Vec<Source>, Failure> {
    let (settings, recipe, there) = (&begin.settings, &begin.recipe, begin.sources.frozen);
    let reads = recipe.objective.as_ref().map_or([false; 2], |o| o.frozen());
    let mut rows = Vec::new();
    for policy in (0..POLICIES.len()).filter(|p| reads[*p]) {
        let row = match given(settings, policy) {
            _ if there[policy] => ("the data".to_string(), None),
            Some(path) => {
                let model = Model::open(path, false)?;
                (path.display().to_string(), Some(Scorer::memory(&model.config, recipe, machine.backend())?))
            }
            None => {
                let need = Scorer::memory(&begin.config, recipe, machine.backend())?;
                ("the model that the run starts from".to_string(), Some(need))
            }
        };
        rows.push((POLICIES[policy], row.0, row.1));
    }
    Ok(rows)
}

/// Gives the records the log-probabilities that they lack, from the run's folder or computed there. `starts` is the model that the run starts
/// from, where it begins now: one that goes on from a checkpoint is known by it to have the same.
pub(super) fn freeze(
    data: &mut Dataset,
    (settings, recipe, there): (&Settings, &Recipe, [bool; 2]),
    (starts, vocabulary, machine): (Option<&Model>, usize, &Machine),
    run: &Path,
    screen: &mut Screen,
) -> Result<(), Failure> {
    for policy in missing(recipe, there) {
        let find = |(set, (records, id))| Scores::find(run, (set, policy), records, id);
        let mut found = data
            .scored
            .iter()
            .enumerate()
            .map(|(i, (r, id))| find((i, (r, id))))
            .collect::<Result<Vec<_>, _>>()?;
        let complete = found.iter().all(Scores::complete);
        if starts.is_some() || !complete {
            let opened;
            let model = match (given(settings, policy), starts) {
                (Some(path), _) => {
                    opened = Model::open(path, false)?;
                    &opened
                }
                (None, Some(model)) => model,
                (None, None) => {
                    let (_, _, model) = start(settings, None)?;
                    opened = model.ok_or("no model to start from")?;
                    &opened
                }
            };
            check_sizes(&model.config, recipe.tokens / recipe.span, recipe.span)?;
            if model.config.vocab_size != vocabulary {
                let (name, other) = (POLICIES[policy], model.config.vocab_size);
                bail!(
                    "{name}: its vocabulary has {other} tokens, that of the model {vocabulary}; take one with the same tokenizer"
                );
            }
            let id = fingerprint(&model.config, model.source(), recipe);
            found.iter_mut().try_for_each(|scores| scores.by(&id))?;
            if !complete {
                let program = Scorer::plan(&model.config, recipe, machine.backend())?;
                let load = &mut |done, all| screen.progress("taking the frozen policy's weights", done, all);
                let mut scorer = Scorer::open(program, model.source(), &machine.device, load)?;
                for scores in &mut found {
                    let told = &mut |done, all| screen.progress("scoring by the frozen policy", done, all);
                    scores.compute(&mut scorer, settings.batch as u64, told)?;
                }
            }
        }
        for scores in found {
            data.fingerprint.push_str(&format!(" {} {}", POLICIES[policy], scores.attach()?));
        }
    }
    Ok(())
}
