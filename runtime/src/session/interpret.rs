//! A run by the reference interpreter, which wants whole tensors: weights and states are copied in, next versions back.

use super::Session;
use super::execute::grow;
use crate::{Error, Value};
use astrai_ir::ops::Op;
use astrai_ir::{Precision, Tensor, eval};
use astrai_passes::version_leaf;
use std::collections::HashMap;

impl Session {
    /// Runs once. The caller has the turn.
    pub(super) fn interpret(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        let mut leaves = HashMap::new();
        for (name, v) in inputs {
            leaves.insert(*name, v.to_tensor().map_err(Error::Input)?);
        }
        let program = self.program.clone();
        let g = &program.graph;
        for n in g.nodes().iter().filter(|n| matches!(n.op, Op::State(_) | Op::Weight(_))) {
            let Some(name) = n.op.leaf_name() else { continue };
            let Some(b) = self.buffers.get(name) else { continue };
            let len = b.shape.iter().product::<usize>() * b.dtype.bytes();
            // SAFETY: the buffer has this length, and only this run touches it.
            let bytes = unsafe { std::slice::from_raw_parts(b.address(), len) };
            leaves.insert(name, Tensor::from_bytes(b.dtype, &b.shape, bytes).map_err(Error::Input)?);
        }
        let weights = self.interpreted.iter().flatten().map(|(k, v)| (k.as_str(), v));
        let all: HashMap<&str, &Tensor> = weights.chain(leaves.iter().map(|(k, v)| (*k, v))).collect();
        let outs = eval::eval_borrowed(g, &all, &self.sizes, Precision::default())?;
        for ((_, t), (_, id)) in outs.iter().zip(g.outputs()) {
            let name = version_leaf(g, *id).and_then(|l| g.node(l).op.leaf_name());
            let Some(b) = name.and_then(|n| self.buffers.get(n)) else { continue };
            let bytes = t.to_bytes();
            // SAFETY: types say that the next version is as large as the buffer; nobody else touches it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), b.address(), bytes.len()) };
        }
        for r in &self.results {
            let bytes = outs[r.at].1.to_bytes();
            grow(&mut self.result_memory, r.at, bytes.len())?;
            self.result_memory[r.at].bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}
