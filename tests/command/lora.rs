//! Adapters as users meet them: `astrai verify` of those that PEFT made, runs that train one, and what others read of it.

use crate::cases::case;
use crate::cli::altered;
use crate::train::fixture::{beside, fails, good, losses, program, refused, shared};
use crate::train::strategies::records;
use astrai_runtime::weights::Checkpoint;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

fn verify(folder: &Path) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_astrai"));
    c.arg("verify").arg(folder).env("PATH", crate::quick::path());
    c
}

/// q and v, all linear layers, another scale, magnitudes; and what is wrong with an adapter, by name.
#[test]
fn adapters_are_verified_and_refused() {
    let Some(lora) = case("lora") else { return };
    for name in ["llama_all", "llama_qv", "llama_rslora", "qwen3_all", "qwen3_dora", "qwen3_qv"] {
        let out = verify(&lora.join(name)).arg("--json").output().unwrap();
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(report["ok"] == true && report["checks"].as_array().unwrap().len() == 8, "{name}: {report}");
    }
    let dir = altered(&lora.join("llama_qv"), "none", |x| x);
    let config = fs::read_to_string(dir.path().join("adapter_config.json")).unwrap();
    for (from, to, says) in [
        ("\"r\": 4", "\"r\": 8", "misshapen"),
        ("\"v_proj\"", "\"v_proj\", \"o_proj\"", "missing"),
        ("\"q_proj\",", "", "surplus"),
        ("\"q_proj\"", "\"c_attn\"", "\"c_attn\" names no linear layer"),
        ("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]", "modules_to_save"),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "bias"),
        ("\"lora_dropout\": 0.0", "\"lora_dropout\": 0.1", "lora_dropout: 0.1 is not supported in training"),
        ("\"base_model_name_or_path\": \"", "\"base_model_name_or_path\": \"nowhere", "nowhere"),
        ("\"peft_type\": \"LORA\"", "\"peft_type\": \"LOHA\"", "peft_type"),
    ] {
        let changed = config.replacen(from, to, 1);
        assert_ne!(changed, config, "{from}");
        fs::write(dir.path().join("adapter_config.json"), changed).unwrap();
        let line = refused(&mut verify(dir.path()));
        assert!(line.contains(says), "{to}: {line}");
    }
}

/// Logits of a model on some tokens.
pub fn logits(model: &Path, more: &[&str], scratch: &Path) -> Vec<f32> {
    let (ids, out) = (scratch.join("ids.safetensors"), scratch.join("logits.safetensors"));
    let bytes: Vec<u8> = (1..9i64).flat_map(|i| (i * 7).to_le_bytes()).collect();
    let tensor = ("input_ids", astrai_ir::DType::I64, &[1, 8][..], bytes.as_slice());
    astrai_runtime::weights::write(&ids, [tensor], &BTreeMap::new()).unwrap();
    let mut c = program();
    good(c.arg("run").arg(model).arg("--inputs").arg(&ids).arg("--outputs").arg(&out).args(more));
    let file = Checkpoint::open(&out).unwrap();
    let view = file.get("logits").unwrap();
    let mut x = vec![0.0; view.elements()];
    view.to_f32(&mut x).unwrap();
    x
}

/// A run trains the factors alone, its checkpoints are adapters' folders, and what is exported is the model with the adapter.
#[test]
fn an_adapter_is_trained_read_and_exported() {
    let dir = tempfile::tempdir().unwrap();
    let (out, base) = (dir.path().join("out"), shared().join("run/step_000001"));
    let flags = ["--batch", "4", "--steps", "8", "--lr", "2e-2", "--lora-rank", "4", "--rslora", "--dora"];
    good(beside(&out).args(flags).args(["--lora-targets", "q_proj", "v_proj", "down_proj"]));
    let curve = losses(&out);
    // An untrained base learns little by its layers alone; batches differ by about 0.01.
    assert!(curve[7] < curve[0] - 0.02, "{curve:?}");
    let newest = out.join("step_000008");
    let adapter = Checkpoint::open(&newest.join("adapter_model.safetensors")).unwrap();
    assert!(!newest.join("model.safetensors").exists());
    assert!(
        adapter.names().len() == 2 * 3 * 3
            && adapter.names().all(|n| n.starts_with("base_model.model.model.layers."))
    );
    let config: Value =
        serde_json::from_slice(&fs::read(newest.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["r"], &config["lora_alpha"], &config["use_dora"]),
        (&4.into(), &8.into(), &true.into())
    );
    let at = newest.to_str().unwrap();
    let (own, merged) = (logits(&newest, &[], dir.path()), logits(&base, &["--adapter", at], dir.path()));
    assert!(own == merged && own != logits(&base, &[], dir.path()));
    for (name, flags) in [("whole", &[][..]), ("parts", &["--max-shard-size", "30KB"])] {
        let to = dir.path().join(name);
        good(program().arg("export").arg(&out).arg("--out").arg(&to).args(flags));
        assert_eq!(to.join("model.safetensors.index.json").exists(), name == "parts");
        assert!(to.join("tokenizer.json").is_file());
        assert_eq!(logits(&to, &[], dir.path()), own, "{name}");
    }
    let narrow = dir.path().join("narrow");
    let export = |to: &Path| {
        let mut c = program();
        c.arg("export").arg(&base).args(["--adapter", at, "--dtype", "bf16", "--out"]).arg(to);
        c
    };
    good(&mut export(&narrow));
    let top = own.iter().fold(0f32, |m, x| m.max(x.abs()));
    let near = |x: &[f32]| x.iter().zip(&own).all(|(a, b)| (a - b).abs() < 2e-2 * top);
    assert!(near(&logits(&narrow, &[], dir.path())));
    assert!(refused(&mut export(&narrow)).contains("is there already"));
    let text: Value = serde_json::from_slice(&fs::read(narrow.join("config.json")).unwrap()).unwrap();
    assert_eq!(text["torch_dtype"], "bfloat16");
    read_by_others([&base, &newest, &dir.path().join("whole")], &own, dir.path());
    good(program().arg("generate").arg(&newest).args(["--prompt", "fn", "--max-tokens", "2", "--seed", "1"]));
    // What the adapter's folder lacks, the base's has.
    let (copy, wrong) = (dir.path().join("copy"), "generation_config.json");
    copied(&base, &copy);
    fs::write(copy.join(wrong), r#"{"temperature": "hot"}"#).unwrap();
    let mut generate = program();
    generate.arg("generate").arg(&copy).args(["--adapter", at, "--prompt", "fn", "--max-tokens", "2"]);
    assert!(newest.join("tokenizer.json").is_file() && refused(&mut generate).contains(wrong));
    let own_base = newest.join("adapter_config.json");
    let text = fs::read_to_string(&own_base).unwrap();
    fs::write(&own_base, text.replace(config["base_model_name_or_path"].as_str().unwrap(), ".")).unwrap();
    let mut circle = program();
    circle.arg("generate").arg(&newest).args(["--prompt", "fn", "--max-tokens", "2"]);
    assert!(refused(&mut circle).contains("is an adapter itself"));
    let again = |flags: &[&str]| refused(beside(&dir.path().join("no")).args(["--steps", "2"]).args(flags));
    assert!(
        again(&["--lora-rank", "4", "--lora-targets", "c_attn"])
            .contains("lora_targets: \"c_attn\" names no")
    );
    assert!(again(&["--dora"]).starts_with("dora: no adapter is trained"));
    assert!(again(&["--lora-rank", "0"]).contains("lora_rank: 0 is outside"));
}

/// Factors of experts, each under its own name, trained, merged and read by PEFT, whose transformers have the experts of a layer in one tensor. Of a
/// model that has dense layers too it reads those of experts alone: it takes all modules of the experts' names to be experts'.
#[test]
fn experts_are_adapted_by_name() {
    let attention_and_experts = r".*(self_attn\..*|experts\.[0-9.]*[a-z]+)_proj";
    for (name, gate, targets) in
        [("qwen3_moe", "gate_proj", attention_and_experts), ("mixtral", "w1", "all-linear")]
    {
        let Some(base) = case(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let (out, data) = (dir.path().join("out"), records(&dir.path().join("data"), "sft"));
        let mut run = program();
        run.arg("train").arg("--model").arg(&base).arg("--data").arg(data).arg("--out").arg(&out);
        run.args([
            "--strategy",
            "sft",
            "--seq",
            "16",
            "--batch",
            "8",
            "--schedule",
            "constant",
            "--warmup",
            "0",
        ]);
        good(run.args(["--steps", "6", "--lr", "1e-2", "--lora-rank", "2", "--lora-targets", targets]));
        let curve = losses(&out);
        assert!(curve[5] < curve[0], "{name}: {curve:?}");
        let newest = out.join("step_000006");
        let adapter = Checkpoint::open(&newest.join("adapter_model.safetensors")).unwrap();
        let of_expert = |n: &str| n.contains(".experts.3.") && n.contains(gate);
        assert!(adapter.names().any(of_expert), "{name}");
        let own = logits(&newest, &[], dir.path());
        assert_ne!(own, logits(&base, &[], dir.path()));
        let whole = dir.path().join("whole");
        good(program().arg("export").arg(&newest).arg("--out").arg(&whole));
        assert_eq!(logits(&whole, &[], dir.path()), own, "{name}");
        read_by_others([&base, &newest, &whole], &own, dir.path());
    }
}

fn copied(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// A run beside a model that was named from another folder goes on; beside one whose weights are others now it does not.
#[test]
fn an_adapter_goes_on_beside_its_base_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (out, base) = (dir.path().join("out"), dir.path().join("base"));
    copied(&shared().join("run/step_000001"), &base);
    let mut first = program();
    first
        .current_dir(dir.path())
        .args(["train", "--model", "base", "--out", "out", "--seq", "32", "--batch", "2"]);
    first.arg("--data").arg(shared().join("run/data")).args(["--lora-rank", "2", "--steps", "2"]);
    good(&mut first);
    let resume = |steps: &str| {
        let mut c = program();
        c.args(["train", "--resume", "--out"]).arg(&out).args(["--steps", steps]);
        c
    };
    good(&mut resume("3"));
    let weights = base.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&0.25f32.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    let (line, _) = fails(&mut resume("4"));
    assert!(line.contains("its weights are not those beside which the adapter was trained"), "{line}");
}

/// What PEFT makes of the base and the adapter, and transformers of what was exported, from the weights in f32.
const READ: &str = "import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from peft import PeftModel
base, adapter, whole, ids, ours = sys.argv[1:]
ids, ours = load_file(ids)['input_ids'], load_file(ours)['logits']
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
for name, model in [('PEFT', PeftModel.from_pretrained(load(base), adapter)), ('transformers', load(whole))]:
    off = ((model.eval()(input_ids=ids).logits - ours).abs().max() / ours.abs().max()).item()
    assert off < 1e-4, (name, off)
    print(f'{name}: logits within {off:.1e} of the largest')
";

fn read_by_others(folders: [&Path; 3], own: &[f32], scratch: &Path) {
    let Some(peft) = crate::openai::client("peft") else {
        return println!("skipped: no PEFT in .cache/peft; scripts/setup-cache.sh peft puts it there");
    };
    let ours = scratch.join("ours.safetensors");
    let bytes: Vec<u8> = own.iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensor = ("logits", astrai_ir::DType::F32, &[1, 8, own.len() / 8][..], bytes.as_slice());
    astrai_runtime::weights::write(&ours, [tensor], &BTreeMap::new()).unwrap();
    let mut python = Command::new("python3");
    python.args(["-c", READ]).args(folders).arg(scratch.join("ids.safetensors")).arg(&ours);
    let out = python.env("PYTHONPATH", peft).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    print!("{}", String::from_utf8_lossy(&out.stdout));
}
