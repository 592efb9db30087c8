//! The loss, metrics and gradients of a strategy on a batch of a file. In: a model, tensors under the keys of the data contract, a strategy,
//! frozen policies. Out: numbers, by checkpoint name. What `astrai run --strategy` prints and `astrai verify` compares.

use crate::Error;
use crate::gradients::by_checkpoint_name;
use crate::machine::Machine;
use crate::model::{Model, check_sizes};
use astrai_ir::{DType, Graph};
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Options, Value, compile};
use astrai_train::batch::{IGNORED, PackedBatch};
use astrai_train::preference::{Group, GroupBatch, LabelledBatch, Pair, PairBatch, Sample};
use astrai_train::strategies::{self, Batch, Frozen, METRIC, Sizes, Strategy};
use std::path::Path;

/// The models that a loss reads.
pub struct Policies<'a> {
    /// The trained one.
    pub policy: &'a Model,
    /// The frozen reference.
    pub reference: Option<&'a Model>,
    /// The one that wrote the answers.
    pub old: Option<&'a Model>,
}

/// What a strategy computes of a batch.
pub struct Outcome {
    /// The value to minimise.
    pub loss: f64,
    /// Metrics by name, the means over micro-batches.
    pub metrics: Vec<(String, f64)>,
    /// `grad.<checkpoint name>`, f32, where wanted.
    pub grads: Vec<(String, Value)>,
}

/// Computes a strategy's loss on the micro-batches of a step.
///
/// # Errors
/// The batch does not fit the strategy or the model; a frozen policy is missing; the device failed.
pub fn objective(
    policies: &Policies,
    strategy: &dyn Strategy,
    window: &[Batch],
    (storage, machine): (DType, &Machine),
    grads: bool,
) -> Result<Outcome, Error> {
    let mut outcome = Outcome { loss: 0.0, metrics: vec![], grads: vec![] };
    let scale = 1.0 / strategy.denominator(window);
    for batch in window {
        let all = batch.sequences();
        let sizes = sizes(policies.policy, &all)?;
        let frozen = frozen(policies, strategy, &all, (storage, machine))?;
        let inputs = strategies::inputs(strategy, (batch, window), &frozen, scale)?;
        let graph =
            strategies::graph(&policies.policy.config, strategy, &sizes, false).map_err(|e| e.to_string())?;
        let results = execute(policies.policy, &graph, &inputs, (storage, machine), grads)?;
        let share = 1.0 / window.len() as f64;
        for (name, value) in results {
            let number = || f64::from(value.to_f32().first().copied().unwrap_or(f32::NAN));
            if name == "loss" {
                outcome.loss += number();
            } else if let Some(metric) = name.strip_prefix(METRIC) {
                match outcome.metrics.iter_mut().find(|(n, _)| n == metric) {
                    Some((_, sum)) => *sum += number() * share,
                    None => outcome.metrics.push((metric.to_string(), number() * share)),
                }
            } else {
                add(&mut outcome.grads, name, value);
            }
        }
    }
    Ok(outcome)
}

/// Adds a tensor to the one of its name.
fn add(sums: &mut Vec<(String, Value)>, name: String, value: Value) {
    match sums.iter_mut().find(|(n, _)| *n == name) {
        Some((_, sum)) => {
            let both: Vec<f32> = sum.to_f32().iter().zip(value.to_f32()).map(|(a, b)| a + b).collect();
            *sum = Value::f32(&value.shape, &both);
        }
        None => sums.push((name, value)),
    }
}

fn sizes(of: &Model, all: &PackedBatch) -> Result<Sizes, Error> {
    let sizes = Sizes::of(all);
    check_sizes(&of.config, sizes.sequences as u64, sizes.span)?;
    let vocab = of.config.vocab_size as i32;
    match all.input_ids.iter().chain(&all.targets).find(|t| **t >= vocab) {
        Some(bad) => Err(format!("token {bad} is outside the vocabulary of {vocab}").into()),
        None => Ok(sizes),
    }
}

/// Log-probabilities of a batch's targets under the frozen policies that the strategy reads and that are there.
fn frozen(
    policies: &Policies,
    strategy: &dyn Strategy,
    all: &PackedBatch,
    on: (DType, &Machine),
) -> Result<Frozen, Error> {
    let [reference, old] = strategy.frozen();
    let of = |wanted: bool, model: Option<&Model>| match model {
        Some(model) if wanted => log_probabilities(model, all, on).map(Some),
        _ => Ok(None),
    };
    Ok(Frozen { reference: of(reference, policies.reference)?, old: of(old, policies.old)? })
}

/// Log-probabilities of a batch's targets under a model, `[tokens]`; 0 where there is none.
///
/// # Errors
/// The batch does not fit the model, or the device failed.
pub fn log_probabilities(of: &Model, all: &PackedBatch, on: (DType, &Machine)) -> Result<Vec<f32>, Error> {
    let inputs = strategies::token_inputs(all, &all.targets);
    let graph = strategies::scores(&of.config, &sizes(of, all)?).map_err(|e| e.to_string())?;
    let results = execute(of, &graph, &inputs, on, false)?;
    Ok(results.into_iter().next().map(|(_, v)| v.to_f32()).unwrap_or_default())
}

/// Runs a graph of a model once; with gradients, those of `loss` by checkpoint name.
fn execute(
    of: &Model,
    graph: &Graph,
    inputs: &[(&str, Value)],
    (storage, machine): (DType, &Machine),
    grads: bool,
) -> Result<Vec<(String, Value)>, Error> {
    let gradient_of = grads.then(|| "loss".to_string());
    let planned = compile(graph, machine.backend(), &Options { storage, gradient_of, ..Options::default() })?;
    planned.check_memory(&*machine.device)?;
    let mut session = of.start(planned, machine, &mut |_, _| {})?;
    let has = |name: &str| session.inputs().iter().any(|(n, _)| n == name);
    let given: Vec<_> = inputs.iter().filter(|(n, _)| has(n)).map(|(n, v)| (*n, v)).collect();
    let results = session.run(&given)?;
    Ok(by_checkpoint_name(results, session.program()))
}

/// A batch in a file: integers and floats by key, under a prefix.
pub struct BatchFile<'a> {
    /// The file.
    pub file: &'a Checkpoint,
    /// Its path, for messages.
    pub path: &'a Path,
    /// Before each key.
    pub prefix: &'a str,
}

/// A matrix of integers.
struct Matrix {
    rows: usize,
    width: usize,
    values: Vec<i64>,
}

impl Matrix {
    fn row(&self, i: usize) -> &[i64] {
        &self.values[i * self.width..(i + 1) * self.width]
    }
}

impl BatchFile<'_> {
    fn has(&self, key: &str) -> bool {
        self.file.get(&format!("{}{key}", self.prefix)).is_some()
    }

    /// A tensor as integers, its axes but the last as rows. Floats are masks: what is not 0 is 1.
    fn matrix(&self, key: &str) -> Result<Matrix, String> {
        let name = format!("{}{key}", self.prefix);
        let path = self.path.display();
        let t = self
            .file
            .get(&name)
            .ok_or_else(|| format!("{path}: no tensor `{name}`, which this strategy reads"))?;
        let (Some(&width), true) = (t.shape().last(), t.elements() > 0) else {
            return Err(format!("{path}: `{name}` is {:?}, it should be rows of tokens", t.shape()));
        };
        let values = if t.dtype().is_float() {
            let mut x = vec![0.0; t.elements()];
            t.to_f32(&mut x).map_err(|e| e.to_string())?;
            x.iter().map(|x| i64::from(*x != 0.0)).collect()
        } else {
            t.to_i64().map_err(|e| e.to_string())?
        };
        Ok(Matrix { rows: values.len() / width, width, values })
    }

    /// A matrix of the same sizes as `like`.
    fn beside(&self, key: &str, like: &Matrix) -> Result<Matrix, String> {
        let m = self.matrix(key)?;
        match (m.rows, m.width) == (like.rows, like.width) {
            true => Ok(m),
            false => Err(format!(
                "{}: `{}{key}` has {} rows of {}, its tokens have {} of {}",
                self.path.display(),
                self.prefix,
                m.rows,
                m.width,
                like.rows,
                like.width
            )),
        }
    }

    fn floats(&self, key: &str, count: usize) -> Result<Vec<f32>, String> {
        let name = format!("{}{key}", self.prefix);
        let t = self.file.get(&name).filter(|t| t.elements() == count);
        let t = t.ok_or_else(|| {
            format!("{}: `{name}` should be there with {count} numbers", self.path.display())
        })?;
        let mut x = vec![0.0; count];
        t.to_f32(&mut x).map_err(|e| e.to_string())?;
        Ok(x)
    }

    fn ids(&self, row: &[i64]) -> Result<Vec<i32>, String> {
        let id = |x: &i64| i32::try_from(*x).ok().filter(|x| *x >= 0);
        row.iter()
            .map(|x| id(x).ok_or_else(|| format!("{}: token {x} is no id", self.path.display())))
            .collect()
    }

    /// Sequences of a right-padded matrix. What follows the last learnt token is seen by no loss, so without `attention` a sequence ends there.
    fn samples(&self, ids: &str, mask: &str, attention: &str) -> Result<Vec<Sample>, String> {
        let tokens = self.matrix(ids)?;
        let mask = self.beside(mask, &tokens)?;
        let there = if self.has(attention) { Some(self.beside(attention, &tokens)?) } else { None };
        let one = |i: usize| {
            let last = |m: &Matrix| m.row(i).iter().rposition(|x| *x != 0).map_or(0, |p| p + 1);
            let n = last(there.as_ref().unwrap_or(&mask)).max(1);
            let trained = mask.row(i)[..n].iter().map(|x| *x != 0).collect();
            Ok(Sample { ids: self.ids(&tokens.row(i)[..n])?, trained })
        };
        (0..tokens.rows).map(one).collect()
    }

    /// The batch of a strategy, as `windows` equal micro-batches.
    ///
    /// # Errors
    /// A key is missing or has another shape, or the batch is no multiple of the micro-batches.
    pub fn read(&self, strategy: &str, windows: usize) -> Result<Vec<Batch>, String> {
        match strategy {
            "dpo" | "orpo" | "cpo" | "simpo" => self.pairs(windows),
            "kto" => self.labelled(windows),
            "grpo" => self.groups(windows),
            _ => self.tokens(windows),
        }
    }

    fn parts<T: Clone>(&self, all: &[T], windows: usize) -> Result<Vec<Vec<T>>, String> {
        if windows == 0 || !all.len().is_multiple_of(windows) {
            return Err(format!(
                "{}: {} rows do not make {windows} equal micro-batches",
                self.path.display(),
                all.len()
            ));
        }
        Ok(all.chunks(all.len() / windows).map(<[T]>::to_vec).collect())
    }

    /// `input_ids`, and of `target_ids`, `loss_mask` and `position_ids` what is there.
    fn tokens(&self, windows: usize) -> Result<Vec<Batch>, String> {
        let ids = self.matrix("input_ids")?;
        let beside = |key: &str| if self.has(key) { self.beside(key, &ids).map(Some) } else { Ok(None) };
        let (targets, mask) = (beside("target_ids")?, beside("loss_mask")?);
        let positions = beside("position_ids")?;
        let rows: Vec<usize> = (0..ids.rows).collect();
        let part = |rows: Vec<usize>| {
            let mut batch = PackedBatch::default();
            for i in rows {
                let tokens = self.ids(ids.row(i))?;
                let mut next = match &targets {
                    Some(t) => self.ids(t.row(i))?,
                    None => tokens[1..].iter().copied().chain([IGNORED]).collect(),
                };
                if let Some(mask) = &mask {
                    next.iter_mut()
                        .zip(mask.row(i))
                        .filter(|(_, m)| **m == 0)
                        .for_each(|(t, _)| *t = IGNORED);
                }
                // A document begins where positions do not rise.
                let starts = |p: &Matrix| (1..p.width).filter(|t| p.row(i)[*t] <= p.row(i)[*t - 1]).collect();
                let mut bounds: Vec<usize> = positions.as_ref().map_or(vec![], starts);
                bounds.push(tokens.len());
                let mut from = 0;
                for to in bounds {
                    batch.push(&tokens[from..to], &next[from..to]);
                    from = to;
                }
            }
            Ok(Batch::Tokens(batch))
        };
        self.parts(&rows, windows)?.into_iter().map(part).collect()
    }

    fn pairs(&self, windows: usize) -> Result<Vec<Batch>, String> {
        let chosen = self.samples("chosen", "chosen_mask", "chosen_attention_mask")?;
        let rejected = self.samples("rejected", "rejected_mask", "rejected_attention_mask")?;
        if chosen.len() != rejected.len() {
            return Err(format!(
                "{}: {} chosen, {} rejected",
                self.path.display(),
                chosen.len(),
                rejected.len()
            ));
        }
        let keys = ["ref_chosen_logps", "ref_rejected_logps"];
        let reference = match keys.iter().all(|k| self.has(k)) {
            true => Some([self.floats(keys[0], chosen.len())?, self.floats(keys[1], chosen.len())?]),
            false => None,
        };
        let pairs: Vec<Pair> = (0..chosen.len())
            .map(|i| Pair {
                chosen: chosen[i].clone(),
                rejected: rejected[i].clone(),
                reference: reference.as_ref().map(|[w, l]| [w[i], l[i]]),
            })
            .collect();
        let part = |pairs: Vec<Pair>| {
            let mut batch = PairBatch::default();
            pairs.iter().for_each(|p| batch.push(p));
            Batch::Pairs(batch)
        };
        Ok(self.parts(&pairs, windows)?.into_iter().map(part).collect())
    }

    fn labelled(&self, windows: usize) -> Result<Vec<Batch>, String> {
        let own = self.samples("input_ids", "mask", "attention_mask")?;
        let other = self.samples("kl_input_ids", "kl_mask", "kl_attention_mask")?;
        let labels = self.matrix("label")?.values;
        if own.len() != other.len() || own.len() != labels.len() {
            return Err(format!(
                "{}: {} answers, {} mismatched ones and {} labels",
                self.path.display(),
                own.len(),
                other.len(),
                labels.len()
            ));
        }
        let rows: Vec<usize> = (0..own.len()).collect();
        let part = |rows: Vec<usize>| {
            let mut batch = LabelledBatch::default();
            for i in rows {
                batch.sequences.push_trained(&own[i].ids, &own[i].trained);
                batch.mismatched.push_trained(&other[i].ids, &other[i].trained);
                batch.desirable.push(labels[i] != 0);
            }
            Batch::Labelled(batch)
        };
        Ok(self.parts(&rows, windows)?.into_iter().map(part).collect())
    }

    /// `prompts` `[B, P]` padded on the left by `prompt_mask`, `responses` and `masks` `[B, G, R]`, `rewards` `[B, G]`.
    fn groups(&self, windows: usize) -> Result<Vec<Batch>, String> {
        let prompts = self.matrix("prompts")?;
        let there = if self.has("prompt_mask") { Some(self.beside("prompt_mask", &prompts)?) } else { None };
        let responses = self.samples("responses", "masks", "response_attention_mask")?;
        let rewards = self.floats("rewards", responses.len())?;
        if !responses.len().is_multiple_of(prompts.rows) {
            return Err(format!(
                "{}: {} responses of {} prompts",
                self.path.display(),
                responses.len(),
                prompts.rows
            ));
        }
        let size = responses.len() / prompts.rows;
        let group = |i: usize| {
            let first = there.as_ref().map_or(0, |m| m.row(i).iter().take_while(|x| **x == 0).count());
            let of = i * size..(i + 1) * size;
            let (responses, rewards) = (responses[of.clone()].to_vec(), rewards[of].to_vec());
            let prompt = self.ids(&prompts.row(i)[first..])?;
            Ok(Group { prompt, responses, rewards, ..Group::default() })
        };
        let groups = (0..prompts.rows).map(group).collect::<Result<Vec<_>, String>>()?;
        let part = |groups: Vec<Group>| {
            let mut batch = GroupBatch::default();
            groups.iter().try_for_each(|g| batch.push(g)).map_err(|e| e.to_string())?;
            Ok(Batch::Groups(batch))
        };
        self.parts(&groups, windows)?.into_iter().map(part).collect()
    }
}
