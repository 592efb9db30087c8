//! One operator applied to concrete tensors, for the tests beside the operators. In: an operator and arguments. Out: its
//! outputs, through the graph and the interpreter as everything else runs.

use crate::{Dim, Graph, IrError, Op, Sizes, Tensor, Type, eval};
use std::collections::HashMap;

/// Outputs of `op`; the error of the type rule or of the evaluation.
pub fn try_apply(op: impl Into<Op>, args: &[Tensor]) -> Result<Vec<Tensor>, IrError> {
    let mut g = Graph::new(vec![]);
    let (mut ids, mut leaves) = (Vec::new(), HashMap::new());
    for (i, t) in args.iter().enumerate() {
        let ty = Type::new(t.dtype, t.shape.iter().map(|&n| Dim::from(n)));
        ids.push(g.input(&format!("x{i}"), ty.dtype, ty.shape)?);
        leaves.insert(format!("x{i}"), t.clone());
    }
    let node = g.push(op, &ids)?;
    for i in 0..g.node(node).types.len() as u32 {
        let part = g.part(node, i)?;
        g.set_output(&i.to_string(), part)?;
    }
    Ok(eval(&g, &leaves, &Sizes::new(), Default::default())?.into_iter().map(|(_, t)| t).collect())
}

/// [`try_apply`] where it must succeed.
pub fn apply(op: impl Into<Op>, args: &[Tensor]) -> Vec<Tensor> {
    try_apply(op, args).unwrap()
}

/// Asserts equality up to the rounding of an f32.
pub fn close(got: &Tensor, want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, w) in want.iter().enumerate() {
        assert!((got.at(i) - w).abs() <= 3e-7 * w.abs().max(1.0), "element {i}: {} is not {w}", got.at(i));
    }
}
