//! The tokenizer of a GGUF file. In: its metadata. Out: `tokenizer.json` and `tokenizer_config.json` as transformers lays them out.

use astrai_runtime::weights::Gguf;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// What follows a contraction's rule in the way that texts are split.
const REST: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Contractions and words.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+";

/// Bytes of the longest token of SentencePiece's that is made of two others.
const LONGEST: usize = 512;

/// How DeepSeek-V3 splits texts: numbers, then Chinese and Japanese, then the rest.
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// `tokenizer.json` and `tokenizer_config.json`.
pub(super) fn tokenizer(file: &Gguf) -> Result<[Value; 2], String> {
    let all = file.metadata();
    let get = |key: &str| all.get(&format!("tokenizer.ggml.{key}"));
    let list = |key: &str| get(key).and_then(Value::as_array);
    let tokens =
        list("tokens").ok_or("has no `tokenizer.ggml.tokens`; convert the model with its tokenizer")?;
    let tokens: Vec<&str> = tokens.iter().map(|t| t.as_str().unwrap_or_default()).collect();
    let kind = |i: usize| list("token_type").and_then(|l| l.get(i)?.as_u64()).unwrap_or(1);
    let mut vocabulary = Map::new();
    for (i, token) in tokens.iter().enumerate() {
        vocabulary.entry(token.to_string()).or_insert(i.into());
    }
    // Phi-3's own tokenizer takes the space behind its tokens for their part; files do not say so.
    let phi3 =
        all.get("general.architecture") == Some(&json!("phi3")) && get("model") == Some(&json!("llama"));
    let strips = |token: &str| phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&token);
    // 3 is a control token, 4 one that users defined: neither is split.
    let added = (0..tokens.len()).filter(|i| matches!(kind(*i), 3 | 4)).map(|i| {
        json!({
            "id": i, "content": tokens[i], "single_word": false, "lstrip": false, "rstrip": strips(tokens[i]),
            "normalized": false, "special": kind(i) == 3,
        })
    });
    let mut made = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
    });
    let named = |key: &str| {
        let id = get(&format!("{key}_token_id")).and_then(Value::as_u64)?;
        tokens.get(usize::try_from(id).ok()?).map(|t| (*t, id))
    };
    let (model, pre) = (get("model").and_then(Value::as_str), get("pre").and_then(Value::as_str));
    match model {
        Some("gpt2") => byte_level(&mut made, pre.unwrap_or("default"), list("merges"), vocabulary)?,
        Some("llama") => {
            sentence_pieces(&mut made, &tokens, list("scores"), get("add_space_prefix"), vocabulary)
        }
        other => return Err(format!("its tokenizer is of the kind {other:?}; gpt2 and llama are read")),
    }
    // SentencePiece's begin every text with their token unless the file says otherwise.
    let begins = get("add_bos_token").and_then(Value::as_bool).unwrap_or(model == Some("llama"));
    if let Some((bos, id)) = named("bos").filter(|_| begins) {
        let first = json!({ "SpecialToken": { "id": bos, "type_id": 0 } });
        let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
        made["post_processor"] = json!({
            "type": "TemplateProcessing", "single": [first, text("A")], "pair": [first, text("A"), text("B")],
            "special_tokens": { bos: { "id": bos, "ids": [id], "tokens": [bos] } },
        });
    }
    let mut config = json!({ "add_bos_token": begins, "clean_up_tokenization_spaces": false });
    for (key, of) in
        [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")]
    {
        if let Some((token, _)) = named(of) {
            config[key] = token.into();
        }
    }
    if let Some(template) = all.get("tokenizer.chat_template") {
        config["chat_template"] = template.clone();
    }
    Ok([made, config])
}

/// Byte-level BPE, whose texts are split as `pre` says.
fn byte_level(
    made: &mut Value,
    pre: &str,
    merges: Option<&Vec<Value>>,
    vocabulary: Map<String, Value>,
) -> Result<(), String> {
    let splits = match pre {
        "gpt-2" => vec![],
        "llama-bpe" | "llama3" | "llama-v3" | "dbrx" => vec![format!(r"{WORDS}|\p{{N}}{{1,3}}|{REST}")],
        "qwen2" | "deepseek-r1-qwen" => vec![format!(r"{WORDS}|\p{{N}}|{REST}")],
        "deepseek-v3" => DEEPSEEK.map(String::from).to_vec(),
        other => {
            return Err(format!(
                "its tokenizer splits texts as `{other}` does; gpt-2, llama-bpe, dbrx, qwen2 and deepseek-v3 are read"
            ));
        }
    };
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits.is_empty() });
    made["decoder"] = bytes.clone();
    let split = |regex: &String| json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
    made["pre_tokenizer"] = match splits.is_empty() {
        true => bytes,
        false => {
            let all: Vec<Value> = splits.iter().map(split).chain([bytes]).collect();
            json!({ "type": "Sequence", "pretokenizers": all })
        }
    };
    let merges = merges.ok_or("has no `tokenizer.ggml.merges`")?;
    made["model"] = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": pre.starts_with("llama"), "vocab": vocabulary,
        "merges": merges,
    });
    Ok(())
}

/// SentencePiece's BPE: merges are all ways to make a token of two, the likeliest first; bytes stand for characters that no token has.
fn sentence_pieces(
    made: &mut Value,
    tokens: &[&str],
    scores: Option<&Vec<Value>>,
    prefix: Option<&Value>,
    vocabulary: Map<String, Value>,
) {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().rev().map(|(i, t)| (*t, i)).collect();
    let score = |i: usize| scores.and_then(|s| s.get(i)?.as_f64()).unwrap_or(0.0);
    let mut merges = Vec::new();
    // Longer ones are no words: each of their cuts would be looked up whole.
    for (i, token) in tokens.iter().enumerate().filter(|(_, t)| t.len() <= LONGEST) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let mut ways: Vec<_> = cuts.filter_map(|(a, b)| Some((*ids.get(a)?, *ids.get(b)?))).collect();
        ways.sort_unstable();
        merges.extend(ways.into_iter().map(|(a, b)| (score(i), tokens[a], tokens[b])));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    let merges: Vec<Value> = merges.into_iter().map(|(_, a, b)| json!([a, b])).collect();
    let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let prefixed = prefix.and_then(Value::as_bool).unwrap_or(true);
    made["normalizer"] = match prefixed {
        true => json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, space] }),
        false => space,
    };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefixed {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    made["decoder"] = json!({ "type": "Sequence", "decoders": decoders });
    made["model"] = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocabulary, "merges": merges,
    });
}
