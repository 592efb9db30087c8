//! Blocks: functions of the IR, one for each kind of layer. In: a body whose leaves (`input`, `weight`, `state`) are parameters by
//! name. Out: what a `call` binds, so that a kind of layer is optimised and compiled once whatever the depth of the model.

use crate::graph::{Graph, IrError, NodeId};
use crate::ops::Op;
use crate::ty::Type;
use std::collections::HashMap;

/// A callable function: a body with parameters.
#[derive(Clone, Debug)]
pub struct Block {
    /// Name of the kind (`decoder`, `decoder_local`).
    pub name: String,
    /// The body. Its outputs, in order, are the outputs of a call.
    pub graph: Graph,
    /// Names of the body's leaves in the order in which a call passes them.
    pub params: Vec<String>,
}

impl Block {
    /// A block whose parameters are the leaves of `graph` in order of creation.
    pub fn new(name: &str, graph: Graph) -> Block {
        let params = graph.nodes().iter().filter_map(|n| n.op.leaf_name().map(str::to_string)).collect();
        Block { name: name.to_string(), graph, params }
    }

    /// The block with another body.
    pub fn with(&self, graph: Graph) -> Block {
        Block { name: self.name.clone(), graph, params: self.params.clone() }
    }

    /// The leaf of a parameter.
    pub fn leaf(&self, param: &str) -> Option<NodeId> {
        self.graph.ids().find(|&id| self.graph.node(id).op.leaf_name() == Some(param))
    }

    /// Types of the parameters, in order.
    pub fn param_types(&self) -> Result<Vec<&Type>, IrError> {
        let nodes = self.graph.nodes().iter().rev();
        let leaves: HashMap<&str, &Type> = nodes.filter_map(|n| Some((n.op.leaf_name()?, n.ty()))).collect();
        let none = |p: &str| format!("parameter `{p}` has no leaf");
        let of = |p: &String| {
            let found = leaves.get(p.as_str()).copied();
            found.ok_or_else(|| IrError { origin: self.name.clone(), message: none(p) })
        };
        self.params.iter().map(of).collect()
    }

    /// True when the leaf of the parameter is a weight.
    pub fn is_weight(&self, param: &str) -> bool {
        self.leaf(param).is_some_and(|id| matches!(self.graph.node(id).op, Op::Weight(_)))
    }
}

/// What a call of a block takes and gives: computed once, however many calls there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    /// Types of the parameters, in order; an error where one has no leaf.
    pub params: Result<Vec<Type>, IrError>,
    /// Types of the outputs, in order.
    pub outputs: Vec<Type>,
}

impl Signature {
    /// The signature of a block.
    pub fn of(block: &Block) -> Signature {
        let params = block.param_types().map(|types| types.into_iter().cloned().collect());
        // An output that does not exist is the verifier's to refuse.
        let node = |(_, id): &(String, NodeId)| block.graph.nodes().get(id.index());
        let outputs = block.graph.outputs().iter().filter_map(node).map(|n| n.ty().clone()).collect();
        Signature { params, outputs }
    }
}
