//! Vectors, and how near texts are by them, against a model whose vectors are known.

use astrai_builders::config::Pooling;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{Server, until};
use crate::engine::Settings;
use crate::http::{HttpSettings, Rates};
use crate::tests::alphabet::{Alphabet, SIZES, WIDTH, vector};

fn server(pooling: Pooling) -> Server {
    Server::with(Alphabet::pooling(pooling), Settings::default(), HttpSettings::default())
}

fn ids(text: &str) -> Vec<i32> {
    text.bytes().map(i32::from).collect()
}

fn floats(embedding: &Value) -> Vec<f64> {
    embedding.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[track_caller]
fn near(got: &[f64], want: &[f64]) {
    let same = got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(same, "{got:?} {want:?}");
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// More texts than the engine has at once, some longer than a step, beside answers.
#[test]
fn texts_have_their_vectors_in_their_order() {
    for pooling in [Pooling::Last, Pooling::Mean] {
        let server = server(pooling);
        let texts: Vec<String> = (0..100)
            .map(|n| (0..1 + n * 37 % 256).map(|i| ["x", "y", "z"][(n + i * i) % 3]).collect())
            .collect();
        let answered = std::thread::scope(|s| {
            let chat = s.spawn(|| server.chat("a", json!({"max_tokens": 40})).good());
            let got = server.post("/v1/embeddings", &json!({"input": texts})).good();
            (got, chat.join().unwrap())
        });
        let (got, chat) = answered;
        assert_eq!(chat["usage"]["completion_tokens"], 40);
        let data = got["data"].as_array().unwrap();
        assert_eq!(data.len(), texts.len());
        for (i, (text, entry)) in texts.iter().zip(data).enumerate() {
            assert_eq!((&entry["index"], &entry["object"]), (&json!(i), &json!("embedding")));
            near(&floats(&entry["embedding"]), &vector(&ids(text), pooling));
        }
        let tokens: usize = texts.iter().map(String::len).sum();
        assert_eq!(got["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        assert_eq!((&got["object"], &got["model"]), (&json!("list"), &json!("org/alphabet")));
        server.settle();
    }
}

#[test]
fn every_form_of_input_and_output() {
    let server = server(Pooling::Last);
    let want = vector(&ids("xyz"), Pooling::Last);
    for (input, n) in [
        (json!("xyz"), 1),
        (json!(["xyz", "xyz"]), 2),
        (json!([120, 121, 122]), 1),
        (json!([[120, 121, 122], [120, 121, 122]]), 2),
    ] {
        let got = server.post("/v1/embeddings", &json!({"input": input, "model": "alias"})).good();
        assert_eq!(got["data"].as_array().unwrap().len(), n, "{input}");
        got["data"].as_array().unwrap().iter().for_each(|entry| near(&floats(&entry["embedding"]), &want));
    }
    let short = server.post("/v1/embeddings", &json!({"input": "xyz", "dimensions": 2})).good();
    let length = dot(&want[..2], &want[..2]).sqrt();
    near(&floats(&short["data"][0]["embedding"]), &[want[0] / length, want[1] / length]);
    let packed = server.post("/v1/embeddings", &json!({"input": "xyz", "encoding_format": "base64"})).good();
    let bytes = STANDARD.decode(packed["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let numbers: Vec<f64> =
        bytes.as_chunks::<4>().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect();
    near(&numbers, &want);
    let cut = server.post("/v1/embeddings", &json!({"input": "xyzzz", "truncate_prompt_tokens": 3})).good();
    near(&floats(&cut["data"][0]["embedding"]), &want);
}

#[test]
fn what_is_wrong_is_refused() {
    let server = server(Pooling::Mean);
    let long: String = "x".repeat(SIZES.context() + 1);
    for (path, body, param) in [
        ("embeddings", json!({}), "input"),
        ("embeddings", json!({"input": []}), "input"),
        ("embeddings", json!({"input": ""}), "input"),
        ("embeddings", json!({"input": ["x", ""]}), "input[1]"),
        ("embeddings", json!({"input": [[]]}), "input"),
        ("embeddings", json!({"input": [1, -1]}), "input[1]"),
        ("embeddings", json!({"input": [["x"]]}), "input[0][0]"),
        ("embeddings", json!({"input": [999]}), "input"),
        ("embeddings", json!({"input": {}}), "input"),
        ("embeddings", json!({"input": long}), "input"),
        ("embeddings", json!({"input": vec!["x"; 2049]}), "input"),
        ("embeddings", json!({"input": "x", "dimensions": 0}), "dimensions"),
        ("embeddings", json!({"input": "x", "dimensions": WIDTH + 1}), "dimensions"),
        ("embeddings", json!({"input": "x", "encoding_format": "int8"}), "encoding_format"),
        ("embeddings", json!({"input": "x", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        ("embeddings", json!({"input": "x", "model": "other"}), "model"),
        ("score", json!({"text_1": "x"}), "text_2"),
        ("score", json!({"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}), "text_1"),
        ("rerank", json!({"documents": ["x"]}), "query"),
        ("rerank", json!({"query": "x"}), "documents"),
        ("rerank", json!({"query": "x", "documents": ["x", 3]}), "documents[1]"),
        ("rerank", json!({"query": "x", "documents": ["x", {"title": "x"}]}), "documents[1]"),
        ("rerank", json!({"query": "x", "documents": ["x"], "top_n": 0}), "top_n"),
    ] {
        let reply = server.post(&format!("/v1/{path}"), &body);
        let (status, told, _) = reply.error();
        let want = if param == "model" { 404 } else { 400 };
        assert_eq!((status, told.as_deref()), (want, Some(param)), "{path} {}", reply.text());
    }
    // The whole context is a text; there is no answer that wants room.
    let whole = server.post("/v1/embeddings", &json!({"input": &long[1..]})).good();
    assert_eq!(whole["usage"]["prompt_tokens"], SIZES.context());
    let without = Server::new().post("/v1/embeddings", &json!({"input": "x"}));
    assert_eq!(without.error().0, 400);
    assert!(without.text().contains("--embeddings"), "{}", without.text());
}

#[test]
fn scores_and_ranks_are_cosines() {
    let server = server(Pooling::Mean);
    let of = |text: &str| vector(&ids(text), Pooling::Mean);
    let cosine = |a: &str, b: &str| dot(&of(a), &of(b));
    let alone = server.post("/score", &json!({"text_1": "xy", "text_2": ["zz", "xyy"]})).good();
    let scores: Vec<f64> =
        alone["data"].as_array().unwrap().iter().map(|s| s["score"].as_f64().unwrap()).collect();
    near(&scores, &[cosine("xy", "zz"), cosine("xy", "xyy")]);
    let pairs = json!({"text_1": ["xy", "q"], "text_2": ["zz", "q"]});
    let pairs = server.post("/v1/score", &pairs).good();
    near(&[pairs["data"][1]["score"].as_f64().unwrap()], &[1.0]);
    assert_eq!(pairs["usage"]["total_tokens"], 6);
    let documents = json!(["m", "xyy", {"text": "xy"}, "c"]);
    let mut order: Vec<usize> = (0..4).collect();
    let texts = ["m", "xyy", "xy", "c"];
    order.sort_by(|a, b| cosine("xy", texts[*b]).total_cmp(&cosine("xy", texts[*a])));
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        let asked = json!({"query": "xy", "documents": documents, "top_n": 3});
        let ranked = server.post(path, &asked).good();
        let results = ranked["results"].as_array().unwrap();
        let got: Vec<u64> = results.iter().map(|r| r["index"].as_u64().unwrap()).collect();
        assert_eq!(got, order[..3].iter().map(|i| *i as u64).collect::<Vec<_>>());
        assert_eq!(results[0]["document"]["text"], "xy");
        near(&[results[0]["relevance_score"].as_f64().unwrap()], &[1.0]);
    }
    let plain = json!({"query": "xy", "documents": ["x"], "return_documents": false});
    assert!(server.post("/rerank", &plain).good()["results"][0].get("document").is_none());
}

#[test]
fn vectors_are_charged_and_given_up() {
    let rates = Rates { requests: None, tokens: Some(4) };
    let settings = HttpSettings { rates, ..HttpSettings::default() };
    let server = Server::with(Alphabet::pooling(Pooling::Last), Settings::default(), settings);
    server.post("/v1/embeddings", &json!({"input": "xyzxyz"})).good();
    assert_eq!(server.post("/v1/embeddings", &json!({"input": "x"})).error().0, 429);
    let narrow = Settings { queue: 1, ..Settings::default() };
    let server = Server::with(Alphabet::pooling(Pooling::Last), narrow, HttpSettings::default());
    let body = json!({"input": vec!["xyz"; 2000]}).to_string();
    let sent = server.send("POST", "/v1/embeddings", "", body.as_bytes());
    until("it has begun", || server.engine.stats().steps > 0);
    drop(sent);
    server.settle();
    // A queue of one takes them one after the other.
    let all = server.post("/v1/embeddings", &json!({"input": vec!["xyz"; 40]})).good();
    assert_eq!(all["data"].as_array().unwrap().len(), 40);
}
