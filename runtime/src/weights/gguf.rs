//! GGUF files (versions 2 and 3), as llama.cpp's tools write them. In: a file, hostile until checked. Out: its metadata as JSON values, its
//! tensors as numbers, and a source of weights under the names of a checkpoint. Nothing here allocates by a number that the file
//! claims before that many bytes are known to be there; every range is proved before the first tensor is handed out.

mod blocks;
mod names;
mod source;

use super::WeightsError;
use super::error::{FETCH_AGAIN, clip, list, quote};
use super::locate::open_regular;
use crate::source::Source;
use astrai_ir::{DType, Narrow};
use blocks::{Blocks, Codes};
use memmap2::{Mmap, MmapOptions, UncheckedAdvice};
use serde_json::{Map, Number, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use names::Order;
pub use names::{InFile, Layers, NORMS_BEHIND, OF_GPT_OSS, ROPE_FACTORS};
pub use source::OfGguf;

/// Dimensions of a tensor, at most.
const RANK: u32 = 4;
/// Arrays within arrays, at most.
const DEPTH: u32 = 4;
/// Types of values: a text, and an array.
const TEXT: u32 = 8;
const ARRAY: u32 = 9;
/// Where nothing else is said, tensors begin at multiples of this.
const ALIGNMENT: u64 = 32;

/// An open file, checked in full.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Mmap,
    head: Head,
}

/// What a file says before its tensors.
#[derive(Debug, Default)]
struct Head {
    metadata: Map<String, Value>,
    /// Arrays of texts, which may be a vocabulary: where the first one begins, and how many there are.
    texts: BTreeMap<String, (usize, u64)>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug)]
struct Tensor {
    blocks: &'static Blocks,
    /// Outermost first.
    shape: Vec<usize>,
    begin: usize,
    end: usize,
}

/// What a checkpoint's tensor is made of.
struct Piece<'a> {
    blocks: &'static Blocks,
    shape: &'a [usize],
    bytes: &'a [u8],
}

/// True for a file of this format.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && path.is_file()
}

impl Gguf {
    /// Opens a file and reads its head.
    ///
    /// # Errors
    /// One line: what of the file is not as the format has it.
    pub fn open(path: &Path) -> Result<Gguf, WeightsError> {
        let (file, length) = open_regular(path)?;
        let refused = |trouble: String| WeightsError::refused(path, trouble);
        if length < 24 {
            return Err(refused(format!("{length} bytes are no GGUF file; {FETCH_AGAIN}")));
        }
        // SAFETY: the map is read-only and private; the text of `weights` names the one condition left to the user.
        let map = unsafe { MmapOptions::new().len(length).map_copy_read_only(&file) };
        let map = map.map_err(WeightsError::io(path, "map it"))?;
        let head = head(&map).map_err(refused)?;
        Ok(Gguf { path: path.to_path_buf(), map, head })
    }

    /// The path given to [`open`](Self::open).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's keys and their values, but for arrays of texts.
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.head.metadata
    }

    /// The array of texts under this key. Tokens of byte-level vocabularies need not be whole characters; what is none becomes U+FFFD.
    pub fn texts<'a>(&'a self, key: &str) -> Option<impl Iterator<Item = Cow<'a, str>> + use<'a>> {
        let &(at, n) = self.head.texts.get(key)?;
        let mut r = Reader { all: &self.map, at };
        Some((0..n).map_while(move |_| r.text().ok()))
    }

    /// Shape, outermost first, of the tensor that the file has under this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.head.tensors.get(name).map(|t| t.shape.as_slice())
    }

    /// Numbers of the tensor that the file has under this name, as they are stored.
    pub fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let t = self.head.tensors.get(name)?;
        Some(t.blocks.floats(&self.map[t.begin..t.end]))
    }

    /// How a tensor can stay in memory, where it is a matrix of codes, or such a matrix for each expert.
    pub fn narrow(&self, at: &InFile) -> Option<Narrow> {
        let pieces = self.pieces(at)?;
        let rank = if matches!(at.order, Order::Stacked | Order::Paired) { 3 } else { 2 };
        if matches!(at.order, Order::OneMore | Order::Latents(_)) || pieces[0].shape.len() != rank {
            return None;
        }
        let &Codes { code, group, offsets, scales, .. } = pieces[0].blocks.codes()?;
        let alike = pieces.iter().all(|p| std::ptr::eq(p.blocks, pieces[0].blocks));
        alike.then_some(Narrow { code, group, scales, offsets, head: None, activations: None })
    }

    /// Lets go of the memory in which these bytes of the file lie; what is read again comes back.
    fn leave(&self, bytes: Range<usize>) {
        // Advice only: pages that stay mapped cost memory, not correctness.
        // SAFETY: the map is never written, so a dropped page comes back with the same bytes from the file.
        let _ =
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
    }

    /// A tensor, or the part of it that is one expert's.
    fn piece(&self, at: &InFile) -> Option<Piece<'_>> {
        let t = self.head.tensors.get(&at.name)?;
        let (blocks, shape, bytes) = (t.blocks, &t.shape[..], &self.map[t.begin..t.end]);
        let Order::Expert(e) = at.order else { return Some(Piece { blocks, shape, bytes }) };
        let (count, shape) = shape.split_first().filter(|(count, _)| e < **count)?;
        let each = bytes.len() / count;
        Some(Piece { blocks, shape, bytes: &bytes[e * each..][..each] })
    }

    /// The tensor, or of two that have rows by turns both, of one shape.
    fn pieces(&self, at: &InFile) -> Option<Vec<Piece<'_>>> {
        let first = self.piece(at)?;
        let Some(second) = at.second().filter(|_| at.order == Order::Paired) else {
            return Some(vec![first]);
        };
        let second = self.piece(&InFile { name: second, order: Order::Plain })?;
        (second.shape == first.shape).then(|| vec![first, second])
    }

    /// The shape, outermost first, that a checkpoint's tensor has by what lies at this place.
    fn shape_at(&self, at: &InFile) -> Option<Vec<usize>> {
        if let Order::Stacked | Order::Paired = at.order {
            // Of a pair of two shapes the first is what is told.
            let (shape, turns) = (self.shape(&at.name)?, self.pieces(at).map_or(1, |p| p.len()));
            return Some(match *shape {
                [experts, rows, k] => vec![experts, k, rows * turns],
                [experts, rows] => vec![experts, rows * turns],
                _ => shape.to_vec(),
            });
        }
        let (Order::Latents([heads, keys, values]), Some(second)) = (at.order, at.second()) else {
            return self.piece(at).map(|p| p.shape.to_vec());
        };
        let (&[h, width, k], &[hv, v, w]) = (self.shape(&at.name)?, self.shape(&second)?) else {
            return self.shape(&at.name).map(<[usize]>::to_vec);
        };
        let fit = [h, hv, k, v, w] == [heads, heads, keys, values, width];
        Some(if fit { vec![heads * (keys + values), width] } else { vec![h, width, k] })
    }

    /// The rows that make keys and values of latents, `[heads, keys + values, width]`.
    fn latents(&self, at: &InFile, [heads, keys, values]: [usize; 3]) -> Option<Source<'_>> {
        let shape = self.shape_at(at).filter(|s| s.len() == 2 && s[0] == heads * (keys + values))?;
        let (k, v, width) = (self.floats(&at.name)?, self.floats(&at.second()?)?, shape[1]);
        let mut bytes = Vec::with_capacity(shape[0] * width * 4);
        for h in 0..heads {
            for i in 0..keys {
                let row = (0..width).map(|c| k[(h * width + c) * keys + i]);
                row.for_each(|x| bytes.extend_from_slice(&x.to_le_bytes()));
            }
            let rows = &v[h * values * width..][..values * width];
            rows.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes()));
        }
        Some(Source { dtype: DType::F32, shape, bytes: Cow::Owned(bytes) })
    }

    /// Refuses what a model of these checkpoint tensors cannot be made of: the first thing that is missing or misshapen, and tensors that
    /// nothing reads.
    ///
    /// # Errors
    /// One line.
    pub fn check(
        &self,
        expected: impl IntoIterator<Item = (String, Vec<usize>)>,
        stored: &dyn Fn(&str) -> Option<InFile>,
    ) -> Result<(), WeightsError> {
        let (mut read, mut wrong) = (HashSet::new(), Vec::new());
        for (name, shape) in expected {
            let Some(at) = stored(&name) else {
                wrong.push(format!("nothing is known to hold {}", quote(&name)));
                continue;
            };
            match self.shape_at(&at) {
                Some(has) if has == shape => {}
                Some(has) => wrong.push(format!("{} is {has:?} instead of {shape:?}", quote(&at.name))),
                None => wrong.push(format!("no {}", quote(&at.name))),
            }
            if let Some(second) = at.second().filter(|s| self.shape(s).is_none()) {
                wrong.push(format!("no {}", quote(&second)));
            }
            read.extend(at.second());
            read.insert(at.name);
        }
        let mut unread: Vec<&str> = self.head.tensors.keys().map(String::as_str).collect();
        unread.retain(|n| !read.contains(*n) && !ROPE_FACTORS.contains(n));
        wrong.extend(unread.iter().map(|n| format!("{} has no place in the model", quote(n))));
        if wrong.is_empty() {
            return Ok(());
        }
        Err(WeightsError::Mismatch { path: self.path.clone(), trouble: list(&wrong) })
    }
}

/// What is left of the file's text.
struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

/// What follows is not there.
const SHORT: &str = "the head ends too early";

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], String> {
        let n = usize::try_from(n).ok().filter(|n| *n <= self.all.len() - self.at);
        let n = n.ok_or_else(|| format!("{SHORT}; {FETCH_AGAIN}"))?;
        self.at += n;
        Ok(&self.all[self.at - n..self.at])
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N as u64)?.try_into().map_err(|_| SHORT.into())
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<Cow<'a, str>, String> {
        let n = self.u64()?;
        self.take(n).map(String::from_utf8_lossy)
    }

    /// How many elements an array has.
    fn count(&mut self) -> Result<u64, String> {
        let n = self.u64()?;
        // An element has a byte at least.
        match n > (self.all.len() - self.at) as u64 {
            true => Err(format!("an array of {n} values does not fit; {FETCH_AGAIN}")),
            false => Ok(n),
        }
    }

    /// Goes over an array of texts if one follows: where the first begins, and how many there are.
    fn texts(&mut self, kind: u32) -> Result<Option<(usize, u64)>, String> {
        if kind != ARRAY || !self.all[self.at..].starts_with(&TEXT.to_le_bytes()) {
            return Ok(None);
        }
        self.u32()?;
        let n = self.count()?;
        let begin = self.at;
        for _ in 0..n {
            let bytes = self.u64()?;
            self.take(bytes)?;
        }
        Ok(Some((begin, n)))
    }

    /// A value of type `kind`.
    fn value(&mut self, kind: u32, depth: u32) -> Result<Value, String> {
        let real = |x: f64| Number::from_f64(x).map_or(Value::Null, Value::Number);
        Ok(match kind {
            0 => self.bytes::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.bytes()?).into(),
            2 => u16::from_le_bytes(self.bytes()?).into(),
            3 => i16::from_le_bytes(self.bytes()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.bytes()?).into(),
            6 => real(f32::from_le_bytes(self.bytes()?).into()),
            7 => (self.bytes::<1>()?[0] != 0).into(),
            TEXT => self.text()?.into(),
            ARRAY if depth < DEPTH => {
                let (kind, n) = (self.u32()?, self.count()?);
                (0..n).map(|_| self.value(kind, depth + 1)).collect::<Result<Vec<_>, _>>()?.into()
            }
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.bytes()?).into(),
            12 => real(f64::from_le_bytes(self.bytes()?)),
            _ => return Err(format!("a value of the unknown type {kind}; {FETCH_AGAIN}")),
        })
    }
}

/// The head of a file.
fn head(all: &[u8]) -> Result<Head, String> {
    let mut r = Reader { all, at: 0 };
    if r.take(4)? != b"GGUF" {
        return Err(format!("does not begin as a GGUF file does; {FETCH_AGAIN}"));
    }
    let version = r.u32()?;
    if !(2..=3).contains(&version) {
        let line = "only versions 2 and 3, little-endian, are read; convert the file with llama.cpp's tools";
        return Err(format!("GGUF version {version}: {line}"));
    }
    let (tensors, keys) = (r.u64()?, r.u64()?);
    let mut head = Head::default();
    for _ in 0..keys {
        let key = r.text()?.into_owned();
        let refused = |e: String| format!("key {}: {e}", quote(&key));
        if head.metadata.contains_key(&key) || head.texts.contains_key(&key) {
            return Err(format!("key {} is there twice; {FETCH_AGAIN}", quote(&key)));
        }
        let kind = r.u32()?;
        if let Some(texts) = r.texts(kind).map_err(refused)? {
            head.texts.insert(key, texts);
        } else {
            let value = r.value(kind, 0).map_err(refused)?;
            head.metadata.insert(key, value);
        }
    }
    let alignment = head.metadata.get("general.alignment").map_or(Some(ALIGNMENT), Value::as_u64);
    let alignment = alignment.filter(|a| a.is_power_of_two() && *a <= 1 << 20);
    let alignment = alignment.ok_or("`general.alignment` is no power of two; write the file anew")?;
    let mut placed = Vec::new();
    for _ in 0..tensors {
        placed.push(place(&mut r)?);
    }
    let data = (r.at as u64).next_multiple_of(alignment);
    for (name, blocks, shape, offset) in placed {
        let refused = |what: &str| format!("tensor {}: {what}; {FETCH_AGAIN}", quote(&name));
        let bytes = blocks.bytes(&shape).ok_or_else(|| {
            refused(&format!(
                "rows of {:?} are no whole blocks of {}",
                shape.last().unwrap_or(&0),
                blocks.name
            ))
        })?;
        let begin = data.checked_add(offset).filter(|_| offset % alignment == 0);
        let begin = begin.ok_or_else(|| refused("does not begin at a multiple of the alignment"))?;
        let end = begin.checked_add(bytes).filter(|end| *end <= all.len() as u64);
        let end = end.ok_or_else(|| refused("lies beyond the end of the file"))?;
        let tensor = Tensor { blocks, shape, begin: begin as usize, end: end as usize };
        if head.tensors.insert(name.clone(), tensor).is_some() {
            return Err(refused("is there twice"));
        }
    }
    Ok(head)
}

/// Name, type, shape and offset of the next tensor.
fn place(r: &mut Reader) -> Result<(String, &'static Blocks, Vec<usize>, u64), String> {
    let name = r.text()?.into_owned();
    let rank = r.u32()?;
    if rank == 0 || rank > RANK {
        return Err(format!("tensor {} has {rank} dimensions; {FETCH_AGAIN}", quote(&name)));
    }
    let mut shape = Vec::new();
    for _ in 0..rank {
        let n = usize::try_from(r.u64()?).map_err(|_| format!("tensor {} is too large", quote(&name)))?;
        shape.insert(0, n);
    }
    let kind = r.u32()?;
    let blocks = blocks::TABLE.iter().find(|b| b.kind == kind).ok_or_else(|| {
        let known: Vec<&str> = blocks::TABLE.iter().map(|b| b.name).collect();
        let known = known.join(", ");
        format!(
            "tensor {} is of type {kind}; known are {known}: convert the model to one of them",
            clip(&name)
        )
    })?;
    Ok((name, blocks, shape, r.u64()?))
}

#[cfg(test)]
mod tests;
