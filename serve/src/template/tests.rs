//! Templates against what transformers rendered, and against those that no one should have written.

mod hostile;

use super::*;
use serde_json::json;
use std::fs;

fn object(value: Value) -> Map<String, Value> {
    serde_json::from_value(value).unwrap()
}

fn tokens(bos: &str, eos: &str) -> Map<String, Value> {
    object(json!({"bos_token": bos, "eos_token": eos}))
}

fn user(text: &str) -> Vec<Message> {
    vec![Message::text("user", text)]
}

/// Renders a template with one message.
fn once(source: &str) -> Result<String, TemplateError> {
    let messages = user("Hi");
    ChatTemplate::parse(source, tokens("<s>", "</s>"))?
        .render(&Chat { messages: &messages, ..Chat::default() })
}

/// Renders a recorded case; gives what differs.
fn differs(template: &ChatTemplate, case: &Value, messages: &Value, tools: &Value) -> Option<String> {
    let messages = Message::list(messages.clone()).unwrap();
    let known = [
        "template",
        "messages",
        "conversation",
        "tools",
        "documents",
        "rendered",
        "error",
        "raised",
        "fails",
    ];
    let mut variables = object(case.clone());
    variables.retain(|key, _| !known.contains(&key.as_str()));
    let mut flag = |key| variables.remove(key).is_some_and(|v| v == true);
    let (prompt, goes_on) = (flag("add_generation_prompt"), flag("continue_final_message"));
    let chat = Chat {
        messages: &messages,
        tools: case.get("tools").and(tools.as_array()).map(Vec::as_slice),
        documents: case.get("documents").and_then(Value::as_array).map(Vec::as_slice),
        add_generation_prompt: prompt,
        continue_final_message: goes_on,
        template: None,
        variables: Some(&variables),
        abandoned: None,
    };
    let got = template.render(&chat);
    let text = |key: &str| case.get(key).and_then(Value::as_str);
    let same = match (&got, text("rendered"), text("error").or(text("raised"))) {
        (Ok(got), Some(wanted), _) => got == wanted,
        (Err(TemplateError::Raised(got)), _, Some(wanted)) => got == wanted,
        (Err(TemplateError::Failed { .. } | TemplateError::Request(_)), None, None) => true,
        _ => false,
    };
    (!same).then(|| format!("{}\n  got    {got:?}\n  wanted {:?}", case, case.get("rendered")))
}

#[test]
fn the_golden_conversations_come_out_as_recorded() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = ["../shared", "../../shared"].map(|p| here.join(p).join("golden/tokenizer/cases.json"));
    let Some(path) = places.into_iter().find(|p| p.is_file()) else {
        println!("skipped: no shared folder beside this checkout");
        return;
    };
    let golden: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let special = load::tokens(path.parent().unwrap()).unwrap();
    let mut wrong = Vec::new();
    let cases = golden["chat"].as_array().unwrap();
    for case in cases {
        let source = golden["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        let template = ChatTemplate::parse(source, special.clone()).unwrap();
        wrong.extend(differs(&template, case, &case["messages"], &case["tools"]));
    }
    assert!(cases.len() >= 70);
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    let own = ChatTemplate::open(path.parent().unwrap()).unwrap().unwrap();
    assert_eq!(own.source(None, true).unwrap(), golden["templates"]["chatml_tools"].as_str().unwrap());
}

#[test]
fn templates_in_the_published_styles_come_out_as_transformers_renders_them() {
    let oracle: Value = serde_json::from_str(include_str!("oracle.json")).unwrap();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for case in oracle["cases"].as_array().unwrap() {
        count += 1;
        let name = case["template"].as_str().unwrap();
        let source = oracle["templates"].get(name).and_then(Value::as_str).unwrap_or(name);
        let messages = &oracle["conversations"][case["conversation"].as_u64().unwrap() as usize];
        match ChatTemplate::parse(source, tokens("<s>", "</s>")) {
            Ok(template) => wrong.extend(differs(&template, case, messages, &oracle["tools"])),
            Err(e) if case.get("fails").is_none() => wrong.push(format!("{case}: {e}")),
            Err(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn both_layouts_are_read_the_newer_first() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let open = || ChatTemplate::open(dir.path());
    assert!(open().unwrap().is_none());
    write("tokenizer_config.json", "{\"bos_token\": {\"content\": \"<b>\"}, \"chat_template\": null}");
    assert!(open().unwrap().is_none());
    write("chat_template.json", "{\"chat_template\": \"third {{ bos_token }}\"}");
    let messages = user("Hi");
    let chat = Chat { messages: &messages, ..Chat::default() };
    assert_eq!(open().unwrap().unwrap().render(&chat).unwrap(), "third <b>");
    let named = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]);
    write("tokenizer_config.json", &json!({"eos_token": "</s>", "chat_template": named}).to_string());
    let several = open().unwrap().unwrap();
    assert_eq!(several.names(), ["default", "tool_use"]);
    assert_eq!(several.render(&chat).unwrap(), "plain");
    assert_eq!(several.render(&Chat { tools: Some(&[]), ..chat }).unwrap(), "tools");
    assert_eq!(several.render(&Chat { template: Some("tool_use"), ..chat }).unwrap(), "tools");
    let missing = several.render(&Chat { template: Some("rag"), ..chat }).unwrap_err().to_string();
    assert_eq!(missing, "the model has no chat template \"rag\"; name one of [\"default\", \"tool_use\"]");
    write("chat_template.jinja", "new {{ eos_token }}\n");
    fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/rag.jinja", "{{ documents[0].text }}");
    let newer = open().unwrap().unwrap();
    assert_eq!(newer.names(), ["default", "rag"]);
    assert_eq!(newer.render(&chat).unwrap(), "new </s>");
    let documents = [json!({"text": "found"})];
    let rag = Chat { template: Some("rag"), documents: Some(&documents), ..chat };
    assert_eq!(newer.render(&rag).unwrap(), "found");
}

#[test]
fn files_that_hold_no_template_are_refused_by_name() {
    let refused = |name: &str, text: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(name), text).unwrap();
        let e = ChatTemplate::open(dir.path()).unwrap_err().to_string();
        assert!(e.starts_with(dir.path().to_str().unwrap()) && !e.contains('\n'), "{e}");
        e[dir.path().to_str().unwrap().len() + 1..].to_owned()
    };
    let config = "tokenizer_config.json";
    let mend = "is neither a text nor a list of {name, template}; mend it or remove it";
    assert_eq!(refused(config, b"{\"chat_template\": 3}"), format!("{config}: `chat_template` {mend}"));
    assert_eq!(refused(config, b"{\"chat_template\": [{}]}"), format!("{config}: `chat_template[0]` {mend}"));
    assert!(refused(config, b"[]").starts_with("tokenizer_config.json: is no JSON object"));
    assert_eq!(refused("chat_template.jinja", b"\xff"), "chat_template.jinja: is not UTF-8; save it as such");
    let e = refused("chat_template.jinja", b"a\n{% if %}");
    assert!(e.starts_with("chat_template.jinja: template \"default\" at its line 2: syntax error"), "{e}");
    let e = refused("chat_template.jinja", &vec![b' '; (1 << 20) + 1]);
    assert!(e.contains("longer than 1048576 bytes"), "{e}");
}

#[test]
fn variables_reach_the_template_unless_they_have_a_field() {
    let template =
        ChatTemplate::parse("{{ bos_token }}{{ enable_thinking }}{{ x.y }}", tokens("<s>", "")).unwrap();
    let messages = user("Hi");
    let render = |variables: Value| {
        let variables = object(variables);
        template.render(&Chat { messages: &messages, variables: Some(&variables), ..Chat::default() })
    };
    let given = json!({"enable_thinking": false, "x": {"y": [1.0, null]}, "bos_token": "<t>"});
    assert_eq!(render(given).unwrap(), "<t>False[1.0, None]");
    for key in ["chat_template", "tokenize", "messages", "tools"] {
        let e = render(json!({key: 1})).unwrap_err().to_string();
        assert_eq!(e, format!("chat_template_kwargs.{key}: is not for a template to receive; remove it"));
    }
    assert!(template.render(&Chat::default()).unwrap_err().to_string().starts_with("messages: is empty"));
}

#[test]
fn the_last_message_is_continued_where_it_ends() {
    let template = ChatTemplate::parse(
        "{% for m in messages %}[{{ m.role }}] {{ m.content if m.content is string else m.content[0].text }}[end]{% endfor %}",
        Map::new(),
    );
    let template = template.unwrap();
    let render = |messages: &[Message], prompt| {
        let chat =
            Chat { messages, continue_final_message: true, add_generation_prompt: prompt, ..Chat::default() };
        template.render(&chat)
    };
    let mut messages = user("Hi");
    messages.push(Message::text("assistant", "Once upon "));
    assert_eq!(render(&messages, false).unwrap(), "[user] Hi[end][assistant] Once upon ");
    messages[1] = Message::of("assistant", json!([{"type": "text", "text": "two"}]));
    assert_eq!(render(&messages, false).unwrap(), "[user] Hi[end][assistant] two");
    assert!(render(&messages, true).unwrap_err().to_string().contains("excludes add_generation_prompt"));
    messages[1] = Message::of("assistant", Value::Null);
    assert!(render(&messages, false).unwrap_err().to_string().contains("no text to continue"));
    let trimmed = ChatTemplate::parse("{{ messages[0].content | trim }}</s>", Map::new()).unwrap();
    let one = [Message::text("assistant", "so ")];
    let chat = Chat { messages: &one, continue_final_message: true, ..Chat::default() };
    assert_eq!(trimmed.render(&chat).unwrap(), "so");
}

#[test]
fn the_clock_is_read_as_python_writes_it() {
    let day = |format: &str| jiff::fmt::strtime::format(format, &jiff::Zoned::now()).unwrap();
    let before = day("%d %b %Y|%Y-%m-%d|%A %-d");
    let shown =
        once("{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now('%A %-d') }}");
    assert!([before, day("%d %b %Y|%Y-%m-%d|%A %-d")].contains(&shown.unwrap()));
    assert!(once("{{ strftime_now('%Q%!') }}").is_err());
}

#[test]
fn messages_are_adapted_to_what_the_template_reads() {
    let of = |source: &str| ChatTemplate::parse(source, Map::new()).unwrap();
    let text = of("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}");
    let parts = of("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}");
    let both = of(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
    );
    let forms = [&text, &parts, &both].map(|t| t.content_form(None, false).unwrap());
    assert_eq!(forms, [ContentForm::Text, ContentForm::Parts, ContentForm::Both]);
    let list = |content: Value| vec![Message::of("developer", content)];
    let mut messages = list(json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]));
    text.adapt(&mut messages, None, false).unwrap();
    let chat = Chat { messages: &messages, ..Chat::default() };
    assert_eq!(text.render(&chat).unwrap(), "system:a\nb;");
    let mut messages = list(json!("a"));
    parts.adapt(&mut messages, None, false).unwrap();
    assert_eq!(parts.render(&Chat { messages: &messages, ..Chat::default() }).unwrap(), "a");
    let mut messages = list(json!([{"type": "image_url"}]));
    let e = text.adapt(&mut messages, None, false).unwrap_err().to_string();
    assert_eq!(
        e,
        "messages[0].content[0]: the model takes texts only, not a part of type \"image_url\"; remove it"
    );
}

#[test]
fn reasoning_is_shown_under_the_names_that_templates_know() {
    let template = "{% set m = messages[0] %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning is defined }}{{ 'content' in m }}";
    let template = ChatTemplate::parse(template, Map::new()).unwrap();
    let messages = Message::list(json!([{"role": "assistant", "content": null, "thinking": "so"}])).unwrap();
    assert_eq!(template.render(&Chat { messages: &messages, ..Chat::default() }).unwrap(), "sosoFalseFalse");
}

/// Marks change nothing but to say where blocks are, whatever white space the tags strip.
#[test]
fn generation_blocks_are_found_in_the_prompt() {
    let conversation =
        [Message::text("user", "a"), Message::text("assistant", "b\n"), Message::text("user", "c")];
    let tags = [
        ("{%", "%}"),
        ("{%-", "%}"),
        ("{%", "-%}"),
        ("{%-", "-%}"),
        ("{%+", "+%}"),
        ("{%+", "%}"),
        ("{%", "+%}"),
    ];
    for (open, close) in tags {
        for (before, inside) in [("", ""), ("\n  ", "\n"), (" ", " \n "), ("x\n\t", "\n\n")] {
            let source = format!(
                "{{% for m in messages %}}<{{{{ m.role }}}}>{{% if m.role == 'assistant' %}}{before}{open} generation {close}{inside}\
                 {{{{ m.content }}}}{inside}</s>{before}{open} endgeneration {close}{inside}{{% else %}}{{{{ m.content }}}}{{% endif %}}\
                 {{% endfor %}}{{# {{% generation %}} #}}"
            );
            let template = ChatTemplate::parse(&source, Map::new()).unwrap();
            let chat = Chat { messages: &conversation, ..Chat::default() };
            let (text, blocks) = template.generated(&chat).unwrap();
            assert_eq!(text, template.render(&chat).unwrap(), "{source:?}");
            assert_eq!(blocks.len(), 1, "{source:?}");
            let block = &text[blocks[0].clone()];
            assert!(block.contains("b\n") && block.contains("</s>") && !block.contains('c'), "{block:?}");
        }
    }
    let plain = ChatTemplate::parse("{{ messages[0].content }}", Map::new()).unwrap();
    assert!(!plain.marks_generation(false));
    let marked =
        ChatTemplate::parse("{% generation %}{{ messages[0].content }}{% endgeneration %}", Map::new())
            .unwrap();
    assert!(marked.marks_generation(false));
    let hostile = user("\u{fdd0}");
    assert!(marked.generated(&Chat { messages: &hostile, ..Chat::default() }).is_err());
}
