//! What `--simd` chooses: every level that this processor has gives the references' numbers, and a level that it does not have
//! is refused.

use crate::cases::case;
use crate::emulated::checks_everything;
use astrai_runtime::device::cpu::{Isa, host_levels};
use std::process::{Command, Output};

/// The program; outside of continuous integration with kernels that are little optimised.
fn astrai(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_astrai"));
    if !checks_everything() {
        command.env("PATH", crate::quick::path());
    }
    command.args(args).output().unwrap()
}

/// All levels but the best, which every other test runs with.
fn lesser() -> Vec<&'static str> {
    let mut levels = host_levels();
    levels.pop();
    levels.into_iter().map(Isa::name).collect()
}

fn verified(name: &str, simd: &str, more: &[&str]) {
    let Some(path) = case(name) else { return };
    let args = [&["verify", path.to_str().unwrap(), "--simd", simd], more].concat();
    let out = astrai(&args);
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{args:?}: {said}{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn every_level_gives_the_references_numbers() {
    for (i, simd) in lesser().into_iter().enumerate() {
        // Outside of continuous integration each level takes some of the models.
        let its = |j: usize| checks_everything() || (i + j).is_multiple_of(3);
        let names = ["llama", "qwen3", "astrai_gqa", "qwen3_moe", "deepseek_v3"].into_iter().enumerate();
        for (_, name) in names.clone().filter(|(j, _)| its(*j)) {
            verified(name, simd, &["--only", "logits,loss,grads,greedy"]);
        }
        for (_, name) in names.take(3).filter(|(j, _)| its(j + 1)) {
            verified(name, simd, &["--only", "logits,loss", "--dtype", "bf16"]);
        }
        verified("llama", simd, &["--only", "train"]);
    }
}

/// The line of a command that fails.
fn refused(args: &[&str]) -> String {
    let out = astrai(args);
    let line = String::from_utf8(out.stderr).unwrap();
    assert_eq!((out.status.code(), line.lines().count()), (Some(1), 1), "{args:?}: {line}");
    line
}

#[test]
fn a_level_that_the_processor_does_not_have_is_refused() {
    let Some(path) = case("llama") else { return };
    let model = path.to_str().unwrap();
    let has: Vec<&str> = host_levels().into_iter().rev().map(Isa::name).collect();
    for absent in Isa::ALL.iter().map(|s| s.name()).filter(|s| !has.contains(s)) {
        let begin =
            format!("astrai: --simd {absent}: this processor does not have it; it has {}", has.join(", "));
        for args in [&["verify", model][..], &["bench", "compile", "--shape", model], &["compile", model]] {
            let line = refused(&[args, &["--simd", absent]].concat());
            assert_eq!(line.trim_end(), begin, "{args:?}");
        }
        // Plans need no processor.
        let out = astrai(&["compile", model, "--device", "null", "--simd", absent]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    let line = refused(&["verify", model, "--device", "interpreter", "--simd", "plain"]);
    assert!(line.contains("leave --simd out"), "{line}");
}
