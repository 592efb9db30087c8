//! What a `tokenizer.json` may do to a text. The `tokenizers` crate believes its file: it breaks off on some that it has read, and
//! a chain of replacements makes gigabytes of a line. In: parts of the file as JSON, or a call of the crate. Out: nothing, or what is wrong.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer};

/// How many times longer than the text a normalizer may make it; published ones stay below a hundred.
const GROWTH: f64 = 1000.0;

/// Bytes that normalising a text may make: the crate keeps some thirty bytes for each.
const NORMALISED: usize = 32 << 20;

/// Bytes that are normalised at a time to see how they grow.
const PIECE: usize = 4 << 10;

/// Calls the crate; where it panics, gives what it says.
pub(super) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    astrai_files::guarded(call).map_err(|said| format!("the tokenizers library fails on it: {said}"))
}

/// How many times longer normalising makes a text at most, and the same for decoding.
///
/// # Errors
/// It is more than a tokenizer has a use for, or a map of characters is none.
pub(super) fn growth(decoder: Option<&Value>, normalizer: Option<&Value>) -> Result<f64, String> {
    let bounded = |name: &str, part: Option<&Value>| {
        let most = part.map_or(Ok(1.0), |part| growth_of(part).map_err(str::to_owned))?;
        match most <= GROWTH {
            true => Ok(most),
            false => {
                Err(format!("its {name} can make a text {most:.0} times as long; {GROWTH} is the limit"))
            }
        }
    };
    bounded("decoder", decoder)?;
    bounded("normalizer", normalizer)
}

fn growth_of(part: &Value) -> Result<f64, &'static str> {
    let text = |key: &str| part.get(key).and_then(Value::as_str);
    Ok(match text("type").unwrap_or("") {
        "Sequence" => {
            let parts = part.get("normalizers").or(part.get("decoders")).and_then(Value::as_array);
            parts.into_iter().flatten().try_fold(1.0, |all, part| growth_of(part).map(|one| all * one))?
        }
        "Replace" => {
            let made = text("content").map_or(0, str::len) as f64;
            let pattern = part.get("pattern").unwrap_or(&Value::Null);
            let fixed = pattern.get("String").and_then(Value::as_str).map_or(0, str::len) as f64;
            let regex = pattern.get("Regex").and_then(Value::as_str).unwrap_or("");
            // A pattern that matches nothing at all does so before every character.
            let empty = fixed == 0.0
                && fancy_regex::Regex::new(regex).map_or(true, |r| r.is_match("").unwrap_or(true));
            (made / f64::max(fixed, 1.0)).max(1.0) + if empty { made } else { 0.0 }
        }
        // U+FDFA becomes 18 letters.
        "NFKC" | "NFKD" => 11.0,
        "NFC" | "NFD" | "BertNormalizer" => 3.0,
        "ByteLevel" | "Lowercase" => 2.0,
        "Precompiled" => longest_replacement(text("precompiled_charsmap").unwrap_or(""))? as f64,
        _ => 1.0,
    })
}

/// Bytes of the longest replacement of SentencePiece's map: the length of a trie, the trie, texts that end with zeros.
fn longest_replacement(map: &str) -> Result<usize, &'static str> {
    let wrong = "its precompiled_charsmap is none";
    let bytes = STANDARD.decode(map).map_err(|_| wrong)?;
    let (length, rest) = bytes.split_first_chunk().ok_or(wrong)?;
    let texts = rest.get(u32::from_le_bytes(*length) as usize..).ok_or(wrong)?;
    Ok(texts.split(|b| *b == 0).map(<[u8]>::len).max().unwrap_or(0).max(1))
}

/// Refuses a text of which normalising would make more than it may, where `growth` does not rule that out.
pub(super) fn fits(normalizer: Option<&impl Normalizer>, growth: f64, text: &str) -> Result<(), String> {
    let Some(normalizer) = normalizer.filter(|_| text.len() as f64 * growth > NORMALISED as f64) else {
        return Ok(());
    };
    let (mut rest, mut made) = (text, 0);
    while !rest.is_empty() {
        let (piece, after) =
            rest.split_at((PIECE..rest.len()).find(|at| rest.is_char_boundary(*at)).unwrap_or(rest.len()));
        let mut normalised = NormalizedString::from(piece);
        normalizer.normalize(&mut normalised).map_err(|e| e.to_string())?;
        made += normalised.get().len();
        if made > NORMALISED {
            return Err(format!("normalising makes more than {NORMALISED} bytes of it; shorten the text"));
        }
        rest = after;
    }
    Ok(())
}
