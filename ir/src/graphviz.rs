//! Graphviz form of a graph. In: a graph. Out: text in the DOT language: operators with their types as nodes, values as edges, a
//! cluster for each block with a dashed edge from each call; weights, inputs and states have colours.

use crate::graph::{Graph, Node};
use crate::ops::Op;
use crate::shard::show_sharding;
use crate::text::{escaped, head};
use std::fmt::Write;

/// The graph in the DOT language.
pub fn to_dot(graph: &Graph) -> String {
    let mut out = String::from(
        "digraph {\n  compound=true;\n  node [shape=box, style=\"rounded,filled\", fillcolor=white];\n",
    );
    body(&mut out, graph, "n", "  ");
    out.push_str("}\n");
    out
}

/// The nodes of one graph; `prefix` makes the ids of different bodies distinct.
fn body(out: &mut String, graph: &Graph, prefix: &str, indent: &str) {
    for (i, block) in graph.blocks().iter().enumerate() {
        let inner = format!("{prefix}b{i}_");
        let _ = writeln!(out, "{indent}subgraph cluster_{inner} {{");
        let _ = writeln!(out, "{indent}  label=\"block {}\";", quoted(&block.name));
        body(out, &block.graph, &inner, &format!("{indent}  "));
        let _ = writeln!(out, "{indent}}}");
    }
    for id in graph.ids() {
        let node = graph.node(id);
        let types: Vec<String> = node.types.iter().map(|t| t.to_string()).collect();
        let placed = match node.sharding.is_empty() {
            true => String::new(),
            false => format!("\\n{}", quoted(&show_sharding(&node.sharding))),
        };
        let label = format!("{id} {}\\n{}{placed}", quoted(&head(graph, node)), quoted(&types.join(", ")));
        let _ = writeln!(out, "{indent}{prefix}{} [label=\"{label}\"{}];", id.0, colour(node));
        for (slot, a) in node.args.iter().enumerate() {
            // Numbered, since the arguments of `sub` or `dot` are not alike.
            let port = if node.args.len() > 1 { format!(" [label=\"{slot}\"]") } else { String::new() };
            let _ = writeln!(out, "{indent}{prefix}{} -> {prefix}{}{port};", a.0, id.0);
        }
        if let Op::Call(c) = &node.op
            && let Some((_, target)) =
                graph.blocks().get(c.block.0 as usize).and_then(|b| b.graph.outputs().first())
        {
            let inner = format!("{prefix}b{}_", c.block.0);
            let _ = writeln!(
                out,
                "{indent}{prefix}{} -> {inner}{} [style=dashed, lhead=cluster_{inner}];",
                id.0, target.0
            );
        }
    }
    for (i, (name, id)) in graph.outputs().iter().enumerate() {
        let _ = writeln!(out, "{indent}{prefix}out{i} [label=\"{}\", shape=plaintext];", quoted(name));
        let _ = writeln!(out, "{indent}{prefix}{} -> {prefix}out{i};", id.0);
    }
}

fn colour(node: &Node) -> &'static str {
    match node.op {
        Op::Input(_) => ", fillcolor=lightblue",
        Op::Weight(_) => ", fillcolor=khaki",
        Op::State(_) => ", fillcolor=lightpink",
        Op::Const(_) | Op::Iota(_) => ", fillcolor=gray92",
        Op::Call(_) => ", fillcolor=palegreen",
        _ if node.op.collective_axes().is_some() => ", fillcolor=orange",
        _ => "",
    }
}

fn quoted(text: &str) -> String {
    escaped(text).replace('\\', "\\\\").replace('"', "\\\"")
}
