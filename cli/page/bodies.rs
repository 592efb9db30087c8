//! Graphs as the page has them. In: the graph after each stage. Out: columns of texts and numbers, a body that several stages
//! share once, and of the graph around the layers every node that each layer has, once with how often.

use super::Strings;
use super::fold::{ranges, star};
use astrai_ir::plan::bound;
use astrai_ir::{Dim, Graph, Node, NodeId, Op, Type, text};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Name of the graph around the layers.
pub const MAIN: &str = "main";

/// Every body once.
#[derive(Default)]
pub struct Bodies<'a> {
    made: Vec<Made<'a>>,
    /// Bodies of a kind, by its name.
    of_kind: HashMap<String, Vec<usize>>,
}

struct Made<'a> {
    graph: &'a Graph,
    /// Names of the blocks that calls in it refer to.
    blocks: Vec<&'a str>,
    /// Which of the shown nodes each node is.
    at: Vec<usize>,
    shown: Value,
}

impl<'a> Bodies<'a> {
    /// The kinds of a graph, itself first: names and which body each is.
    pub fn kinds(&mut self, graph: &'a Graph, strings: &mut Strings) -> Vec<(String, usize)> {
        let mut kinds = vec![(MAIN.to_string(), self.body(MAIN, graph, strings))];
        for block in graph.blocks() {
            kinds.push((block.name.clone(), self.body(&block.name, &block.graph, strings)));
        }
        kinds
    }

    fn body(&mut self, kind: &str, graph: &'a Graph, strings: &mut Strings) -> usize {
        let known = self.of_kind.entry(kind.to_string()).or_default();
        if let Some(at) = known.iter().copied().rev().find(|at| self.made[*at].is(graph)) {
            return at;
        }
        known.push(self.made.len());
        let places = places(graph, kind == MAIN);
        let at = places.iter().map(|p| p.at).collect();
        let shown = Columns { graph, strings }.of(&places);
        self.made.push(Made { graph, blocks: names(graph), at, shown });
        self.made.len() - 1
    }

    /// The shown nodes that nodes of a body are, each once.
    pub fn nodes(&self, body: usize, nodes: &[NodeId]) -> Vec<usize> {
        let mut all: Vec<usize> = nodes.iter().map(|n| self.made[body].at[n.index()]).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// All of them for the page.
    pub fn finish(self) -> Vec<Value> {
        self.made.into_iter().map(|m| m.shown).collect()
    }
}

fn names(graph: &Graph) -> Vec<&str> {
    graph.blocks().iter().map(|b| b.name.as_str()).collect()
}

impl Made<'_> {
    fn is(&self, other: &Graph) -> bool {
        let same = |a: &Node, b: &Node| a.op == b.op && a.args == b.args && a.origin == b.origin;
        let (a, b) = (self.graph.nodes(), other.nodes());
        a.len() == b.len()
            && a.iter().zip(b).all(|(a, b)| same(a, b))
            && self.graph.outputs() == other.outputs()
            && self.blocks == names(other)
    }
}

/// Where a node is shown.
struct Place {
    /// Number among the shown nodes.
    at: usize,
    head: String,
    origin: String,
    /// Numbers that were taken out of its name and origin.
    instance: String,
}

/// Which nodes are one for the reader: in the graph around the layers (`fold`) those that differ by their layer alone.
fn places(graph: &Graph, fold: bool) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::with_capacity(graph.nodes().len());
    let mut counts: HashMap<(String, String, String), usize> = HashMap::new();
    let mut known: HashMap<(String, String, Vec<Type>, usize), usize> = HashMap::new();
    for node in graph.nodes() {
        let (head, origin) = (text::head(graph, node), node.origin.to_string());
        if !fold {
            places.push(Place { at: places.len(), head, origin, instance: String::new() });
            continue;
        }
        // A part, or a sum of what layers gave, is of the layer whose value it takes last.
        let inherited =
            || node.args.iter().rev().map(|a| &places[a.index()]).find(|p| !p.instance.is_empty());
        let (mut starred, mut instance) = star(&origin);
        let head = folded_head(node, head);
        if instance.is_empty() {
            instance = node.op.leaf_name().map(|n| star(n).1).unwrap_or_default();
        }
        if instance.is_empty()
            && let Some(from) = inherited()
        {
            instance = from.instance.clone();
            if starred.is_empty() {
                starred = from.origin.clone();
            }
        }
        let nth = counts.entry((head.clone(), starred.clone(), instance.clone())).or_default();
        let next = known.len();
        let at = *known.entry((head.clone(), starred.clone(), node.types.clone(), *nth)).or_insert(next);
        *nth += 1;
        places.push(Place { at, head, origin: starred, instance });
    }
    places
}

/// Operator and attributes without the numbers of the layer.
fn folded_head(node: &Node, head: String) -> String {
    match &node.op {
        // The parts of a joined weight are in its name.
        Op::Weight(w) => format!("weight {}", star(&w.name).0),
        Op::Call(c) => head.replace(&format!(" layer={}", c.layer), ""),
        op if op.leaf_name().is_some() => {
            head.split(' ').map(|word| star(word).0).collect::<Vec<_>>().join(" ")
        }
        _ => head,
    }
}

/// The columns of one body.
struct Columns<'a> {
    graph: &'a Graph,
    strings: &'a mut Strings,
}

impl Columns<'_> {
    /// `h`ead, `t`ype, `o`rigin, `a`rguments, `f`lops and `b`ytes of every shown node, and where several are one how many
    /// (`x`) and which (`i`); results as pairs of name and node.
    fn of(&mut self, places: &[Place]) -> Value {
        let count = places.iter().map(|p| p.at + 1).max().unwrap_or(0);
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); count];
        places.iter().enumerate().for_each(|(id, p)| members[p.at].push(id));
        let graph = self.graph;
        let args = |at: usize| {
            let mut all: Vec<usize> = Vec::new();
            for &id in &members[at] {
                let to = graph.nodes()[id].args.iter().map(|a| places[a.index()].at);
                match id == members[at][0] {
                    true => all.extend(to),
                    false => to.for_each(|t| {
                        if !all.contains(&t) {
                            all.push(t)
                        }
                    }),
                }
            }
            all
        };
        let work: Vec<[u64; 2]> = members.iter().map(|m| self.work(m[0])).collect();
        let mut shown = json!({
            "a": (0..count).map(args).collect::<Vec<_>>(),
            "f": work.iter().map(|w| w[0]).collect::<Vec<_>>(),
            "b": work.iter().map(|w| w[1]).collect::<Vec<_>>(),
        });
        let strings = &mut *self.strings;
        let mut column = |of: &dyn Fn(usize) -> String| {
            members.iter().map(|m| strings.of(&of(m[0]))).collect::<Vec<usize>>()
        };
        shown["h"] = json!(column(&|id| places[id].head.clone()));
        shown["o"] = json!(column(&|id| places[id].origin.clone()));
        shown["t"] = json!(column(&|id| types(&graph.nodes()[id])));
        if members.iter().any(|m| m.len() > 1) {
            let which = |m: &Vec<usize>| {
                let all: Vec<String> = m.iter().map(|id| places[*id].instance.clone()).collect();
                if m.len() > 1 { ranges(&all) } else { String::new() }
            };
            shown["x"] = json!(members.iter().map(Vec::len).collect::<Vec<_>>());
            shown["i"] = json!(members.iter().map(|m| strings.of(&which(m))).collect::<Vec<_>>());
        }
        shown["out"] = results(graph, places);
        shown
    }

    /// Operations of a node, and bytes that it reads and writes if it is a kernel by itself, at the symbols' upper bounds.
    fn work(&self, id: usize) -> [u64; 2] {
        let (g, node) = (self.graph, &self.graph.nodes()[id]);
        let free = node.op.is_view()
            || node.op.leaf_name().is_some()
            || matches!(node.op, Op::Part(_) | Op::Const(_) | Op::Call(_));
        if free || node.args.iter().any(|a| g.node(*a).types.len() != 1) {
            return [0, 0];
        }
        let size = |d: &Dim| bound(&g.symbols, d).unwrap_or(u64::MAX);
        let args: Vec<&Type> = node.args.iter().map(|a| g.ty(*a)).collect();
        let all = args.iter().copied().chain(&node.types);
        let bytes = all.fold(0u64, |sum, t| sum.saturating_add(size(&t.bytes())));
        [size(&node.op.flops(&args, &node.types)), bytes]
    }
}

fn types(node: &Node) -> String {
    node.types.iter().map(Type::to_string).collect::<Vec<_>>().join(", ")
}

/// Names of the results with the node each is; those that differ by their layer alone once.
fn results(graph: &Graph, places: &[Place]) -> Value {
    let mut all: Vec<(String, usize)> = Vec::new();
    for (name, id) in graph.outputs() {
        let at = places[id.index()].at;
        let name = if places[id.index()].instance.is_empty() { name.clone() } else { star(name).0 };
        if !all.iter().any(|(n, a)| *a == at && *n == name) {
            all.push((name, at));
        }
    }
    json!(all)
}
