//! Filters and tests as Jinja has them, where the engine's differ or are absent. In: a value and arguments. Out: what Python
//! gives, or an error.

use super::json::tojson;
use super::limits;
use super::python::{Arguments, invalid, joined, pad, printed, replaced, strip};
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value};

type Filter = fn(&Value, Arguments) -> Result<Value, Error>;

const FILTERS: [(&str, Filter); 19] = [
    ("tojson", tojson),
    ("default", default),
    ("d", default),
    ("length", length),
    ("count", length),
    ("int", int),
    ("float", float),
    ("trim", trim),
    ("replace", replace),
    ("join", join),
    ("indent", indent),
    ("truncate", truncate),
    ("center", center),
    ("wordcount", wordcount),
    ("e", escape),
    ("escape", escape),
    ("forceescape", escape),
    ("lower", |value, args| args.finish().map(|()| Value::from(printed(value).to_lowercase()))),
    ("upper", |value, args| args.finish().map(|()| Value::from(printed(value).to_uppercase()))),
];

/// Adds them all.
pub(super) fn add(env: &mut Environment<'static>) {
    for (name, filter) in FILTERS {
        env.add_filter(name, move |value: &Value, args: Rest<ValueOrKwargs>| {
            filter(value, Arguments::new(name, &args.into_values())?)
        });
    }
    env.add_filter("filesizeformat", minijinja_contrib::filters::filesizeformat);
    env.add_filter("striptags", minijinja_contrib::filters::striptags);
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    // An undefined value is an empty sequence to Jinja.
    for name in ["sequence", "iterable"] {
        env.add_test(name, |value: &Value| {
            let kinds = [
                ValueKind::String,
                ValueKind::Map,
                ValueKind::Seq,
                ValueKind::Iterable,
                ValueKind::Undefined,
            ];
            kinds.contains(&value.kind())
        });
    }
}

fn default(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let other = args.take("default_value")?.unwrap_or_else(|| Value::from(""));
    let falsy = args.flag("boolean")?;
    args.finish()?;
    Ok(if value.is_undefined() || (falsy && !value.is_true()) { other } else { value.clone() })
}

fn length(value: &Value, args: Arguments) -> Result<Value, Error> {
    args.finish()?;
    let length = if value.is_undefined() { Some(0) } else { value.len() };
    length
        .map(Value::from)
        .ok_or_else(|| invalid(format!("length: a value that is {} has none", value.kind())))
}

fn int(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let other = args.take("default")?.unwrap_or_else(|| Value::from(0));
    let base = args.count("base")?.unwrap_or(10);
    args.finish()?;
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base));
    let base = base.ok_or_else(|| invalid("int: the base must be 2 to 36".into()))?;
    let whole = |x: f64| x.is_finite().then(|| Value::from(x.trunc() as i64));
    let found = match (value.as_str(), value.kind()) {
        (Some(text), _) => {
            let text = text.trim();
            i64::from_str_radix(text, base)
                .ok()
                .map(Value::from)
                .or_else(|| text.parse().ok().and_then(whole))
        }
        (_, ValueKind::Bool) => Some(Value::from(i64::from(value.is_true()))),
        (_, ValueKind::Number) if value.is_integer() => Some(value.clone()),
        (_, ValueKind::Number) => f64::try_from(value.clone()).ok().and_then(whole),
        _ => None,
    };
    Ok(found.unwrap_or(other))
}

fn float(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let other = args.take("default")?.unwrap_or_else(|| Value::from(0.0));
    args.finish()?;
    let found = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    Ok(found.map_or(other, |x: f64| Value::from(x)))
}

fn trim(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let chars = args.text("chars")?;
    args.finish()?;
    Ok(Value::from(strip(&printed(value), chars.as_deref(), (true, true))))
}

fn replace(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let (old, new) = (args.take("old")?, args.take("new")?);
    let (old, new) = (args.need("old", old)?, args.need("new", new)?);
    let most = args.count("count")?;
    args.finish()?;
    replaced(&printed(value), &printed(&old), &printed(&new), most).map(Value::from)
}

fn join(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let between = args.take("d")?.map_or_else(String::new, |v| printed(&v));
    let attribute = args.text("attribute")?;
    args.finish()?;
    if value.is_undefined() {
        return Ok(Value::from(""));
    }
    let items = match &attribute {
        Some(name) => value.try_iter()?.map(|item| item.get_attr(name)).collect::<Result<Value, _>>()?,
        None => value.clone(),
    };
    joined(&items, &between).map(Value::from)
}

/// Jinja's `indent(width=4, first=False, blank=False)`.
fn indent(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let width = args.take("width")?.unwrap_or_else(|| Value::from(4));
    let (first, blank) = (args.flag("first")?, args.flag("blank")?);
    args.finish()?;
    let margin = match (width.as_str(), usize::try_from(width.clone())) {
        (Some(margin), _) => margin.to_owned(),
        (None, Ok(width)) if width <= limits::TEXT => " ".repeat(width),
        _ => return Err(invalid("indent: the width must be a text or a number of blanks".into())),
    };
    let text = printed(value);
    if text.lines().count().saturating_add(1).saturating_mul(margin.len()) > limits::TEXT {
        return Err(limits::exceeded());
    }
    let mut made = String::with_capacity(text.len());
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            made.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            made.push_str(&margin);
        }
        made.push_str(line);
    }
    Ok(Value::from(made))
}

/// Jinja's `truncate(length=255, killwords=False, end="...", leeway=5)`.
fn truncate(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let length = args.count("length")?.unwrap_or(255);
    let kill = args.flag("killwords")?;
    let end = args.text("end")?.unwrap_or_else(|| "...".into());
    let leeway = args.count("leeway")?.unwrap_or(5);
    args.finish()?;
    let kept = length.saturating_sub(end.chars().count() as i64);
    if kept < 0 || leeway < 0 {
        return Err(invalid(format!("truncate: length {length} has no room for {end:?}")));
    }
    let text = printed(value);
    if text.chars().count() as i64 <= length.saturating_add(leeway) {
        return Ok(Value::from(text));
    }
    let kept: String = text.chars().take(kept as usize).collect();
    let whole = if kill { &kept } else { kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words) };
    Ok(Value::from(format!("{whole}{end}")))
}

fn center(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let width = args.count("width")?.unwrap_or(80);
    args.finish()?;
    pad(&printed(value), "center", &[Value::from(width)])
}

fn wordcount(value: &Value, args: Arguments) -> Result<Value, Error> {
    args.finish()?;
    let text = printed(value);
    Ok(Value::from(text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).count()))
}

fn escape(value: &Value, args: Arguments) -> Result<Value, Error> {
    args.finish()?;
    let made = printed(value).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    Ok(Value::from(made.replace('\'', "&#39;").replace('"', "&#34;")))
}
