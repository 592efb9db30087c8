//! What a program is made for, as plain data. The same rows feed code generation, the cost of kernels and the planner; none of these
//! knows a kind of device, only its numbers.

use crate::DType;

/// A machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Name for the reader.
    pub name: String,
    /// Family of devices, by the name of its backend.
    pub kind: String,
    /// Instruction set (ISA) or architecture, by the backend's name for it.
    pub isa: String,
    /// Processors that work at once: cores, or multiprocessors.
    pub units: u32,
    /// Peak floating-point operations per second of all units, by element type; f32 comes first.
    pub flops: Vec<(DType, f64)>,
    /// Bytes per second that memory gives.
    pub bandwidth: f64,
    /// Seconds to start a kernel.
    pub launch: f64,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of a vector register.
    pub vector_bytes: u32,
    /// Vector registers of a core, or 32-bit registers of a multiprocessor.
    pub registers: u32,
    /// True where instructions multiply integers of eight bits and sum their products.
    pub integer_dots: bool,
    /// True where a unit multiplies matrices.
    pub matrix_unit: bool,
    /// Bytes of memory that the threads of a block share.
    pub shared_memory: u64,
    /// Threads that run in step; 1 for cores.
    pub warp: u32,
    /// Bytes of a thread's stack.
    pub stack: u64,
    /// Links to other devices, the fastest first.
    pub links: Vec<Link>,
}

/// A link between devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Name for the reader.
    pub name: String,
    /// Devices that it joins.
    pub devices: u32,
    /// Bytes per second in one direction.
    pub bandwidth: f64,
    /// Seconds that a message takes beside its bytes.
    pub latency: f64,
}

impl Target {
    /// Peak of an element type; that of f32 for types without a row of their own.
    pub fn peak(&self, dtype: DType) -> f64 {
        let row = self.flops.iter().find(|(d, _)| *d == dtype).or(self.flops.first());
        row.map_or(1.0, |(_, f)| *f)
    }

    /// Seconds that the roofline allows for this work.
    pub fn seconds(&self, flops: f64, bytes: f64, dtype: DType) -> f64 {
        (flops / self.peak(dtype)).max(bytes / self.bandwidth)
    }
}
