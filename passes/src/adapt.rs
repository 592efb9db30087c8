//! Low-rank adapters (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353). In: a graph of layers, and which of their linear layers are
//! adapted. Out: the same graph whose weights are all frozen, with two trained factors beside each adapted weight:
//! y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ. With DoRA a trained magnitude takes the place of the norm of each row of W + s·B·A, and that norm is a
//! constant to the gradient. The product B·A is never made: the norm is summed from products with one side of the rank.

use astrai_ir::ops::{Call, Detach, Dot, Op, ReduceKind, UnaryKind, Weight};
use astrai_ir::{Block, BlockId, DType, Dim, Graph, IrError, NodeId, Type};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Before the name of an adapted module in the names of its factors, as PEFT writes them.
const BASE: &str = "base_model.model.";
/// Between a module and its factor.
const LORA: &str = ".lora_";
/// What follows a module's name in that of its weight.
pub(crate) const WEIGHT: &str = ".weight";

/// The factors of one linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    /// Rows of A, columns of B.
    pub rank: usize,
    /// What their product is multiplied by.
    pub scale: f64,
}

/// What is adapted, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adapter {
    /// Adapted linear layers by name: that of the weight without `.weight`.
    pub modules: BTreeMap<String, Factors>,
    /// Whether magnitudes of rows are trained apart from their directions.
    pub dora: bool,
}

impl Adapter {
    /// Names and shapes of the trained tensors of a module whose weight is `[out, in]`: A `[rank, in]`, B `[out, rank]`, with DoRA the
    /// magnitude `[out]`. None where the module is not adapted.
    pub fn tensors(&self, module: &str, [rows, columns]: [usize; 2]) -> Vec<(String, Vec<usize>)> {
        let Some(Factors { rank, .. }) = self.modules.get(module) else { return vec![] };
        let shapes = [vec![*rank, columns], vec![rows, *rank], vec![rows]];
        let names = names(&format!("{BASE}{module}"));
        names.into_iter().zip(shapes).take(if self.dora { 3 } else { 2 }).collect()
    }
}

/// Names of A, B and the magnitude of a module.
fn names(module: &str) -> [String; 3] {
    ["A.weight", "B.weight", "magnitude_vector"].map(|part| format!("{module}{LORA}{part}"))
}

/// The linear layers in the blocks of a graph that can be adapted, by name, with the `[out, in]` of their weights: those whose weight one
/// product reads and nothing else. Routers and experts are none, nor are embedding and head.
pub fn linear_layers(graph: &Graph) -> BTreeMap<String, [usize; 2]> {
    let of_block = |b: &Arc<Block>| {
        let users = b.graph.users();
        let leaf = |p: &String| b.leaf(p).and_then(|leaf| linear(&b.graph, &users, leaf));
        b.params.iter().map(leaf).collect::<Vec<_>>()
    };
    let shapes: Vec<_> = graph.blocks().iter().map(of_block).collect();
    let mut found = BTreeMap::new();
    for node in graph.nodes() {
        let Op::Call(c) = &node.op else { continue };
        for (arg, shape) in node.args.iter().zip(&shapes[c.block.0 as usize]) {
            if let (Some(module), Some(shape)) = (module_of(graph, *arg), shape) {
                found.insert(module.to_string(), *shape);
            }
        }
    }
    found
}

/// The module of which this is the weight.
pub(crate) fn module_of(g: &Graph, id: NodeId) -> Option<&str> {
    if let Op::Weight(w) = &g.node(id).op { w.name.strip_suffix(WEIGHT) } else { None }
}

/// The shape of a weight that one plain product reads, which is no router's.
pub(crate) fn linear(g: &Graph, users: &[Vec<NodeId>], leaf: NodeId) -> Option<[usize; 2]> {
    let [dot] = users[leaf.index()].as_slice() else { return None };
    let node = g.node(*dot);
    let (Op::Dot(Dot { batch, contract }), [x, w]) = (&node.op, node.args.as_slice()) else { return None };
    let plain = batch.is_empty() && *contract == [(g.ty(*x).rank() - 1, 1)] && *w == leaf;
    // A router's logits may have a bias before its choice.
    let routes = |id: &NodeId| matches!(g.node(*id).op, Op::Route(_));
    let routed = users[dot.index()].iter().any(|u| routes(u) || users[u.index()].iter().any(routes));
    match g.ty(leaf).shape.iter().map(|d| d.size()).collect::<Vec<_>>()[..] {
        [Some(rows), Some(columns)] if plain && !routed => Some([rows, columns]),
        _ => None,
    }
}

/// For each adapted weight among the parameters of a block its factors.
type Targets = BTreeMap<String, Factors>;

/// The graph with these adapters.
///
/// # Errors
/// A module is no linear layer of the graph.
pub fn adapt(graph: &Graph, adapter: &Adapter) -> Result<Graph, IrError> {
    let layers = linear_layers(graph);
    if let Some(none) = adapter.modules.keys().find(|m| !layers.contains_key(*m)) {
        return Err(graph.error(format!("`{none}` is no linear layer that can be adapted")));
    }
    // A kind of layer whose layers are adapted differently becomes several.
    let mut kinds: Vec<(BlockId, Targets)> = Vec::new();
    let mut of_call: HashMap<NodeId, usize> = HashMap::new();
    for id in graph.ids() {
        let node = graph.node(id);
        let Op::Call(c) = &node.op else { continue };
        let factors = |arg: &NodeId| module_of(graph, *arg).and_then(|m| adapter.modules.get(m));
        let bound = graph.block(c.block).params.iter().zip(&node.args);
        let targets = bound.filter_map(|(p, arg)| Some((p.clone(), *factors(arg)?))).collect();
        let kind = (c.block, targets);
        let at = kinds.iter().position(|k| *k == kind).unwrap_or(kinds.len());
        if at == kinds.len() {
            kinds.push(kind);
        }
        of_call.insert(id, at);
    }
    let mut copies: BTreeSet<BlockId> = BTreeSet::new();
    let mut blocks = Vec::with_capacity(kinds.len());
    for (of, targets) in &kinds {
        let block = graph.block(*of);
        let name = match copies.insert(*of) {
            true => block.name.clone(),
            false => format!("{}_{}", block.name, blocks.len()),
        };
        blocks.push(Arc::new(Block::new(&name, adapted(&block.graph, targets, adapter.dora)?)));
    }
    graph.rebuild_with(blocks.clone(), |out, id, args| match &graph.node(id).op {
        Op::Weight(w) => out.push(Weight { frozen: true, ..w.clone() }, &[]),
        Op::Call(c) => {
            let at = of_call[&id];
            let before = &graph.block(c.block).params;
            let own: HashMap<&str, NodeId> =
                before.iter().map(String::as_str).zip(args.iter().copied()).collect();
            let mut bound = Vec::with_capacity(blocks[at].params.len());
            for (param, ty) in blocks[at].params.iter().zip(blocks[at].param_types()?) {
                bound.push(match own.get(param.as_str()) {
                    Some(arg) => *arg,
                    None => {
                        let missing = || out.error(format!("parameter `{param}` has no argument"));
                        let (module, part) = param.split_once(LORA).ok_or_else(missing)?;
                        let weight = own.get(format!("{module}{WEIGHT}").as_str());
                        let module = weight.and_then(|w| module_of(out, *w)).ok_or_else(missing)?;
                        let w = Weight::new(&format!("{BASE}{module}{LORA}{part}"), ty.clone());
                        out.push(Weight { keeps_type: keeps_type(part), ..w }, &[])?
                    }
                });
            }
            out.push(Call { block: BlockId(at as u32), layer: c.layer }, &bound)
        }
        op => out.push_exact(op.clone(), args),
    })
}

/// A magnitude rounded to a narrow type would scale its row even where nothing was learnt.
fn keeps_type(part: &str) -> bool {
    part.starts_with("magnitude")
}

/// The body of a block, its weights frozen, with factors beside these.
fn adapted(body: &Graph, targets: &Targets, dora: bool) -> Result<Graph, IrError> {
    body.rebuild(|out, id, args| {
        let node = body.node(id);
        match &node.op {
            Op::Weight(w) => out.push(Weight { frozen: true, ..w.clone() }, &[]),
            Op::Dot(_) => {
                let y = out.push(node.op.clone(), args)?;
                let leaf = body.node(node.args[1]).op.leaf_name();
                match leaf.and_then(|name| Some((name.strip_suffix(WEIGHT)?, targets.get(name)?))) {
                    Some((module, factors)) => factored(out, y, [args[0], args[1]], (module, *factors), dora),
                    None => Ok(y),
                }
            }
            op => out.push_exact(op.clone(), args),
        }
    })
}

/// `y` = x·Wᵀ with what the factors add to it.
fn factored(
    g: &mut Graph,
    y: NodeId,
    [x, w]: [NodeId; 2],
    (module, Factors { rank, scale }): (&str, Factors),
    dora: bool,
) -> Result<NodeId, IrError> {
    let size = |axis: usize| g.ty(w).shape[axis].size().unwrap_or(0);
    let ([rows, columns], [a, b, magnitude]) = ([size(0), size(1)], names(module));
    let a = g.weight(&a, DType::F32, &[rank, columns])?;
    let b = g.weight(&b, DType::F32, &[rows, rank])?;
    let low = g.linear(x, a)?;
    let low = g.scale(low, scale)?; // [.., rank]
    let more = g.linear(low, b)?;
    let y = g.add(y, more)?;
    if !dora {
        return Ok(y);
    }
    let ty = Type::new(DType::F32, [Dim::from(rows)]);
    let m = g.push(Weight { keeps_type: true, ..Weight::new(&magnitude, ty) }, &[])?;
    let norm = row_norms(g, w, [a, b], scale)?;
    let norm = g.push(Detach {}, &[norm])?;
    let ratio = g.div(m, norm)?;
    g.mul(y, ratio)
}

/// ‖W + s·B·A‖ of each row: √(‖W‖² + 2s·(W·Aᵀ)∘B + s²·(B·(A·Aᵀ))∘B), the products summed along the row.
fn row_norms(g: &mut Graph, w: NodeId, [a, b]: [NodeId; 2], scale: f64) -> Result<NodeId, IrError> {
    let cross = g.linear(w, a)?;
    let gram = g.linear(a, a)?;
    let inner = g.linear(b, gram)?;
    let mut along = |x: NodeId, y: NodeId, factor: f64| {
        let products = g.mul(x, y)?;
        let sum = g.reduce(ReduceKind::Sum, products, &[1])?;
        g.scale(sum, factor)
    };
    let [own, cross, inner] =
        [along(w, w, 1.0)?, along(cross, b, 2.0 * scale)?, along(inner, b, scale * scale)?];
    let sum = g.add(own, cross)?;
    let sum = g.add(sum, inner)?;
    g.unary(UnaryKind::Sqrt, sum)
}
