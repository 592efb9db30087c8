//! Adapters of a served model, several at once (LoRA, arXiv:2106.09685). In: a graph of layers over `tokens`; how many slots there are for
//! adapters, and of which rank. Out: the same graph with the factors of all slots beside each linear layer, y = x·Wᵀ + (x·Aᵀ)·Bᵀ with the A
//! and B of the token's slot. The rows of tokens that have an adapter stand together, slot by slot, and grouped products multiply each by the
//! factors of its own slot alone, as they do an expert's rows. The factors are states, which nothing here stores: what a slot holds is
//! written between runs. To a token without an adapter −0 is added, which changes no bit of what the graph without slots computes.

use crate::adapt::{WEIGHT, linear, module_of};
use astrai_ir::ops::{BinaryKind, Call, CompareKind, GroupedDot, Op, State};
use astrai_ir::{Block, DType, Dim, Graph, IrError, NodeId, Symbol, Type};
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

impl Stack {
    /// Names and shapes of the states of a module whose weight is `[out, in]`, both factors transposed, a slot's rows together:
    /// A `[slots * in, rank]`, B `[slots * rank, out]`.
    pub fn states(self, module: &str, [rows, columns]: [usize; 2]) -> [(String, [usize; 2]); 2] {
        let name = |part: &str| format!("{STACKED}{module}.{part}");
        let Stack { slots, rank } = self;
        [(name("a"), [slots * columns, rank]), (name("b"), [slots * rank, rows])]
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

/// The shape of a weight that one plain product of a row for each token reads.
fn by_token(g: &Graph, users: &[Vec<NodeId>], leaf: NodeId) -> Option<[usize; 2]> {
    let shape = linear(g, users, leaf)?;
    let x = g.node(users[leaf.index()][0]).args[0];
    (g.ty(x).rank() == 2 && g.ty(x).shape[0] == Dim::symbol("tokens")).then_some(shape)
}

/// The linear layers that [`stack`] finds, by name, with the `[out, in]` of their weights.
pub fn stackable(graph: &Graph) -> BTreeMap<String, [usize; 2]> {
    let mut found = BTreeMap::new();
    for node in graph.nodes() {
        let Op::Call(c) = &node.op else { continue };
        let block = graph.block(c.block);
        let users = block.graph.users();
        for (arg, param) in node.args.iter().zip(&block.params) {
            let shape = block.leaf(param).and_then(|leaf| by_token(&block.graph, &users, leaf));
            if let (Some(module), Some(shape)) = (module_of(graph, *arg), shape) {
                found.insert(module.to_string(), shape);
            }
        }
    }
    found
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
        if let Op::Dot(_) = op {
            let weight = body.node(id).args[1];
            let module = body.node(weight).op.leaf_name().and_then(|name| name.strip_suffix(WEIGHT));
            if let (Some(module), Some(shape)) = (module, by_token(body, &users, weight)) {
                let more = of_slots(out, args[0], (module, shape), stack)?;
                waits.insert(biased(body, &users, id).unwrap_or(id), more);
            }
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

/// What the factors of a module add to its result: `[tokens, out]`.
fn of_slots(
    g: &mut Graph,
    x: NodeId,
    (module, shape): (&str, [usize; 2]),
    stack: Stack,
) -> Result<NodeId, IrError> {
    let [slots, rows, places, offsets] = stack.inputs().map(|(name, n)| g.input(name, DType::I32, vec![n]));
    let (slots, rows, places, offsets) = (slots?, rows?, places?, offsets?);
    let [a, b] = stack.states(module, shape).map(|(name, shape)| {
        let ty = Type::new(DType::F32, shape.map(Dim::from));
        g.push(State { name, ty }, &[])
    });
    let (by_group, of_token) =
        (GroupedDot { transposed: true }, [Dim::symbol("tokens"), Dim::from(shape[0])]);
    let x = g.gather(x, rows, 0)?; // [adapted, in]
    let low = g.push(by_group.clone(), &[x, a?, offsets])?; // [adapted, rank]
    let more = g.push(by_group, &[low, b?, offsets])?; // [adapted, out]
    let more = g.gather(more, places, 0)?; // [tokens, out]
    let zero = g.fill(slots, 0.0)?;
    let has = g.compare(CompareKind::Ge, slots, zero)?;
    let has = g.reshape(has, vec![of_token[0].clone(), Dim::from(1)])?;
    let has = g.broadcast(has, &of_token)?;
    let none = g.fill(more, -0.0)?;
    g.select(has, more, none)
}
