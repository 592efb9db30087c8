//! What broke under attack, each as it was found: templates that eat time, memory or the stack, tokenizers on which the library
//! breaks off, objects of the kernel cache that are damaged, pipes and devices in place of files, weights that are codes. In: the
//! hostile input. Out: one clear line in good time, from a program that goes on where it should.

use crate::answers::fixture::{golden, make, model, program, refused, text, tokenizer, utf8};
use crate::emulated::checks_everything;
use crate::train::fixture::{command as train, fails, good, shared, small};
use astrai_serve::template::{Chat, ChatTemplate, Message, TemplateError, sandbox_by};
use astrai_serve::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

fn template(source: &str) -> Result<ChatTemplate, TemplateError> {
    sandbox_by(env!("CARGO_BIN_EXE_astrai").into());
    ChatTemplate::parse(source, Map::new())
}

fn rendered(source: &str) -> Result<String, TemplateError> {
    let messages = [Message::text("user", "Hi")];
    template(source)?.render(&Chat { messages: &messages, ..Chat::default() })
}

/// Neither a count of steps nor of text bounds what these take; each is stopped or refused, in seconds.
#[test]
fn templates_end_whatever_they_do() {
    let many = |body: &str| format!("{{% for i in range(99999) %}}{body}{{% endfor %}}");
    let list = "{% set l = range(99999) | list %}";
    let grow = |made: &str| {
        let to = if made.contains("ns.l") { "l" } else { "s" };
        format!("{{% set ns = namespace(s='x', l=[1]) %}}{}", many(&format!("{{% set ns.{to} = {made} %}}")))
    };
    let sources = [
        // The stack, by a value that holds itself.
        "{% set ns=namespace() %}{% set ns.me = ns %}{{ ns }}".into(),
        "{% set ns=namespace() %}{% set ns.me = ns %}{{ ns == ns }}{{ [ns] == [[ns]] }}{{ ns | string }}"
            .into(),
        // Builtins that do much in one step.
        "{{ [1]|batch(10**9,'x')|list|length }}".into(),
        "{{ [1]|slice(10**9)|list|length }}".into(),
        "{{ '%1000000000d'|format(1) }}".into(),
        "{{ '%.1000000000f'|format(1) }}".into(),
        "{{ '{:>1000000000}'.format('a') }}".into(),
        format!("{list}{}", many("{% if l|sum %}{% endif %}")),
        format!("{list}{}", many("{% if l|max %}{% endif %}")),
        format!("{list}{}", many("{% if -1 in l %}{% endif %}")),
        format!("{list}{}", many("{% if l == l %}{% endif %}")),
        format!("{list}{}", many("{% set x = l|sort|unique|list %}")),
        format!("{{% set s = 'x' * 1000000 %}}{}", many("{% set t = s[::2] %}")),
        // Text.
        many("{{ 'x' * 1000000 }}"),
        many(&"x".repeat(100_000)),
        format!("{{% set x %}}{}{{% endset %}}", many("{{ 'x' * 1000000 }}")),
        "{{ (range(99999) | list) | join('x' * 100000) }}".into(),
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}".into(),
        "{{ ('\\n' * 100000) | indent(100000, blank=true) }}".into(),
        "{{ 'x'.center(1000000000) }}".into(),
        "{{ 'x' * 1000000000 }}".into(),
        grow("ns.s ~ ns.s"),
        grow("ns.s + ns.s"),
        grow("ns.s * 2"),
        grow("ns.l + ns.l"),
    ];
    // Outside of continuous integration every fourth.
    for source in sources.iter().step_by(if checks_everything() { 1 } else { 4 }) {
        let since = Instant::now();
        let done = rendered(source);
        let line = match &done {
            // Some are lazy, and do nothing where nothing is asked of them.
            Ok(text) => text.chars().take(20).collect(),
            Err(e) => e.to_string(),
        };
        assert!(since.elapsed() < Duration::from_secs(8), "{source}: {:?}", since.elapsed());
        assert!(line.len() < 600 && !line.contains('\n'), "{source}: {line}");
        let ended = matches!(done, Err(TemplateError::Stopped(_) | TemplateError::Failed { .. }));
        assert!(ended || line.len() < 20, "{source}: {done:.200?}");
    }
    assert_eq!(rendered("{{ messages[0].content }}").unwrap(), "Hi", "and the next is rendered");
    let said = "{{ raise_exception('no\n good') }}";
    assert_eq!(rendered(said), Err(TemplateError::Raised("no\n good".into())));
}

/// A rendering ends when nobody waits for it.
#[test]
fn a_rendering_gives_way() {
    let slow =
        "{% set l = range(99999) | list %}{% for i in range(99999) %}{% if -1 in l %}{% endif %}{% endfor %}";
    let (template, left) = (template(slow).unwrap(), AtomicBool::new(false));
    let messages = [Message::text("user", "Hi")];
    let since = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            left.store(true, Ordering::Relaxed);
        });
        let chat = Chat { messages: &messages, abandoned: Some(&left), ..Chat::default() };
        let line = template.render(&chat).unwrap_err().to_string();
        assert!(line.contains("nobody waits"), "{line}");
    });
    assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
}

/// A tokenizer with something in place of something else.
fn tokenizer_with(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    let mut file = tokenizer(8);
    change(&mut file);
    fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::open(dir.path()).map_err(|e| e.to_string())
}

#[test]
fn tokenizers_that_break_the_library_are_refused() {
    let replace =
        |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let ten = replace(json!({"Regex": "."}), "abcdefghij");
    let cases: [(&str, Value); 6] = [
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "////fwAAAAA="})),
        (
            "model",
            json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "a long prefix",
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}),
        ),
        (
            "post_processor",
            json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {}}),
        ),
        ("normalizer", json!({"type": "Sequence", "normalizers": vec![ten.clone(); 8]})),
        ("decoder", json!({"type": "Sequence", "decoders": vec![ten; 8]})),
    ];
    for (part, value) in cases {
        let line = tokenizer_with(|file| file[part] = value.clone()).expect_err(part);
        assert!(line.contains("is no usable tokenizer") && !line.contains('\n'), "{value}: {line}");
    }
    // What is only seen at work is an error of that work.
    for pattern in [json!({"String": ""}), json!({"Regex": "(?=t)"}), json!({"Regex": "(a|a)*$"})] {
        if let Ok(tokenizer) = tokenizer_with(|file| file["normalizer"] = replace(pattern, "xy")) {
            let _either = tokenizer.encode("t1 t2", true).map_err(|e| assert!(!e.message.contains('\n')));
        }
    }
    let ten = replace(json!({"Regex": "."}), "abcdefghij");
    let grows = tokenizer_with(|file| file["normalizer"] = json!({"type": "Sequence", "normalizers": [ten]}))
        .unwrap();
    let line = grows.encode(&"x".repeat(4 << 20), false).unwrap_err().to_string();
    assert!(line.contains("normalising makes more than"), "{line}");
    assert!(grows.encode(&"x".repeat(4 << 10), false).is_ok());
}

/// Ends a command that waits where it should not.
fn within(seconds: u64, command: &mut Command) -> (Option<i32>, String) {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > Duration::from_secs(seconds) {
            child.kill().unwrap();
            panic!("{command:?} waits");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let out = child.wait_with_output().unwrap();
    (out.status.code(), utf8(&out.stderr))
}

#[test]
fn pipes_and_devices_in_place_of_files_are_refused_at_once() {
    let files = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    ];
    for name in files {
        for device in [None, Some("/dev/zero")] {
            let dir = make(&format!("special-{name}"), |_| {});
            let path = dir.join(name);
            let _absent = fs::remove_file(&path);
            match device {
                Some(device) => symlink(device, &path).unwrap(),
                None => assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
            }
            let (code, line) = within(20, &mut program(&answer(&dir)));
            assert_eq!((code, line.lines().count()), (Some(1), 1), "{name}: {line}");
            assert!(line.contains("not a regular file"), "{name}: {line}");
        }
    }
    // What a run has written itself is read again when it goes on.
    let dir = tempfile::tempdir().unwrap();
    let run = |steps: &str| {
        let mut c = small(dir.path());
        c.args(["--batch", "2", "--save-every", "1", "--steps", steps]);
        c
    };
    good(&mut run("1"));
    let path = dir.path().join("metrics.jsonl");
    fs::remove_file(&path).unwrap();
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let (code, line) = within(20, run("2").arg("--resume"));
    assert!(code == Some(1) && line.contains("metrics.jsonl: not a regular file"), "{line}");
}

#[test]
fn integer_weights_are_not_taken_for_numbers() {
    use astrai_ir::DType;
    use astrai_runtime::weights::{Checkpoint, write};
    let whole = Checkpoint::open(&golden("model.safetensors")).unwrap();
    let dir = make("integers", |_| {});
    let name = "model.layers.1.mlp.down_proj.weight";
    for dtype in [DType::I8, DType::U8, DType::I32, DType::I64, DType::Bool] {
        let codes = vec![1; whole.get(name).unwrap().elements() * dtype.bytes()];
        let tensors = whole.names().map(|n| {
            let v = whole.get(n).unwrap();
            let (dtype, bytes) = if n == name { (dtype, &codes[..]) } else { (v.dtype(), v.bytes()) };
            (n, dtype, v.shape(), bytes)
        });
        write(&dir.join("model.safetensors"), tensors, &Default::default()).unwrap();
        let line = refused(&answer(&dir));
        assert!(line.contains(name) && line.contains("integers"), "{dtype}: {line}");
    }
}

/// Numbers that are none are written, for whoever looks for the cause, and said.
#[test]
fn results_that_are_not_finite_are_a_failure() {
    use astrai_ir::DType;
    use astrai_runtime::weights::{Checkpoint, write};
    let whole = Checkpoint::open(&golden("model.safetensors")).unwrap();
    let (dir, name) = (make("nan", |_| {}), "model.norm.weight");
    let nan = vec![0xff; whole.get(name).unwrap().bytes().len()];
    let tensors = whole.names().map(|n| {
        let v = whole.get(n).unwrap();
        (n, v.dtype(), v.shape(), if n == name { &nan[..] } else { v.bytes() })
    });
    write(&dir.join("model.safetensors"), tensors, &Default::default()).unwrap();
    let [inputs, outputs] = ["in.safetensors", "out.safetensors"].map(|f| dir.join(f));
    let ids: Vec<u8> = [1i64, 2, 3].iter().flat_map(|i| i.to_le_bytes()).collect();
    write(&inputs, [("input_ids", DType::I64, &[1, 3][..], &ids[..])], &Default::default()).unwrap();
    let out = program(&["run", text(&dir), "--inputs", text(&inputs), "--outputs", text(&outputs)])
        .output()
        .unwrap();
    let line = utf8(&out.stderr);
    assert_eq!((out.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.contains("logits has values that are not finite"), "{line}");
    assert_eq!(Checkpoint::open(&outputs).unwrap().get("logits").unwrap().shape(), [1, 3, 320]);
}

/// Chats that take their time do not hold up others once their clients have left.
#[test]
fn chats_whose_clients_left_hold_up_nobody() {
    use crate::answers::serve::Server;
    use std::io::Write;
    let dir = make("leaving", |_| {});
    let slow = "{% if messages[0].content == 'slow' %}{% set l = range(99999) | list %}\
        {% for i in range(99999) %}{% if -1 in l %}{% endif %}{% endfor %}{% endif %}t4 t9";
    fs::write(dir.join("chat_template.jinja"), slow).unwrap();
    let server = Server::start(&dir, &["--bodies-limit", "1000000"]);
    let chat = |said: &str| json!({"messages": [{"role": "user", "content": said}], "max_tokens": 1});
    let address = server.at("").trim_start_matches("http://").to_string();
    for _ in 0..16 {
        let body = chat("slow").to_string();
        let mut client = std::net::TcpStream::connect(&address).unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        client.write_all(format!("{head}{body}").as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(50));
    }
    let since = Instant::now();
    assert_eq!(server.post("/v1/chat/completions", &chat("quick")).0, 200);
    assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
    assert_eq!(server.get("/health").0, 200);
}

/// Arguments of a short answer of a model.
fn answer(model: &Path) -> [&str; 8] {
    ["generate", text(model), "--prompt", "t1", "--max-tokens", "2", "--temperature", "0"]
}

/// Every walk of the compiler ends, however long the graph is: one of as many nodes as are accepted, and one more.
#[test]
fn the_longest_graph_is_compiled() {
    use astrai_ir::json::{MAX_NODES, to_json};
    use astrai_ir::ops::UnaryKind;
    use astrai_ir::{DType, Graph};
    let dir = tempfile::tempdir().unwrap();
    let mut g = Graph::new(vec![]);
    let mut x = g.input("x", DType::F32, vec![4.into()]).unwrap();
    for i in 1..=MAX_NODES {
        x = g.unary([UnaryKind::Tanh, UnaryKind::Exp][i % 2], x).unwrap();
    }
    let whole = to_json(&g);
    let compile = |graph: &Value, to: usize| {
        let mut graph = graph.clone();
        let nodes = graph["nodes"].as_array_mut().unwrap();
        nodes.truncate(to);
        let last = nodes.len() - 1;
        graph["outputs"] = json!([{"name": "y", "node": last}]);
        fs::write(dir.path().join("graph.json"), graph.to_string()).unwrap();
        program(&["compile", text(&dir.path().join("graph.json")), "--json"]).output().unwrap()
    };
    let out = compile(&whole, MAX_NODES);
    let summary: Value =
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", utf8(&out.stderr)));
    assert!(summary["launches"].as_u64().unwrap() > 500, "a region is bounded: {summary}");
    let out = compile(&whole, MAX_NODES + 1);
    assert!(
        !out.status.success() && utf8(&out.stderr).contains("more than 262144 nodes"),
        "{}",
        utf8(&out.stderr)
    );
}

/// What a deep model costs to compile follows the kinds of its layers, not their number; memory, too.
#[test]
fn a_model_of_many_layers_is_compiled_like_one_of_few() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1000,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64});
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    for what in ["prefill", "decode", "train"] {
        let script = format!("ulimit -v 600000; exec \"$PROGRAM\" compile . --for {what} --json");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).env("PROGRAM", env!("CARGO_BIN_EXE_astrai")).current_dir(dir.path());
        let (code, line) = within(60, &mut shell);
        assert_eq!(code, Some(0), "{what}: {line}");
    }
}

/// A folder for compiled kernels, and what is in it after a run.
fn objects(cache: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(cache.join("kernels")).unwrap().map(|e| e.unwrap().path());
    let mut all: Vec<PathBuf> =
        all.filter(|p| p.extension().is_some_and(|e| e == "so" || e == "kernel")).collect();
    all.sort();
    all
}

/// What a power cut or a full disk leaves in the cache is built again.
#[test]
fn damaged_kernels_are_built_again() {
    let dir = tempfile::tempdir().unwrap();
    let run = || {
        let out = program(&answer(model())).env("ASTRAI_CACHE", dir.path()).output().unwrap();
        assert!(out.status.success() && out.stderr.is_empty(), "{:?}: {}", out.status, utf8(&out.stderr));
        out.stdout
    };
    let (first, whole) = (run(), objects(dir.path()));
    assert!(whole.iter().any(|p| p.extension().unwrap() == "so"));
    type Damage = fn(&[u8]) -> Vec<u8>;
    let damages: [Damage; 5] = [
        |bytes| bytes[..bytes.len().min(4096)].to_vec(),
        |bytes| bytes.iter().enumerate().map(|(i, b)| if i > bytes.len() / 2 { b ^ 1 } else { *b }).collect(),
        |bytes| bytes.iter().enumerate().map(|(i, b)| if i > bytes.len() / 2 { 0 } else { *b }).collect(),
        |_| vec![],
        |_| b"no object at all".to_vec(),
    ];
    for damage in damages {
        for path in &whole {
            let bytes = fs::read(path).unwrap();
            fs::write(path, damage(&bytes)).unwrap();
        }
        assert!(run() == first && objects(dir.path()) == whole);
        assert!(run() == first);
    }
}

/// Without a folder of its own the program keeps no kernels where others could place theirs.
#[test]
fn without_a_home_there_is_no_cache_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let temporary = dir.path().join("tmp");
    fs::create_dir(&temporary).unwrap();
    let mut command = program(&answer(model()));
    for name in ["HOME", "XDG_CACHE_HOME", "ASTRAI_CACHE"] {
        command.env_remove(name);
    }
    let out = command.env("TMPDIR", &temporary).output().unwrap();
    let line = utf8(&out.stderr);
    assert!(out.status.success() && line.contains("compiled for this run alone"), "{line}");
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "and leaves nothing");
    // A parent that others can write, and is not sticky, could be exchanged.
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o777)).unwrap();
    let out =
        command.env("XDG_CACHE_HOME", temporary.join("cache")).env("TMPDIR", dir.path()).output().unwrap();
    let line = utf8(&out.stderr);
    assert!(out.status.success() && line.contains("can be changed by another user"), "{line}");
    assert!(!temporary.join("cache/astrai/kernels/x.so").exists());
}

/// Ids that changed since the run was saved are not what it was trained on, whatever meta.json says.
#[test]
fn altered_shards_are_not_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("out"));
    fs::create_dir(&data).unwrap();
    for entry in fs::read_dir(shared().join("run/data")).unwrap().map(|e| e.unwrap()) {
        fs::copy(entry.path(), data.join(entry.file_name())).unwrap();
    }
    let run = |steps: &str| {
        let mut c = train(&out);
        c.arg("--config").arg(shared().join("config.json")).arg("--data").arg(&data);
        c.args(["--seq", "32", "--batch", "2", "--save-every", "1", "--steps", steps]);
        c
    };
    good(&mut run("2"));
    good(run("3").arg("--resume"));
    let shard = data.join("data_00000.bin");
    let mut bytes = fs::read(&shard).unwrap();
    let other = (2..bytes.len()).step_by(2).find(|i| bytes[*i..i + 2] != bytes[..2]).unwrap();
    (0..2).for_each(|i| bytes.swap(i, other + i));
    fs::write(&shard, bytes).unwrap();
    let (line, _) = fails(run("4").arg("--resume"));
    assert!(line.contains("the data are not those it was trained on"), "{line}");
}
