//! Golden gradients: the gradient program of a model through host kernels against a reference implementation.

use crate::cases::case;
use astrai_builders::{Logits, Loss, Program, build};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::{Model, read_config};
use astrai_ir::{DType, Op};
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Options, compile};
use std::path::Path;

#[test]
fn host_kernels_give_the_references_gradients() {
    for name in ["llama", "qwen3", "astrai_gqa", "olmo2", "glm4", "phi3", "gemma2", "gemma3", "gpt_oss"] {
        let Some(case) = case(name) else { continue };
        let golden = Checkpoint::open(&case.join("golden.safetensors")).unwrap();
        let ids = golden.get("input_ids").unwrap();
        let (batch, seq) = (ids.shape()[0], ids.shape()[1]);
        let tokens = ids.to_i64().unwrap();
        let model = Model::open(&case, false).unwrap();
        let machine = Machine::new(Kind::Cpu, 2).unwrap();
        let program =
            Program { loss: Loss::Mean, logits: Logits::All, ..Program::full(batch as u64, seq as u64) };
        let graph = build(&model.config, &program).unwrap();
        let options = Options { gradient_of: Some("loss".into()), ..Options::default() };
        let compiled = compile(&graph, machine.backend(), &options).unwrap();
        assert!(
            compiled.plan.regions.iter().all(|r| r.form().has_kernel()),
            "{name}: a region has no kernel"
        );
        let weights: Vec<_> = compiled.plan.weights.iter().map(|w| w.weight.clone()).collect();
        let mut session = model.start(compiled, &machine, &mut |_, _| {}).unwrap();
        let rows: Vec<&[i64]> = tokens.chunks(seq).collect();
        let inputs = RaggedBatch::new(&rows, model.config.vocab_size).unwrap();
        let outs = session.run(&inputs.inputs(session.inputs())).unwrap();
        let mut seen = 0;
        for w in weights {
            let grad = &outs.iter().find(|(n, _)| *n == format!("grad.{}", w.name)).unwrap().1;
            let all = grad.to_f32();
            let width: usize = grad.shape.iter().skip(1).product();
            let mut first = 0;
            for part in w.rows() {
                let got = &all[first * width..(first + part.rows) * width];
                first += part.rows;
                let want = golden.get(&format!("grad.{}", part.name)).unwrap();
                let mut values = vec![0.0; want.elements()];
                want.to_f32(&mut values).unwrap();
                let top = values.iter().fold(0f32, |m, x| m.max(x.abs()));
                let worst = got.iter().zip(&values).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(worst <= 1e-4 * top, "{name}: gradient of {} off by {worst} of {top}", part.name);
                seen += 1;
            }
        }
        assert!(seen > 10, "{name}: only {seen} gradients");
    }
}

#[test]
fn no_dot_of_training_is_left_to_loops() {
    let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama");
    let (config, _) = read_config(&case, false).unwrap();
    let machine = Machine::new(Kind::Null, 1).unwrap();
    let graph = build(&config, &Program { loss: Loss::Mean, ..Program::full(2, 64) }).unwrap();
    for storage in [DType::F32, DType::BF16] {
        let options = Options { storage, gradient_of: Some("loss".into()), ..Options::default() };
        let compiled = compile(&graph, machine.backend(), &options).unwrap();
        let mut dots = 0;
        let losses = compiled.plan.regions.iter().filter(|r| r.form().name() == "loss");
        assert_eq!(losses.count(), 1, "{storage}: the logits of the loss are made once");
        for r in &compiled.plan.regions {
            assert!(r.form().has_kernel() || storage != DType::F32, "{} has no kernel", r.origin);
            if r.graph().nodes().iter().any(|n| matches!(n.op, Op::Dot(_))) {
                assert_eq!(r.form().name(), "dot", "{storage}: {} has a dot in loops", r.origin);
                dots += 1;
            }
        }
        assert!(dots >= 9, "{storage}: only {dots} kernels have dots");
    }
}
