//! Adapters of a served model, several at once (LoRA, arXiv:2106.09685). In: a graph of layers over `tokens`; how many slots there are for
//! adapters, and of which rank. Out: the same graph with the factors of all slots side by side beside each linear layer,
//! y = x·Wᵀ + ((x·Aᵀ) ∘ m)·Bᵀ, where the row of m that is a token's has ones in the columns of its slot and zeros in the others. The factors
//! are states, which nothing here stores: what a slot holds is written between runs. A token without an adapter has a row of zeros, so
//! that what it gives does not depend on any slot.

use crate::adapt::{WEIGHT, linear, module_of};
use astrai_ir::ops::{Call, CompareKind, Const, Op, State};
use astrai_ir::{Block, DType, Dim, Graph, IrError, NodeId, Tensor, Type};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What the names of the factors' states begin with.
pub const STACKED: &str = "adapters.";

/// The parameter of a block that is m.
const MASK: &str = "adapter_mask";

/// Room for adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// So many at once.
    pub slots: usize,
    /// Columns of each.
    pub rank: usize,
}

impl Stack {
    fn width(self) -> usize {
        self.slots * self.rank
    }

    /// Names and shapes of the states of a module whose weight is `[out, in]`: A `[slots * rank, in]`, B `[out, slots * rank]`.
    pub fn states(self, module: &str, [rows, columns]: [usize; 2]) -> [(String, [usize; 2]); 2] {
        let name = |part: &str| format!("{STACKED}{module}.{part}");
        [(name("a"), [self.width(), columns]), (name("b"), [rows, self.width()])]
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

/// The graph with slots. Its new input is `adapters` i32 `[tokens]`: the slot of each token's adapter, or -1.
///
/// # Errors
/// The graph has no `tokens`.
pub fn stack(graph: &Graph, stack: Stack) -> Result<Graph, IrError> {
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
                (None, None) => mask(out, stack)?,
            });
        }
        out.push(Call { block: c.block, layer: c.layer }, &bound)
    })
}

/// The body of a block with factors beside its linear layers.
fn stacked(body: &Graph, stack: Stack) -> Result<Graph, IrError> {
    let users = body.users();
    body.rebuild(|out, id, args| {
        let node = body.node(id);
        let y = out.push_exact(node.op.clone(), args)?;
        let Op::Dot(_) = &node.op else { return Ok(y) };
        let module = body.node(node.args[1]).op.leaf_name().and_then(|name| name.strip_suffix(WEIGHT));
        let shape = by_token(body, &users, node.args[1]);
        let (Some(module), Some(shape)) = (module, shape) else { return Ok(y) };
        let [a, b] = stack.states(module, shape).map(|(name, shape)| {
            let ty = Type::new(DType::F32, shape.map(Dim::from));
            out.push(State { name, ty }, &[])
        });
        let of_token = vec![Dim::symbol("tokens"), Dim::from(stack.width())];
        let (low, mask) = (out.linear(args[0], a?)?, out.input(MASK, DType::F32, of_token)?);
        let low = out.mul(low, mask)?; // [tokens, slots * rank]
        let more = out.linear(low, b?)?;
        out.add(y, more)
    })
}

/// Ones where a column is of the slot of a token's adapter: `[tokens, slots * rank]`.
fn mask(g: &mut Graph, stack: Stack) -> Result<NodeId, IrError> {
    let (tokens, width) = (Dim::symbol("tokens"), stack.width());
    let slots = g.input("adapters", DType::I32, vec![tokens.clone()])?;
    let slots = g.reshape(slots, vec![tokens.clone(), Dim::from(1)])?;
    let columns = Tensor::int(DType::I32, &[width], (0..width).map(|i| (i / stack.rank) as i64).collect());
    let columns = g.push(Const::new(&columns), &[])?;
    let shape = [tokens, Dim::from(width)];
    let (slots, columns) = (g.broadcast(slots, &shape)?, g.broadcast(columns, &shape)?);
    let same = g.compare(CompareKind::Eq, slots, columns)?;
    g.cast(same, DType::F32)
}
