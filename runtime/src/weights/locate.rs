//! In: the path a user gave. Out: the files that hold the weights, or what is there instead. Only names that stay inside the
//! model's directory are followed from an index; symbolic links are, because download caches are made of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use super::error::{FETCH_AGAIN, WeightsError, clip, list, quote, reason};
use super::header::{MAX_HEADER, other_format};
use super::json;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Files of a checkpoint.
pub(super) enum Location {
    /// One file with everything.
    Single(PathBuf),
    /// Shards, and what the index says of them.
    Sharded(Index),
}

/// A checked index: `shards` are distinct files in order of their names; `weights` maps a tensor to its shard.
pub(super) struct Index {
    pub path: PathBuf,
    pub shards: Vec<PathBuf>,
    pub weights: BTreeMap<String, usize>,
}

/// Finds the weights at `path`: a directory, a weights file, or an index.
pub(super) fn locate(path: &Path) -> Result<Location, WeightsError> {
    let kind = match fs::metadata(path) {
        Ok(kind) => kind,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let what = "no such file or directory: give a model directory or a .safetensors file";
            return Err(WeightsError::refused(path, what));
        }
        Err(e) => return Err(WeightsError::io(path, "look at it")(e)),
    };
    if !kind.is_dir() {
        let is_index = path.to_string_lossy().ends_with(".index.json");
        return if is_index {
            read_index(path).map(Location::Sharded)
        } else {
            Ok(Location::Single(path.to_path_buf()))
        };
    }
    // The order of preference of the transformers library.
    if present(&path.join(SINGLE))? {
        return Ok(Location::Single(path.join(SINGLE)));
    }
    if present(&path.join(INDEX))? {
        return read_index(&path.join(INDEX)).map(Location::Sharded);
    }
    Err(WeightsError::refused(path, absent(&file_names(path)?)))
}

/// Opens a regular file and says how long it is.
pub(super) fn open_regular(path: &Path) -> Result<(File, usize), WeightsError> {
    let (file, length) = astrai_files::open(path)?;
    let length = usize::try_from(length);
    let length = length.map_err(|_| WeightsError::refused(path, "the file exceeds the address space"))?;
    Ok((file, length))
}

/// Whether something has this name; a link that leads nowhere is an error, not an absence.
fn present(path: &Path) -> Result<bool, WeightsError> {
    match fs::metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(path).is_ok() => {
            Err(WeightsError::refused(path, "the link leads nowhere: download the file again"))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(WeightsError::io(path, "look at it")(e)),
    }
}

fn file_names(directory: &Path) -> Result<BTreeSet<String>, WeightsError> {
    let entries = fs::read_dir(directory).map_err(WeightsError::io(directory, "list it"))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        let entry = entry.map_err(WeightsError::io(directory, "list it"))?;
        names.insert(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// Says what a directory without `model.safetensors` and index has instead.
fn absent(names: &BTreeSet<String>) -> String {
    let ending = |ends: &[&str]| -> Vec<String> {
        names.iter().filter(|n| ends.iter().any(|e| n.ends_with(e))).map(|n| clip(n)).collect()
    };
    let (tensors, torch) = (ending(&[".safetensors"]), ending(&[".bin", ".pt", ".pth", ".bin.index.json"]));
    if tensors.iter().any(|n| shard_group(n).is_some()) {
        return format!("shards without {INDEX} ({}): download the index too", list(&tensors));
    }
    if !tensors.is_empty() {
        return format!("no {SINGLE} here, but {}: give the path of the file that is meant", list(&tensors));
    }
    if !torch.is_empty() {
        return format!(
            "only PyTorch weights here ({}): convert them to safetensors, for example with `save_pretrained` of transformers",
            list(&torch)
        );
    }
    format!(
        "no weights here: {SINGLE} or {INDEX} is needed; download the model's weights into this directory"
    )
}

/// `("model", "00003")` of `model-00001-of-00003.safetensors`: what the shards of one checkpoint have in common.
fn shard_group(name: &str) -> Option<(&str, &str)> {
    let (front, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (prefix, number) = front.rsplit_once('-')?;
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    (digits(number) && digits(total)).then_some((prefix, total))
}

fn read_index(path: &Path) -> Result<Index, WeightsError> {
    let refused = |trouble: String| WeightsError::refused(path, trouble);
    let (file, length) = open_regular(path)?;
    if length > MAX_HEADER {
        return Err(refused(format!(
            "{length} bytes are too many for an index, the limit is {MAX_HEADER}; {FETCH_AGAIN}"
        )));
    }
    let mut text = Vec::new();
    file.take(MAX_HEADER as u64).read_to_end(&mut text).map_err(WeightsError::io(path, "read it"))?;
    let map = json::index(&text).map_err(|e| {
        let kind = if e.is_data() { "bad index" } else { "the index is not JSON" };
        let other = if text.trim_ascii_start().starts_with(b"{") { None } else { other_format(&text) };
        refused(other.unwrap_or_else(|| format!("{kind}: {}; download it again", reason(&e))))
    })?;
    let names: BTreeSet<&String> = map.values().collect();
    if names.is_empty() {
        return Err(refused("the index lists no tensor; download it again".to_string()));
    }
    let directory = path.parent().unwrap_or(Path::new(""));
    refuse_bad_shards(path, directory, &names)?;
    let numbers: BTreeMap<&String, usize> = names.iter().enumerate().map(|(i, name)| (*name, i)).collect();
    let weights = map.iter().map(|(tensor, shard)| (tensor.clone(), numbers[shard])).collect();
    Ok(Index { path: path.to_path_buf(), shards: names.iter().map(|n| directory.join(n)).collect(), weights })
}

/// The shards that the index at `path` names must stay in `directory`, exist, and be all of their group that lie there.
fn refuse_bad_shards(path: &Path, directory: &Path, names: &BTreeSet<&String>) -> Result<(), WeightsError> {
    let mut missing = Vec::new();
    for name in names {
        let inside =
            !name.is_empty() && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)));
        if !inside || name.contains('\0') {
            let trouble =
                format!("shard {} leads out of the model's directory: download the index again", quote(name));
            return Err(WeightsError::refused(path, trouble));
        }
        if !present(&directory.join(name))? {
            missing.push(clip(name));
        }
    }
    if !missing.is_empty() {
        let (lost, all) = (missing.len(), names.len());
        let trouble = format!("{lost} of {all} shards are missing: {}; download them", list(&missing));
        return Err(WeightsError::refused(path, trouble));
    }
    let groups: BTreeSet<_> = names.iter().filter_map(|n| shard_group(n)).collect();
    let here = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let unlisted: Vec<String> = file_names(here)?
        .iter()
        .filter(|n| !names.contains(n) && shard_group(n).is_some_and(|group| groups.contains(&group)))
        .map(|n| clip(n))
        .collect();
    if unlisted.is_empty() {
        return Ok(());
    }
    let names = list(&unlisted);
    let trouble =
        format!("shards that the index does not list: {names}; download the index again, or remove them");
    Err(WeightsError::refused(path, trouble))
}
