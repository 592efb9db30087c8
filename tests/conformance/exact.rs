//! What must be equal bit for bit: a ragged batch and its sequences alone, one thread and two, two compilations of one
//! graph, a graph and what its JSON reads back as.

use crate::cases::{DENSE, EXPERTS, case};
use crate::driver::checks_everything;
use crate::machines::host;
use astrai_builders::{Logits, Loss, Program, build};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::Model;
use astrai_ir::json::{read_json, write_json};
use astrai_ir::{DType, Graph};
use astrai_runtime::{Dump, Options, Session, compile};
use std::path::{Path, PathBuf};

/// Folders of the families that are in this repository or beside it; outside of continuous integration every second one.
pub fn families() -> Vec<PathBuf> {
    let step = if checks_everything() { 1 } else { 2 };
    let found: Vec<PathBuf> =
        DENSE.iter().chain(&EXPERTS).step_by(step).filter_map(|name| case(name)).collect();
    assert!(found.len() >= 2);
    found
}

fn program() -> Program {
    Program { tokens: 96, sequences: 4, span: 64, logits: Logits::All, loss: Loss::None, cache: None }
}

fn open(path: &Path, (storage, narrow): (DType, &str), threads: usize) -> (Session, usize) {
    let model = Model::open(path, false).unwrap().quantised(narrow.parse().ok());
    let machine = host(threads);
    (model.session(&program(), storage, &machine, &mut |_, _| {}).unwrap(), model.config.vocab_size)
}

fn logits(session: &mut Session, sequences: &[&[i64]], vocab: usize) -> Vec<u8> {
    let batch = RaggedBatch::new(sequences, vocab).unwrap();
    let inputs = session.inputs().to_vec();
    session.run(&batch.inputs(&inputs)).unwrap().remove(0).1.bytes
}

/// Sequences of 1, 40, 7 and 33 tokens.
fn sequences(vocab: usize) -> Vec<Vec<i64>> {
    [1usize, 40, 7, 33]
        .iter()
        .map(|&n| (0..n).map(|i| ((i * 7919 + n * 31) % vocab) as i64).collect())
        .collect()
}

#[test]
fn a_ragged_batch_is_its_sequences_alone_on_any_number_of_threads() {
    for (i, path) in families().into_iter().enumerate() {
        // Of weights as they are, and stored as codes.
        let plain = [(DType::F32, ""), (DType::BF16, "")];
        let narrow =
            [(DType::F32, "int4:asymmetric"), (DType::BF16, "int4:asymmetric"), (DType::BF16, "int8")];
        for as_stored in plain.into_iter().chain(narrow.into_iter().filter(|_| i < 1)) {
            let storage = format!("{} {}", as_stored.0, as_stored.1);
            let (mut two, vocab) = open(&path, as_stored, 2);
            let all = sequences(vocab);
            let refs: Vec<&[i64]> = all.iter().map(Vec::as_slice).collect();
            let together = logits(&mut two, &refs, vocab);
            let alone: Vec<u8> = refs.iter().flat_map(|s| logits(&mut two, &[s], vocab)).collect();
            assert!(together == alone, "{} {storage}: a batch differs from its sequences", path.display());
            if i < 2 {
                let (mut one, _) = open(&path, as_stored, 1);
                let other = logits(&mut one, &refs, vocab);
                assert!(together == other, "{} {storage}: one thread differs from two", path.display());
            }
            let again = logits(&mut two, &refs, vocab);
            assert!(together == again, "{} {storage}: two runs differ", path.display());
            // A prefix alone: what comes later changes nothing.
            let prefix = logits(&mut two, &[&refs[1][..17]], vocab);
            let row = together.len() / 81;
            assert!(prefix == together[row..18 * row], "{} {storage}: a prefix differs", path.display());
        }
    }
}

/// Dumps of all stages and sources of all kernels.
fn trace(graph: &Graph, storage: DType) -> (Vec<(String, String)>, Vec<String>) {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    let program =
        compile(graph, machine.backend(), &Options { storage, dump: Dump::All, ..Options::default() })
            .unwrap();
    let dump = |s: &astrai_runtime::Stage| Some((s.name.to_string(), write_json(s.graph.as_ref()?)));
    let kernels = program.kernels.iter().map(|k| k.as_ref().map_or(String::new(), |k| k.source.clone()));
    (program.report.stages.iter().filter_map(dump).collect(), kernels.collect())
}

#[test]
fn compilation_is_a_function_of_the_graph() {
    for path in families() {
        let model = Model::open(&path, false).unwrap();
        for loss in [Loss::None, Loss::Mean, Loss::Scaled] {
            let graph = build(&model.config, &Program { loss, ..program() }).unwrap();
            for storage in [DType::F32, DType::BF16] {
                let first = trace(&graph, storage);
                assert!(first.0.len() >= 5 && !first.1.is_empty());
                let again = build(&model.config, &Program { loss, ..program() }).unwrap();
                assert!(first == trace(&again, storage), "{}: two compilations differ", path.display());
                let read = read_json(&write_json(&graph)).unwrap();
                assert!(first == trace(&read, storage), "{}: what was read back differs", path.display());
            }
        }
    }
}
