//! Adapters by name: which there are, loaded and unloaded while others are answered.

use super::*;
use crate::engine::{Factor, Patch};
use crate::http::AdapterSettings;
use std::path::Path;
use std::sync::Arc;

/// A server with so many slots; the folder `shiftN` adds N to each letter.
fn server(slots: u32, model: Alphabet) -> Server {
    let read = |folder: &Path| {
        let shift = folder.to_str().and_then(|f| f.strip_prefix("shift")?.parse().ok());
        let factor = |shift| Factor { state: String::new(), bytes: vec![shift] };
        let patch = shift.map(|shift| Patch { factors: vec![factor(shift)] });
        patch.ok_or_else(|| format!("{}: no adapter", folder.display()))
    };
    let adapters = Some(AdapterSettings { slots, loaded: vec![], read: Arc::new(read) });
    Server::with(model, Settings::default(), HttpSettings { adapters, ..HttpSettings::default() })
}

fn load(server: &Server, name: &str, path: &str) -> Reply {
    server.post("/v1/load_lora_adapter", &json!({"lora_name": name, "lora_path": path}))
}

fn unload(server: &Server, name: &str) -> Reply {
    server.post("/v1/unload_lora_adapter", &json!({"lora_name": name}))
}

/// What a model says behind `a`.
fn says(server: &Server, model: &str) -> String {
    let reply = server.complete(json!("a"), json!({"model": model, "max_tokens": 5})).good();
    assert_eq!(reply["model"], model);
    reply["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn ids(server: &Server) -> Vec<String> {
    let list = server.get("/v1/models").good();
    let models = list["data"].as_array().unwrap();
    assert!(models.iter().all(|m| m["parent"].is_null() == (m["id"] == "alias" || m["id"] == m["root"])));
    models.iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn names_are_adapters_from_when_they_are_loaded_until_they_are_unloaded() {
    let server = server(2, Alphabet::new());
    assert_eq!(
        (ids(&server), says(&server, "alias")),
        (vec!["org/alphabet".into(), "alias".into()], "bcdef".into())
    );
    load(&server, "two", "shift1").good();
    load(&server, "a/three", "shift2").good();
    assert_eq!(ids(&server), ["org/alphabet", "alias", "a/three", "two"]);
    for (model, text) in [("two", "cegik"), ("alias", "bcdef"), ("a/three", "dgjmp"), ("two", "cegik")] {
        assert_eq!(says(&server, model), text, "{model}");
    }
    assert_eq!(server.get("/v1/models/a/three").good()["parent"], "org/alphabet");
    // All slots are taken.
    assert_eq!(load(&server, "four", "shift3").error(), (400, Some("lora_name".into()), "".into()));
    unload(&server, "two").good();
    assert_eq!(server.complete(json!("a"), json!({"model": "two"})).error().2, "model_not_found");
    assert_eq!((unload(&server, "two").status, server.get("/v1/models/two").status), (404, 404));
    // The name comes back as another.
    load(&server, "two", "shift4").good();
    assert_eq!((says(&server, "two"), says(&server, "a/three")), ("fkpuz".into(), "dgjmp".into()));
    server.settle();
}

#[test]
fn what_is_wrong_with_an_adapter_takes_no_slot() {
    let server = server(1, Alphabet::new());
    let long = "x".repeat(257);
    for (name, path, param) in [
        ("new", "elsewhere", "lora_path"),
        ("", "shift1", "lora_name"),
        ("alias", "shift1", "lora_name"),
        ("org/alphabet", "shift1", "lora_name"),
        (long.as_str(), "shift1", "lora_name"),
    ] {
        let wrong = load(&server, name, path).error();
        assert_eq!((wrong.0, wrong.1.as_deref()), (400, Some(param)), "{name} {path}");
    }
    for body in [
        json!({}),
        json!({"lora_name": "x"}),
        json!({"lora_path": "shift1"}),
        json!({"lora_name": 1, "lora_path": 2}),
    ] {
        assert_eq!(server.post("/v1/load_lora_adapter", &body).status, 400, "{body}");
        assert!([400, 404].contains(&server.post("/v1/unload_lora_adapter", &body).status), "{body}");
    }
    load(&server, "new", "shift1").good();
    assert_eq!(load(&server, "new", "shift1").error().1.as_deref(), Some("lora_name"));
    assert_eq!(says(&server, "new"), "cegik");
    let none = Server::new();
    assert_eq!((load(&none, "x", "shift1").status, unload(&none, "x").status), (404, 404));
}

#[test]
fn an_adapter_that_is_unloaded_stays_for_those_who_use_it() {
    let server = server(1, Alphabet::paced(Duration::from_millis(3)));
    load(&server, "two", "shift1").good();
    let body = json!({"model": "two", "prompt": "a", "temperature": 0, "max_tokens": 80}).to_string();
    let running = server.send("POST", "/v1/completions", "", body.as_bytes());
    until("it runs", || server.engine.stats().running > 0);
    unload(&server, "two").good();
    // It has the only slot until it has ended.
    load(&server, "three", "shift2").good();
    let mut bytes = Vec::new();
    let mut running = running;
    running.read_to_end(&mut bytes).unwrap();
    let text = Reply::parse(&bytes).good()["choices"][0]["text"].as_str().unwrap().to_owned();
    let want: String = (0..80).map(|i| char::from(b'a' + ((2 + 2 * i) % 26) as u8)).collect();
    assert_eq!((text, says(&server, "three")), (want, "dgjmp".into()));
    server.settle();
}
