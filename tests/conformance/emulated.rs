//! CUDA devices on the emulated driver: whole models, recordings, memory, two devices at once.

use crate::cases::case;
use crate::driver::{Emulated, QUICK, checks_everything, emulated};
use crate::serving::{Answer, SMALL, collect};
use astrai_builders::config::Slots;
use astrai_builders::{ModelConfig, Program};
use astrai_engine::adapters::Reader;
use astrai_engine::batch::RaggedBatch;
use astrai_engine::golden::Golden;
use astrai_engine::serving::{Room, steps};
use astrai_engine::{Machine, Model, unheard};
use astrai_ir::DType;
use astrai_runtime::device::cuda::Cuda;
use astrai_runtime::device::{Device, KernelCache, Space};
use astrai_runtime::{Error, Session};
use astrai_serve::engine::{AdapterId, Engine, Model as Steps, ModelError, Sizes, Stream};
use astrai_serve::paged::PagedModel;
use astrai_serve::request::{Request, Sampling};
use astrai_serve::scheduler::plan::StepPlan;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Bytes of each emulated device.
const MEMORY: usize = 256 << 20;

/// Devices of these numbers; kernels are kept between runs of the tests.
pub fn device(ordinal: usize) -> Option<Arc<Cuda>> {
    let nvrtc = load(emulated()?);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels");
    Some(Arc::new(Cuda::open(ordinal, 2, nvrtc, KernelCache::open(&folder).unwrap()).unwrap()))
}

#[test]
fn golden_cases_give_the_references_numbers() {
    let Some(device) = device(0) else { return };
    let machine = Machine::over(device);
    // Those in f32 `astrai verify` holds to more than this, of every family in continuous integration.
    let all = [("qwen3", DType::BF16), ("llama", DType::F32), ("deepseek_v3", DType::F32)];
    for (name, storage) in all.into_iter().filter(|c| checks_everything() || c.1 == DType::BF16) {
        let Some(path) = case(name) else { continue };
        let model = Model::open(&path, false).unwrap();
        let golden = Golden::open(&path.join("golden.safetensors"), &model, &machine, storage).unwrap();
        let mut rows = golden.forward(true, true, &mut unheard).unwrap();
        rows.push(golden.greedy(&mut unheard).unwrap());
        if storage == DType::F32 {
            rows.push(golden.gradients(&mut unheard).unwrap());
        }
        rows.iter().for_each(|row| assert_eq!(row.verdict, "ok", "{name} {storage}: {row:?}"));
    }
}

fn session(model: &Model, machine: &Machine) -> Session {
    model.session(&Program::full(2, 8), DType::F32, machine, &mut |_, _| {}).unwrap()
}

/// Bytes of the results of a small run.
fn run(session: &mut Session, vocabulary: usize) -> Vec<Vec<u8>> {
    let batch = RaggedBatch::new(&[&[1, 2, 3], &[4, 5]], vocabulary).unwrap();
    let results = session.run(&batch.inputs(session.inputs())).unwrap();
    results.into_iter().map(|(_, v)| v.bytes).collect()
}

#[test]
fn two_devices_in_one_process_give_the_same_bits_eager_and_recorded() {
    let Some(path) = case("llama") else { return };
    let (Some(first), Some(second)) = (device(0), device(1)) else { return };
    let model = Model::open(&path, false).unwrap();
    let mut sessions = [first, second].map(|device| session(&model, &Machine::over(device)));
    let want = run(&mut sessions[0], model.config.vocab_size);
    for _ in 0..3 {
        for session in &mut sessions {
            assert!(run(session, model.config.vocab_size) == want);
        }
    }
    // From threads at once.
    std::thread::scope(|s| {
        for session in &mut sessions {
            let (want, vocabulary) = (&want, model.config.vocab_size);
            s.spawn(move || (0..3).for_each(|_| assert!(run(session, vocabulary) == *want)));
        }
    });
}

#[test]
fn memory_is_zero_given_back_and_given_out_again() {
    let Some(device) = device(0) else { return };
    let read = |at, len| {
        let mut bytes = vec![1; len];
        device.read(at, &mut bytes).unwrap();
        bytes
    };
    // Beyond one piece of pinned memory, and not a multiple of anything.
    let len = (9 << 20) + 13;
    let block = device.alloc(&[len, 7, 0]).unwrap();
    assert!(read(block[0].at(), len).iter().all(|b| *b == 0));
    let pattern: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8).collect();
    device.write(block[0].at(), &pattern).unwrap();
    device.write(block[1].at(), &[9; 7]).unwrap();
    assert!(read(block[0].at(), len) == pattern && read(block[1].at(), 7) == [9; 7]);
    // Within it, over what lies there, behind a copy that is still on its way.
    let (at, part) = (block[0].at(), 1 << 20);
    device.fill(at, part, &mut |bytes| bytes.fill(3)).unwrap();
    device.copy(at, at.offset(5 << 20), part).unwrap();
    let whole = read(at, len);
    let (changed, rest) = ([0..part, 5 << 20..(5 << 20) + part], [part..5 << 20, (5 << 20) + part..len]);
    assert!(changed.into_iter().all(|r| whole[r].iter().all(|b| *b == 3)));
    assert!(rest.into_iter().all(|r| whole[r.clone()] == pattern[r]));
    let used = device.memory_use().unwrap();
    assert!(used.used >= len as u64 && used.taken == 1, "{used:?}");
    drop(block);
    let again = device.alloc(&[len]).unwrap();
    assert!(read(again[0].at(), len).iter().all(|b| *b == 0), "memory that was used before is not zero");
    let after = device.memory_use().unwrap();
    assert_eq!((after.taken, after.reused), (1, 1), "{after:?}");
    drop(again);
    assert_eq!(device.memory_use().unwrap().used, 0);
    // More than there is.
    for lens in [&[1usize << 50][..], &[usize::MAX, 1]] {
        let error = device.alloc(lens).map(|_| ()).unwrap_err();
        let line = error.to_string();
        assert!(matches!(error, Error::Memory { .. }) && line.contains("--kv-memory"), "{line}");
    }
    assert!(device.alloc(&[64]).is_ok(), "a device that was asked for too much goes on");
}

/// Of a device that nothing else uses here: what is kept goes back to the driver where memory is short.
#[test]
fn kept_memory_goes_back_where_more_is_wanted() {
    let Some(device) = device(2) else { return };
    let (first, second) = (MEMORY / 8 * 5, MEMORY / 4 * 3);
    drop(device.alloc(&[first]).unwrap());
    assert!(device.memory_use().unwrap().kept >= first as u64);
    let block = device.alloc(&[second]).unwrap();
    let now = device.memory_use().unwrap();
    assert!((now.taken, now.reused, now.kept) == (2, 0, 0) && now.used >= second as u64, "{now:?}");
    let mut end = [1; 64];
    device.read(block[0].at().offset(second as u64 - 64), &mut end).unwrap();
    assert_eq!(end, [0; 64]);
    assert!(device.alloc(&[first]).is_err(), "what is in use does not go");
}

/// A panic while a run is recorded leaves the thread as it was.
#[test]
fn after_a_panic_in_a_recording_launches_run_again() {
    let (Some(path), Some(device)) = (case("llama"), device(0)) else { return };
    let model = Model::open(&path, false).unwrap();
    let mut session = session(&model, &Machine::over(device.clone()));
    let want = run(&mut session, model.config.vocab_size);
    let panics = || device.record(&mut || panic!("as asked"), false);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    // Eager, recorded, and replayed.
    for _ in 0..3 {
        assert!(run(&mut session, model.config.vocab_size) == want);
    }
}

#[test]
fn a_session_gives_everything_back() {
    let (Some(path), Some(device)) = (case("llama"), device(0)) else { return };
    let (model, machine) = (Model::open(&path, false).unwrap(), Machine::over(device.clone()));
    let mut session = session(&model, &machine);
    run(&mut session, model.config.vocab_size);
    assert!(device.memory_use().unwrap().used > 0);
    drop(session);
    assert_eq!(device.memory_use().unwrap().used, 0);
}

/// A model whose tokens are drawn on the host.
struct OnHost(PagedModel);

impl Steps for OnHost {
    fn sizes(&self) -> Sizes {
        self.0.sizes()
    }

    fn plan(&self) -> StepPlan {
        self.0.plan()
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        self.0.step(plan, logits)
    }
}

/// Answers to requests side by side, and the bytes that the device of this number copied to the host for them.
fn answers(engine: Engine, ordinal: usize, asked: &[Sampling]) -> (Vec<Answer>, u64) {
    let before = bytes_to_host(ordinal);
    let ask = |(sampling, i): (&Sampling, u32)| {
        let sampling =
            Sampling { seed: Some(u64::from(i)), max_tokens: Some(6), ignore_eos: true, ..sampling.clone() };
        engine.handle().submit(Request { sampling, ..Request::new(vec![7 + i, 3, 11 * i]) }).unwrap()
    };
    let mut streams: Vec<_> = asked.iter().zip(0..).map(ask).collect();
    let answers: Vec<Answer> = streams.iter_mut().map(|stream| collect(stream, 1).0).collect();
    engine.drain(None);
    assert!(answers.iter().all(|answer| answer[0].0.len() == 6));
    (answers, bytes_to_host(ordinal) - before)
}

/// Of rows that the device draws come tokens, four bytes each, and nothing else; of others their logits, too. The tokens are those that the
/// host draws of the same logits, in recorded steps as well.
#[test]
fn a_step_brings_back_tokens_alone_and_they_are_the_hosts() {
    const ALONE: usize = 3;
    let Some(device) = device(ALONE) else { return };
    let machine = Machine::over(device);
    let model = Model::fresh(ModelConfig::parse(SMALL, "small").unwrap().config, vec![], 3);
    let room = Room { sequences: 6, context: Some(32), queue: 8, ..Room::of_one(DType::F32, None) };
    let steps = || steps(&model, &room, &machine, &mut |_| {}).unwrap();
    let plain = Sampling { temperature: 1.5, ..Sampling::default() };
    let drawn = [
        Sampling { temperature: 0.0, ..plain.clone() },
        plain.clone(),
        Sampling { top_k: 9, ..plain.clone() },
        Sampling { top_p: 0.3, ..plain.clone() },
        Sampling { top_k: 40, top_p: 0.8, ..plain.clone() },
        Sampling { min_p: 0.2, top_p: 0.9, ..plain.clone() },
    ];
    let adjusted = [
        Sampling { logprobs: Some(2), ..plain.clone() },
        Sampling { frequency_penalty: 0.5, ..plain.clone() },
        Sampling { logit_bias: vec![(9, 3.0)], ..plain.clone() },
    ];
    let row = 4 * model.config.vocab_size as u64;
    for (asked, logits) in [(drawn.to_vec(), 0), ([&drawn[..3], &adjusted].concat(), 3)] {
        let (got, bytes) = answers(Engine::start(steps(), &room.settings()).unwrap(), ALONE, &asked);
        assert_eq!(bytes, 6 * (4 * asked.len() as u64 + logits * row));
        let (want, more) = answers(Engine::start(OnHost(steps()), &room.settings()).unwrap(), ALONE, &asked);
        assert!(got == want && more == 6 * asked.len() as u64 * (4 + row), "{got:?}\n{want:?}");
    }
}

/// What a request that names an adapter is answered is what the merged weights say, and without one what the base says.
#[test]
fn a_named_adapter_is_that_of_the_merged_weights() {
    if !checks_everything() {
        return println!("skipped: with CI=true adapters are named on the emulated GPU, too");
    }
    let (Some(lora), Some(device)) = (case("lora"), device(0)) else { return };
    let machine = Machine::over(device);
    let (base, folder) = (Model::open(&lora.join("llama"), false).unwrap(), lora.join("llama_all"));
    let start = |model: &Model, adapters: Option<Slots>| {
        let room =
            Room { sequences: 2, context: Some(32), queue: 8, adapters, ..Room::of_one(DType::F32, None) };
        Engine::start(steps(model, &room, &machine, &mut |_| {}).unwrap(), &room.settings()).unwrap()
    };
    let slots = Slots { slots: 2, rank: 8 };
    let named = start(&base, Some(slots));
    let config = ModelConfig { adapters: Some(slots), ..base.config.clone() };
    let patch = Reader::new(&config, DType::F32, machine.backend()).unwrap().read(&folder).unwrap();
    let adapter = AdapterId { slot: 1, number: 1 };
    named.handle().adapt(adapter, patch).blocking_recv().unwrap().unwrap();
    let ask = |engine: &Engine, adapter: Option<AdapterId>| {
        let sampling =
            Sampling { temperature: 0.0, max_tokens: Some(3), logprobs: Some(1), ..Sampling::default() };
        engine.handle().submit(Request { sampling, adapter, ..Request::new(vec![5, 9, 40, 2]) }).unwrap()
    };
    let shown = |mut stream: Stream| {
        let answer = collect(&mut stream, 1).0.remove(0).0;
        answer.into_iter().map(|(token, of)| (token, of.unwrap().chosen)).collect::<Vec<_>>()
    };
    // Side by side in one step.
    let together = [ask(&named, Some(adapter)), ask(&named, None)].map(shown);
    let merged = Model::open_adapted(&lora.join("llama"), Some(&folder)).unwrap();
    for (got, model) in together.iter().zip([&merged, &base]) {
        let want = shown(ask(&start(model, None), None));
        let near = |(a, b): (&(u32, f32), &(u32, f32))| a.0 == b.0 && (a.1 - b.1).abs() < 1e-3;
        assert!(got.len() == 3 && got.iter().zip(&want).all(near), "{got:?} {want:?}");
    }
    assert_ne!(together[0], together[1], "the adapter changes nothing");
}

/// Bytes that a device copied to the host.
fn bytes_to_host(ordinal: usize) -> u64 {
    use libloading::os::unix::{Library, RTLD_NOW};
    let driver = emulated().unwrap();
    // SAFETY: it is loaded already, as by `load`.
    let library = unsafe { Library::open(Some(driver.folder.join("libcuda.so.1")), RTLD_NOW) }.unwrap();
    // SAFETY: the symbol's type.
    let count = unsafe { library.get::<extern "C" fn(usize) -> u64>(b"astrai_ptx_bytes_to_host") }.unwrap();
    count(ordinal)
}

/// Loads the driver into this process, where `cudarc` then finds it by its name; the compiler is given.
fn load(driver: &Emulated) -> astrai_runtime::device::cuda::Nvrtc {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        // SAFETY: Rust's own readers of the environment take turns, and the library reads it later, when it is first called.
        unsafe { std::env::set_var("ASTRAI_PTX_DEVICES", "4") };
        // SAFETY: as above.
        unsafe { std::env::set_var("ASTRAI_PTX_MEMORY", MEMORY.to_string()) };
        // SAFETY: our own library, whose initialisers do nothing.
        let library =
            unsafe { Library::open(Some(driver.folder.join("libcuda.so.1")), RTLD_NOW | RTLD_GLOBAL) };
        std::mem::forget(library.unwrap());
    });
    astrai_runtime::device::cuda::Nvrtc::open(&driver.nvrtc).unwrap().with(QUICK)
}
