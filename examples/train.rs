//! A model trained: a small llama learns to count. Its programs (gradients, update, score) are planned once for the processor.

use astrai_builders::ModelConfig;
use astrai_engine::{Kind, Machine, Model};
use astrai_runtime::Dump;
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan};
use astrai_train::settings::Settings;

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 32}"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let machine = Machine::new(Kind::Cpu, 0)?;
    let config = ModelConfig::parse(CONFIG, "config")?.config;
    let recipe = Settings::of_sizes(8, 31).recipe();
    let plan = Plan::new(&config, &recipe, machine.backend(), Dump::None)?;
    let model = Model::fresh(config, vec![], 7);
    let mut engine = Engine::open(plan, model.source(), &machine.device, &mut |_, _| {})?;
    for step in 0..=60 {
        // Each sequence counts on from another number.
        let mut batch = PackedBatch::default();
        for row in 0..8 {
            let ids: Vec<i32> = (0..32).map(|i| (step * 11 + row * 8 + i) % 64).collect();
            batch.push(&ids[..31], &ids[1..]);
        }
        let done = engine.step(&[batch], 3e-3)?;
        if step % 20 == 0 {
            println!("step {step:2}: loss {:.2}, gradient norm {:.2}", done.loss, done.grad_norm);
        }
    }
    Ok(())
}
