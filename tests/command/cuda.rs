//! CUDA devices as their users meet them: what is said where driver or compiler are absent, commands on the emulated driver, runs that
//! go on on another device.

use crate::answers::fixture::{greedy, model};
use crate::answers::serve::Server;
use crate::cases::{DENSE, EXPERTS, case};
use crate::emulated::{Emulated, QUICK, checks_everything, emulated};
use crate::train::fixture::{fails, good, losses, program, small, stderr};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The program where neither driver nor compiler is.
fn bare() -> Command {
    let mut c = program();
    c.env_remove("LD_LIBRARY_PATH").env("ASTRAI_NVRTC", "/nonexistent");
    c
}

/// A device for which NVRTC makes machine code, which it does not for that of the emulated driver.
const MACHINE_CODE: (&str, &str) = ("ASTRAI_PTX_ARCH", "80");

/// Lets a program find driver and compiler.
fn driven<'c>(driver: &Emulated, c: &'c mut Command) -> &'c mut Command {
    c.env("LD_LIBRARY_PATH", &driver.folder).env("ASTRAI_NVRTC", &driver.nvrtc)
}

/// The program on the emulated driver, with a folder of its own for kernels of these tests.
fn on(driver: &Emulated) -> Command {
    let mut c = program();
    driven(driver, &mut c);
    c
}

/// The object that a command prints.
fn object(c: &mut Command) -> Value {
    let out = c.output().unwrap();
    assert!(out.status.success(), "{c:?}: {}", stderr(&out));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn what_is_absent_is_said_in_words() {
    let report = object(bare().args(["devices", "--json"]));
    assert!(report["cpu"]["cores"].as_u64().unwrap() >= 1);
    assert!(report["nvrtc"].is_null() && report["nvrtc_absent"].as_str().unwrap().contains("/nonexistent"));
    let here = report["cuda"].as_array().unwrap().len();
    assert_eq!(report["cuda_absent"].is_null(), here > 0);
    let llama = golden("llama");
    let verify = |flags: &[&str]| fails(bare().arg("verify").arg(&llama).args(flags)).0;
    assert!(verify(&["--device", "cuda"]).contains("/nonexistent"));
    assert!(verify(&["--device", "cuda", "--simd", "plain"]).contains("leave it out"));
    let wrong = bare().arg("verify").arg(&llama).args(["--device", "cuda:x"]).output().unwrap();
    assert!(stderr(&wrong).contains("no device's number"), "{}", stderr(&wrong));
    // Planning needs neither.
    let plan = object(bare().arg("compile").arg(&llama).args(["--device", "cuda", "--json"]));
    assert!(plan["kernels"].as_u64().unwrap() > 5 && plan["registers"].is_null(), "{plan}");
    let folder = tempfile::tempdir().unwrap();
    let ptx = |device: &str| {
        let mut c = bare();
        c.arg("compile").arg(&llama).args(["--device", device, "--ptx", "-o"]).arg(folder.path());
        fails(&mut c).0
    };
    assert!(ptx("cuda").contains("/nonexistent") && ptx("cpu").contains("--device cuda"));
    for device in ["cuda", "cpu"] {
        let mut cost = bare();
        cost.arg("compile").arg(&llama).args(["--device", device, "--explain", "cost", "--json"]);
        let report = object(&mut cost);
        let costs = report["costs"].as_array().unwrap();
        let sum = |key: &str| costs.iter().map(|row| row[key].as_u64().unwrap()).sum::<u64>();
        assert!(["launches", "flops", "bytes"].iter().all(|key| report[key] == sum(key)), "{report}");
        let seconds = |row: &Value| row["predicted_seconds"].as_f64().unwrap();
        assert!(costs.is_sorted_by(|a, b| seconds(a) >= seconds(b)) && seconds(&costs[0]) > 0.0);
        assert!(costs.iter().all(|row| row["phases"].as_array().unwrap().is_empty()));
    }
}

/// What the kernels are as machine code is kept, not asked for where nothing of it is shown, and told a kernel.
#[test]
fn machine_code_is_kept_and_told_by_kernel() {
    let Some(driver) = emulated() else { return };
    let (llama, folder) = (golden("llama"), tempfile::tempdir().unwrap());
    let compile = |more: &[&str]| {
        let mut c = on(driver);
        c.envs([MACHINE_CODE])
            .env("ASTRAI_CACHE", folder.path())
            .arg("compile")
            .arg(&llama)
            .args(["--device", "cuda"])
            .args(more);
        let out = c.output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        String::from_utf8(out.stdout).unwrap()
    };
    let kept = || {
        let all = std::fs::read_dir(folder.path().join("kernels")).into_iter().flatten();
        all.filter(|e| e.as_ref().is_ok_and(|e| e.path().extension().is_some_and(|x| x == "cubin"))).count()
    };
    compile(&["--dump-after", "merge"]);
    compile(&["--explain", "layer"]);
    assert_eq!(kept(), 0);
    let told: Value = serde_json::from_str(&compile(&["--explain", "cost", "--json"])).unwrap();
    assert_eq!(kept() as u64, told["kernels"].as_u64().unwrap());
    for row in told["costs"].as_array().unwrap() {
        let phases = row["phases"].as_array().unwrap();
        assert!(!phases.is_empty(), "{row}");
        for p in phases {
            assert!(p["registers"].as_u64().unwrap() > 0 && p["spill_bytes"] == 0, "{row}");
            assert!(p["occupancy"].as_f64().is_some_and(|part| part > 0.0 && part <= 1.0), "{row}");
        }
        let floats = phases.iter().filter_map(|p| p["hot_loop"]["float"].as_u64()).sum::<u64>();
        assert!(row["form"] != "dot" || floats > 0, "{row}");
    }
    let text = compile(&["--explain", "cost"]);
    assert!(text.contains("hot loop") && text.contains("predicted, not measured"), "{text}");
}

/// A device that cannot be used hides no other, and a plan asks its own alone.
#[test]
fn a_broken_device_is_said_beside_those_that_work() {
    let Some(driver) = emulated() else { return };
    let broken = || {
        let mut c = on(driver);
        c.env("ASTRAI_PTX_FAIL", "cuDevicePrimaryCtxRetain:1=46");
        c
    };
    let report = object(broken().args(["devices", "--json"]));
    let (first, second) = (&report["cuda"][0], &report["cuda"][1]);
    assert!(first["error"].as_str().unwrap().contains("CUDA_ERROR_DEVICE_UNAVAILABLE"), "{report}");
    assert!(second["arch"].is_string() && report["cuda_absent"].is_null(), "{report}");
    let table = broken().arg("devices").output().unwrap();
    assert!(table.status.success() && String::from_utf8_lossy(&table.stdout).contains("cuda:1  emulated"));
    // No context is made for a plan.
    let mut plan = broken();
    let plan = plan.arg("compile").arg(golden("llama")).args(["--device", "cuda:1", "--dump-after", "merge"]);
    let out = plan.output().unwrap();
    assert!(out.status.success() && stderr(&out).is_empty(), "{}", stderr(&out));
}

#[test]
fn commands_run_on_the_emulated_device() {
    let Some(driver) = emulated() else { return };
    let report = object(on(driver).args(["devices", "--json"]));
    assert!(report["cuda"][0]["arch"].as_str().unwrap().starts_with("sm_"), "{report}");
    assert!(report["nvrtc"].is_string());
    let llama = golden("llama");
    let far = fails(on(driver).arg("verify").arg(&llama).args(["--device", "cuda:1000"])).0;
    assert!(far.contains("numbered from 0"), "{far}");
    let mut flagged = on(driver);
    flagged
        .env("ASTRAI_NVRTC_FLAGS", "-lineinfo --no-such")
        .arg("verify")
        .arg(&llama)
        .args(["--device", "cuda"]);
    let (unknown, _) = fails(&mut flagged);
    assert!(unknown.contains("unrecognized option --no-such"), "{unknown}");
    let only = ["--device", "cuda", "--only", "logits,loss", "--json"];
    let report = object(on(driver).arg("verify").arg(&llama).args(only));
    assert_eq!((&report["ok"], &report["device"]), (&true.into(), &"cuda".into()));
    // Weights as codes, among others.
    let families =
        on(driver).arg("verify").arg(golden("gguf_families")).args(["--device", "cuda", "--json"]).output();
    let report: Value = serde_json::from_slice(&families.unwrap().stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert!(
        report["ok"] == true && checks.iter().any(|c| c["check"].as_str().unwrap().ends_with("(codes)")),
        "{report}"
    );
    let folder = tempfile::tempdir().unwrap();
    let plan = object(
        on(driver)
            .envs([MACHINE_CODE])
            .arg("compile")
            .arg(&llama)
            .args(["--device", "cuda", "--json", "--ptx", "-o"])
            .arg(folder.path()),
    );
    assert!(plan["registers"].as_u64().unwrap() > 0 && plan["spill_bytes"] == 0, "{plan}");
    let kernels = std::fs::read_dir(folder.path().join("kernels")).unwrap().map(|e| e.unwrap().path());
    let (cu, ptx): (Vec<_>, Vec<_>) = kernels.partition(|p| p.extension().is_some_and(|e| e == "cu"));
    assert!(!cu.is_empty() && cu.len() == ptx.len());
    let inputs = llama.join("golden.safetensors");
    let mut run = on(driver);
    run.arg("run")
        .arg(&llama)
        .arg("--inputs")
        .arg(&inputs)
        .arg("--outputs")
        .arg(folder.path().join("out.safetensors"));
    let report = object(run.args(["--device", "cuda", "--memory", "--json"]));
    assert!(report["memory"]["most"].as_u64().unwrap() > 100_000, "{report}");
    let mut generate = on(driver);
    generate.arg("generate").arg(model()).args([
        "--device",
        "cuda",
        "--prompt",
        "t4 t5",
        "--temperature",
        "0",
    ]);
    let out = generate.args(["--max-tokens", "3"]).output().unwrap();
    assert_eq!(
        String::from_utf8(out.stdout).unwrap().trim(),
        greedy("t4 t5", 3),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

#[test]
fn a_run_begun_on_one_device_goes_on_on_another() {
    let Some(driver) = emulated() else { return };
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, device: &str, steps: &str| {
        let mut c = small(&dir.path().join(name));
        driven(driver, &mut c).args(["--device", device, "--batch", "2", "--steps", steps, "--resume"]);
        good(&mut c)
    };
    run("straight", "cpu", "4");
    let want = losses(&dir.path().join("straight"));
    for (name, first, second) in [("there", "cpu", "cuda"), ("back", "cuda", "cpu")] {
        run(name, first, "2");
        let said = run(name, second, "4");
        assert!(said.contains("another version, compiler or device"), "{said}");
        let got = losses(&dir.path().join(name));
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 2e-3 * b;
        assert!(got.len() == 4 && got.iter().zip(&want).all(near), "{name}: {got:?} {want:?}");
    }
}

/// Each call of the driver's that a run needs fails in its turn: the end is one line that says which device, what and where, and an exit code.
#[test]
fn a_call_of_the_driver_that_fails_is_one_clear_line() {
    let Some(driver) = emulated() else { return };
    let faults = [
        ("cuInit:1=999", "CUDA_ERROR_UNKNOWN"),
        ("cuDevicePrimaryCtxRetain:1=46", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
        ("cuMemAllocAsync:1=2", "lower --batch"),
        ("cuMemAllocAsync:2=2", "lower --batch"),
        ("cuMemHostAlloc:1=2", "pinned memory"),
        ("cuModuleLoadData:3=218", "loading kernel k"),
        ("cuModuleGetFunction:2=500", "looking for a kernel"),
        ("cuMemcpyHtoDAsync_v2:2=700", "copying to it: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuLaunchKernel:3=701", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        ("cuLaunchKernel:3=719", "kernel k"),
        ("cuMemcpyDtoHAsync_v2:1=716", "CUDA_ERROR_MISALIGNED_ADDRESS"),
        ("cuStreamSynchronize:2=700", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ];
    let llama = golden("llama");
    for (fault, words) in faults {
        let mut c = on(driver);
        c.arg("verify")
            .arg(&llama)
            .args(["--device", "cuda", "--only", "logits"])
            .env("ASTRAI_PTX_FAIL", fault);
        let (line, _) = fails(&mut c);
        assert!(line.contains("CUDA") && line.contains(words), "{fault}: {line}");
    }
}

/// A server whose device fails answers 503 and ends with its exit code.
#[test]
fn a_server_whose_device_fails_says_so_and_ends() {
    let Some(driver) = emulated() else { return };
    let mut c = on(driver);
    c.arg("serve").arg(model()).args(["--port", "0", "--json", "--device", "cuda", "--max-seqs", "2"]);
    c.env("ASTRAI_PTX_FAIL", "cuLaunchKernel:60=719");
    let mut server = Server::spawn(c);
    let body = json!({"model": "short", "prompt": "t4 t5", "max_tokens": 32, "temperature": 0});
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 503, "{answer}");
    let (code, said) = server.ended();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("CUDA device 0") && said.contains("of this session"), "{said}");
}

/// A run whose device fails goes on from its newest checkpoint as if nothing had been.
#[test]
fn training_goes_on_after_its_device_failed() {
    let Some(driver) = emulated() else { return };
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str| {
        let mut c = small(&dir.path().join(name));
        driven(driver, &mut c).args([
            "--device",
            "cuda",
            "--batch",
            "2",
            "--steps",
            "4",
            "--save-every",
            "1",
        ]);
        c
    };
    // All recordings share one stream, beside those of kernels and of copies: a fourth is never asked for.
    good(run("straight").env("ASTRAI_PTX_FAIL", "cuStreamCreate:4=999"));
    let (line, _) = fails(run("fails").env("ASTRAI_PTX_FAIL", "cuGraphLaunch:3=700"));
    assert!(line.contains("CUDA device 0") && line.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{line}");
    let range = line.split_once("from kernel ").and_then(|(_, rest)| rest.split_once(" to kernel "));
    assert!(range.is_some_and(|(first, last)| last.split(';').next() != Some(first)), "{line}");
    good(run("fails").arg("--resume"));
    let of = |name: &str| std::fs::read(dir.path().join(name).join("step_000004/model.safetensors")).unwrap();
    assert!(of("straight") == of("fails"));
}

/// Logits, loss, gradients, greedy tokens and the short training run, by CUDA kernels alone. In CI of every family, and of adapters; elsewhere of
/// those that lie in this repository.
#[test]
fn golden_cases_verify_on_the_emulated_device() {
    let Some(driver) = emulated() else { return };
    let every = checks_everything();
    let here = ["llama", "qwen3", "astrai_gqa"];
    let adapters = ["lora/llama_all", "lora/qwen3_dora"];
    for name in DENSE.iter().chain(&EXPERTS).chain(&adapters).filter(|name| every || here.contains(name)) {
        let Some(path) = case(name) else { continue };
        let mut verify = on(driver);
        verify.env("ASTRAI_NVRTC_FLAGS", QUICK).arg("verify").arg(path);
        let report = object(verify.args(["--device", "cuda", "--json"]));
        assert_eq!((&report["ok"], &report["device"]), (&true.into(), &"cuda".into()), "{name}: {report}");
    }
}

/// A program on a device beside the processor, held to what the device is said to be: each kernel has a time of its own.
#[test]
fn an_estimate_is_checked_on_the_device() {
    let Some(driver) = emulated() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("here.json");
    good(on(driver).args(["devices", "--device", "cuda", "--measure"]).arg(&file));
    let told: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(told["kind"] == "gpu" && told["name"].as_str().unwrap().contains("sm_82"), "{told}");
    // An older driver does not tell the time between events: launches are waited for one by one.
    for version in ["13000", "12040"] {
        let mut check = on(driver);
        check.env("ASTRAI_PTX_DRIVER", version).arg("estimate").arg(golden("llama"));
        check.args(["--check", "--for", "decode", "--batch", "2", "--seq", "64", "--repeat", "1"]);
        let report = object(check.args(["--json", "--device", "cuda", "--hardware"]).arg(&file));
        let operators = report["operators"].as_array().unwrap();
        let seconds = |o: &Value| o["measured_seconds"].as_f64().unwrap();
        assert!(operators.len() > 8 && operators.iter().all(|o| seconds(o) > 0.0), "{report}");
        let bytes = |key: &str| report[key].as_f64().unwrap();
        assert!((bytes("planned_bytes") / bytes("peak_bytes") - 1.0).abs() < 0.05, "{report}");
    }
    let refused = |args: &[&str], word: &str| {
        let (line, _) = fails(on(driver).arg("estimate").arg(golden("llama")).args(args));
        assert!(line.contains(word), "{line}");
    };
    refused(&["--device", "cuda"], "--device goes with --check");
    refused(&["--check", "--device", "interpreter"], "says nothing");
    refused(&["--check", "--device", "null"], "runs nothing");
    refused(&["--check", "--device", "cpu", "--hardware", "h100-sxm"], "is no processor");
    let processor = folder.path().join("processor.json");
    std::fs::write(&processor, std::fs::read_to_string(&file).unwrap().replace("\"gpu\"", "\"cpu\""))
        .unwrap();
    refused(&["--check", "--device", "cuda", "--hardware", processor.to_str().unwrap()], "is a processor");
}
