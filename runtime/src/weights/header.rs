//! In: the bytes of a whole `.safetensors` file. Out: its tensors in the order of their data, with every claim of the header
//! checked against the format and against the file's real length, so that each range is safe to slice. Source: the
//! format's specification in the `safetensors` repository.
//!
//! The `safetensors` crate is not used here: it lets duplicate keys and unknown fields pass and names neither tensor
//! nor cause in most of its errors. The tests hold this reader to accept nothing that the crate refuses.

use std::collections::BTreeMap;

use astrai_ir::DType;

use super::error::{FETCH_AGAIN, WRITE_ANEW, quote, reason};
use super::json::{self, Described};

/// Longest header read, in bytes; the format's own limit.
pub(super) const MAX_HEADER: usize = 100_000_000;

/// Bytes of the little-endian header length that opens a file.
pub(super) const PREFIX: usize = 8;

/// Every type with its name in the file format.
const DTYPES: [(DType, &str); 10] = [
    (DType::F32, "F32"),
    (DType::F16, "F16"),
    (DType::BF16, "BF16"),
    (DType::F8E4M3, "F8_E4M3"),
    (DType::F8E5M2, "F8_E5M2"),
    (DType::I64, "I64"),
    (DType::I32, "I32"),
    (DType::I8, "I8"),
    (DType::U8, "U8"),
    (DType::Bool, "BOOL"),
];

/// Types that the format has and the compiler has not.
const FOREIGN: [&str; 12] = [
    "F64",
    "I16",
    "U16",
    "U32",
    "U64",
    "C64",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
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

/// The type's name in the file format.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    DTYPES.iter().find(|(d, _)| *d == dtype).map_or("", |(_, name)| name)
}

/// Bytes that `shape` elements of `dtype` take, or `None` where the number exceeds the address space.
pub(super) fn size_of(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?.checked_mul(dtype.bytes())
}

/// Reads and checks the header of the file whose bytes are `file`. The error says what is wrong and the remedy.
pub(super) fn read(file: &[u8]) -> Result<Header, String> {
    let text = header_text(file).map_err(|trouble| disguise(file).unwrap_or(trouble))?;
    let parsed = json::header(text).map_err(|e| {
        let kind = if e.is_data() { "bad header" } else { "the header is not JSON" };
        let trouble = format!("{kind}: {}; {WRITE_ANEW}", reason(&e));
        if e.is_data() { trouble } else { disguise(file).unwrap_or(trouble) }
    })?;
    let data = PREFIX + text.len();
    let mut tensors = Vec::with_capacity(parsed.tensors.len());
    for described in parsed.tensors {
        tensors.push(place(described, data, file.len())?);
    }
    refuse_duplicates(&tensors)?;
    tensors.sort_by_key(|t| (t.begin, t.end));
    refuse_gaps(&tensors, data, file.len())?;
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
pub(super) fn disguise(file: &[u8]) -> Option<String> {
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
            "this is a JSON text, not weights: the download was answered by a message; download the file again",
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

/// Turns a header entry into ranges of the file, after checking it on its own.
fn place(described: Described, data: usize, file: usize) -> Result<Tensor, String> {
    let Described { name, dtype, shape, offsets: [begin, end] } = described;
    let tensor = quote(&name);
    let dtype = parse_dtype(&dtype).map_err(|trouble| format!("tensor {tensor}: {trouble}"))?;
    if begin > end {
        return Err(format!(
            "tensor {tensor}: data_offsets begin at {begin}, after their end {end}; {WRITE_ANEW}"
        ));
    }
    let available = file - data;
    if end > available {
        return Err(format!(
            "tensor {tensor}: data_offsets end at {end}, the file has {available} bytes of data; {FETCH_AGAIN}"
        ));
    }
    let Some(size) = size_of(dtype, &shape) else {
        return Err(format!("tensor {tensor}: shape {shape:?} overflows the address space; {WRITE_ANEW}"));
    };
    if size != end - begin {
        return Err(format!(
            "tensor {tensor}: {dtype} {shape:?} takes {size} bytes, data_offsets give {}; {WRITE_ANEW}",
            end - begin
        ));
    }
    Ok(Tensor { name, dtype, shape, begin: data + begin, end: data + end })
}

fn parse_dtype(name: &str) -> Result<DType, String> {
    if let Some((dtype, _)) = DTYPES.iter().find(|(_, known)| *known == name) {
        return Ok(*dtype);
    }
    let kind = if FOREIGN.contains(&name) { "not supported" } else { "unknown" };
    let ours = DTYPES.map(|(_, name)| name).join(", ");
    Err(format!("dtype {} is {kind}; convert the tensor to one of {ours}", quote(name)))
}

fn refuse_duplicates(tensors: &[Tensor]) -> Result<(), String> {
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("tensor {}: described twice in the header; {WRITE_ANEW}", quote(pair[0]))),
        None => Ok(()),
    }
}

/// `tensors` are sorted: each must begin where the one before ends, the last end with the file.
fn refuse_gaps(tensors: &[Tensor], data: usize, file: usize) -> Result<(), String> {
    let mut covered = data;
    for (i, t) in tensors.iter().enumerate() {
        let tensor = quote(&t.name);
        if t.begin < covered {
            let other = quote(&tensors[i.saturating_sub(1)].name);
            return Err(format!("tensor {tensor}: overlaps tensor {other}; {WRITE_ANEW}"));
        }
        if t.begin > covered {
            return Err(format!(
                "tensor {tensor}: {} bytes before it belong to no tensor; {WRITE_ANEW}",
                t.begin - covered
            ));
        }
        covered = t.end;
    }
    if covered < file {
        return Err(format!("the last {} bytes belong to no tensor; {FETCH_AGAIN}", file - covered));
    }
    Ok(())
}
