//! Named memory that outlives runs and is shared by sessions: weights under training, their gradients and moments, pages of
//! keys and values. In: names, types and shapes. Out: memory that sessions bind by name; one session runs on it at a time.

use crate::Error;
use crate::memory::Memory;
use astrai_ir::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

/// Named memory. A clone shares it.
#[derive(Clone, Default)]
pub struct Buffers {
    all: BTreeMap<String, Arc<Buffer>>,
    turn: Arc<Mutex<()>>,
}

/// A row-major tensor that outlives runs.
pub(crate) struct Buffer {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    address: *mut u8,
    len: usize,
    /// What the address points into.
    _memory: Memory,
}

// SAFETY: the bytes are read and written only by whoever holds the turn of the buffers it belongs to.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Address of the first byte; touched only while the turn is held.
    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }
}

impl Buffers {
    /// No memory.
    pub fn new() -> Buffers {
        Buffers::default()
    }

    /// Adds zeroed memory for a tensor. A name is added once.
    pub fn add(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<(), Error> {
        self.add_all([(name.to_string(), dtype, shape.to_vec())])
    }

    /// Adds zeroed memory for several tensors side by side, given back when the last of them is gone. A name is added once.
    pub fn add_all(
        &mut self,
        tensors: impl IntoIterator<Item = (String, DType, Vec<usize>)>,
    ) -> Result<(), Error> {
        let tensors: Vec<_> = tensors.into_iter().collect();
        let mut names: BTreeSet<&str> = self.names().collect();
        if let Some((name, ..)) = tensors.iter().find(|(name, ..)| !names.insert(name)) {
            return Err(Error::Input(format!("buffer `{name}` exists already")));
        }
        let lens: Vec<_> =
            tensors.iter().map(|(_, dtype, shape)| shape.iter().product::<usize>() * dtype.bytes()).collect();
        let memories = Memory::together(&lens)?;
        for (((name, dtype, shape), len), memory) in tensors.into_iter().zip(lens).zip(memories) {
            let buffer = Buffer { dtype, shape, address: memory.address(), len, _memory: memory };
            self.all.insert(name, Arc::new(buffer));
        }
        Ok(())
    }

    /// Names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.all.keys().map(String::as_str)
    }

    /// Type and shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<(DType, &[usize])> {
        self.all.get(name).map(|b| (b.dtype, b.shape.as_slice()))
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.all.values().map(|b| b.len as u64).sum()
    }

    /// Shows the bytes of a tensor; waits for a run to end.
    pub fn read<R>(&self, name: &str, f: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let buffer = self.all.get(name)?;
        let _turn = self.turn();
        // SAFETY: the memory is that long, and nobody writes while the turn is held.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.address, buffer.len) };
        Some(f(bytes))
    }

    /// Lets the bytes of a tensor be changed; waits for a run to end.
    pub fn write<R>(&self, name: &str, f: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let buffer = self.all.get(name)?;
        let _turn = self.turn();
        // SAFETY: the memory is that long, and nobody else reads or writes while the turn is held.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.address, buffer.len) };
        Some(f(bytes))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Arc<Buffer>> {
        self.all.get(name)
    }

    /// Whoever holds this may touch the bytes.
    pub(crate) fn turns(&self) -> Arc<Mutex<()>> {
        self.turn.clone()
    }

    /// The right to touch the bytes. A run that panicked leaves numbers behind, nothing that is unsafe to read.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shared_by_clones_and_names_are_added_once() {
        let mut b = Buffers::new();
        b.add("x", DType::F32, &[2, 3]).unwrap();
        let c = b.clone();
        b.write("x", |bytes| bytes[4] = 7).unwrap();
        assert_eq!(c.read("x", |bytes| (bytes.len(), bytes[4])), Some((24, 7)));
        assert_eq!((c.shape("x"), c.bytes()), (Some((DType::F32, &[2, 3][..])), 24));
        assert!(b.add("x", DType::F32, &[1]).unwrap_err().to_string().contains("exists already"));
        let twice = ["y", "y"].map(|name| (name.to_string(), DType::F32, vec![1]));
        assert!(b.add_all(twice).unwrap_err().to_string().contains("`y` exists already"));
        assert!(b.read("y", |_| ()).is_none());
    }
}
