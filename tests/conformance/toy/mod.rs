//! The seam of devices, proved by a device that nothing but this folder knows: another panel width, no matrix unit, memory that the
//! process does not see, another alignment, few kernels. Golden cases forward, backward, in training and in paged decoding give the
//! references' numbers.

mod backend;
mod device;

use astrai_builders::Program;
use astrai_engine::batch::RaggedBatch;
use astrai_engine::golden::Golden;
use astrai_engine::model::plan;
use astrai_engine::{Machine, Model, unheard};
use astrai_ir::plan::Place;
use astrai_ir::{DType, Layout};
use std::sync::Arc;

fn machine() -> Machine {
    Machine::over(Arc::new(device::ToyDevice::new()))
}

#[test]
fn golden_cases_forward_backward_training_and_decode() {
    for name in ["llama", "qwen3", "deepseek_v3"] {
        let Some(path) = crate::cases::case(name) else { continue };
        let (model, machine) = (Model::open(&path, false).unwrap(), machine());
        // Experts that are chosen otherwise after a rounding have no tolerance.
        let experts = name == "deepseek_v3";
        for storage in [DType::F32, DType::BF16].into_iter().take(if experts { 1 } else { 2 }) {
            let golden = Golden::open(&path.join("golden.safetensors"), &model, &machine, storage).unwrap();
            let mut rows = golden.forward(true, true, &mut unheard).unwrap();
            rows.push(golden.greedy(&mut unheard).unwrap());
            if storage == DType::F32 {
                rows.push(golden.gradients(&mut unheard).unwrap());
                rows.extend(golden.train(&mut unheard).unwrap());
            }
            for row in rows {
                assert_eq!(row.verdict, "ok", "{name} {storage}: {row:?}");
            }
        }
    }
}

/// A run like one before is recorded at its second time, a run of other sizes or on other memory is not taken for it; the bits are the
/// same. What was recorded stays, however many runs come once.
#[test]
fn recorded_runs_have_the_same_bits() {
    let Some(path) = crate::cases::case("llama") else { return };
    let device = Arc::new(device::ToyDevice::new());
    let (model, machine) = (Model::open(&path, false).unwrap(), Machine::over(device.clone()));
    let mut session = model.session(&Program::full(3, 16), DType::F32, &machine, &mut |_, _| {}).unwrap();
    let ids: Vec<i64> = (0..48).map(|i| i * 31 % 320).collect();
    let mut run = |count: usize, tokens: usize| {
        let (each, more) = (tokens / count, tokens % count);
        let rows: Vec<&[i64]> = (0..count).map(|r| &ids[r..r + each + usize::from(r < more)]).collect();
        let batch = RaggedBatch::new(&rows, model.config.vocab_size).unwrap();
        session.run(&batch.inputs(session.inputs())).unwrap()
    };
    // The largest first: memory of inputs does not move after it.
    run(3, 48);
    let (first, other) = (run(3, 21), run(2, 14));
    assert_eq!(device.replayed(), 0);
    for _ in 0..3 {
        assert!(run(3, 21) == first && run(2, 14) == other);
    }
    let replayed = device.replayed();
    assert!(replayed > 0 && replayed.is_multiple_of(6), "{replayed}");
    let sizes = (1..=3).flat_map(|count| (count..=16 * count).map(move |tokens| (count, tokens)));
    let once: Vec<_> = sizes.filter(|size| ![(3, 48), (3, 21), (2, 14)].contains(size)).collect();
    assert!(once.len() > 64);
    once.into_iter().for_each(|(count, tokens)| drop(run(count, tokens)));
    assert_eq!(device.replayed(), replayed);
    assert!(run(3, 21) == first);
    let each = replayed / 6;
    assert_eq!(device.replayed(), replayed + each);
    // What is timed is recorded at once, and has a row for each launch.
    session.start_profile();
    let rows: Vec<&[i64]> = (0..3).map(|r| &ids[r..r + 7]).collect();
    let batch = RaggedBatch::new(&rows, model.config.vocab_size).unwrap();
    assert!(session.run(&batch.inputs(session.inputs())).unwrap() == first);
    assert_eq!(device.replayed(), replayed + 2 * each);
    let timed = session.take_profile().unwrap().rows;
    assert!(timed.len() >= each && timed.iter().all(|row| row.runs == 1 && row.measured > 0.0));
}

#[test]
fn plans_have_the_toys_layouts_and_alignment() {
    let Some(path) = crate::cases::case("llama") else { return };
    let model = Model::open(&path, false).unwrap();
    let planned = plan(&model.config, &Program::full(2, 16), DType::F32, &machine()).unwrap();
    let panels = |w: &&astrai_ir::plan::PlannedWeight| w.layout == Layout::Panels { rows: 8, group: 1 };
    assert!(planned.plan.weights.iter().filter(panels).count() >= 8);
    assert!(planned.kernels.iter().flatten().count() >= 5);
    for body in planned.plan.bodies.iter().chain([&planned.plan.main]) {
        for b in &body.buffers {
            assert!(!matches!(b.place, Place::Arena(at) if at % backend::ALIGNMENT != 0), "{:?}", b.place);
        }
    }
}
