//! What an answer is asked to be: `response_format`, `structured_outputs`, and the older fields of other servers. In: fields, hostile. Out: one
//! wish, or none; two are a contradiction.

use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, Read, kind};
use super::params::short;
use super::tags;
use crate::grammar::Wanted;
use crate::tokenizer::Tokenizer;

/// What is wanted, and the field that says so.
type Wish = (String, Wanted);

/// Fields by which other servers ask, and the kind of what they hold.
const FIELDS: [(&str, &str); 6] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("grammar", "grammar"),
    ("json_schema", "json"),
];

/// Kinds that `structured_outputs` has; the rest of its fields change nothing that is not so anyhow.
const KINDS: [&str; 6] = ["json", "json_object", "regex", "choice", "grammar", "structural_tag"];

/// Reads all of them.
///
/// # Errors
/// A field is of the wrong type, of a kind that is not known, or there are two.
pub fn wanted(fields: &mut Fields, tokenizer: &Tokenizer) -> Result<Option<Wish>, ApiError> {
    let mut wishes = Vec::new();
    wishes.extend(response_format(fields, tokenizer)?);
    if let Some(mut inner) = fields.object("structured_outputs")? {
        let before = wishes.len();
        for kind in KINDS {
            if let Some(value) = inner.raw(kind) {
                let wish = match kind {
                    "structural_tag" => tags::wanted(tokenizer, value).map(Some),
                    _ => wish(kind, value),
                };
                let wish = wish.map_err(|wrong| inner.refusal(kind, wrong))?;
                wishes.extend(wish.map(|wish| (format!("structured_outputs.{kind}"), wish)));
            }
        }
        if wishes.len() == before && !inner.is_empty() {
            return Err(fields.refusal("structured_outputs", format!("needs one of {}", KINDS.join(", "))));
        }
    }
    for (field, kind) in FIELDS {
        // Empty is how some clients leave them out.
        let value =
            fields.raw(field).filter(|value| value != &Value::from("") && value != &Value::Array(vec![]));
        if let Some(value) = value {
            let wish = wish(kind, value).map_err(|wrong| fields.refusal(field, wrong))?;
            wishes.extend(wish.map(|wish| (field.to_owned(), wish)));
        }
    }
    match wishes.len() {
        0 | 1 => Ok(wishes.pop()),
        _ => {
            let (first, second) = (&wishes[0].0, &wishes[1].0);
            Err(fields.refusal(second, format!("cannot be together with {first}; an answer is one of them")))
        }
    }
}

fn wish(kind: &str, value: Value) -> Result<Option<Wanted>, String> {
    Ok(Some(match kind {
        "json" => Wanted::Schema(schema(value)?),
        "json_object" if !bool::read(value.clone())? => return Ok(None),
        "json_object" => Wanted::object(),
        "regex" => Wanted::Regex(String::read(value)?),
        "choice" => {
            let texts = Vec::<Value>::read(value)?.into_iter().map(String::read);
            let texts: Vec<String> = texts.collect::<Result<_, _>>().map_err(|e| format!("its items {e}"))?;
            if texts.is_empty() {
                return Err("is empty; give a text at least".into());
            }
            Wanted::Choice(texts)
        }
        _ => Wanted::Grammar(String::read(value)?),
    }))
}

/// A schema, or its JSON as a text.
fn schema(value: Value) -> Result<Value, String> {
    match value {
        Value::String(text) => {
            serde_json::from_str(&text).map_err(|_| "must be a schema, or the JSON of one".to_owned())
        }
        Value::Object(_) | Value::Bool(_) => Ok(value),
        other => Err(format!("must be a schema, not {}", kind(&other))),
    }
}

fn response_format(fields: &mut Fields, tokenizer: &Tokenizer) -> Result<Option<Wish>, ApiError> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
    let given = format.raw("json_schema");
    let at = "response_format.json_schema";
    let wanted = match format.take::<String>("type")?.as_deref() {
        Some("text") => return Ok(None),
        Some("json_object") => match format.raw("schema") {
            None => Wanted::object(),
            Some(value) => Wanted::Schema(schema(value).map_err(|wrong| format.refusal("schema", wrong))?),
        },
        Some("json_schema") => {
            let Some(given) = given else {
                return Err(
                    format.refusal("json_schema", "is missing; give an object with a name and a schema")
                );
            };
            let mut given = Map::read(given).map_err(|wrong| format.refusal("json_schema", wrong))?;
            let inner = given.remove("schema").unwrap_or_default();
            let schema = schema(inner).map_err(|wrong| ApiError::field(format!("{at}.schema"), wrong))?;
            return Ok(Some((format!("{at}.schema"), Wanted::Schema(schema))));
        }
        Some("structural_tag") => {
            let parts = ["format", "structures", "triggers"];
            let given = parts.into_iter().filter_map(|key| Some((key.to_owned(), format.raw(key)?)));
            let wanted = tags::wanted(tokenizer, Value::Object(given.collect()));
            wanted.map_err(|wrong| fields.refusal("response_format", wrong))?
        }
        other => {
            let wrong = format!(
                "must be \"text\", \"json_object\", \"json_schema\" or \"structural_tag\", not {:?}",
                short(other.unwrap_or(""))
            );
            return Err(format.refusal("type", wrong));
        }
    };
    Ok(Some(("response_format".into(), wanted)))
}
