//! The serving engine over a compiled model under load: clients with all kinds of requests come and go, pages are few, and every
//! answer is that of the request alone; afterwards nothing is left. `ASTRAI_SOAK_SECONDS` makes it run for so long.

mod adapters;
mod mtp;

use crate::cases::case;
use crate::machines::host;
use astrai_builders::config::Pooling;
use astrai_builders::{Cache, Logits, ModelConfig, Program};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::{Model, plan};
use astrai_engine::serving::{KvMemory, Room, steps};
use astrai_ir::DType;
use astrai_serve::cache::KvCache;
use astrai_serve::engine::{End, Engine, Event, Finish, Handle, Settings, Stats, Stream, SubmitError};
use astrai_serve::paged::PagedModel;
use astrai_serve::request::{Request, Sampling};
use astrai_serve::sample::Logprobs;
use astrai_serve::scheduler::plan::ProgramKind;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub const SMALL: &str = r#"{"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}"#;

const EOS: u32 = 5;

/// Different requests that there are.
const KINDS: usize = 192;

const CLIENTS: u64 = 32;

/// Requests of a test without `ASTRAI_SOAK_SECONDS`.
const REQUESTS: u64 = 6000;

/// An engine over so many pages.
fn start(machine: &Machine, pages: usize, sequences: usize, settings: Settings) -> Engine {
    let config = ModelConfig::parse(SMALL, "small").unwrap().config;
    let cache = Cache { page: 8, pages, table: 16, windows: None };
    let program = Program::paged(48, sequences as u64, cache);
    let planned = plan(&config, &program, DType::F32, machine).unwrap();
    let kv = KvCache::new(&config, cache, DType::F32, &machine.device).unwrap();
    let model = Model::fresh(config, vec![], 3);
    let session = model.start_over(planned, kv.buffers(), &mut |_, _| {}).unwrap();
    let model = PagedModel::new(vec![(ProgramKind::Mixed, session)], cache, [320, 128, 48, sequences]);
    Engine::start(model, &Settings { eos: vec![EOS], ..settings }).unwrap()
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn request(&mut self) -> Request {
        // Few beginnings, so that pages are found again.
        let family = 11 * self.roll(4);
        let shared = (0..[0, 9, 24, 40][self.roll(4)]).map(|i| ((family + i * 7) % 320) as u32);
        let mut prompt: Vec<u32> = shared.collect();
        prompt.extend((0..1 + self.roll(40)).map(|_| self.roll(320) as u32));
        let room = 128 - prompt.len();
        let sampling = Sampling {
            temperature: [0.0, 0.7, 1.0, 1.5][self.roll(4)],
            top_k: [0, 0, 5, 40][self.roll(4)],
            top_p: [1.0, 0.9, 0.3][self.roll(3)],
            min_p: [0.0, 0.0, 0.1][self.roll(3)],
            presence_penalty: [0.0, 0.5][self.roll(2)],
            repetition_penalty: [1.0, 1.2][self.roll(2)],
            logit_bias: [vec![], vec![(EOS, 3.0), (9, -5.0)]][self.roll(2)].clone(),
            seed: Some(self.roll(1000) as u64),
            stop_ids: [vec![], vec![11, 12, 13]][self.roll(2)].clone(),
            max_tokens: Some(1 + self.roll(room.min(60))),
            min_tokens: 0,
            ignore_eos: self.roll(2) == 0,
            logprobs: [None, None, Some(2)][self.roll(3)],
            ..Sampling::default()
        };
        let n = if sampling.temperature > 0.0 { 1 + self.roll(3) as u32 } else { 1 };
        let salt = vec![self.roll(3) as u8 / 2];
        Request { n, priority: self.roll(5) as i32 / 4, salt, ..Request { sampling, ..Request::new(prompt) } }
    }
}

/// Of each choice its tokens, with what was asked about them, and why it ended.
pub type Answer = Vec<(Vec<(u32, Option<Logprobs>)>, Option<Finish>)>;

fn take(answer: &mut Answer, event: Event) -> Option<End> {
    for update in event.updates {
        let choice = &mut answer[update.index as usize];
        assert!(choice.1.is_none(), "a token after the last");
        choice.0.push((update.token, update.logprobs));
        choice.1 = update.finish;
    }
    event.end
}

pub fn collect(stream: &mut Stream, n: usize) -> (Answer, End) {
    let mut answer: Answer = vec![(vec![], None); n];
    loop {
        let event = stream.blocking_recv().expect("a last event");
        if let Some(end) = take(&mut answer, event) {
            assert!(stream.blocking_recv().is_none(), "an event after the last");
            return (answer, end);
        }
    }
}

/// What clients count.
#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    whole: AtomicU64,
    gone: AtomicU64,
    busy: AtomicU64,
}

fn submit(handle: &Handle, request: &Request, counts: &Counts) -> Stream {
    loop {
        match handle.submit(request.clone()) {
            Ok(stream) => return stream,
            Err(SubmitError::Busy(_)) => {
                counts.busy.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(2));
            }
            Err(e) => panic!("{e}"),
        }
    }
}

/// So many requests of several clients at once, to their ends.
fn under_clients(engine: Engine, clients: usize, known: &[(Request, Answer)], requests: u64) -> Stats {
    let (counts, handle) = (Counts::default(), engine.handle());
    let until = |n: u64| n < requests;
    thread::scope(|scope| {
        for seed in 0..clients as u64 {
            let (handle, counts) = (handle.clone(), &counts);
            scope.spawn(move || client(&handle, seed * 7919 + 1, known, &until, counts));
        }
    });
    engine.drain(None);
    handle.stats()
}

/// One client: requests one after the other, some of which it gives up, cancels, or stops in part.
fn client(
    handle: &Handle,
    seed: u64,
    known: &[(Request, Answer)],
    until: &dyn Fn(u64) -> bool,
    counts: &Counts,
) {
    let mut dice = Dice(seed);
    while until(counts.requests.fetch_add(1, Ordering::Relaxed)) {
        let (request, alone) = &known[dice.roll(known.len())];
        let mut stream = submit(handle, request, counts);
        let mut partial = false;
        match dice.roll(8) {
            0 => {
                (0..dice.roll(6)).for_each(|_| drop(stream.blocking_recv()));
                counts.gone.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            1 => (partial, _) = (true, stream.cancel()),
            2 => (partial, _) = (true, stream.stop(0)),
            _ => {}
        }
        let (answer, end) = collect(&mut stream, request.n as usize);
        for ((got, finish), (want, _)) in answer.iter().zip(alone) {
            assert!(want.starts_with(got), "{request:?}: {got:?}, alone {want:?}");
            assert!(partial || finish.is_some());
        }
        let usage = match end {
            End::Finished(usage) | End::Cancelled(usage) => usage,
            End::Refused(why) | End::Failed(why) => panic!("{request:?}: {why}"),
        };
        assert_eq!(usage.output, answer.iter().map(|c| c.0.len()).sum::<usize>());
        if answer == *alone {
            counts.whole.fetch_add(1, Ordering::Relaxed);
        } else {
            assert!(partial, "{request:?}: {answer:?}, alone {alone:?}");
            counts.gone.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Kilobytes of memory of this process.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 4
}

/// Tells the process of the test under load that it is that.
const ALONE: &str = "ASTRAI_TEST_SERVING_ALONE";

#[test]
fn under_load_every_answer_is_that_of_the_request_alone_and_nothing_is_left() {
    // In a process of its own: the memory of this one is also that of the tests beside it.
    if std::env::var_os(ALONE).is_none() {
        let name = "serving::under_load_every_answer_is_that_of_the_request_alone_and_nothing_is_left";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let out = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let machine = host(2);
    let alone = start(&machine, 16, 1, Settings { prefix_cache: false, ..Settings::default() });
    let mut dice = Dice(7);
    let answer = |request: Request| {
        let (answer, end) = collect(&mut alone.handle().submit(request.clone()).unwrap(), request.n as usize);
        assert!(matches!(end, End::Finished(_)), "{end:?}");
        (request, answer)
    };
    let known: Vec<(Request, Answer)> = (0..KINDS).map(|_| answer(dice.request())).collect();
    drop(alone);

    let seconds = std::env::var("ASTRAI_SOAK_SECONDS").ok().map(|s| s.parse::<u64>().unwrap());
    let started = Instant::now();
    let until = |n: u64| seconds.map_or(n < REQUESTS, |s| started.elapsed() < Duration::from_secs(s));
    let engine = start(&machine, 40, 8, Settings { queue: 24, ..Settings::default() });
    let (counts, handle) = (Counts::default(), engine.handle());
    let mut memory = vec![];
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|i| {
                let (handle, known, until, counts) = (handle.clone(), &known, &until, &counts);
                scope.spawn(move || client(&handle, i * 7919 + 1, known, until, counts))
            })
            .collect();
        while !clients.iter().all(|c| c.is_finished()) {
            memory.push(resident());
            thread::sleep(Duration::from_millis(20));
        }
    });
    let took = started.elapsed();
    engine.drain(None);
    let (stats, n) = (handle.stats(), |c: &AtomicU64| c.load(Ordering::Relaxed));
    let third = memory.len() / 3;
    let median = |part: &[u64]| {
        let mut part = part.to_vec();
        part.sort_unstable();
        part.get(part.len() / 2).copied().unwrap_or(0)
    };
    let (first, last) = (median(&memory[..third]), median(&memory[memory.len() - third..]));
    let requests = stats.finished + stats.cancelled + stats.failed;
    println!(
        "{requests} requests in {:.1} s: {} whole, {} given up, {} times busy; {} steps, {} + {} tokens, {} preemptions, \
         {} of {} tokens found; resident {first} kB, then {last} kB",
        took.as_secs_f64(),
        n(&counts.whole),
        n(&counts.gone),
        n(&counts.busy),
        stats.steps,
        stats.prompt_tokens,
        stats.output_tokens,
        stats.scheduler.preemptions,
        stats.scheduler.cache_hits,
        stats.scheduler.cache_queries,
    );
    assert_eq!(stats.failed, 0);
    assert_eq!(requests, n(&counts.requests) - CLIENTS, "each request ended once");
    assert_eq!(requests, n(&counts.whole) + n(&counts.gone));
    assert_eq!(stats.pages_free + stats.pages_cached, 40, "pages are owned");
    assert_eq!((stats.queued, stats.running, stats.waiting), (0, 0, 0));
    assert!(stats.scheduler.preemptions > 0 && stats.scheduler.cache_hits > 0 && n(&counts.busy) > 0);
    assert!(stats.scheduler.forks > 0, "no choice began with the pages of another");
    assert!(last < first + 4096, "memory grew from {first} to {last} kB");
}

/// Proposed tokens are verified: by more than one at a time, beside others, over few pages, answers are those without.
#[test]
fn speculation_changes_no_answer_and_leaves_nothing() {
    let machine = host(2);
    let plain = start(&machine, 16, 1, Settings { prefix_cache: false, ..Settings::default() });
    let mut dice = Dice(11);
    let known: Vec<(Request, Answer)> = (0..KINDS)
        .map(|_| {
            let request = dice.request();
            let mut stream = plain.handle().submit(request.clone()).unwrap();
            let answer = collect(&mut stream, request.n as usize).0;
            (request, answer)
        })
        .collect();
    drop(plain);
    let mut rejected = 0;
    for (proposed, sequences, prefix_cache) in [(4, 3, true), (7, 1, false)] {
        let settings = Settings { proposed, sequences: Some(sequences), prefix_cache, ..Settings::default() };
        let engine = start(&machine, 24, 8, settings);
        let stats = under_clients(engine, sequences, &known, 2 * KINDS as u64);
        let counters = stats.scheduler;
        println!("{} of {} proposed; {} tokens", counters.accepted, counters.proposed, stats.output_tokens);
        assert!(counters.accepted > 0, "{counters:?}");
        rejected += counters.proposed - counters.accepted;
        assert_eq!((stats.failed, stats.running, stats.waiting), (0, 0, 0));
        assert_eq!(stats.pages_free + stats.pages_cached, 24, "pages are owned");
    }
    // Clients that run beside one another may by chance have all they are proposed accepted; the one alone has not.
    assert!(rejected > 0, "no proposal was rejected");
}

/// Choices that share a prompt say what each says alone, whatever lies in the pages: keys and values, or latents under two programs.
#[test]
fn choices_that_share_a_prompt_are_those_computed_alone() {
    let machine = host(2);
    let lengths = [1, 2, 16, 17, 31, 49];
    for (name, storage) in
        [("llama", DType::F32), ("gemma3", DType::BF16), ("gpt_oss", DType::F32), ("deepseek_v3", DType::F32)]
    {
        let Some(path) = case(name) else { continue };
        let model = Model::open(&path, false).unwrap();
        let ids = model.config.vocab_size as u32;
        let answers = |sequences: usize, prefix_cache: bool| {
            let room = Room {
                sequences: 6,
                tokens: Some(24),
                context: Some(64),
                queue: 64,
                ..Room::of_one(storage, None)
            };
            let settings = Settings { sequences: Some(sequences), prefix_cache, ..Settings::default() };
            let engine = Engine::start(steps(&model, &room, &machine, &mut |_| {}).unwrap(), &settings);
            let engine = engine.unwrap();
            let asked = |length: u32| {
                let (seed, max_tokens) = (Some(u64::from(length)), Some(14));
                let sampling = Sampling { seed, max_tokens, logprobs: Some(2), ..Sampling::default() };
                let prompt = (0..length).map(|i| (i * i + length) % ids).collect();
                engine.handle().submit(Request { n: 6, sampling, ..Request::new(prompt) }).unwrap()
            };
            let streams: Vec<Stream> = lengths.map(asked).into();
            let answers: Vec<Answer> = streams.into_iter().map(|mut s| collect(&mut s, 6).0).collect();
            let handle = engine.handle();
            engine.drain(None);
            let stats = handle.stats();
            assert_eq!(stats.pages_free + stats.pages_cached, stats.pages, "pages are owned");
            (answers, stats.scheduler.forks)
        };
        let (alone, forks) = answers(1, false);
        assert_eq!(forks, 0);
        for prefix_cache in [false, true] {
            let (together, forks) = answers(6, prefix_cache);
            assert!(forks > 0 && together == alone, "{name}: {forks} forks");
        }
    }
}

/// Windowed layers have pages of their own, fewer than the longest sequence: answers are those where nothing is given back.
#[test]
fn pages_that_left_the_window_are_given_back_and_change_no_answer() {
    let machine = host(2);
    // Of the eight pages of a sequence it needs so many for a window of 8 or 6 and 24 tokens.
    for (name, storage, each, every) in [
        ("mistral", DType::F32, 4, true),
        ("gemma2", DType::BF16, 3, false),
        ("gemma3", DType::F32, 3, false),
        ("gpt_oss", DType::BF16, 3, false),
    ] {
        let Some(path) = case(name) else { continue };
        let model = Model::open(&path, false).unwrap();
        let answers = |tokens: usize, prefix_cache: bool| {
            let room = Room {
                sequences: 4,
                tokens: Some(tokens),
                context: Some(128),
                queue: 64,
                prefix_cache,
                ..Room::of_one(storage, None)
            };
            let engine = steps(&model, &room, &machine, &mut |_| {}).unwrap();
            let engine = Engine::start(engine, &room.settings()).unwrap();
            let asked = |i: u32| {
                let length = [100, 3, 61, 120, 17, 90, 100, 32][i as usize % 8];
                let prompt: Vec<u32> = (0..length).map(|at| (at * at + i % 3) % 320).collect();
                let (seed, max_tokens) = (Some(u64::from(i)), Some(128 - prompt.len()));
                let sampling = Sampling { seed, max_tokens, logprobs: Some(2), ..Sampling::default() };
                engine.handle().submit(Request { n: 1 + i % 2, sampling, ..Request::new(prompt) }).unwrap()
            };
            let streams: Vec<Stream> = (0..16).map(asked).collect();
            let all = streams.into_iter().zip(0..);
            let answers: Vec<Answer> = all.map(|(mut s, i)| collect(&mut s, 1 + i % 2).0).collect();
            let handle = engine.handle();
            engine.drain(None);
            let stats = handle.stats();
            assert_eq!(stats.pages_free + stats.pages_cached, stats.pages, "pages are owned");
            (answers, stats)
        };
        let (want, stats) = answers(512, false);
        assert_eq!(stats.pages, 4 * 8);
        for prefix_cache in [false, true] {
            let (got, stats) = answers(24, prefix_cache);
            let windowed = 4 * each * (1 + usize::from(prefix_cache));
            assert_eq!(stats.pages, windowed + if every { 0 } else { 4 * 8 });
            assert!(got == want, "{name}: other answers, prefix cache {prefix_cache}");
            assert!(!prefix_cache || stats.scheduler.cache_hits > 0);
        }
    }
}

/// Vectors of texts, some longer than a step, beside answers and over few pages: those of the full forward in the interpreter, whatever
/// is beside them.
#[test]
fn vectors_are_those_of_the_full_forward() {
    let (machine, reference) = (host(2), Machine::new(Kind::Interpreter, 1).unwrap());
    let config = ModelConfig::parse(SMALL, "small").unwrap().config;
    let model = Model::fresh(config, vec![], 3);
    let texts: Vec<Vec<u32>> =
        [1, 128, 17, 70, 16, 3, 90, 33].map(|n| (0..n).map(|i| (i * i + n) % 320).collect()).into();
    for (storage, pooling, most) in [
        (DType::F32, Pooling::Last, 1e-5),
        (DType::F32, Pooling::Mean, 1e-5),
        (DType::BF16, Pooling::Mean, 3e-2),
    ] {
        let whole = Program { logits: Logits::Embedding(pooling), ..Program::full(1, 128) };
        let planned = plan(&model.config, &whole, DType::F32, &reference).unwrap();
        let mut whole = model.start(planned, &reference, &mut |_, _| {}).unwrap();
        let room = Room {
            sequences: 4,
            tokens: Some(24),
            kv: Some(KvMemory::Bytes(24 * KvCache::page_bytes(&model.config, Cache::PAGE, storage))),
            queue: 64,
            pooling: Some(pooling),
            ..Room::of_one(storage, None)
        };
        let engine =
            Engine::start(steps(&model, &room, &machine, &mut |_| {}).unwrap(), &Settings::default())
                .unwrap();
        let handle = engine.handle();
        let sampling = Sampling { temperature: 0.0, max_tokens: Some(40), ..Sampling::default() };
        let answers: Vec<Stream> = (0..3)
            .map(|i| {
                handle
                    .submit(Request { sampling: sampling.clone(), ..Request::new(vec![7 + i; 30]) })
                    .unwrap()
            })
            .collect();
        let vector = |mut stream: Stream| {
            let event = stream.blocking_recv().expect("an event");
            assert!(
                event.updates.is_empty() && matches!(event.end, Some(End::Finished(_))),
                "{:?}",
                event.end
            );
            event.vector.expect("a vector")
        };
        let asked =
            |text: &Vec<u32>| handle.submit(Request { embed: true, ..Request::new(text.clone()) }).unwrap();
        let together: Vec<Stream> = texts.iter().map(asked).collect();
        let together: Vec<Vec<f32>> = together.into_iter().map(vector).collect();
        answers.into_iter().for_each(|mut stream| {
            let (answer, end) = collect(&mut stream, 1);
            assert!(matches!(end, End::Finished(_)) && !answer[0].0.is_empty());
        });
        for (text, got) in texts.iter().zip(&together) {
            let ids: Vec<i64> = text.iter().map(|id| i64::from(*id)).collect();
            let batch = RaggedBatch::new(&[&ids], 320).unwrap();
            let want = whole.run(&batch.inputs(whole.inputs())).unwrap().remove(0).1.to_f32();
            let length = want.iter().map(|x| x * x).sum::<f32>().sqrt();
            let off = got.iter().zip(&want).map(|(a, b)| (a - b / length).powi(2)).sum::<f32>().sqrt();
            assert!(off < most, "{storage} {pooling:?} of {} tokens: off by {off}", text.len());
            let alone = vector(asked(text));
            assert!(pooling == Pooling::Mean || alone == *got, "{storage}: another vector alone");
        }
        let stats = handle.stats();
        assert_eq!(
            (stats.running, stats.waiting, stats.pages_free + stats.pages_cached),
            (0, 0, stats.pages)
        );
    }
}
