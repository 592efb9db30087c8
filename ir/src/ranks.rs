//! The reference interpreter on all ranks of a simulated mesh. In: the graph that every rank runs, and the values of each
//! rank's leaves and symbols. Out: each rank's outputs. Ranks run in lockstep, node by node, and a collective sees the
//! arguments of all ranks of its group; the stages of a pipeline, each with a graph and a mesh of its own, run concurrently.

use crate::dtype::DType;
use crate::eval::{EvalCollective, Precision, Sizes, eval_node, sizes_of};
use crate::graph::{Graph, IrError, NodeId};
use crate::ops::Op;
use crate::shard::Mesh;
use crate::tensor::Tensor;
use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

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
    run(graph, mesh, leaves, sizes, precision, None)
}

fn run(
    graph: &Graph,
    mesh: &Mesh,
    leaves: &[HashMap<String, Tensor>],
    sizes: &[Sizes],
    precision: Precision,
    stage: Option<(&Channels, usize)>,
) -> Result<Outputs, IrError> {
    let leaves: Vec<HashMap<&str, &Tensor>> =
        leaves.iter().map(|l| l.iter().map(|(k, v)| (k.as_str(), v)).collect()).collect();
    let sizes: Vec<Sizes> = leaves.iter().zip(sizes).map(|(l, s)| sizes_of(graph, l, s)).collect();
    Lockstep { mesh, sizes: &sizes, precision, stage }.walk(graph, &leaves)
}

/// One stage of a pipeline.
pub struct Stage<'a> {
    /// What its ranks run.
    pub graph: &'a Graph,
    /// Values of the leaves of each of its ranks.
    pub leaves: Vec<HashMap<String, Tensor>>,
    /// Sizes of each of its ranks.
    pub sizes: Vec<Sizes>,
}

/// Evaluates the stages of a pipeline side by side; `mesh` is that of the ranks of one stage. Each rank sends to the rank at its
/// place in another stage.
pub fn eval_stages(stages: &[Stage], mesh: &Mesh, precision: Precision) -> Result<Vec<Outputs>, IrError> {
    let channels = Channels { state: Mutex::default(), changed: Condvar::new(), stages: stages.len() };
    let one = |(i, s): (usize, &Stage)| {
        let outs = run(s.graph, mesh, &s.leaves, &s.sizes, precision, Some((&channels, i)));
        channels.lock().done.insert(i);
        channels.changed.notify_all();
        outs
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = stages.iter().enumerate().map(|s| scope.spawn(move || one(s))).collect();
        let ended = |(i, t): (usize, std::thread::ScopedJoinHandle<Result<Outputs, IrError>>)| {
            t.join().unwrap_or_else(|_| Err(stages[i].graph.error(format!("stage {i} failed"))))
        };
        running.into_iter().enumerate().map(ended).collect()
    })
}

/// A point-to-point channel: sending stage, receiving stage, label.
type Channel = (usize, usize, String);

/// The channels between concurrently running stages.
struct Channels {
    state: Mutex<Sent>,
    changed: Condvar,
    stages: usize,
}

#[derive(Default)]
struct Sent {
    /// The value of each rank of the sender.
    values: HashMap<Channel, Vec<Tensor>>,
    /// Channels on which a stage waits.
    waiting: HashSet<Channel>,
    done: HashSet<usize>,
}

impl Channels {
    fn lock(&self) -> MutexGuard<'_, Sent> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, channel: Channel, values: Vec<Tensor>) -> Result<(), String> {
        let known = self.lock().values.insert(channel.clone(), values).is_some();
        self.changed.notify_all();
        if known { Err(format!("is sent twice as {channel:?}")) } else { Ok(()) }
    }

    fn receive(&self, channel: &Channel) -> Result<Vec<Tensor>, String> {
        let mut sent = self.lock();
        sent.waiting.insert(channel.clone());
        loop {
            if let Some(values) = sent.values.get(channel).cloned() {
                sent.waiting.remove(channel);
                return Ok(values);
            }
            let all = sent.waiting.len() + sent.done.len() == self.stages;
            if sent.done.contains(&channel.0)
                || all && !sent.waiting.iter().any(|l| sent.values.contains_key(l))
            {
                // Wakes the other waiting stages, so that they detect the deadlock, too.
                self.changed.notify_all();
                return Err(format!("waits for {channel:?}, which is never sent"));
            }
            sent = self.changed.wait(sent).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct Lockstep<'a> {
    mesh: &'a Mesh,
    sizes: &'a [Sizes],
    precision: Precision,
    /// Which stage of a pipeline this is.
    stage: Option<(&'a Channels, usize)>,
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
                Op::SendTo(_) | Op::RecvFrom(_) => self.channel(graph, id, &values)?,
                op if op.collective_axes().is_some() => self.collective(graph, id, &values)?,
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

    /// Sends to another stage, or receives from one.
    fn channel(&self, graph: &Graph, id: NodeId, values: &[Values]) -> Result<Values, IrError> {
        let node = graph.node(id);
        let at = |m: String| node.error(m);
        let (channels, here) =
            self.stage.ok_or_else(|| at("needs the other stages of its pipeline".into()))?;
        match &node.op {
            Op::SendTo(op) => {
                let of_rank = |v: &Values| v[node.args[0].index()][0].clone();
                let channel = (here, op.to, op.label.clone());
                channels.send(channel, values.iter().map(of_rank).collect()).map_err(at)?;
                Ok(vec![vec![Tensor::float(DType::F32, &[], vec![0.0])]; values.len()])
            }
            Op::RecvFrom(op) => {
                let made = channels.receive(&(op.from, here, op.label.clone())).map_err(at)?;
                Ok(made.into_iter().map(|t| vec![t]).collect())
            }
            op => Err(at(format!("{} is no channel", op.name()))),
        }
    }

    fn collective(&self, graph: &Graph, id: NodeId, values: &[Values]) -> Result<Values, IrError> {
        let node = graph.node(id);
        let at = |m: String| node.error(m);
        let groups = node.op.collective_axes().and_then(|over| self.mesh.groups(over));
        let groups = groups.ok_or_else(|| at(format!("runs over axes that {} does not have", self.mesh)))?;
        let mut made = vec![Vec::new(); values.len()];
        for group in groups {
            let of_rank = |r: &usize| node.args.iter().map(|a| &values[*r][a.index()][0]).collect();
            let args: Vec<Vec<&Tensor>> = group.iter().map(of_rank).collect();
            let sizes: Vec<&Sizes> = group.iter().map(|r| &self.sizes[*r]).collect();
            let outs = node
                .op
                .eval_collective(&args, &EvalCollective { sizes: &sizes, exact: self.precision.exact })
                .map_err(at)?;
            group.iter().zip(outs).for_each(|(r, out)| made[*r] = out);
        }
        Ok(made)
    }
}
