//! What a model's makers recommend. In: `generation_config.json` of a model's folder, hostile until checked. Out: the sampling
//! parameters it names, for whoever leaves them open, and the ids that end its texts. As in vLLM, `do_sample` is not heeded: a
//! temperature that is named is meant.

use std::path::Path;

use serde_json::{Map, Value};

use crate::files::object;
use crate::request::Sampling;
use astrai_files::read_present;

/// Name of the file.
pub const FILE: &str = "generation_config.json";

/// Far beyond any such file.
const LARGEST: u64 = 1 << 20;

/// What the file recommends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recommended {
    /// Sampling parameters; none where the file names none.
    pub sampling: Asked,
    /// Ids that end a text, of those the model has.
    pub eos: Vec<u32>,
    /// What is odd about the file but does no harm, a line each.
    pub warnings: Vec<String>,
}

/// Why the file cannot be used, in one line: the file, the defect, the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RecommendedError(String);

impl Recommended {
    /// Reads the file of a model of `vocabulary` ids; without a file nothing is recommended.
    ///
    /// # Errors
    /// The file is unreadable, is no JSON object, or a value has the wrong type or is out of its range.
    pub fn read(folder: &Path, vocabulary: usize) -> Result<Recommended, RecommendedError> {
        let path = folder.join(FILE);
        let refuse = |what: String| RecommendedError(format!("{}: {what}", path.display()));
        let found = read_present(&path, LARGEST).map_err(|e| RecommendedError(e.to_string()))?;
        let Some(bytes) = found else { return Ok(Recommended::default()) };
        let remedy = "mend it, or move it out of the folder";
        let file: Map<String, Value> = object(&bytes).map_err(refuse)?;
        Recommended::parse(&file, vocabulary).map_err(|what| refuse(format!("{what}; {remedy}")))
    }

    fn parse(file: &Map<String, Value>, vocabulary: usize) -> Result<Recommended, String> {
        let number = |key: &str| match file.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(v) => v.as_f64().map(|x| Some(x as f32)).ok_or_else(|| format!("`{key}` is no number")),
        };
        let mut warnings = Vec::new();
        let sampling = Asked {
            temperature: number("temperature")?,
            top_p: number("top_p")?,
            top_k: top_k(file.get("top_k"))?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        };
        let found = Recommended {
            sampling,
            eos: eos(file.get("eos_token_id"), vocabulary, &mut warnings)?,
            warnings,
        };
        found.fill(&Asked::default()).checked(vocabulary).map_err(|e| e.to_string())?;
        Ok(found)
    }

    /// What is asked for; where nothing is, what is recommended; where nothing is either, [`Sampling::default`].
    pub fn fill(&self, asked: &Asked) -> Sampling {
        let (own, plain) = (&self.sampling, Sampling::default());
        let repetition_penalty = asked.repetition_penalty.or(own.repetition_penalty);
        Sampling {
            temperature: asked.temperature.or(own.temperature).unwrap_or(plain.temperature),
            top_p: asked.top_p.or(own.top_p).unwrap_or(plain.top_p),
            top_k: asked.top_k.or(own.top_k).unwrap_or(plain.top_k),
            min_p: asked.min_p.or(own.min_p).unwrap_or(plain.min_p),
            repetition_penalty: repetition_penalty.unwrap_or(plain.repetition_penalty),
            ..plain
        }
    }
}

/// What a client asked for, of what may be recommended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Asked {
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
}

/// -1 is another way to write 0: all tokens.
fn top_k(value: Option<&Value>) -> Result<Option<u32>, String> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(v) if v.as_i64() == Some(-1) => Ok(Some(0)),
        Some(v) => {
            let k = v.as_u64().and_then(|k| u32::try_from(k).ok());
            k.map(Some).ok_or_else(|| "`top_k` is no count of tokens".into())
        }
    }
}

/// An id or a list of them. One that the model does not have can never come, and is left out.
fn eos(value: Option<&Value>, vocabulary: usize, warnings: &mut Vec<String>) -> Result<Vec<u32>, String> {
    let list = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let mut ids = Vec::new();
    for v in list {
        let id = v.as_u64().ok_or("`eos_token_id` is neither an id nor a list of ids")?;
        match u32::try_from(id).ok().filter(|id| (*id as usize) < vocabulary) {
            Some(id) if !ids.contains(&id) => ids.push(id),
            Some(_) => {}
            None => warnings
                .push(format!("{FILE}: eos_token_id {id} is not among the {vocabulary} ids and is left out")),
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Recommended, RecommendedError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), text).unwrap();
        Recommended::read(dir.path(), 100)
    }

    #[test]
    fn what_is_asked_for_goes_before_what_is_recommended() {
        let r = read(
            r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": -1, "eos_token_id": [7, 7, 3, 100]}"#,
        )
        .unwrap();
        assert_eq!((r.eos.as_slice(), r.warnings.len()), (&[7, 3][..], 1));
        let asked = Asked { temperature: Some(0.0), min_p: Some(0.1), ..Asked::default() };
        let s = r.fill(&asked);
        assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty), (0.0, 0.9, 0, 0.1, 1.0));
        assert_eq!(read(r#"{"eos_token_id": 5}"#).unwrap().eos, [5]);
        let nothing = Recommended::read(Path::new("no/such/folder"), 10).unwrap();
        assert_eq!(nothing.fill(&Asked::default()), Sampling::default());
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_one_line() {
        for (text, word) in [
            ("[]", "JSON object"),
            ("{", "JSON object"),
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"temperature": 1e300}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_k": 1.5}"#, "top_k"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"eos_token_id": "</s>"}"#, "eos_token_id"),
            (r#"{"eos_token_id": [[1]]}"#, "eos_token_id"),
        ] {
            let line = read(text).unwrap_err().to_string();
            assert!(line.contains(word) && line.contains(FILE) && !line.contains('\n'), "{text}: {line}");
        }
    }
}
