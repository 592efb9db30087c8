//! No allocation inside a training step, and planning whose memory and work follow kinds of layers: the whole program's allocator
//! is counted, so these tests are alone in their file and run one after the other.

use astrai::allocations::{Counted, counted};
use astrai_builders::ModelConfig;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::Model;
use astrai_ir::DType;
use astrai_runtime::{Dump, Recompute};
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::router::RouterLosses;
use astrai_train::settings::Settings;
use astrai_train::update::{Optimizer, Rule};
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

static ALONE: Mutex<()> = Mutex::new(());

#[global_allocator]
static ALLOCATOR: Held = Held;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The program's allocator, and how many bytes are held; a block that grows is another.
struct Held;

// SAFETY: every call goes to the program's allocator as it came.
unsafe impl GlobalAlloc for Held {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { Counted.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { Counted.dealloc(at, layout) }
    }
}

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
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
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
            wide: vec![],
            accumulate: true,
            recompute: Recompute::Selective,
            optimizer: Optimizer::new(rule, 0.1, Some(1.0)),
            router: RouterLosses::default(),
            adapter: None,
            frozen: vec![],
            async_save: false,
            neftune: None,
            objective: None,
        };
        let plan = Plan::new(&config, &recipe, machine.backend(), Dump::None).unwrap();
        let model = Model::fresh(config, vec![], 7);
        let mut engine = Engine::open(plan, model.source(), &machine.device, &mut |_, _| {}).unwrap();
        // Each step has batches of other shapes, none larger than those of the first.
        let steps = [[batch(&[40, 40]), batch(&[40, 40])], [batch(&[40, 7]), batch(&[1])]];
        engine.step(&steps[0], 1e-3).unwrap();
        engine.score(&steps[0][0]).unwrap();
        let (_, calls) = counted(|| {
            for i in 0..6 {
                engine.step(&steps[i % 2], 1e-3).unwrap();
                engine.score(&steps[i % 2][0]).unwrap();
            }
        });
        assert_eq!(calls, 0, "{storage}: allocations in six steps and scores");
    }
}

/// What planning takes at a number of layers: the plan, allocations, most bytes held.
fn planned(layers: usize) -> (Plan, [usize; 2]) {
    let text = SMALL.replace("\"num_hidden_layers\": 2", &format!("\"num_hidden_layers\": {layers}"));
    let config = ModelConfig::parse(&text, "deep").unwrap().config;
    let machine = Machine::new(Kind::Null, 1).unwrap();
    let recipe = Settings::of_sizes(1, 64).recipe();
    MOST.store(HELD.load(Relaxed), Relaxed);
    let (plan, calls) = counted(|| Plan::new(&config, &recipe, machine.backend(), Dump::None).unwrap());
    (plan, [calls as usize, MOST.load(Relaxed)])
}

#[test]
fn planning_a_training_step_follows_kinds_of_layers() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let of = |layers| {
        let (plan, taken) = planned(layers);
        let programs = [&plan.grad, &plan.update, &plan.score];
        let kernels = programs.map(|p| p.kernels.len());
        let bodies = programs.map(|p| p.graph.blocks().iter().map(|b| b.graph.nodes().len()).sum::<usize>());
        let outer = programs.map(|p| p.graph.nodes().len() + p.plan.main.steps.len());
        (kernels, bodies, outer.iter().sum::<usize>(), taken)
    };
    let [few, middle, many] = [10, 505, 1000].map(of);
    assert_eq!((few.0, few.1), (many.0, many.1), "kernels and bodies are those of one layer");
    let layer = (many.2 - few.2) / 990;
    let [calls, bytes] = [many.3[0] - middle.3[0], many.3[1] - middle.3[1]];
    println!("a layer: {layer} nodes and steps, {} allocations, {} bytes", calls / 495, bytes / 495);
    assert!(layer < 150, "{layer} nodes and steps a layer");
    assert!(
        calls < (middle.3[0] - few.3[0]) * 11 / 10,
        "{calls} allocations for the second half of the layers"
    );
    assert!(many.3[1] < 150 << 20, "{} bytes", many.3[1]);
}
