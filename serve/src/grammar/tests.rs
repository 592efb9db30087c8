//! The golden schemas, expressions and grammars; what none of them has.

use super::*;
use crate::golden::FILES;
use std::fs;
use std::path::Path;

#[test]
fn golden_structures_are_accepted_and_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/structured");
    let Ok(entries) = fs::read_dir(&folder) else { return println!("skipped: no ../shared/golden") };
    assert!(entries.count() >= 4);
    let mut failed = Vec::new();
    for (name, check) in FILES.iter().skip(1) {
        let started = std::time::Instant::now();
        let told = check(&serde_json::from_slice(&fs::read(folder.join(name)).unwrap()).unwrap());
        println!("{name}: {} cases in {:?}", told.cases, started.elapsed());
        assert!(told.cases >= 10, "{name}");
        failed.extend(told.failed);
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

fn compiler() -> Arc<Compiler> {
    Arc::new(Compiler::of_bytes().unwrap())
}

#[test]
fn dates_are_those_of_the_calendar() {
    let schema = |format: &str| Wanted::Schema(json!({"type": "string", "format": format}));
    let compiler = compiler();
    for (format, good, bad) in [
        (
            "date",
            &["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2023-04-30"][..],
            &["2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2023-00-10", "2023-1-1"]
                [..],
        ),
        ("time", &["23:59:59Z", "00:00:00.5+23:59"], &["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", &["2024-02-29T00:00:00Z"], &["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z"]),
    ] {
        let grammar = compiler.compile(schema(format)).unwrap();
        let quoted = |text: &&str| format!("\"{text}\"");
        good.iter().for_each(|text| assert!(grammar.accepts(&quoted(text)), "{text}"));
        bad.iter().for_each(|text| assert!(!grammar.accepts(&quoted(text)), "{text}"));
    }
    // A pattern beside the format still holds, and a format that nobody knows is a remark.
    let both = Wanted::Schema(json!({"type": "string", "format": "date", "pattern": "^2"}));
    let both = compiler.compile(both).unwrap();
    assert!(both.accepts("\"2024-02-29\"") && !both.accepts("\"1999-01-01\"") && !both.accepts("\"2x\""));
    assert!(compiler.compile(schema("mood")).unwrap().accepts("\"x\""));
}

/// A union whose members a constant tells apart, as data models write it; others could be answered by what fits twice.
#[test]
fn one_of_several_is_held_to_where_they_exclude_each_other() {
    let member = |kind: &str, key: &str, what: &str| {
        json!({"type": "object", "properties": {"kind": {"const": kind}, key: {"type": what}},
               "required": ["kind", key], "additionalProperties": false})
    };
    let one_of =
        |all: Value| Wanted::Schema(json!({"oneOf": all, "discriminator": {"propertyName": "kind"}}));
    let compiler = compiler();
    let pets =
        compiler.compile(one_of(json!([member("cat", "lives", "integer"), member("dog", "name", "string")])));
    let pets = pets.unwrap();
    assert!(pets.accepts(r#"{"kind":"cat","lives":9}"#) && pets.accepts(r#"{"kind":"dog","name":"x"}"#));
    assert!(!pets.accepts(r#"{"kind":"cat","name":"x"}"#));
    let both = compiler.compile(one_of(json!([{"type": "number"}, {"type": "integer"}]))).unwrap_err();
    assert!(both.to_string().contains("use anyOf"), "{both}");
    let nothing = compiler.compile(Wanted::Regex("[^\\s\\S]".into())).unwrap_err();
    assert!(nothing.to_string().contains("matches no text"), "{nothing}");
}

/// On the way of random answers, what is asked token by token is what is said of all, in a vocabulary whose tokens go over the bounds of parts.
#[test]
fn a_token_is_admitted_that_is_among_those_allowed() {
    let long = [
        "{\"", "\": ", "\", \"", "\":\"", "tr", "true", "rue}", "12", "50", ", ", "\n  ", "}}", "]}", "ab",
        "aé", "\\u00", "\\n\"",
    ];
    let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.extend(long.iter().map(|text| text.as_bytes().to_vec()));
    words.push(b"\xFF<end>".to_vec());
    let compiler = Arc::new(Compiler::of_words(words.clone(), &[words.len() as u32 - 1]).unwrap());
    let schema = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "minimum": 3,
        "maximum": 150}, "on": {"type": "boolean"}, "day": {"type": "string", "format": "date"}, "tags": {"type": "array", "items":
        {"enum": ["a", "ab", "abc"]}}}, "required": ["name", "n"]});
    let lark = "start: /[a-z]{2,5}/ (\" \" start)? | \"(\" start \")\"".to_owned();
    let all = [
        Wanted::Schema(schema),
        Wanted::object(),
        Wanted::Regex("(ab|aé|[0-9]{2}){2,6}!?".into()),
        Wanted::Lark(lark),
    ];
    let (mut seed, mut asked) = (1u64, 0);
    for wanted in all {
        let grammar = compiler.compile(wanted).unwrap();
        for _ in 0..6 {
            let mut guide = Guide::new(&Constraint { grammar: Some(grammar.clone()), thought: None });
            for _ in 0..40 {
                let Allowed::Some(mask) = guide.allowed().unwrap() else { panic!("a mask") };
                let ids = 0..words.len() as u32;
                let admitted: Vec<u32> = ids.clone().filter(|id| guide.admits(*id)).collect();
                assert_eq!(admitted, ids.filter(|id| mask.is_allowed(*id)).collect::<Vec<_>>());
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                asked += 1;
                if guide.take(admitted[(seed >> 33) as usize % admitted.len()]).unwrap() {
                    break;
                }
            }
        }
    }
    assert!(asked > 200, "{asked}");
}

#[test]
fn runs_of_space_come_to_an_end() {
    let grammar = compiler().compile(Wanted::object()).unwrap();
    assert!(grammar.accepts("{\n    \"a\": [1, 2]\n}"));
    assert!(!grammar.accepts(&format!("{{{}}}", " ".repeat(100))));
    assert!(!grammar.accepts("{\n\n\n\n}"));
    // Nobody may loosen it from outside.
    let loose = json!({"type": "object", "x-guidance": {"whitespace_pattern": "[ ]+", "lenient": true}});
    assert!(!compiler().compile(Wanted::Schema(loose)).unwrap().accepts(&format!("{{{}}}", " ".repeat(100))));
}

#[test]
fn circles_and_endless_answers_are_refused() {
    let compiler = compiler();
    let refused = |schema: Value, what: &str| {
        let why = compiler.compile(Wanted::Schema(schema)).unwrap_err().to_string();
        assert!(why.contains(what), "{why}");
    };
    let circle =
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}});
    refused(circle, "refers to itself");
    refused(json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "no answer that ends");
    refused(
        json!({"type": "array", "items": {"type": "string", "minLength": 60000}, "minItems": 60}),
        "shortest",
    );
    refused(json!({"allOf": [{"type": "string", "minLength": 9, "maxLength": 3}]}), "above");
    refused(json!({"properties": {"a\nb": 3}}), "schema.properties.a\u{fffd}b: must be an object");
    let open = json!({"type": "object", "additionalProperties": true, "minProperties": 3});
    refused(open, "minProperties");
}

#[test]
fn choices_and_expressions_are_held_whole() {
    let compiler = compiler();
    let choice = compiler.compile(Wanted::Choice(vec!["yes".into(), "no \"way\"\n".into()])).unwrap();
    assert!(choice.accepts("yes") && choice.accepts("no \"way\"\n"));
    assert!(!choice.accepts("ye") && !choice.accepts("yesno"));
    let anchored = compiler.compile(Wanted::Regex("^a+\\$$".into())).unwrap();
    assert!(anchored.accepts("aa$") && !anchored.accepts("aa"));
}

#[test]
fn grammars_of_single_characters_choose_nothing_beforehand() {
    let text = "root ::= word (\" \" word)* # a comment\nword ::= \"true\" | [a-z]{1,5} | \"(\" root \")\"\n";
    let grammar = compiler().compile(Wanted::Grammar(text.into())).unwrap();
    for good in ["true", "trux", "t (a true) b", "abcde"] {
        assert!(grammar.accepts(good), "{good}");
    }
    for bad in ["abcdef", "", "a  b", "(a"] {
        assert!(!grammar.accepts(bad), "{bad}");
    }
}

#[test]
fn what_is_wanted_again_is_not_compiled_again() {
    let compiler = compiler();
    let of = |text: &str| compiler.compile(Wanted::Regex(text.into())).unwrap();
    let first = of("a");
    assert!(first == of("a"));
    assert!(first != compiler.compile(Wanted::Choice(vec!["a".into()])).unwrap());
    // What was wanted last is kept longest.
    (2..MOST_KEPT).for_each(|n| drop(of(&format!("a{{{n}}}b"))));
    assert!(first == of("a"));
    (1..=MOST_KEPT).for_each(|n| drop(of(&format!("a{{{n}}}c"))));
    assert!(first != of("a"));
}

#[test]
fn a_compilation_that_panics_is_refused_and_not_late_for_ever() {
    let compiler = compiler();
    let (second, never) = (Duration::from_secs(1), Duration::from_millis(1));
    let wrong = compiler.bounded(second, || -> Result<(), String> { panic!("no\nway") }).unwrap_err();
    assert_eq!(wrong, CompileError::Wrong("the grammar library fails on it: no way".into()));
    let (done, wait) = channel::<()>();
    let wait = Arc::new(Mutex::new(wait));
    for _ in 0..MOST_LATE {
        let wait = wait.clone();
        let work = move || -> Result<(), String> {
            let _gone = wait.lock().unwrap().recv();
            panic!("late")
        };
        assert!(matches!(compiler.bounded(never, work), Err(CompileError::Wrong(_))));
    }
    assert!(matches!(compiler.bounded(second, || Ok(())), Err(CompileError::Busy(_))));
    drop(done);
    let since = std::time::Instant::now();
    while compiler.late.load(Ordering::Acquire) > 0 {
        assert!(since.elapsed() < Duration::from_secs(20));
        std::thread::yield_now();
    }
    assert!(compiler.bounded(second, || Ok(())).is_ok());
}

/// Bounds at and beyond the ends of what the library computes in: an answer is one of the schema's, or the schema is refused.
#[test]
fn bounds_of_numbers_are_held_or_refused() {
    let compiler = compiler();
    let whole = |bounds: Value| {
        let mut schema = json!({"type": "integer"});
        schema.as_object_mut().unwrap().extend(bounds.as_object().unwrap().clone());
        compiler.compile(Wanted::Schema(schema))
    };
    let all = whole(json!({"minimum": i64::MIN, "maximum": i64::MAX})).unwrap();
    assert!(all.accepts("-7") && all.accepts("9223372036854774784") && !all.accepts("92233720368547758070"));
    for (bounds, good, bad) in [
        (json!({"minimum": i64::MIN}), "-9223372036854774784", "-9223372036854775809"),
        (json!({"minimum": 9_007_199_254_740_993_u64}), "9007199254740994", "9007199254740992"),
        (json!({"exclusiveMinimum": 1_u64 << 60}), "1152921504606847232", "1152921504606846976"),
        (json!({"minimum": 2_000_000_000_000_000_000_u64}), "2000000000000000000", "1999999999999999999"),
        (json!({"maximum": -2_000_000_000_000_000_000_i64}), "-2000000000000000000", "-1999999999999999999"),
    ] {
        let grammar = whole(bounds.clone()).unwrap();
        assert!(grammar.accepts(good) && !grammar.accepts(bad), "{bounds}");
    }
    let lark = format!(
        "start: \"<\" %json {} \">\"",
        json!({"type": "integer", "minimum": -1e30, "maximum": -1e20})
    );
    for wanted in [
        Wanted::Schema(json!({"type": "integer", "minimum": -1e30, "maximum": -1e20})),
        Wanted::Schema(json!({"type": "integer", "minimum": 1e20, "maximum": 9e20})),
        Wanted::Schema(json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MIN})),
        Wanted::Schema(json!({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5})),
        Wanted::Schema(json!({"minimum": -0.5, "exclusiveMaximum": 0})),
        Wanted::Schema(json!({"const": 1e20})),
        Wanted::Schema(json!({"enum": ["a", [1e20]]})),
        Wanted::Grammar(lark),
    ] {
        let line = compiler.compile(wanted.clone()).unwrap_err().to_string();
        assert!(line.contains("schema"), "{wanted:?}: {line}");
    }
    let between =
        compiler.compile(Wanted::Schema(json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1})));
    let between = between.unwrap();
    assert!(between.accepts("0.5") && between.accepts("1") && !between.accepts("0"));
    // A schema in a grammar is the same schema, and what only looks like one is a text.
    let pair = "start: \"%json {\" %json {\"type\": \"integer\", \"minimum\": 5} \"}\"";
    let pair = compiler.compile(Wanted::Grammar(pair.into())).unwrap();
    assert!(pair.accepts("%json {7}") && !pair.accepts("%json {4}"));
}
