//! Noise on embeddings (NEFTune, arXiv:2310.05914). In: a graph that looks tokens up in a table. Out: the same graph with noise on each row
//! that is looked up: uniform in ±1, times a constant, times a number of the token's, which says how long its sequence is. The noise is
//! a function of two counters alone.

use astrai_ir::ops::{Input, Op, Random, RandomKind};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Type};

/// Counters of the noise, i64 scalars: the seed, and the draw, which differs from run to run.
pub const NOISE_COUNTERS: [&str; 2] = ["noise_seed", "noise_draw"];
/// What each token's noise is multiplied by, f32 `[tokens]`.
pub const NOISE_WIDTH: &str = "noise_width";
/// The random stream; weights are drawn from others.
const STREAM: u32 = 0x6e65_6674;

/// Noise on the rows of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Noise {
    /// The table's name.
    pub table: String,
    /// What all noise is multiplied by.
    pub scale: f64,
}

/// The graph with this noise.
///
/// # Errors
/// Nothing is looked up in the table.
pub fn perturb(graph: &Graph, noise: &Noise) -> Result<Graph, IrError> {
    let of_table = |id: NodeId| matches!(&graph.node(id).op, Op::Weight(w) if w.name == noise.table);
    let looked_up =
        |id: NodeId| matches!(graph.node(id).op, Op::Gather(_)) && of_table(graph.node(id).args[0]);
    if !graph.ids().any(looked_up) {
        return Err(graph.error(format!("no token is looked up in `{}`", noise.table)));
    }
    graph.rebuild(|out, id, args| {
        let made = out.push_exact(graph.node(id).op.clone(), args)?;
        if looked_up(id) { with_noise(out, made, noise.scale) } else { Ok(made) }
    })
}

/// `[tokens, hidden]`
fn with_noise(g: &mut Graph, x: NodeId, scale: f64) -> Result<NodeId, IrError> {
    let (ty, tokens) = (g.ty(x).clone(), g.ty(x).shape[0].clone());
    let mut counter = |name: &str| g.push(Input { name: name.into(), ty: Type::scalar(DType::I64) }, &[]);
    let counters = [counter(NOISE_COUNTERS[0])?, counter(NOISE_COUNTERS[1])?];
    let drawn = g.push(Random { kind: RandomKind::Uniform, ty: ty.clone(), stream: STREAM }, &counters)?;
    let twice = g.scale(drawn, 2.0)?;
    let one = g.fill(twice, 1.0)?;
    let around = g.sub(twice, one)?;
    let width = g.input(NOISE_WIDTH, DType::F32, vec![tokens.clone()])?;
    let width = g.scale(width, scale)?;
    let width = g.reshape(width, vec![tokens, Dim::from(1)])?;
    let width = g.broadcast(width, &ty.shape)?;
    let noise = g.mul(around, width)?;
    g.add(x, noise)
}
