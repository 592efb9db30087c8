//! The graph: an append-only arena of hash-consed nodes whose ids are in topological order. In: operators and arguments, one at a
//! time, with types inferred and checked when a node is added. Out: node ids. Nothing is changed in place; passes build new graphs.

use crate::block::{Block, Signature};
use crate::dim::Symbol;
use crate::op::{Infer, Inferred, Simpler};
use crate::ops::{Op, Part};
use crate::shard::Sharding;
use crate::ty::Type;
use foldhash::fast::RandomState;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

/// Position of a node in its graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl NodeId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// Position of a block in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct BlockId(pub u32);

/// One value (or several, picked by `part`).
#[derive(Clone, Debug)]
pub struct Node {
    /// Operator with its attributes.
    pub op: Op,
    /// Arguments, all of smaller ids.
    pub args: Vec<NodeId>,
    /// Types of the outputs; all but `call`, `topk`, `route` and `attention` have one.
    pub types: Vec<Type>,
    /// The builder's scope that added the node: `layers.3.attn.q_proj`. No part of the node's identity.
    pub origin: Arc<str>,
    /// Placements of the (first) value on the axes of a mesh; empty where unknown. No part of the node's identity.
    pub sharding: Sharding,
}

impl Node {
    /// Type of the only (or first) output.
    pub fn ty(&self) -> &Type {
        &self.types[0]
    }

    /// An error of this node.
    pub(crate) fn error(&self, message: String) -> IrError {
        IrError { origin: self.origin.to_string(), message: format!("`{}` {message}", self.op.name()) }
    }
}

/// An error in a graph, with the builder's scope in which it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrError {
    /// Origin of the offending node.
    pub origin: String,
    /// What is wrong.
    pub message: String,
}

impl fmt::Display for IrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.origin.is_empty() {
            return f.write_str(&self.message);
        }
        write!(f, "{}: {}", self.origin, self.message)
    }
}

impl std::error::Error for IrError {}

/// A computation: nodes in topological order, the blocks they call, and named outputs. Copies share what they hold until one of
/// them grows.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Symbols that shapes may use.
    pub symbols: Vec<Symbol>,
    nodes: Arc<Vec<Node>>,
    /// Nodes by the hash of operator and arguments; where two have one hash, the later stands at the next free number.
    index: Arc<HashMap<u64, NodeId, RandomState>>,
    hasher: RandomState,
    blocks: Vec<Arc<Block>>,
    signatures: Vec<Arc<Signature>>,
    outputs: Arc<Vec<(String, NodeId)>>,
    output_names: Arc<HashMap<String, NodeId>>,
    scope: Vec<String>,
    here: Arc<str>,
}

impl Graph {
    /// An empty graph over these symbols.
    pub fn new(symbols: Vec<Symbol>) -> Graph {
        Graph { symbols, ..Graph::default() }
    }

    /// Nodes in topological order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Ids in topological order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// The node with this id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Type of a single-output node.
    pub fn ty(&self, id: NodeId) -> &Type {
        self.node(id).ty()
    }

    /// Named results, in the order they were declared.
    pub fn outputs(&self) -> &[(String, NodeId)] {
        &self.outputs
    }

    /// The result with this name.
    pub fn output(&self, name: &str) -> Option<NodeId> {
        self.output_names.get(name).copied()
    }

    /// Blocks that `call` nodes refer to.
    pub fn blocks(&self) -> &[Arc<Block>] {
        &self.blocks
    }

    /// The block with this id.
    pub fn block(&self, id: BlockId) -> &Arc<Block> {
        &self.blocks[id.0 as usize]
    }

    /// For each parameter of a block whether every call binds it to a weight.
    pub fn params_bound_to_weights(&self, id: BlockId) -> Vec<bool> {
        let mut bound = vec![true; self.block(id).params.len()];
        for node in self.nodes() {
            if !matches!(&node.op, Op::Call(c) if c.block == id) {
                continue;
            }
            for (b, a) in bound.iter_mut().zip(&node.args) {
                *b &= matches!(self.node(*a).op, Op::Weight(_));
            }
        }
        bound
    }

    /// The same nodes without outputs.
    pub fn without_outputs(mut self) -> Graph {
        self.outputs = Arc::default();
        self.output_names = Arc::default();
        self
    }

    /// Declares a result; a name is declared once.
    pub fn set_output(&mut self, name: &str, id: NodeId) -> Result<(), IrError> {
        if self.output(name).is_some() {
            return Err(self.error(format!("output `{name}` is declared twice")));
        }
        Arc::make_mut(&mut self.outputs).push((name.to_string(), id));
        Arc::make_mut(&mut self.output_names).insert(name.to_string(), id);
        Ok(())
    }

    /// Types of the parameters and outputs of a block.
    pub(crate) fn signature(&self, id: BlockId) -> Option<&Signature> {
        self.signatures.get(id.0 as usize).map(|s| &**s)
    }

    /// Adds a block for `call` nodes to refer to.
    pub fn add_block(&mut self, block: Arc<Block>) -> BlockId {
        self.signatures.push(Arc::new(Signature::of(&block)));
        self.blocks.push(block);
        BlockId(self.blocks.len() as u32 - 1)
    }

    /// The node for `op` on `args`: the existing one when there is one, else a new one with its types checked.
    pub fn push(&mut self, op: impl Into<Op>, args: &[NodeId]) -> Result<NodeId, IrError> {
        let op = op.into();
        if let Some(bad) = args.iter().find(|a| a.index() >= self.nodes.len()) {
            return Err(self.error(format!("`{}` refers to {bad}, which does not exist yet", op.name())));
        }
        match self.simpler(&op, args) {
            Some(Simpler::Node(id)) => return Ok(id),
            Some(Simpler::Op(op, args)) => return self.push(*op, &args),
            None => {}
        }
        self.push_exact(op, args)
    }

    /// What [`push`](Self::push) takes in place of `op` on `args`.
    pub fn simpler(&self, op: &Op, args: &[NodeId]) -> Option<Simpler> {
        // `simplify` expects arguments of one output; `push_exact` refuses others.
        let single = args.iter().all(|a| self.node(*a).types.len() == 1);
        if single { op.simplify(self, args) } else { None }
    }

    /// [`push`](Self::push) without simplifications: a graph that is read back or copied stays as it was.
    pub fn push_exact(&mut self, op: Op, args: &[NodeId]) -> Result<NodeId, IrError> {
        let mut key = self.hasher.hash_one((&op, args));
        while let Some(&id) = self.index.get(&key) {
            let node = self.node(id);
            if node.op == op && node.args == args {
                let shared = common_prefix(&node.origin, &self.here);
                if shared != node.origin {
                    self.node_mut(id).origin = shared;
                }
                return Ok(id);
            }
            key = key.wrapping_add(1);
        }
        let types = self.infer(&self.nodes, &op, args);
        let types = types.map_err(|m| self.error(format!("`{}` {m}", op.name())))?;
        let id = NodeId(self.nodes.len() as u32);
        let (args, origin, sharding) = (args.to_vec(), self.here.clone(), Sharding::new());
        Arc::make_mut(&mut self.nodes).push(Node { op, args, types, origin, sharding });
        Arc::make_mut(&mut self.index).insert(key, id);
        Ok(id)
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut Arc::make_mut(&mut self.nodes)[id.index()]
    }

    /// Types of the outputs of an operator on some of these nodes, several outputs of which are selected by `part`.
    pub(crate) fn infer(&self, nodes: &[Node], op: &Op, args: &[NodeId]) -> Inferred {
        let types = |a: &NodeId| &nodes[a.index()].types;
        if let Op::Part(p) = op {
            let [a] = args else { return Err(format!("takes 1 argument, got {}", args.len())) };
            let ty = types(a).get(p.index as usize).cloned();
            let none = || format!("asks for output {} of {a}, which has {}", p.index, types(a).len());
            return Ok(vec![ty.ok_or_else(none)?]);
        }
        if let Some(a) = args.iter().find(|a| types(a).len() != 1) {
            return Err(format!("uses {a}, which has several outputs, without `part`"));
        }
        let args: Vec<&Type> = args.iter().map(|a| &types(a)[0]).collect();
        op.infer(&Infer { args: &args, graph: self })
    }

    /// Records the sharding of a node, unless it is known already.
    pub fn note_sharding(&mut self, id: NodeId, sharding: &Sharding) {
        if self.node(id).sharding.is_empty() && !sharding.is_empty() {
            self.node_mut(id).sharding = sharding.clone();
        }
    }

    /// Output `index` of a node: the node itself when it has one output.
    pub fn part(&mut self, id: NodeId, index: u32) -> Result<NodeId, IrError> {
        if self.node(id).types.len() == 1 && index == 0 {
            return Ok(id);
        }
        self.push(Part { index }, &[id])
    }

    /// Runs `f` with `name` appended to the origin of the nodes it makes.
    pub fn scope<R>(&mut self, name: &str, f: impl FnOnce(&mut Graph) -> R) -> R {
        self.enter(name);
        let r = f(self);
        self.leave();
        r
    }

    /// Appends `name` to the origin of the nodes that follow, until [`leave`](Self::leave).
    pub(crate) fn enter(&mut self, name: &str) {
        self.scope.push(name.to_string());
        self.here = self.scope.join(".").into();
    }

    /// Ends what the last [`enter`](Self::enter) began.
    pub(crate) fn leave(&mut self) {
        self.scope.pop();
        self.here = self.scope.join(".").into();
    }

    /// Runs `f` with the origin set to that of an existing node (passes rebuild graphs node by node).
    pub fn with_origin<R>(&mut self, origin: &Arc<str>, f: impl FnOnce(&mut Graph) -> R) -> R {
        let before = std::mem::replace(&mut self.here, origin.clone());
        let r = f(self);
        self.here = before;
        r
    }

    /// Gives nodes from here on the origin of an existing one.
    pub fn enter_origin(&mut self, origin: &Arc<str>) {
        self.here = origin.clone();
    }

    /// An error at the current origin.
    pub fn error(&self, message: String) -> IrError {
        IrError { origin: self.here.to_string(), message }
    }

    /// An error of an existing node.
    pub(crate) fn error_at(&self, id: NodeId, message: impl fmt::Display) -> IrError {
        let node = self.node(id);
        IrError { origin: node.origin.to_string(), message: format!("{id} `{}` {message}", node.op.name()) }
    }

    /// For each node its users: the nodes that take it as an argument, ascending, each once.
    pub fn users(&self) -> Vec<Vec<NodeId>> {
        let mut users = vec![Vec::new(); self.nodes.len()];
        for id in self.ids() {
            for a in &self.node(id).args {
                let u: &mut Vec<NodeId> = &mut users[a.index()];
                if u.last() != Some(&id) {
                    u.push(id);
                }
            }
        }
        users
    }

    /// The roots and all nodes that they depend on, ascending; an argument is followed from its user where `follow` (user,
    /// argument) says so.
    pub fn ancestors(
        &self,
        roots: impl IntoIterator<Item = NodeId>,
        follow: impl Fn(NodeId, NodeId) -> bool,
    ) -> BTreeSet<NodeId> {
        let mut found = BTreeSet::new();
        let mut todo: Vec<NodeId> = roots.into_iter().collect();
        while let Some(id) = todo.pop() {
            if found.insert(id) {
                todo.extend(self.node(id).args.iter().filter(|a| follow(id, **a)));
            }
        }
        found
    }

    /// Liveness: for each node whether an output depends on it.
    pub fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        for (_, id) in self.outputs() {
            live[id.index()] = true;
        }
        for id in self.ids().rev() {
            if live[id.index()] {
                self.node(id).args.iter().for_each(|a| live[a.index()] = true);
            }
        }
        live
    }

    /// A copy made node by node: `f` gets the new graph, the old node and its arguments' new ids, and returns the new id.
    /// Dead nodes are left out; outputs keep their names.
    pub fn rebuild(
        &self,
        f: impl FnMut(&mut Graph, NodeId, &[NodeId]) -> Result<NodeId, IrError>,
    ) -> Result<Graph, IrError> {
        self.rebuild_with(self.blocks.clone(), f)
    }

    /// The same live nodes with other blocks in place of the old ones.
    pub fn with_blocks(&self, blocks: Vec<Arc<Block>>) -> Result<Graph, IrError> {
        let signatures = self.signatures_of(&blocks);
        if signatures == self.signatures && self.live().iter().all(|live| *live) {
            let (scope, here) = (Vec::new(), Arc::default());
            return Ok(Graph { blocks, signatures, scope, here, ..self.clone() });
        }
        self.rebuild_with(blocks, |g, id, args| g.push_exact(self.node(id).op.clone(), args))
    }

    /// [`rebuild`](Self::rebuild) with other blocks in place of the old ones.
    pub fn rebuild_with(
        &self,
        blocks: Vec<Arc<Block>>,
        mut f: impl FnMut(&mut Graph, NodeId, &[NodeId]) -> Result<NodeId, IrError>,
    ) -> Result<Graph, IrError> {
        let signatures = self.signatures_of(&blocks);
        let mut out = Graph { blocks, signatures, ..Graph::new(self.symbols.clone()) };
        Arc::make_mut(&mut out.nodes).reserve(self.nodes.len());
        Arc::make_mut(&mut out.index).reserve(self.nodes.len());
        let live = self.live();
        let mut map: Vec<NodeId> = vec![NodeId(u32::MAX); self.nodes.len()];
        for id in self.ids().filter(|id| live[id.index()]) {
            let node = self.node(id);
            let args: Vec<NodeId> = node.args.iter().map(|a| map[a.index()]).collect();
            let made = out.with_origin(&node.origin, |g| f(g, id, &args))?;
            if !node.sharding.is_empty() && out.node(made).types[0].shape == node.types[0].shape {
                out.note_sharding(made, &node.sharding);
            }
            map[id.index()] = made;
        }
        for (name, id) in self.outputs() {
            out.set_output(name, map[id.index()])?;
        }
        Ok(out)
    }

    /// Signatures of blocks, those that are this graph's own not computed again.
    fn signatures_of(&self, blocks: &[Arc<Block>]) -> Vec<Arc<Signature>> {
        let own = |(i, b): (usize, &Arc<Block>)| match self.blocks.get(i) {
            Some(own) if Arc::ptr_eq(own, b) => self.signatures[i].clone(),
            _ => Arc::new(Signature::of(b)),
        };
        blocks.iter().enumerate().map(own).collect()
    }

    /// True for a copy of a graph that has not changed since, nor has that.
    pub fn is_copy_of(&self, other: &Graph) -> bool {
        let blocks = || self.blocks.iter().zip(&other.blocks).all(|(a, b)| Arc::ptr_eq(a, b));
        self.blocks.len() == other.blocks.len() && blocks() && self.is_copy_but_for_bodies(other)
    }

    /// [`is_copy_of`](Self::is_copy_of) where the bodies of blocks may differ, but not their signatures.
    pub(crate) fn is_copy_but_for_bodies(&self, other: &Graph) -> bool {
        Arc::ptr_eq(&self.nodes, &other.nodes)
            && Arc::ptr_eq(&self.outputs, &other.outputs)
            && self.symbols == other.symbols
            && self.signatures == other.signatures
    }
}

fn common_prefix(a: &Arc<str>, b: &Arc<str>) -> Arc<str> {
    if a == b {
        return a.clone();
    }
    let same: Vec<&str> =
        a.split('.').zip(b.split('.')).take_while(|(x, y)| x == y).map(|(x, _)| x).collect();
    same.join(".").into()
}
