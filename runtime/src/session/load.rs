//! Weights of a session. In: a source of checkpoint tensors. Out: buffers in the layouts that kernels read, joined tensors
//! row after row; weights that outlive runs stay where they are.

use super::{Session, literal};
use crate::Error;
use crate::buffers::Buffers;
use crate::compile::weight_bytes;
use crate::memory::Memory;
use crate::pack::{pack, pack_matrices, pack_on};
use crate::pool::Pool;
use crate::weigh::WeightSource;
use astrai_ir::ops::{Op, Weight};
use astrai_ir::plan::PlannedWeight;
use astrai_ir::{Layout, Precision, Sizes, Tensor, Type, eval};
use astrai_passes::Derived;
use std::collections::HashMap;
use std::sync::Arc;

impl Session {
    /// Packs every weight that no session beside it has, one checkpoint tensor at a time, in the order in which the plan lists
    /// them.
    pub(super) fn load_weights(
        &mut self,
        source: &dyn WeightSource,
        beside: Option<&Session>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let program = self.program.clone();
        let total = program.fresh_weights(&self.buffers, beside.map(|b| b.program()));
        let mut done = 0;
        let weights = &program.plan.weights;
        let packed: Vec<_> = weights.iter().map(|w| beside.and_then(|b| b.packed_as(w))).collect();
        let len = |(w, packed): (&PlannedWeight, &Option<_>)| {
            let there = packed.is_some() || self.buffers.get(&w.weight.name).is_some();
            if there { 0 } else { weight_bytes(w) as usize }
        };
        let fresh = Memory::together(&weights.iter().zip(&packed).map(len).collect::<Vec<_>>())?;
        for ((w, packed), mut memory) in weights.iter().zip(packed).zip(fresh) {
            if let Some(b) = self.buffers.get(&w.weight.name) {
                let same = (b.dtype, Some(&b.shape)) == (w.weight.ty.dtype, literal(&w.weight.ty).as_ref());
                if !same || w.layout != Layout::Rows {
                    let name = &w.weight.name;
                    return Err(Error::Input(format!(
                        "the program does not read `{name}` as it lies in its buffer; compile it for trained weights"
                    )));
                }
                self.weights.push(b.address());
                self.packed.push(None);
                self.shared.push(b.clone());
                continue;
            }
            if let Some(memory) = packed {
                self.weights.push(memory.address());
                self.packed.push(Some(memory));
                continue;
            }
            match program.derived.iter().find(|d| d.weight.name == w.weight.name) {
                Some(d) => put(memory.bytes_mut(), w.layout, &derive(d, source)?),
                None => fill(memory.bytes_mut(), &w.weight, w.layout, source, Some(&self.pool))?,
            }
            done += memory.len() as u64;
            progress(done.min(total), total);
            self.weights.push(memory.address());
            self.packed.push(Some(Arc::new(memory)));
        }
        Ok(())
    }

    /// The memory of a weight, where this session has it in the same layout.
    fn packed_as(&self, w: &PlannedWeight) -> Option<Arc<Memory>> {
        let at = self.program.plan.weights.iter().position(|own| own == w)?;
        self.packed.get(at)?.clone()
    }

    /// Bytes of the weights that this session alone holds, and of those that one beside it shares.
    pub fn weight_bytes(&self) -> [u64; 2] {
        let mut bytes = [0; 2];
        for memory in self.packed.iter().flatten() {
            bytes[usize::from(Arc::strong_count(memory) > 1)] += memory.len() as u64;
        }
        bytes
    }

    /// Weights as kernels read them, those that a session beside this one shares among them; not those of buffers.
    pub fn weights(&self) -> impl Iterator<Item = &[u8]> {
        self.packed.iter().flatten().map(|m| m.bytes())
    }

    /// Weights as the interpreter takes them: whole buffers by name.
    pub(super) fn whole_weights(&self, source: &dyn WeightSource) -> Result<HashMap<String, Tensor>, Error> {
        let mut all = HashMap::new();
        for n in self.program.graph.nodes() {
            let Op::Weight(w) = &n.op else { continue };
            if self.buffers.get(&w.name).is_none() {
                let tensor = match self.program.derived.iter().find(|d| d.weight.name == w.name) {
                    Some(d) => derive(d, source)?,
                    None => whole(w, source)?,
                };
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

/// Bytes of a weight in its layout, as kernels read it: what a session holds of it.
pub fn laid_out(w: &PlannedWeight, source: &dyn WeightSource) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; weight_bytes(w) as usize];
    fill(&mut bytes, &w.weight, w.layout, source, None)?;
    Ok(bytes)
}

/// The checkpoint tensors of a weight as one.
fn whole(w: &Weight, source: &dyn WeightSource) -> Result<Tensor, Error> {
    let shape = literal(&w.ty).unwrap_or_default();
    let mut bytes = vec![0; shape.iter().product::<usize>() * w.ty.dtype.bytes()];
    fill(&mut bytes, w, Layout::Rows, source, None)?;
    Tensor::from_bytes(w.ty.dtype, &shape, &bytes).map_err(Error::Input)
}

/// The value of a derived weight, by the interpreter: each is computed once, when it is loaded.
fn derive(d: &Derived, source: &dyn WeightSource) -> Result<Tensor, Error> {
    let mut leaves = HashMap::new();
    for n in d.graph.nodes() {
        if let Op::Weight(w) = &n.op {
            leaves.insert(w.name.clone(), whole(w, source)?);
        }
    }
    let values = eval(&d.graph, &leaves, &Sizes::new(), Precision::default())?;
    let value = values.into_iter().next().map(|(_, t)| t);
    value.ok_or_else(|| Error::Input(format!("`{}` has no value", d.weight.name)))
}

/// Writes a tensor in a layout.
fn put(bytes: &mut [u8], layout: Layout, t: &Tensor) {
    match (layout, t.shape.as_slice()) {
        (Layout::Panels, &[_, k, n]) => {
            pack_matrices(None, bytes, t.dtype, 0, [k, n], (&t.to_bytes(), t.dtype));
        }
        _ => {
            let k = t.shape.iter().skip(1).product();
            pack(bytes, t.dtype, layout, 0, k, &t.to_bytes(), t.dtype);
        }
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
    let sizes = literal(&w.ty).unwrap_or_default();
    let k: usize = sizes.iter().skip(1).product();
    let mut first = 0;
    for part in w.rows() {
        let t = source.tensor(&part.name).ok_or_else(|| missing(&part.name))?;
        check_shape(&part.name, &t.shape, part.rows, &w.ty)?;
        match pool {
            _ if layout == Layout::Panels && sizes.len() == 3 => {
                let of = [sizes[1], sizes[2]];
                pack_matrices(pool, bytes, w.ty.dtype, first, of, (&t.bytes, t.dtype));
            }
            Some(pool) => pack_on(pool, bytes, w.ty.dtype, layout, first, k, (&t.bytes, t.dtype)),
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
