//! The page of `astrai serve` in a real browser, with real clicks and keys: it asks for the key, sends, shows the stream and its probabilities,
//! stops, asks again, draws what the server measures; nothing that a model says becomes part of it. Pictures of it lie beside the build's other
//! files. Where there is no browser, a word says so.

use crate::answers::fixture::make;
use crate::answers::serve::Server;
use crate::browser::Browser;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Words up to this are plain; the others would be elements.
const PLAIN: u64 = 16;

/// A model that goes on for long and says what no page should run.
fn model() -> PathBuf {
    let dir = make("playground", |config| {
        config["max_position_embeddings"] = json!(100_000);
        config["eos_token_id"] = Value::Null;
    });
    let path = dir.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let words = tokenizer["model"]["vocab"].as_object().unwrap().clone();
    let word = |(word, id): (String, Value)| match id.as_u64() {
        Some(n) if n >= PLAIN && n % 2 == 0 => (format!("<img/src=x/onerror=throw({n})><b>{n}"), id),
        _ => (word, id),
    };
    tokenizer["model"]["vocab"] = Value::Object(words.into_iter().map(word).collect());
    std::fs::write(path, tokenizer.to_string()).unwrap();
    dir
}

fn picture(browser: &mut Browser, name: &str) {
    browser.picture(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("playground-{name}.png")));
}

/// What the conversation has of a selector.
fn count(browser: &mut Browser, selector: &str) -> u64 {
    browser.value(&format!("document.querySelectorAll('#log {selector}').length")).as_u64().unwrap()
}

#[test]
fn a_conversation_in_a_browser() {
    let server =
        Server::start(&model(), &["--api-key", "k", "--served-name", "small", "--kv-memory", "256MiB"]);
    let (status, page) = server.get("/");
    assert_eq!(status, 200, "the page asks for the key by itself");
    for outside in ["src=", "@import", "url(", "innerHTML", "insertAdjacent", "document.write", "eval("] {
        assert!(!page.contains(outside), "{outside}");
    }
    let Some(mut browser) = Browser::start() else {
        println!("skipped: there is no browser here");
        return;
    };
    browser.look(1200, 800, false);
    browser.visit(&server.at(""));
    browser.until("!document.getElementById('key').hidden");
    assert!(browser.bad.iter().all(|line| line.contains("401")), "{:?}", browser.bad);
    browser.bad.clear();
    browser.click("#key-value");
    browser.write("k");
    browser.key("Enter");
    browser.until("document.getElementById('model').value === 'small'");
    assert_eq!(browser.value("document.activeElement.id"), "message");

    browser.click("#max_tokens");
    browser.write("40");
    browser.click("#message");
    browser.write("t9 <img src=x onerror=throw(1)> <b>t12");
    browser.key("Enter");
    browser.until("document.querySelector('article.assistant:not(.busy) .note') !== null");
    assert_eq!(count(&mut browser, ".token[data-p]"), 40);
    assert_eq!(count(&mut browser, "img, #log b"), 0);
    assert!(browser.text("article.user .text").contains("<img src=x"));
    assert!(browser.text("article.assistant .text").contains("<b>"));
    assert!(browser.text("article.assistant .note").contains("40 tokens"));
    assert!(browser.text("#status").starts_with("Answered"));

    // The middle of one that goes over two lines may be beside it.
    let one_line = "[...document.querySelectorAll('article.assistant .token[data-p]')].find(t => t.getClientRects().length === 1)";
    browser.value(&format!("{one_line}.id = 'pointed'"));
    browser.hover("#pointed");
    browser.until("document.querySelectorAll('#tip tr').length >= 5");
    assert_eq!(browser.value("document.querySelectorAll('#tip tr.taken').length"), 1);
    picture(&mut browser, "chat");
    browser.value("document.querySelector('.token[tabindex=\"0\"]').focus()");
    browser.key("ArrowRight");
    let second = "document.activeElement === document.querySelectorAll('article.assistant .token')[1]";
    assert_eq!(browser.value(second), true);
    assert_eq!(browser.value("document.getElementById('tip').hidden"), false);
    assert!(browser.text("#status").contains('%'));
    folded(&mut browser);
    stops(&mut browser);
    measures(&mut browser, &server);
    assert!(browser.bad.is_empty(), "{:#?}", browser.bad);
}

/// Thoughts and calls are folded, and are text.
fn folded(browser: &mut Browser) {
    let events = json!([
        {"choices": [{"delta": {"reasoning_content": "<b>so</b>"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "<i>add", "arguments": "{\"a\": "}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}}]},
        {"choices": [{"delta": {"content": "done"}, "finish_reason": "tool_calls"}]},
    ]);
    let run = format!(
        "(e => {{ const a = {{e, text: e.querySelector('.text'), content: '', reasoning: '', calls: [], usage: null, why: '', thought: null}}; \
         {events}.forEach(event => read(a, event)); e.id = 'made'; \
         return [e.querySelectorAll('b, i').length, e.querySelectorAll('details:not([open])').length, e.textContent]; }})(article('assistant'))"
    );
    let made = browser.value(&run);
    assert_eq!((&made[0], &made[1]), (&json!(0), &json!(2)));
    assert_eq!(made[2], "ModelReasoning<b>so</b>Call of <i>add{\"a\": 1}done");
    browser.click("#made summary");
    assert_eq!(browser.value("document.querySelectorAll('#made details[open]').length"), 1);
    picture(browser, "folded");
    browser.value("document.getElementById('made').remove()");
}

/// By the key, then by the button.
fn stops(browser: &mut Browser) {
    browser.value("document.getElementById('max_tokens').value = 90000");
    browser.click("#message");
    browser.write("t10");
    browser.key("Enter");
    for by_key in [true, false] {
        browser.until("document.querySelectorAll('article.busy .token').length > 30");
        assert_eq!(browser.value("document.getElementById('log').ariaBusy"), "true");
        match by_key {
            true => browser.key("Escape"),
            false => browser.click("#stop"),
        }
        browser.until("document.querySelector('.busy') === null");
        assert!(browser.text("article:last-child .note").starts_with("stopped"));
        if by_key {
            browser.click("#again");
        }
    }
    assert_eq!(count(browser, "article"), 4, "an answer that is asked for again replaces the first");
    assert_eq!(browser.value("document.getElementById('stop').hidden"), true);
}

/// The second view, in the dark, while an answer comes.
fn measures(browser: &mut Browser, server: &Server) {
    browser.click("#theme");
    browser.click("#theme");
    assert_eq!(browser.value("document.documentElement.className"), "dark");
    picture(browser, "dark");
    browser.click("#again");
    browser.until("document.querySelectorAll('article.busy .token').length > 30");
    let end =
        "(log => log.scrollHeight - log.scrollTop - log.clientHeight < 200)(document.getElementById('log'))";
    browser.until(end);
    browser.value("document.getElementById('tab-chat').focus()");
    browser.key("ArrowRight");
    assert_eq!(browser.value("document.activeElement.id"), "tab-server");
    browser
        .until("document.querySelector('#charts polyline')?.getAttribute('points')?.split(' ').length > 8");
    picture(browser, "server");
    assert!(
        browser.value("Number(document.querySelector('#charts .now').textContent)").as_f64().unwrap() > 0.0
    );
    browser.key("Escape");
    let counted = "1 requests answered, 3 cancelled, 0 failed";
    browser.until(&format!("document.getElementById('totals').textContent.startsWith('{counted}')"));
    browser.look(420, 800, true);
    browser.visit(&server.at(""));
    browser.until(
        "document.getElementById('model').value === 'small' && !document.getElementById('sampling').open",
    );
    assert_eq!(browser.value("document.documentElement.className"), "dark", "this tab keeps key and colours");
    picture(browser, "narrow");
    assert_eq!(browser.value("document.documentElement.scrollWidth <= innerWidth"), true);
    assert_eq!(server.get("/health").0, 200);
}
