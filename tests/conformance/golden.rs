//! Golden cases: logits and loss of reference implementations, through host kernels and through the interpreter.

use crate::cases::{DENSE, EXPERTS, case};
use astrai_builders::{Logits, Loss, Program};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::Model;
use astrai_ir::DType;
use astrai_runtime::weights::Checkpoint;
use std::path::Path;

fn logits_and_loss(case: &Path, device: Kind, storage: DType) -> (Vec<f32>, Vec<f32>, f32, f32) {
    let golden = Checkpoint::open(&case.join("golden.safetensors")).unwrap();
    let ids = golden.get("input_ids").unwrap();
    let (batch, seq) = (ids.shape()[0], ids.shape()[1]);
    let tokens = ids.to_i64().unwrap();
    let model = Model::open(case, false).unwrap();
    let machine = Machine::new(device, 2).unwrap();
    let program =
        Program { loss: Loss::Mean, logits: Logits::All, ..Program::full(batch as u64, seq as u64) };
    let mut session = model.session(&program, storage, &machine, &mut |_, _| {}).unwrap();
    let rows: Vec<&[i64]> = tokens.chunks(seq).collect();
    let inputs = RaggedBatch::new(&rows, model.config.vocab_size).unwrap();
    let outs = session.run(&inputs.inputs(session.inputs())).unwrap();
    let mut want = vec![0.0; golden.get("logits").unwrap().elements()];
    golden.get("logits").unwrap().to_f32(&mut want).unwrap();
    let mut loss = vec![0.0];
    golden.get("loss").unwrap().to_f32(&mut loss).unwrap();
    (outs[0].1.to_f32(), want, outs[1].1.to_f32()[0], loss[0])
}

fn check(name: &str, device: Kind, storage: DType) {
    let Some(path) = case(name) else { return };
    let (got, want, loss, want_loss) = logits_and_loss(&path, device, storage);
    let top = want.iter().fold(0f32, |m, x| m.max(x.abs()));
    if storage == DType::F32 {
        let worst = got.iter().zip(&want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 1e-4 * top, "{name} {device:?}: logits off by {worst} of {top}");
        assert!(
            (loss - want_loss).abs() <= 1e-5 * want_loss.abs(),
            "{name} {device:?}: loss {loss} {want_loss}"
        );
    } else {
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| (x * x) as f64).sum::<f64>().sqrt();
        let off = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied());
        assert!(off < 3e-2, "{name} {device:?}: bf16 logits off by {off}");
    }
}

#[test]
fn host_kernels_give_the_references_numbers() {
    for name in DENSE {
        check(name, Kind::Cpu, DType::F32);
        check(name, Kind::Cpu, DType::BF16);
    }
}

#[test]
fn experts_give_the_references_numbers() {
    for name in EXPERTS {
        check(name, Kind::Cpu, DType::F32);
        check(name, Kind::Interpreter, DType::F32);
    }
}

/// The same rounded weights through kernels and through the interpreter. A token whose experts differ after a rounding before
/// the router would be far off; few may be.
#[test]
fn narrow_experts_agree_with_the_interpreter() {
    for name in EXPERTS {
        let Some(path) = case(name) else { continue };
        let (got, _, loss, _) = logits_and_loss(&path, Kind::Cpu, DType::BF16);
        let (want, reference, want_loss, _) = logits_and_loss(&path, Kind::Interpreter, DType::BF16);
        let vocab = 320;
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| (x * x) as f64).sum::<f64>().sqrt();
        let off = |a: &[f32], b: &[f32]| {
            norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
        };
        let rows: Vec<f64> = got.chunks(vocab).zip(want.chunks(vocab)).map(|(a, b)| off(a, b)).collect();
        let flipped = rows.iter().filter(|x| **x > 2e-2).count();
        println!(
            "{name}: {flipped} of {} tokens differ, reference off by {}",
            rows.len(),
            off(&got, &reference)
        );
        assert!(flipped * 10 <= rows.len(), "{name}: {rows:?}");
        assert!((loss - want_loss).abs() <= 3e-2 * want_loss.abs(), "{name}: loss {loss}, {want_loss}");
    }
}

#[test]
fn bounds_that_lead_out_of_the_batch_are_refused_and_forgotten() {
    let Some(path) = case("llama") else { return };
    let model = Model::open(&path, false).unwrap();
    let machine = Machine::new(Kind::Cpu, 2).unwrap();
    let mut session = model.session(&Program::full(2, 8), DType::F32, &machine, &mut |_, _| {}).unwrap();
    let good = RaggedBatch::new(&[&[1, 2, 3], &[4, 5]], model.config.vocab_size).unwrap();
    for starts in [[0, 3, 500], [0, 9, 5], [-4, 3, 5], [1, 3, 5], [0, 3, 4]] {
        let bad = RaggedBatch { starts: astrai_runtime::Value::i32(&[3], &starts), ..good.clone() };
        let error = session.run(&bad.inputs(session.inputs())).unwrap_err().to_string();
        assert!(error.contains("`starts` must ascend"), "{error}");
        assert!(session.run(&good.inputs(session.inputs())).is_ok());
    }
}

#[test]
fn the_interpreter_gives_the_references_numbers() {
    for name in DENSE {
        check(name, Kind::Interpreter, DType::F32);
        check(name, Kind::Interpreter, DType::BF16);
    }
}
