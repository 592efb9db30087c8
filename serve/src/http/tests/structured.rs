//! Structured output through the endpoints: what comes is what was asked for; what is malformed is refused, and the server lives on.

use super::*;

/// An answer held to something, at temperature 1.3.
fn held(server: &Server, fields: Value) -> String {
    let body = server.chat("hi", with(json!({"temperature": 1.3, "max_tokens": 200}), fields)).good();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{body}");
    choice["message"]["content"].as_str().unwrap().to_owned()
}

#[test]
fn answers_are_what_is_asked_for() {
    let server = Server::new();
    let properties = json!({"n": {"type": "integer", "minimum": 7, "maximum": 12}, "b": {"type": "boolean"}});
    let schema = json!({
        "type": "object", "properties": properties, "required": ["n", "b"], "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}});
    for fields in [
        json!({"response_format": format, "seed": 1}),
        json!({"response_format": format, "temperature": 0}),
        json!({"guided_json": schema.to_string()}),
        json!({"structured_outputs": {"json": schema}}),
    ] {
        let answer: Value = serde_json::from_str(&held(&server, fields)).unwrap();
        assert!((7..=12).contains(&answer["n"].as_i64().unwrap()) && answer["b"].is_boolean(), "{answer}");
    }
    let regex = held(&server, json!({"structured_outputs": {"regex": "[0-9]{3}-x+y"}}));
    assert!(regex.len() >= 6 && regex.as_bytes()[3] == b'-' && regex.ends_with('y'), "{regex}");
    assert!(["yes", "no"].contains(&held(&server, json!({"guided_choice": ["yes", "no"]})).as_str()));
    let grammar = "root ::= \"a\" root? \"b\"";
    let text = held(&server, json!({"grammar": grammar, "temperature": 0}));
    assert_eq!(text, format!("{}{}", "a".repeat(text.len() / 2), "b".repeat(text.len() / 2)));
    let body = json!({"guided_choice": ["yes"], "max_tokens": 20, "n": 2, "temperature": 1});
    let both = server.complete(json!("x"), body).good();
    assert_eq!((&both["choices"][0]["text"], &both["choices"][1]["text"]), (&json!("yes"), &json!("yes")));
    server.settle();
}

/// Grammars, ends, penalties and log-probabilities under speculation: what is said, and why it ends, is as without.
#[test]
fn speculation_changes_no_answer() {
    let plain = Server::new();
    let settings = Settings { proposed: 4, sequences: Some(3), ..Settings::default() };
    let server = Server::with(Alphabet::new(), settings, HttpSettings::default());
    let accepted = |server: &Server| server.engine.stats().scheduler.accepted;
    let schema =
        json!({"type": "array", "items": {"enum": ["again", "never"]}, "minItems": 9, "maxItems": 9});
    for (fields, repeats) in [
        (json!({"max_tokens": 150}), true),
        (
            json!({"max_tokens": 90, "stop": ["xyzab", "mnop"], "prompt": "abcdefghijklmnopqrstuvwxyzabcd"}),
            true,
        ),
        (json!({"max_tokens": 60, "logprobs": 3, "prompt": [97, 98, 99, 100, 101, 99]}), true),
        (json!({"max_tokens": 60, "echo": true, "logprobs": 1}), true),
        (json!({"max_tokens": 60, "n": 2, "temperature": 1.0}), false),
        (json!({"max_tokens": 60, "frequency_penalty": 1.9, "repetition_penalty": 1.7}), false),
        (json!({"max_tokens": 60, "prompt": "0123456789<|end|>0123456789<|end|>01"}), true),
        (json!({"max_tokens": 60, "prompt": "01234 01234 01234", "stop_token_ids": [56]}), false),
        (json!({"max_tokens": 200, "structured_outputs": {"json": schema}, "temperature": 0.3}), true),
        (json!({"max_tokens": 90, "structured_outputs": {"regex": "(ab0|ab1){20}"}}), true),
        (json!({"max_tokens": 90, "structured_outputs": {"regex": "(abc-){3}"}}), true),
    ] {
        let body = with(json!({"prompt": "xyzxyz", "temperature": 0, "seed": 3}), fields);
        let before = accepted(&server);
        let [want, got] = [&plain, &server].map(|s| s.post("/v1/completions", &body).good());
        assert_eq!((&got["choices"], &got["usage"]), (&want["choices"], &want["usage"]), "{body}");
        assert!(!repeats || accepted(&server) > before, "nothing was accepted: {body}");
        let streamed = |s: &Server| {
            let reply = s.post("/v1/completions", &with(body.clone(), json!({"stream": true})));
            let said =
                reply.events().into_iter().filter_map(|e| Some(e["choices"][0]["text"].as_str()?.to_owned()));
            said.collect::<String>()
        };
        assert!(body["n"] == 2 || streamed(&plain) == streamed(&server), "{body}");
    }
    server.settle();
    let metrics = server.get("/metrics");
    let all = |name: &str| metrics.text().contains(&format!("astrai_spec_decode_num_{name}_tokens_total"));
    assert!(all("draft") && all("accepted") && accepted(&plain) == 0);
}

#[test]
fn calls_that_are_required_are_made_in_every_format() {
    let parameters = json!({
        "type": "object", "properties": {"mood": {"type": "string", "enum": ["good", "bad"]}, "n": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["mood", "n"], "additionalProperties": false,
    });
    let tools = json!([
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "g", "parameters": parameters}},
    ]);
    for format in ["hermes", "llama3_json", "mistral", "deepseek_v3", "glm4", "harmony", "qwen3_coder"] {
        let settings = HttpSettings { calls: format.parse().unwrap(), ..HttpSettings::default() };
        let server = Server::of(Script::start(""), TEMPLATE, settings);
        let named = json!({"type": "function", "function": {"name": "g"}});
        for (choice, reason) in [(json!("required"), "tool_calls"), (named, "stop")] {
            let fields = json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false});
            let body =
                server.chat("hi", with(fields, json!({"temperature": 1.3, "max_tokens": 1500}))).good();
            let (message, why) = (&body["choices"][0]["message"], &body["choices"][0]["finish_reason"]);
            let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("{format}: {body}"));
            assert_eq!((calls.len(), why), (1, &json!(reason)), "{format}: {body}");
            let arguments: Value =
                serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
            assert!(["good", "bad"].contains(&arguments["mood"].as_str().unwrap()), "{format}: {arguments}");
            assert!((1..=3).contains(&arguments["n"].as_i64().unwrap()), "{format}: {arguments}");
            assert!(reason == "tool_calls" || calls[0]["function"]["name"] == "g");
        }
    }
}

/// A strict tool's calls are held to its schema wherever the model makes them, and the text around them to nothing.
#[test]
fn calls_of_strict_tools_are_held_among_texts() {
    let parameters = json!({
        "type": "object", "properties": {"mood": {"type": "string", "enum": ["good", "bad"]}, "n": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["mood", "n"], "additionalProperties": false,
    });
    let tool = |name: &str, strict: bool| json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}});
    let json = r#"{"mood": "ugly", "n": 7}"#;
    let hermes = format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {json}}}\n</tool_call>");
    let coder = "<tool_call>\n<function=f>\n<parameter=mood>\nugly\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>";
    let deepseek = format!(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{json}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    for (format, call) in [("hermes", hermes.as_str()), ("qwen3_coder", coder), ("deepseek_v3", &deepseek)] {
        for said in ["", "Well <b>, 2 < 3 and <tool_cal: "] {
            let says = |text: &str, tools: Value| {
                let settings = HttpSettings { calls: format.parse().unwrap(), ..HttpSettings::default() };
                let server = Server::of(Script::start(text), TEMPLATE, settings);
                server.chat("hi", json!({"tools": tools, "max_tokens": 600})).good()["choices"][0].clone()
            };
            let held = says(&format!("{said}{call}"), json!([tool("f", true)]));
            let function = &held["message"]["tool_calls"][0]["function"];
            let arguments: Value =
                serde_json::from_str(function["arguments"].as_str().unwrap_or("")).unwrap();
            // The script goes on where another word is shorter.
            let content = held["message"]["content"].as_str().unwrap_or("");
            assert!(content.trim().starts_with(said.trim()), "{format}: {held}");
            assert!(["good", "bad"].contains(&arguments["mood"].as_str().unwrap()), "{format}: {held}");
            assert!((1..=3).contains(&arguments["n"].as_i64().unwrap()), "{format}: {held}");
            let free = says(&format!("{said}{call}"), json!([tool("f", false)]));
            let arguments = free["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
            assert_eq!(serde_json::from_str::<Value>(arguments).unwrap()["n"], 7, "{format}: {free}");
            // Nobody has to call anything.
            let text = says(said, json!([tool("f", true)]));
            assert_eq!(
                (&text["finish_reason"], text["message"]["content"].as_str()),
                (&json!("stop"), Some(said))
            );
        }
    }
}

/// Arguments that are bare texts may have anything in them but what ends them.
#[test]
fn bare_arguments_may_have_angles() {
    let said = "if (a < b) { c->d } </p";
    let parameters = json!({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    for (format, head, end) in [
        ("glm4", "f\n<arg_key>s</arg_key>\n<arg_value>", "</arg_value>\n"),
        ("qwen3_coder", "\n<function=f>\n<parameter=s>\n", "\n</parameter>\n</function>\n"),
    ] {
        let settings = HttpSettings { calls: format.parse().unwrap(), ..HttpSettings::default() };
        let text = format!("<tool_call>{head}{said}{end}</tool_call>");
        let server = Server::of(Script::start(&text), TEMPLATE, settings);
        let fields = json!({"tools": tools, "tool_choice": "required", "max_tokens": 500});
        let body = server.chat("hi", fields).good();
        let call = &body["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["arguments"], json!({"s": said}).to_string(), "{format}: {body}");
    }
}

#[test]
fn what_is_malformed_is_refused_and_the_server_lives_on() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../shared/golden/structured/malformed.json");
    let Ok(text) = std::fs::read(path) else { return println!("skipped: no ../shared/golden") };
    let cases: Value = serde_json::from_slice(&text).unwrap();
    let server = Server::new();
    for case in cases.as_array().unwrap() {
        let raw = case["value_text"].as_str().map_or_else(|| case["value"].to_string(), str::to_owned);
        let field = match case["kind"].as_str().unwrap() {
            "json_schema" => format!(
                r#""response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {raw}}}}}"#
            ),
            kind @ ("regex" | "grammar") => format!(r#""structured_outputs": {{"{kind}": {raw}}}"#),
            kind => format!(r#""{kind}": {raw}"#),
        };
        let body =
            format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 5, {field}}}"#);
        let started = Instant::now();
        let reply = server.ask("POST", "/v1/chat/completions", "", body.as_bytes());
        let may = case["expect"] == "400_or_right" && reply.status == 200;
        assert!(reply.status == 400 || may, "{}: {} {}", case["why"], reply.status, reply.text());
        assert!(started.elapsed() < Duration::from_secs(10), "{}: {:?}", case["why"], started.elapsed());
    }
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(held(&server, json!({"guided_choice": ["yes"]})), "yes");
    server.settle();
}

/// Formats of a structural tag, and an expression of the answers that each allows, of which the model's own is none.
#[test]
fn structural_tags_hold_what_stands_between_them() {
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false});
    let held_to = json!({"type": "json_schema", "json_schema": schema});
    let call = |name: &str| json!({"type": "tag", "begin": format!("<f={name}>"), "content": held_to, "end": "</f>"});
    let calls = [call("a"), call("b")];
    let object = r#"\{\s*"n"\s*:\s*[12]\s*\}"#;
    let server = Server::new();
    for (format, want) in [
        (call("a"), format!("<f=a>{object}</f>")),
        (
            json!({"type": "sequence", "elements": [{"type": "const_string", "value": "x="}, {"type": "regex", "pattern": "[0-9/]{2}"},
                {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, held_to]}]}),
            format!("x=[0-9/]{{2}}(yes|{object})"),
        ),
        (
            json!({"type": "tags_with_separator", "tags": calls, "separator": ", ", "at_least_one": true, "stop_after_first": true}),
            format!("<f=[ab]>{object}</f>"),
        ),
        (
            json!({"type": "sequence", "elements": [{"type": "optional", "content": {"type": "const_string", "value": "<"}},
                {"type": "star", "content": {"type": "regex", "pattern": "[xyz]"}}, {"type": "const_string", "value": "."}]}),
            "<?[xyz]*\\.".into(),
        ),
        (
            json!({"type": "triggered_tags", "triggers": ["<f="], "tags": calls, "at_least_one": true, "stop_after_first": true}),
            format!("(?s:.)*<f=[ab]>{object}</f>"),
        ),
    ] {
        let tag = json!({"type": "structural_tag", "format": format});
        for fields in [
            json!({"response_format": tag}),
            json!({"structured_outputs": {"structural_tag": tag.to_string()}}),
        ] {
            let said = server
                .chat("hi", with(json!({"temperature": 1.3, "max_tokens": 200, "seed": 2}), fields))
                .good();
            let choice = &said["choices"][0];
            let text = choice["message"]["content"].as_str().unwrap();
            let whole = fancy_regex::Regex::new(&format!("^(?:{want})$")).unwrap().is_match(text).unwrap();
            assert!(whole || choice["finish_reason"] == "length", "{format}: {text:?}");
            assert!(whole || want.starts_with("(?s"), "{format}: {text:?}");
        }
    }
    server.settle();
}

/// Texts that a model says, and what becomes of them where tags may stand among texts.
#[test]
fn free_texts_around_structural_tags_are_free() {
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false});
    let old = json!({"type": "structural_tag", "triggers": ["<f"], "structures": [
        {"begin": "<f>", "schema": schema, "end": "</f>"}, {"begin": "<f two>", "schema": true, "end": "</f>"}]});
    let thought = json!({"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text", "excludes": ["zz"]}, "end": ["</t>", "</end>"]},
        {"type": "tag", "begin": "<r>", "content": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
            {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}]}, "end": "</r>"},
        {"type": "any_text"}]}});
    for (form, text, kept) in [
        (&old, r#"hi < <<f>{"n": 1}</f> there <f two>[3]</f><f>{"n":2}</f> bye <"#, true),
        (&old, "no tag at all", true),
        (&old, r#"hi <f>{"n": 7}</f>"#, false),
        (&old, "hi <g>", true),
        (&old, "hi <f three>", false),
        (&thought, r#"<t>a </b </t><r>b <f>{"n": 1}</f> < </r>free <t>"#, true),
        (&thought, "<t></end><r></r>", true),
        (&thought, "<t>a zz</t><r></r>", false),
        (&thought, "a<t></t><r></r>", false),
    ] {
        let body =
            Server::saying(text, "").chat("hi", json!({"response_format": form, "max_tokens": 100})).good();
        let said = body["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!(said == text, kept, "{text:?} became {said:?}");
    }
}

#[test]
fn structural_tags_that_are_none_are_refused() {
    let server = Server::new();
    let text = json!({"type": "any_text"});
    let deep = (0..40).fold(text.clone(), |inner, _| json!({"type": "sequence", "elements": [inner]}));
    let long = "x".repeat(1 << 18);
    let format = |format: Value| json!({"format": format});
    for (tag, word) in [
        (json!({}), "format"),
        (json!({"format": text, "structures": []}), "either"),
        (json!({"structures": [], "triggers": ["<"]}), "empty"),
        (json!({"structures": 3, "triggers": ["<"]}), "list"),
        (json!({"structures": [{"begin": "<f>", "schema": {}, "end": "x"}]}), "triggers"),
        (format(json!("any_text")), "object"),
        (format(json!({"type": "qwen_xml_parameter"})), "not supported"),
        (format(json!({"type": "const_string", "value": ""})), "empty"),
        (format(json!({"type": "regex", "pattern": "(a"})), "regular expression"),
        (format(json!({"type": "json_schema", "json_schema": {"type": "sound"}})), "sound"),
        (format(json!({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"})), "style"),
        (format(json!({"type": "sequence", "elements": [text, text]})), "free text"),
        (format(json!({"type": "star", "content": text})), "free text"),
        (format(json!({"type": "tag", "begin": "<", "content": text, "end": [""]})), "empty"),
        (format(json!({"type": "tag", "begin": "<", "content": text, "end": 3})), "end"),
        (
            format(
                json!({"type": "triggered_tags", "triggers": ["<f"], "tags": [{"begin": "g", "content": text, "end": "x"}]}),
            ),
            "trigger",
        ),
        (format(json!({"type": "any_text", "excludes": [1]})), "excludes"),
        (format(json!({"type": "const_string", "value": long})), "bytes"),
        (format(deep), "in each other"),
    ] {
        let body = chat("hi", json!({"structured_outputs": {"structural_tag": tag}}));
        let reply = server.post("/v1/chat/completions", &body);
        let (status, param, _) = reply.error();
        assert_eq!(
            (status, param.as_deref()),
            (400, Some("structured_outputs.structural_tag")),
            "{tag:.200}"
        );
        assert!(reply.text().contains(word), "{word}: {}", reply.text());
    }
    let reply = server
        .post("/v1/chat/completions", &chat("hi", json!({"structured_outputs": {"structural_tag": "{"}})));
    assert_eq!(reply.error().0, 400);
    assert_eq!(server.get("/health").status, 200);
}
