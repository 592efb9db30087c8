//! The device that plans and never runs: programs for machines that are not here.

use super::{Block, Device, Executable, Pointer, Space, Threads};
use crate::Error;
use astrai_ir::{Backend, Kernel};
use std::sync::Arc;

/// A backend without a machine.
pub struct Null {
    backend: Box<dyn Backend>,
}

impl Null {
    /// Plans for this backend.
    pub fn new(backend: Box<dyn Backend>) -> Null {
        Null { backend }
    }
}

fn refused<T>() -> Result<T, Error> {
    Err(Error::Input("the null device plans programs and runs nothing; use --device cpu".into()))
}

impl Threads for Null {}

impl Space for Null {
    fn available(&self) -> u64 {
        self.backend.target().memory
    }

    fn alloc(&self, _: &[usize]) -> Result<Vec<Block>, Error> {
        refused()
    }

    fn host(&self, _: Pointer) -> Option<*mut u8> {
        None
    }

    fn import(&self, _: &[u8]) -> Option<Pointer> {
        None
    }

    fn read(&self, _: Pointer, _: &mut [u8]) -> Result<(), Error> {
        refused()
    }

    fn write(&self, _: Pointer, _: &[u8]) -> Result<(), Error> {
        refused()
    }
}

impl Device for Null {
    fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    fn name(&self) -> &'static str {
        "null"
    }

    fn load(&self, _: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error> {
        refused()
    }
}
