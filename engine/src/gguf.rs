//! Models in GGUF files. In: a file's metadata. Out: the configuration, the tokenizer and the chat template as transformers lays them out, so
//! that one reader checks them all; and which tensors of the file are the model's.

use astrai_builders::{ModelConfig, Reading};
use astrai_ir::Storage;
use astrai_runtime::weights::{Gguf, InFile, OfGguf};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// Architectures that are read, and whether the halves of their queries and keys are interleaved.
const ARCHITECTURES: [(&str, bool); 3] = [("llama", true), ("qwen2", false), ("qwen3", false)];

/// Keys of an architecture that are read, or say nothing of the computation.
const READ: [&str; 20] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
    "vocab_size",
    "tensor_data_layout",
];
/// Keys that would change what is computed.
const COMPUTED: [&str; 10] = [
    "attention.sliding_window",
    "attention.scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "rope.scaling.attn_factor",
];

/// Rotary frequencies' factors, in files of Llama 3.1 and later.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A file as a model: its configuration, and its tensors.
///
/// # Errors
/// One line: what of the file is not known, or is not there.
pub fn open(path: &Path) -> Result<(Reading, OfGguf), String> {
    let file = Gguf::open(path).map_err(|e| e.to_string())?;
    let named = |line: String| format!("{}: {line}", path.display());
    let keys = Keys::of(&file).map_err(named)?;
    let config = keys.config(&file).map_err(named)?;
    let reading = ModelConfig::parse(&config.to_string(), &path.display().to_string());
    let mut reading = reading.map_err(|e| e.to_string())?;
    reading.warnings.extend(keys.check().map_err(named)?);
    let heads = keys.interleaved.then_some([reading.config.heads, reading.config.kv_heads]);
    let stored = move |name: &str| InFile::of(name, heads);
    let expected: Vec<_> = reading.config.tensors().into_iter().map(|t| (t.name, t.shape)).collect();
    file.check(expected.iter().cloned(), &stored).map_err(|e| e.to_string())?;
    // What kernels read as codes stays as the file has it.
    let kept = |(name, _): (String, _)| Some((name.clone(), file.narrow(&stored(&name)?.name)?));
    let kept: BTreeMap<_, _> = expected.into_iter().filter_map(kept).collect();
    reading.config.packed = (!kept.is_empty()).then(|| Storage::Each(Arc::new(kept)));
    Ok((reading, OfGguf::new(file, Box::new(stored))))
}

/// A folder with the configuration, the tokenizer and the chat template of a file; it goes when it is dropped.
///
/// # Errors
/// One line.
pub fn texts(path: &Path) -> Result<TempDir, String> {
    let file = Gguf::open(path).map_err(|e| e.to_string())?;
    let folder = tempfile::tempdir().map_err(|e| format!("a temporary folder: {e}"))?;
    write_texts(&file, folder.path())?;
    Ok(folder)
}

/// Writes `config.json`, `tokenizer.json` and `tokenizer_config.json` of a file into a folder.
///
/// # Errors
/// One line.
fn write_texts(file: &Gguf, folder: &Path) -> Result<(), String> {
    let named = |line: String| format!("{}: {line}", file.path().display());
    let [tokenizer, beside] = tokenizer(file).map_err(named)?;
    let config = Keys::of(file).and_then(|keys| keys.config(file)).map_err(named)?;
    let texts = [("config.json", config), ("tokenizer.json", tokenizer), ("tokenizer_config.json", beside)];
    for (name, value) in texts {
        let path = folder.join(name);
        std::fs::write(&path, value.to_string()).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(())
}

/// The keys of an architecture.
struct Keys<'a> {
    all: &'a Map<String, Value>,
    architecture: &'static str,
    interleaved: bool,
}

impl<'a> Keys<'a> {
    fn of(file: &'a Gguf) -> Result<Keys<'a>, String> {
        let all = file.metadata();
        let name = all.get("general.architecture").and_then(Value::as_str).unwrap_or_default();
        let found = ARCHITECTURES.into_iter().find(|a| a.0 == name);
        let known = ARCHITECTURES.map(|a| a.0).join(", ");
        let (architecture, interleaved) =
            found.ok_or_else(|| format!("architecture `{name}` is not read; known are {known}"))?;
        Ok(Keys { all, architecture, interleaved })
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.all.get(&format!("{}.{key}", self.architecture))
    }

    fn needed(&self, key: &str) -> Result<&'a Value, String> {
        let found = self.get(key).filter(|v| v.is_number());
        found.ok_or_else(|| format!("has no number `{}.{key}`; convert the model again", self.architecture))
    }

    /// Refuses what changes the numbers and is not computed; names what is not known.
    fn check(&self) -> Result<Vec<String>, String> {
        let mut unknown = Vec::new();
        let front = format!("{}.", self.architecture);
        for key in self.all.keys().filter_map(|key| key.strip_prefix(&front)) {
            if COMPUTED.contains(&key) {
                return Err(format!("`{front}{key}` changes what is computed, and is not supported"));
            }
            if !READ.contains(&key) {
                unknown.push(format!("`{front}{key}` is not known and not read"));
            }
        }
        Ok(unknown)
    }

    /// The configuration as transformers has it.
    fn config(&self, file: &Gguf) -> Result<Value, String> {
        if self.get("expert_count").and_then(Value::as_u64).is_some_and(|n| n > 0) {
            return Err(
                "mixtures of experts are not read from GGUF; use the checkpoint in safetensors".into()
            );
        }
        let (heads, width) = (self.needed("attention.head_count")?, self.needed("embedding_length")?);
        let of_one = width.as_u64().zip(heads.as_u64().filter(|h| *h > 0)).map(|(w, h)| w / h);
        let rows =
            file.shape("token_embd.weight").and_then(|s| s.first()).ok_or("has no `token_embd.weight`")?;
        let head_dim = self.get("attention.key_length").cloned().unwrap_or(json!(of_one));
        if self.get("attention.value_length").is_some_and(|v| *v != head_dim) {
            return Err("heads of values are not as wide as those of keys".into());
        }
        let bias = file.shape("blk.0.attn_q.bias").is_some();
        let mut config = json!({
            "model_type": self.architecture,
            "vocab_size": rows,
            "hidden_size": width,
            "num_hidden_layers": self.needed("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("attention.head_count_kv").unwrap_or(heads),
            "head_dim": head_dim,
            "intermediate_size": self.needed("feed_forward_length")?,
            "max_position_embeddings": self.needed("context_length")?,
            "rms_norm_eps": self.needed("attention.layer_norm_rms_epsilon")?,
            "rope_theta": self.get("rope.freq_base").cloned().unwrap_or(json!(10000.0)),
            "hidden_act": "silu",
            "tie_word_embeddings": file.shape("output.weight").is_none(),
        });
        if let Some(width) = self.get("rope.dimension_count").filter(|w| **w != config["head_dim"]) {
            return Err(format!("rotates {width} of {} components of a head", config["head_dim"]));
        }
        if self.architecture != "qwen2" {
            config["attention_bias"] = bias.into();
        }
        if let Some(scaling) = self.scaling(file, &config)? {
            config["rope_scaling"] = scaling;
        }
        for (key, id) in [("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")] {
            if let Some(id) = self.all.get(&format!("tokenizer.ggml.{id}_token_id")) {
                config[key] = id.clone();
            }
        }
        Ok(config)
    }

    /// How rotations are scaled to longer contexts.
    fn scaling(&self, file: &Gguf, config: &Value) -> Result<Option<Value>, String> {
        if let Some(factors) = file.floats(ROPE_FACTORS) {
            return llama3(&factors, config).map(Some);
        }
        let number = |key: &str| self.get(key).cloned();
        match self.get("rope.scaling.type").and_then(Value::as_str) {
            None | Some("none") => Ok(None),
            Some("linear") => {
                Ok(Some(json!({ "rope_type": "linear", "factor": number("rope.scaling.factor") })))
            }
            Some("yarn") => Ok(Some(json!({
                "rope_type": "yarn", "factor": number("rope.scaling.factor"),
                "original_max_position_embeddings": number("rope.scaling.original_context_length"),
            }))),
            Some(other) => Err(format!("scales rotations by `{other}`, which is not known")),
        }
    }
}

/// Llama 3's scaling, of which files have the factors on each frequency: the largest is the scaling's, and the others must follow from it.
fn llama3(factors: &[f32], config: &Value) -> Result<Value, String> {
    const ORIGINAL: f64 = 8192.0;
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    let factor = factors.iter().fold(1f64, |m, f| m.max(f64::from(*f)));
    let (base, width) = (config["rope_theta"].as_f64().unwrap_or(1e4), 2.0 * factors.len() as f64);
    let wanted = |i: usize| {
        let length = 2.0 * std::f64::consts::PI * base.powf(2.0 * i as f64 / width);
        if length < ORIGINAL / HIGH {
            1.0
        } else if length > ORIGINAL / LOW {
            factor
        } else {
            let smooth = (ORIGINAL / length - LOW) / (HIGH - LOW);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    let off = |(i, f): (usize, &f32)| (f64::from(*f) - wanted(i)).abs() > 1e-3 * wanted(i);
    if factors.iter().enumerate().any(off) {
        return Err(format!("`{ROPE_FACTORS}` has factors that are not those of Llama 3"));
    }
    Ok(json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL as u64,
    }))
}

/// What follows a contraction's rule in the way that texts are split.
const REST: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Contractions and words.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+";

/// `tokenizer.json` and `tokenizer_config.json`.
fn tokenizer(file: &Gguf) -> Result<[Value; 2], String> {
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
    // 3 is a control token, 4 one that users defined: neither is split.
    let added = (0..tokens.len()).filter(|i| matches!(kind(*i), 3 | 4)).map(|i| {
        json!({
            "id": i, "content": tokens[i], "single_word": false, "lstrip": false, "rstrip": false,
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
    let split = match pre {
        "gpt-2" => None,
        "llama-bpe" | "llama3" | "llama-v3" => Some(format!(r"{WORDS}|\p{{N}}{{1,3}}|{REST}")),
        "qwen2" => Some(format!(r"{WORDS}|\p{{N}}|{REST}")),
        other => {
            return Err(format!(
                "its tokenizer splits texts as `{other}` does; gpt-2, llama-bpe and qwen2 are read"
            ));
        }
    };
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": split.is_none() });
    made["decoder"] = bytes.clone();
    made["pre_tokenizer"] = match &split {
        None => bytes,
        Some(regex) => json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false }, bytes,
        ]}),
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
    for (i, token) in tokens.iter().enumerate() {
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
