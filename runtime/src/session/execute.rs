//! One launch. In: a kernel or a region without one, and addresses. Out: written buffers.

use super::sizes::concrete;
use crate::Error;
use crate::cc::Loaded;
use crate::memory::Memory;
use crate::pack::{packed_bytes, unpack};
use crate::pool::Pool;
use astrai_ir::{Layout, Precision, Region, Sizes, Tensor, eval};
use std::collections::HashMap;

/// Addresses of a launch's buffers, shared by the pool's threads.
pub(super) struct Addresses(pub(super) Vec<*mut u8>);

// SAFETY: kernels write disjoint parts of the buffers per unit; the addresses themselves are only read.
unsafe impl Sync for Addresses {}

/// Makes room for `len` bytes at place `i`.
pub(super) fn grow(memory: &mut Vec<Memory>, i: usize, len: usize) -> Result<(), Error> {
    if i < memory.len() && memory[i].len() >= len {
        return Ok(());
    }
    let fresh = Memory::zeroed(len)?;
    if i < memory.len() {
        memory[i] = fresh
    } else {
        memory.push(fresh)
    }
    Ok(())
}

pub(super) fn run_kernel(
    pool: &Pool,
    k: &Loaded,
    bufs: &Addresses,
    dims: &mut [i64],
    scratch: &Memory,
) -> Result<(), Error> {
    // SAFETY: the emitted functions read the symbols in `dims` and two numbers behind them.
    let needs = k.scratch.map_or(0, |f| unsafe { f(dims.as_ptr()) });
    if needs < 0 || needs as usize > scratch.len() {
        return Err(Error::Input(format!(
            "a kernel wants {needs} bytes of scratch, planned were {}",
            scratch.len()
        )));
    }
    let Some(rounds) = k.rounds else {
        run_phases(pool, k, bufs, dims, scratch);
        return Ok(());
    };
    // SAFETY: as above.
    let rounds = unsafe { rounds(dims.as_ptr()) };
    for round in 0..rounds {
        if let [.., at, _threads] = dims {
            *at = round;
        }
        run_phases(pool, k, bufs, dims, scratch);
    }
    Ok(())
}

/// Runs every phase once; `dims` holds the symbols, the number of the round of a kernel that has rounds, and the threads.
fn run_phases(pool: &Pool, k: &Loaded, bufs: &Addresses, dims: &[i64], scratch: &Memory) {
    for (units, phase) in &k.phases {
        // SAFETY: the emitted functions read `dims` up to what it holds.
        let n = unsafe { units(dims.as_ptr()) };
        pool.run(n.max(0) as usize, &|_, range| {
            // SAFETY: buffers are as large as the region's types at these sizes (checked bounds of the plan); units are
            // independent, so that ranges on different threads touch disjoint results.
            unsafe {
                phase(bufs.0.as_ptr(), dims.as_ptr(), scratch.address(), range.start as i64, range.end as i64)
            }
        });
    }
}

/// Runs a region without a kernel through the interpreter.
pub(super) fn run_region(region: &Region, bufs: &Addresses, sizes: &Sizes) -> Result<(), Error> {
    let reads = region.reads();
    let mut leaves = HashMap::new();
    for (i, ty) in reads.iter().enumerate() {
        let shape = concrete(ty, sizes)?;
        let rows = region.layouts[i] == Layout::Rows;
        let len = match rows {
            true => shape.iter().product::<usize>() * ty.dtype.bytes(),
            false => packed_bytes(ty.dtype, &shape),
        };
        // SAFETY: the buffer holds a value of this type and layout at these sizes.
        let bytes = unsafe { std::slice::from_raw_parts(bufs.0[i], len) };
        let tensor = match rows {
            true => Tensor::from_bytes(ty.dtype, &shape, bytes),
            false => Tensor::from_bytes(ty.dtype, &shape, &unpack(bytes, ty.dtype, &shape)),
        };
        leaves.insert(format!("r{i}"), tensor.map_err(Error::Input)?);
    }
    let by_ref: HashMap<&str, &Tensor> = leaves.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let outs = eval::eval_borrowed(&region.graph, &by_ref, sizes, Precision::default())?;
    for (i, (_, t)) in outs.iter().enumerate() {
        let bytes = t.to_bytes();
        // SAFETY: as above; the result's buffer is nobody else's during this launch.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), bufs.0[reads.len() + i], bytes.len()) };
    }
    Ok(())
}
