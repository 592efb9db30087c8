//! The verifier. In: a graph, from a pass or from a file. Out: `Ok`, or the first invariant that the graph violates, with the
//! offending node. The functions below are the specification of a well-formed graph: they run between passes, to tell which pass
//! is wrong, and no later code checks these invariants again.

use crate::block::Block;
use crate::dim::{Dim, Factor, Symbol};
use crate::effects::Effects;
use crate::graph::{Graph, IrError, Node, NodeId};
use crate::ops::Op;
use crate::text;
use crate::ty::Type;
use foldhash::fast::RandomState;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Most levels of blocks in blocks. Models have two; the bound allows recursion over bodies on the stack.
pub const MAX_NESTING: usize = 16;

/// Most products in the number of elements of a tensor, expanded. Models have one or two; without a bound a shape of a few
/// hundred letters could expand to more products than fit into memory.
pub const MAX_TERMS: usize = 4096;

/// `Ok` when the graph and the bodies of its blocks satisfy every invariant of the IR.
pub fn verify(graph: &Graph) -> Result<(), IrError> {
    verify_since(graph, &Graph::default())
}

/// [`verify`] of a graph that was made of one that satisfies every invariant: what they share is not looked at again.
pub fn verify_since(graph: &Graph, before: &Graph) -> Result<(), IrError> {
    if graph.is_copy_of(before) {
        return Ok(());
    }
    check_graph(graph, before, &mut Vec::new())?;
    Effects::of(graph).map(|_| ())
}

fn check_graph<'a>(graph: &'a Graph, before: &Graph, path: &mut Vec<&'a str>) -> Result<(), IrError> {
    check_symbols(&graph.symbols).map_err(nowhere)?;
    let mut names = HashSet::new();
    for (i, block) in graph.blocks().iter().enumerate() {
        if !names.insert(&block.name) {
            return Err(nowhere(format!("two blocks are called `{}`", block.name)));
        }
        if path.len() >= MAX_NESTING {
            return Err(nowhere(format!("blocks nest more than {MAX_NESTING} deep")));
        }
        if path.contains(&block.name.as_str()) {
            return Err(nowhere(format!("block `{}` contains itself", block.name)));
        }
        let known = before.blocks().get(i).filter(|b| Arc::ptr_eq(b, block));
        if known.is_some() && graph.symbols == before.symbols {
            continue;
        }
        path.push(&block.name);
        check_graph(&block.graph, &Graph::default(), path)
            .and_then(|()| check_block(graph, block).map_err(nowhere))
            .map_err(|e| IrError { message: format!("in block `{}`: {}", block.name, e.message), ..e })?;
        path.pop();
    }
    if graph.is_copy_but_for_bodies(before) {
        return Ok(());
    }
    for id in graph.ids() {
        check_node(graph, graph.nodes(), id)
            .and_then(|()| check_types(&graph.symbols, graph.node(id)))
            .map_err(|m| graph.error_at(id, m))?;
    }
    check_distinct(graph)?;
    check_outputs(graph)
}

fn nowhere(message: String) -> IrError {
    IrError { origin: String::new(), message }
}

/// Names are not empty and have no control characters.
fn check_name(what: &str, text: &str) -> Result<(), String> {
    if text.is_empty() || has_control(text) {
        return Err(format!("`{}` is no name for {what}", text::escaped(text)));
    }
    Ok(())
}

fn has_control(text: &str) -> bool {
    let plain = |b: u8| (b' '..=b'~').contains(&b);
    !text.bytes().all(plain) && text.contains(char::is_control)
}

/// Symbols are declared once, with 1 <= min <= max, both multiples of `multiple_of`.
fn check_symbols(symbols: &[Symbol]) -> Result<(), String> {
    let mut seen = HashSet::new();
    for s in symbols {
        if Dim::parse(&s.name).ok() != Some(Dim::symbol(&s.name)) {
            return Err(format!("`{}` is no name for a symbol", text::escaped(&s.name)));
        }
        if !seen.insert(&s.name) {
            return Err(format!("symbol `{}` is declared twice", s.name));
        }
        let m = s.multiple_of;
        if s.min < 1 || s.min > s.max || m < 1 || s.min % m != 0 || s.max % m != 0 {
            return Err(format!(
                "symbol `{}` wants 1 <= min <= max, both multiples of multiple_of >= 1, got {} ..= {} by {m}",
                s.name, s.min, s.max
            ));
        }
    }
    Ok(())
}

/// A body's leaves are its parameters, each once; the body has outputs; the enclosing graph declares its symbols.
fn check_block(graph: &Graph, block: &Block) -> Result<(), String> {
    check_name("a block", &block.name)?;
    let leaves: HashSet<&str> = block.graph.nodes().iter().filter_map(|n| n.op.leaf_name()).collect();
    let mut seen = HashSet::new();
    for p in &block.params {
        if !seen.insert(p.as_str()) {
            return Err(format!("parameter `{p}` is listed twice"));
        }
        if !leaves.contains(p.as_str()) {
            return Err(format!("parameter `{p}` has no leaf in the body"));
        }
    }
    if let Some(l) = block.graph.nodes().iter().filter_map(|n| n.op.leaf_name()).find(|l| !seen.contains(l)) {
        return Err(format!("leaf `{l}` of the body is no parameter"));
    }
    if block.graph.outputs().is_empty() {
        return Err("the body has no output".into());
    }
    match block.graph.symbols.iter().find(|s| !graph.symbols.contains(s)) {
        Some(s) => Err(format!("the graph around it does not declare {}", text::symbol(s))),
        None => Ok(()),
    }
}

/// Arguments come before their users; several outputs are selected by `part`; the types are those of type inference (which checks
/// the number of arguments, the index of a `part` and the signature of a called block).
fn check_node(graph: &Graph, nodes: &[Node], id: NodeId) -> Result<(), String> {
    let node = &nodes[id.index()];
    if let Some(a) = node.args.iter().find(|a| **a >= id) {
        return Err(format!("refers to {a}, which does not come before it"));
    }
    let given = graph.infer(nodes, &node.op, &node.args)?;
    if given != node.types {
        return Err(format!("has the type {}, its rule gives {}", list(&node.types), list(&given)));
    }
    if given.is_empty() {
        return Err("has no output".into());
    }
    if let Some(n) = node.op.leaf_name() {
        check_name("a leaf", n)?;
    }
    if has_control(&node.origin) {
        return Err(format!("has the origin `{}`, which is not one line", text::escaped(&node.origin)));
    }
    Ok(())
}

/// `f32[2], i32[]`.
fn list(types: &[Type]) -> String {
    types.iter().map(Type::to_string).collect::<Vec<_>>().join(", ")
}

/// Sizes of a node use declared symbols, are not negative, and give a tensor that an address can span.
pub(crate) fn check_types(symbols: &[Symbol], node: &Node) -> Result<(), String> {
    for t in &node.types {
        let terms = t.shape.iter().try_fold(1usize, |n, d| n.checked_mul(d.products().count().max(1)));
        if terms.is_none_or(|n| n > MAX_TERMS) {
            return Err(format!(
                "has {} dimensions of too many products (at most {MAX_TERMS} in all)",
                t.rank()
            ));
        }
        let mut bytes = Some(t.dtype.bytes() as i128);
        for d in &t.shape {
            let n = upper_bound(d, symbols)?;
            bytes = bytes.and_then(|b| b.checked_mul(n));
        }
        if bytes.is_none_or(|b| b > i64::MAX as i128) {
            return Err(format!("is {t}, which at the bounds of its symbols is larger than any memory"));
        }
    }
    attribute_sizes(&node.op).into_iter().try_for_each(|d| upper_bound(d, symbols).map(|_| ()))
}

/// Sizes among the attributes that do not appear in the type.
fn attribute_sizes(op: &Op) -> Vec<&Dim> {
    match op {
        Op::Slice(s) => vec![&s.start],
        Op::Pad(p) => vec![&p.before, &p.after],
        Op::Attention(a) => vec![&a.span],
        Op::AttentionGrad(a) => vec![&a.forward.span],
        _ => vec![],
    }
}

/// An upper bound of a size over the bounds of its symbols, product by product.
fn upper_bound(dim: &Dim, symbols: &[Symbol]) -> Result<i128, String> {
    let mut sum = 0i128;
    for (coef, factors) in dim.products() {
        let mut product = Some(coef as i128);
        for factor in factors {
            let Factor::Symbol(n) = factor else {
                return Err(format!("has the size {dim}; only launches have `{factor}`"));
            };
            let s = symbols.iter().find(|s| s.name == *n);
            let s = s.ok_or_else(|| format!("uses the symbol `{n}`, which the graph does not declare"))?;
            product = product.and_then(|p| p.checked_mul(if coef < 0 { s.min } else { s.max } as i128));
        }
        let next = product.and_then(|p| sum.checked_add(p));
        sum = next.ok_or_else(|| format!("has the size {dim}, which overflows"))?;
    }
    if sum < 0 {
        return Err(format!("has the size {dim}, which is at most {sum}"));
    }
    Ok(sum)
}

/// Hash-consing: no two nodes have equal operators and arguments; no two leaves have one name.
fn check_distinct(graph: &Graph) -> Result<(), IrError> {
    let mut seen = HashMap::with_capacity_and_hasher(graph.nodes().len(), RandomState::default());
    let mut leaves = HashMap::new();
    for id in graph.ids() {
        let node = graph.node(id);
        if let Some(first) = seen.insert((&node.op, &node.args), id) {
            return Err(graph.error_at(id, format!("repeats {first}")));
        }
        if let Some(first) = node.op.leaf_name().and_then(|n| leaves.insert(n, id)) {
            return Err(graph.error_at(id, format!("has the name of {first}")));
        }
    }
    Ok(())
}

/// Outputs exist, have distinct names and a single value.
fn check_outputs(graph: &Graph) -> Result<(), IrError> {
    let mut seen = HashSet::new();
    for (n, id) in graph.outputs() {
        check_name("an output", n).map_err(nowhere)?;
        if !seen.insert(n) {
            return Err(nowhere(format!("output `{n}` is declared twice")));
        }
        match graph.nodes().get(id.index()) {
            None => return Err(nowhere(format!("output `{n}` is {id}, which does not exist"))),
            Some(node) if node.types.len() != 1 => {
                let message = format!("is the output `{n}` and has several outputs; take a `part`");
                return Err(graph.error_at(*id, message));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::ops::{Part, UnaryKind};

    /// x, w, x·wᵀ, its negative.
    fn sample() -> Graph {
        let mut g = Graph::new(vec![Symbol { name: "tokens".into(), min: 1, max: 8, multiple_of: 1 }]);
        let x = g.input("x", DType::F32, vec![Dim::symbol("tokens"), Dim::from(4)]).unwrap();
        let w = g.weight("w", DType::F32, &[3, 4]).unwrap();
        let y = g.linear(x, w).unwrap();
        g.unary(UnaryKind::Neg, y).unwrap();
        g
    }

    /// What is wrong with node `i` of the sample after `f`.
    fn broken(i: u32, f: impl FnOnce(&mut Vec<Node>)) -> String {
        let g = sample();
        let mut nodes = g.nodes().to_vec();
        f(&mut nodes);
        check_node(&g, &nodes, NodeId(i))
            .and_then(|()| check_types(&g.symbols, &nodes[i as usize]))
            .unwrap_err()
    }

    #[test]
    fn nodes_that_no_pass_may_make() {
        verify(&sample()).unwrap();
        assert_eq!(broken(2, |n| n[2].args[1] = NodeId(3)), "refers to %3, which does not come before it");
        assert_eq!(broken(2, |n| n[2].args[1] = NodeId(2)), "refers to %2, which does not come before it");
        assert_eq!(broken(3, |n| n[3].args.push(NodeId(0))), "takes 1 argument, got 2");
        let short = Type::new(DType::F32, [Dim::from(3)]);
        assert_eq!(broken(1, |n| n[1].types = vec![short]), "has the type f32[3], its rule gives f32[3, 4]");
        assert_eq!(broken(3, |n| n[3].types.clear()), "has the type , its rule gives f32[tokens, 3]");
        let two = |n: &mut Vec<Node>| n[2].types.push(Type::scalar(DType::F32));
        assert_eq!(broken(3, two), "uses %2, which has several outputs, without `part`");
        let far = |n: &mut Vec<Node>| n[3].op = Part { index: 1 }.into();
        assert_eq!(broken(3, far), "asks for output 1 of %2, which has 1");
        assert!(broken(0, |n| n[0].origin = "a\nb".into()).contains("`a\\nb`, which is not one line"));
    }

    #[test]
    fn the_largest_size_takes_each_product_at_its_bound() {
        let s = [Symbol { name: "t".into(), min: 2, max: 8, multiple_of: 2 }];
        let size = |d: &str| upper_bound(&Dim::parse(d).unwrap(), &s);
        assert_eq!(size("3*t + 1"), Ok(25));
        assert_eq!(size("10 - t"), Ok(8));
        assert_eq!(size("1 - t").unwrap_err(), "has the size -t + 1, which is at most -1");
        assert!(size("u").unwrap_err().contains("`u`, which the graph does not declare"));
        let big = [Symbol { name: "t".into(), min: 1, max: u64::MAX, multiple_of: 1 }];
        assert!(upper_bound(&Dim::parse("t*t*t").unwrap(), &big).unwrap_err().contains("overflows"));
    }
}
