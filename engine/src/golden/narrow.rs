//! Narrow storage held to a reference. In: a model's folder with a `golden.json` that has `weights` and `kv`, and `golden.safetensors`:
//! `input_ids`, `<kind>.logits` and `<kind>.dequantised.<tensor>` of each kind of rounding. Out: a row for the logits and one for the
//! numbers of each kind; for each kind of keys and values a row of what pages of these codes cost, within the bound of that kind.

use super::{Row, floats, largest};
use crate::batch::{RaggedBatch, Sequences};
use crate::machine::Machine;
use crate::model::{Model, check_sizes, plan_within};
use crate::{Error, Hear, Note};
use astrai_builders::{Cache, Logits, Program};
use astrai_ir::ops::Dequant;
use astrai_ir::{Code, DType, Graph, Narrow, Precision, Sizes, Tensor, eval};
use astrai_passes::Fidelity;
use astrai_runtime::WeightSource;
use astrai_runtime::weights::Checkpoint;
use astrai_serve::cache::KvCache;
use astrai_serve::pages::Page;
use astrai_serve::scheduler::batch::StepBatch;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

/// Kinds of weights by name: scales in f32, of integers of eight bits one a row.
const KINDS: [(&str, Code, usize, bool); 3] = [
    ("int8", Code::Int8, 0, false),
    ("int4_symmetric", Code::Int4, 32, false),
    ("int4_asymmetric", Code::Int4, 32, true),
];

/// Entries of a tensor that may be off by a step: another order of float operations moves one that lies between two.
const MOVED: f64 = 1e-3;

/// Checks a folder; no rows of one of another kind.
///
/// # Errors
/// The golden file is not of this model, or the device failed.
pub fn rows(folder: &Path, machine: &Machine, hear: Hear) -> Result<Vec<Row>, Error> {
    let list = folder.join("golden.json");
    let text = if list.is_file() {
        astrai_files::read_text(&list, 1 << 20).map_err(|e| e.to_string())?
    } else {
        return Ok(vec![]);
    };
    let Ok(json) = serde_json::from_str::<serde_json::Value>(&text) else { return Ok(vec![]) };
    let Some(kinds) = json["weights"].as_object() else { return Ok(vec![]) };
    let path = folder.join("golden.safetensors");
    let file = Checkpoint::open(&path)?;
    let mut rows = Vec::new();
    for kind in kinds.keys() {
        let Some((_, code, group, offsets)) = KINDS.into_iter().find(|k| k.0 == kind) else {
            rows.push(Row::without(kind, "missing", "no such rounding is known here"));
            continue;
        };
        let scales = DType::F32;
        let narrow = Narrow { code, group, scales, offsets, head: None, activations: Some(false) };
        let model = Model::open(folder, false)?.quantised(Some(narrow));
        rows.push(numbers(&model, narrow, kind, &file, &path)?);
        rows.push(logits(&model, machine, &file, &path, &format!("{kind}.logits"), hear)?);
    }
    if let Some(kinds) = json["kv"].as_object() {
        rows.extend(pages(folder, machine, (&file, &path), kinds, hear)?);
    }
    Ok(rows)
}

/// What pages of codes cost: logits over them, in two steps, beside those over pages of numbers. A scale belongs to a token and a
/// head, whatever the reference's does, so that the tightest bound of a code holds for all its kinds.
fn pages(
    folder: &Path,
    machine: &Machine,
    (file, path): (&Checkpoint, &Path),
    kinds: &Map<String, Value>,
    hear: Hear,
) -> Result<Vec<Row>, Error> {
    let sequences = Sequences::read(file, path)?;
    let mut over = |code| paged(&Model::open(folder, false)?.with_pages(code), machine, &sequences, hear);
    let (plain, mut made, mut rows) = (over(None)?, HashMap::new(), Vec::new());
    for (kind, about) in kinds {
        let name = format!("kv.{kind}");
        let code = match kind.split('_').next() {
            Some("int8") => Code::Int8,
            Some("e4m3") => Code::Fp8,
            _ => {
                rows.push(Row::without(name, "missing", "no such codes are known here"));
                continue;
            }
        };
        let Some(bound) = about["bound"].as_f64() else {
            rows.push(Row::without(name, "no tolerance", "`golden.json` has no `bound` of it"));
            continue;
        };
        if let Entry::Vacant(none) = made.entry(code) {
            none.insert(over(Some(code))?);
        }
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let off = made[&code].iter().zip(&plain).map(|(a, b)| f64::from(*a) - f64::from(*b));
        let error = norm(&mut { off }) / norm(&mut plain.iter().map(|x| f64::from(*x)));
        let note = format!("by norm; pages of {} with a scale for each token and head", code.name());
        rows.push(Row::compared(name, error, bound, &note));
    }
    Ok(rows)
}

/// Logits of all tokens over pages: of the first half of each sequence, then of the rest.
fn paged(model: &Model, machine: &Machine, sequences: &Sequences, hear: Hear) -> Result<Vec<f32>, Error> {
    let (config, [batch, seq]) = (&model.config, [sequences.batch, sequences.seq]);
    check_sizes(config, batch as u64, seq as u64)?;
    let table = seq.div_ceil(Cache::PAGE);
    let cache = Cache { page: Cache::PAGE, pages: table * batch, table, windows: None };
    let whole = Program::paged((batch * seq) as u64, batch as u64, cache);
    let program = Program { logits: Logits::All, ..whole };
    let planned = plan_within(config, &program, DType::F32, machine, Fidelity::Exact)?;
    let kv = KvCache::new(config, cache, DType::F32, &machine.device)?;
    let mut session = model.start_over(planned, kv.buffers(), &mut |done, total| {
        hear(Note::Progress { what: "loading weights", done, total });
    })?;
    let mut step = StepBatch::of_program(session.inputs(), cache.page, cache.table);
    let mut logits = vec![0.0; batch * seq * config.vocab_size];
    let half = seq.div_ceil(2);
    for (from, to) in [(0, half), (half, seq)].into_iter().filter(|(from, to)| from < to) {
        step.clear();
        for (s, ids) in sequences.rows().iter().enumerate() {
            let ids: Vec<u32> = ids[from..to].iter().map(|id| *id as u32).collect();
            let pages: Vec<Page> = (0..to.div_ceil(Cache::PAGE)).map(|i| (i * batch + s) as Page).collect();
            step.push(&ids, from, &pages, [config.vocab_size, cache.pages])?;
        }
        let results = session.run(&step.inputs(session.inputs()))?;
        let got = results.iter().find(|(n, _)| n == "logits").map(|(_, v)| v.to_f32()).unwrap_or_default();
        let width = (to - from) * config.vocab_size;
        for (s, rows) in got.chunks(width.max(1)).enumerate() {
            let at = (s * seq + from) * config.vocab_size;
            logits[at..at + width].copy_from_slice(rows);
        }
    }
    Ok(logits)
}

/// Logits of the file's `input_ids`, held to one of its tensors.
pub(super) fn logits(
    model: &Model,
    machine: &Machine,
    file: &Checkpoint,
    path: &Path,
    name: &str,
    hear: Hear,
) -> Result<Row, Error> {
    let sequences = Sequences::read(file, path)?;
    let (batch, seq) = (sequences.batch as u64, sequences.seq as u64);
    check_sizes(&model.config, batch, seq)?;
    let program = Program::full(batch, seq);
    let planned = plan_within(&model.config, &program, DType::F32, machine, Fidelity::Exact)?;
    let mut session = model.start(planned, machine, &mut |done, total| {
        hear(Note::Progress { what: "loading weights", done, total });
    })?;
    let batch = RaggedBatch::new(&sequences.rows(), model.config.vocab_size)?;
    let results = session.run(&batch.inputs(session.inputs()))?;
    let got = results.iter().find(|(n, _)| n == "logits").map(|(_, v)| v.to_f32()).unwrap_or_default();
    let want = floats(file, path, name, got.len())?;
    let off = got.iter().zip(&want).map(|(a, b)| f64::from(*a) - f64::from(*b));
    let error = largest(off) / largest(want.iter().map(|x| f64::from(*x)));
    Ok(Row::compared(name, error, 1e-4, "of the largest magnitude"))
}

/// How many entries of the tensors that the file has are not those of the reference.
fn numbers(model: &Model, narrow: Narrow, kind: &str, file: &Checkpoint, path: &Path) -> Result<Row, Error> {
    let (front, mut moved, mut count) = (format!("{kind}.dequantised."), 0usize, 0usize);
    for name in file.names().filter(|n| n.starts_with(&front)) {
        let got = dequantised(model.source(), &name[front.len()..], narrow)?.reals();
        let want = floats(file, path, name, got.len())?;
        let top = largest(want.iter().map(|x| f64::from(*x)));
        let differs = |(a, b): (&f64, &f32)| (a - f64::from(*b)).abs() > 1e-6 * top;
        moved += got.iter().zip(&want).filter(|pair| differs((pair.0, pair.1))).count();
        count += got.len();
    }
    let note = format!("of {count} numbers, those that are not the reference's");
    Ok(Row::compared(format!("{kind}.weights"), moved as f64 / count as f64, MOVED, &note))
}

/// The numbers that a tensor's parts stand for, by the interpreter.
pub(super) fn dequantised(source: &dyn WeightSource, tensor: &str, narrow: Narrow) -> Result<Tensor, Error> {
    let (mut g, mut leaves, mut args) = (Graph::new(vec![]), HashMap::new(), Vec::new());
    for part in narrow.parts() {
        let name = part.of(tensor);
        let t = source.tensor(&name).ok_or_else(|| format!("`{tensor}` is no matrix of such groups"))?;
        args.push(g.weight(&name, t.dtype, &t.shape)?);
        leaves.insert(name, Tensor::from_bytes(t.dtype, &t.shape, &t.bytes)?);
    }
    let w = g.push(Dequant { code: narrow.code }, &args)?;
    g.set_output("w", w)?;
    let mut values = eval(&g, &leaves, &Sizes::new(), Precision::default())?;
    Ok(values.remove(0).1)
}
