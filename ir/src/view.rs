//! The graph as petgraph sees it. In: a graph, whose users are computed once. Out: petgraph's visit traits, so that its
//! algorithms (topological order, reachability, dominators) run on the graph as it is. Edges go from arguments to users.

use crate::graph::{Graph, Node, NodeId};
use petgraph::visit::{
    Data, GraphBase, GraphProp, IntoNeighbors, IntoNeighborsDirected, IntoNodeIdentifiers,
    IntoNodeReferences, NodeCompactIndexable, NodeCount, NodeIndexable, VisitMap, Visitable,
};
use petgraph::{Directed, Direction};
use std::iter::Copied;
use std::slice::Iter;

/// A graph and the users of its nodes.
pub struct GraphView<'a> {
    graph: &'a Graph,
    args: Vec<Vec<NodeId>>,
    users: Vec<Vec<NodeId>>,
}

impl<'a> GraphView<'a> {
    /// The view of a graph.
    pub fn new(graph: &'a Graph) -> GraphView<'a> {
        let once = |n: &Node| {
            let mut args = n.args.clone();
            args.sort_unstable();
            args.dedup();
            args
        };
        GraphView { graph, args: graph.nodes().iter().map(once).collect(), users: graph.users() }
    }

    /// The graph.
    pub fn graph(&self) -> &'a Graph {
        self.graph
    }

    /// Nodes that take `id` as an argument, ascending, each once.
    pub fn users(&self, id: NodeId) -> &[NodeId] {
        &self.users[id.index()]
    }

    /// Arguments of `id`, ascending, each once.
    pub fn args(&self, id: NodeId) -> &[NodeId] {
        &self.args[id.index()]
    }
}

/// Nodes seen by a walk.
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

impl GraphBase for GraphView<'_> {
    type EdgeId = (NodeId, NodeId);
    type NodeId = NodeId;
}

impl Data for GraphView<'_> {
    type NodeWeight = Node;
    type EdgeWeight = ();
}

impl GraphProp for GraphView<'_> {
    type EdgeType = Directed;
}

impl NodeCount for GraphView<'_> {
    fn node_count(&self) -> usize {
        self.users.len()
    }
}

impl NodeIndexable for GraphView<'_> {
    fn node_bound(&self) -> usize {
        self.users.len()
    }

    fn to_index(&self, a: NodeId) -> usize {
        a.index()
    }

    fn from_index(&self, i: usize) -> NodeId {
        NodeId(i as u32)
    }
}

impl NodeCompactIndexable for GraphView<'_> {}

impl Visitable for GraphView<'_> {
    type Map = Visited;

    fn visit_map(&self) -> Visited {
        Visited(vec![false; self.users.len()])
    }

    fn reset_map(&self, map: &mut Visited) {
        *map = self.visit_map();
    }
}

impl<'v> IntoNeighbors for &'v GraphView<'_> {
    type Neighbors = Copied<Iter<'v, NodeId>>;

    fn neighbors(self, a: NodeId) -> Self::Neighbors {
        self.users[a.index()].iter().copied()
    }
}

impl<'v> IntoNeighborsDirected for &'v GraphView<'_> {
    type NeighborsDirected = Copied<Iter<'v, NodeId>>;

    fn neighbors_directed(self, a: NodeId, d: Direction) -> Self::NeighborsDirected {
        match d {
            Direction::Outgoing => self.users[a.index()].iter().copied(),
            Direction::Incoming => self.args[a.index()].iter().copied(),
        }
    }
}

impl IntoNodeIdentifiers for &GraphView<'_> {
    type NodeIdentifiers = std::iter::Map<std::ops::Range<u32>, fn(u32) -> NodeId>;

    fn node_identifiers(self) -> Self::NodeIdentifiers {
        (0..self.users.len() as u32).map(NodeId)
    }
}

/// A node with its id.
pub type NodeRef<'v> = (NodeId, &'v Node);

impl<'v> IntoNodeReferences for &'v GraphView<'_> {
    type NodeRef = NodeRef<'v>;
    type NodeReferences =
        std::iter::Map<std::iter::Enumerate<Iter<'v, Node>>, fn((usize, &'v Node)) -> NodeRef<'v>>;

    fn node_references(self) -> Self::NodeReferences {
        self.graph.nodes().iter().enumerate().map(|(i, n)| (NodeId(i as u32), n))
    }
}
