//! AstrAI's encoder against plain loops in f64 over the same weights: every pooling, with and without norms of queries and
//! keys, gate and normalisation; ragged batches; `astrai run --want embedding`; and what an encoder refuses.

use crate::machines::{host, on};
use astrai_builders::config::Pooling;
use astrai_builders::{Logits, Loss, ModelConfig, Program};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::{Model, plan};
use astrai_engine::serving::{Room, steps};
use astrai_ir::DType;
use astrai_runtime::weights::{Checkpoint, write};
use astrai_runtime::{Session, Value};
use astrai_serve::engine::{Engine, Settings};
use astrai_serve::request::Request;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name, and the keys beyond the sizes.
const CASES: [(&str, &str); 3] = [
    ("mean", r#""pooling_type": "mean""#),
    (
        "cls",
        r#""pooling_type": "cls", "normalize_embeddings": true, "use_qk_norm": true, "use_gated_attention": true"#,
    ),
    (
        "last",
        r#""pooling_type": "last", "normalize_embeddings": true, "use_qk_norm": true,
        "rope_scaling": {"type": "ntk", "factor": 2.0}"#,
    ),
];

const VOCAB: usize = 50;

/// A model directory with drawn weights, by `test` of its own: tests run side by side.
fn folder(test: &str, name: &str, keys: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("encoder").join(test).join(name);
    std::fs::create_dir_all(&dir).unwrap();
    let text = format!(
        r#"{{"model_type": "embedding", "vocab_size": {VOCAB}, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, {keys}}}"#
    );
    std::fs::write(dir.join("config.json"), &text).unwrap();
    let config = ModelConfig::parse(&text, "config.json").unwrap().config;
    let drawn: Vec<_> = config.tensors().into_iter().map(|t| (draw(&t.name, &t.shape), t)).collect();
    let tensors = drawn.iter().map(|(v, t)| (t.name.as_str(), DType::F32, &t.shape[..], v.bytes.as_slice()));
    write(&dir.join("model.safetensors"), tensors, &BTreeMap::new()).unwrap();
    dir
}

/// Numbers that follow from a name: norms around one, matrices around zero.
fn draw(name: &str, shape: &[usize]) -> Value {
    let mut state = name.bytes().fold(7u64, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    };
    let centre = if shape.len() == 1 { 1.0 } else { 0.0 };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| centre + 0.8 * next()).collect();
    Value::f32(shape, &values)
}

fn sequences() -> Vec<Vec<i64>> {
    [1usize, 17, 5].iter().map(|&n| (0..n).map(|i| ((i * 31 + n * 7) % VOCAB) as i64).collect()).collect()
}

fn session(dir: &Path, device: Kind, storage: DType) -> Session {
    let model = Model::open(dir, true).unwrap();
    let machine = on(device, 2);
    let program = Program { logits: Logits::None, loss: Loss::None, ..Program::full(3, 32) };
    let planned = plan(&model.config, &program, storage, &machine).unwrap();
    let kernels = planned.kernels.iter().all(Option::is_some);
    assert!(kernels || machine.cpu.is_none(), "a region has no kernel");
    model.start(planned, &machine, &mut |_, _| {}).unwrap()
}

fn run(session: &mut Session, sequences: &[Vec<i64>]) -> Value {
    let rows: Vec<&[i64]> = sequences.iter().map(Vec::as_slice).collect();
    let batch = RaggedBatch::new(&rows, VOCAB).unwrap();
    let (name, value) = session.run(&batch.inputs(session.inputs())).unwrap().remove(0);
    assert_eq!((name.as_str(), value.shape.as_slice()), ("embedding", &[rows.len(), 24][..]));
    value
}

/// The model again, in loops.
struct Reference {
    config: ModelConfig,
    weights: HashMap<String, Vec<f64>>,
}

impl Reference {
    fn open(dir: &Path) -> Reference {
        let config = ModelConfig::read(dir).unwrap().config;
        let file = Checkpoint::open(dir).unwrap();
        let values = |name: &str| {
            let view = file.get(name).unwrap();
            let mut all = vec![0.0; view.elements()];
            view.to_f32(&mut all).unwrap();
            all.into_iter().map(f64::from).collect()
        };
        let weights = file.names().map(|n| (n.to_string(), values(n))).collect();
        Reference { config, weights }
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = &self.weights[name];
        w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let by = 1.0 / (mean + self.config.norm_eps).sqrt();
        x.iter().zip(&self.weights[name]).map(|(v, w)| v * by * w).collect()
    }

    /// One head turned by its position, pairs side by side, and normed after that where the model norms.
    fn turn(&self, norm: &str, head: &[f64], position: usize) -> Vec<f64> {
        let d = head.len() as f64;
        let ntk = self.config.layers[0].attention.rope.scaling != astrai_builders::config::RopeScaling::None;
        let base = if ntk { 10_000.0 * 2f64.powf(d / (d - 2.0)) } else { 10_000.0 };
        let mut out = head.to_vec();
        for (j, pair) in out.chunks_mut(2).enumerate() {
            let angle = position as f64 * base.powf(-2.0 * j as f64 / d);
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * angle.cos() - b * angle.sin();
            pair[1] = a * angle.sin() + b * angle.cos();
        }
        if self.weights.contains_key(norm) { self.norm(norm, &out) } else { out }
    }

    /// The attention of layer `l` on normed rows.
    fn attend(&self, l: usize, n: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let at = |part: &str| format!("layers.{l}.attention.{part}.weight");
        let (d, shared) = (self.config.head_dim, self.config.heads / self.config.kv_heads);
        let heads = |part: &str| -> Vec<Vec<f64>> { n.iter().map(|x| self.linear(&at(part), x)).collect() };
        let turned = |part: &str, norm: &str| -> Vec<Vec<f64>> {
            let row =
                |(i, x): (usize, &Vec<f64>)| x.chunks(d).flat_map(|h| self.turn(&at(norm), h, i)).collect();
            heads(part).iter().enumerate().map(row).collect()
        };
        let (q, k, v) = (turned("q_proj", "q_norm"), turned("k_proj", "k_norm"), heads("v_proj"));
        let mut out = vec![vec![0.0; self.config.heads * d]; n.len()];
        for (i, row) in out.iter_mut().enumerate() {
            for h in 0..self.config.heads {
                let g = h / shared;
                let dot = |j: usize| (0..d).map(|e| q[i][h * d + e] * k[j][g * d + e]).sum::<f64>();
                let weights: Vec<f64> = (0..n.len()).map(|j| (dot(j) / (d as f64).sqrt()).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for e in 0..d {
                    row[h * d + e] = (0..n.len()).map(|j| weights[j] / sum * v[j][g * d + e]).sum();
                }
            }
            if self.weights.contains_key(&at("gate")) {
                let gate = self.linear(&at("gate"), &n[i]);
                row.iter_mut().zip(gate).for_each(|(x, g)| *x /= 1.0 + (-g).exp());
            }
        }
        out.iter().map(|x| self.linear(&at("o_proj"), x)).collect()
    }

    fn embed(&self, ids: &[i64]) -> Vec<f64> {
        let hidden = self.config.hidden_size;
        let table = &self.weights["embed_tokens.weight"];
        let mut x: Vec<Vec<f64>> =
            ids.iter().map(|&t| table[t as usize * hidden..][..hidden].to_vec()).collect();
        let add = |x: &mut [Vec<f64>], y: Vec<Vec<f64>>| {
            x.iter_mut().zip(y).for_each(|(a, b)| a.iter_mut().zip(b).for_each(|(a, b)| *a += b));
        };
        for l in 0..self.config.num_layers {
            let at = |part: &str| format!("layers.{l}.{part}.weight");
            let n: Vec<_> = x.iter().map(|r| self.norm(&at("input_norm"), r)).collect();
            add(&mut x, self.attend(l, &n));
            let mlp = |r: &Vec<f64>| {
                let n = self.norm(&at("post_attention_norm"), r);
                let (gate, up) = (self.linear(&at("mlp.gate"), &n), self.linear(&at("mlp.up"), &n));
                let h: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                self.linear(&at("mlp.down"), &h)
            };
            let y = x.iter().map(mlp).collect();
            add(&mut x, y);
        }
        let rows: Vec<_> = x.iter().map(|r| self.norm("norm.weight", r)).collect();
        let encoder = self.config.encoder.unwrap();
        let mut one = match encoder.pooling {
            Pooling::Cls => rows[0].clone(),
            Pooling::Last => rows[rows.len() - 1].clone(),
            Pooling::Mean => {
                (0..hidden).map(|e| rows.iter().map(|r| r[e]).sum::<f64>() / rows.len() as f64).collect()
            }
        };
        if encoder.normalise {
            let length = one.iter().map(|v| v * v).sum::<f64>().sqrt();
            one.iter_mut().for_each(|v| *v /= length);
        }
        one
    }
}

#[test]
fn vectors_are_those_of_plain_loops() {
    for (name, keys) in CASES {
        let dir = folder("loops", name, keys);
        let reference = Reference::open(&dir);
        let want: Vec<f64> = sequences().iter().flat_map(|s| reference.embed(s)).collect();
        let top = want.iter().fold(0f64, |m, x| m.max(x.abs()));
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        for device in [Kind::Cpu, Kind::Interpreter] {
            let got = run(&mut session(&dir, device, DType::F32), &sequences()).to_f32();
            let off = got.iter().zip(&want).fold(0f64, |m, (a, b)| m.max((f64::from(*a) - b).abs()));
            assert!(off <= 1e-5 * top, "{name} {device:?}: off by {off} of {top}");
        }
        let got = run(&mut session(&dir, Kind::Cpu, DType::BF16), &sequences()).to_f32();
        let off = norm(&mut got.iter().zip(&want).map(|(a, b)| f64::from(*a) - b))
            / norm(&mut want.iter().copied());
        assert!(off < 3e-2, "{name}: bf16 off by {off}");
    }
}

#[test]
fn a_sequence_has_one_vector_whatever_is_beside_it() {
    for (name, keys) in CASES {
        let dir = folder("ragged", name, keys);
        for storage in [DType::F32, DType::BF16] {
            let mut session = session(&dir, Kind::Cpu, storage);
            let together = run(&mut session, &sequences()).bytes;
            let alone: Vec<u8> =
                sequences().into_iter().flat_map(|s| run(&mut session, &[s]).bytes).collect();
            assert!(together == alone, "{name} {storage}");
        }
    }
}

/// More texts than a step takes, through the engine: those of plain loops, of length 1. There are no answers.
#[test]
fn an_encoder_is_served() {
    for (name, keys) in CASES {
        let dir = folder("served", name, keys);
        let (reference, model) = (Reference::open(&dir), Model::open(&dir, true).unwrap());
        let machine = host(2);
        let room = Room { sequences: 3, tokens: Some(40), queue: 64, ..Room::of_one(DType::F32, None) };
        let steps = steps(&model, &room, &machine, &mut |_| {}).unwrap();
        let engine = Engine::start(steps, &Settings::default()).unwrap();
        let handle = engine.handle();
        assert_eq!((handle.limits().context, handle.embedding()), (40, Some(24)));
        let texts: Vec<Vec<u32>> =
            (1..=40).map(|n| (0..n * 7 % 41).map(|i| (i * i + n) % VOCAB as u32).collect()).collect();
        let asked = texts.iter().filter(|text| !text.is_empty()).map(|text| {
            let request = Request { embed: true, ..Request::new(text.clone()) };
            (text, handle.submit(request).unwrap())
        });
        let asked: Vec<_> = asked.collect();
        for (text, mut stream) in asked {
            let got = stream.blocking_recv().unwrap().vector.unwrap();
            let ids: Vec<i64> = text.iter().map(|id| i64::from(*id)).collect();
            let want = reference.embed(&ids);
            let length = want.iter().map(|x| x * x).sum::<f64>().sqrt();
            let off = got.iter().zip(&want).fold(0f64, |m, (a, b)| m.max((f64::from(*a) - b / length).abs()));
            assert!(off < 1e-5, "{name}: {} tokens are off by {off}", text.len());
        }
        let none = handle.submit(Request::new(vec![1])).unwrap_err();
        assert!(none.to_string().contains("encoder"), "{none}");
        let wrong = Room { pooling: Some(Pooling::Mean), ..room };
        let line = steps_of(&model, &wrong, &machine);
        assert!(line.contains("--embeddings"), "{line}");
    }
}

fn steps_of(model: &Model, room: &Room, machine: &Machine) -> String {
    steps(model, room, machine, &mut |_| {}).err().map_or(String::new(), |e| e.to_string())
}

fn astrai(args: &[&str]) -> Result<String, String> {
    let mut c = Command::new(env!("CARGO_BIN_EXE_astrai"));
    c.args(args);
    let out = c.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if out.status.success() { Ok(text(out.stdout)) } else { Err(text(out.stderr)) }
}

#[test]
fn the_command_line_gives_vectors_and_refuses_the_rest() {
    let (name, keys) = CASES[0];
    let dir = folder("cli", name, keys);
    let (inputs, outputs) = (dir.join("in.safetensors"), dir.join("out.safetensors"));
    let ids: Vec<i64> = (0..12).map(|i| i * 5 % VOCAB as i64).collect();
    let bytes: Vec<u8> = ids.iter().flat_map(|i| i.to_le_bytes()).collect();
    write(&inputs, [("input_ids", DType::I64, &[2, 6][..], &bytes[..])], &BTreeMap::new()).unwrap();
    let path = |p: &PathBuf| p.to_str().unwrap().to_string();
    let (model, inputs, outputs) = (path(&dir), path(&inputs), path(&outputs));
    let run_of = ["run", &model, "--inputs", &inputs, "--outputs", &outputs];
    let reference = Reference::open(&dir);
    let want: Vec<f64> = ids.chunks(6).flat_map(|s| reference.embed(s)).collect();
    for flags in [&[][..], &["--want", "embedding"]] {
        let said = astrai(&[&run_of[..], flags].concat()).unwrap();
        assert!(said.starts_with("embedding f32 [2, 24]\n"), "{said}");
        let file = Checkpoint::open(Path::new(&outputs)).unwrap();
        let mut got = vec![0.0; 48];
        file.get("embedding").unwrap().to_f32(&mut got).unwrap();
        assert!(got.iter().zip(&want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-4), "{got:?}");
    }
    let own = format!("{model}/model.safetensors");
    let line = astrai(&["run", &model, "--inputs", &inputs, "--outputs", &own]).unwrap_err();
    assert!(line.contains("model.safetensors is read, or part of what is"), "{line}");
    let compiled = astrai(&["compile", &model, "--seq", "32", "--strict"]).unwrap();
    assert!(compiled.contains("kernels"), "{compiled}");
    let config = format!("{model}/config.json");
    for args in [
        &[&run_of[..], &["--want", "embedding,logits"]].concat()[..],
        &[&run_of[..], &["--want", "grads"]].concat(),
        &["generate", &model, "--prompt", "a"],
        &["chat", &model],
        &["verify", &model, "--golden", &outputs],
        &["compile", &model, "--for", "decode"],
        &["compile", &model, "--for", "train"],
        &["train", "--config", &config, "--data", &model, "--out", &format!("{model}/run")],
    ] {
        let line = astrai(args).unwrap_err();
        assert!(line.contains("`embedding` is an encoder") && line.lines().count() == 1, "{args:?}: {line}");
    }
    let llama = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama");
    let of_llama =
        ["run", llama.to_str().unwrap(), "--inputs", &inputs, "--outputs", &outputs, "--want", "embedding"];
    let line = astrai(&of_llama).unwrap_err();
    assert!(line.contains("`llama` is no encoder"), "{line}");
}
