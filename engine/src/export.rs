//! A model as others read it. In: a model, with an adapter merged or not, and the folder whose tokenizer goes with it. Out: a folder as Hugging Face
//! lays a model out, whole or not at all: `config.json`, weights of one type, in shards with an index where one file would be too large, and
//! the tokenizer's files.

use crate::{Error, Hear, Model, Note};
use astrai_files::{Disk, FileError, System, beside, read_present, read_text};
use astrai_ir::DType;
use astrai_runtime::weights::{Entry, Writer};
use astrai_runtime::{Source, Value};
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Files beside the weights that are copied where they are there.
const COPIED: [&str; 11] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
];
/// Longest of them, and of a `config.json`, in bytes.
const LONGEST: u64 = 256 << 20;

/// What is written.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// The type of all weights but those that no model rounds; none for that of the embedding as it is stored.
    pub dtype: Option<DType>,
    /// Most bytes of the tensors of a file.
    pub shard: u64,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Files of weights.
    pub files: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// The type of the weights.
    pub dtype: DType,
}

/// Writes `model` into the folder `to`, which must not hold anything, with the tokenizer of the folder `from`.
///
/// # Errors
/// `to` holds something, a file of `from` cannot be read, or the disk refuses.
pub fn export(model: &Model, from: &Path, to: &Path, form: Form, hear: Hear) -> Result<Written, Error> {
    if to.exists() && std::fs::read_dir(to).map_or(true, |mut all| all.next().is_some()) {
        return Err(format!("{}: is there already; give another --out", to.display()).into());
    }
    let folder = beside(to);
    // Only a process that died under our number leaves one.
    let _absent = System.remove_folder(&folder);
    let written = write(model, from, &folder, form, hear).and_then(|written| {
        let made = System.rename(&folder, to).map_err(FileError::io(to, "give it its name"));
        made.map(|()| written).map_err(|e| Error(e.to_string()))
    });
    if written.is_err() {
        let _leftover = System.remove_folder(&folder);
    }
    written
}

fn write(model: &Model, from: &Path, to: &Path, form: Form, hear: Hear) -> Result<Written, Error> {
    let refused = |e: FileError| Error(e.to_string());
    System.create_folder(to).map_err(FileError::io(to, "create it")).map_err(refused)?;
    let own = model.folder.as_deref().unwrap_or(from);
    let put = |name: &str, bytes: &[u8]| {
        let path = to.join(name);
        let done = System.create(&path).and_then(|mut file| file.write(bytes).and_then(|()| file.sync()));
        done.map_err(FileError::io(&path, "write it")).map_err(refused)
    };
    for name in COPIED {
        let read = |folder: &Path| read_present(&folder.join(name), LONGEST).map_err(refused);
        if let Some(bytes) = read(from)?.map_or_else(|| read(own), |bytes| Ok(Some(bytes)))? {
            put(name, &bytes)?;
        }
    }
    let specs = model.config.tensors();
    let stored = specs.first().and_then(|t| model.source().tensor(&t.name)).map_or(DType::F32, |t| t.dtype);
    let dtype = form.dtype.unwrap_or(stored);
    let entry = |t: &astrai_builders::config::TensorSpec| {
        let own = if t.fixed { DType::F32 } else { dtype };
        Entry { name: t.name.clone(), dtype: own, shape: t.shape.clone() }
    };
    let entries: Vec<Entry> = specs.iter().map(entry).collect();
    let shards = shards(&entries, form.shard);
    let (mut weight_map, mut bytes, mut done) = (Map::new(), 0, 0);
    // transformers insists on knowing which framework's layout this is.
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let mut file = Writer::create(&to.join(&name), shard, &metadata)?;
        for e in *shard {
            let missing = || Error(format!("the weights have no tensor `{}`", e.name));
            let t = model.source().tensor(&e.name).ok_or_else(missing)?;
            let converted = converted(t, e.dtype).map_err(|why| Error(format!("`{}` {why}", e.name)))?;
            file.put(&converted)?;
            model.source().done(&e.name);
            weight_map.insert(e.name.clone(), json!(name));
            bytes += size(e);
            done += 1;
            hear(Note::Progress { what: "writing weights", done, total: entries.len() as u64 });
        }
        file.finish()?;
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": bytes}, "weight_map": weight_map});
        put("model.safetensors.index.json", format!("{index:#}\n").as_bytes())?;
    }
    put("config.json", config(own, dtype)?.as_bytes())?;
    System.sync_folder(to).map_err(FileError::io(to, "make it durable")).map_err(refused)?;
    Ok(Written { files: shards.len(), bytes, dtype })
}

/// Consecutive tensors of at most so many bytes together, or one that alone has more.
fn shards(entries: &[Entry], most: u64) -> Vec<&[Entry]> {
    let (mut out, mut first, mut sum) = (Vec::new(), 0, 0);
    for (i, e) in entries.iter().enumerate() {
        if i > first && sum + size(e) > most {
            out.push(&entries[first..i]);
            (first, sum) = (i, 0);
        }
        sum += size(e);
    }
    out.push(&entries[first..]);
    out
}

fn size(e: &Entry) -> u64 {
    (e.shape.iter().product::<usize>() * e.dtype.bytes()) as u64
}

/// The elements of a tensor in a type, which must have room for each.
fn converted(t: Source, dtype: DType) -> Result<Vec<u8>, String> {
    if t.dtype == dtype {
        return Ok(t.bytes.into_owned());
    }
    let value = Value { dtype: t.dtype, shape: t.shape, bytes: t.bytes.into_owned() };
    let most = if dtype == DType::F16 { 65_504.0 } else { f32::MAX };
    let mut out = Vec::with_capacity(value.bytes.len() / t.dtype.bytes() * dtype.bytes());
    for x in value.to_f32() {
        if x.is_finite() && x.abs() > most {
            return Err(format!("has {x}, for which {dtype} has no room; use --dtype bf16 or f32"));
        }
        dtype.encode(f64::from(x), &mut out);
    }
    Ok(out)
}

/// The text of the model's `config.json` with the type of the weights, which are no longer quantised.
fn config(folder: &Path, dtype: DType) -> Result<String, Error> {
    let path = folder.join("config.json");
    let text = read_text(&path, LONGEST).map_err(|e| e.to_string())?;
    let mut keys: Map<String, Json> =
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    let key = if keys.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    keys.insert(key.to_string(), json!(name));
    keys.remove("quantization_config");
    Ok(format!("{:#}\n", Json::Object(keys)))
}
