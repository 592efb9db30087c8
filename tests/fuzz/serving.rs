//! Targets of what serving reads of a model's folder: tokenizers, chat templates, recommended sampling.

use crate::mutate::{Draws, object, text};
use crate::targets::{Run, shown};
use astrai_serve::recommended::Recommended;
use astrai_serve::template::{Chat, ChatTemplate, Message};
use astrai_serve::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

pub fn tokenizer(d: &mut Draws) -> Vec<u8> {
    let replace = json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "ab"});
    let letters: Map<String, Value> =
        ('a'..='z').chain("Ġ▁ é".chars()).enumerate().map(|(i, c)| (c.to_string(), json!(i))).collect();
    let mut bpe = letters;
    bpe.insert("ab".into(), json!(100));
    bpe.insert("##b".into(), json!(101));
    let parts = [
        json!(null),
        json!({"type": "Sequence", "normalizers": [replace, {"type": "NFKC"}, {"type": "Lowercase"}]}),
        json!({"type": "Precompiled", "precompiled_charsmap": "AAQAAAAAAAA="}),
    ];
    let posts = [
        json!(null),
        json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [102], "tokens": ["<s>"]}}}),
    ];
    let sound = json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 102, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": parts[d.below(3)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "[a-z]+| "}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": posts[d.below(2)],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": true,
            "trim_offsets": true, "use_regex": true}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "a", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": bpe, "merges": [["a", "b"]]}});
    object(&sound, d)
}

pub fn open_tokenizer(folder: &Path) -> Run {
    let folder = folder.to_path_buf();
    Box::new(move |input| {
        shown(fs::write(folder.join("tokenizer.json"), input))?;
        let tokenizer = shown(Tokenizer::open(&folder))?;
        let mut done = Ok(());
        for text in ["abab zé\u{1f600}", &"ab ".repeat(2000)] {
            done = done.and(shown(tokenizer.encode(text, true)).and_then(|ids| {
                let mut stream = tokenizer.stream(true);
                ids.iter().take(50).try_for_each(|id| shown(stream.push(*id)).map(drop))?;
                shown(stream.finish())?;
                shown(tokenizer.decode(&ids, false)).map(drop)
            }));
        }
        done
    })
}

/// An expression of templates; what is deep is short.
fn expression(d: &mut Draws, deep: usize) -> String {
    const ATOMS: [&str; 16] = [
        "messages",
        "messages[0]",
        "messages[0].content",
        "1",
        "'x'",
        "ns",
        "ns.a",
        "l",
        "10**9",
        "range(99999)",
        "none",
        "loop",
        "[1, 2]",
        "{'a': 1}",
        "bos_token",
        "m",
    ];
    if deep == 0 {
        return d.of(&ATOMS).to_string();
    }
    let mut e = || expression(d, deep - 1);
    let (a, b) = (e(), e());
    const FILTERS: [&str; 40] = [
        "tojson",
        "length",
        "join",
        "list",
        "upper",
        "trim",
        "sort",
        "unique",
        "sum",
        "max",
        "min",
        "first",
        "last",
        "reverse",
        "string",
        "int",
        "float",
        "batch(9)",
        "batch(10**9)",
        "slice(10**9)",
        "format(1)",
        "indent(4)",
        "indent(10**9)",
        "replace('x', 'y' * 1000)",
        "map('upper')",
        "select",
        "groupby('role')",
        "dictsort",
        "items",
        "default('x')",
        "truncate(3)",
        "center(10**9)",
        "wordcount",
        "escape",
        "abs",
        "round(2)",
        "urlencode",
        "pprint",
        "attr('role')",
        "tojson(indent=2)",
    ];
    const METHODS: [&str; 16] = [
        "split()",
        "strip()",
        "upper()",
        "items()",
        "keys()",
        "values()",
        "get('a')",
        "startswith('x')",
        "format(1)",
        "join(l)",
        "replace('x', 'yy')",
        "splitlines()",
        "center(10**9)",
        "zfill(10**9)",
        "rsplit('x', 1)",
        "append(1)",
    ];
    match d.below(9) {
        0 => format!("({a} ~ {b})"),
        1 => format!(
            "({a} {} {b})",
            d.of(&["+", "-", "*", "**", "/", "//", "%", "==", "<", "in", "and", "or"])
        ),
        2 | 3 => format!("{a}|{}", d.of(&FILTERS)),
        4 | 5 => format!("{a}.{}", d.of(&METHODS)),
        6 => format!("({a} if {b} else {a})"),
        7 => format!("{a}[{}]", d.of(&["0", "-1", "::2", "1:", "'a'", ":10**9"])),
        _ => format!("[{a}, {b}]"),
    }
}

pub fn template(d: &mut Draws) -> Vec<u8> {
    let mut made = String::from("{% set ns = namespace(a=1) %}{% set l = [1, 'x', [2]] %}");
    for _ in 0..1 + d.below(5) {
        let deep = 1 + d.below(3);
        let e = expression(d, deep);
        made += &match d.below(7) {
            0 => format!("{{% for m in {e} %}}{{{{ {} }}}}{{% endfor %}}", expression(d, 1)),
            1 => format!("{{% if {e} %}}a{{% else %}}b{{% endif %}}"),
            2 => format!("{{% set ns.a = {e} %}}"),
            3 => format!("{{% set l = {e} %}}"),
            4 => format!("{{% for i in range(99999) %}}{{% set ns.a = {e} %}}{{% endfor %}}"),
            5 => format!("{{% macro f(n) %}}{{{{ {e} }}}}{{{{ f(n) }}}}{{% endmacro %}}{{{{ f(1) }}}}"),
            _ => format!("{{{{ {e} }}}}"),
        };
    }
    if d.below(4) == 0 { text(&made, d).into_bytes() } else { made.into_bytes() }
}

pub fn render(input: &[u8]) -> Result<(), String> {
    let template = shown(ChatTemplate::parse(&String::from_utf8_lossy(input), Map::new()))?;
    let messages = [Message::text("user", "Hi"), Message::text("assistant", "Ho")];
    let chat = Chat { messages: &messages, add_generation_prompt: true, ..Chat::default() };
    shown(template.render(&chat)).map(drop)
}

pub fn recommended(d: &mut Draws) -> Vec<u8> {
    let sound = json!({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "eos_token_id": [1, 2], "do_sample": true});
    object(&sound, d)
}

pub fn open_recommended(folder: &Path) -> Run {
    let folder = folder.to_path_buf();
    Box::new(move |input| {
        shown(fs::write(folder.join("generation_config.json"), input))?;
        shown(Recommended::read(&folder, 100)).map(drop)
    })
}
