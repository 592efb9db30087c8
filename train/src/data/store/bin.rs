//! The layout of `.bin` files with several keys, as AstrAI writes it: folders, each with `KEY.bin` of raw little-endian numbers
//! and a `meta.json` `{KEY: {"shape": [n], "dtype": "int32", "offsets": [0, 5, 12]}}`. Without `offsets` a key's numbers are one
//! segment; with them each pair of neighbours bounds a record. `rows`, which is this program's own, says how many equal
//! rows a record that is a matrix has.

use super::{Element, Found, Part, Segment};
use crate::data::DataError;
use crate::data::meta::LONGEST;
use astrai_files::one_line;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

/// Bytes that are read at a time.
const PIECE: usize = 8192;

#[derive(Debug)]
struct Folder {
    path: PathBuf,
    files: BTreeMap<String, (PathBuf, File)>,
}

/// The object in a `meta.json`.
pub(super) fn read_meta(path: &Path) -> Result<Map<String, Value>, DataError> {
    let bytes = astrai_files::read(path, LONGEST)?;
    serde_json::from_slice(&bytes).map_err(|e| {
        let why = one_line(&e.to_string());
        DataError::refused(path, format!("is no JSON object ({why}); prepare the data again"))
    })
}

/// Opens the folder of a `meta.json`.
pub(super) fn open(meta: &Path, found: &mut Found<'_>) -> Result<Box<dyn Part>, DataError> {
    let folder = meta.parent().unwrap_or(Path::new("")).to_path_buf();
    let mut files = BTreeMap::new();
    for (key, entry) in read_meta(meta)? {
        let refused = |message: String| DataError::refused(meta, format!("`{key}`: {message}"));
        if !is_plain(&key) {
            return Err(refused("is no plain name of a file in this folder; mend it".into()));
        }
        let dtype = entry.get("dtype").and_then(Value::as_str).unwrap_or_default();
        let element = Element::parse(dtype)
            .ok_or_else(|| refused(format!("`dtype` {dtype:?} is no type of number; write int32, say")))?;
        let count =
            entry.get("shape").and_then(numbers).and_then(|s| s.into_iter().try_fold(1, u64::checked_mul));
        let count = count
            .ok_or_else(|| refused("has no `shape` of whole numbers; write it, like [123456]".into()))?;
        let path = folder.join(format!("{key}.bin"));
        let (file, size) = astrai_files::open(&path)?;
        if count.checked_mul(element.bytes() as u64) != Some(size) {
            let message = format!(
                "holds {size} bytes, meta.json says {count} numbers of {}: it is cut short or of other data; prepare it again",
                element.bytes()
            );
            return Err(DataError::refused(&path, message));
        }
        segments(&key, &entry, element, count, found).map_err(refused)?;
        files.insert(key, (path, file));
    }
    Ok(Box::new(Folder { path: folder, files }))
}

/// Whether a key may be the name of a file in a folder, or of a group in an HDF5 file.
pub(super) fn is_plain(key: &str) -> bool {
    // Components alone would let `a/` and `./a` pass as `a`.
    Path::new(key).components().eq([Component::Normal(key.as_ref())]) && !key.contains(['/', '\0'])
}

/// Whole numbers of a list.
fn numbers(list: &Value) -> Option<Vec<u64>> {
    list.as_array()?.iter().map(Value::as_u64).collect()
}

/// Records between offsets, or all as one segment.
fn segments(
    key: &str,
    entry: &Value,
    element: Element,
    count: u64,
    found: &mut Found<'_>,
) -> Result<(), String> {
    // A shape of more than one dimension counts records' rows in its first.
    let shape = entry.get("shape").and_then(numbers).unwrap_or_default();
    let width = shape.iter().skip(1).try_fold(1, |n: u64, &d| n.checked_mul(d));
    let width = width.ok_or("`shape` is larger than any file; prepare the data again")?;
    let Some(offsets) = entry.get("offsets").filter(|v| !v.is_null()) else {
        found.segment(key, element, 0, count, 0);
        return Ok(());
    };
    let offsets = numbers(offsets).ok_or("`offsets` is no list of whole numbers; prepare the data again")?;
    let rows = match entry.get("rows") {
        None => vec![],
        Some(rows) => numbers(rows).ok_or("`rows` is no list of whole numbers; prepare the data again")?,
    };
    let (first, last) = (offsets.first().copied(), offsets.last().copied());
    if first != Some(0) || last.and_then(|last| last.checked_mul(width)) != Some(count) {
        return Err("`offsets` does not begin with 0 and end with the length; prepare the data again".into());
    }
    if !offsets.is_sorted() {
        return Err("`offsets` goes down; prepare the data again".into());
    }
    if !rows.is_empty() && rows.len() + 1 != offsets.len() {
        return Err("`rows` has not a number for each record; prepare the data again".into());
    }
    for (i, pair) in offsets.windows(2).enumerate() {
        // No product overflows: the last offset's, the largest, is the length.
        let size = pair[1] - pair[0];
        let of_record = rows.get(i).copied().unwrap_or(if shape.len() > 1 { size } else { 0 });
        if of_record > 0 && !(size * width).is_multiple_of(of_record) {
            return Err(format!(
                "record {i} of {size} numbers has no {of_record} equal rows; prepare the data again"
            ));
        }
        let of_record = u32::try_from(of_record).map_err(|_| format!("record {i} has too many rows"))?;
        found.segment(key, element, pair[0] * width, size * width, of_record);
    }
    Ok(())
}

/// Calls `each` with the position in `to` and the number there.
macro_rules! decode {
    ($element:expr, $bytes:expr, $each:expr; $($name:ident: $stored:ty),*) => {
        match $element {
            Element::Bool => $bytes.iter().enumerate().try_for_each(|(i, b)| $each(i, f64::from(u8::from(*b != 0)))),
            $(Element::$name => {
                $bytes.as_chunks().0.iter().enumerate().try_for_each(|(i, b)| $each(i, <$stored>::from_le_bytes(*b) as f64))
            })*
        }
    };
}

impl Folder {
    /// Reads numbers piece by piece. Whole ones beyond 2^53, which no id, mask or position is, lose their last bits.
    fn each(
        &self,
        key: &str,
        s: &Segment,
        from: u64,
        count: usize,
        each: &mut dyn FnMut(usize, f64) -> Result<(), String>,
    ) -> Result<(), DataError> {
        let Some((path, file)) = self.files.get(key) else {
            return Err(DataError::refused(&self.path, format!("has no key `{key}`")));
        };
        let (mut stored, mut done, element) = ([0; PIECE], 0, s.element);
        while done < count {
            let n = (count - done).min(PIECE / element.bytes());
            let bytes = &mut stored[..n * element.bytes()];
            let at = (s.at + from + done as u64) * element.bytes() as u64;
            file.read_exact_at(bytes, at).map_err(DataError::io(path, "read on; it has become shorter"))?;
            let mut one = |i: usize, x: f64| each(done + i, x);
            let decoded: Result<(), String> = decode!(element, bytes, one; Int8: i8, Uint8: u8, Int16: i16, Uint16: u16,
                Int32: i32, Uint32: u32, Int64: i64, Uint64: u64, Float32: f32, Float64: f64);
            decoded.map_err(|message| DataError::refused(path, message))?;
            done += n;
        }
        Ok(())
    }
}

/// A whole number of a file as an i32.
pub(super) fn whole(x: f64, at: u64) -> Result<i32, String> {
    if x.fract() == 0.0 && (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&x) {
        return Ok(x as i32);
    }
    Err(format!("number {at} is {x}, no token id, mask or position; prepare the data again"))
}

impl Part for Folder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn ints(&self, key: &str, s: &Segment, from: u64, to: &mut [i32]) -> Result<(), DataError> {
        self.each(key, s, from, to.len(), &mut |i, x| {
            to[i] = whole(x, s.at + from + i as u64)?;
            Ok(())
        })
    }

    fn floats(&self, key: &str, s: &Segment, from: u64, to: &mut [f32]) -> Result<(), DataError> {
        self.each(key, s, from, to.len(), &mut |i, x| {
            to[i] = x as f32;
            Ok(())
        })
    }
}
