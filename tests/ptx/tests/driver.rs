//! A program that uses `cudarc` on the emulated driver, which it finds as any program finds its driver: as `libcuda.so.1`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

mod program;

/// A folder with the library under the driver's name.
fn driver() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(make)
}

fn make() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let library = exe.with_file_name("libastrai_ptx.so");
    let folder = exe.with_file_name("emulated-cuda");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        let (link, new) = (folder.join(name), folder.join(format!("{name}.{}", std::process::id())));
        std::os::unix::fs::symlink(&library, &new).unwrap();
        std::fs::rename(&new, link).unwrap();
    }
    folder
}

/// Runs one of the programs in `program.rs` in a process of its own.
fn run(name: &str, settings: &[(&str, &str)]) -> Output {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["--exact", &format!("program::{name}"), "--ignored", "--nocapture"]);
    c.env("LD_LIBRARY_PATH", driver()).envs(settings.iter().copied());
    c.output().unwrap()
}

fn right(name: &str, settings: &[(&str, &str)]) -> String {
    let out = run(name, settings);
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && said.contains("1 passed"), "{name}: {said}");
    said
}

#[test]
fn memory_launches_events_and_graphs() {
    for seed in ["1", "2", "3"] {
        right("everyday", &[("ASTRAI_PTX_SEED", seed)]);
    }
}

#[test]
fn a_fault_of_a_kernel_stays() {
    let said = right("stray", &[]);
    assert!(said.contains("add: out of bounds: `st.global"), "{said}");
}

#[test]
fn calls_fail_when_they_are_asked_to() {
    right("injected", &[("ASTRAI_PTX_FAIL", "cuMemAllocAsync:2=2,cuLaunchKernel:1=719")]);
}

#[test]
fn two_devices_and_late_copies() {
    right("two", &[("ASTRAI_PTX_DEVICES", "2")]);
}

#[test]
fn counts_are_written() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("counts.json");
    right("everyday", &[("ASTRAI_PTX_COUNTS", file.to_str().unwrap())]);
    let all: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let k = &all["kernels"][0];
    assert_eq!(k["kernel"], "add");
    assert_eq!(k["global_sectors"]["units"], k["global_sectors"]["ideal"], "{k}");
    assert_eq!(all["devices"][0]["allocations_left"], 0);
}
