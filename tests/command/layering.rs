//! The house rules that a program can check: which crate may know which, and how long a file may be.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What each crate may depend on, from the ground up.
const ROOMS: [(&str, &[&str]); 11] = [
    ("files", &[]),
    ("ir", &[]),
    ("builders", &["files", "ir"]),
    ("passes", &["ir"]),
    ("codegen", &["ir"]),
    ("runtime", &["files", "ir", "passes", "codegen"]),
    ("serve", &["files", "ir", "builders", "runtime"]),
    ("train", &["files", "ir", "builders", "runtime", "serve"]),
    ("engine", &["files", "ir", "builders", "passes", "codegen", "runtime", "serve", "train"]),
    ("estimate", &["files", "ir", "builders", "passes", "runtime", "serve", "train", "engine"]),
    (
        ".",
        &["files", "ir", "builders", "passes", "codegen", "runtime", "serve", "train", "engine", "estimate"],
    ),
];

const LINES: usize = 500;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Names of our crates in the tables of dependencies of a manifest (tests' own dependencies are free).
fn depends(manifest: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut inside = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = matches!(line, "[dependencies]" | "[build-dependencies]");
        } else if let (true, Some(rest)) = (inside, line.strip_prefix("astrai-")) {
            found.insert(rest.split(['.', ' ', '=']).next().unwrap_or("").to_string());
        }
    }
    found
}

#[test]
fn crates_know_only_the_rooms_below() {
    for (room, may) in ROOMS {
        let path = root().join(room).join("Cargo.toml");
        let manifest = std::fs::read_to_string(&path).unwrap();
        let has = depends(&manifest);
        let allowed: BTreeSet<String> = may.iter().map(|s| s.to_string()).collect();
        let extra: Vec<_> = has.difference(&allowed).collect();
        assert!(extra.is_empty(), "{room} may not depend on {extra:?}");
    }
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    for (room, _) in ROOMS.iter().filter(|(r, _)| *r != ".") {
        assert!(
            manifest.contains(&format!("astrai-{room} = {{ path = \"{room}\" }}")),
            "{room} is no member"
        );
    }
}

/// Sources of the project by path.
fn sources() -> BTreeMap<PathBuf, String> {
    let mut todo: Vec<PathBuf> =
        ROOMS.iter().filter(|(r, _)| *r != ".").map(|(r, _)| root().join(r)).collect();
    todo.extend(["cli", "tests"].map(|d| root().join(d)));
    let mut found = BTreeMap::new();
    while let Some(at) = todo.pop() {
        for entry in std::fs::read_dir(&at).unwrap().map(|e| e.unwrap().path()) {
            let ext = entry.extension().and_then(|e| e.to_str()).unwrap_or("");
            if entry.is_dir() {
                todo.push(entry);
            } else if ["rs", "c", "cu", "h"].contains(&ext) {
                let text = std::fs::read_to_string(&entry).unwrap();
                found.insert(entry, text);
            }
        }
    }
    found
}

#[test]
fn no_source_file_is_longer_than_it_may_be() {
    let all = sources();
    assert!(all.len() > 100);
    let long = |(p, t): (&PathBuf, &String)| {
        let n = t.lines().count();
        (n > LINES).then(|| format!("{}: {n} lines", p.strip_prefix(root()).unwrap_or(p).display()))
    };
    let long: Vec<String> = all.iter().filter_map(long).collect();
    assert!(long.is_empty(), "longer than {LINES} lines: {long:#?}");
}

#[test]
fn every_module_says_what_it_is() {
    let bare = |(p, t): (&PathBuf, &String)| {
        let is_rust = p.extension().is_some_and(|e| e == "rs");
        (is_rust && !t.starts_with("//!")).then(|| p.display().to_string())
    };
    let bare: Vec<String> = sources().iter().filter_map(bare).collect();
    assert!(bare.is_empty(), "without an opening `//!`: {bare:#?}");
}

/// Words by which code knows a kind of device, its instructions, or what runs kernels there.
const KINDS: [&str; 14] = [
    "cpu",
    "Cpu",
    "cuda",
    "Cuda",
    "nvrtc",
    "Nvrtc",
    "libloading",
    "Isa",
    "avx2",
    "avx512",
    "amx",
    "neon",
    "Pool",
    "ptx",
];

/// Where kinds of devices live, and the one file of the library that opens a device by its name.
const HOMES: [&str; 5] = [
    "codegen/src/cpu/",
    "codegen/src/cuda/",
    "runtime/src/device/cpu/",
    "runtime/src/device/cuda/",
    "engine/src/machine.rs",
];

#[test]
fn only_its_own_folders_name_a_kind_of_device() {
    let mut found = vec![];
    for (path, text) in sources() {
        let path = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let ours = ROOMS.iter().any(|(room, _)| path.starts_with(&format!("{room}/src/")));
        if !ours || !path.ends_with(".rs") || HOMES.iter().any(|h| path.starts_with(h)) {
            continue;
        }
        // Tests may name what they are run on, and messages to people what they may choose.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let code = if path.ends_with("tests.rs") || path.ends_with("fake.rs") { "" } else { code };
        for (i, line) in code.lines().enumerate() {
            let line = line.split("//").next().unwrap_or_default();
            let bare: String = line.split('"').step_by(2).collect();
            let words: Vec<&str> = bare.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            // A module of a kind is declared beside the others.
            let declares = words.starts_with(&["pub", "mod"])
                && (path.ends_with("lib.rs") || path.ends_with("device/mod.rs"));
            if !declares && KINDS.iter().any(|k| words.contains(k)) {
                found.push(format!("{path}:{}: {}", i + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "these know a kind of device: {found:#?}");
}

#[test]
fn the_hall_is_short_and_alone_in_its_file() {
    let path = root().join("runtime/src/compile.rs");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, hall) = text.split_once("pub fn compile(").unwrap();
    assert!(hall.lines().count() <= 40, "{} lines", hall.lines().count());
    assert_eq!(text.matches("\nfn ").count() + text.matches("\npub fn ").count(), 1, "the hall is not alone");
}
