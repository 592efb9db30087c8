//! The end of an encoder. In: the last layer's stream. Out: one vector a sequence.

use crate::config::{EncoderSpec, Pooling};
use astrai_ir::ops::{BinaryKind, CompareKind, Iota, ReduceKind, Scatter, ScatterKind, UnaryKind};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Type};

/// Below this a vector's length counts as this much, as in PyTorch's `normalize`.
const SHORTEST: f64 = 1e-12;

/// The embedding `[sequences, hidden]` of sequences without an empty one: `x` `[tokens, hidden]` normed by `norm` row by row,
/// `starts` i32 `[sequences + 1]`.
pub fn pool(
    g: &mut Graph,
    spec: &EncoderSpec,
    [x, starts]: [NodeId; 2],
    norm: impl Fn(&mut Graph, NodeId) -> Result<NodeId, IrError>,
) -> Result<NodeId, IrError> {
    let sequences = Dim::symbol("sequences");
    let begins = g.slice(starts, 0, Dim::from(0), sequences.clone())?;
    let ends = g.slice(starts, 0, Dim::from(1), sequences)?;
    let pooled = match spec.pooling {
        Pooling::Cls => {
            let first = g.scope("pool", |g| g.gather(x, begins, 0))?;
            norm(g, first)?
        }
        Pooling::Last => {
            let last = g.scope("pool", |g| {
                let one = g.fill(ends, 1.0)?;
                let last = g.sub(ends, one)?;
                g.gather(x, last, 0)
            })?;
            norm(g, last)?
        }
        Pooling::Mean => {
            let x = norm(g, x)?;
            g.scope("pool", |g| mean(g, x, [begins, ends]))?
        }
    };
    if !spec.normalise {
        return Ok(pooled);
    }
    g.scope("normalise", |g| {
        let square = g.mul(pooled, pooled)?;
        let sum = g.reduce_last(ReduceKind::Sum, square)?;
        let length = g.unary(UnaryKind::Sqrt, sum)?;
        let least = g.fill(length, SHORTEST)?;
        let length = g.binary(BinaryKind::Max, length, least)?;
        g.div(pooled, length)
    })
}

/// Means over sequences: each row is added to its own sequence's, so that no result depends on the rest of a batch.
fn mean(g: &mut Graph, x: NodeId, [begins, ends]: [NodeId; 2]) -> Result<NodeId, IrError> {
    let [tokens, hidden] = [0, 1].map(|axis| g.ty(x).shape[axis].clone());
    let sequences = g.ty(ends).shape[0].clone();
    // A row's sequence is the number of those that end before it.
    let shape = vec![tokens, sequences.clone()];
    let row = g.push(Iota { ty: Type { dtype: DType::I32, shape: shape.clone() }, axis: 0 }, &[])?;
    let each = g.broadcast(ends, &shape)?;
    let over = g.compare(CompareKind::Ge, row, each)?;
    let over = g.cast(over, DType::I32)?;
    let of = g.reduce(ReduceKind::Sum, over, &[1])?; // [tokens]
    let none = g.constant(Type::new(DType::F32, [sequences.clone(), hidden.clone()]), 0.0)?;
    let op = Scatter { axis: 0, batch: 0, kind: ScatterKind::Add };
    let sum = g.push(op, &[none, of, x])?; // [sequences, hidden]
    let count = g.sub(ends, begins)?;
    let count = g.cast(count, DType::F32)?;
    let count = g.reshape(count, vec![sequences.clone(), Dim::from(1)])?;
    let count = g.broadcast(count, &[sequences, hidden])?;
    g.div(sum, count)
}
