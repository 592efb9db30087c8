//! Adapters that requests choose by name, beside one another in a step.

use super::*;
use astrai_builders::config::Slots;
use astrai_engine::adapters::Reader;
use astrai_serve::engine::AdapterId;

/// Adapters by name, several in one step, some with parts that others have not: each answer is that of its adapter alone, in another slot, and
/// says what the merged weights say. Those without one are, bit for bit, those of a server without slots; and so they all are where pages
/// are few.
#[test]
fn adapters_beside_one_another_answer_as_alone() {
    let Some(lora) = case("lora") else { return };
    let machine = host(2);
    let base = Model::open(&lora.join("llama"), false).unwrap();
    let folders = ["llama_all", "llama_qv", "llama_rslora"].map(|name| lora.join(name));
    for storage in [DType::F32, DType::BF16] {
        let page: u64 = KvCache::page_bytes_apart(&base.config, Cache::PAGE, storage).iter().sum();
        let start = |slots: usize, sequences: usize, prefix_cache: bool, pages: Option<u64>| {
            let kv = pages.map(|pages| KvMemory::Bytes(pages * page));
            let adapters = (slots > 0).then_some(Slots { slots, rank: 8 });
            let room = Room {
                sequences: 6,
                tokens: Some(24),
                context: Some(64),
                queue: 64,
                kv,
                adapters,
                ..Room::of_one(storage, None)
            };
            let settings = Settings { sequences: Some(sequences), prefix_cache, ..Settings::default() };
            Engine::start(steps(&base, &room, &machine, &mut |_| {}).unwrap(), &settings).unwrap()
        };
        let config = |slots| ModelConfig { adapters: Some(Slots { slots, rank: 8 }), ..base.config.clone() };
        let load = |engine: &Engine, slots: usize, slot: u32, number: u64, folder: &Path| {
            let patch =
                Reader::new(&config(slots), storage, machine.backend()).unwrap().read(folder).unwrap();
            let adapter = AdapterId { slot, number };
            engine.handle().adapt(adapter, patch).blocking_recv().unwrap().unwrap();
            adapter
        };
        let ask = |engine: &Engine, i: u32, adapter: Option<AdapterId>| {
            let prompt = (0..40 - i % 3).map(|at| (at * at + i / 4) % 150).collect();
            let temperature = if i.is_multiple_of(2) { 0.0 } else { 1.0 };
            let (seed, max_tokens) = (Some(u64::from(i)), Some(20));
            let sampling =
                Sampling { temperature, seed, max_tokens, logprobs: Some(1), ..Sampling::default() };
            engine
                .handle()
                .submit(Request { n: 1 + i % 2, sampling, adapter, ..Request::new(prompt) })
                .unwrap()
        };
        // Request i is of adapter i % 4, where 3 is none; a prompt is asked of all of them.
        let alone: Vec<Answer> = {
            let engines: Vec<(Engine, Option<AdapterId>)> = (0..4)
                .map(|at| match folders.get(at) {
                    Some(folder) => {
                        let engine = start(2, 1, false, None);
                        let adapter = load(&engine, 2, 1, 9, folder);
                        (engine, Some(adapter))
                    }
                    None => (start(0, 1, false, None), None),
                })
                .collect();
            let one = |i: u32| {
                let (engine, adapter) = &engines[i as usize % 4];
                collect(&mut ask(engine, i, *adapter), 1 + i as usize % 2).0
            };
            (0..24).map(one).collect()
        };
        assert!((0..24).step_by(4).all(|i| alone[i] != alone[i + 3]), "an adapter changes nothing");
        for (prefix_cache, pages) in [(false, None), (true, None), (false, Some(9))] {
            let engine = start(3, 6, prefix_cache, pages);
            let all: Vec<AdapterId> =
                (0..3).map(|i| load(&engine, 3, 2 - i, i.into(), &folders[i as usize])).collect();
            let streams: Vec<Stream> =
                (0..24).map(|i| ask(&engine, i, all.get(i as usize % 4).copied())).collect();
            let all_of = streams.into_iter().zip(0..);
            let together: Vec<Answer> = all_of.map(|(mut s, i)| collect(&mut s, 1 + i % 2).0).collect();
            assert!(
                together == alone,
                "{storage}: other answers, prefix cache {prefix_cache}, {pages:?} pages"
            );
            let preempted = engine.handle().stats().scheduler.preemptions;
            assert!((preempted > 0) == pages.is_some(), "{preempted} preemptions");
            // What was loaded into its slot meanwhile is not what a request wants.
            load(&engine, 3, 2, 7, &folders[1]);
            let (_, end) = collect(&mut ask(&engine, 0, Some(all[0])), 1);
            assert!(matches!(&end, End::Failed(why) if why.contains("unloaded")), "{end:?}");
            let again = AdapterId { slot: 2, number: 7 };
            assert!(collect(&mut ask(&engine, 1, Some(again)), 2).0 == alone[1], "{storage}: loaded again");
        }
        if storage == DType::F32 {
            for (at, folder) in folders.iter().enumerate() {
                let merged = Model::open_adapted(&lora.join("llama"), Some(folder)).unwrap();
                let room = Room { tokens: Some(24), context: Some(64), ..Room::of_one(storage, None) };
                let steps = steps(&merged, &room, &machine, &mut |_| {}).unwrap();
                let engine = Engine::start(steps, &Settings::default()).unwrap();
                // Greedy ones, whose first tokens leave no doubt.
                for i in (0..24).filter(|i| i % 4 == at && i % 2 == 0) {
                    let got = collect(&mut ask(&engine, i as u32, None), 1).0;
                    let chosen = |t: &(u32, Option<Logprobs>)| t.1.as_ref().unwrap().chosen;
                    let pairs = got[0].0.iter().map(chosen).zip(alone[i][0].0.iter().map(chosen)).take(3);
                    let first = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                    assert!(first < 1e-3, "{}: off by {first}", folder.display());
                }
            }
        }
    }
}

/// Beside biases too: what is rounded where does not depend on slots.
#[test]
fn without_an_adapter_every_bit_is_the_bases() {
    let machine = Machine::new(Kind::Cpu, 2).unwrap();
    let with = |more: &str| format!("{}, {more}}}", SMALL.trim_end_matches('}'));
    let biased = with(r#""attention_bias": true, "mlp_bias": true"#);
    let qwen = SMALL.replace("\"llama\"", "\"qwen2\"");
    for config in [&biased, &qwen] {
        let config = ModelConfig::parse(config, "small").unwrap().config;
        let answers = |slots: Option<Slots>| {
            let model = Model::fresh(config.clone(), vec![], 3);
            let room = Room {
                sequences: 4,
                context: Some(64),
                queue: 64,
                adapters: slots,
                ..Room::of_one(DType::BF16, None)
            };
            let engine =
                Engine::start(steps(&model, &room, &machine, &mut |_| {}).unwrap(), &room.settings());
            let engine = engine.unwrap();
            let adapters = slots.map(|_| {
                let slotted = ModelConfig { adapters: slots, ..config.clone() };
                let patch = Reader::new(&slotted, DType::BF16, machine.backend())
                    .unwrap()
                    .drawn(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
                let adapter = AdapterId { slot: 1, number: 1 };
                engine.handle().adapt(adapter, patch).blocking_recv().unwrap().unwrap();
                adapter
            });
            let ask = |i: u32| {
                let sampling = Sampling {
                    temperature: 1.0,
                    seed: Some(i.into()),
                    max_tokens: Some(16),
                    logprobs: Some(3),
                    ..Sampling::default()
                };
                // Every other request has the adapter, where there is one.
                let adapter = adapters.filter(|_| i % 2 == 1);
                let prompt = (0..20 + i).map(|at| at * 7 % 320).collect();
                engine.handle().submit(Request { sampling, adapter, ..Request::new(prompt) }).unwrap()
            };
            let streams: Vec<Stream> = (0..8).map(ask).collect();
            streams.into_iter().map(|mut s| collect(&mut s, 1).0).collect::<Vec<Answer>>()
        };
        let (base, beside) = (answers(None), answers(Some(Slots { slots: 2, rank: 4 })));
        for (i, (base, beside)) in base.iter().zip(&beside).enumerate() {
            assert_eq!(base == beside, i % 2 == 0, "{} {i}", config.model_type);
        }
    }
}
