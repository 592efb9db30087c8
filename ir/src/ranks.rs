//! The reference interpreter on all ranks of a simulated mesh. In: the graph that every rank runs, and the values of each
//! rank's leaves and symbols. Out: each rank's outputs. Ranks go in lockstep, node by node, and meet in the collectives.

use crate::eval::{Meet, Precision, Sizes, eval_node, sizes_of};
use crate::graph::{Graph, IrError, NodeId};
use crate::ops::Op;
use crate::shard::Mesh;
use crate::tensor::Tensor;
use std::collections::HashMap;

/// Values of the outputs of every rank, in their order.
pub type Outputs = Vec<Vec<(String, Tensor)>>;

/// Evaluates one graph on every rank of a mesh. `leaves` and `sizes` are those of each rank; sizes that are not given come
/// from the shapes of the leaves.
pub fn eval_ranks(
    graph: &Graph,
    mesh: &Mesh,
    leaves: &[HashMap<String, Tensor>],
    sizes: &[Sizes],
    precision: Precision,
) -> Result<Outputs, IrError> {
    if leaves.len() != mesh.ranks() || sizes.len() != mesh.ranks() {
        return Err(graph.error(format!("a mesh of {} ranks has leaves of {}", mesh.ranks(), leaves.len())));
    }
    let leaves: Vec<HashMap<&str, &Tensor>> =
        leaves.iter().map(|l| l.iter().map(|(k, v)| (k.as_str(), v)).collect()).collect();
    let sizes: Vec<Sizes> = leaves.iter().zip(sizes).map(|(l, s)| sizes_of(graph, l, s)).collect();
    Lockstep { mesh, sizes: &sizes, precision }.walk(graph, &leaves)
}

struct Lockstep<'a> {
    mesh: &'a Mesh,
    sizes: &'a [Sizes],
    precision: Precision,
}

/// For each node its outputs.
type Values = Vec<Vec<Tensor>>;

impl Lockstep<'_> {
    fn walk(&self, graph: &Graph, leaves: &[HashMap<&str, &Tensor>]) -> Result<Outputs, IrError> {
        let live = graph.live();
        let mut values: Vec<Values> = vec![vec![Vec::new(); graph.nodes().len()]; leaves.len()];
        for id in graph.ids().filter(|id| live[id.index()]) {
            let made = match &graph.node(id).op {
                Op::Call(_) => self.call(graph, id, &values)?,
                op if op.over().is_some() => self.meet(graph, id, &values)?,
                _ => values
                    .iter()
                    .enumerate()
                    .map(|(r, v)| eval_node(graph, id, v, &leaves[r], &self.sizes[r], self.precision))
                    .collect::<Result<_, _>>()?,
            };
            values.iter_mut().zip(made).for_each(|(v, made)| v[id.index()] = made);
        }
        let outputs = |v: &Values| {
            graph.outputs().iter().map(|(n, id)| (n.clone(), v[id.index()][0].clone())).collect()
        };
        Ok(values.iter().map(outputs).collect())
    }

    fn call(&self, graph: &Graph, id: NodeId, values: &[Values]) -> Result<Values, IrError> {
        let node = graph.node(id);
        let Op::Call(c) = &node.op else { return Err(graph.error("only calls have blocks".into())) };
        let block = graph.block(c.block);
        let bound = |v: &'_ Values| -> HashMap<&str, Tensor> {
            let args = node.args.iter().map(|a| v[a.index()][0].clone());
            block.params.iter().map(String::as_str).zip(args).collect()
        };
        let owned: Vec<HashMap<&str, Tensor>> = values.iter().map(bound).collect();
        let leaves: Vec<HashMap<&str, &Tensor>> =
            owned.iter().map(|l| l.iter().map(|(k, v)| (*k, v)).collect()).collect();
        let outs = self.walk(&block.graph, &leaves)?;
        Ok(outs.into_iter().map(|o| o.into_iter().map(|(_, t)| t).collect()).collect())
    }

    fn meet(&self, graph: &Graph, id: NodeId, values: &[Values]) -> Result<Values, IrError> {
        let node = graph.node(id);
        let at = |m: String| IrError {
            origin: node.origin.to_string(),
            message: format!("`{}` {m}", node.op.name()),
        };
        let groups = node.op.over().and_then(|over| self.mesh.groups(over));
        let groups = groups.ok_or_else(|| at(format!("meets over axes that {} does not have", self.mesh)))?;
        let mut made = vec![Vec::new(); values.len()];
        for group in groups {
            let of_rank = |r: &usize| node.args.iter().map(|a| &values[*r][a.index()][0]).collect();
            let args: Vec<Vec<&Tensor>> = group.iter().map(of_rank).collect();
            let sizes: Vec<&Sizes> = group.iter().map(|r| &self.sizes[*r]).collect();
            let outs =
                node.op.meet(&args, &Meet { sizes: &sizes, exact: self.precision.exact }).map_err(at)?;
            group.iter().zip(outs).for_each(|(r, out)| made[*r] = out);
        }
        Ok(made)
    }
}
