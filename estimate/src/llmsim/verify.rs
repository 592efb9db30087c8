//! LLMSim's records held to our view of it. In: a folder of JSON files: runs (`inputs`, `rows`, `summary`) and graphs. Out: a row a
//! file: the greatest relative difference of all its numbers, and what differs first.

use super::{Machine, Schedule, graph, report};
use crate::Refused;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Relative difference that a number may have.
pub const TOLERANCE: f64 = 1e-6;

/// Longest file read, bytes.
const LONGEST: u64 = 64 << 20;

/// What became of a file.
#[derive(Clone, Debug)]
pub struct Checked {
    /// Its name.
    pub file: String,
    /// Greatest relative difference; none where something else than a number differs.
    pub error: Option<f64>,
    /// What was compared, or the first difference.
    pub note: String,
}

impl Checked {
    /// True where everything agrees.
    pub fn ok(&self) -> bool {
        self.error.is_some_and(|e| e <= TOLERANCE)
    }
}

/// The JSON files of a folder that are LLMSim's records; empty where it is no such folder.
pub fn records(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return vec![] };
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    found.retain(|p| p.extension().is_some_and(|e| e == "json"));
    found.sort();
    found.retain(|p| load(p).is_ok_and(|v| is_run(&v) || is_empty(&v) || graph::is_graph(&v)));
    found
}

fn is_run(value: &Value) -> bool {
    ["inputs", "rows", "summary"].iter().all(|key| value.get(key).is_some())
}

/// What a run leaves that lists no operator: a file whose rows are none.
fn is_empty(value: &Value) -> bool {
    value.get("rows").and_then(Value::as_array).is_some_and(Vec::is_empty)
}

fn load(path: &Path) -> Result<Value, Refused> {
    let text = astrai_files::read_text(path, LONGEST).map_err(|e| e.to_string())?;
    serde_json::from_str(&text).map_err(|e| format!("{}: is not JSON: {e}", astrai_files::shown(path)))
}

/// Compares a record with what we compute of its inputs.
///
/// # Errors
/// The file cannot be read, or is neither a run nor a graph; one line that names file and key.
pub fn check(path: &Path) -> Result<Checked, Refused> {
    let named = |line: Refused| format!("{}: {line}", astrai_files::shown(path));
    let value = load(path)?;
    let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let mut found = Compared { worst: 0.0, numbers: 0, first: None };
    if is_empty(&value) {
        return Ok(Checked { file, error: None, note: "the file has no rows to compare".into() });
    }
    if graph::is_graph(&value) {
        let config = graph::read(&value).map_err(named)?;
        found.compare("graph", &graph::build(config).map_err(named)?, &value);
    } else {
        let input =
            |key: &str| value["inputs"].get(key).ok_or_else(|| named(format!("inputs.{key} is missing")));
        let config =
            input("model")?.get("config").ok_or_else(|| named("inputs.model.config is missing".into()))?;
        let schedule = Schedule::parse(input("schedule")?).map_err(|e| named(format!("inputs.{e}")))?;
        let machine =
            Machine::parse(input("hardware")?).map_err(|e| named(format!("inputs.hardware.{e}")))?;
        let ours =
            report(config, &schedule, &machine).map_err(|e| named(format!("inputs.model.{e}")))?.json();
        for part in ["rows", "summary"] {
            let theirs = value.get(part).ok_or_else(|| named(format!("{part} is missing")))?;
            found.compare(part, &ours[part], theirs);
        }
    }
    let note = found.first.unwrap_or_else(|| format!("{} numbers", found.numbers));
    let error = if note.starts_with("differs") { None } else { Some(found.worst) };
    Ok(Checked { file, error, note })
}

/// A comparison of two documents.
struct Compared {
    worst: f64,
    numbers: usize,
    /// The first difference.
    first: Option<String>,
}

impl Compared {
    fn differs(&mut self, line: String) {
        self.first.get_or_insert_with(|| astrai_files::one_line(&line));
    }

    /// Every value of theirs against ours; what only we have differs, too.
    fn compare(&mut self, at: &str, ours: &Value, theirs: &Value) {
        match (ours, theirs) {
            (Value::Object(a), Value::Object(b)) => {
                for key in a.keys().filter(|k| !b.contains_key(*k)) {
                    self.differs(format!("differs: {at}.{key} is missing"));
                }
                for (key, value) in b {
                    match a.get(key) {
                        Some(x) => self.compare(&format!("{at}.{key}"), x, value),
                        None => self.differs(format!("differs: {at}.{key} is not ours")),
                    }
                }
            }
            (Value::Array(a), Value::Array(b)) => {
                if a.len() != b.len() {
                    self.differs(format!("differs: {at} has {} entries, ours {}", b.len(), a.len()));
                }
                for (i, (x, y)) in a.iter().zip(b).enumerate() {
                    self.compare(&format!("{at}[{i}]"), x, y);
                }
            }
            (Value::Number(a), Value::Number(b)) => {
                let (a, b) = (a.as_f64().unwrap_or(f64::NAN), b.as_f64().unwrap_or(f64::NAN));
                let error = if a == b { 0.0 } else { (a - b).abs() / b.abs().max(f64::MIN_POSITIVE) };
                self.numbers += 1;
                if error.is_nan() || error > TOLERANCE {
                    self.first.get_or_insert_with(|| format!("{at} is {b}, ours {a}"));
                }
                self.worst = if error.is_nan() { f64::INFINITY } else { self.worst.max(error) };
            }
            (a, b) if a == b => {}
            (a, b) => self.differs(format!("differs: {at} is {b}, ours {a}")),
        }
    }
}

#[cfg(test)]
mod tests;
