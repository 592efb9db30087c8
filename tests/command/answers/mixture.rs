//! A server under everything at once: 64 clients that ask for texts, chats, calls of tools, answers of a form, several choices, adapters, plain
//! and streamed, with proposed tokens verified, over too few pages and a short queue; some leave in the middle. Every answer is that of the same
//! request alone, on a server that computes one at a time and proposes nothing; nothing is lost, no page stays taken, memory does not grow.
//! A llama's tokens are proposed by look-up, those of a small DeepSeek-V3 by its own module. `ASTRAI_SOAK_SECONDS` says for how long; in CI it
//! is a minute.

use crate::answers::fixture::{program, text};
use crate::answers::operate::{adapter, metric, with};
use crate::answers::serve::Server;
use crate::emulated::checks_everything;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const CLIENTS: u64 = 64;

/// Clients that ask also in the last third of each two seconds: nothing is proposed while somebody waits.
const STEADY: u64 = 4;

/// Different requests that there are.
const KINDS: usize = 72;

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// A request: its path and body.
type Asked = (&'static str, Value);

fn request(i: usize, dice: &mut Dice) -> Asked {
    let schema = json!({"type": "object", "properties": {"unit": {"enum": ["c", "f"]}, "n": {"type": "integer", "minimum": 1, "maximum": 40}},
        "required": ["unit", "n"], "additionalProperties": false});
    let words = ["pages ", "of ", "a model ", "are read ", "again and again ", "f(x) = f(x); "];
    let said: String = (0..1 + dice.roll(12)).map(|_| words[dice.roll(words.len())]).collect();
    let messages = json!([{"role": "user", "content": said}]);
    let temperature = [0.0, 0.0, 0.8, 1.3][dice.roll(4)];
    let model = ["small", "loud", "low"][dice.roll(3)];
    let most = 4 + dice.roll(40);
    let mut body =
        json!({"seed": dice.roll(1000), "temperature": temperature, "max_tokens": most, "model": model});
    let (path, more) = match i % 9 {
        0 => ("completions", json!({"prompt": said})),
        // What repeats itself is what speculation proposes.
        1 => ("completions", json!({"prompt": said.repeat(3), "temperature": 0, "max_tokens": 48})),
        2 => ("completions", json!({"prompt": said, "n": 3, "temperature": 1.0, "logprobs": 2})),
        3 => ("chat/completions", json!({"messages": messages, "stream": true})),
        4 => (
            "chat/completions",
            json!({"messages": messages, "logprobs": true, "top_logprobs": 1, "stop": ["e", "q"]}),
        ),
        5 => {
            let tool = json!({"type": "function", "function": {"name": "weather", "strict": true, "parameters": schema}});
            let fields = json!({"messages": messages, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false});
            ("chat/completions", with(fields, json!({"max_tokens": 400, "stream": dice.roll(2) == 0})))
        }
        6 => {
            let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
            ("chat/completions", json!({"messages": messages, "response_format": format, "max_tokens": 300}))
        }
        7 => (
            "completions",
            json!({"prompt": said, "structured_outputs": {"regex": "(ab|cd){3,9}!"}, "n": 2, "temperature": 1.0}),
        ),
        _ => {
            let tag = json!({"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"});
            let tags = json!({"format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}});
            (
                "completions",
                json!({"prompt": said, "structured_outputs": {"structural_tag": tags}, "max_tokens": 60}),
            )
        }
    };
    body = with(body, more);
    (if path == "completions" { "/v1/completions" } else { "/v1/chat/completions" }, body)
}

fn send(address: &str, (path, body): &Asked) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes())?;
    Ok(stream)
}

/// What a response says, without what differs each time; or its status.
fn read(mut stream: TcpStream) -> Result<Value, u16> {
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    let status: u16 =
        got.get(9..12).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("no answer: {got:?}"));
    if status != 200 {
        return Err(status);
    }
    let (head, body) = got.split_once("\r\n\r\n").unwrap();
    if !head.contains("text/event-stream") {
        return Ok(plain(serde_json::from_str::<Value>(body).unwrap()["choices"].take()));
    }
    assert!(got.contains("data: [DONE]\n\n"), "a stream that broke off: {got}");
    // Tokens come in other pieces when some were proposed; what they say together is the same.
    let (mut said, mut calls, mut end) = (String::new(), String::new(), Value::Null);
    for chunk in body.lines().filter_map(|l| serde_json::from_str::<Value>(l.strip_prefix("data: ")?).ok()) {
        assert!(chunk.get("error").is_none(), "{chunk}");
        let choice = &chunk["choices"][0];
        said += choice["delta"]["content"].as_str().unwrap_or("");
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            calls += call["function"]["name"].as_str().unwrap_or("");
            calls += call["function"]["arguments"].as_str().unwrap_or("");
        }
        end = if choice["finish_reason"].is_null() { end } else { choice["finish_reason"].clone() };
    }
    Ok(json!([said, calls, end]))
}

fn plain(mut choices: Value) -> Value {
    for choice in choices.as_array_mut().unwrap() {
        for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
            call["id"].take();
        }
    }
    choices
}

#[derive(Default)]
struct Counts {
    answered: AtomicU64,
    left: AtomicU64,
    busy: AtomicU64,
}

fn client(address: &str, i: u64, known: &[(Asked, Value)], until: Instant, counts: &Counts) {
    let (mut dice, since) = (Dice(i * 7919 + 1), Instant::now());
    while Instant::now() < until {
        if i >= STEADY && since.elapsed().as_millis() % 2000 > 1333 {
            thread::sleep(Duration::from_millis(20));
            continue;
        }
        let (asked, alone) = &known[dice.roll(known.len())];
        let mut stream = send(address, asked).unwrap();
        if dice.roll(6) == 0 {
            // Before, within or after the answer.
            stream.set_read_timeout(Some(Duration::from_millis(1 + dice.roll(60) as u64))).unwrap();
            let _some = stream.read(&mut [0; 600]);
            counts.left.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        match read(stream) {
            Ok(answer) => {
                assert_eq!(&answer, alone, "{asked:?}");
                counts.answered.fetch_add(1, Ordering::Relaxed);
            }
            Err(status) => {
                assert_eq!(status, 429, "{asked:?}");
                counts.busy.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Kilobytes of memory of a process.
fn resident(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 4
}

fn median(part: &[u64]) -> u64 {
    let mut part = part.to_vec();
    part.sort_unstable();
    part.get(part.len() / 2).copied().unwrap_or(0)
}

/// The fixture with a module of multi-token prediction, with room for a conversation and a tokenizer of 64 characters.
fn predicting() -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_mtp");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("predicting");
    fs::create_dir_all(&dir).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(1024);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::copy(golden.join("model.safetensors"), dir.join("model.safetensors")).unwrap();
    fs::write(dir.join("chat_template.jinja"), crate::openai::TEMPLATE).unwrap();
    // Space and the end of a line as byte-level tokenizers write them.
    let characters = ('a'..='z').chain('0'..='9').chain("ĠĊ{}[]\":,.<>/_|=()!;-+?*'#@P".chars());
    let vocabulary: serde_json::Map<String, Value> =
        characters.enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    assert_eq!(vocabulary.len(), 64);
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []}});
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    dir
}

#[test]
fn whatever_comes_together_each_answer_is_that_of_the_request_alone() {
    let model = crate::openai::model("mixture");
    hold(&model, [2, 32, 32], &["--speculate", "ngram", "--kv-memory", "320KiB"]);
}

#[test]
fn and_where_the_models_own_module_proposes() {
    hold(&predicting(), [2, 16, 32], &["--speculate", "mtp", "--kv-memory", "480KiB"]);
}

/// Holds a model with adapters of this rank, input and output, under these flags, to what it says alone.
fn hold(model: &Path, shape: [usize; 3], flags: &[&str]) {
    let folder = model.join("adapters");
    adapter(&folder.join("loud"), model, shape, 0.5);
    adapter(&folder.join("low"), model, shape, 0.2);
    let named = ["loud", "low"].map(|name| format!("{name}={}", text(&folder.join(name))));
    let of_all = [
        "--served-name",
        "small",
        "--tool-parser",
        "hermes",
        "--max-adapter-rank",
        "2",
        "--adapter",
        &named[0],
        "--adapter",
        &named[1],
        "--max-model-len",
        "1024",
    ];
    let start = |more: &[&str]| {
        let args = [&["serve", text(model), "--port", "0", "--json"][..], &of_all, more].concat();
        Server::spawn(program(&args))
    };
    let mut dice = Dice(7);
    let alone = start(&["--max-seqs", "1"]);
    let at = |server: &Server| server.at("").trim_start_matches("http://").to_owned();
    let known: Vec<(Asked, Value)> = (0..KINDS)
        .map(|i| {
            let asked = request(i, &mut dice);
            let answer = read(send(&at(&alone), &asked).unwrap())
                .unwrap_or_else(|status| panic!("{status}: {asked:?}"));
            (asked, answer)
        })
        .collect();
    drop(alone);

    let seconds = std::env::var("ASTRAI_SOAK_SECONDS").ok().map(|s| s.parse::<u64>().unwrap());
    let seconds = seconds.unwrap_or(if checks_everything() { 60 } else { 3 });
    let mut server = start(&[&["--max-seqs", "12", "--queue", "48"][..], flags].concat());
    let (counts, address, until) =
        (Counts::default(), at(&server), Instant::now() + Duration::from_secs(seconds));
    let mut memory = vec![];
    thread::scope(|scope| {
        for i in 0..CLIENTS {
            let (address, known, counts) = (&address, &known, &counts);
            scope.spawn(move || client(address, i, known, until, counts));
        }
        while Instant::now() < until {
            memory.push(resident(server.process()));
            thread::sleep(Duration::from_millis(50));
        }
    });
    let n = |name: &str| metric(&server, name);
    let since = Instant::now();
    while n("num_requests_running") + n("num_requests_waiting") + n("num_requests_queued") > 0.0 {
        assert!(since.elapsed() < Duration::from_secs(30), "something still runs");
        thread::sleep(Duration::from_millis(20));
    }
    let third = memory.len() / 3;
    let (middle, last) = (median(&memory[third..2 * third]), median(&memory[2 * third..]));
    let [answered, left, busy] =
        [&counts.answered, &counts.left, &counts.busy].map(|c| c.load(Ordering::Relaxed));
    println!(
        "{seconds} s: {answered} answers, all those of the request alone; {left} left, {busy} times busy; {} tokens in, {} out; {} forks, {} preemptions, {} of {} proposed \
         tokens accepted, {} of {} tokens found; resident {middle} kB, then {last} kB",
        n("prompt_tokens_total"),
        n("generation_tokens_total"),
        n("forked_sequences_total"),
        n("num_preemptions_total"),
        n("spec_decode_num_accepted_tokens_total"),
        n("spec_decode_num_draft_tokens_total"),
        n("prefix_cache_hits_total"),
        n("prefix_cache_queries_total"),
    );
    assert_eq!(
        (n("kv_cache_usage_perc"), n("requests_failed_total")),
        (0.0, 0.0),
        "a page is held, or a request failed"
    );
    for name in [
        "forked_sequences_total",
        "num_preemptions_total",
        "spec_decode_num_accepted_tokens_total",
        "prefix_cache_hits_total",
        "requests_cancelled_total",
    ] {
        assert!(n(name) > 0.0, "{name}");
    }
    assert!(answered > 100 && busy > 0 && left > 0, "{answered} {busy} {left}");
    assert!(last < middle + 4096, "memory grew from {middle} to {last} kB");
    server.signal("-TERM");
    assert_eq!(server.ended().0, Some(0));
}
