//! Calls that an answer must be (`tool_choice` required, or a named tool), or may have in it (`auto`, where tools are strict). In: the tools.
//! Out: a grammar of calls in the model's own format, whose arguments their schemas hold.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::params::short;
use crate::grammar::{Wanted, quoted, within};
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
    let mut writer = Writer { app, rules: String::new(), arguments: 0, free: false };
    let call = writer.calls(format, tools)?;
    let [before, between, after] = writer.around(format);
    let more =
        if several && !between.is_empty() { format!(" ({between} call){{0,15}}") } else { String::new() };
    let start = format!("start: {before} call{more} {after}\ncall: {call}\n");
    Ok(Wanted::Lark(start + &writer.rules))
}

/// The grammar of texts with calls in them where the model likes, of which strict tools' are held to their schemas. None where no tool is
/// strict, and of formats in which nothing tells a call from a text before its name is known, or a tool that is not strict from one
/// that is.
///
/// # Errors
/// A strict tool's schema cannot be held to.
pub fn among_texts(
    app: &App,
    format: CallFormat,
    tools: &[Value],
    several: bool,
) -> Result<Option<Wanted>, ApiError> {
    let tag = match format {
        CallFormat::Hermes | CallFormat::Glm4 | CallFormat::Qwen3Coder => "<tool_call>",
        CallFormat::DeepseekV3 => "<｜tool▁calls▁begin｜>",
        CallFormat::Llama3Json | CallFormat::Mistral | CallFormat::Harmony => return Ok(None),
    };
    let strict = tools.iter().filter(|tool| is_strict(tool)).count();
    let bare = matches!(format, CallFormat::Glm4 | CallFormat::Qwen3Coder);
    if strict == 0 || bare && strict < tools.len() {
        return Ok(None);
    }
    let mut writer = Writer { app, rules: String::new(), arguments: 0, free: true };
    let call = writer.calls(format, tools)?;
    let [before, between, after] = writer.around(format);
    let calls = match (before.is_empty(), several) {
        (true, false) => "call?".to_owned(),
        (true, true) => "call{0,16}".to_owned(),
        (false, false) => format!("({before} call {after})?"),
        (false, true) => format!("({before} call ({between} call){{0,15}} {after})?"),
    };
    let after = after_angle(tag);
    // As `without`, and not empty.
    let said = format!("[^<]+(?:<{after})*|(?:<{after})+");
    let start = format!("start: {calls} said?\ncall: {call}\nsaid: /{said}/\n");
    Ok(Some(Wanted::Lark(start + &writer.rules)))
}

fn is_strict(tool: &Value) -> bool {
    tool["function"]["strict"] == true
}

/// An expression of the texts that have no such tag in them.
fn without(tag: &str) -> String {
    format!("[^<]*(?:<{})*", after_angle(tag))
}

/// An expression of what follows a `<` in a text without such a tag: not the rest of the tag.
fn after_angle(tag: &str) -> String {
    let mut after = String::new();
    for (i, c) in tag.chars().skip(1).collect::<Vec<_>>().into_iter().rev().enumerate() {
        let c = if c == '/' { "\\/".to_owned() } else { c.to_string() };
        let goes_on = if i == 0 { String::new() } else { format!("|{c}{after}") };
        after = format!("(?:[^{c}<][^<]*{goes_on})?");
    }
    after
}

struct Writer<'a> {
    app: &'a App,
    rules: String,
    /// Rules of arguments so far.
    arguments: usize,
    /// Whether texts may stand before calls.
    free: bool,
}

impl Writer<'_> {
    /// A call of one of the tools; arguments of those that need not be strict are any object.
    fn calls(&mut self, format: CallFormat, tools: &[Value]) -> Result<String, ApiError> {
        let mut names = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            let function = &tool["function"];
            let held = !self.free || is_strict(tool);
            let parameters = function.get("parameters").filter(|p| held && !p.is_null()).cloned();
            let parameters = parameters.unwrap_or(json!({"type": "object"}));
            let tool = Tool { name: function["name"].as_str().unwrap_or(""), parameters };
            let body = self.call(format, i, &tool)?;
            self.rule(format!("call{i}: {body}\n"))?;
            names.push(format!("call{i}"));
        }
        Ok(names.join(" | "))
    }

    /// The tag that begins calls, with the text before it where there may be one.
    fn open(&self, text: &str) -> String {
        let tag = self.tag(text);
        match self.free {
            false => tag,
            true if tag.starts_with('<') => format!("said? {tag}"),
            // As long as can be: a text may have in it how the tag begins.
            true => format!("/{}{text}/", without(text)),
        }
    }

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
                [self.open("<｜tool▁calls▁begin｜>"), quoted("\n"), self.tag("<｜tool▁calls▁end｜>")]
            }
            // A call ends the answer.
            CallFormat::Harmony => [none(), none(), none()],
        }
    }

    /// Adds a rule, while there are not too many.
    fn rule(&mut self, rule: String) -> Result<(), ApiError> {
        self.rules.push_str(&rule);
        within(&self.rules).map_err(|wrong| ApiError::field("tools", format!("their grammar {wrong}")))
    }

    /// The rule of arguments that a schema holds.
    fn arguments(&mut self, name: &str, schema: &Value) -> Result<String, ApiError> {
        let at = |wrong: String| ApiError::field("tools", format!("{:?}: {wrong}", short(name)));
        let schema = Wanted::checked_schema(schema.clone()).map_err(at)?;
        self.arguments += 1;
        let rule = format!("arguments{}", self.arguments);
        self.rule(format!("\n{rule}: %json {schema}\n"))?;
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
                let (open, close) = (self.open("<tool_call>"), self.tag("</tool_call>"));
                format!("{open} \"\\n\" {} {arguments} \"}}\\n\" {close}", named("arguments"))
            }
        })
    }

    /// A call whose arguments are bare texts: required ones in the order of the schema, others may be left out.
    fn bare_call(&mut self, format: CallFormat, i: usize, tool: &Tool) -> Result<String, ApiError> {
        let required = tool.parameters.get("required").and_then(Value::as_array).into_iter().flatten();
        let needed: HashSet<&str> = required.filter_map(Value::as_str).collect();
        let properties = tool.parameters.get("properties").and_then(Value::as_object).into_iter().flatten();
        let mut body = String::new();
        for (j, (key, schema)) in properties.enumerate() {
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
                Some(texts) => format!("{texts} {end}"),
                None if schema.get("type").is_some_and(|t| t == "string") => {
                    let tag = if format == CallFormat::Glm4 { "</arg_value>" } else { "</parameter>" };
                    let text = without(tag);
                    // An end that is text is part of the same terminal, which is as long as can be: a text may have in it how its
                    // end begins. One that is a token of its own cannot be in a text.
                    match end.starts_with('<') {
                        true => format!("/{text}/ {end}"),
                        false => {
                            let line = if format == CallFormat::Glm4 { "" } else { "\\n" };
                            format!("/{text}{line}{}/", tag.replace('/', "\\/"))
                        }
                    }
                }
                None => format!("{} {end}", self.arguments(tool.name, schema)?),
            };
            self.rule(format!("\nvalue{i}x{j}: {head} {value} \"\\n\"\n"))?;
            body.push_str(&format!(" value{i}x{j}{}", if needed.contains(&**key) { "" } else { "?" }));
        }
        let (open, close) = (self.open("<tool_call>"), self.tag("</tool_call>"));
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
