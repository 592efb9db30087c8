//! The tools of a request, as far as reading their calls goes: which there are, and what types their arguments have.

use std::collections::HashMap;

use serde_json::Value;

use super::json::compact;

/// Tools by name.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    schemas: HashMap<String, Value>,
}

impl Tools {
    /// Reads tools in the form of OpenAI's API; what has another form is left out.
    pub fn new(tools: &[Value]) -> Tools {
        let one = |tool: &Value| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?.to_owned();
            Some((name, function.get("parameters").cloned().unwrap_or_default()))
        };
        Tools { schemas: tools.iter().filter_map(one).collect() }
    }

    /// Whether there is a tool of this name.
    pub fn has(&self, name: &str) -> bool {
        self.schemas.contains_key(name)
    }

    /// The JSON that a bare text is for an argument of a tool: of the type that the tool's schema gives it. Where it gives none, or the
    /// text is not of that type, what is JSON of another type than a text is that, and the rest is a text.
    pub fn value(&self, tool: &str, argument: &str, text: &str) -> String {
        let schema = self.schemas.get(tool).and_then(|s| s.get("properties")?.get(argument));
        let types = schema.map(types).unwrap_or_default();
        let parsed = serde_json::from_str::<Value>(text.trim()).ok().filter(|value| !value.is_string());
        match parsed {
            Some(value) if types.is_empty() || types.iter().any(|t| *t != "string" && is(&value, t)) => {
                compact(text.trim())
            }
            // A number for an argument that has another type, say.
            Some(_) if !types.contains(&"string") => compact(text.trim()),
            // A text in quotes, for an argument that is no plain text.
            None if !types.is_empty() && !types.contains(&"string") && is_json(text) => compact(text.trim()),
            _ => Value::from(text).to_string(),
        }
    }
}

/// Types that a schema allows, as far as it says so plainly.
fn types(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
        _ => {
            let options = ["anyOf", "oneOf"].into_iter().filter_map(|key| schema.get(key)?.as_array());
            let named: Vec<&str> = options.flatten().flat_map(types).collect();
            let values = schema.get("enum").and_then(Value::as_array);
            let all_texts = values.is_some_and(|all| all.iter().all(Value::is_string));
            if named.is_empty() && all_texts { vec!["string"] } else { named }
        }
    }
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<Value>(text.trim()).is_ok()
}

fn is(value: &Value, kind: &str) -> bool {
    match kind {
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "null" => value.is_null(),
        _ => false,
    }
}
