//! In: `run.toml` or `run.yaml`, hostile. Out: the settings it gives, or one line with file, line, key and, for a key that does not
//! exist, the nearest one that does.

use std::collections::BTreeMap;
use std::path::Path;

use astrai_files::read_text;
use serde::de::DeserializeOwned;
use strsim::levenshtein;
use toml::{Table, Value};

use super::{Error, KEYS, Partial};
use crate::strategies::option;

/// Longest file read, in bytes.
const LONGEST: u64 = 1 << 20;
/// Most values of a YAML file, those that aliases repeat counted each time.
const VALUES: usize = 1 << 14;
/// Deepest nesting of a YAML file.
const DEEPEST: usize = 32;

/// A file whose keys are read: its name, and the line of each key's value.
pub(super) struct Lines<'a> {
    file: &'a str,
    of: BTreeMap<String, usize>,
}

impl Lines<'_> {
    /// What is wrong with a key, with file and line.
    fn wrong(&self, key: &str, what: &str) -> Error {
        let line = self.of.get(key).map_or_else(String::new, |n| format!("line {n}: "));
        Error(format!("{}: {line}{what}", self.file))
    }
}

impl Partial {
    /// Reads the settings in the file `path`: YAML where its name ends in `.yaml` or `.yml`, else TOML. Keys are the flags' names with underscores, those of an
    /// adapter perhaps in a table `lora`; paths are relative to the working directory, as the flags' are.
    ///
    /// # Errors
    /// The file cannot be read, is no TOML or YAML, or has a key that does not exist or a value of another type.
    pub fn read(path: &Path) -> Result<Partial, Error> {
        let text = read_text(path, LONGEST).map_err(|e| Error(e.to_string()))?;
        Partial::parse(&text, &path.display().to_string())
    }

    /// Reads settings from `text`; `file` names it in messages, and says by its ending what it is.
    ///
    /// # Errors
    /// Those of [`read`](Self::read), but for the file's.
    pub fn parse(text: &str, file: &str) -> Result<Partial, Error> {
        let yaml = [".yaml", ".yml"].iter().any(|end| file.to_lowercase().ends_with(end));
        let (mut table, of) =
            if yaml { of_yaml(text) } else { of_toml(text) }.map_err(|e| Error(format!("{file}: {e}")))?;
        let mut lines = Lines { file, of };
        if let Some(Value::Table(lora)) = table.remove("lora") {
            for (key, value) in lora {
                let own = ["rslora", "dora"].contains(&key.as_str());
                let key = if own { key } else { format!("lora_{key}") };
                if table.insert(key.clone(), value).is_some() {
                    return Err(lines.wrong(&key, &format!("{} is given twice", quote(&key))));
                }
                let line = lines.of.get("lora").copied();
                lines.of.extend(line.map(|line| (key, line)));
            }
        }
        for key in table.keys() {
            if !KEYS.contains(&key.as_str()) {
                return Err(lines.wrong(key, &format!("unknown key {}; {}", quote(key), remedy(key))));
            }
        }
        for list in ["data", "lora_targets", "eval_task", "metrics", "freeze"] {
            if let Some(one @ Value::String(_)) = table.get(list).cloned() {
                table.insert(list.to_string(), Value::Array(vec![one]));
            }
        }
        if let Some(Value::Table(options)) = table.get("set").cloned() {
            // As the flag has them: a word as it stands, other values in JSON.
            let one = |(key, value): (String, Value)| {
                if let Value::String(word) = &value
                    && option(&format!("{key}={word}")).is_ok_and(|(_, read)| read == word.as_str())
                {
                    return Ok(Value::String(format!("{key}={word}")));
                }
                let value = serde_json::to_string(&value);
                Ok(Value::String(format!(
                    "{key}={}",
                    value.map_err(|e| lines.wrong("set", &format!("set: {e}")))?
                )))
            };
            let list = options.into_iter().map(one).collect::<Result<_, Error>>()?;
            table.insert("set".to_string(), Value::Array(list));
        }
        if let Some(Value::Table(types)) = table.get("precision").cloned() {
            let one = |(name, ty): (String, Value)| match ty {
                Value::String(ty) => Value::String(format!("{name}={ty}")),
                other => Value::String(format!("{name}={other}")),
            };
            table.insert("precision".to_string(), Value::Array(types.into_iter().map(one).collect()));
        }
        if let Some(Value::Array(groups)) = table.get_mut("group") {
            groups.iter_mut().for_each(as_flag);
        }
        if let Some(Value::Table(on)) = table.get("on").cloned() {
            // As the flag has them: each moment before its command.
            let commands = on.into_iter().flat_map(|(when, commands)| {
                let commands = if let Value::Array(list) = commands { list } else { vec![commands] };
                commands.into_iter().flat_map(move |command| [Value::String(when.clone()), command])
            });
            table.insert("on".to_string(), Value::Array(commands.collect()));
        }
        Partial::from_table(table, &lines)
    }
}

/// A file's keys, and the line of each one's value.
type Keys = (Table, BTreeMap<String, usize>);

fn of_toml(text: &str) -> Result<Keys, String> {
    let keys: BTreeMap<String, toml::Spanned<Value>> = toml::from_str(text).map_err(|e| located(text, &e))?;
    let line = |at: usize| text.get(..at).map_or(1, |before| before.matches('\n').count() + 1);
    let lines = keys.iter().map(|(key, x)| (key.clone(), line(x.span().start))).collect();
    Ok((keys.into_iter().map(|(key, x)| (key, x.into_inner())).collect(), lines))
}

fn of_yaml(text: &str) -> Result<Keys, String> {
    // `yes` is a word, as the YAML of today has it.
    let options = serde_saphyr::options! {
        with_snippet: false,
        strict_booleans: true,
        budget: serde_saphyr::budget! { max_nodes: VALUES, max_depth: DEEPEST },
    };
    let read = serde_saphyr::from_str_with_options(text, options);
    let keys: BTreeMap<String, serde_saphyr::Spanned<Value>> = read.map_err(|e| {
        let line = e.location().map_or_else(String::new, |at| format!("line {}: ", at.line()));
        let reason = e.to_string();
        let reason = match reason.split(" at line ").next().unwrap_or_default() {
            much if much.contains("budget breached") => {
                format!(
                    "more than {VALUES} values, those of aliases counted each time, or deeper than {DEEPEST}"
                )
            }
            other => other.replace("unit value, expected any valid TOML", "nothing, expected a"),
        };
        format!("{line}{}", one_line(&reason))
    })?;
    let lines = keys.iter().map(|(key, x)| (key.clone(), x.referenced.line() as usize)).collect();
    Ok((keys.into_iter().map(|(key, x)| (key, x.value)).collect(), lines))
}

/// A group that is a table, with its `pattern` and numbers, as the flag has it.
fn as_flag(group: &mut Value) {
    let Value::Table(keys) = group else { return };
    if let Some(Value::String(pattern)) = keys.remove("pattern") {
        let numbers: Vec<String> = keys.iter().map(|(key, x)| format!("{key}={x}")).collect();
        *group = Value::String(format!("{pattern}:{}", numbers.join(",")));
    }
}

/// The value of `key`, taken out of `table`.
pub(super) fn take<T: DeserializeOwned>(
    table: &mut Table,
    key: &str,
    lines: &Lines,
) -> Result<Option<T>, Error> {
    let Some(value) = table.remove(key) else { return Ok(None) };
    let read = value
        .try_into()
        .map_err(|e: toml::de::Error| lines.wrong(key, &format!("{key}: {}", one_line(e.message()))))?;
    Ok(Some(read))
}

/// The parser's reason with its line, on one line.
fn located(text: &str, error: &toml::de::Error) -> String {
    let reason = one_line(error.message());
    match error.span().and_then(|span| text.get(..span.start)) {
        Some(before) => format!("line {}: {reason}", before.matches('\n').count() + 1),
        None => reason,
    }
}

fn remedy(key: &str) -> String {
    let key: String = key.chars().take(64).collect();
    let nearest = KEYS.iter().map(|known| (levenshtein(&key, known), known)).min();
    match nearest {
        Some((edits, known)) if edits <= 2 || edits * 3 <= known.len() => {
            format!("did you mean \"{known}\"?")
        }
        _ => format!("the keys are {}", KEYS.join(", ")),
    }
}

fn quote(key: &str) -> String {
    format!("\"{}\"", one_line(key))
}

fn one_line(text: &str) -> String {
    text.chars()
        .take(200)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect::<String>()
        .trim()
        .to_string()
}
