//! Calls that an answer must be: `tool_choice` required, or a named tool. In: the tools. Out: a grammar of calls in the model's own format,
//! whose arguments their schemas hold.

use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use crate::grammar::{Wanted, quoted};
use crate::markup::CallFormat;

/// A tool as a grammar sees it.
struct Tool<'a> {
    name: &'a str,
    parameters: Value,
}

/// The grammar of one call of one of the tools, or of several calls.
///
/// # Errors
/// The format has no grammar.
pub fn calls(app: &App, format: CallFormat, tools: &[Value], several: bool) -> Result<Wanted, ApiError> {
    let one = |tool: &'_ Value| {
        let function = &tool["function"];
        let parameters = function.get("parameters").filter(|p| !p.is_null()).cloned();
        (function["name"].as_str().unwrap_or("").to_owned(), parameters.unwrap_or(json!({"type": "object"})))
    };
    let tools: Vec<(String, Value)> = tools.iter().map(one).collect();
    let mut writer = Writer { app, rules: String::new() };
    let mut names = Vec::new();
    for (i, (name, parameters)) in tools.iter().enumerate() {
        let tool = Tool { name, parameters: parameters.clone() };
        let body = writer.call(format, i, &tool)?;
        writer.rules.push_str(&format!("call{i}: {body}\n"));
        names.push(format!("call{i}"));
    }
    let call = names.join(" | ");
    let [before, between, after] = writer.around(format);
    let more =
        if several && !between.is_empty() { format!(" ({between} call){{0,15}}") } else { String::new() };
    let start = format!("start: {before} call{more} {after}\ncall: {call}\n");
    Ok(Wanted::Lark(start + &writer.rules))
}

struct Writer<'a> {
    app: &'a App,
    rules: String,
}

impl Writer<'_> {
    /// A tag: the token that it is, where the vocabulary has it as a special one, or its text.
    fn tag(&self, text: &str) -> String {
        let id = self.app.tokenizer.id(text).filter(|id| self.app.tokenizer.is_special(*id));
        id.map_or_else(|| quoted(text), |id| format!("<[{id}]>"))
    }

    /// What stands before the first call, between two, and after the last.
    fn around(&self, format: CallFormat) -> [String; 3] {
        let none = String::new;
        match format {
            CallFormat::Hermes | CallFormat::Glm4 | CallFormat::Qwen3Coder => [none(), quoted("\n"), none()],
            CallFormat::Llama3Json => [none(), quoted("; "), none()],
            CallFormat::Mistral => [format!("{} \"[\"", self.tag("[TOOL_CALLS]")), quoted(", "), quoted("]")],
            CallFormat::DeepseekV3 => {
                [self.tag("<｜tool▁calls▁begin｜>"), quoted("\n"), self.tag("<｜tool▁calls▁end｜>")]
            }
            // A call ends the answer.
            CallFormat::Harmony => [none(), none(), none()],
        }
    }

    /// The rule of arguments that a schema holds.
    fn arguments(&mut self, name: &str, schema: &Value) -> Result<String, ApiError> {
        let at = |wrong: String| ApiError::field("tools", format!("{name}: {wrong}"));
        let schema = Wanted::checked_schema(schema.clone()).map_err(at)?;
        let rule = format!("arguments{}", self.rules.matches("\narguments").count() + 1);
        self.rules.push_str(&format!("\n{rule}: %json {schema}\n"));
        Ok(rule)
    }

    fn call(&mut self, format: CallFormat, i: usize, tool: &Tool) -> Result<String, ApiError> {
        let name = tool.name;
        let bare = matches!(format, CallFormat::Glm4 | CallFormat::Qwen3Coder);
        if bare {
            return self.bare_call(format, i, tool);
        }
        let arguments = self.arguments(name, &tool.parameters)?;
        let named = |key: &str| quoted(&format!("{{\"name\": {}, \"{key}\": ", json!(name)));
        Ok(match format {
            CallFormat::Llama3Json => format!("{} {arguments} \"}}\"", named("parameters")),
            CallFormat::Mistral => format!("{} {arguments} \"}}\"", named("arguments")),
            CallFormat::DeepseekV3 => {
                let [begin, between, end] =
                    ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"].map(|t| self.tag(t));
                let head = quoted(&format!("{name}\n```json\n"));
                format!("{begin} \"function\" {between} {head} {arguments} {} {end}", quoted("\n```"))
            }
            CallFormat::Harmony => {
                let [channel, constrain, message] =
                    ["<|channel|>", "<|constrain|>", "<|message|>"].map(|t| self.tag(t));
                let to = quoted(&format!("commentary to=functions.{name} "));
                format!("{channel} {to} {constrain} \"json\" {message} {arguments}")
            }
            _ => {
                let [open, close] = ["<tool_call>", "</tool_call>"].map(|t| self.tag(t));
                format!("{open} \"\\n\" {} {arguments} \"}}\\n\" {close}", named("arguments"))
            }
        })
    }

    /// A call whose arguments are bare texts: required ones in the order of the schema, others may be left out.
    fn bare_call(&mut self, format: CallFormat, i: usize, tool: &Tool) -> Result<String, ApiError> {
        let required = tool.parameters.get("required").and_then(Value::as_array);
        let needed = |key: &str| required.is_some_and(|all| all.iter().any(|name| name == key));
        let properties = tool.parameters.get("properties").and_then(Value::as_object).cloned();
        let mut body = String::new();
        for (j, (key, schema)) in properties.unwrap_or_default().iter().enumerate() {
            let (head, end) = match format {
                CallFormat::Glm4 => {
                    let key = quoted(key);
                    let [open, close, value] =
                        ["<arg_key>", "</arg_key>", "<arg_value>"].map(|tag| self.tag(tag));
                    (format!("{open} {key} {close} \"\\n\" {value}"), self.tag("</arg_value>"))
                }
                _ => (quoted(&format!("<parameter={key}>\n")), quoted("\n</parameter>")),
            };
            let value = match self.texts(schema) {
                Some(texts) => texts,
                None if schema.get("type").is_some_and(|t| t == "string") => {
                    // Up to the first thing that looks like a tag.
                    "/[^<]{0,4000}/".into()
                }
                None => self.arguments(tool.name, schema)?,
            };
            self.rules.push_str(&format!("\nvalue{i}x{j}: {head} {value} {end} \"\\n\"\n"));
            body.push_str(&format!(" value{i}x{j}{}", if needed(key) { "" } else { "?" }));
        }
        let [open, close] = ["<tool_call>", "</tool_call>"].map(|tag| self.tag(tag));
        Ok(match format {
            CallFormat::Glm4 => format!("{open} {}{body} {close}", quoted(&format!("{}\n", tool.name))),
            _ => {
                let function = quoted(&format!("\n<function={}>\n", tool.name));
                format!("{open} {function}{body} {} {close}", quoted("</function>\n"))
            }
        })
    }

    /// The texts of a schema that is a list of them.
    fn texts(&self, schema: &Value) -> Option<String> {
        let all = schema.get("enum")?.as_array()?;
        let texts: Option<Vec<String>> = all.iter().map(|text| text.as_str().map(quoted)).collect();
        texts.filter(|texts| !texts.is_empty()).map(|texts| format!("({})", texts.join(" | ")))
    }
}
