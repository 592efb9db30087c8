//! Named memory that outlives runs and is shared by sessions: weights under training, their gradients and moments, pages of
//! keys and values. In: names, types and shapes. Out: memory that sessions bind by name; one session runs on it at a time.

use crate::device::{Block, Device, Pointer, with_bytes};
use crate::{Compiled, Error};
use astrai_ir::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

/// Named memory of a device. A clone shares it.
#[derive(Clone)]
pub struct Buffers {
    device: Arc<dyn Device>,
    all: BTreeMap<String, Arc<Buffer>>,
    turn: Arc<Mutex<()>>,
    room: Option<Room>,
}

/// What a session keeps between the kernels of a run, and a kernel between its phases.
#[derive(Clone)]
pub(crate) struct Room {
    pub(crate) arena: Arc<Block>,
    pub(crate) workspace: Arc<Block>,
}

impl Room {
    /// Room for any one of the programs.
    pub(crate) fn of(device: &dyn Device, programs: &[&Compiled]) -> Result<Room, Error> {
        let sizes = Compiled::room(programs)?.map(|bytes| bytes as usize);
        let mut blocks = device.alloc(&sizes)?.into_iter().map(Arc::new);
        let mut next = || blocks.next().ok_or_else(|| Error::Input("the device gave no memory".into()));
        Ok(Room { arena: next()?, workspace: next()? })
    }
}

/// A row-major tensor that outlives runs.
pub(crate) struct Buffer {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Its memory, touched only while the turn is held.
    pub(crate) block: Block,
    len: usize,
}

impl Buffers {
    /// No memory yet.
    pub fn new(device: &Arc<dyn Device>) -> Buffers {
        Buffers { device: device.clone(), all: BTreeMap::new(), turn: Arc::default(), room: None }
    }

    /// Takes the memory between kernels once for these programs, whose sessions over these buffers run one after another.
    ///
    /// # Errors
    /// The device has not as much.
    pub fn make_room(&mut self, programs: &[&Compiled]) -> Result<(), Error> {
        self.room = Some(Room::of(&*self.device, programs)?);
        Ok(())
    }

    /// That memory, if a program of these needs fits.
    pub(crate) fn room(&self, [arena, workspace]: [u64; 2]) -> Option<Room> {
        let fits = |r: &&Room| r.arena.len() as u64 >= arena && r.workspace.len() as u64 >= workspace;
        self.room.as_ref().filter(fits).cloned()
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
        let blocks = self.device.alloc(&lens)?;
        for (((name, dtype, shape), len), block) in tensors.into_iter().zip(lens).zip(blocks) {
            self.all.insert(name, Arc::new(Buffer { dtype, shape, block, len }));
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

    /// Takes from the system what of these tensors is not yet taken, of all the same part from their beginnings, `most` bytes together; on
    /// all threads of the machine.
    pub fn populate(&self, most: u64) {
        let all = self.bytes().max(1);
        let part = |len: usize| (len as u128 * u128::from(most) / u128::from(all)).min(len as u128) as usize;
        let blocks: Vec<_> = self.all.values().map(|b| (b.block.at(), part(b.len))).collect();
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let populate =
            |some: &[(Pointer, usize)]| some.iter().for_each(|(at, len)| self.device.populate(*at, *len));
        thread::scope(|s| {
            for some in blocks.chunks(blocks.len().div_ceil(threads).max(1)).filter(|_| most > 0) {
                // Without another thread it is taken later.
                _ = thread::Builder::new().spawn_scoped(s, || populate(some));
            }
        });
    }

    /// The device whose memory it is.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Shows the bytes of a tensor; waits for a run to end.
    ///
    /// # Errors
    /// There is no tensor of the name, or the device failed.
    pub fn read<R>(&self, name: &str, f: impl FnOnce(&[u8]) -> R) -> Result<R, Error> {
        let len = self.found(name)?.len;
        self.bytes_of(name, 0..len, false, |bytes| f(bytes))
    }

    /// Shows some of the bytes of a tensor; nothing else is copied where this process does not see the device's memory.
    ///
    /// # Errors
    /// As [`read`](Self::read); the tensor has fewer bytes.
    pub fn read_some<R>(
        &self,
        name: &str,
        some: Range<usize>,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        self.bytes_of(name, some, false, |bytes| f(bytes))
    }

    /// Lets the bytes of a tensor be changed; waits for a run to end.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write<R>(&self, name: &str, f: impl FnOnce(&mut [u8]) -> R) -> Result<R, Error> {
        let len = self.found(name)?.len;
        self.bytes_of(name, 0..len, true, f)
    }

    /// Fills a tensor with what `f` stores at its place; waits for a run to end.
    pub(crate) fn store(
        &self,
        name: &str,
        f: impl FnOnce(Pointer) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let buffer = self.found(name)?;
        let _turn = self.turn();
        f(buffer.block.at())
    }

    fn found(&self, name: &str) -> Result<&Arc<Buffer>, Error> {
        self.all.get(name).ok_or_else(|| Error::Input(format!("there is no buffer `{name}`")))
    }

    fn bytes_of<R>(
        &self,
        name: &str,
        some: Range<usize>,
        write: bool,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, Error> {
        let buffer = self.found(name)?;
        if some.start > some.end || some.end > buffer.len {
            return Err(Error::Input(format!("buffer `{name}` has {} bytes, not {some:?}", buffer.len)));
        }
        let (_turn, at) = (self.turn(), buffer.block.at().offset(some.start as u64));
        // SAFETY: the memory is that long, and nobody else touches it while the turn is held.
        unsafe { with_bytes(&*self.device, at, some.len(), write, f) }
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
        let device: Arc<dyn Device> = Arc::new(crate::device::reference::Reference::default());
        let mut b = Buffers::new(&device);
        b.add("x", DType::F32, &[2, 3]).unwrap();
        let c = b.clone();
        b.write("x", |bytes| bytes[4] = 7).unwrap();
        assert_eq!(c.read("x", |bytes| (bytes.len(), bytes[4])).unwrap(), (24, 7));
        assert_eq!(c.read_some("x", 4..6, <[u8]>::to_vec).unwrap(), [7, 0]);
        assert!(c.read_some("x", 4..25, |_| ()).is_err());
        assert_eq!((c.shape("x"), c.bytes()), (Some((DType::F32, &[2, 3][..])), 24));
        assert!(b.add("x", DType::F32, &[1]).unwrap_err().to_string().contains("exists already"));
        let twice = ["y", "y"].map(|name| (name.to_string(), DType::F32, vec![1]));
        assert!(b.add_all(twice).unwrap_err().to_string().contains("`y` exists already"));
        assert!(b.read("y", |_| ()).unwrap_err().to_string().contains("no buffer `y`"));
    }
}
