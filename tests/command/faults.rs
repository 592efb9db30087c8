//! What a system may withhold: memory, descriptors, room on the disk, a stack, a home, somebody who reads. In: a fault, as a shell
//! sets it up before the program. Out: what must be true after it: an answer, or one line and exit code 1; never a signal.

use crate::answers::fixture::{model, text, utf8};
use std::process::{Command, Output};

/// What a run must come to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum After {
    /// The answer that it always gives.
    Answer,
    /// One line that holds these words.
    Refusal(&'static str),
    /// Nothing but an orderly end: there is nobody to tell.
    Silence,
}

/// Faults: what the shell does first, what it redirects, and what must be true then.
const FAULTS: [(&str, &str, After); 11] = [
    ("true", "", After::Answer),
    ("export RUST_MIN_STACK=1", "", After::Answer),
    ("unset HOME", "", After::Answer),
    ("export TZ=/dev/zero LC_ALL=xx COLUMNS=0", "", After::Answer),
    ("ulimit -n 32", "", After::Answer),
    ("ulimit -n 6", "", After::Refusal("Too many open files")),
    ("ulimit -v 1000000", "", After::Answer),
    ("ulimit -v 200000", "", After::Refusal("there is no thread for it")),
    ("export ASTRAI_CACHE=/proc/1/no", "", After::Refusal("/proc/1/no")),
    ("cd /proc && export ASTRAI_CACHE=$EMPTY && ulimit -f 1", "", After::Refusal("too large")),
    ("true", ">&- 2>&-", After::Silence),
];

fn run(before: &str, redirect: &str) -> Output {
    let empty = tempfile::tempdir().unwrap();
    let script = format!(
        "{before}\nexec \"$PROGRAM\" generate \"$MODEL\" --prompt t1 --max-tokens 2 --temperature 0 {redirect}"
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).env("PROGRAM", env!("CARGO_BIN_EXE_astrai")).env("MODEL", text(model()));
    shell.env("PATH", crate::quick::path());
    shell.env("EMPTY", empty.path().canonicalize().unwrap()).output().unwrap()
}

#[test]
fn whatever_is_withheld_the_end_is_orderly() {
    let answer = run("true", "").stdout;
    for (before, redirect, after) in FAULTS {
        let out = run(before, redirect);
        let said = utf8(&out.stderr);
        let what = format!("{before} {redirect}: {:?}: {said}", out.status);
        match after {
            After::Answer => {
                assert!(out.status.success() && out.stdout == answer && said.is_empty(), "{what}")
            }
            After::Refusal(words) => {
                assert_eq!((out.status.code(), said.lines().count()), (Some(1), 1), "{what}");
                assert!(said.starts_with("astrai: ") && said.contains(words), "{what}");
            }
            After::Silence => assert!(out.status.code().is_some() && said.is_empty(), "{what}"),
        }
    }
}
