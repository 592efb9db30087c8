//! The graph as petgraph sees it. In: a graph, and further edges between its nodes, such as anti-dependencies. Out: petgraph's
//! visit traits, so that its algorithms run on the graph as it is: the verifier asks for topological orders and
//! reachability. Edges go from arguments to users.

use crate::graph::{Graph, NodeId};
use petgraph::Direction;
use petgraph::algo::{has_path_connecting, toposort};
use petgraph::visit::{
    GraphBase, IntoNeighbors, IntoNeighborsDirected, IntoNodeIdentifiers, VisitMap, Visitable,
};
use std::iter::Copied;
use std::slice::Iter;

/// The edges of a graph in both directions, each once.
pub struct GraphView {
    predecessors: Vec<Vec<NodeId>>,
    successors: Vec<Vec<NodeId>>,
}

impl GraphView {
    /// The view of a graph: an edge from every argument to its user.
    pub fn new(graph: &Graph) -> GraphView {
        GraphView::with_edges(graph, &[])
    }

    /// The view of a graph with further edges (from, to), both nodes of the graph.
    pub fn with_edges(graph: &Graph, edges: &[(NodeId, NodeId)]) -> GraphView {
        let mut predecessors: Vec<Vec<NodeId>> = graph.nodes().iter().map(|n| n.args.clone()).collect();
        let mut successors = graph.users();
        for &(from, to) in edges {
            predecessors[to.index()].push(from);
            successors[from.index()].push(to);
        }
        for list in predecessors.iter_mut().chain(&mut successors) {
            list.sort_unstable();
            list.dedup();
        }
        GraphView { predecessors, successors }
    }

    /// Nodes with an edge to `id`, ascending: its arguments.
    pub fn predecessors(&self, id: NodeId) -> &[NodeId] {
        &self.predecessors[id.index()]
    }

    /// Nodes with an edge from `id`, ascending: its users.
    pub fn successors(&self, id: NodeId) -> &[NodeId] {
        &self.successors[id.index()]
    }

    /// Every node after all its predecessors; `None` when there is a cycle, which only further edges can make.
    pub fn topological_order(&self) -> Option<Vec<NodeId>> {
        toposort(self, None).ok()
    }

    /// True when a path leads from one node to another, or they are one.
    pub fn has_path(&self, from: NodeId, to: NodeId) -> bool {
        has_path_connecting(self, from, to, None)
    }
}

/// The nodes that a traversal has visited.
#[derive(Clone, Debug, Default)]
pub struct Visited(Vec<bool>);

impl VisitMap<NodeId> for Visited {
    fn visit(&mut self, a: NodeId) -> bool {
        !std::mem::replace(&mut self.0[a.index()], true)
    }

    fn is_visited(&self, a: &NodeId) -> bool {
        self.0[a.index()]
    }

    fn unvisit(&mut self, a: NodeId) -> bool {
        std::mem::replace(&mut self.0[a.index()], false)
    }
}

impl GraphBase for GraphView {
    type EdgeId = (NodeId, NodeId);
    type NodeId = NodeId;
}

impl Visitable for GraphView {
    type Map = Visited;

    fn visit_map(&self) -> Visited {
        Visited(vec![false; self.successors.len()])
    }

    fn reset_map(&self, map: &mut Visited) {
        *map = self.visit_map();
    }
}

impl<'v> IntoNeighbors for &'v GraphView {
    type Neighbors = Copied<Iter<'v, NodeId>>;

    fn neighbors(self, a: NodeId) -> Self::Neighbors {
        self.successors(a).iter().copied()
    }
}

impl<'v> IntoNeighborsDirected for &'v GraphView {
    type NeighborsDirected = Copied<Iter<'v, NodeId>>;

    fn neighbors_directed(self, a: NodeId, d: Direction) -> Self::NeighborsDirected {
        match d {
            Direction::Outgoing => self.successors(a).iter().copied(),
            Direction::Incoming => self.predecessors(a).iter().copied(),
        }
    }
}

impl IntoNodeIdentifiers for &GraphView {
    type NodeIdentifiers = std::iter::Map<std::ops::Range<u32>, fn(u32) -> NodeId>;

    fn node_identifiers(self) -> Self::NodeIdentifiers {
        (0..self.successors.len() as u32).map(NodeId)
    }
}
