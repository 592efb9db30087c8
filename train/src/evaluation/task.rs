//! Tasks: files of JSON lines, hostile until read. A line's keys say what it asks:
//!
//! | keys | what is asked |
//! |---|---|
//! | `text` | how likely the text is |
//! | a prompt, `choices` (or `endings`), and `gold` (or `answer`, `label`, `target`, `answerKey`) | which choice is likeliest |
//! | a prompt, and `answer` (or `answers`, `target`, `label`) or `regex` | an answer, generated greedily |
//!
//! A prompt is `prompt`, `query`, `question`, `context` or `ctx`, or for generated answers `messages`. Other keys are passed by.

use crate::data::{DataError, next_line};
use astrai_files::one_line;
use fancy_regex::Regex;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Most tokens of a generated answer unless a line says otherwise, or the context is short of them.
const NEW: usize = 256;

const PROMPTS: [&str; 5] = ["prompt", "query", "question", "context", "ctx"];
const CHOICES: [&str; 2] = ["choices", "endings"];
const GOLD: [&str; 5] = ["gold", "answer", "label", "target", "answerKey"];
const ANSWERS: [&str; 4] = ["answers", "answer", "target", "label"];

/// A file of questions.
#[derive(Clone, Debug)]
pub struct Task {
    path: PathBuf,
    /// Its name: that of the file without its ending.
    pub name: String,
    /// Lines that ask something.
    pub count: u64,
}

/// A line.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its number in the file, from 1.
    pub number: u64,
    /// What it asks.
    pub question: Question,
}

/// What a line asks.
#[derive(Clone, Debug)]
pub enum Question {
    /// How likely a text is.
    Text(String),
    /// Which of several continuations of a context is the likeliest.
    Choice {
        /// What comes before each.
        context: String,
        /// Between the context and each.
        delimiter: String,
        /// The continuations, at least two.
        choices: Vec<String>,
        /// The right one.
        gold: usize,
    },
    /// An answer.
    Generate {
        /// What it continues.
        prompt: Prompt,
        /// What is right.
        answers: Answers,
        /// Tokens of the answer at most, where the line says it.
        max_tokens: Option<usize>,
        /// Texts that end it.
        stop: Vec<String>,
    },
}

/// What an answer continues.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// A conversation, for the model's chat template.
    Messages(Value),
}

/// Which answers are right.
#[derive(Clone, Debug)]
pub enum Answers {
    /// One of these, white space around it aside; with a filter, what its first group (or all of it) matches first in the answer.
    Exact(Vec<String>, Option<Regex>),
    /// Those in which this is found.
    Regex(Regex),
}

impl Answers {
    /// Whether an answer is right.
    ///
    /// # Errors
    /// An expression takes too many steps on it.
    pub fn accept(&self, answer: &str) -> Result<bool, String> {
        let slow = |e: fancy_regex::Error| {
            format!("the expression fails on this answer: {}", one_line(&e.to_string()))
        };
        match self {
            Answers::Regex(pattern) => pattern.is_match(answer).map_err(slow),
            Answers::Exact(right, filter) => {
                let given = match filter {
                    None => Some(answer),
                    Some(filter) => {
                        let found = filter.captures(answer).map_err(slow)?;
                        found.and_then(|found| Some(found.get(1).or(found.get(0))?.as_str()))
                    }
                };
                Ok(given.is_some_and(|given| right.iter().any(|right| right.trim() == given.trim())))
            }
        }
    }

    /// The name of the metric.
    pub fn metric(&self) -> &'static str {
        match self {
            Answers::Exact(..) => "exact_match",
            Answers::Regex(_) => "regex_match",
        }
    }
}

impl Task {
    /// Opens files, which tell tasks apart by their names.
    ///
    /// # Errors
    /// Those of [`open`](Self::open), or two files have one name.
    pub fn open_all(paths: &[PathBuf], limit: Option<u64>) -> Result<Vec<Task>, DataError> {
        let tasks = paths.iter().map(|path| Task::open(path, limit)).collect::<Result<Vec<Task>, _>>()?;
        for (i, task) in tasks.iter().enumerate() {
            if tasks[..i].iter().any(|before| before.name == task.name) {
                return Err(DataError::refused(
                    &task.path,
                    "is a task of the same name as another; rename one",
                ));
            }
        }
        Ok(tasks)
    }

    /// Opens a file and reads it once: every line that is wrong is told before a model computes anything.
    ///
    /// # Errors
    /// It cannot be read, a line asks nothing that can be answered, or there is none.
    pub fn open(path: &Path, limit: Option<u64>) -> Result<Task, DataError> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut task = Task { path: path.to_path_buf(), name, count: limit.unwrap_or(u64::MAX) };
        let mut count = 0;
        for line in task.lines()? {
            line?;
            count += 1;
        }
        task.count = count;
        match count {
            0 => Err(DataError::refused(path, "asks nothing; give lines of JSON, see docs/evaluation.md")),
            _ => Ok(task),
        }
    }

    /// Its lines, at most as many as the limit said.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn lines(&self) -> Result<impl Iterator<Item = Result<Line, DataError>> + use<'_>, DataError> {
        let (file, _) = astrai_files::open(&self.path)?;
        let reader = BufReader::new(file);
        let lines = Lines { path: &self.path, reader, number: 0 };
        Ok(lines.take(usize::try_from(self.count).unwrap_or(usize::MAX)))
    }

    /// An error of a line.
    pub fn refused(&self, line: u64, why: &str) -> DataError {
        DataError::refused(&self.path, format!("line {line}: {why}"))
    }
}

struct Lines<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    number: u64,
}

impl Iterator for Lines<'_> {
    type Item = Result<Line, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.number += 1;
            let number = self.number;
            let mut line = match next_line(&mut self.reader, self.path, number).transpose()? {
                Ok(line) => line,
                Err(e) => return Some(Err(e)),
            };
            let refused = |why: String| DataError::refused(self.path, format!("line {number}: {why}"));
            if number == 1 && line.starts_with("\u{feff}".as_bytes()) {
                line.drain(..3);
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            let read = serde_json::from_slice::<Map<String, Value>>(&line);
            let read = read
                .map_err(|e| format!("is no JSON object ({}); mend or remove it", one_line(&e.to_string())));
            let question = read.and_then(|object| question(&object)).map_err(refused);
            return Some(question.map(|question| Line { number, question }));
        }
    }
}

type Object = Map<String, Value>;

/// The first of these keys that an object has, with its value.
fn first<'a>(object: &'a Object, keys: &[&'static str]) -> Option<(&'static str, &'a Value)> {
    keys.iter().find_map(|key| Some((*key, object.get(*key).filter(|v| !v.is_null())?)))
}

fn text(key: &str, value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_string).ok_or_else(|| format!("`{key}` is no text; mend it"))
}

/// Texts: one, or a list of such; numbers are spelt.
fn texts(key: &str, value: &Value) -> Result<Vec<String>, String> {
    let one = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(n) => Some(n.to_string()),
        _ => None,
    };
    let all: Option<Vec<String>> = match value {
        Value::Array(list) => list.iter().map(one).collect(),
        value => one(value).map(|text| vec![text]),
    };
    all.filter(|all| !all.is_empty()).ok_or_else(|| format!("`{key}` is no text or list of texts; mend it"))
}

fn question(object: &Object) -> Result<Question, String> {
    let prompt = first(object, &PROMPTS);
    if let Some((key, value)) = first(object, &CHOICES) {
        let (name, context) =
            prompt.ok_or_else(|| format!("has `{key}` and no prompt; give it as `prompt`"))?;
        return choice(object, text(name, context)?, key, value);
    }
    let messages = object.get("messages").filter(|v| v.is_array());
    let answered = object.contains_key("regex") || first(object, &ANSWERS).is_some();
    if answered && (prompt.is_some() || messages.is_some()) {
        let prompt = match (prompt, messages) {
            (Some((key, value)), _) => Prompt::Text(text(key, value)?),
            (None, messages) => Prompt::Messages(messages.cloned().unwrap_or_default()),
        };
        return generated(object, prompt);
    }
    match object.get("text") {
        Some(value) => match text("text", value)? {
            text if text.trim().is_empty() => Err("`text` is empty; remove the line".into()),
            text => Ok(Question::Text(text)),
        },
        None => Err("asks nothing: give `text`, or `prompt` with `choices` and `gold`, or `prompt` with `answer` or `regex`".into()),
    }
}

fn choice(object: &Object, context: String, key: &str, value: &Value) -> Result<Question, String> {
    // ARC has texts and their labels side by side.
    let labels = value.get("label").map(|labels| texts("choices.label", labels)).transpose()?;
    let choices = texts(key, value.get("text").unwrap_or(value))?;
    if choices.len() < 2 || choices.iter().any(|choice| choice.trim().is_empty()) {
        return Err(format!("`{key}` are not at least two texts; mend them"));
    }
    let (key, value) = first(object, &GOLD)
        .ok_or("does not say which choice is right; give its number, from 0, as `gold`")?;
    let place = |list: &[String], text: &str| list.iter().position(|one| one == text);
    let letter = |text: &str| match text.as_bytes() {
        [letter @ b'A'..=b'Z'] => Some(usize::from(letter - b'A')),
        _ => None,
    };
    let gold = match value {
        Value::Number(n) => n.as_u64().map(|n| n as usize),
        Value::String(text) => (labels.as_deref().and_then(|labels| place(labels, text)))
            .or_else(|| place(&choices, text))
            .or_else(|| letter(text))
            .or_else(|| text.parse().ok()),
        _ => None,
    };
    let n = choices.len();
    let gold = gold.filter(|&gold| gold < n).ok_or_else(|| {
        format!(
            "`{key}` {} is none of the {n} choices; give a number from 0, a letter, or its text",
            one_line(&value.to_string())
        )
    })?;
    let delimiter = object.get("delimiter").map(|d| text("delimiter", d)).transpose()?;
    Ok(Question::Choice { context, delimiter: delimiter.unwrap_or(" ".into()), choices, gold })
}

/// Tokens of an answer at most, where a line does not say it: as many as a prompt of this length leaves, or half of the context where it
/// leaves less.
pub fn answer_tokens(context: usize, prompt: usize) -> usize {
    context.saturating_sub(prompt).max(context / 2).min(NEW)
}

fn generated(object: &Object, prompt: Prompt) -> Result<Question, String> {
    let regex = |key: &str| {
        let Some(value) = object.get(key) else { return Ok(None) };
        let pattern = text(key, value)?;
        let wrong = |e: fancy_regex::Error| {
            format!("`{key}` is no regular expression ({}); mend it", one_line(&e.to_string()))
        };
        Regex::new(&pattern).map(Some).map_err(wrong)
    };
    let answers = match (regex("regex")?, first(object, &ANSWERS)) {
        (Some(pattern), _) => Answers::Regex(pattern),
        (None, Some((key, value))) => Answers::Exact(texts(key, value)?, regex("filter")?),
        (None, None) => return Err("does not say which answer is right; give `answer` or `regex`".into()),
    };
    let max_tokens = match object.get("max_tokens") {
        None => None,
        Some(n) => {
            let n = n.as_u64().filter(|n| (1..1 << 20).contains(n));
            Some(n.ok_or("`max_tokens` is no number of at least 1; mend it")? as usize)
        }
    };
    let stop = object.get("stop").or(object.get("until")).map(|stop| texts("stop", stop)).transpose()?;
    Ok(Question::Generate { prompt, answers, max_tokens, stop: stop.unwrap_or_default() })
}
