//! What of a record is learnt, whatever the template and the form of the record.

use super::*;
use crate::data::Kind;
use crate::data::tests::tokenizer;
use astrai_serve::tokenizer::Tokenizer;
use serde_json::{Value, json};

const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";
const MARKED: &str = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>\
    {{ '\n' }}{% endgeneration %}{% else %}{{ m.content }}</s>{{ '\n' }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";
/// Thoughts show in the last answer only; the prompt opens one.
const THINKS: &str = "{% for m in messages %}<{{ m.role }}>{% if m.thinking is defined and loop.last %}<think>{{ m.thinking }}</think>\
    {% endif %}{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}";

fn builder(template: &str, kind: Kind) -> (tempfile::TempDir, Builder) {
    let dir = tempfile::tempdir().unwrap();
    tokenizer().save_to(dir.path()).unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let config = Config::of(kind, 400);
    let built = Builder::new(config, Tokenizer::open(dir.path()).unwrap()).unwrap();
    (dir, built)
}

/// The texts of neighbouring tokens that are learnt.
fn learnt(builder: &Builder, record: &Value) -> Result<Vec<String>, Nothing> {
    let made = builder.line(record.to_string().as_bytes())?;
    let [(_, Values::Ints(ids)), (_, Values::Ints(mask)), ..] = made.keys.as_slice() else {
        panic!("{made:?}")
    };
    assert_eq!(ids.len(), mask.len());
    let mut parts: Vec<Vec<u32>> = vec![];
    for (t, &m) in mask.iter().enumerate().filter(|(_, m)| **m != 0) {
        let follows = t > 0 && mask[t - 1] == m;
        if !follows {
            parts.push(vec![]);
        }
        parts.last_mut().unwrap().push(ids[t] as u32);
    }
    Ok(parts.iter().map(|ids| builder.tokenizer().decode(ids, false).unwrap()).collect())
}

fn say(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

#[test]
fn answers_are_learnt_and_nothing_else() {
    let chat = json!({"messages": [say("system", "s"), say("user", "a"), say("assistant", "b c"), say("user", "d"),
        say("assistant", "e"), say("assistant", "f")]});
    for template in [PLAIN, MARKED] {
        let (_dir, builder) = builder(template, Kind::Sft);
        assert_eq!(learnt(&builder, &chat).unwrap(), ["b c</s>\n", "e</s>\n", "f</s>\n"], "{template}");
        let first = json!({"messages": [say("assistant", "b"), say("user", "a")]});
        assert_eq!(learnt(&builder, &first).unwrap(), ["b</s>\n"], "{template}");
        let alone = json!({"messages": [say("user", "a")]});
        assert!(matches!(learnt(&builder, &alone), Err(Nothing::Wrong(line)) if line.contains("none of")));
        assert_eq!(learnt(&builder, &json!({"messages": []})), Err(Nothing::Dropped("no messages")));
        // An answer that has no room loses its end, and that is counted.
        let long = json!({"messages": [say("user", "a"), say("assistant", &"b ".repeat(400))]});
        let cut = [&chat, &long].map(|record| builder.line(record.to_string().as_bytes()).unwrap().cut);
        assert_eq!(cut, [false, true]);
    }
}

/// A turn that is rendered otherwise when more follows is refused, not masked wrongly; where it is the last, what the prompt
/// opened is no part of it.
#[test]
fn templates_that_rewrite_history_are_told() {
    let (_dir, builder) = builder(THINKS, Kind::Sft);
    let thought = json!({"role": "assistant", "content": "b", "thinking": "t"});
    let last = json!({"messages": [say("user", "a"), thought]});
    assert_eq!(learnt(&builder, &last).unwrap(), ["t</think>b</s>\n"]);
    let without = json!({"messages": [say("user", "a"), say("assistant", "b")]});
    assert_eq!(learnt(&builder, &without).unwrap(), ["b</s>\n"]);
    let early = json!({"messages": [say("user", "a"), thought, say("user", "c"), say("assistant", "d")]});
    assert!(matches!(learnt(&builder, &early), Err(Nothing::Wrong(line)) if line.contains("messages[1]")));
}

#[test]
fn preferences_come_in_all_their_forms() {
    let (_dir, builder) = builder(PLAIN, Kind::Dpo);
    let chat = |answer: &str| json!([say("user", "q"), say("assistant", answer)]);
    let forms = [
        json!({"prompt": "q", "chosen": "x", "rejected": "y"}),
        json!({"input": "q", "chosen": [say("assistant", "x")], "rejected": "y"}),
        json!({"prompt": [say("user", "q")], "chosen": chat("x"), "rejected": chat("y")}),
        json!({"chosen": chat("x"), "rejected": chat("y")}),
    ];
    let made: Vec<Prepared> = forms.iter().map(|f| builder.line(f.to_string().as_bytes()).unwrap()).collect();
    assert!(made.iter().all(|m| m == &made[0]), "{made:?}");
    assert_eq!(learnt(&builder, &forms[0]).unwrap(), ["x</s>\n"]);
    for wrong in [
        json!({"prompt": "q", "chosen": "x"}),
        json!({"chosen": "x", "rejected": "y"}),
        json!({"prompt": 1, "chosen": "x", "rejected": "y"}),
    ] {
        assert!(matches!(builder.line(wrong.to_string().as_bytes()), Err(Nothing::Wrong(_))), "{wrong}");
    }
}

#[test]
fn groups_and_labels_have_what_belongs_to_them() {
    let (_dir, groups) = builder(PLAIN, Kind::Grpo);
    let made = groups.line(br#"{"prompt": "q", "responses": ["x", "yy zz"], "rewards": [1, -0.5]}"#).unwrap();
    let [(_, Values::Ints(prompt)), (_, Values::Rows(rows)), (_, Values::Rows(masks)), (_, rewards)] =
        made.keys.as_slice()
    else {
        panic!("{made:?}")
    };
    let text = |ids: &[i32]| {
        groups.tokenizer().decode(&ids.iter().map(|&i| i as u32).collect::<Vec<_>>(), false).unwrap()
    };
    assert_eq!(
        (text(prompt), text(&rows[0]), text(&rows[1])),
        ("<user>q</s>\n<assistant>".into(), "x</s>\n".into(), "yy zz</s>\n".into())
    );
    assert_eq!((masks[1].len(), rewards), (rows[1].len(), &Values::Floats(vec![1.0, -0.5])));
    for rewards in ["[1, 2]", "[1e300]", "[null]"] {
        let line = format!(r#"{{"prompt": "q", "responses": ["x"], "rewards": {rewards}}}"#);
        assert!(matches!(groups.line(line.as_bytes()), Err(Nothing::Wrong(_))), "{rewards}");
    }
    let (_dir, labels) = builder(PLAIN, Kind::Kto);
    let made = labels.line(br#"{"prompt": "q", "completion": "x", "label": false}"#).unwrap();
    assert_eq!(made.keys[2], ("label".into(), Values::Floats(vec![0.0])));
    assert!(labels.line(br#"{"prompt": "q", "completion": "x", "label": 0.5}"#).is_err());
}

/// AstrAI's form with several keys a record.
#[test]
fn sources_make_keys() {
    let text = r#"{"input": {"sources": {
        "prompts": {"sections": [{"field": "q", "action": "mask"}]},
        "responses": {"sections": [{"field": "a", "action": "train"}], "list_field": true, "mask_key": "masks"},
        "rewards": {"sections": [{"field": "r", "action": "value"}]}}}}"#;
    let builder = Builder::new(Config::parse(text).unwrap(), tokenizer().clone());
    let builder = builder.unwrap();
    let wrong = builder.line(br#"{"q": "why", "a": ["x", "y y"], "r": [0, 1]}"#);
    assert!(matches!(wrong, Err(Nothing::Wrong(line)) if line.contains("prompts_mask")));
    let text = text.replace("\"mask\"", "\"train\"");
    let builder = Builder::new(Config::parse(&text).unwrap(), tokenizer().clone()).unwrap();
    let made = builder.line(br#"{"q": "why", "a": ["x", "y y"], "r": [0, 1]}"#).unwrap();
    let keys: Vec<&str> = made.keys.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["prompts", "responses", "masks", "rewards"]);
}

#[test]
fn configurations_that_cannot_be_are_told() {
    let wrong = [
        ("{", "no configuration"),
        ("{}", "exactly one of"),
        (r#"{"input": {"dpo": {}, "kto": {}}}"#, "exactly one of"),
        (r#"{"input": {"dpo": {"answer": "x"}}}"#, "none of prompt, chosen, rejected"),
        (r#"{"version": 2, "input": {"dpo": {}}}"#, "version"),
        (r#"{"input": {"dpo": {}}, "preprocessing": {"packing": "bfd"}}"#, "simple"),
        (r#"{"input": {"dpo": {}}, "preprocessing": {"max_seq_len": 0}}"#, "max_seq_len"),
        (r#"{"input": {"dpo": {}}, "output": {"max_tokens_per_shard": 1073741825}}"#, "from 1 to 1073741824"),
        (r#"{"input": {"dpo": {}}, "output": {"dtype": {"chosen": "int33"}}}"#, "int33"),
        (r#"{"input": {"dpo": {}}, "output": {"storage_format": "parquet"}}"#, "parquet"),
        (r#"{"input": {"dpo": {}}, "output": {"storage_format": "jsonl", "gzip": true}}"#, "`gzip` packs"),
        (r#"{"input": {"dpo": {}}, "output": {"weights": {"wiki": 2}}}"#, "`domain_key`"),
        (r#"{"input": {"dpo": {}}, "mask": {"user": "value"}}"#, "train or mask"),
        (r#"{"input": {"sections": [{"field": "a", "action": "$role"}]}}"#, "roles"),
        (r#"{"input": {"sections": []}}"#, "no sections"),
        (r#"{"input": {"dpo": {}}, "speed": 3}"#, "speed"),
    ];
    for (text, part) in wrong {
        let line = Config::parse(text).unwrap_err();
        assert!(line.contains(part) && !line.contains('\n'), "{text}: {line}");
    }
}

/// A record's mask is there or not by the configuration, not by what the record happens to have; and it is looked at as packing
/// cuts it.
#[test]
fn masks_belong_to_their_records() {
    let text = r#"{"input": {"sources": {"answer": {"sections": [
        {"field": "q", "action": "mask"}, {"field": "a", "action": "train"}]}}}}"#;
    let build = |text: &str| Builder::new(Config::parse(text).unwrap(), tokenizer().clone()).unwrap();
    let sources = build(text);
    assert_eq!(sources.line(br#"{"q": "why", "a": "x"}"#).unwrap().keys.len(), 2);
    assert!(matches!(sources.line(br#"{"a": "x"}"#), Err(Nothing::Wrong(line)) if line.contains("all of")));
    let text = r#"{"input": {"sections": [{"field": "q", "action": "mask"}, {"field": "a", "action": "train"}]},
        "preprocessing": {"max_packed_len": 3, "packing": "bfd"}}"#;
    let long = br#"{"q": "why is it so very long", "a": "x"}"#;
    assert!(matches!(build(text).line(long), Err(Nothing::Wrong(line)) if line.contains("none of its 3")));
    assert!(build(&text.replace("bfd", "bfd_split")).line(long).is_ok());
}

#[test]
fn domains_are_names_of_folders() {
    let text = r#"{"input": {"sections": [{"field": "t", "action": "train"}]},
        "preprocessing": {"min_chars": 0}, "output": {"domain_key": "d"}}"#;
    let builder = Builder::new(Config::parse(text).unwrap(), tokenizer().clone()).unwrap();
    let of = |domain: Value| builder.line(json!({"t": "x", "d": domain}).to_string().as_bytes());
    assert_eq!(of(Value::Null).unwrap().domain, "__default__");
    assert_eq!(of(json!("wiki en")).unwrap().domain, "wiki en");
    let wrong =
        ["", "../x", "a/b", ".x", "a\nb", "target", "Tokenizer.json", "progress.json", "dataset.json"];
    for domain in wrong.iter().map(|name| json!(name)).chain([json!(3), json!(["x"])]) {
        assert!(matches!(of(domain.clone()), Err(Nothing::Wrong(_))), "{domain}");
    }
}
