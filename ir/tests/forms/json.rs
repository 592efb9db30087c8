//! What is written is read back node for node; what nobody wrote is refused in one line.

use crate::sample::{every_op, layer};
use astrai_ir::json::{from_json, read_json, to_json, write_json};
use astrai_ir::{Graph, verify};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::OnceLock;

#[test]
fn every_operator_is_read_back_as_written() {
    let g = every_op();
    let bodies = g.blocks().iter().map(|b| &b.graph);
    let used: BTreeSet<_> = bodies.chain([&g]).flat_map(Graph::nodes).map(|n| n.op.name()).collect();
    assert!(used.len() >= 28, "{used:?}");
    for g in [g, layer().graph, Graph::default()] {
        let text = write_json(&g);
        let back = read_json(&text).unwrap();
        assert_eq!(write_json(&back), text);
        assert_eq!(back.nodes().len(), g.nodes().len());
        for (a, b) in g.nodes().iter().zip(back.nodes()) {
            assert_eq!((&a.op, &a.args, &a.types, &a.origin), (&b.op, &b.args, &b.types, &b.origin));
        }
        assert_eq!(from_json(&to_json(&g)).unwrap().outputs(), g.outputs());
    }
}

#[test]
fn the_text_has_one_node_a_line() {
    let mut g = Graph::new(vec![]);
    let w = g.scope("embed", |g| g.weight("embed.weight", astrai_ir::DType::BF16, &[4, 2])).unwrap();
    g.set_output("w", w).unwrap();
    let want = r#"{
 "astrai_ir": 1,
 "symbols": [],
 "blocks": [],
 "nodes": [
  {"id":0,"op":"weight","attributes":{"name":"embed.weight","ty":{"dtype":"bf16","shape":["4","2"]}},"args":[],"type":["bf16[4, 2]"],"origin":"embed"}
 ],
 "outputs": [
  {"name":"w","node":0}
 ]
}
"#;
    assert_eq!(write_json(&g), want);
}

/// A small graph: 0 input x, 1 const, 2 reshape, 3 expand, 4 binary; one block.
fn small() -> Value {
    let body = layer();
    let mut g = Graph::new(body.graph.symbols.clone());
    g.add_block(std::sync::Arc::new(body));
    let x = g.input("x", astrai_ir::DType::F32, vec![crate::sample::tokens()]).unwrap();
    let y = g.scope("scale", |g| g.scale(x, 2.0)).unwrap();
    g.set_output("y", y).unwrap();
    to_json(&g)
}

fn refusal(path: &str, value: Value) -> String {
    let mut v = small();
    match v.pointer_mut(path) {
        Some(place) => *place = value,
        None => panic!("{path} is not there"),
    }
    match from_json(&v) {
        Ok(_) => panic!("{path} was accepted"),
        Err(e) => e.to_string(),
    }
}

/// Each case: what is put where, and what the refusal says.
fn refuses(cases: &[(&str, Value, &str)]) {
    for (path, value, want) in cases {
        let got = refusal(path, value.clone());
        assert!(got.contains(want), "{path}: wanted `{want}` in `{got}`");
        assert!(!got.contains('\n') && got.len() < 1000);
    }
}

#[test]
fn hostile_nodes_are_refused_with_their_place() {
    let huge =
        json!({"name": "x", "ty": {"dtype": "f32", "shape": ["4611686018427387904", "4611686018427387904"]}});
    let wide = json!({"shape": vec!["tokens + 1"; 40]});
    let lies = json!({"dtype": "f32", "shape": [1u64 << 62, 4], "bits": "00000040"});
    let undeclared = json!({"name": "x", "ty": {"dtype": "f32", "shape": ["pages"]}});
    let overflow = json!({"name": "x", "ty": {"dtype": "f32", "shape": ["99999999999999999999"]}});
    refuses(&[
        ("/astrai_ir", json!(2), "`astrai_ir` is 2; this program reads version 1"),
        ("/astrai_ir", json!("1"), "`astrai_ir` is \"1\"; this program reads version 1"),
        ("/nodes", json!({}), "`nodes` must be a list"),
        ("/nodes/1/id", json!(0), "node 1: `id` is 0; ids count up from 0"),
        ("/nodes/2/args/0", json!(4), "node 2: `args` has 4, which does not come before it"),
        ("/nodes/2/args/0", json!(2), "node 2: `args` has 2, which does not come before it"),
        ("/nodes/2/args/0", json!(-1), "node 2: `args` must be a list of ids"),
        ("/nodes/2/args", json!([]), "node 2: `reshape` takes 1 argument, got 0"),
        ("/nodes/4/op", json!("launch\n"), "node 4: `op` and `attributes`: `launch\\n` is not an operator"),
        ("/nodes/4/attributes", json!([]), "node 4: `attributes` must be an object"),
        (
            "/nodes/4/attributes",
            json!({"kind": "plus"}),
            "node 4: `op` and `attributes`: `binary`: unknown variant `plus`",
        ),
        ("/nodes/4/attributes", json!({"kind": "add", "fast": true}), "unknown field `fast`"),
        (
            "/nodes/4/type/0",
            json!("f16[tokens]"),
            "node 4: `type` is [\"f16[tokens]\"], the rule gives f32[tokens]",
        ),
        ("/nodes/4/origin", json!("a\nb"), "%4 `binary` has the origin `a\\nb`, which is not one line"),
        ("/nodes/1/attributes", lies, "node 1: `const` f32[4611686018427387904, 4] does not hold 4 bytes"),
        (
            "/nodes/0/attributes",
            huge,
            "node 0: `input` is f32[4611686018427387904, 4611686018427387904], which",
        ),
        (
            "/nodes/0/attributes",
            overflow,
            "node 0: `op` and `attributes`: `input`: `99999999999999999999` is not a size",
        ),
        (
            "/nodes/0/attributes",
            undeclared,
            "node 0: `input` uses the symbol `pages`, which the graph does not declare",
        ),
        ("/nodes/3/attributes", wide, "node 3: `attributes` must be an object with shapes of few products"),
    ]);
}

#[test]
fn hostile_graphs_are_refused_with_their_place() {
    refuses(&[
        ("/outputs/0/node", json!(9), "output 0: `node` is 9, there are 5 nodes"),
        (
            "/outputs",
            json!([{"name": "y", "node": 4}, {"name": "y", "node": 3}]),
            "output 1: output `y` is declared twice",
        ),
        ("/symbols/0/min", json!(0), "symbol `tokens` wants 1 <= min <= max"),
        ("/symbols/0/max", json!(1.5), "symbol 0: `max` must be an integer"),
        ("/symbols/1/max", json!(63), "symbol `sequences` wants 1 <= min <= max, both multiples"),
        ("/symbols/1/name", json!("tokens"), "symbol `tokens` is declared twice"),
        ("/blocks/0/params/0", json!("y"), "in block `layer`: parameter `y` has no leaf in the body"),
        ("/blocks/0/params", json!(["x", "w"]), "in block `layer`: leaf `norm` of the body is no parameter"),
        ("/blocks/0/outputs", json!([]), "block 0: `outputs` is empty"),
        ("/blocks/0/symbols/0/max", json!(9), "the graph around it does not declare tokens in 1..=8192"),
        ("/blocks/0/blocks/0/name", json!("layer"), "in block `layer`: block `layer` contains itself"),
        ("/blocks/0/nodes/1/id", json!(7), "block 0, node 1: `id` is 7"),
        ("/blocks/0/nodes/2/attributes/name", json!("x"), "%2 `weight` has the name of %0"),
    ]);
}

#[test]
fn what_is_no_graph_is_refused() {
    assert!(read_json("{").unwrap_err().to_string().contains("is not JSON"));
    assert!(read_json("[]").unwrap_err().to_string().contains("is not an object"));
    assert!(read_json("{}").unwrap_err().to_string().contains("no key `astrai_ir`"));
    assert!(read_json(&"[".repeat(100_000)).unwrap_err().to_string().contains("recursion limit"));
    let key = format!("{{\"astrai_ir\":1,\"{}\":0}}", "k\\n".repeat(10_000));
    assert!(read_json(&key).unwrap_err().to_string().len() < 2000);
}

#[test]
fn repeated_nodes_missing_keys_and_deep_blocks_are_refused() {
    let mut v = small();
    let mut again = v["nodes"][0].clone();
    again["id"] = json!(5);
    v["nodes"].as_array_mut().unwrap().push(again);
    assert_eq!(from_json(&v).unwrap_err().to_string(), "graph: node 5: repeats node 0");
    for key in ["id", "op", "attributes", "args", "type", "origin"] {
        let mut v = small();
        v["nodes"][0].as_object_mut().unwrap().remove(key);
        let want = format!("graph: node 0: the key `{key}` is missing");
        assert_eq!(from_json(&v).unwrap_err().to_string(), want);
    }
    let mut v = small();
    for i in 0..20 {
        let mut outer = small();
        v.as_object_mut().unwrap().remove("astrai_ir");
        v["name"] = json!(format!("b{i}"));
        v["params"] = json!(["x"]);
        outer["blocks"] = json!([v]);
        v = outer;
    }
    assert!(from_json(&v).unwrap_err().to_string().contains("nest more than 16 deep"));
    let mut v = small();
    let rows = json!({"name": "a", "rows": u64::MAX});
    v["nodes"][0]["op"] = json!("weight");
    v["nodes"][0]["attributes"]["parts"] = json!([rows, rows]);
    assert!(
        from_json(&v).unwrap_err().to_string().contains("node 0: `attributes`: the rows of `parts` overflow")
    );
}

fn written() -> &'static (String, Value, Vec<String>) {
    static TEXT: OnceLock<(String, Value, Vec<String>)> = OnceLock::new();
    TEXT.get_or_init(|| {
        let value = to_json(&every_op());
        let mut places = Vec::new();
        pointers(&value, String::new(), &mut places);
        (write_json(&every_op()), value, places)
    })
}

fn pointers(v: &Value, at: String, out: &mut Vec<String>) {
    match v {
        Value::Array(a) => a.iter().enumerate().for_each(|(i, v)| pointers(v, format!("{at}/{i}"), out)),
        Value::Object(o) => o.iter().for_each(|(k, v)| pointers(v, format!("{at}/{k}"), out)),
        _ => {}
    }
    out.push(at);
}

/// What is accepted is a graph, and is written as it was read.
fn judge(read: Result<Graph, astrai_ir::IrError>) {
    match read {
        Ok(g) => {
            verify(&g).unwrap();
            let text = write_json(&g);
            assert_eq!(write_json(&read_json(&text).unwrap()), text);
        }
        Err(e) => assert!(!e.to_string().contains('\n'), "{e}"),
    }
}

fn scalars() -> impl Strategy<Value = Value> {
    let numbers = [0u64, 1, 2, 3, 7, u32::MAX as u64, 1 << 62, i64::MAX as u64, u64::MAX];
    let texts = [
        "",
        "x",
        "tokens",
        "-tokens",
        "tokens*tokens",
        "9223372036854775807",
        "-9223372036854775807 - 1",
        "tokens - 9223372036854775807 - 1",
        "0.1 7ff0000000000000",
        "call",
        "part",
        "dot",
        "weight",
        "attention",
        "bool",
        "f32[tokens]",
        "f32[]",
        "ff",
    ];
    prop_oneof![
        prop::sample::select(numbers.to_vec()).prop_map(Value::from),
        prop::sample::select(texts.to_vec()).prop_map(Value::from),
        prop::sample::select(vec![
            json!(null),
            json!(true),
            json!(-1),
            json!(1e308),
            json!([]),
            json!({}),
            json!([[0, 0]])
        ]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damaged_text_panics(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3), 1..4)) {
        let mut bytes = written().0.clone().into_bytes();
        for (at, byte, kind) in edits {
            let i = at.index(bytes.len());
            match kind {
                0 => bytes[i] = byte,
                1 => bytes.insert(i, b"0123456789[]{}\",:-+*tokens"[byte as usize % 26]),
                _ => drop(bytes.remove(i)),
            }
        }
        judge(read_json(&String::from_utf8_lossy(&bytes)));
    }

    #[test]
    fn no_damaged_structure_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), scalars(), 0..4), 1..4),
    ) {
        let (_, whole, places) = written();
        let mut v = whole.clone();
        for (at, from, scalar, kind) in edits {
            let other = whole.pointer(at_path(places, from)).cloned().unwrap_or_default();
            let Some(place) = v.pointer_mut(at_path(places, at)) else { continue };
            match (kind, place) {
                (0, Value::Array(a)) => a.push(other),
                (1, Value::Array(a)) => drop(a.pop()),
                (1, Value::Object(o)) => drop_first(o),
                (2, place) => *place = other,
                (_, place) => *place = scalar,
            }
        }
        judge(from_json(&v));
    }
}

fn at_path(places: &[String], i: prop::sample::Index) -> &str {
    &places[i.index(places.len())]
}

fn drop_first(o: &mut serde_json::Map<String, Value>) {
    if let Some(key) = o.keys().next().cloned() {
        o.remove(&key);
    }
}
