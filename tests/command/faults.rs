//! What a system may withhold: memory, descriptors, room on the disk, a stack, a home, somebody who reads, a clock that goes on as
//! it should. In: a fault, as a shell sets it up before the program. Out: what must be true after it: an answer, or one line and
//! exit code 1; never a signal. And what clients of a server may do, after which it answers others and holds nothing.

use crate::answers::fixture::{endless, model, text, utf8};
use crate::answers::serve::Server;
use crate::train::fixture::{assert_same, good, small};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

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
const FAULTS: [(&str, &str, After); 12] = [
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
    (DATED, "", After::Answer),
    ("true", ">&- 2>&-", After::Silence),
];

/// A clock that jumped: kernels from times to come, leftovers of a compilation from then and from 1970.
const DATED: &str = "export ASTRAI_CACHE=$EMPTY/kernels
    \"$PROGRAM\" generate \"$MODEL\" --prompt t1 --max-tokens 1 >/dev/null
    touch -d 2100-01-01 $EMPTY/kernels/* $EMPTY/kernels/.tmp-1-0.c
    touch -d 1970-01-02 $EMPTY/kernels/.tmp-1-1.c";

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

fn request(tokens: u32) -> Vec<u8> {
    let body =
        json!({"model": "endless", "prompt": "t9", "max_tokens": tokens, "temperature": 0, "stream": true});
    let body = body.to_string();
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    format!("{head}content-length: {length}\r\n\r\n{body}").into_bytes()
}

/// What a client does with its connection.
type Peer = fn(&mut TcpStream) -> io::Result<()>;

/// Faults of clients, and how what they are answered begins; `None`: they are not to be answered, and stay.
const PEERS: [(&str, Peer, Option<&str>); 9] = [
    ("sends nothing", |_| Ok(()), None),
    ("stalls in the head", |s| s.write_all(&request(4)[..40]), None),
    ("stalls in the body", |s| s.write_all(&request(4)[..140]), None),
    ("sends slowly", |s| request(4).iter().try_for_each(|b| slowly(s, *b)), Some("HTTP/1.1 200")),
    (
        // To the server it has left, whose request is not to go on.
        "closes its side after the request",
        |s| s.write_all(&request(4)).and_then(|()| s.shutdown(Shutdown::Write)),
        Some(""),
    ),
    (
        "closes its side within the request",
        |s| s.write_all(&request(4)[..140]).and_then(|()| s.shutdown(Shutdown::Write)),
        Some(""),
    ),
    ("resets within the request", |s| s.write_all(&request(4)[..140]).and_then(|()| reset(s)), None),
    (
        "resets within the answer",
        |s| {
            s.write_all(&request(90_000))?;
            s.read_exact(&mut [0; 40])?;
            reset(s)
        },
        None,
    ),
    ("reads nothing of a long answer", |s| s.write_all(&request(90_000)), None),
];

fn slowly(stream: &mut TcpStream, byte: u8) -> io::Result<()> {
    thread::sleep(Duration::from_millis(2));
    stream.write_all(&[byte])
}

/// Ends a connection as a system that crashed does.
fn reset(stream: &TcpStream) -> io::Result<()> {
    let none = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: the option is read for the call alone, and the descriptor is the stream's.
    let set = unsafe {
        let option = (&raw const none).cast();
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, option, size)
    };
    // Both halves: nothing of it is read again, and the descriptor that the caller drops closes it.
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The text of a streamed answer, whole.
fn joined(events: &str) -> String {
    let data = events.lines().filter_map(|l| serde_json::from_str::<Value>(l.strip_prefix("data: ")?).ok());
    data.filter_map(|v| v["choices"][0]["text"].as_str().map(str::to_string)).collect()
}

#[test]
fn whatever_a_client_does_others_are_answered() {
    let server = Server::start(endless(), &["--max-seqs", "4"]);
    let connect = || {
        let stream = TcpStream::connect(server.at("").trim_start_matches("http://")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    };
    let honest = || {
        let (mut stream, mut answer) = (connect(), String::new());
        stream.write_all(&request(8)).unwrap();
        stream.read_to_string(&mut answer).unwrap();
        joined(&answer)
    };
    let want = honest();
    assert_eq!(want.split_whitespace().count(), 8, "{want}");
    let mut held = Vec::new();
    for (what, peer, answered) in PEERS {
        let mut stream = connect();
        peer(&mut stream).unwrap_or_else(|e| panic!("{what}: {e}"));
        if what.starts_with("resets") {
            drop(stream);
            assert_eq!(honest(), want, "{what}");
            continue;
        }
        assert_eq!(honest(), want, "{what}");
        let Some(begin) = answered else {
            held.push(stream);
            continue;
        };
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap_or_else(|e| panic!("{what}: {e}"));
        let got = utf8(&got);
        assert!(got.starts_with(begin) && !got.starts_with("HTTP/1.1 5"), "{what}: {got}");
    }
    drop(held);
    let since = Instant::now();
    let idle = |text: &str| {
        let running = |l: &&str| l.contains("running") && !l.starts_with('#');
        text.lines().filter(running).all(|l| l.ends_with(" 0"))
    };
    while !idle(&server.get("/metrics").1) {
        assert!(since.elapsed() < Duration::from_secs(30), "{}", server.get("/metrics").1);
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((server.get("/health").0, honest()), (200, want));
}

/// Stops a process for a second and a half: to it, the clock jumps.
fn jump(process: u32) {
    for signal in [libc::SIGSTOP, libc::SIGCONT] {
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(process as i32, signal) }, 0);
        thread::sleep(Duration::from_millis(if signal == libc::SIGSTOP { 1500 } else { 0 }));
    }
}

#[test]
fn a_clock_that_jumps_changes_no_answer_and_no_step() {
    let server = Server::start(endless(), &[]);
    let ask = |jumps: bool| {
        let mut stream = TcpStream::connect(server.at("").trim_start_matches("http://")).unwrap();
        stream.write_all(&request(3000)).unwrap();
        let (mut first, mut rest) = ([0; 40], String::new());
        stream.read_exact(&mut first).unwrap();
        if jumps {
            jump(server.process());
        }
        stream.read_to_string(&mut rest).unwrap();
        joined(&rest)
    };
    assert_eq!(ask(true), ask(false));
    assert_eq!(server.get("/health").0, 200);
    let dir = tempfile::tempdir().unwrap();
    let [straight, jumped] = ["straight", "jumped"].map(|name| dir.path().join(name));
    let flags = ["--steps", "200", "--batch", "4", "--save-every", "50"];
    good(small(&straight).args(flags));
    let mut run = small(&jumped);
    let mut child =
        run.args(flags).arg("--json").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (mut rows, mut row) = (BufReader::new(child.stdout.take().unwrap()), String::new());
    rows.read_line(&mut row).unwrap();
    jump(child.id());
    rows.read_to_string(&mut row).unwrap();
    assert!(child.wait().unwrap().success());
    assert_same(&straight, &jumped, 200, "a clock that jumped");
}
