//! Bounds of numbers in a JSON schema. In: its keywords. Out: bounds that the library holds answers to, or what of them nothing holds to.
//!
//! The library reads bounds as floats of 64 bits and whole numbers as integers of 64 bits: a bound that is no such float becomes the next
//! one inside, so that every answer is one of the schema's, though not every one of those is an answer.

use serde_json::{Map, Value, json};

/// Up to here floats have every whole number.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// The greatest float that is an integer of 64 bits.
const LARGEST: f64 = 9_223_372_036_854_774_784.0;

/// A bound; whether it is one from below; whether it is no answer itself.
const BOUNDS: [(&str, bool, bool); 4] = [
    ("minimum", true, false),
    ("exclusiveMinimum", true, true),
    ("maximum", false, false),
    ("exclusiveMaximum", false, true),
];

/// Refuses what no answer can be held to.
///
/// # Errors
/// The keyword and what is wrong with it.
pub(super) fn check(entries: &Map<String, Value>) -> Result<(), (&'static str, String)> {
    for key in BOUNDS.map(|b| b.0).into_iter().chain(["multipleOf"]) {
        match entries.get(key).map(|value| value.as_f64().filter(|x| x.is_finite())) {
            Some(None) => return Err((key, "must be a number".into())),
            Some(Some(n)) if key == "multipleOf" && n <= 0.0 => return Err((key, "must be above 0".into())),
            _ => {}
        }
    }
    let number = |key: &str| entries.get(key).and_then(Value::as_f64);
    if number("minimum").zip(number("maximum")).is_some_and(|(least, most)| least > most) {
        return Err(("minimum", "is above maximum".into()));
    }
    for (key, below, excluded) in BOUNDS {
        let Some(n) = number(key) else { continue };
        if if below { n > LARGEST } else { n < -LARGEST } {
            return Err((key, "leaves no number of 64 bits".into()));
        }
        // A pattern of the library has the bound itself here.
        let near = |(other, ..): &(&str, bool, bool)| number(other).is_some_and(|o| (o - n).abs() < 1.0);
        let others = BOUNDS.iter().filter(|b| b.1 != below);
        let whole = entries.get("type").is_some_and(|kind| kind == "integer");
        if excluded && !whole && n.fract() == 0.0 && others.into_iter().any(near) {
            return Err((
                key,
                "is not supported at a whole number within less than 1 of the other bound".into(),
            ));
        }
    }
    for key in ["const", "enum"] {
        if entries.get(key).is_some_and(|value| !is_exact(value)) {
            return Err((key, "has a whole number that 64 bits do not hold exactly".into()));
        }
    }
    Ok(())
}

/// False for a value with a whole number whose last digits are lost.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(n) => !n.is_f64() || n.as_f64().is_none_or(|x| x.fract() != 0.0 || x.abs() <= EXACT),
        Value::Array(all) => all.iter().all(is_exact),
        Value::Object(all) => all.values().all(is_exact),
        _ => true,
    }
}

/// Bounds as the library is to read them.
pub(super) fn narrow(entries: &mut Map<String, Value>) {
    for (key, below, excluded) in BOUNDS {
        let Some(value) = entries.get(key) else { continue };
        let Some(x) = value.as_f64().filter(|x| x.abs() >= EXACT) else { continue };
        let whole = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from)).unwrap_or(x as i128);
        let inside = |y: f64| match (below, excluded) {
            (true, false) => y as i128 >= whole,
            (true, true) => y as i128 > whole,
            (false, false) => y as i128 <= whole,
            (false, true) => (y as i128) < whole,
        };
        let next = if below { x.next_up() } else { x.next_down() };
        let bound = if inside(x) { x } else { next };
        entries.insert(key.into(), json!(bound.clamp(-LARGEST, LARGEST)));
    }
    // Open to one side, the library counts digits beyond what an integer has.
    let far =
        |key: &str, sign: f64| entries.get(key).and_then(Value::as_f64).is_some_and(|x| x * sign >= 1e18);
    let has = |key: &str| entries.contains_key(key);
    let [below, above] =
        [has("minimum") || has("exclusiveMinimum"), has("maximum") || has("exclusiveMaximum")];
    if (far("minimum", 1.0) || far("exclusiveMinimum", 1.0)) && !above {
        entries.insert("maximum".into(), json!(LARGEST));
    } else if (far("maximum", -1.0) || far("exclusiveMaximum", -1.0)) && !below {
        entries.insert("minimum".into(), json!(-LARGEST));
    }
}
