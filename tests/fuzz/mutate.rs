//! Mutations. In: a sound text or object, draws. Out: another, near enough to get past the first check.

use serde_json::{Value, json};

/// SplitMix64: the same draws for the same seed.
pub struct Draws(u64);

impl Draws {
    pub fn new(seed: u64) -> Draws {
        Draws(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

const WORDS: [&str; 24] = [
    "0",
    "-1",
    "1",
    "65535",
    "4294967296",
    "18446744073709551615",
    "1e308",
    "-0.0",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "{{",
    "%}",
    "../",
    "/dev/zero",
    "NaN",
    "Infinity",
    "\n",
    "[[[[[[[[",
];

/// Some edits of bytes: flips, cuts, repeats, words put in, parts exchanged.
pub fn bytes(mut all: Vec<u8>, d: &mut Draws) -> Vec<u8> {
    for _ in 0..1 + d.below(4) {
        let (at, to) = (d.below(all.len()), d.below(all.len()));
        let (at, to) = (at.min(to), at.max(to).min(at.min(to) + 64).min(all.len()));
        match d.below(7) {
            _ if all.is_empty() => all.extend(d.of(&WORDS).bytes()),
            0 => all[at] ^= 1 << d.below(8),
            1 => all[at] = d.next() as u8,
            2 => drop(all.drain(at..to)),
            3 => all.truncate(at),
            4 => _ = all.splice(at..at, d.of(&WORDS).bytes()).count(),
            5 => {
                let part = all[at..to].repeat(1 + d.below(20));
                _ = all.splice(to..to, part).count();
            }
            _ => {
                let from = d.below(all.len());
                let part = all[from..(from + to - at).min(all.len())].to_vec();
                _ = all.splice(at..to, part).count();
            }
        }
    }
    all
}

/// A text with some edits; what is no UTF-8 after them is replaced.
pub fn text(all: &str, d: &mut Draws) -> String {
    String::from_utf8_lossy(&bytes(all.into(), d)).into_owned()
}

fn strange(d: &mut Draws) -> Value {
    let deep = |n: usize| (0..n).fold(json!(1), |v, _| json!([v]));
    match d.below(16) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(0),
        3 => json!(-1),
        4 => json!(d.next()),
        5 => json!(d.next() as i64),
        6 => json!(1u64 << d.below(64)),
        7 => json!(1e308),
        8 => json!(0.5),
        9 => json!(""),
        10 => json!("x".repeat(1 << d.below(14))),
        11 => json!([]),
        12 => json!({}),
        13 => deep(d.below(100)),
        14 => json!(vec![d.below(5); d.below(300)]),
        _ => json!(d.of(&WORDS)),
    }
}

/// Places of a value, from itself downwards.
fn count(v: &Value) -> usize {
    1 + match v {
        Value::Array(all) => all.iter().map(count).sum(),
        Value::Object(all) => all.values().map(count).sum(),
        _ => 0,
    }
}

/// The value at a place.
fn place(v: &mut Value, mut at: usize) -> Option<&mut Value> {
    if at == 0 {
        return Some(v);
    }
    at -= 1;
    let children: Vec<&mut Value> = match v {
        Value::Array(all) => all.iter_mut().collect(),
        Value::Object(all) => all.values_mut().collect(),
        _ => vec![],
    };
    for child in children {
        let n = count(child);
        if at < n {
            return place(child, at);
        }
        at -= n;
    }
    None
}

/// Some edits of an object: values replaced by strange ones or by others of it, keys and items removed, renamed, repeated.
pub fn value(mut all: Value, d: &mut Draws) -> Value {
    for _ in 0..1 + d.below(3) {
        let places = count(&all);
        let other = place(&mut all, d.below(places)).cloned().unwrap_or_default();
        let Some(at) = place(&mut all, d.below(places)) else { continue };
        match (d.below(8), at) {
            (0..=2, at) => *at = strange(d),
            (3, at) => *at = other,
            (4, Value::Object(map)) => {
                let keys: Vec<String> = map.keys().cloned().collect();
                keys.get(d.below(keys.len())).map(|key| map.remove(key));
            }
            (5, Value::Object(map)) => _ = map.insert(d.of(&WORDS).to_string(), strange(d)),
            (6, Value::Array(list)) if !list.is_empty() => {
                let i = d.below(list.len());
                if d.below(2) == 0 { drop(list.remove(i)) } else { list.insert(i, other) }
            }
            (_, Value::Number(n)) => *n = (n.as_i64().unwrap_or(1) + d.below(5) as i64 - 2).into(),
            (_, Value::String(s)) => *s = text(s, d),
            (_, at) => *at = strange(d),
        }
    }
    all
}

/// JSON of a mutated object, now and then with its text mutated instead.
pub fn object(all: &Value, d: &mut Draws) -> Vec<u8> {
    match d.below(6) {
        0 => bytes(all.to_string().into_bytes(), d),
        _ => value(all.clone(), d).to_string().into_bytes(),
    }
}
