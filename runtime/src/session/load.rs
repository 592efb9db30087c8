//! Weights of a session. In: a source of checkpoint tensors. Out: buffers in the layouts that kernels read, joined tensors
//! row after row; weights that outlive runs stay where they are.

use super::{Session, literal};
use crate::Error;
use crate::buffers::Buffers;
use crate::compile::weight_bytes;
use crate::memory::Memory;
use crate::pack::{pack, pack_on};
use crate::pool::Pool;
use crate::weigh::WeightSource;
use astrai_ir::ops::{Op, Weight};
use astrai_ir::{Layout, Tensor, Type};
use std::collections::HashMap;

impl Session {
    /// Packs every weight, one checkpoint tensor at a time, in the order in which the plan lists them.
    pub(super) fn load_weights(
        &mut self,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let program = self.program.clone();
        let total: u64 = program.plan.weights.iter().map(weight_bytes).sum();
        let mut done = 0;
        for w in &program.plan.weights {
            if let Some(b) = self.buffers.get(&w.weight.name) {
                let same = (b.dtype, Some(&b.shape)) == (w.weight.ty.dtype, literal(&w.weight.ty).as_ref());
                if !same || w.layout != Layout::Rows {
                    let name = &w.weight.name;
                    return Err(Error::Input(format!(
                        "the program does not read `{name}` as it lies in its buffer; compile it for trained weights"
                    )));
                }
                self.weights.push(b.address());
                self.shared.push(b.clone());
                continue;
            }
            let mut memory = Memory::zeroed(weight_bytes(w) as usize)?;
            fill(memory.bytes_mut(), &w.weight, w.layout, source, Some(&self.pool))?;
            done += memory.len() as u64;
            progress(done.min(total), total);
            self.weights.push(memory.address());
            self.owned.push(memory);
        }
        Ok(())
    }

    /// Weights as the interpreter takes them: whole buffers by name.
    pub(super) fn whole_weights(&self, source: &dyn WeightSource) -> Result<HashMap<String, Tensor>, Error> {
        let mut all = HashMap::new();
        for n in self.program.graph.nodes() {
            let Op::Weight(w) = &n.op else { continue };
            if self.buffers.get(&w.name).is_none() {
                let shape = literal(&w.ty).unwrap_or_default();
                let mut bytes = vec![0; shape.iter().product::<usize>() * w.ty.dtype.bytes()];
                fill(&mut bytes, w, Layout::Rows, source, None)?;
                let tensor = Tensor::from_bytes(w.ty.dtype, &shape, &bytes).map_err(Error::Input)?;
                all.insert(w.name.clone(), tensor);
            }
        }
        Ok(all)
    }
}

impl Buffers {
    /// Fills the buffer `name` with a weight's checkpoint tensors, row after row, in the buffer's own type.
    pub fn load(&self, name: &str, weight: &Weight, source: &dyn WeightSource) -> Result<(), Error> {
        let absent = || Error::Input(format!("there is no buffer `{name}`"));
        let dtype = self.shape(name).ok_or_else(absent)?.0;
        let weight = Weight { ty: weight.ty.with(dtype), ..weight.clone() };
        self.write(name, |bytes| fill(bytes, &weight, Layout::Rows, source, None)).ok_or_else(absent)?
    }
}

/// Writes the checkpoint tensors of a weight, on the threads of a pool where there is one.
fn fill(
    bytes: &mut [u8],
    w: &Weight,
    layout: Layout,
    source: &dyn WeightSource,
    pool: Option<&Pool>,
) -> Result<(), Error> {
    let k: usize = w.ty.shape.iter().skip(1).filter_map(|d| d.size()).product();
    let mut first = 0;
    for part in w.rows() {
        let t = source.tensor(&part.name).ok_or_else(|| missing(&part.name))?;
        check_shape(&part.name, &t.shape, part.rows, &w.ty)?;
        match pool {
            Some(pool) => pack_on(pool, bytes, w.ty.dtype, layout, first, k, &t.bytes, t.dtype),
            None => pack(bytes, w.ty.dtype, layout, first, k, &t.bytes, t.dtype),
        }
        first += part.rows;
        source.done(&part.name);
    }
    Ok(())
}

fn missing(name: &str) -> Error {
    Error::Input(format!("the weights have no tensor `{name}`; is this the checkpoint of this config?"))
}

fn check_shape(name: &str, shape: &[usize], rows: usize, ty: &Type) -> Result<(), Error> {
    let mut want: Vec<usize> = ty.shape.iter().filter_map(|d| d.size()).collect();
    if let Some(first) = want.first_mut() {
        *first = rows;
    }
    match shape == want {
        true => Ok(()),
        false => Err(Error::Input(format!(
            "tensor `{name}` is {shape:?} in the weights, the model wants {want:?}"
        ))),
    }
}
