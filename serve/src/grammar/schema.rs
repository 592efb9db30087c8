//! JSON schemas of clients. In: a schema, hostile. Out: one that the library compiles to what the schema says, or one line that names the
//! place and what is wrong there.
//!
//! Checked here is what the library lets pass: types and signs of keywords, references that lead in a circle or outside, bounds that no
//! answer can hold or that no context has room for. Dates and times are given as patterns, which have the right number of days.

use std::collections::{BTreeMap, BTreeSet};

use astrai_files::one_line;
use serde_json::{Map, Value, json};

use super::{numbers, regex};

/// Schemas in each other.
const DEEPEST: usize = 64;

/// Schemas in all.
const MOST: usize = 20_000;

/// References to different places.
const MOST_REFERENCES: usize = 1000;

/// Characters of a text, or items of a list, that a bound may name.
const LARGEST: u64 = 1 << 16;

/// Characters of the shortest answer.
const SHORTEST: u64 = 1 << 17;

/// Space between the parts of an answer: a run of it would be an answer without end.
const SPACE: &str = r" |\n(?: {0,40}|\t{0,10})";

const TYPES: [&str; 7] = ["string", "number", "integer", "boolean", "object", "array", "null"];

/// Keywords that hold a schema; a list of them; schemas by name.
const ONE: [&str; 10] = [
    "items",
    "additionalProperties",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
];
const SEVERAL: [&str; 4] = ["prefixItems", "anyOf", "allOf", "oneOf"];
const NAMED: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Formats that are held to, here or in the library; another is a remark.
const FORMATS: [&str; 16] = [
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uuid",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
];

/// Checks a schema and makes it say what it means.
///
/// # Errors
/// One line: the place and the defect.
pub(super) fn checked(mut schema: Value) -> Result<Value, String> {
    if schema == json!(true) {
        schema = json!({});
    }
    if let Some(entries) = schema.as_object_mut() {
        // What the library would take as orders.
        entries.remove("x-guidance");
    }
    let mut walk = Walk { root: &schema, nodes: 0, references: BTreeSet::new() };
    walk.check(&schema, "schema", 0)?;
    let references = std::mem::take(&mut walk.references);
    circles(&schema, &references)?;
    match shortest(&schema, &references)? {
        None => return Err("schema: has no answer that ends; every way leads on for ever".into()),
        Some(n) if n > SHORTEST => {
            return Err(format!("schema: the shortest answer has {n} characters; {SHORTEST} are the limit"));
        }
        Some(_) => {}
    }
    rewrite(&mut schema);
    schema["x-guidance"] = json!({"whitespace_pattern": SPACE});
    Ok(schema)
}

struct Walk<'a> {
    root: &'a Value,
    nodes: usize,
    references: BTreeSet<String>,
}

fn wrong<T>(at: &str, what: impl std::fmt::Display) -> Result<T, String> {
    Err(format!("{at}: {what}"))
}

impl Walk<'_> {
    fn check(&mut self, schema: &Value, at: &str, depth: usize) -> Result<(), String> {
        self.nodes += 1;
        if depth > DEEPEST || self.nodes > MOST {
            return wrong("schema", format!("has more than {MOST} schemas, or {DEEPEST} in each other"));
        }
        let entries = match schema {
            Value::Bool(true) => return Ok(()),
            Value::Bool(false) if depth > 0 => return Ok(()),
            Value::Bool(false) => return wrong(at, "nothing fits `false`"),
            Value::Object(entries) => entries,
            _ => return wrong(at, "must be an object"),
        };
        keywords(entries, at)?;
        if let Some(reference) = entries.get("$ref") {
            self.reference(reference, &format!("{at}.$ref"))?;
        }
        for key in ["$dynamicRef", "$recursiveRef"] {
            if entries.contains_key(key) {
                return wrong(&format!("{at}.{key}"), "is not supported");
            }
        }
        for key in ONE {
            match entries.get(key) {
                None => {}
                Some(Value::Array(_)) if key == "items" => {
                    return wrong(
                        &format!("{at}.items"),
                        "must be a schema; a list of them is `prefixItems`",
                    );
                }
                Some(inner) => self.check(inner, &format!("{at}.{key}"), depth + 1)?,
            }
        }
        for key in SEVERAL {
            let at = format!("{at}.{key}");
            match entries.get(key) {
                None => {}
                Some(Value::Array(all)) if !all.is_empty() => {
                    for (i, inner) in all.iter().enumerate() {
                        self.check(inner, &format!("{at}[{i}]"), depth + 1)?;
                    }
                }
                Some(_) => return wrong(&at, "must be a list of schemas, not empty"),
            }
        }
        for key in NAMED {
            let at = format!("{at}.{key}");
            match entries.get(key) {
                None => {}
                Some(Value::Object(all)) => {
                    for (name, inner) in all {
                        if key == "patternProperties" {
                            regex::pattern(name).or_else(|e| wrong(&at, e))?;
                        }
                        self.check(inner, &format!("{at}.{}", one_line(short(name))), depth + 1)?;
                    }
                }
                Some(_) => return wrong(&at, "must be an object of schemas"),
            }
        }
        Ok(())
    }

    fn reference(&mut self, value: &Value, at: &str) -> Result<(), String> {
        let Some(name) = value.as_str() else { return wrong(at, "must be a text") };
        if name != "#" && !name.starts_with("#/") {
            return wrong(at, "must be within this schema, `#/$defs/NAME` say; nothing is fetched");
        }
        if target(self.root, name).is_none() {
            return wrong(at, format!("there is nothing at {:?}", short(name)));
        }
        self.references.insert(name.into());
        if self.references.len() > MOST_REFERENCES {
            return wrong(at, format!("there are more than {MOST_REFERENCES} different references"));
        }
        Ok(())
    }
}

fn short(text: &str) -> &str {
    text.char_indices().nth(64).map_or(text, |(at, _)| &text[..at])
}

/// What a reference refers to.
fn target<'a>(root: &'a Value, name: &str) -> Option<&'a Value> {
    let pointer = name.strip_prefix('#')?;
    let found = root.pointer(pointer)?;
    (found.is_object() || found.is_boolean()).then_some(found)
}

/// Types, signs and order of keywords' values.
fn keywords(entries: &Map<String, Value>, at: &str) -> Result<(), String> {
    match entries.get("type") {
        None => {}
        Some(Value::String(one)) => known(one, at)?,
        Some(Value::Array(several)) if !several.is_empty() => {
            for one in several {
                match one.as_str() {
                    Some(one) => known(one, at)?,
                    None => return wrong(&format!("{at}.type"), "must be texts"),
                }
            }
        }
        Some(_) => return wrong(&format!("{at}.type"), "must be a text or a list of texts"),
    }
    for [least, most] in
        [["minLength", "maxLength"], ["minItems", "maxItems"], ["minProperties", "maxProperties"]]
    {
        let (least_is, most_is) = (count(entries, least, at)?, count(entries, most, at)?);
        if least_is.zip(most_is).is_some_and(|(least, most)| least > most) {
            return wrong(at, format!("{least} is above {most}"));
        }
    }
    let open = entries.get("additionalProperties") != Some(&Value::Bool(false))
        || entries.contains_key("patternProperties");
    if open && count(entries, "minProperties", at)?.is_some_and(|n| n > 1) {
        // Nothing keeps an answer from naming the same key twice.
        return wrong(
            &format!("{at}.minProperties"),
            "above 1 is supported only with additionalProperties false",
        );
    }
    numbers::check(entries).or_else(|(key, what)| wrong(&format!("{at}.{key}"), what))?;
    match entries.get("pattern") {
        None => {}
        Some(Value::String(text)) => {
            regex::pattern(text).or_else(|e| wrong(&format!("{at}.pattern"), e))?;
        }
        Some(_) => return wrong(&format!("{at}.pattern"), "must be a text"),
    }
    if entries.get("enum").is_some_and(|all| all.as_array().is_none_or(Vec::is_empty)) {
        return wrong(&format!("{at}.enum"), "must be a list, not empty");
    }
    let texts = |v: &Value| v.as_array().is_some_and(|all| all.iter().all(Value::is_string));
    if entries.get("required").is_some_and(|required| !texts(required)) {
        return wrong(&format!("{at}.required"), "must be a list of texts");
    }
    if entries.get("format").is_some_and(|format| !format.is_string()) {
        return wrong(&format!("{at}.format"), "must be a text");
    }
    Ok(())
}

fn known(kind: &str, at: &str) -> Result<(), String> {
    match TYPES.contains(&kind) {
        true => Ok(()),
        false => wrong(&format!("{at}.type"), format!("{:?} is none of {}", short(kind), TYPES.join(", "))),
    }
}

fn count(entries: &Map<String, Value>, key: &str, at: &str) -> Result<Option<u64>, String> {
    let Some(value) = entries.get(key) else { return Ok(None) };
    let whole = |x: &f64| x.fract() == 0.0 && (0.0..9e15).contains(x);
    let count = value.as_u64().or_else(|| value.as_f64().filter(whole).map(|x| x as u64));
    match count {
        None => wrong(&format!("{at}.{key}"), "must be a whole number, not negative"),
        Some(n) if n > LARGEST && key.starts_with("min") => {
            wrong(&format!("{at}.{key}"), format!("must be at most {LARGEST}"))
        }
        Some(n) => Ok(Some(n)),
    }
}

/// Schemas that hold in place of the one they are in, or beside it.
fn in_place(schema: &Value) -> Vec<&Value> {
    let lists = ["anyOf", "allOf", "oneOf"].into_iter().filter_map(|key| schema.get(key)?.as_array());
    lists.flatten().collect()
}

/// Refuses references that lead back to themselves before anything of an answer is written.
fn circles(root: &Value, references: &BTreeSet<String>) -> Result<(), String> {
    fn next<'a>(schema: &'a Value, out: &mut Vec<&'a str>) {
        out.extend(schema.get("$ref").and_then(Value::as_str));
        in_place(schema).into_iter().for_each(|inner| next(inner, out));
    }
    let mut leads: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in references {
        let mut to = Vec::new();
        target(root, name).into_iter().for_each(|schema| next(schema, &mut to));
        leads.insert(name, to);
    }
    // Whatever leads only to what is done is done; what is left leads to itself.
    let mut left: BTreeSet<&str> = leads.keys().copied().collect();
    loop {
        let done = left.iter().filter(|name| leads[*name].iter().all(|to| !left.contains(to)));
        let done: Vec<&str> = done.copied().collect();
        if done.is_empty() {
            break;
        }
        left.retain(|name| !done.contains(name));
    }
    match left.first() {
        Some(name) => wrong("schema", format!("{:?} refers to itself in place of itself", short(name))),
        None => Ok(()),
    }
}

/// Characters of the shortest answer; none if no answer ends.
fn shortest(root: &Value, references: &BTreeSet<String>) -> Result<Option<u64>, String> {
    let mut known: BTreeMap<&str, Option<u64>> =
        references.iter().map(|name| (name.as_str(), None)).collect();
    loop {
        let mut changed = false;
        for name in references {
            let found = target(root, name).and_then(|schema| least(schema, &known));
            if known.get(name.as_str()).copied().flatten() != found {
                known.insert(name, found);
                changed = true;
            }
        }
        if !changed {
            return Ok(least(root, &known));
        }
    }
}

fn least(schema: &Value, known: &BTreeMap<&str, Option<u64>>) -> Option<u64> {
    let entries = match schema {
        Value::Bool(any) => return any.then_some(1),
        Value::Object(entries) => entries,
        _ => return None,
    };
    let length = |value: &Value| value.to_string().len() as u64;
    if let Some(value) = entries.get("const") {
        return Some(length(value));
    }
    if let Some(all) = entries.get("enum").and_then(Value::as_array) {
        return all.iter().map(length).min();
    }
    let mut longest = match entries.get("type") {
        Some(Value::String(kind)) => of_type(kind, entries, known)?,
        Some(Value::Array(kinds)) => {
            kinds.iter().filter_map(Value::as_str).filter_map(|kind| of_type(kind, entries, known)).min()?
        }
        _ => 1,
    };
    if let Some(name) = entries.get("$ref").and_then(Value::as_str) {
        longest = longest.max(known.get(name).copied().flatten()?);
    }
    for part in entries.get("allOf").and_then(Value::as_array).into_iter().flatten() {
        longest = longest.max(least(part, known)?);
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(parts) = entries.get(key).and_then(Value::as_array) {
            longest = longest.max(parts.iter().filter_map(|part| least(part, known)).min()?);
        }
    }
    Some(longest)
}

fn of_type(kind: &str, entries: &Map<String, Value>, known: &BTreeMap<&str, Option<u64>>) -> Option<u64> {
    let count = |key: &str| entries.get(key).and_then(Value::as_f64).unwrap_or(0.0) as u64;
    let any = Value::Bool(true);
    match kind {
        "string" => Some(count("minLength").saturating_add(2)),
        "array" => {
            let first = entries.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let items = count("minItems");
            let mut sum = items.max(1) + 1;
            for item in first.iter().take(usize::try_from(items).unwrap_or(usize::MAX)) {
                sum = sum.saturating_add(least(item, known)?);
            }
            let more = items.saturating_sub(first.len() as u64);
            if more > 0 {
                let each = least(entries.get("items").unwrap_or(&any), known)?;
                sum = sum.saturating_add(each.saturating_mul(more));
            }
            Some(sum)
        }
        "object" => {
            let required = entries.get("required").and_then(Value::as_array);
            let mut sum = 2_u64;
            for name in required.into_iter().flatten().filter_map(Value::as_str) {
                let property = entries.get("properties").and_then(|all| all.get(name));
                let property = property.or_else(|| entries.get("additionalProperties"));
                let value = least(property.unwrap_or(&any), known)?;
                sum = sum.saturating_add(value).saturating_add(name.len() as u64 + 4);
            }
            Some(sum)
        }
        _ => Some(1),
    }
}

/// Makes patterns of dates and times, and leaves out formats that nobody holds anything to.
fn rewrite(schema: &mut Value) {
    match schema {
        Value::Array(all) => all.iter_mut().for_each(rewrite),
        Value::Object(entries) => {
            numbers::narrow(entries);
            for key in SEVERAL.iter().chain(&ONE) {
                if let Some(inner) = entries.get_mut(*key) {
                    rewrite(inner);
                }
            }
            for key in NAMED {
                if let Some(Value::Object(all)) = entries.get_mut(key) {
                    all.values_mut().for_each(rewrite);
                }
            }
            let Some(Value::String(format)) = entries.get("format") else { return };
            let pattern = match format.as_str() {
                "date" => Some(format!("^{}$", date())),
                "time" => Some(format!("^{TIME}$")),
                "date-time" => Some(format!("^{}T{TIME}$", date())),
                known if FORMATS.contains(&known) => return,
                _ => None,
            };
            entries.remove("format");
            let Some(pattern) = pattern else { return };
            if entries.contains_key("pattern") {
                let also = json!({"type": "string", "pattern": pattern});
                match entries.get_mut("allOf").and_then(Value::as_array_mut) {
                    Some(all) => all.push(also),
                    None => drop(entries.insert("allOf".into(), json!([also]))),
                }
            } else {
                entries.insert("pattern".into(), pattern.into());
            }
        }
        _ => {}
    }
}

/// A time of RFC 3339, without the leap second that few days have.
const TIME: &str =
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";

/// A date of RFC 3339, in the years 1 to 9999 of the Gregorian calendar.
fn date() -> String {
    let year = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})";
    let four = "(0[48]|[2468][048]|[13579][26])";
    let leap = format!("([0-9]{{2}}{four}|{four}00)");
    let days = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])";
    format!("({year}-({days})|{leap}-02-29)")
}
