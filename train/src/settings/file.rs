//! In: `run.toml`, hostile. Out: the settings it gives, or one line with file, key and, for a key that does not exist,
//! the nearest one that does.

use std::path::Path;

use astrai_files::read_text;
use serde::de::DeserializeOwned;
use strsim::levenshtein;
use toml::{Table, Value};

use super::{Error, KEYS, Partial};
use crate::strategies::option;

/// Longest file read, in bytes.
const LONGEST: u64 = 1 << 20;

impl Partial {
    /// Reads the settings in the TOML file `path`. Keys are the flags' names with underscores, those of an adapter perhaps in a table `lora`; paths are relative to
    /// the working directory, as the flags' are.
    ///
    /// # Errors
    /// The file cannot be read, is no TOML, or has a key that does not exist or a value of another type.
    pub fn read(path: &Path) -> Result<Partial, Error> {
        let text = read_text(path, LONGEST).map_err(|e| Error(e.to_string()))?;
        Partial::parse(&text, &path.display().to_string())
    }

    /// Reads settings from TOML `text`; `file` names it in messages.
    ///
    /// # Errors
    /// Those of [`read`](Self::read), but for the file's.
    pub fn parse(text: &str, file: &str) -> Result<Partial, Error> {
        let mut table: Table = text.parse().map_err(|e| Error(format!("{file}: {}", located(text, &e))))?;
        if let Some(Value::Table(lora)) = table.remove("lora") {
            for (key, value) in lora {
                let own = ["rslora", "dora"].contains(&key.as_str());
                let key = if own { key } else { format!("lora_{key}") };
                if table.insert(key.clone(), value).is_some() {
                    return Err(Error(format!("{file}: {} is given twice", quote(&key))));
                }
            }
        }
        for key in table.keys() {
            if !KEYS.contains(&key.as_str()) {
                return Err(Error(format!("{file}: unknown key {}; {}", quote(key), remedy(key))));
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
                Ok(Value::String(format!("{key}={}", value.map_err(|e| Error(format!("{file}: set: {e}")))?)))
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
        Partial::from_table(table, file)
    }
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
    file: &str,
) -> Result<Option<T>, Error> {
    let Some(value) = table.remove(key) else { return Ok(None) };
    let read = value
        .try_into()
        .map_err(|e: toml::de::Error| Error(format!("{file}: {key}: {}", one_line(e.message()))))?;
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
