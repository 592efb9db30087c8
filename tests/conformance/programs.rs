//! A program of decode beside one of prefill: where there is one, it computes the tokens of outputs, whatever is computed beside them; it takes no
//! memory for what the other program reads alike; and where the same kernels suit both, there is one program.

use crate::cases::case;
use crate::machines::host;
use astrai_builders::Cache;
use astrai_engine::Machine;
use astrai_engine::greedy::continue_greedily;
use astrai_engine::model::{Model, read_config, served_fidelity};
use astrai_engine::programs::Programs;
use astrai_ir::DType;
use astrai_ir::ops::Op;
use astrai_passes::Fidelity;
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Compiled as Planned, Session};
use astrai_serve::cache::KvCache;
use astrai_serve::engine::{End, Engine, Handle, Model as Steps, ModelError, Settings, Sizes, Stats};
use astrai_serve::paged::PagedModel;
use astrai_serve::request::{Request, Sampling};
use astrai_serve::scheduler::plan::{ProgramKind, StepPlan};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const TOKENS: u64 = 96;

const CACHE: Cache = Cache { page: 4, pages: 24, table: 11, windows: None };

/// Golden cases whose pages hold latents.
fn cases() -> Vec<PathBuf> {
    ["deepseek_v2", "deepseek_v3"].into_iter().filter_map(case).collect()
}

/// A machine on which operations cost and nothing else does: small models then go the way of large ones.
fn machine(threads: usize) -> Machine {
    let machine = host(threads);
    let Some(cpu) = &machine.cpu else { return machine };
    let mut target = machine.backend().target().clone();
    (target.launch, target.bandwidth) = (0.0, 1e18);
    target.flops.iter_mut().for_each(|f| f.1 = 1e3);
    Machine::on(cpu.with_target(target))
}

/// Heads of keys that attention reads in the first layer.
fn key_heads(planned: &Planned) -> usize {
    let body = &planned.graph.blocks()[0].graph;
    let attention = body.nodes().iter().find(|n| matches!(n.op, Op::Attention(_))).unwrap();
    body.ty(attention.args[1]).shape[1].size().unwrap()
}

fn plan(model: &Model, sequences: u64, cache: Cache, storage: DType, machine: &Machine) -> Programs {
    let sizes = [TOKENS, sequences];
    let programs = Programs::plan(&model.config, sizes, cache, storage, machine, Fidelity::Standard).unwrap();
    let heads = [programs.prefill(), programs.decode()].map(key_heads);
    assert_eq!(heads, [4, 1], "keys are made of latents for prompts only");
    programs
}

fn start(programs: Programs, model: &Model, kv: &KvCache) -> [Session; 2] {
    let sessions = programs.start(model, kv.buffers(), &mut |_, _| {}).unwrap();
    let [(ProgramKind::Prefill, first), (ProgramKind::Decode, second)] =
        <[(ProgramKind, Session); 2]>::try_from(sessions).ok().unwrap()
    else {
        panic!("the programs are not one of prefill and one of decode")
    };
    [first, second]
}

/// Tokens that each program computed.
type Seen = Arc<[AtomicU64; 2]>;

/// A model that counts what it is given.
struct Counted {
    model: PagedModel,
    seen: Seen,
}

impl Steps for Counted {
    fn sizes(&self) -> Sizes {
        self.model.sizes()
    }

    fn plan(&self) -> StepPlan {
        self.model.plan()
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        for (count, entry) in self.seen.iter().zip(plan.entries()) {
            count.fetch_add(entry.batch.tokens() as u64, Ordering::Relaxed);
        }
        self.model.step(plan, logits)
    }
}

fn counted(
    model: &Model,
    sequences: u64,
    cache: Cache,
    storage: DType,
    machine: &Machine,
) -> (Counted, Seen) {
    let kv = KvCache::new(&model.config, cache, storage, &machine.device).unwrap();
    let [first, second] = start(plan(model, sequences, cache, storage, machine), model, &kv);
    let sizes = [model.config.vocab_size, 44, TOKENS as usize, sequences as usize];
    let model =
        PagedModel::new(vec![(ProgramKind::Prefill, first), (ProgramKind::Decode, second)], cache, sizes);
    let seen = Seen::default();
    (Counted { model, seen: seen.clone() }, seen)
}

fn numbers(seen: &Seen) -> [u64; 2] {
    seen.each_ref().map(|n| n.load(Ordering::Relaxed))
}

#[test]
fn answers_are_the_references_when_a_second_program_computes_them() {
    for path in cases() {
        let model = Model::open(&path, false).unwrap();
        let golden = Checkpoint::open(&path.join("golden.safetensors")).unwrap();
        let [prompt, want] = ["greedy.prompt_ids", "greedy.output_ids"]
            .map(|name| golden.get(name).unwrap().to_i64().unwrap());
        let mut margins = vec![0.0; want.len()];
        golden.get("greedy.margin").unwrap().to_f32(&mut margins).unwrap();
        let (steps, seen) = counted(&model, 4, CACHE, DType::F32, &machine(2));
        let got = continue_greedily(steps, &prompt, want.len(), &mut |_| {}).unwrap();
        // The prompt gave the first token, and nothing is computed of the last.
        assert_eq!(numbers(&seen), [prompt.len() as u64, want.len() as u64 - 1]);
        for (i, (choice, (token, margin))) in got.iter().zip(want.iter().zip(&margins)).enumerate() {
            if *margin < 1e-3 {
                break;
            }
            assert_eq!(choice.token, *token, "{}: token {i}", path.display());
            assert!((choice.margin - margin).abs() <= 2e-4 * choice.top, "{}: margin {i}", path.display());
        }
    }
}

const CLIENTS: usize = 4;

/// A request and what it was answered alone.
type Known = Vec<(Request, Vec<u32>)>;

fn requests(vocabulary: usize) -> Vec<Request> {
    let one = |i: usize| {
        let shared = if i.is_multiple_of(3) { 9 } else { 0 };
        let length = shared + 1 + i * 5 % 14;
        let of = |at: usize| if at < shared { at * 7 } else { at * 31 + i * 17 };
        let prompt: Vec<u32> = (0..length).map(|at| (of(at) % vocabulary) as u32).collect();
        let sampling = Sampling {
            temperature: [0.0, 0.8][i % 2],
            seed: Some(i as u64),
            max_tokens: Some(6 + i * 11 % (44 - length - 6)),
            ignore_eos: true,
            ..Sampling::default()
        };
        Request { sampling, ..Request::new(prompt) }
    };
    (0..24).map(one).collect()
}

fn ask(handle: &Handle, request: &Request) -> Vec<u32> {
    let mut stream = handle.submit(request.clone()).unwrap();
    let mut tokens = vec![];
    loop {
        let event = stream.blocking_recv().expect("a last event");
        tokens.extend(event.updates.iter().map(|u| u.token));
        match event.end {
            None => {}
            Some(End::Finished(_)) => return tokens,
            Some(end) => panic!("{end:?}"),
        }
    }
}

/// Clients that ask everything, each in an order of its own, and are answered as the request alone.
fn load(engine: &Engine, known: &Known) -> Stats {
    thread::scope(|s| {
        for client in 0..CLIENTS {
            let handle = engine.handle();
            s.spawn(move || {
                for i in 0..known.len() {
                    let (request, alone) = &known[(i * 7 + client * 5) % known.len()];
                    assert_eq!(ask(&handle, request), *alone, "{request:?}");
                }
            });
        }
    });
    engine.handle().stats()
}

#[test]
fn in_company_every_answer_is_that_of_the_request_alone() {
    for path in cases() {
        let model = Model::open(&path, false).unwrap();
        for storage in [DType::F32, DType::BF16] {
            let settings = |prefix_cache| Settings { prefix_cache, ..Settings::default() };
            let (alone, _) = counted(&model, 1, CACHE, storage, &machine(1));
            let alone = Engine::start(alone, &settings(false)).unwrap();
            let answer = |r: Request| (r.clone(), ask(&alone.handle(), &r));
            let mut known: Known = requests(model.config.vocab_size).into_iter().map(answer).collect();
            // Prompts that begin with what another request was answered.
            let next: Vec<Request> = known
                .iter()
                .take(8)
                .map(|(r, said)| {
                    let prompt = [&r.prompt[..], &said[..4], &[9]].concat();
                    let max_tokens = Some(44 - prompt.len());
                    let sampling = Sampling { max_tokens, ..r.sampling.clone() };
                    Request { prompt, sampling, ..r.clone() }
                })
                .collect();
            known.extend(next.into_iter().map(answer));
            drop(alone);
            for (cached, threads) in [(false, 2), (true, 1)] {
                let (steps, seen) = counted(&model, 4, CACHE, storage, &machine(threads));
                let engine = Engine::start(steps, &settings(cached)).unwrap();
                let stats = load(&engine, &known);
                let [prompts, answers] = numbers(&seen);
                let all = stats.scheduler;
                assert_eq!((all.computed, all.decoded), (prompts + answers, answers));
                let sampled = CLIENTS as u64 * known.iter().map(|(_, a)| a.len() as u64 - 1).sum::<u64>();
                println!("{} {storage}: {all:?}, {sampled} sampled", path.display());
                assert!(all.preemptions > 0 && answers >= sampled && cached == (all.cache_hits > 0));
            }
        }
    }
}

#[test]
fn weights_that_both_read_alike_lie_in_memory_once() {
    let machine = machine(2);
    for path in cases() {
        let model = Model::open(&path, false).unwrap();
        for storage in [DType::F32, DType::BF16] {
            let programs = plan(&model, 4, CACHE, storage, &machine);
            let beside = programs.bytes_beside().unwrap();
            let arena = programs.decode().arena_bytes().unwrap();
            let kv = KvCache::new(&model.config, CACHE, storage, &machine.device).unwrap();
            let [first, second] = start(programs, &model, &kv);
            // Of every layer what makes keys and values of latents, and nothing else, is read in two ways: heads times (nope and
            // value) rows of rank numbers.
            let twice = (model.config.num_layers * 4 * (16 + 16) * 32 * storage.bytes()) as u64;
            let ([own, shared], [of_first, same]) = (second.weight_bytes(), first.weight_bytes());
            assert_eq!((own, shared), (twice, same), "{} {storage}", path.display());
            assert!(of_first >= twice && beside == own + arena);
            let one = |p: &Planned, packed| {
                let of = |w: &&astrai_ir::plan::PlannedWeight| {
                    w.weight.name.contains("kv_b_proj") && w.layout.is_packed() == packed
                };
                p.plan.weights.iter().filter(of).count()
            };
            let layers = model.config.num_layers;
            assert_eq!(one(first.program(), true), layers);
            assert_eq!(one(second.program(), false), layers);
            drop(first);
            // What was shared is the other's alone now.
            assert_eq!(second.weight_bytes(), [own + shared, 0]);
        }
    }
}

#[test]
fn one_program_stays_where_the_same_kernels_suit_both() {
    let machine = host(2);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/configs");
    let Ok(files) = std::fs::read_dir(&folder) else {
        println!("skipped: {} is not here", folder.display());
        return;
    };
    let mut paths: Vec<PathBuf> = files.map(|f| f.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "json"));
    paths.sort();
    let cache = Cache { page: 16, pages: 256, table: 256, windows: None };
    for path in paths {
        let (config, _) = read_config(&path, false).unwrap();
        for fidelity in [Fidelity::Exact, Fidelity::Standard] {
            let programs = Programs::plan(&config, [512, 1], cache, DType::BF16, &machine, fidelity).unwrap();
            let two = fidelity == Fidelity::Standard && config.caches_latents();
            let found = programs.kinds().count() == 2;
            println!("{} {fidelity:?}: {found}", path.display());
            assert_eq!(found, two, "{} {fidelity:?}", path.display());
        }
        assert_eq!(served_fidelity(&config) == Fidelity::Standard, config.caches_latents());
    }
}
