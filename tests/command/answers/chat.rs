//! `astrai chat` over a pipe: what was said is remembered until it is forgotten, and what does not fit is refused in words that
//! say what to do.

use crate::answers::fixture::{endless, feed, greedy, model, program, text, utf8};
use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn chat(flags: &[&str]) -> Command {
    program(&[&["chat", text(model()), "--temperature", "0"][..], flags].concat())
}

fn lines(out: &Output) -> Vec<String> {
    assert!(out.status.success(), "{}", utf8(&out.stderr));
    said(out)
}

fn said(out: &Output) -> Vec<String> {
    utf8(&out.stdout).lines().map(str::to_string).collect()
}

#[test]
fn a_conversation_is_remembered() {
    let out = feed(
        chat(&["--max-tokens", "6"]),
        "t9 t10\n\nt11\n/reset\n  t9 t10  \n/system t8\n/reset\nt12\n/exit\nt13\n",
    );
    let first = greedy("t4 t9 t10 t6", 6);
    let second = greedy(&format!("t4 t9 t10 t5 {first} t4 t11 t6"), 6);
    let system = greedy("t7 t8 t4 t12 t6", 6);
    assert_eq!(lines(&out), [first.as_str(), &second, &first, &system], "{}", utf8(&out.stderr));
    assert!(out.stderr.is_empty(), "{}", utf8(&out.stderr));
    let out = feed(chat(&["--max-tokens", "6", "--system", "t8"]), "t12");
    assert_eq!(lines(&out), [system], "a pipe may end without a line's end");
    assert!(lines(&feed(chat(&[]), "")).is_empty());
}

#[test]
fn a_conversation_that_is_too_long_is_told_how_to_go_on() {
    let long = "t9 ".repeat(130);
    let out = feed(chat(&["--max-tokens", "4"]), &format!("t10\n{long}\nt11\n/reset\nt10\n"));
    let first = greedy("t4 t10 t6", 4);
    let got = said(&out);
    assert!(got.len() == 3 && out.status.code() == Some(1), "{got:?}");
    assert_eq!((&got[0], &got[2]), (&first, &first));
    assert_eq!(
        got[1],
        greedy(&format!("t4 t10 t5 {first} t4 t11 t6"), 4),
        "what was refused is not remembered"
    );
    let told = utf8(&out.stderr);
    assert!(told.lines().count() == 1 && told.contains("the context 128; /reset"), "{told}");
    let out = feed(chat(&[]), "/nonsense t1\n");
    assert!(utf8(&out.stderr).contains("/nonsense is no command"), "{}", utf8(&out.stderr));
}

fn signal(child: &Child, name: &str) {
    let kill = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
}

fn wait(child: &mut Child) -> Option<i32> {
    let since = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(since.elapsed() < Duration::from_secs(60), "the program does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn an_interrupt_ends_the_answer_and_not_the_program() {
    let mut child = program(&["chat", text(endless())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    for _ in 0..2 {
        stdin.write_all(b"t9\n").unwrap();
        // An answer without an end has begun.
        let mut byte = [0; 1];
        (0..50).for_each(|_| stdout.read_exact(&mut byte).unwrap());
        signal(&child, "-INT");
        while byte != *b"\n" {
            stdout.read_exact(&mut byte).unwrap();
        }
    }
    drop(stdin);
    assert_eq!(wait(&mut child), Some(0));

    let mut idle =
        program(&["chat", text(model())]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = idle.stdin.take().unwrap();
    stdin.write_all(b"t9\n").unwrap();
    let mut stdout = idle.stdout.take().unwrap();
    let mut byte = [0; 1];
    while byte != *b"\n" {
        stdout.read_exact(&mut byte).unwrap();
    }
    // Between the end of the line and the wait for the next there is a moment in which a signal is still the answer's.
    std::thread::sleep(Duration::from_millis(300));
    signal(&idle, "-INT");
    assert_eq!(wait(&mut idle), None, "ended by the signal, as any program");
}
