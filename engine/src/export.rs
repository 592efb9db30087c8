//! A model as others read it. In: a model, with an adapter merged or not, and the folder whose tokenizer goes with it. Out: a folder as
//! Hugging Face lays a model out, whole or not at all: `config.json`, weights of one type, those of linear layers as codes and scales
//! where that is asked for (compressed-tensors), in shards with an index where one file would be too large, and the tokenizer's files.

use crate::calibrate::Codes;
use crate::{Error, Hear, Model, Note, gguf};
use astrai_builders::config::TensorSpec;
use astrai_builders::{ModelConfig, Program, build};
use astrai_files::{Disk, FileError, System, beside, read_present, read_text};
use astrai_ir::{Code, DType, Narrow};
use astrai_runtime::weights::{Entry, Writer, compress, compressed_layout, is_gguf, quantise};
use astrai_runtime::{Source, Value};
use serde_json::{Map, Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Files beside the weights that are copied where they are there.
pub const COPIED: [&str; 11] = [
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
pub const LONGEST: u64 = 256 << 20;

/// What is written.
#[derive(Clone, Copy, Debug)]
pub struct Form<'a> {
    /// The type of all weights but those that no model rounds; none for that of the embedding as it is stored.
    pub dtype: Option<DType>,
    /// Most bytes of the tensors of a file.
    pub shard: u64,
    /// How weights of linear layers are rounded, without the head.
    pub narrow: Option<Narrow>,
    /// Those that are rounded already, in that way.
    pub codes: Option<&'a Codes>,
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
pub fn export(model: &Model, from: &Path, to: &Path, form: Form<'_>, hear: Hear) -> Result<Written, Error> {
    if to.exists() && std::fs::read_dir(to).map_or(true, |mut all| all.next().is_some()) {
        return Err(format!("{}: is there already; give another --out", to.display()).into());
    }
    // A GGUF file holds its tokenizer itself.
    let texts = is_gguf(from).then(|| gguf::texts(from)).transpose()?;
    let from = texts.as_ref().map_or(from, |texts| texts.path());
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

fn write(model: &Model, from: &Path, to: &Path, form: Form<'_>, hear: Hear) -> Result<Written, Error> {
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
    let rounded = form.narrow.map(|narrow| Rounded::of(&model.config, narrow)).transpose()?;
    let packing = rounded.as_ref().map(|r| r.stated(&model.config));
    put("config.json", config(own, dtype, packing)?.as_bytes())?;
    let whole = |t: TensorSpec| {
        let own = if t.fixed { DType::F32 } else { dtype };
        let entries = vec![Entry { name: t.name.clone(), dtype: own, shape: t.shape }];
        Unit { tensor: t.name, narrow: None, entries }
    };
    let unit = |t: TensorSpec| rounded.as_ref().and_then(|r| r.unit(&t)).unwrap_or_else(|| whole(t));
    let units: Vec<Unit> = specs.into_iter().map(unit).collect();
    let shards = shards(&units, form.shard);
    let (mut weight_map, mut bytes, mut done) = (Map::new(), 0, 0);
    // transformers insists on knowing which framework's layout this is.
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let entries: Vec<Entry> = shard.iter().flat_map(|u| u.entries.clone()).collect();
        let mut file = Writer::create(&to.join(&name), &entries, &metadata)?;
        for u in *shard {
            let missing = || Error(format!("the weights have no tensor `{}`", u.tensor));
            let t = model.source().tensor(&u.tensor).ok_or_else(missing)?;
            for data in u.data(t, form.codes).map_err(|why| Error(format!("`{}` {why}", u.tensor)))? {
                file.put(&data)?;
            }
            model.source().done(&u.tensor);
            bytes += u.size();
            done += 1;
            hear(Note::Progress { what: "writing weights", done, total: units.len() as u64 });
        }
        file.finish()?;
        weight_map.extend(entries.into_iter().map(|e| (e.name, json!(name))));
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": bytes}, "weight_map": weight_map});
        put("model.safetensors.index.json", format!("{index:#}\n").as_bytes())?;
    }
    System.sync_folder(to).map_err(FileError::io(to, "make it durable")).map_err(refused)?;
    Ok(Written { files: shards.len(), bytes, dtype })
}

/// A tensor of the model, and the tensors that stand for it in the file.
struct Unit {
    tensor: String,
    /// How it is rounded, and how many neighbours share a scale.
    narrow: Option<(Narrow, usize)>,
    entries: Vec<Entry>,
}

impl Unit {
    fn size(&self) -> u64 {
        let of = |e: &Entry| (e.shape.iter().product::<usize>() * e.dtype.bytes()) as u64;
        self.entries.iter().map(of).sum()
    }

    /// The bytes of its entries.
    fn data(&self, t: Source, codes: Option<&Codes>) -> Result<Vec<Vec<u8>>, String> {
        match (self.narrow, t.shape.as_slice()) {
            (Some((narrow, group)), &[n, k]) if t.dtype.is_float() => {
                let made = codes.and_then(|codes| codes.get(&self.tensor)).cloned();
                let made = made.unwrap_or_else(|| quantise(&t.bytes, t.dtype, narrow, group));
                Ok(compress(narrow, [n, k], made))
            }
            (None, _) => Ok(vec![converted(t, self.entries.first().map_or(DType::F32, |e| e.dtype))?]),
            _ => Err("is no matrix of floats".into()),
        }
    }
}

/// The weights of linear layers that are rounded, head aside: those that kernels would read as codes.
///
/// # Errors
/// There is none; the model is no decoder.
pub fn rounded(config: &ModelConfig, narrow: Narrow) -> Result<BTreeSet<String>, Error> {
    config.check_decoder()?;
    let graph = build(config, &Program::full(1, 1))?;
    Ok(astrai_passes::narrow_weights(&graph, Narrow { head: None, ..narrow })?)
}

/// Linear layers whose weights are rounded.
struct Rounded {
    narrow: Narrow,
    names: BTreeSet<String>,
}

impl Rounded {
    /// Those of a model.
    fn of(config: &ModelConfig, narrow: Narrow) -> Result<Rounded, Error> {
        let narrow = Narrow { head: None, ..narrow };
        Ok(Rounded { narrow, names: rounded(config, narrow)? })
    }

    fn unit(&self, t: &TensorSpec) -> Option<Unit> {
        let (stem, &[n, k]) = (t.name.strip_suffix(".weight")?, t.shape.as_slice()) else { return None };
        let group = self.narrow.group_of(k).filter(|_| self.names.contains(&t.name))?;
        let entry = |(end, dtype, shape)| Entry { name: format!("{stem}.{end}"), dtype, shape };
        let entries = compressed_layout(self.narrow, [n, k], group).1.into_iter().map(entry).collect();
        Some(Unit { tensor: t.name.clone(), narrow: Some((self.narrow, group)), entries })
    }

    /// What `config.json` states of them.
    fn stated(&self, config: &ModelConfig) -> Json {
        let Narrow { code, group, offsets, .. } = self.narrow;
        let matrices = config.tensors().into_iter().filter(|t| t.shape.len() == 2);
        let plain =
            matrices.map(|t| t.name).filter(|name| !self.names.contains(name) && name != config.names.embed);
        let module = |name: &str| name.strip_suffix(".weight").map(str::to_string);
        let ignore: BTreeSet<String> =
            plain.chain([config.names.head.to_string()]).filter_map(|name| module(&name)).collect();
        let (format, _) = compressed_layout(self.narrow, [32, 32], 32);
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "ignore": ignore,
            "kv_cache_scheme": null,
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "input_activations": null,
                "output_activations": null,
                "weights": {
                    "num_bits": if code == Code::Int4 { 4 } else { 8 },
                    "type": if code == Code::Fp8 { "float" } else { "int" },
                    "strategy": if group == 0 { "channel" } else { "group" },
                    "group_size": if group == 0 { Json::Null } else { json!(group) },
                    "symmetric": !offsets,
                    "dynamic": false,
                },
            }},
        })
    }
}

/// Consecutive tensors of at most so many bytes together, or one that alone has more.
fn shards(units: &[Unit], most: u64) -> Vec<&[Unit]> {
    let (mut out, mut first, mut sum) = (Vec::new(), 0, 0);
    for (i, u) in units.iter().enumerate() {
        if i > first && sum + u.size() > most {
            out.push(&units[first..i]);
            (first, sum) = (i, 0);
        }
        sum += u.size();
    }
    out.push(&units[first..]);
    out
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

/// Writes the type of the weights into the keys of a `config.json`.
pub fn tell_dtype(keys: &mut Map<String, Json>, dtype: DType) {
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    let key = if keys.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    if key == "dtype" {
        keys.shift_remove("torch_dtype");
    }
    keys.insert(key.to_string(), json!(name));
}

/// The text of the model's `config.json` with the type of the weights, and how those of linear layers are packed.
fn config(folder: &Path, dtype: DType, packing: Option<Json>) -> Result<String, Error> {
    let path = folder.join("config.json");
    let text = read_text(&path, LONGEST).map_err(|e| e.to_string())?;
    let mut keys: Map<String, Json> =
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    tell_dtype(&mut keys, dtype);
    keys.remove("quantization_config");
    keys.extend(packing.map(|p| ("quantization_config".to_string(), p)));
    let text = format!("{:#}\n", Json::Object(keys));
    // What is written is read again: not every family is known in this form.
    ModelConfig::parse(&text, "config.json")
        .map_err(|e| format!("what would be written could not be read again: {e}"))?;
    Ok(text)
}
