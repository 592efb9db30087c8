//! Weights rounded for the inputs that texts give them. In: a model, sequences of tokens, the tensors that are rounded. Out: their codes and
//! scales. Layers are rounded one after another, each for what the layers before it, rounded already, make of the texts. The machine computes a
//! layer twice: with its own weights, for the Gram matrices of their inputs, and with the rounded ones, for what the next layer reads.

use crate::batch::RaggedBatch;
use crate::machine::Machine;
use crate::model::{Model, check_sizes};
use crate::{Error, Hear, Note};
use astrai_builders::{Logits, Program, build};
use astrai_ir::Narrow;
use astrai_passes::{Observed, carried, gram, observe};
use astrai_runtime::weights::{Factor, Quantisation, quantise};
use astrai_runtime::{Options, Session, Source, Value, WeightSource, compile};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Tokens of a run, unless one sequence has more.
const TOKENS: usize = 2048;

/// Codes and scales by checkpoint tensor.
pub type Codes = BTreeMap<String, Quantisation>;

/// A model's weights, some of them in place of its own.
struct Instead<'a> {
    own: &'a dyn WeightSource,
    instead: HashMap<String, Value>,
}

impl WeightSource for Instead<'_> {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        self.instead.tensor(name).or_else(|| self.own.tensor(name))
    }

    fn done(&self, name: &str) {
        self.own.done(name);
    }

    fn loaded(&self) {
        self.own.loaded();
    }
}

/// Rounds these tensors of a model, matrices of linear layers whose rows such groups divide.
///
/// # Errors
/// A sequence is longer than the model takes, there is none, or numbers overflow; the machine failed.
pub fn calibrate(
    model: &Model,
    (narrow, names): (Narrow, &BTreeSet<String>),
    sequences: &[Vec<i64>],
    machine: &Machine,
    hear: Hear,
) -> Result<Codes, Error> {
    let config = &model.config;
    let longest = sequences.iter().map(Vec::len).max().ok_or("there are no tokens to calibrate with")?;
    check_sizes(config, 1, longest as u64)?;
    let each = (TOKENS / longest).max(1);
    let refs: Vec<&[i64]> = sequences.iter().map(Vec::as_slice).collect();
    let batches = refs.chunks(each).map(|some| RaggedBatch::new(some, config.vocab_size));
    let batches = batches.collect::<Result<Vec<_>, _>>()?;
    let program = Program { logits: Logits::All, ..Program::full(each as u64, longest as u64) };
    let graph = build(config, &program)?;
    let mut hidden: Vec<Option<Value>> = vec![None; batches.len()];
    let (mut codes, layers) = (Codes::new(), config.layers.len() as u32);
    for layer in 0..layers {
        hear(Note::Progress { what: "calibrating", done: layer.into(), total: layers.into() });
        let observed = observe(&graph, layer)?;
        let run = |source: &dyn WeightSource, each: &mut dyn FnMut(usize, Vec<(String, Value)>)| {
            let planned = compile(&observed.graph, machine.backend(), &Options::default())?;
            let mut session = Session::new(Arc::new(planned), source, &machine.device, &mut |_, _| {})?;
            let before = layer.checked_sub(1).map(carried);
            for (i, batch) in batches.iter().enumerate() {
                let mut inputs = batch.inputs(session.inputs());
                inputs.extend(before.as_deref().zip(hidden[i].as_ref()));
                each(i, session.run(&inputs)?);
            }
            Ok::<_, astrai_runtime::Error>(())
        };
        let mut grams: Vec<Vec<f64>> = vec![vec![]; observed.tensors.len()];
        run(model.source(), &mut |_, results| add_grams(&mut grams, &results))?;
        let instead = round(model, &observed, grams, (narrow, names), &mut codes)?;
        let mut next = vec![None; batches.len()];
        run(&Instead { own: model.source(), instead }, &mut |i, results| {
            next[i] = results.into_iter().find(|(name, _)| *name == carried(layer)).map(|(_, v)| v);
        })?;
        hidden = next;
    }
    Ok(codes)
}

/// Adds those of a run.
fn add_grams(grams: &mut [Vec<f64>], results: &[(String, Value)]) {
    for (i, sums) in grams.iter_mut().enumerate() {
        let Some((_, more)) = results.iter().find(|(name, _)| *name == gram(i)) else { continue };
        sums.resize(more.bytes.len() / 4, 0.0);
        let more = more.bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
        sums.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
    }
}

/// Rounds the tensors of a layer that are named; gives the numbers that stand for them now.
fn round(
    model: &Model,
    observed: &Observed,
    grams: Vec<Vec<f64>>,
    (narrow, names): (Narrow, &BTreeSet<String>),
    codes: &mut Codes,
) -> Result<HashMap<String, Value>, Error> {
    let mut instead = HashMap::new();
    let each = observed.tensors.iter().zip(&grams).flat_map(|(tensors, sums)| {
        let matrix = (sums.len() / tensors.len().max(1)).max(1);
        tensors.iter().zip(sums.chunks(matrix))
    });
    for (tensors, sums) in each {
        let wanted: Vec<&String> = tensors.iter().filter(|name| names.contains(*name)).collect();
        let Some(first) = wanted.first() else { continue };
        let factor = Factor::of(sums, sums.len().isqrt()).map_err(|e| format!("`{first}` {e}"))?;
        for name in wanted {
            let missing = || format!("the weights have no tensor `{name}`");
            let Source { dtype, shape, bytes } = model.source().tensor(name).ok_or_else(missing)?;
            let k = shape.get(1).copied().unwrap_or(0);
            let group = narrow.group_of(k).ok_or_else(|| format!("rows of `{name}` have no such groups"))?;
            let made = match &factor {
                Some(factor) => {
                    let numbers = Value { dtype, shape: shape.clone(), bytes: bytes.into_owned() }.to_f32();
                    let (made, wide) = factor.quantise(&numbers, narrow, group);
                    instead.insert(name.clone(), Value::f32(&shape, &wide));
                    made
                }
                // Inputs that are always zero ask for nothing.
                None => quantise(&bytes, dtype, narrow, group),
            };
            codes.insert(name.clone(), made);
            model.source().done(name);
        }
    }
    Ok(instead)
}
