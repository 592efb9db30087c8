//! The targets: for each reader its inputs, and what must hold of one. A run gives `Ok` for an input that is accepted and the line
//! of refusal for one that is not; whatever else it does is a failure.

use crate::data;
use crate::estimates;
use crate::gguf;
use crate::mutate::{Draws, bytes, object, value};
use crate::server;
use crate::serving::{open_recommended, open_tokenizer, recommended, render, template, tokenizer};
use crate::structured::{answer, compile as compile_wanted, read_answer, wanted};
use astrai_builders::ModelConfig;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::plan;
use astrai_files::hex;
use astrai_ir::json::{from_json, to_json};
use astrai_ir::packing::{Awq, Blocks, Compressed, Gptq, Packing, Share};
use astrai_ir::{Code, DType, Graph};
use astrai_runtime::weights::{self, Checkpoint};
use astrai_runtime::{Options, WeightSource, compile};
use astrai_train::checkpoint::{TrainerState, open};
use astrai_train::data::Tokens;
use astrai_train::metrics;
use astrai_train::settings::{Partial, Settings};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// What runs an input.
pub type Run = Box<dyn FnMut(&[u8]) -> Result<(), String>>;

/// A reader under attack.
pub struct Target {
    pub name: &'static str,
    /// Inputs in an ordinary run of the tests: as many as take a second or two.
    pub inputs: u64,
    /// How many times longer than others an input may take.
    pub patience: u32,
    pub input: fn(&mut Draws) -> Vec<u8>,
    /// Makes what is needed, in a folder.
    pub run: fn(&Path) -> Run,
}

pub const TARGETS: [Target; 28] = [
    Target { name: "config", inputs: 20_000, patience: 1, input: config, run: |_| Box::new(read_config) },
    Target { name: "compile", inputs: 300, patience: 2, input: config, run: |_| Box::new(compile_config) },
    Target { name: "graph", inputs: 2_000, patience: 1, input: graph, run: |_| Box::new(read_graph) },
    Target { name: "program", inputs: 1_500, patience: 2, input: graph, run: |_| Box::new(compile_graph) },
    Target { name: "weights", inputs: 5_000, patience: 1, input: weights, run: open_weights },
    Target { name: "packed", inputs: 5_000, patience: 1, input: packed, run: open_packed },
    Target { name: "gguf", inputs: 3_000, patience: 1, input: gguf::input, run: gguf::run },
    Target { name: "index", inputs: 5_000, patience: 1, input: index, run: open_index },
    Target { name: "tokenizer", inputs: 1_000, patience: 1, input: tokenizer, run: open_tokenizer },
    Target { name: "template", inputs: 60, patience: 2, input: template, run: |_| Box::new(render) },
    Target { name: "answer", inputs: 5_000, patience: 1, input: answer, run: |_| Box::new(read_answer) },
    Target { name: "wanted", inputs: 200, patience: 4, input: wanted, run: |_| compile_wanted() },
    Target { name: "recommended", inputs: 5_000, patience: 1, input: recommended, run: open_recommended },
    Target {
        name: "settings",
        inputs: 5_000,
        patience: 1,
        input: settings,
        run: |_| Box::new(read_settings),
    },
    Target {
        name: "trainer",
        inputs: 2_000,
        patience: 1,
        input: trainer,
        run: |d| open_checkpoint(d, "trainer.json"),
    },
    Target {
        name: "manifest",
        inputs: 2_000,
        patience: 1,
        input: manifest,
        run: |d| open_checkpoint(d, "manifest.json"),
    },
    Target { name: "metrics", inputs: 5_000, patience: 1, input: rows, run: read_rows },
    Target { name: "meta", inputs: 5_000, patience: 1, input: meta, run: open_meta },
    Target { name: "shards", inputs: 3_000, patience: 1, input: shard, run: open_shard },
    Target { name: "hdf5", inputs: 1_000, patience: 2, input: data::hdf5, run: data::open_hdf5 },
    Target { name: "lines", inputs: 2_000, patience: 1, input: data::lines, run: data::open_lines },
    Target { name: "keyed", inputs: 3_000, patience: 1, input: data::keyed, run: data::open_keyed },
    Target { name: "record", inputs: 200, patience: 2, input: data::record, run: data::read_records },
    Target {
        name: "recipe",
        inputs: 5_000,
        patience: 1,
        input: data::config,
        run: |_| Box::new(data::read_config),
    },
    Target {
        name: "hardware",
        inputs: 3_000,
        patience: 1,
        input: estimates::hardware,
        run: |_| Box::new(estimates::read_hardware),
    },
    Target { name: "trace", inputs: 1_000, patience: 1, input: estimates::trace, run: estimates::open_trace },
    Target {
        name: "request",
        inputs: 400,
        patience: 4,
        input: server::request,
        run: |d| server::run(d, true),
    },
    Target { name: "wire", inputs: 100, patience: 4, input: server::wire, run: |d| server::run(d, false) },
];

pub fn shown<T>(read: Result<T, impl std::fmt::Display>) -> Result<T, String> {
    read.map_err(|e| e.to_string())
}

/// A golden case of the repository.
pub fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)
}

fn golden_config(name: &str) -> Value {
    let text = fs::read(golden(name).join("config.json")).expect("a golden case");
    serde_json::from_slice(&text).expect("JSON")
}

fn config(d: &mut Draws) -> Vec<u8> {
    let small = json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}});
    let experts = json!({"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true, "intermediate_size": 64});
    let latent = json!({"model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8,
        "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5});
    let all = [small, experts, latent, golden_config("llama")];
    object(&all[d.below(all.len())], d)
}

fn read_config(input: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(input);
    let read = shown(ModelConfig::parse(&text, "config.json"))?;
    let again = shown(ModelConfig::parse(&read.config.save().to_string(), "saved"))
        .unwrap_or_else(|e| panic!("what is saved is not read: {e}"));
    assert!(again.config == read.config, "what is saved is another model");
    Ok(())
}

fn compile_config(input: &[u8]) -> Result<(), String> {
    let config = shown(ModelConfig::parse(&String::from_utf8_lossy(input), "config.json"))?.config;
    shown(config.check_decoder())?;
    let machine = shown(Machine::new(Kind::Null, 2))?;
    let program = astrai_builders::Program::full(1, 8);
    shown(plan(&config, &program, DType::F32, &machine)).map(drop)
}

/// A graph of a little of everything, as JSON.
fn sound_graph() -> Value {
    let build = || -> Result<Graph, astrai_ir::IrError> {
        let mut g = Graph::new(vec![]);
        let x = g.input("x", DType::F32, vec![4.into(), 8.into()])?;
        let w = g.weight("w", DType::F32, &[6, 8])?;
        let y = g.linear(x, w)?;
        let y = g.scale(y, 0.5)?;
        let s = g.reduce(astrai_ir::ops::ReduceKind::Sum, y, &[1])?;
        let t = g.slice(y, 1, 0.into(), 2.into())?;
        let t = g.reshape(t, vec![8.into()])?;
        let t = g.cast(t, DType::BF16)?;
        g.set_output("s", s)?;
        g.set_output("t", t)?;
        Ok(g)
    };
    to_json(&build().expect("a graph"))
}

fn graph(d: &mut Draws) -> Vec<u8> {
    object(&sound_graph(), d)
}

fn read_graph(input: &[u8]) -> Result<(), String> {
    let value: Value = shown(serde_json::from_slice(input))?;
    let graph = shown(from_json(&value))?;
    let again = from_json(&to_json(&graph)).unwrap_or_else(|e| panic!("what is written is not read: {e}"));
    assert_eq!(again.nodes().len(), graph.nodes().len());
    Ok(())
}

fn compile_graph(input: &[u8]) -> Result<(), String> {
    let value: Value = shown(serde_json::from_slice(input))?;
    let graph = shown(from_json(&value))?;
    let machine = shown(Machine::new(Kind::Null, 2))?;
    shown(compile(&graph, machine.backend(), &Options::default())).map(drop)
}

fn sound_weights() -> Vec<u8> {
    let header = json!({"__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}});
    file_of(&header)
}

fn file_of(header: &Value) -> Vec<u8> {
    let text = header.to_string();
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &[7; 32]].concat()
}

fn weights(d: &mut Draws) -> Vec<u8> {
    match d.below(2) {
        0 => bytes(sound_weights(), d),
        _ => {
            let sound = sound_weights();
            let header = serde_json::from_slice(&sound[8..sound.len() - 32]).expect("JSON");
            file_of(&value(header, d))
        }
    }
}

/// Reads all that an opened checkpoint shows.
fn look(at: &Path) -> Result<(), String> {
    let checkpoint = shown(Checkpoint::open(at))?;
    for name in checkpoint.names() {
        let view = checkpoint.get(name).expect("a name that is listed");
        assert_eq!(view.bytes().len(), view.elements() * view.dtype().bytes());
        assert_eq!(view.shape().iter().product::<usize>(), view.elements());
        let _sum: u64 = view.bytes().iter().map(|b| u64::from(*b)).sum();
    }
    Ok(())
}

fn open_weights(folder: &Path) -> Run {
    let path = folder.join("model.safetensors");
    Box::new(move |input| {
        shown(fs::write(&path, input))?;
        look(&path)
    })
}

/// A format of packed weights, and the tensors of a matrix `[16, 64]` in it.
type Packed = (Packing, &'static [(&'static str, &'static str, &'static [usize])]);

const GROUP: Share = Share::Group(32);

const PACKED: [Packed; 4] = [
    (
        Packing::Gptq(Gptq { code: Code::Int4, share: GROUP, act_order: true, less_one: true }),
        &[
            ("qweight", "I32", &[8, 16]),
            ("qzeros", "I32", &[2, 2]),
            ("scales", "F16", &[2, 16]),
            ("g_idx", "I32", &[64]),
        ],
    ),
    (
        Packing::Awq(Awq { share: GROUP }),
        &[("qweight", "I32", &[64, 2]), ("qzeros", "I32", &[2, 2]), ("scales", "F16", &[2, 16])],
    ),
    (
        Packing::Compressed(Compressed { code: Code::Int4, packed: true, share: GROUP, zeros: true }),
        &[
            ("weight_packed", "I32", &[16, 8]),
            ("weight_shape", "I64", &[2]),
            ("weight_scale", "F16", &[16, 2]),
            ("weight_zero_point", "I32", &[2, 2]),
        ],
    ),
    (
        Packing::Fp8(Blocks { rows: 8, columns: 32 }),
        &[("weight", "F8_E4M3", &[16, 64]), ("weight_scale_inv", "F32", &[2, 2])],
    ),
];

fn packed(d: &mut Draws) -> Vec<u8> {
    let at = d.below(PACKED.len());
    let (mut header, mut end) = (Map::new(), 0);
    for (name, dtype, shape) in PACKED[at].1 {
        let width =
            [("F8_E4M3", 1), ("F16", 2), ("I64", 8)].iter().find(|w| w.0 == *dtype).map_or(4, |w| w.1);
        let from = end;
        end += shape.iter().product::<usize>() * width;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [from, end]});
        header.insert(format!("m.{name}"), entry);
    }
    let header = Value::Object(header);
    let file = |header: &Value| {
        let text = header.to_string();
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &vec![0; end]].concat()
    };
    let made = match d.below(2) {
        0 => bytes(file(&header), d),
        _ => file(&value(header, d)),
    };
    [&[at as u8][..], &made].concat()
}

/// Reads a matrix whole and in parts, where the file is taken for one that has it.
fn open_packed(folder: &Path) -> Run {
    let path = folder.join("model.safetensors");
    Box::new(move |input| {
        let (at, file) = input.split_first().ok_or("an empty input")?;
        shown(fs::write(&path, file))?;
        let (packing, _) = PACKED[usize::from(*at) % PACKED.len()];
        let wanted = [("m.weight".to_string(), vec![16, 64])].into_iter();
        let read =
            shown(weights::Packed::open(shown(Checkpoint::open(&path))?, packing, wanted, &|_| false))?;
        if read.packs("m.weight") {
            assert_eq!(read.tensor("m.weight").expect("it was checked").bytes.len(), 16 * 64 * 4);
            for part in read.narrow().parts() {
                let there = read.tensor(&part.of("m.weight")).is_some();
                assert_eq!(there, read.stays("m.weight"));
            }
        }
        Ok(())
    })
}

fn index(d: &mut Draws) -> Vec<u8> {
    let shard = |n| format!("model-0000{n}-of-00002.safetensors");
    object(
        &json!({"metadata": {"total_size": 64}, "weight_map": {"a": shard(1), "b": shard(1), "c": shard(2)}}),
        d,
    )
}

fn open_index(folder: &Path) -> Run {
    let one = json!({"c": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}});
    fs::write(folder.join("model-00001-of-00002.safetensors"), sound_weights()).expect("written");
    fs::write(folder.join("model-00002-of-00002.safetensors"), file_of(&one)).expect("written");
    let folder = folder.to_path_buf();
    Box::new(move |input| {
        shown(fs::write(folder.join("model.safetensors.index.json"), input))?;
        look(&folder)
    })
}

fn settings(d: &mut Draws) -> Vec<u8> {
    let sound = "lr = 1e-3\nsteps = 10\nbatch = 4\nseq = 128\noptimizer = 'adamw'\ndata = ['a', 'b']\nout = 'o'\n\
        schedule = 'cosine'\ndtype = 'bf16'\nbeta1 = 0.9\nclip = 1.0\nsave_every = 5\nspecial_tokens = ['<a>']\n";
    bytes(sound.into(), d)
}

fn read_settings(input: &[u8]) -> Result<(), String> {
    let text = shown(String::from_utf8(input.to_vec()))?;
    let _of_yaml = Partial::parse(&text, "run.yaml");
    shown(Partial::parse(&text, "run.toml")).map(drop)
}

fn state() -> Value {
    let state = TrainerState::new(Settings::default(), 100, "data".into(), "cc".into());
    serde_json::to_value(state).expect("JSON")
}

fn trainer(d: &mut Draws) -> Vec<u8> {
    object(&state(), d)
}

/// The files of a checkpoint and the manifest that they have, but for what an input takes the place of.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let weights = sound_weights();
    let config = golden_config("llama").to_string().into_bytes();
    vec![
        ("config.json", config),
        ("model.safetensors", weights.clone()),
        ("optimizer.safetensors", weights),
        ("trainer.json", state().to_string().into_bytes()),
    ]
}

fn manifest_of(files: &[(&str, Vec<u8>)]) -> Value {
    let record = |bytes: &[u8]| json!({"bytes": bytes.len(), "sha256": hex(Sha256::new_with_prefix(bytes))});
    let files: Map<String, Value> = files.iter().map(|(n, b)| (n.to_string(), record(b))).collect();
    json!({"format": 1, "step": 0, "files": files})
}

fn manifest(d: &mut Draws) -> Vec<u8> {
    object(&manifest_of(&files()), d)
}

fn open_checkpoint(folder: &Path, attacked: &'static str) -> Run {
    let folder = folder.join("step_000000");
    fs::create_dir_all(&folder).expect("a folder");
    let put = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).expect("written");
    files().iter().for_each(|(name, bytes)| put(name, bytes));
    put("manifest.json", manifest_of(&files()).to_string().as_bytes());
    shown(open(&folder)).unwrap_or_else(|e| panic!("the sound one is refused: {e}"));
    Box::new(move |input| {
        shown(fs::write(folder.join(attacked), input))?;
        if attacked == "trainer.json" {
            let mut all = files();
            all.retain(|(name, _)| *name != attacked);
            all.push((attacked, input.to_vec()));
            shown(fs::write(folder.join("manifest.json"), manifest_of(&all).to_string()))?;
        }
        shown(open(&folder)).map(drop)
    })
}

fn rows(d: &mut Draws) -> Vec<u8> {
    let row = json!({"step": 1, "epoch": 0.1, "tokens": 128, "loss": 5.5, "lr": 1e-3, "grad_norm": 1.0,
        "tokens_per_s": 1e3, "seconds": 0.1, "mfu": 0.2});
    let line = |d: &mut Draws| String::from_utf8_lossy(&object(&row, d)).into_owned() + "\n";
    let all = format!("{row}\n{}{{\"step\": 1, \"val_loss\": 5.0}}\n{}", line(d), line(d));
    bytes(all.into(), d)
}

fn read_rows(folder: &Path) -> Run {
    let path = folder.join("metrics.jsonl");
    Box::new(move |input| {
        shown(fs::write(&path, input))?;
        shown(metrics::read(&path)).map(drop)
    })
}

fn meta(d: &mut Draws) -> Vec<u8> {
    let sound = json!({"format": "astrai-tokens", "version": 1, "dtype": "uint16", "tokens": 100, "documents": 2,
        "vocab_size": 1000, "eos": 2, "shards": [{"file": "data_00000.bin", "tokens": 100}], "tokenizer": "00",
        "recognise": false, "fingerprint": "11", "sources": ["a"]});
    object(&sound, d)
}

/// Opens ids and reads them all.
fn all_ids(folder: &Path) -> Result<(), String> {
    let tokens = shown(Tokens::open(folder))?;
    shown(tokens.check(1000, &mut |_, _| {}))?;
    let mut ids = vec![0; tokens.len().min(1 << 16) as usize];
    shown(tokens.copy(0, &mut ids))?;
    assert!(ids.iter().all(|id| (0..1000).contains(id)));
    Ok(())
}

fn open_meta(folder: &Path) -> Run {
    let ids: Vec<u8> = (0..100u16).flat_map(u16::to_le_bytes).collect();
    fs::write(folder.join("data_00000.bin"), ids).expect("written");
    let folder = folder.to_path_buf();
    Box::new(move |input| {
        shown(fs::write(folder.join("meta.json"), input))?;
        all_ids(&folder)
    })
}

fn shard(d: &mut Draws) -> Vec<u8> {
    bytes((0..400u16).flat_map(|i| (i % 300).to_le_bytes()).collect(), d)
}

fn open_shard(folder: &Path) -> Run {
    fs::write(folder.join("meta.json"), r#"{"dtype": "uint16", "vocab_size": 1000}"#).expect("written");
    let folder = folder.to_path_buf();
    Box::new(move |input| {
        shown(fs::write(folder.join("data.bin"), input))?;
        all_ids(&folder)
    })
}
