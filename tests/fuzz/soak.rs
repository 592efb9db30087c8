//! A soak: a server under mixed hostile and honest load, and training runs that are killed and resumed, side by side for a given
//! time. Honest answers must be what they were on an idle server, runs must end bit for bit as the one that nobody disturbed, and at
//! the end nothing may be held that nobody uses.

use crate::fixture::{assert_same, command, shared, small, text};
use crate::mutate::Draws;
use crate::server::{Server, model, request, wire};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Updates of a run.
const STEPS: u64 = 12;

/// Kinds of runs: pretraining from text, from shards in bf16, and fine-tuning of a model.
const KINDS: [&str; 3] = ["text", "shards", "model"];

#[derive(Default)]
struct Counts {
    honest: AtomicU64,
    refused: AtomicU64,
    hostile: AtomicU64,
    kills: AtomicU64,
    runs: AtomicU64,
    /// Something went wrong: all come to their end.
    failed: AtomicBool,
}

/// Notices the panic of a thread.
struct Watched<'a>(&'a Counts);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.0.failed.fetch_or(thread::panicking(), Ordering::Relaxed);
    }
}

impl Counts {
    fn one(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Soaks for so long, until so many kills are done too.
pub fn soak(folder: &Path, seed: u64, seconds: u64, kills: u64) {
    let (since, counts) = (Instant::now(), Counts::default());
    let mut server = Server::start(&model(folder));
    let more = || {
        let left =
            since.elapsed() < Duration::from_secs(seconds) || counts.kills.load(Ordering::Relaxed) < kills;
        left && !counts.failed.load(Ordering::Relaxed)
    };
    thread::scope(|scope| {
        scope.spawn(|| train(&folder.join("runs"), &mut Draws::new(seed), &counts, &more));
        for client in 1..3 {
            let (server, counts, more) = (&server, &counts, &more);
            scope.spawn(move || {
                let _watched = Watched(counts);
                let mut d = Draws::new(seed + client);
                while more() {
                    let whole = d.below(4) > 0;
                    let input = if whole { request(&mut d) } else { wire(&mut d) };
                    server.send(&input, whole).unwrap_or_else(|e| panic!("no answer: {e}"));
                    Counts::one(&counts.hostile);
                }
            });
        }
        let (server, counts) = (&server, &counts);
        let _watched = Watched(counts);
        let idle: Vec<String> = (0..8).map(|i| ask(server, i).expect("an answer")).collect();
        let mut d = Draws::new(seed + 9);
        while more() {
            let i = d.below(idle.len());
            match ask(server, i) {
                Ok(answer) => {
                    assert_eq!(answer, idle[i], "another answer under load");
                    Counts::one(&counts.honest);
                }
                Err(code) => {
                    assert!([429, 503].contains(&code), "status {code}");
                    Counts::one(&counts.refused);
                }
            }
        }
    });
    let held = metric(&server, "kv_cache_usage_perc");
    let running = metric(&server, "num_requests_running");
    let status = server.stop();
    let [honest, refused, hostile, kills, runs] =
        [&counts.honest, &counts.refused, &counts.hostile, &counts.kills, &counts.runs]
            .map(|c| c.load(Ordering::Relaxed));
    let minutes = since.elapsed().as_secs_f64() / 60.0;
    println!(
        "soak: {minutes:.1} min; {honest} honest answers, all right, {refused} refused for want of room; {hostile} hostile \
         requests; {kills} kills of {runs} runs, each bit for bit; held at the end: {held} of the pages, {running} requests; \
         the server ended with {status}"
    );
    assert_eq!((held, running, status), (0.0, 0.0, 0));
}

/// The text of a completion, or the status of a refusal.
fn ask(server: &Server, prompt: usize) -> Result<String, u16> {
    let body =
        json!({"prompt": format!("t1 t{} t9", 10 + prompt), "max_tokens": 12, "temperature": 0}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let got =
        server.send(format!("{head}{body}").as_bytes(), true).unwrap_or_else(|e| panic!("no answer: {e}"));
    let got = String::from_utf8_lossy(&got).into_owned();
    let status: u16 = got.get(9..12).and_then(|s| s.parse().ok()).unwrap_or(0);
    if status != 200 {
        return Err(status);
    }
    let body = got.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let answer: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {got}"));
    Ok(answer["choices"][0]["text"].as_str().unwrap_or_default().to_string())
}

/// A gauge of the server, once what was broken off has been noticed.
fn metric(server: &Server, name: &str) -> f64 {
    let read = || {
        let got = server.send(b"GET /metrics HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n\r\n", true);
        let text = String::from_utf8_lossy(&got.expect("metrics")).into_owned();
        let line = text.lines().find(|l| !l.starts_with('#') && l.contains(name)).map(str::to_string);
        line.and_then(|l| l.rsplit_once(' ')?.1.parse().ok()).unwrap_or(f64::NAN)
    };
    let since = Instant::now();
    while read() != 0.0 && since.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(50));
    }
    read()
}

fn run(out: &Path, kind: &str, base: &Path) -> Command {
    let mut c = match kind {
        "text" => {
            let mut c = command(out);
            c.arg("--config").arg(shared().join("config.json")).arg("--data").arg(text());
            c.args(["--vocab", "300", "--seq", "32", "--eval-every", "3"]);
            c
        }
        "shards" => {
            let mut c = small(out);
            c.args(["--dtype", "bf16", "--accum", "2"]);
            c
        }
        _ => {
            let mut c = command(out);
            c.arg("--model").arg(base).arg("--data").arg(shared().join("run/data")).args(["--seq", "32"]);
            c
        }
    };
    c.args(["--save-every", "1", "--batch", "2", "--threads", "1", "--steps", &STEPS.to_string()]);
    c
}

/// Kills runs at any moment until there is no more to be done; each is resumed to its end and held to one left in peace.
fn train(folder: &Path, d: &mut Draws, counts: &Counts, more: &dyn Fn() -> bool) {
    let _watched = Watched(counts);
    let straight: Vec<(PathBuf, Duration)> = KINDS
        .iter()
        .map(|kind| {
            let (out, since) = (folder.join(format!("straight-{kind}")), Instant::now());
            let base = folder.join(format!("straight-text/step_{STEPS:06}"));
            let done = run(&out, kind, &base).stdout(Stdio::null()).stderr(Stdio::null()).status();
            assert!(done.expect("a run").success(), "{kind}");
            (out, since.elapsed())
        })
        .collect();
    let base = straight[0].0.join(format!("step_{STEPS:06}"));
    while more() {
        let i = d.below(KINDS.len());
        let (out, kind) = (folder.join("killed"), KINDS[i]);
        let _absent = fs::remove_dir_all(&out);
        loop {
            let mut child = run(&out, kind, &base)
                .arg("--resume")
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("a run");
            let limit = straight[i].1.as_micros() as usize;
            thread::sleep(Duration::from_micros(d.below(limit) as u64));
            child.kill().expect("ours");
            let out = child.wait_with_output().expect("ours");
            match out.status.code() {
                None => Counts::one(&counts.kills),
                Some(code) => {
                    let said = String::from_utf8_lossy(&out.stderr).into_owned();
                    assert!(code == 0 || said.contains("the run is complete"), "{kind}: {said}");
                    break;
                }
            }
        }
        assert_same(&straight[i].0, &out, STEPS, kind);
        Counts::one(&counts.runs);
    }
}
