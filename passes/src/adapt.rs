//! Low-rank adapters (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353). In: a graph of layers, and which of their linear layers are
//! adapted. Out: the same graph whose weights are all frozen, with two trained factors beside each adapted weight:
//! y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ. Experts' factors lie one after another as their matrices do, and meet the same rows in grouped products. With DoRA a trained magnitude takes the place of the norm of each row of W + s·B·A, and that norm is a
//! constant to the gradient. The product B·A is never made: the norm is summed from products with one side of the rank.

use astrai_ir::ops::{Call, Detach, Dot, GroupedDot, Op, ReduceKind, Rows, UnaryKind, Weight};
use astrai_ir::shard::Shard;
use astrai_ir::{Block, BlockId, DType, Dim, Graph, IrError, Node, NodeId, Placement, Type};
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
/// product reads and nothing else, and the matrices of experts. Routers are none, nor are embedding and head.
pub fn linear_layers(graph: &Graph) -> BTreeMap<String, [usize; 2]> {
    let of_block = |b: &Arc<Block>| {
        let users = b.graph.users();
        let leaf = |p: &String| b.leaf(p).and_then(|leaf| product(&b.graph, &users, leaf));
        b.params.iter().map(leaf).collect::<Vec<_>>()
    };
    let products: Vec<_> = graph.blocks().iter().map(of_block).collect();
    let mut found = BTreeMap::new();
    for node in graph.nodes() {
        let Op::Call(c) = &node.op else { continue };
        for (arg, product) in node.args.iter().zip(&products[c.block.0 as usize]) {
            if let (Some(modules), Some(p)) = (modules_of(graph, *arg), product) {
                found.extend(modules.iter().map(|m| (m.to_string(), [p.rows, p.columns])));
            }
        }
    }
    found
}

/// What reads a weight of one matrix or several of equal shape, each of a linear layer.
#[derive(Clone, Copy)]
struct Product {
    /// Rows and columns of each matrix.
    rows: usize,
    columns: usize,
    /// Matrices that one row of the input meets, whose results stand side by side.
    beside: usize,
    /// Whether rows meet the matrices of their group, of their expert.
    grouped: bool,
}

/// The product that reads this weight, if one does and nothing else: a plain one, or one of groups whose result is only read matrix by matrix.
fn product(g: &Graph, users: &[Vec<NodeId>], leaf: NodeId) -> Option<Product> {
    let ([dot], Op::Weight(w)) = (users[leaf.index()].as_slice(), &g.node(leaf).op) else { return None };
    if let (Some([rows, columns]), []) = (linear(g, users, leaf), w.parts.as_slice()) {
        return Some(Product { rows, columns, beside: 1, grouped: false });
    }
    let node = g.node(*dot);
    let (Op::GroupedDot(GroupedDot { transposed: false }), [_, weight, offsets]) =
        (&node.op, node.args.as_slice())
    else {
        return None;
    };
    let groups = g.ty(*offsets).shape[0].size()?.checked_sub(1).filter(|n| *n > 0)?;
    let (rows, columns) = (w.parts.first()?.rows, g.ty(leaf).shape[1].size()?);
    let beside = w.parts.len() / groups;
    let alike = w.parts.iter().all(|p| p.rows == rows) && w.parts.len() == groups * beside && beside > 0;
    let apart = beside == 1 || users[dot.index()].iter().all(|u| matrix(g, *u, rows).is_some());
    (alike && apart && *weight == leaf).then_some(Product { rows, columns, beside, grouped: true })
}

/// Which of several results of so many columns side by side this slice is.
fn matrix(g: &Graph, slice: NodeId, columns: usize) -> Option<usize> {
    let Op::Slice(s) = &g.node(slice).op else { return None };
    let start = s.start.size()?;
    (s.axis == 1 && s.len.size()? == columns && start.is_multiple_of(columns)).then_some(start / columns)
}

/// The modules whose weights lie in this one, in the order of its rows.
fn modules_of(g: &Graph, id: NodeId) -> Option<Vec<&str>> {
    let Op::Weight(w) = &g.node(id).op else { return None };
    match w.parts.as_slice() {
        [] => Some(vec![w.name.strip_suffix(WEIGHT)?]),
        parts => parts.iter().map(|p| p.name.strip_suffix(WEIGHT)).collect(),
    }
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

/// For each adapted weight among the parameters of a block the factors of the matrices that one row of the input meets.
type Targets = BTreeMap<String, Vec<Option<Factors>>>;

/// A parameter of a block that was added: a factor of one matrix of a weight.
struct Added {
    /// Its name.
    param: String,
    /// The parameter of the weight.
    base: String,
    /// Which of the matrices that one row meets, of how many.
    matrix: [usize; 2],
    /// Which of [`names`].
    part: usize,
}

/// The graph with these adapters.
///
/// # Errors
/// A module is no linear layer of the graph, or an expert is adapted otherwise than those of its layer.
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
        let mut targets = Targets::new();
        for (arg, _, factors) in adapted_weights(graph, node, c, adapter)? {
            let bound = graph.block(c.block).params.iter().zip(&node.args).filter(|(_, a)| **a == arg);
            targets.extend(bound.map(|(param, _)| (param.clone(), factors.clone())));
        }
        let kind = (c.block, targets);
        let at = kinds.iter().position(|k| *k == kind).unwrap_or(kinds.len());
        if at == kinds.len() {
            kinds.push(kind);
        }
        of_call.insert(id, at);
    }
    let mut copies: BTreeSet<BlockId> = BTreeSet::new();
    let (mut blocks, mut added) = (Vec::with_capacity(kinds.len()), Vec::with_capacity(kinds.len()));
    for (of, targets) in &kinds {
        let block = graph.block(*of);
        let name = match copies.insert(*of) {
            true => block.name.clone(),
            false => format!("{}_{}", block.name, blocks.len()),
        };
        let (body, more) = adapted(&block.graph, targets, adapter.dora)?;
        blocks.push(Arc::new(Block::new(&name, body)));
        added.push(more);
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
                        let more = added[at].iter().find(|a| a.param == *param).ok_or_else(missing)?;
                        let base = own.get(more.base.as_str()).ok_or_else(missing)?;
                        let factor = factor(out, *base, BASE, more, ty).ok_or_else(missing)?;
                        out.push(factor, &[])?
                    }
                });
            }
            out.push(Call { block: BlockId(at as u32), layer: c.layer }, &bound)
        }
        op => out.push_exact(op.clone(), args),
    })
}

/// Where the factors of an adapter of `graph` lie, given where its weights do: A is sharded along the columns of its weight, B along its rows,
/// both where whole experts are on ranks of their own.
///
/// # Errors
/// As [`adapt`].
pub fn factor_placements(
    graph: &Graph,
    adapter: &Adapter,
    leaves: &HashMap<String, Vec<(String, Placement)>>,
) -> Result<HashMap<String, Vec<(String, Placement)>>, IrError> {
    let mut found = HashMap::new();
    for node in graph.nodes() {
        let Op::Call(c) = &node.op else { continue };
        for (arg, product, factors) in adapted_weights(graph, node, c, adapter)? {
            let Some(placed) = graph.node(arg).op.leaf_name().and_then(|name| leaves.get(name)) else {
                continue;
            };
            for j in (0..product.beside).filter(|j| factors[*j].is_some()) {
                for part in 0..3 {
                    let more = Added {
                        param: String::new(),
                        base: String::new(),
                        matrix: [j, product.beside],
                        part,
                    };
                    let Some(name) = factor_name(graph, arg, BASE, &more) else { continue };
                    let of = |(axis, p): &(String, Placement)| {
                        let Placement::Shard(shard) = p else { return None };
                        let whole = product.grouped && shard.sections.is_empty();
                        let sections = shard.sections.iter().copied().step_by(product.beside).collect();
                        let p = match (shard.dim, part) {
                            (0, 0) => whole.then(|| Shard::of(0))?,
                            (0, _) => Shard::sections(0, sections),
                            (1, 0) => Shard::of(1),
                            _ => return None,
                        };
                        Some((axis.clone(), Placement::Shard(p)))
                    };
                    found.insert(name, placed.iter().filter_map(of).collect());
                }
            }
        }
    }
    Ok(found)
}

/// The arguments of a call that are weights with adapted matrices, what reads them, and the factors of the matrices that one row meets.
type AdaptedWeights = Vec<(NodeId, Product, Vec<Option<Factors>>)>;

fn adapted_weights(
    graph: &Graph,
    call: &Node,
    c: &Call,
    adapter: &Adapter,
) -> Result<AdaptedWeights, IrError> {
    let block = graph.block(c.block);
    let users = block.graph.users();
    let mut found = Vec::new();
    for (param, arg) in block.params.iter().zip(&call.args) {
        let product = block.leaf(param).and_then(|leaf| product(&block.graph, &users, leaf));
        let (Some(modules), Some(product)) = (modules_of(graph, *arg), product) else { continue };
        let factors = of_matrices(&modules, product, adapter).map_err(|e| graph.error(e))?;
        if factors.iter().any(Option::is_some) {
            found.push((*arg, product, factors));
        }
    }
    Ok(found)
}

/// The factors of the matrices that one row meets: of every group (every expert) the same.
fn of_matrices(
    modules: &[&str],
    product: Product,
    adapter: &Adapter,
) -> Result<Vec<Option<Factors>>, String> {
    let beside = product.beside;
    let of = |module: &&str| adapter.modules.get(*module).copied();
    let own: Vec<_> = modules[..beside].iter().map(of).collect();
    for (i, module) in modules.iter().enumerate() {
        if of(module) != own[i % beside] {
            let first = modules[i % beside];
            return Err(format!(
                "`{module}` is adapted otherwise than `{first}`: experts of a layer are adapted alike, or none is"
            ));
        }
    }
    if adapter.dora && product.grouped && own.iter().any(Option::is_some) {
        return Err(format!(
            "`{}` is of an expert, whose magnitudes are not trained; leave out dora",
            modules[0]
        ));
    }
    Ok(own)
}

/// The modules to which a factor belongs: one, or one of each group.
fn modules_of_factor<'g>(g: &'g Graph, base: NodeId, added: &Added) -> Option<Vec<&'g str>> {
    let [matrix, beside] = added.matrix;
    Some(modules_of(g, base)?.into_iter().skip(matrix).step_by(beside).collect())
}

/// The name of a factor beside a base.
fn factor_name(g: &Graph, base: NodeId, prefix: &str, added: &Added) -> Option<String> {
    let module = common(&modules_of_factor(g, base, added)?);
    Some(names(&format!("{prefix}{module}"))[added.part].clone())
}

/// The weight of a factor beside a base: of one module, or those of a module of each group one after another.
fn factor(g: &Graph, base: NodeId, prefix: &str, added: &Added, ty: &Type) -> Option<Weight> {
    let Op::Weight(w) = &g.node(base).op else { return None };
    let own = Weight::new(&factor_name(g, base, prefix, added)?, ty.clone());
    let mut weight = Weight { keeps_type: added.part == 2, ..own };
    let modules = modules_of_factor(g, base, added)?;
    if modules.len() > 1 {
        let name = |module: &str| names(&format!("{prefix}{module}"))[added.part].clone();
        let rows = ty.shape[0].size()? / modules.len();
        weight.parts = modules.iter().map(|m| Rows { name: name(m), rows }).collect();
        // As its base: an expert that no token met has no gradient in that step.
        weight.skip_zero_grad = w.skip_zero_grad;
    }
    Some(weight)
}

/// One name for several: `*` stands where they differ.
fn common(names: &[&str]) -> String {
    let split: Vec<Vec<&str>> = names.iter().map(|n| n.split('.').collect()).collect();
    let at = |i: usize| split.iter().all(|s| s.get(i) == split[0].get(i));
    let parts: Vec<&str> = (0..split[0].len()).map(|i| if at(i) { split[0][i] } else { "*" }).collect();
    parts.join(".")
}

/// The body of a block, its weights frozen, with factors beside these; and what these are.
fn adapted(body: &Graph, targets: &Targets, dora: bool) -> Result<(Graph, Vec<Added>), IrError> {
    let mut added = Vec::new();
    // What is added to the results of a product of groups, matrix by matrix.
    let mut waits: HashMap<NodeId, Vec<Option<NodeId>>> = HashMap::new();
    let graph = body.rebuild(|out, id, args| {
        let node = body.node(id);
        let y = match &node.op {
            Op::Weight(w) => return out.push(Weight { frozen: true, ..w.clone() }, &[]),
            op => out.push_exact(op.clone(), args)?,
        };
        if let (Op::Slice(s), Some(more)) = (&node.op, node.args.first().and_then(|x| waits.get(x))) {
            let own = s.len.size().and_then(|columns| matrix(body, id, columns));
            return match own.and_then(|j| more[j]) {
                Some(more) => out.add(y, more),
                None => Ok(y),
            };
        }
        let (Op::Dot(_) | Op::GroupedDot(_), Some(base)) =
            (&node.op, node.args.get(1).and_then(|w| body.node(*w).op.leaf_name()))
        else {
            return Ok(y);
        };
        let Some(all) = targets.get(base) else { return Ok(y) };
        let mut sums = Vec::new();
        for (j, factors) in all.iter().enumerate() {
            let Some(factors) = factors else {
                sums.push(None);
                continue;
            };
            let mut push = |g: &mut Graph, part: usize, shape: &[usize]| {
                let ty = Type::new(DType::F32, shape.iter().map(|n| Dim::from(*n)));
                let mut more =
                    Added { param: String::new(), base: base.into(), matrix: [j, all.len()], part };
                let missing = || body.error(format!("`{base}` is no weight of linear layers"));
                let weight = factor(body, node.args[1], "", &more, &ty).ok_or_else(missing)?;
                more.param = weight.name.clone();
                added.push(more);
                g.push(weight, &[])
            };
            sums.push(Some(match &node.op {
                Op::Dot(_) if dora => return magnified(out, y, [args[0], args[1]], *factors, &mut push),
                Op::Dot(_) => product_of_factors(out, args[0], args[1], None, *factors, &mut push)?.0,
                _ => {
                    let offsets = (args[2], all.len());
                    product_of_factors(out, args[0], args[1], Some(offsets), *factors, &mut push)?.0
                }
            }));
        }
        match sums.as_slice() {
            [Some(more)] => out.add(y, *more),
            _ => {
                waits.insert(id, sums);
                Ok(y)
            }
        }
    })?;
    Ok((graph, added))
}

/// Adds one of a module's trained tensors to a graph: which of [`names`], and its sizes.
type Push<'a> = dyn FnMut(&mut Graph, usize, &[usize]) -> Result<NodeId, IrError> + 'a;

/// s·(x·Aᵀ)·Bᵀ beside x·Wᵀ, and A and B. `groups` are the offsets of the groups of rows of x, and how many matrices W has for each: then A and
/// B have one for each group.
fn product_of_factors(
    g: &mut Graph,
    x: NodeId,
    w: NodeId,
    groups: Option<(NodeId, usize)>,
    Factors { rank, scale }: Factors,
    push: &mut Push,
) -> Result<(NodeId, [NodeId; 2]), IrError> {
    let [rows, columns] = [0, 1].map(|axis| g.ty(w).shape[axis].size().unwrap_or(0));
    let count = groups.map_or(1, |(offsets, _)| g.ty(offsets).shape[0].size().unwrap_or(2) - 1);
    let (a, b) = (
        push(g, 0, &[count * rank, columns])?,
        push(g, 1, &[rows / groups.map_or(1, |(_, beside)| beside), rank])?,
    );
    let times = |g: &mut Graph, x: NodeId, w: NodeId| match groups {
        None => g.linear(x, w),
        Some((offsets, _)) => g.push(GroupedDot { transposed: false }, &[x, w, offsets]),
    };
    let low = times(g, x, a)?;
    let low = g.scale(low, scale)?; // [.., rank]
    Ok((times(g, low, b)?, [a, b]))
}

/// `y` = x·Wᵀ with what the factors add to it, each row's norm replaced by a trained magnitude.
fn magnified(
    g: &mut Graph,
    y: NodeId,
    [x, w]: [NodeId; 2],
    factors: Factors,
    push: &mut Push,
) -> Result<NodeId, IrError> {
    let (more, [a, b]) = product_of_factors(g, x, w, None, factors, push)?;
    let y = g.add(y, more)?;
    let rows = g.ty(w).shape[0].size().unwrap_or(0);
    // A magnitude rounded to a narrow type would scale its row even where nothing was learnt: it keeps its type.
    let m = push(g, 2, &[rows])?;
    let norm = row_norms(g, w, [a, b], factors.scale)?;
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
