//! JSON serialisation of graphs. In: a graph, or untrusted text. Out: the same graph node for node, one node a line, constants and
//! real attributes as bits; or one line that says where the text is malformed. Stored types are not trusted but compared with
//! those of type inference.

use crate::block::Block;
use crate::dim::Symbol;
use crate::graph::{Graph, IrError, NodeId};
use crate::ops::Op;
use crate::shard::{Placement, Sharding};
use crate::text::escaped;
use crate::ty::Type;
use crate::verify::{MAX_NESTING, MAX_TERMS, check_types, verify};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Version of the format, under the key `astrai_ir`.
pub const VERSION: u64 = 1;

/// Most characters of an error message, which may quote an untrusted file.
const MAX_MESSAGE: usize = 400;
/// Most nodes of a graph, or of one of its blocks: those of the update of a model of 1,000 layers and half as many more.
pub const MAX_NODES: usize = 1 << 18;

const GRAPH_KEYS: [&str; 4] = ["symbols", "blocks", "nodes", "outputs"];

/// The graph as a JSON value.
pub fn to_json(graph: &Graph) -> Value {
    let mut map = Map::new();
    map.insert("astrai_ir".into(), VERSION.into());
    graph_to(&mut map, graph);
    map.into()
}

fn graph_to(map: &mut Map<String, Value>, graph: &Graph) {
    let symbol =
        |s: &Symbol| json!({"name": &*s.name, "min": s.min, "max": s.max, "multiple_of": s.multiple_of});
    let block = |b: &Arc<Block>| {
        let mut map = Map::new();
        map.insert("name".into(), b.name.clone().into());
        map.insert("params".into(), b.params.clone().into());
        graph_to(&mut map, &b.graph);
        Value::from(map)
    };
    let node = |id: NodeId| {
        let n = graph.node(id);
        let mut node = json!({
            "id": id.0,
            "op": n.op.name(),
            "attributes": n.op.attributes(),
            "args": n.args.iter().map(|a| a.0).collect::<Vec<_>>(),
            "type": n.types.iter().map(Type::to_string).collect::<Vec<_>>(),
            "origin": &*n.origin,
        });
        if !n.sharding.is_empty() {
            node["sharding"] = n.sharding.iter().map(|(axis, p)| format!("{axis}={p}")).collect();
        }
        node
    };
    let outputs = graph.outputs().iter().map(|(name, id)| json!({"name": name, "node": id.0}));
    map.insert("symbols".into(), graph.symbols.iter().map(symbol).collect());
    map.insert("blocks".into(), graph.blocks().iter().map(block).collect());
    map.insert("nodes".into(), graph.ids().map(node).collect());
    map.insert("outputs".into(), outputs.collect());
}

/// The graph as text: one symbol, node or output a line. Equal graphs give equal text.
pub fn write_json(graph: &Graph) -> String {
    let mut out = String::new();
    lay_out(&mut out, &to_json(graph), "");
    out.push('\n');
    out
}

/// Prints graphs over several lines, every other value on one.
fn lay_out(out: &mut String, value: &Value, indent: &str) {
    let Some(map) = value.as_object().filter(|m| m.contains_key("nodes")) else {
        out.push_str(&value.to_string());
        return;
    };
    out.push('{');
    for (i, (key, value)) in map.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        out.push_str(&format!("{comma}\n{indent} {}: ", Value::from(key.as_str())));
        match value.as_array().filter(|a| !a.is_empty() && GRAPH_KEYS.contains(&key.as_str())) {
            None => out.push_str(&value.to_string()),
            Some(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(&format!("{}\n{indent}  ", if i == 0 { "" } else { "," }));
                    lay_out(out, item, &format!("{indent}  "));
                }
                out.push_str(&format!("\n{indent} ]"));
            }
        }
    }
    out.push_str(&format!("\n{indent}}}"));
}

/// The graph that [`write_json`] wrote.
pub fn read_json(text: &str) -> Result<Graph, IrError> {
    let value: Value = serde_json::from_str(text).map_err(|e| error("", format!("is not JSON: {e}")))?;
    from_json(&value)
}

/// The graph that [`to_json`] gave, verified.
pub fn from_json(value: &Value) -> Result<Graph, IrError> {
    let top = value.as_object().ok_or_else(|| error("", "is not an object".into()))?;
    match top.get("astrai_ir").map(|v| (v.as_u64(), v)) {
        None => return Err(error("", "has no key `astrai_ir`; it is not a graph".into())),
        Some((Some(VERSION), _)) => {}
        Some((_, v)) => {
            return Err(error("", format!("`astrai_ir` is {v}; this program reads version {VERSION}")));
        }
    }
    let keys = [&["astrai_ir"][..], &GRAPH_KEYS].concat();
    let graph = graph_from(&Object::new(String::new(), value, &keys)?, 0)?;
    verify(&graph).map_err(|e| error("", e.to_string()))?;
    Ok(graph)
}

fn graph_from(object: &Object, depth: usize) -> Result<Graph, IrError> {
    let mut symbols = Vec::new();
    for (i, v) in object.list("symbols")?.iter().enumerate() {
        let s = object.inside(format!("symbol {i}"), v, &["name", "min", "max", "multiple_of"])?;
        let (min, max) = (s.number("min")?, s.number("max")?);
        symbols.push(Symbol {
            name: s.text("name")?.into(),
            min,
            max,
            multiple_of: s.number("multiple_of")?,
        });
    }
    let mut graph = Graph::new(symbols);
    for (i, v) in object.list("blocks")?.iter().enumerate() {
        if depth >= MAX_NESTING {
            return Err(object.error(format!("blocks nest more than {MAX_NESTING} deep")));
        }
        let keys = [&["name", "params"][..], &GRAPH_KEYS].concat();
        graph.add_block(Arc::new(block_from(&object.inside(format!("block {i}"), v, &keys)?, depth)?));
    }
    for (i, v) in object.list("nodes")?.iter().enumerate() {
        let keys = ["id", "op", "attributes", "args", "type", "origin", "sharding"];
        node_from(&mut graph, i, &object.inside(format!("node {i}"), v, &keys)?)?;
    }
    for (i, v) in object.list("outputs")?.iter().enumerate() {
        let o = object.inside(format!("output {i}"), v, &["name", "node"])?;
        let id = o.number("node")?;
        if id >= graph.nodes().len() as u64 {
            return Err(o.error(format!("`node` is {id}, there are {} nodes", graph.nodes().len())));
        }
        graph.set_output(o.text("name")?, NodeId(id as u32)).map_err(|e| o.error(e.message))?;
    }
    Ok(graph)
}

fn block_from(object: &Object, depth: usize) -> Result<Block, IrError> {
    let mut params = Vec::new();
    for p in object.list("params")? {
        params.push(
            p.as_str().ok_or_else(|| object.error("`params` must be a list of strings".into()))?.to_string(),
        );
    }
    let name = object.text("name")?.to_string();
    let graph = graph_from(object, depth + 1)?;
    if graph.outputs().is_empty() {
        return Err(object.error("`outputs` is empty; a body returns something".into()));
    }
    Ok(Block { name, graph, params })
}

fn node_from(graph: &mut Graph, i: usize, object: &Object) -> Result<(), IrError> {
    if i >= MAX_NODES {
        return Err(object.error(format!("there are more than {MAX_NODES} nodes")));
    }
    let id = object.number("id")?;
    if id != i as u64 || id >= u32::MAX as u64 {
        return Err(object.error(format!("`id` is {id}; ids count up from 0")));
    }
    let mut args = Vec::new();
    for a in object.list("args")? {
        match a.as_u64() {
            Some(a) if a < id => args.push(NodeId(a as u32)),
            Some(a) => return Err(object.error(format!("`args` has {a}, which does not come before it"))),
            None => return Err(object.error("`args` must be a list of ids".into())),
        }
    }
    let attributes = object.get("attributes")?;
    if !attributes.is_object() || most_terms(attributes) > MAX_TERMS {
        return Err(object.error("`attributes` must be an object with shapes of few products".into()));
    }
    let op = Op::from_attributes(object.text("op")?, attributes.clone());
    let op = op.map_err(|m| object.error(format!("`op` and `attributes`: {m}")))?;
    let origin: Arc<str> = object.text("origin")?.into();
    let made = match &op {
        Op::Weight(w) if w.parts.iter().try_fold(0usize, |n, p| n.checked_add(p.rows)).is_none() => {
            return Err(object.error("`attributes`: the rows of `parts` overflow".into()));
        }
        _ => graph.with_origin(&origin, |g| g.push_exact(op, &args)),
    };
    let made = made.map_err(|e| object.error(e.message))?;
    if made.index() != i {
        return Err(object.error(format!("repeats node {}", made.0)));
    }
    let sharding = sharding_from(object)?;
    graph.note_sharding(made, &sharding);
    let node = graph.node(made);
    check_types(&graph.symbols, node).map_err(|m| object.error(format!("`{}` {m}", node.op.name())))?;
    let stored = object.list("type")?;
    if stored.len() != node.types.len() || !stored.iter().zip(&node.types).all(|(s, t)| *s == *t.to_string())
    {
        let given: Vec<String> = node.types.iter().map(Type::to_string).collect();
        return Err(object.error(format!(
            "`type` is {}, the rule gives {}",
            Value::from(stored.clone()),
            given.join(", ")
        )));
    }
    Ok(())
}

/// The placements of a node, none where there is no such key.
fn sharding_from(object: &Object) -> Result<Sharding, IrError> {
    if !object.map.contains_key("sharding") {
        return Ok(Sharding::new());
    }
    let one = |v: &Value| {
        let text = v.as_str().and_then(|t| t.split_once('='));
        let (axis, place) =
            text.ok_or_else(|| object.error(format!("`sharding` has {v}, no axis=placement")))?;
        let place = Placement::parse(place).map_err(|m| object.error(format!("`sharding`: {m}")))?;
        Ok((axis.to_string(), place))
    };
    object.list("sharding")?.iter().map(one).collect()
}

/// An upper bound on the products of any list of sizes in the value, expanded, from the text of the sizes. It is checked before
/// type inference, which expands them.
fn most_terms(value: &Value) -> usize {
    let signs = |v: &Value| v.as_str().map_or(1, |s| 1 + s.matches(['+', '-']).count());
    match value {
        Value::Array(a) => {
            let product = a.iter().fold(1usize, |n, v| n.saturating_mul(signs(v)));
            a.iter().map(most_terms).fold(product, usize::max)
        }
        Value::Object(o) => o.values().map(most_terms).max().unwrap_or(1),
        v => signs(v),
    }
}

/// An object of the file and its place, for errors.
struct Object<'a> {
    place: String,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    /// `Err` when the value is no object or has unknown keys.
    fn new(place: String, value: &'a Value, keys: &[&str]) -> Result<Object<'a>, IrError> {
        let map = value.as_object().ok_or_else(|| error(&place, "must be an object".into()))?;
        let object = Object { place, map };
        match map.keys().find(|k| !keys.contains(&k.as_str())) {
            Some(k) => Err(object.error(format!("`{k}` is no key here; known: {}", keys.join(", ")))),
            None => Ok(object),
        }
    }

    fn inside(&self, place: String, value: &'a Value, keys: &[&str]) -> Result<Object<'a>, IrError> {
        let place = if self.place.is_empty() { place } else { format!("{}, {place}", self.place) };
        Object::new(place, value, keys)
    }

    fn get(&self, key: &str) -> Result<&'a Value, IrError> {
        self.map.get(key).ok_or_else(|| self.error(format!("the key `{key}` is missing")))
    }

    fn text(&self, key: &str) -> Result<&'a str, IrError> {
        self.get(key)?.as_str().ok_or_else(|| self.error(format!("`{key}` must be a string")))
    }

    fn number(&self, key: &str) -> Result<u64, IrError> {
        let n = self.get(key)?.as_u64();
        n.ok_or_else(|| self.error(format!("`{key}` must be an integer from 0 to 2^64 - 1")))
    }

    fn list(&self, key: &str) -> Result<&'a Vec<Value>, IrError> {
        self.get(key)?.as_array().ok_or_else(|| self.error(format!("`{key}` must be a list")))
    }

    fn error(&self, message: String) -> IrError {
        error(&self.place, message)
    }
}

/// An error of one line of bounded length, whatever the file contains.
fn error(place: &str, message: String) -> IrError {
    let mut line =
        if place.is_empty() { format!("graph: {message}") } else { format!("graph: {place}: {message}") };
    if let Some((at, _)) = line.char_indices().nth(MAX_MESSAGE) {
        line.truncate(at);
        line.push('…');
    }
    IrError { origin: String::new(), message: escaped(&line) }
}
