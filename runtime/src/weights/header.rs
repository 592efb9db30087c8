//! In: the bytes of a whole `.safetensors` file. Out: its tensors in the order of their data, with every claim of the header
//! checked against the format and against the file's real length, so that each range is safe to slice. Source: the
//! format's specification in the `safetensors` repository.
//!
//! The `safetensors` crate parses the entries ([`TensorInfo`]) and proves that they tile the data ([`Metadata`]). The crate's
//! `read_metadata` is not called: of two tensors with one name it silently keeps the last, it holds the whole header as a
//! tree of many times the text's size, and most of its errors name neither the tensor nor the remedy.

use std::collections::BTreeMap;

use astrai_ir::DType;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::error::{FETCH_AGAIN, WRITE_ANEW, quote, reason};
use super::json;

/// Longest header read, in bytes; the format's own limit.
pub(super) const MAX_HEADER: usize = 100_000_000;

/// Bytes of the little-endian header length that opens a file.
pub(super) const PREFIX: usize = 8;

/// Most dimensions of a tensor; PyTorch's own limit.
pub(super) const MAX_RANK: usize = 64;

/// The compiler's types and the format's.
const DTYPES: [(DType, Dtype); 10] = [
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::F8E4M3, Dtype::F8_E4M3),
    (DType::F8E5M2, Dtype::F8_E5M2),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I8, Dtype::I8),
    (DType::U8, Dtype::U8),
    (DType::Bool, Dtype::BOOL),
];

/// One tensor of a file: `begin..end` are bytes from the start of the file and hold exactly `shape` elements of `dtype`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub begin: usize,
    pub end: usize,
}

/// A checked header: tensors by ascending offset, without hole or overlap up to the end of the file.
#[derive(Debug)]
pub(super) struct Header {
    pub tensors: Vec<Tensor>,
    pub metadata: BTreeMap<String, String>,
}

/// The format's type of the same elements, if it has one.
pub(super) fn file_dtype(dtype: DType) -> Option<Dtype> {
    DTYPES.iter().find(|(ours, _)| *ours == dtype).map(|(_, theirs)| *theirs)
}

/// Bytes that `shape` elements of `dtype` take, or `None` where the number exceeds the address space.
pub(super) fn size_of(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?.checked_mul(dtype.bytes())
}

/// Reads and checks the header of the file whose bytes are `file`. The error says what is wrong and the remedy.
pub(super) fn read(file: &[u8]) -> Result<Header, String> {
    let text = header_text(file).map_err(|trouble| other_format(file).unwrap_or(trouble))?;
    let parsed = json::header(text).map_err(|e| {
        let kind = if e.is_data() { "bad header" } else { "the header is not JSON" };
        let trouble = format!("{kind}: {}; {WRITE_ANEW}", reason(&e));
        if e.is_data() { trouble } else { other_format(file).unwrap_or(trouble) }
    })?;
    let mut entries = parsed.tensors;
    if let Some(name) = twice(entries.iter().map(|(name, _)| name.as_str())) {
        return Err(format!("tensor {}: described twice in the header; {WRITE_ANEW}", quote(name)));
    }
    entries.sort_by_key(|(_, info)| info.data_offsets);
    let tiling = Metadata::new(None, entries.clone()).map_err(|e| invalid(&e, &entries))?;
    let data = PREFIX + text.len();
    let (claimed, available) = (tiling.data_len(), file.len() - data);
    if let Some((last, _)) = entries.last().filter(|_| claimed > available) {
        return Err(format!(
            "tensor {}: data_offsets end at {claimed}, the file has {available} bytes of data; {FETCH_AGAIN}",
            quote(last)
        ));
    }
    if claimed < available {
        return Err(format!("the last {} bytes belong to no tensor; {FETCH_AGAIN}", available - claimed));
    }
    let tensors =
        entries.into_iter().map(|(name, info)| place(name, info, data)).collect::<Result<_, _>>()?;
    Ok(Header { tensors, metadata: parsed.metadata })
}

fn header_text(file: &[u8]) -> Result<&str, String> {
    if file.is_empty() {
        return Err(format!("the file is empty; {FETCH_AGAIN}"));
    }
    let Some((prefix, rest)) = file.split_first_chunk::<PREFIX>() else {
        return Err(format!("{} bytes are too few for a safetensors file; {FETCH_AGAIN}", file.len()));
    };
    let claimed = u64::from_le_bytes(*prefix);
    let length = usize::try_from(claimed).unwrap_or(usize::MAX);
    if length > MAX_HEADER {
        return Err(format!(
            "the header claims {claimed} bytes, the limit is {MAX_HEADER}: not a safetensors file, or a damaged one; download it again"
        ));
    }
    let Some(header) = rest.get(..length) else {
        return Err(format!("the header claims {claimed} bytes, the file has {}; {FETCH_AGAIN}", rest.len()));
    };
    std::str::from_utf8(header)
        .map_err(|e| format!("the header is not UTF-8 at byte {}; {FETCH_AGAIN}", PREFIX + e.valid_up_to()))
}

/// What a file that is not what its name says really is, where its first bytes tell.
pub(super) fn other_format(file: &[u8]) -> Option<String> {
    const KNOWN: [(&[&[u8]], &str); 5] = [
        (
            &[b"version https://git-lfs", b"version https://hawser"],
            "this is a Git LFS pointer, not the file it stands for: run `git lfs pull` in its repository",
        ),
        (
            &[b"<!doctype", b"<html", b"<head", b"<?xml"],
            "this is a web page: the download was answered by an error or log-in page; download the file again",
        ),
        (
            &[b"pk\x03\x04", b"\x80\x02\x8a\x0a"],
            "this is a PyTorch file under another name: convert it to safetensors",
        ),
        (&[b"gguf"], "this is a GGUF file: use the model's safetensors files"),
        (
            &[b"{"],
            "this is a JSON text, not weights: give the model's folder or its weights; a download that was answered by a message, do again",
        ),
    ];
    let start: Vec<u8> = file.iter().take(64).map(u8::to_ascii_lowercase).collect();
    // A zero this early belongs to the length of a header, not to a text.
    if start.iter().take(4).any(|&b| b == 0) {
        return None;
    }
    let text = start.trim_ascii_start();
    let hit = KNOWN.iter().find(|(marks, _)| marks.iter().any(|mark| text.starts_with(mark)));
    hit.map(|(_, what)| (*what).to_string())
}

/// The crate's refusal of `entries`, which are sorted by offset, with the tensor and the remedy.
fn invalid(error: &SafeTensorError, entries: &[(String, TensorInfo)]) -> String {
    let describe = |(name, info): &(String, TensorInfo)| {
        let (TensorInfo { dtype, shape, data_offsets: (begin, end) }, tensor) = (info, quote(name));
        format!("tensor {tensor}, {dtype} {shape:?} at data_offsets [{begin}, {end}]")
    };
    let (culprit, trouble) = match error {
        SafeTensorError::InvalidOffset(name) => (
            entries.iter().find(|(n, _)| n == name),
            "offsets must begin where the tensor before ends, and not after their own end",
        ),
        // The crate names no tensor here: it is the first that is refused when it stands alone.
        _ => (
            entries.iter().find(|(name, info)| {
                let (begin, end) = info.data_offsets;
                let alone = TensorInfo { data_offsets: (0, end.saturating_sub(begin)), ..info.clone() };
                Metadata::new(None, vec![(name.clone(), alone)]).is_err()
            }),
            "its shape takes another number of bytes",
        ),
    };
    let tensor = culprit.map_or_else(|| "a tensor".to_string(), describe);
    let trouble = if matches!(error, SafeTensorError::ValidationOverflow) {
        "its shape overflows the address space"
    } else {
        trouble
    };
    format!("{tensor}: {trouble}; {WRITE_ANEW}")
}

/// The tensor in ranges of the file, after what the compiler asks beyond the format.
fn place(name: String, info: TensorInfo, data: usize) -> Result<Tensor, String> {
    let TensorInfo { dtype, shape, data_offsets: (begin, end) } = info;
    let tensor = quote(&name);
    if shape.len() > MAX_RANK {
        return Err(format!(
            "tensor {tensor}: {} dimensions, the limit is {MAX_RANK}; {WRITE_ANEW}",
            shape.len()
        ));
    }
    let Some((ours, _)) = DTYPES.iter().find(|(_, theirs)| *theirs == dtype) else {
        let known = DTYPES.map(|(_, theirs)| theirs.to_string()).join(", ");
        return Err(format!(
            "tensor {tensor}: dtype {dtype} is not supported; convert the tensor to one of {known}"
        ));
    };
    Ok(Tensor { name, dtype: *ours, shape, begin: data + begin, end: data + end })
}

/// A name that stands there twice.
pub(super) fn twice<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}
