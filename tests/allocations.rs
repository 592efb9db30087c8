//! No allocation inside a training step: the whole program's allocator is counted, so this test is alone in its file.

use astrai::allocations::{Counted, count};
use astrai_builders::ModelConfig;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::Model;
use astrai_ir::DType;
use astrai_runtime::{Dump, Recompute};
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::router::RouterLosses;
use astrai_train::update::{Optimizer, Rule};

#[global_allocator]
static ALLOCATOR: Counted = Counted;

const SMALL: &str = r#"{"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}"#;

fn batch(lengths: &[usize]) -> PackedBatch {
    let mut batch = PackedBatch::default();
    for &n in lengths {
        let ids: Vec<i32> = (0..n as i32).map(|i| i * 37 % 320).collect();
        batch.push(&ids, &ids);
    }
    batch
}

#[test]
fn a_step_allocates_nothing_after_the_first() {
    let rules =
        [Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, Rule::Sgd { momentum: 0.9, nesterov: false }];
    for (storage, rule) in [DType::F32, DType::BF16].into_iter().zip(rules) {
        let config = ModelConfig::parse(SMALL, "small").unwrap().config;
        let machine = Machine::new(Kind::Cpu, 2).unwrap();
        let recipe = Recipe {
            tokens: 80,
            sequences: 2,
            span: 40,
            storage,
            accumulate: true,
            recompute: Recompute::Selective,
            optimizer: Optimizer::new(rule, 0.1, Some(1.0)),
            router: RouterLosses::default(),
        };
        let plan = Plan::new(&config, &recipe, machine.backend(), Dump::None).unwrap();
        let model = Model::fresh(config, vec![], 7);
        let mut engine = Engine::open(plan, model.source(), &machine.device, &mut |_, _| {}).unwrap();
        // Each step has batches of other shapes, none larger than those of the first.
        let steps = [[batch(&[40, 40]), batch(&[40, 40])], [batch(&[40, 7]), batch(&[1])]];
        engine.step(&steps[0], 1e-3).unwrap();
        engine.score(&steps[0][0]).unwrap();
        let before = count();
        for i in 0..6 {
            engine.step(&steps[i % 2], 1e-3).unwrap();
            engine.score(&steps[i % 2][0]).unwrap();
        }
        assert_eq!(count() - before, 0, "{storage}: allocations in six steps and scores");
    }
}
