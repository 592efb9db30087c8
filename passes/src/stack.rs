//! Adapters of a served model, several at once (LoRA, arXiv:2106.09685). In: a graph of layers over `tokens`, whose sibling dots are merged;
//! how many slots there are for adapters, and of which rank. Out: the same graph with the factors of all slots beside each linear layer, y =
//! x·Wᵀ + (x·Aᵀ)·Bᵀ with the A and B of the token's slot (`low_rank`). Layers whose weights are joined (q|k|v, gate|up) have their factors
//! joined alike, so that one product by A serves them all. The factors are states, which nothing here stores: what a slot holds is written
//! between runs. To a token without an adapter −0 is added, which changes no bit of what the graph without slots computes.

use crate::adapt::{WEIGHT, linear, module_of};
use crate::{flatten, merge_alike};
use astrai_ir::ops::{BinaryKind, Call, LowRank, Op, State};
use astrai_ir::{Block, DType, Dim, Graph, IrError, NodeId, Storage, Symbol, Type};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What the names of the factors' states begin with.
pub const STACKED: &str = "adapters.";

/// The symbol that counts rows of tokens with an adapter; one row where no token has any.
const ADAPTED: &str = "adapted";

/// Room for adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// So many at once.
    pub slots: usize,
    /// Columns of each.
    pub rank: usize,
}

/// Linear layers whose weights are joined, or one alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Its name: that of the weight without `.weight`.
    pub name: String,
    /// The layers with the columns of their results.
    pub layers: Vec<(String, usize)>,
    /// Columns of the weights.
    pub columns: usize,
}

impl Joined {
    /// Columns of all results.
    pub fn results(&self) -> usize {
        self.layers.iter().map(|(_, n)| n).sum()
    }
}

impl Stack {
    /// Names and shapes of the states of joined layers, both factors transposed, a slot's rows together, the layers' columns side by side:
    /// A `[slots * in, layers * rank]`, B `[slots * rank, out]`.
    pub fn states(self, of: &Joined) -> [(String, [usize; 2]); 2] {
        let name = |part: &str| format!("{STACKED}{}.{part}", of.name);
        let Stack { slots, rank } = self;
        [(name("a"), [slots * of.columns, of.layers.len() * rank]), (name("b"), [slots * rank, of.results()])]
    }

    /// Names and lengths of what the graph takes besides: the slot of each token's adapter, or -1; the tokens that have one, in the order of
    /// their slots; where among these each token stands, or 0; where those of each slot begin.
    fn inputs(self) -> [(&'static str, Dim); 4] {
        let (tokens, adapted) = (Dim::symbol("tokens"), Dim::symbol(ADAPTED));
        let offsets = Dim::from(self.slots + 1);
        [
            ("adapters", tokens.clone()),
            ("adapter_rows", adapted),
            ("adapter_places", tokens),
            ("adapter_offsets", offsets),
        ]
    }
}

/// The layers of a weight `[out, in]` that one plain product of a row for each token reads, by the names that its leaf has for them.
fn by_token(g: &Graph, users: &[Vec<NodeId>], leaf: NodeId) -> Option<Joined> {
    let (Op::Weight(w), [_, columns]) = (&g.node(leaf).op, linear(g, users, leaf)?) else { return None };
    let x = g.node(users[leaf.index()][0]).args[0];
    let layers =
        w.rows().into_iter().map(|part| Some((part.name.strip_suffix(WEIGHT)?.to_string(), part.rows)));
    let joined =
        Joined { name: w.name.strip_suffix(WEIGHT)?.into(), layers: layers.collect::<Option<_>>()?, columns };
    (g.ty(x).rank() == 2 && g.ty(x).shape[0] == Dim::symbol("tokens")).then_some(joined)
}

/// The linear layers for which [`stack`] makes room in a graph as it is built, where weights are stored so.
///
/// # Errors
/// The graph cannot be merged.
pub fn stackable(graph: &Graph, storage: Option<&Storage>) -> Result<Vec<Joined>, IrError> {
    let graph = &merge_alike(&flatten(graph)?, storage)?;
    let mut found = BTreeMap::new();
    for node in graph.nodes() {
        let Op::Call(c) = &node.op else { continue };
        let block = graph.block(c.block);
        let users = block.graph.users();
        for (arg, param) in node.args.iter().zip(&block.params) {
            let joined = block.leaf(param).and_then(|leaf| by_token(&block.graph, &users, leaf));
            let (Some(name), Some(of), Op::Weight(w)) =
                (module_of(graph, *arg), joined, &graph.node(*arg).op)
            else {
                continue;
            };
            let parts = w.rows();
            let layers =
                parts.iter().filter_map(|p| Some((p.name.strip_suffix(WEIGHT)?.to_string(), p.rows)));
            let joined = Joined { name: name.to_string(), layers: layers.collect(), ..of };
            found.insert(name.to_string(), joined);
        }
    }
    Ok(found.into_values().collect())
}

/// The graph with slots, and with the inputs that say which tokens use which.
///
/// # Errors
/// The graph has no `tokens`.
pub fn stack(graph: &Graph, stack: Stack) -> Result<Graph, IrError> {
    let graph = &with_symbol(graph)?;
    let body = |b: &Arc<Block>| Ok(Arc::new(Block::new(&b.name, stacked(&b.graph, stack)?)));
    let blocks = graph.blocks().iter().map(body).collect::<Result<Vec<_>, IrError>>()?;
    graph.rebuild_with(blocks.clone(), |out, id, args| {
        let Op::Call(c) = &graph.node(id).op else {
            return out.push_exact(graph.node(id).op.clone(), args);
        };
        let (block, before) = (&blocks[c.block.0 as usize], &graph.block(c.block).params);
        let own: HashMap<&str, NodeId> =
            before.iter().map(String::as_str).zip(args.iter().copied()).collect();
        let mut bound = Vec::with_capacity(block.params.len());
        for (param, ty) in block.params.iter().zip(block.param_types()?) {
            bound.push(match (own.get(param.as_str()), param.strip_prefix(STACKED)) {
                (Some(arg), _) => *arg,
                (None, Some(factor)) => {
                    let missing = || out.error(format!("parameter `{param}` has no argument"));
                    let (module, part) = factor.rsplit_once('.').ok_or_else(missing)?;
                    let weight = own.get(format!("{module}{WEIGHT}").as_str());
                    let module = weight.and_then(|w| module_of(out, *w)).ok_or_else(missing)?;
                    let name = format!("{STACKED}{module}.{part}");
                    out.push(State { name, ty: ty.clone() }, &[])?
                }
                (None, None) => out.input(param, ty.dtype, ty.shape.clone())?,
            });
        }
        out.push(Call { block: c.block, layer: c.layer }, &bound)
    })
}

/// The graph with the symbol that counts tokens with an adapter.
fn with_symbol(graph: &Graph) -> Result<Graph, IrError> {
    let tokens = graph.symbols.iter().find(|s| &*s.name == "tokens");
    let tokens = tokens.ok_or_else(|| graph.error("adapters need `tokens`".into()))?;
    let adapted = Symbol { name: ADAPTED.into(), min: 1, ..tokens.clone() };
    let with = |g: &Graph| g.symbols.iter().cloned().chain([adapted.clone()]).collect();
    let block = |b: &Arc<Block>| {
        let mut block = (**b).clone();
        block.graph.symbols = with(&b.graph);
        Arc::new(block)
    };
    let mut g = graph.with_blocks(graph.blocks().iter().map(block).collect())?;
    g.symbols = with(graph);
    Ok(g)
}

/// The body of a block with factors beside its linear layers. What they give is added behind a layer's bias, and computed before
/// its product: so that the product's kernel takes it along, and rounds where it does without slots.
fn stacked(body: &Graph, stack: Stack) -> Result<Graph, IrError> {
    let users = body.users();
    let mut waits: HashMap<NodeId, NodeId> = HashMap::new();
    body.rebuild(|out, id, args| {
        let op = &body.node(id).op;
        if let Op::Dot(_) = op
            && let Some(joined) = by_token(body, &users, body.node(id).args[1])
        {
            let more = of_slots(out, args[0], &joined, stack)?;
            waits.insert(biased(body, &users, id).unwrap_or(id), more);
        }
        let y = out.push_exact(op.clone(), args)?;
        waits.remove(&id).map_or(Ok(y), |more| out.add(y, more))
    })
}

/// The addition of a bias, where that is the only use of a product.
fn biased(g: &Graph, users: &[Vec<NodeId>], dot: NodeId) -> Option<NodeId> {
    let [add] = users[dot.index()].as_slice() else { return None };
    let node = g.node(*add);
    let Op::Binary(b) = &node.op else { return None };
    let other = *node.args.iter().find(|a| **a != dot)?;
    let bias = b.kind == BinaryKind::Add && matches!(g.node(g.below_views(other)).op, Op::Weight(_));
    bias.then_some(*add)
}

/// What the factors of joined layers add to their results: `[tokens, out]`.
fn of_slots(g: &mut Graph, x: NodeId, of: &Joined, stack: Stack) -> Result<NodeId, IrError> {
    let mut args = vec![x];
    for (name, shape) in stack.states(of) {
        args.push(g.push(State { name, ty: Type::new(DType::F32, shape.map(Dim::from)) }, &[])?);
    }
    for (name, n) in stack.inputs() {
        args.push(g.input(name, DType::I32, vec![n])?);
    }
    g.push(LowRank { columns: of.layers.iter().map(|(_, n)| *n).collect() }, &args)
}
