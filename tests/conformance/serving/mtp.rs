//! A module of multi-token prediction: its numbers beside those of a reference in PyTorch (transformers' DeepSeek-V3, and a module after
//! arXiv 2412.19437 with one of its layers; `make.py` beside the fixture writes them), and the answers of an engine whose tokens it proposes.

use super::*;
use astrai_builders::config::Hidden;
use astrai_engine::serving::{Speculation, steps_drafted};
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Session, Value};
use astrai_serve::engine::DraftModel;
use astrai_serve::scheduler::batch::StepBatch;
use std::fs;
use std::sync::Arc;

const CACHE: Cache = Cache { page: 8, pages: 12, table: 6, windows: None };

/// The pages of the sequence, out of order.
const PAGES: [u32; 6] = [7, 2, 9, 4, 11, 0];

/// The row of a position.
fn row(at: usize) -> i32 {
    PAGES[at / CACHE.page] as i32 * CACHE.page as i32 + (at % CACHE.page) as i32
}

/// Logits of tokens behind the `done` first; where a module's last state goes.
fn run(session: &mut Session, ids: &[u32], done: usize, next: i32) -> Vec<f32> {
    let mut batch = StepBatch::of_program(session.inputs(), CACHE.page, CACHE.table);
    batch.push(ids, done, &PAGES, [64, CACHE.pages]).unwrap();
    let mut slots = vec![-1; ids.len()];
    slots[ids.len() - 1] = next;
    let slots = Value::i32(&[ids.len()], &slots);
    let mut inputs = batch.inputs(session.inputs());
    inputs.iter_mut().filter(|(name, _)| *name == "next_slots").for_each(|(_, value)| *value = &slots);
    let results = session.run(&inputs).unwrap();
    results.iter().find(|(name, _)| name == "logits").unwrap().1.to_f32()
}

#[test]
fn a_module_gives_the_references_numbers() {
    let path = case("deepseek_mtp").unwrap();
    let golden = Checkpoint::open(&path.join("golden.safetensors")).unwrap();
    let want = |name: &str| {
        let tensor = golden.get(name).unwrap();
        let mut out = vec![0.0; tensor.elements()];
        tensor.to_f32(&mut out).unwrap();
        out
    };
    let near = |what: &str, got: &[f32], want: &[f32]| {
        let top = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        let off = got.iter().zip(want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(got.len() == want.len() && off <= 1e-4 * top, "{what}: off by {off} of {top}");
    };
    let ids: Vec<u32> =
        golden.get("input_ids").unwrap().to_i64().unwrap().iter().map(|x| *x as u32).collect();
    let (seq, vocab) = (golden.get("input_ids").unwrap().shape()[1], 64);
    for kind in [Kind::Cpu, Kind::Interpreter] {
        let machine = Machine::new(kind, 2).unwrap();
        let model = Model::open(&path, false).unwrap();
        let config = ModelConfig { hidden: Some(Hidden::Kept), ..model.config.clone() };
        let planned = |config: &ModelConfig| {
            let program = Program { logits: Logits::All, ..Program::paged(48, 1, CACHE) };
            plan(config, &program, DType::F32, &machine).unwrap()
        };
        let kv = KvCache::new(&config, CACHE, DType::F32, &machine.device).unwrap();
        let mut whole = model.start_over(planned(&config), kv.buffers(), &mut |_, _| {}).unwrap();
        let module = Arc::new(planned(&config.module().unwrap()));
        let mut module = whole.beside(module, model.source(), &mut |_, _| {}).unwrap();
        for (i, ids) in ids.chunks(seq).enumerate() {
            let of = |all: &[f32], rows: usize| all[i * rows * vocab..][..rows * vocab].to_vec();
            // The prompt in two steps, each behind the other's pages.
            let mut got = run(&mut whole, &ids[..20], 0, -1);
            got.extend(run(&mut whole, &ids[20..], 20, -1));
            near("the model", &got, &of(&want("logits"), seq));
            let mut got = run(&mut module, &ids[1..9], 0, -1);
            got.extend(run(&mut module, &ids[9..], 8, row(seq - 1)));
            near("the module", &got, &of(&want("mtp.logits"), seq - 1));
            let last = &got[(seq - 2) * vocab..];
            let next = (0..vocab).fold(0, |best, id| if last[id] > last[best] { id } else { best });
            let behind = run(&mut module, &[next as u32], seq - 1, -1);
            near("behind its own proposal", &behind, &of(&want("mtp.next"), 1));
        }
    }
}

/// Proposals of a module are verified: answers are those without, also where prompts are found again and choices share one.
#[test]
fn a_module_changes_no_answer_and_is_mostly_right() {
    let path = case("deepseek_mtp").unwrap();
    let golden = Checkpoint::open(&path.join("golden.safetensors")).unwrap();
    let ids: Vec<u32> =
        golden.get("input_ids").unwrap().to_i64().unwrap().iter().map(|x| *x as u32).collect();
    let machine = host(2);
    let model = Model::open(&path, false).unwrap();
    let start = |speculation, sequences, prefix_cache| {
        let room = Room {
            sequences,
            tokens: Some(40),
            kv: Some(KvMemory::Bytes(200_000)),
            prefix_cache,
            queue: 64,
            speculation,
            ..Room::of_one(DType::F32, None)
        };
        let (model, draft) = steps_drafted(&model, None, &room, &machine, &mut |_| {}).unwrap();
        assert_eq!(draft.is_some(), speculation.is_some());
        let draft = draft.map(|draft| Box::new(draft) as DraftModel);
        Engine::start_drafted(model, draft, &room.settings()).unwrap()
    };
    let mut dice = Dice(5);
    let requests = (0..24).map(|i| {
        let (at, n) = (dice.roll(30), 1 + dice.roll(40));
        let temperature = [0.0, 0.0, 0.8][i % 3];
        let max_tokens = Some(1 + dice.roll(60));
        let sampling = Sampling { temperature, max_tokens, seed: Some(i as u64), ..Sampling::default() };
        let n_choices = if temperature > 0.0 { 3 } else { 1 };
        Request { n: n_choices, sampling, ..Request::new(ids[at..at + n].to_vec()) }
    });
    let requests: Vec<Request> = requests.collect();
    let plain = start(None, 1, false);
    let answer = |engine: &Engine, request: &Request| {
        let mut stream = engine.handle().submit(request.clone()).unwrap();
        collect(&mut stream, request.n as usize).0
    };
    let known: Vec<(Request, Answer)> =
        requests.iter().map(|request| (request.clone(), answer(&plain, request))).collect();
    drop(plain);
    for (most, sequences, prefix_cache) in [(3, 1, false), (2, 3, true)] {
        let engine = start(Some(Speculation::Module(most)), sequences, prefix_cache);
        let stats = under_clients(engine, sequences, &known, 72);
        let counters = stats.scheduler;
        println!("{} of {} proposed; {} steps", counters.accepted, counters.proposed, stats.steps);
        // How many there are is for the times of steps to decide, of which a test knows nothing.
        assert!(2 * counters.accepted > counters.proposed && counters.accepted > 0, "{counters:?}");
        assert_eq!((stats.failed, stats.running, stats.waiting), (0, 0, 0));
    }
}

#[test]
fn a_module_that_is_not_there_is_told_in_a_line() {
    let room = Room { speculation: Some(Speculation::Module(1)), ..Room::of_one(DType::F32, None) };
    // The configuration of the second states a module, of which its checkpoint has no weights.
    for name in ["llama", "deepseek_v3"] {
        let Some(path) = case(name) else { continue };
        let model = Model::open(&path, false).unwrap();
        let refused = steps_drafted(&model, None, &room, &host(1), &mut |_| {}).err().unwrap().to_string();
        assert!(refused.contains("has no module of multi-token prediction"), "{refused}");
    }
    let (path, dir) = (case("deepseek_mtp").unwrap(), tempfile::tempdir().unwrap());
    let mut bytes = fs::read(path.join("model.safetensors")).unwrap();
    let (name, other) = (b"layers.2.eh_proj", b"layers.2.eh_prox");
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(other);
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    fs::copy(path.join("config.json"), dir.path().join("config.json")).unwrap();
    let refused = Model::open(dir.path(), false).err().unwrap();
    assert!(
        refused.contains("1 tensors missing") && refused.contains("layers.2.eh_proj.weight"),
        "{refused}"
    );
}
