//! From a graph to its e-graph and back. In: a body, or a selection of one e-node an e-class. Out: the e-graph with the e-class of
//! every node, or the selected body, its nodes in the order of the original ones.

use super::algebra::{Algebra, EGraph, add, parts};
use super::term::Term;
use astrai_ir::effects::Effects;
use astrai_ir::{Graph, IrError, NodeId};
use egg::{Id, Language};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A body as an e-graph.
pub struct Encoded {
    /// The e-graph.
    pub egraph: EGraph,
    /// E-class of each live node of the body.
    pub classes: Vec<Option<Id>>,
    /// The e-nodes of the body's nodes, as they were added.
    terms: Vec<Term>,
}

impl Encoded {
    /// The e-graph of a body whose leaves `weights` are weights.
    pub fn of(graph: &Arc<Graph>, weights: HashSet<NodeId>) -> Result<Encoded, IrError> {
        let overwritten: HashSet<NodeId> = Effects::of(graph)?.writes.into_iter().map(|(_, v)| v).collect();
        let mut egraph = EGraph::new(Algebra::new(graph.clone(), weights));
        let mut classes: Vec<Option<Id>> = vec![None; graph.nodes().len()];
        let mut terms = Vec::new();
        let live = graph.live();
        for id in graph.ids().filter(|id| live[id.index()]) {
            let node = graph.node(id);
            egraph.analysis.here = node.origin.clone();
            let args: Vec<Id> = node.args.iter().filter_map(|a| classes[a.index()]).collect();
            let class = match args.is_empty() && !matches!(node.op, astrai_ir::Op::Const(_)) {
                true => egraph.add(Term::Leaf(id)),
                false => add(&mut egraph, &node.op, &args),
            };
            terms.push(egraph.id_to_node(class).clone());
            if overwritten.contains(&id) {
                let mut facts = egraph[class].data.clone();
                facts.pinned = true;
                egraph.set_analysis_data(class, facts);
            }
            classes[id.index()] = Some(class);
        }
        egraph.rebuild();
        Ok(Encoded { egraph, classes, terms })
    }

    /// The e-nodes of the body's nodes, over canonical e-classes.
    pub fn originals(&self) -> HashSet<Term> {
        self.terms.iter().map(|t| t.clone().map_children(|c| self.egraph.find(c))).collect()
    }

    /// E-classes of the outputs.
    pub fn roots(&self) -> Vec<Id> {
        let of = |(_, id): &(String, NodeId)| self.classes[id.index()].map(|c| self.egraph.find(c));
        self.egraph.analysis.graph.outputs().iter().filter_map(of).collect()
    }

    /// The body that has for every e-class the e-node that `choice` selects.
    pub fn decode(&self, choice: &HashMap<Id, Term>) -> Result<Graph, IrError> {
        let from = &self.egraph.analysis.graph;
        let mut d =
            Decode { encoded: self, choice, out: Graph::new(from.symbols.clone()), made: HashMap::new() };
        from.blocks().iter().for_each(|b| _ = d.out.add_block(b.clone()));
        for id in from.ids() {
            // Leaves are kept, used or not: they are the parameters of the block.
            let leaf = from.node(id).op.leaf_name().is_some();
            let class = self.classes[id.index()].map(|c| self.egraph.find(c));
            match class {
                Some(c) if choice.contains_key(&c) => {
                    let made = d.class(c)?;
                    if d.out.ty(made).shape == from.ty(id).shape {
                        d.out.note_sharding(made, &from.node(id).sharding);
                    }
                }
                _ if leaf => _ = d.leaf(id)?,
                _ => {}
            }
        }
        for ((name, _), root) in from.outputs().iter().zip(self.roots()) {
            let id = d.class(root)?;
            d.out.set_output(name, id)?;
        }
        Ok(d.out)
    }
}

struct Decode<'a> {
    encoded: &'a Encoded,
    choice: &'a HashMap<Id, Term>,
    out: Graph,
    made: HashMap<Id, NodeId>,
}

impl Decode<'_> {
    fn leaf(&mut self, id: NodeId) -> Result<NodeId, IrError> {
        let node = self.encoded.egraph.analysis.graph.node(id).clone();
        self.out.with_origin(&node.origin, |g| g.push_exact(node.op, &[]))
    }

    fn class(&mut self, class: Id) -> Result<NodeId, IrError> {
        if let Some(id) = self.made.get(&class) {
            return Ok(*id);
        }
        let egraph = &self.encoded.egraph;
        let none = || self.out.error("a class was chosen without a term".into());
        let term = self.choice.get(&class).ok_or_else(none)?.clone();
        let made = match &term {
            Term::Leaf(id) => self.leaf(*id)?,
            _ => {
                let (op, args) = parts(egraph, &term).ok_or_else(none)?;
                let args: Vec<Id> = args.iter().map(|a| egraph.find(*a)).collect();
                let args = args.into_iter().map(|a| self.class(a)).collect::<Result<Vec<_>, _>>()?;
                let origin = egraph[class].data.origin.clone();
                self.out.with_origin(&origin, |g| g.push(op, &args))?
            }
        };
        self.made.insert(class, made);
        Ok(made)
    }
}
