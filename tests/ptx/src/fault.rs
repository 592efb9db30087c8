//! What a kernel does wrong. In: the place and the kind. Out: one line for people, and the driver's error code.

use std::fmt;

/// Kinds of faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// An address in no living allocation, beyond shared or local memory.
    OutOfBounds,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// A read of memory that nothing wrote.
    NeverWritten,
    /// A read or write of what an asynchronous copy has yet to write.
    InFlight,
    /// Accesses of two warps of a block that no barrier orders.
    SharedRace,
    /// Accesses of two warps to global memory that nothing orders.
    GlobalRace,
    /// Accesses of two lanes of a warp that no `__syncwarp` orders.
    WarpRace,
    /// A barrier or a collective that some lanes miss.
    Divergence,
    /// Warps that wait for each other.
    Deadlock,
    /// More instructions than a launch may take.
    Timeout,
    /// A trap, a failed assertion.
    Trap,
    /// What the emulator cannot do.
    Unsupported,
}

impl Kind {
    /// The driver's error code.
    pub fn code(self) -> u32 {
        match self {
            Kind::OutOfBounds => 700,
            Kind::Misaligned => 716,
            Kind::Timeout => 702,
            Kind::Trap => 710,
            Kind::Unsupported => 715,
            _ => 719,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::OutOfBounds => "out of bounds",
            Kind::Misaligned => "misaligned",
            Kind::NeverWritten => "never written",
            Kind::InFlight => "asynchronous copy not waited for",
            Kind::SharedRace => "race in shared memory",
            Kind::GlobalRace => "race in global memory",
            Kind::WarpRace => "race between lanes, a __syncwarp is missing",
            Kind::Divergence => "lanes are missing",
            Kind::Deadlock => "deadlock",
            Kind::Timeout => "too many instructions",
            Kind::Trap => "trap",
            Kind::Unsupported => "not emulated",
        }
    }
}

/// A fault where it happened.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What is wrong.
    pub kind: Kind,
    /// The kernel.
    pub kernel: String,
    /// The instruction, with the line of the CUDA source where that is known.
    pub instruction: String,
    /// Number of the instruction in the kernel.
    pub pc: usize,
    /// The block.
    pub block: [u32; 3],
    /// The warp in its block.
    pub warp: usize,
    /// The lane in its warp.
    pub lane: usize,
    /// The address, as the instruction has it.
    pub address: Option<u64>,
    /// What else is known.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [x, y, z] = self.block;
        let (name, text, kernel) = (self.kind.name(), &self.instruction, &self.kernel);
        write!(f, "{kernel}: {name}: `{text}`, block ({x},{y},{z}) warp {} lane {}", self.warp, self.lane)?;
        if let Some(a) = self.address {
            write!(f, ", address {a:#x}")?;
        }
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}

/// A fault before its place is known.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub kind: Kind,
    pub lane: usize,
    pub address: Option<u64>,
    pub detail: String,
}

impl Wrong {
    pub fn new(kind: Kind, lane: usize, address: Option<u64>, detail: impl Into<String>) -> Box<Wrong> {
        Box::new(Wrong { kind, lane, address, detail: detail.into() })
    }
}

/// What a step gives: the error is boxed because it is rare and large.
pub(crate) type Step<T> = Result<T, Box<Wrong>>;
