//! Text form of a graph. In: a graph. Out: lines for the terminal and for snapshot tests: one node a line with its operator,
//! arguments, attributes, type and origin. It is not read back; [`json`](crate::json) is.

use crate::dim::Symbol;
use crate::graph::{Graph, Node, NodeId};
use crate::ops::{Const, Op};
use crate::shard::show_sharding;
use serde_json::Value;
use std::fmt::{self, Write};

/// Most elements of a constant that are printed.
const MAX_ELEMENTS: usize = 8;

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph")?;
        if !self.symbols.is_empty() {
            write!(f, " ({})", self.symbols.iter().map(symbol).collect::<Vec<_>>().join(", "))?;
        }
        writeln!(f)?;
        lines(f, self, "  ")
    }
}

fn lines(f: &mut fmt::Formatter<'_>, graph: &Graph, indent: &str) -> fmt::Result {
    for block in graph.blocks() {
        writeln!(f, "{indent}block {} ({})", escaped(&block.name), escaped(&block.params.join(", ")))?;
        lines(f, &block.graph, &format!("{indent}  "))?;
    }
    for id in graph.ids() {
        let node = graph.node(id);
        write!(f, "{indent}{id} = {}", node_text(graph, node))?;
        if !node.origin.is_empty() {
            write!(f, "   # {}", escaped(&node.origin))?;
        }
        writeln!(f)?;
    }
    let outputs: Vec<String> =
        graph.outputs().iter().map(|(n, id)| format!("{} = {id}", escaped(n))).collect();
    if !outputs.is_empty() {
        writeln!(f, "{indent}return {}", outputs.join(", "))?;
    }
    Ok(())
}

/// `tokens in 8..=8192 by 8`.
pub(crate) fn symbol(s: &Symbol) -> String {
    let by = if s.multiple_of == 1 { String::new() } else { format!(" by {}", s.multiple_of) };
    format!("{} in {}..={}{by}", escaped(&s.name), s.min, s.max)
}

/// `dot %1, %2 contract=[(1,1)] : f32[tokens, 64]`.
pub fn node_text(graph: &Graph, node: &Node) -> String {
    let mut text = head(graph, node);
    if !node.args.is_empty() {
        let args: Vec<String> = node.args.iter().map(NodeId::to_string).collect();
        text.insert_str(node.op.name().len(), &format!(" {}", args.join(", ")));
    }
    let types: Vec<String> = node.types.iter().map(|t| t.to_string()).collect();
    let gap = if node.op.leaf_name().is_some() { "" } else { " " };
    let placed = match node.sharding.is_empty() {
        true => String::new(),
        false => format!(" @ {}", show_sharding(&node.sharding)),
    };
    text + gap + ": " + &types.join(", ") + &placed
}

/// Operator and attributes, without arguments: `dot contract=[(1,1)]`.
pub fn head(graph: &Graph, node: &Node) -> String {
    let mut text = node.op.name().to_string();
    if let Some(name) = node.op.leaf_name() {
        let _ = write!(text, " {}", escaped(name));
    }
    if let Op::Const(c) = &node.op {
        let _ = write!(text, " {}", elements(c));
        return text;
    }
    let attributes = node.op.attributes();
    for (key, value) in attributes.as_object().into_iter().flatten() {
        // A leaf's name and any `ty` are on the line already.
        if key == "ty" || (key == "name" && node.op.leaf_name().is_some()) {
            continue;
        }
        match (&node.op, value) {
            (Op::Call(c), _) if key == "block" => {
                let name = graph.blocks().get(c.block.0 as usize).map_or("?", |b| &b.name);
                let _ = write!(text, " block={}", escaped(name));
            }
            (_, Value::Null | Value::Bool(false)) => {}
            (_, Value::Array(a)) if a.is_empty() => {}
            (_, Value::Bool(true)) => text = text + " " + key,
            _ => {
                let _ = write!(text, " {key}={}", attribute(value, false));
            }
        }
    }
    text
}

fn attribute(value: &Value, inside: bool) -> String {
    match value {
        Value::String(s) => match s.split_once(' ') {
            Some((number, bits)) if bits.len() == 16 && bits.bytes().all(|b| b.is_ascii_hexdigit()) => {
                number.into()
            }
            _ => escaped(&s.replace(' ', "")),
        },
        Value::Array(a) => {
            let all = a.iter().map(|v| attribute(v, true)).collect::<Vec<_>>().join(",");
            if inside { format!("({all})") } else { format!("[{all}]") }
        }
        Value::Object(o) => {
            let all: Vec<String> = o.iter().map(|(k, v)| format!("{k}={}", attribute(v, true))).collect();
            format!("{{{}}}", all.join(" "))
        }
        other => other.to_string(),
    }
}

fn elements(c: &Const) -> String {
    if let Some(x) = c.as_scalar().filter(|_| c.shape.is_empty()) {
        return x.to_string();
    }
    let n = c.bits.len() / c.dtype.bytes();
    let shown: Vec<String> = (0..n.min(MAX_ELEMENTS)).map(|i| c.at(i).to_string()).collect();
    let more = if n > MAX_ELEMENTS { format!(", … {n} in all") } else { String::new() };
    format!("[{}{more}]", shown.join(", "))
}

/// The text with control characters escaped, so that it prints on one line.
pub(crate) fn escaped(text: &str) -> String {
    if !text.contains(char::is_control) {
        return text.to_string();
    }
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
