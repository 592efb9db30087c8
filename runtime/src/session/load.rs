//! Weights of a session. In: a source of checkpoint tensors. Out: buffers in the layouts that kernels read, joined tensors
//! row after row; weights that outlive runs stay where they are.

use super::keep::Kept;
use super::{Session, literal};
use crate::Error;
use crate::buffers::Buffers;
use crate::device::{Block, Device, PIECE, Pointer, give_back};
use crate::pack::{Matrices, Rows, convert, layout_bytes};
use crate::report::weight_bytes;
use crate::source::WeightSource;
use astrai_ir::ops::{Op, Weight};
use astrai_ir::plan::PlannedWeight;
use astrai_ir::{DType, Layout, Precision, Sizes, Tensor, Type, eval};
use astrai_passes::Derived;
use std::cmp::Reverse;
use std::collections::HashMap;

impl Session {
    /// Maps every weight that no session beside it has from where they are kept, or packs them, one checkpoint tensor at a time, the largest
    /// first: a checkpoint's tensor lies beside what is packed of it, and the largest do so while the others are not there yet.
    pub(super) fn load_weights(
        &mut self,
        source: &dyn WeightSource,
        beside: Option<&Session>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let (program, device) = (self.program.clone(), self.device.clone());
        // Texts of a vocabulary and the planning were large, and are gone.
        give_back();
        let weights = &program.plan.weights;
        let mut placed = vec![(Pointer(0), None); weights.len()];
        let mut lacking = vec![];
        for (i, w) in weights.iter().enumerate() {
            if let Some(b) = self.buffers.get(&w.weight.name) {
                let same = (b.dtype, Some(&b.shape)) == (w.weight.ty.dtype, literal(&w.weight.ty).as_ref());
                if !same || w.layout.is_packed() {
                    let name = &w.weight.name;
                    return Err(Error::Input(format!(
                        "the program does not read `{name}` as it lies in its buffer; compile it for trained weights"
                    )));
                }
                placed[i] = (b.block.at(), None);
                self.shared.push(b.clone());
            } else if let Some(block) = beside.and_then(|b| b.packed_as(w)) {
                placed[i] = (block.at(), Some(block));
            } else {
                lacking.push(i);
            }
        }
        let total = program.fresh_weights(Some(&self.buffers), beside.map(|b| b.program()));
        let wanted: Vec<_> = lacking.iter().map(|i| &weights[*i]).collect();
        let origin = source.origin().filter(|_| !wanted.is_empty());
        let kept = origin.and_then(|origin| Kept::of(&wanted, &program.derived, origin, &*device));
        let blocks = match kept.as_ref().and_then(Kept::blocks) {
            Some(blocks) => blocks,
            None => {
                let lens: Vec<_> = wanted.iter().map(|w| weight_bytes(w) as usize).collect();
                let blocks = device.alloc(&lens)?;
                let mut all: Vec<_> = wanted.into_iter().zip(&blocks).collect();
                all.sort_by_key(|(_, block)| Reverse(block.len()));
                let mut done = 0;
                for (w, block) in all {
                    load_weight(w, block, &program.derived, source, &*device)?;
                    // What a checkpoint's tensor took beside it, the allocator would keep for the next.
                    if block.len() > PIECE {
                        give_back();
                    }
                    done += block.len() as u64;
                    progress(done.min(total), total);
                }
                match (origin.is_some_and(|origin| origin.keep), &kept) {
                    (true, Some(kept)) => kept.write(&blocks)?,
                    (true, None) => {
                        let line = "weights are kept where kernels run on a processor and have a folder of their own (ASTRAI_CACHE); leave --keep-weights out";
                        return Err(Error::Input(line.into()));
                    }
                    (false, _) => {}
                }
                blocks
            }
        };
        for (i, block) in lacking.into_iter().zip(blocks) {
            placed[i] = (block.at(), Some(block));
        }
        (self.weights, self.packed) = placed.into_iter().unzip();
        source.loaded();
        give_back();
        Ok(())
    }

    /// The memory of a weight, where this session has it in the same layout.
    fn packed_as(&self, w: &PlannedWeight) -> Option<Block> {
        let at = self.program.plan.weights.iter().position(|own| own == w)?;
        self.packed.get(at)?.clone()
    }

    /// Bytes of the weights that this session alone holds, and of those that one beside it shares.
    pub fn weight_bytes(&self) -> [u64; 2] {
        let mut bytes = [0; 2];
        for block in self.packed.iter().flatten() {
            bytes[usize::from(block.holders() > 1)] += block.len() as u64;
        }
        bytes
    }

    /// Weights as kernels read them where this process sees them, those that a session beside this one shares among them; not those
    /// of buffers.
    pub fn weights(&self) -> Vec<&[u8]> {
        let seen = |b: &Block| {
            let address = self.device.host(b.at())?;
            // SAFETY: the block is that long, and nobody writes weights once they are loaded.
            Some(unsafe { std::slice::from_raw_parts(address.cast_const(), b.len()) })
        };
        self.packed.iter().flatten().filter_map(seen).collect()
    }
}

impl Buffers {
    /// Fills the buffer `name` with a weight's checkpoint tensors, row after row, in the buffer's own type.
    pub fn load(&self, name: &str, weight: &Weight, source: &dyn WeightSource) -> Result<(), Error> {
        let dtype = self.shape(name).map_or(weight.ty.dtype, |(dtype, _)| dtype);
        let ty = weight.ty.with(dtype);
        self.store(name, |at| {
            let place = Stored { at, ty: &ty, layout: Layout::Rows, device: &**self.device() };
            place.store(&mut |put| for_each_part(weight, source, put))
        })
    }
}

/// Bytes of a weight in its layout, as kernels read it: what a session holds of it.
pub fn laid_out(w: &PlannedWeight, source: &dyn WeightSource, device: &dyn Device) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; weight_bytes(w) as usize];
    fill(&mut bytes, &w.weight, w.layout, source, device)?;
    Ok(bytes)
}

/// Packs a weight into its block.
fn load_weight(
    w: &PlannedWeight,
    block: &Block,
    derived: &[Derived],
    source: &dyn WeightSource,
    device: &dyn Device,
) -> Result<(), Error> {
    let place = Stored { at: block.at(), ty: &w.weight.ty, layout: w.layout, device };
    match derived.iter().find(|d| d.weight.name == w.weight.name) {
        Some(d) => {
            let t = derive(d, source, device)?;
            let (bytes, rows) = (t.to_bytes(), t.shape.first().copied().unwrap_or(1));
            place.store(&mut |put| put(rows, &bytes, t.dtype))
        }
        None => place.store(&mut |put| for_each_part(&w.weight, source, put)),
    }
}

/// The value of a derived weight, by the interpreter: each is computed once, when it is loaded.
fn derive(d: &Derived, source: &dyn WeightSource, device: &dyn Device) -> Result<Tensor, Error> {
    let mut leaves = HashMap::new();
    for n in d.graph.nodes() {
        if let Op::Weight(w) = &n.op {
            let shape = literal(&w.ty).unwrap_or_default();
            let mut bytes = vec![0; shape.iter().product::<usize>() * w.ty.dtype.bytes()];
            fill(&mut bytes, w, Layout::Rows, source, device)?;
            let tensor = Tensor::from_bytes(w.ty.dtype, &shape, &bytes).map_err(Error::Input)?;
            leaves.insert(w.name.clone(), tensor);
        }
    }
    let values = eval(&d.graph, &leaves, &Sizes::new(), Precision::default())?;
    let value = values.into_iter().next().map(|(_, t)| t);
    value.ok_or_else(|| Error::Input(format!("`{}` has no value", d.weight.name)))
}

/// Takes so many rows of a weight: their bytes, in this type.
type Put<'a> = &'a mut dyn FnMut(usize, &[u8], DType) -> Result<(), Error>;

/// The place of a weight in the memory of a device.
struct Stored<'a> {
    at: Pointer,
    ty: &'a Type,
    layout: Layout,
    device: &'a dyn Device,
}

impl Stored<'_> {
    /// Stores the rows that `parts` gives, one part after another: in place where this process sees the memory. Otherwise rows go piece
    /// by piece, so that no weight is twice in this process's memory, and packed weights whole, whose rows lie among each other.
    fn store(&self, parts: &mut dyn FnMut(Put) -> Result<(), Error>) -> Result<(), Error> {
        let Stored { at, ty, layout, device } = *self;
        let shape = literal(ty).unwrap_or_default();
        let len = layout_bytes(layout, ty.dtype, &shape);
        let mut first = 0;
        let mut whole = |bytes: &mut [u8]| {
            parts(&mut |rows, part, from| {
                write_part(bytes, first, &shape, layout, ty.dtype, (part, from), device);
                first += rows;
                Ok(())
            })
        };
        if let Some(address) = device.host(at) {
            // SAFETY: the memory was made for the weight, and nobody else uses it now.
            return whole(unsafe { std::slice::from_raw_parts_mut(address, len) });
        }
        if layout.is_packed() {
            let mut bytes = vec![0; len];
            whole(&mut bytes)?;
            return device.write(at, &bytes);
        }
        let mut to = at;
        parts(&mut |_, part, from| {
            for piece in part.chunks(PIECE / ty.dtype.bytes() * from.bytes()) {
                let len = piece.len() / from.bytes() * ty.dtype.bytes();
                device.fill(to, len, &mut |bytes| convert(bytes, ty.dtype, piece, from))?;
                to = to.offset(len as u64);
            }
            Ok(())
        })
    }
}

/// Writes the checkpoint tensors of a weight, on the threads of a device.
fn fill(
    bytes: &mut [u8],
    w: &Weight,
    layout: Layout,
    source: &dyn WeightSource,
    device: &dyn Device,
) -> Result<(), Error> {
    let shape = literal(&w.ty).unwrap_or_default();
    let mut first = 0;
    for_each_part(w, source, &mut |rows, part, from| {
        write_part(bytes, first, &shape, layout, w.ty.dtype, (part, from), device);
        first += rows;
        Ok(())
    })
}

/// Writes rows, or matrices, of a weight of this shape from number `first` on.
fn write_part(
    to: &mut [u8],
    first: usize,
    shape: &[usize],
    layout: Layout,
    dtype: DType,
    (bytes, from): (&[u8], DType),
    device: &dyn Device,
) {
    match *shape {
        [_, k, n] if layout.is_packed() => {
            Matrices { bytes, from, size: [k, n], dtype, layout }.pack_on(device, to, first);
        }
        _ => {
            let k = shape.iter().skip(1).product();
            Rows { bytes, from, k, dtype, layout }.pack_on(device, to, first);
        }
    }
}

/// Shows the checkpoint tensors of a weight in order: rows, bytes, type.
fn for_each_part(w: &Weight, source: &dyn WeightSource, f: Put) -> Result<(), Error> {
    for part in w.rows() {
        let t = source.tensor(&part.name).ok_or_else(|| missing(&part.name))?;
        check_shape(&part.name, &t.shape, part.rows, &w.ty)?;
        if w.ty.dtype.is_float() && !t.dtype.is_float() {
            // Codes of a quantised checkpoint mean nothing without their scales.
            return Err(Error::Input(format!(
                "tensor `{}` holds integers ({}) where the model has numbers: quantised weights of this form are not supported; give the checkpoint they were made of",
                part.name, t.dtype
            )));
        }
        f(part.rows, &t.bytes, t.dtype)?;
        source.done(&part.name);
    }
    Ok(())
}

fn missing(name: &str) -> Error {
    Error::Input(format!("the weights have no tensor `{name}`; is this the checkpoint of this config?"))
}

fn check_shape(name: &str, shape: &[usize], rows: usize, ty: &Type) -> Result<(), Error> {
    let mut want = literal(ty).unwrap_or_default();
    want.iter_mut().take(1).for_each(|first| *first = rows);
    match shape == want {
        true => Ok(()),
        false => Err(Error::Input(format!(
            "tensor `{name}` is {shape:?} in the weights, the model wants {want:?}"
        ))),
    }
}
