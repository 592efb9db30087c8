//! What the compiler is told of a CUDA device. In: the driver's attributes. Out: a target; and the devices of this machine for people.

use super::driver::{self, Driver, Numbered};
use crate::Error;
use astrai_ir::{DType, Target};
use cudarc::driver::sys::CUdevice_attribute_enum::*;

/// Threads of a warp.
const WARP: u32 = 32;

/// 32-bit registers of a multiprocessor.
const REGISTERS: u32 = 65_536;

/// Bytes of shared memory that a multiprocessor has beyond what a block may ask for, and that a block takes beyond that.
const RESERVED: u64 = 1 << 10;

/// Seconds to start a kernel, as published for launches one after another on a stream.
const LAUNCH: f64 = 3e-6;

/// A device of this machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Its numbers, of which the name is the driver's and the instruction set the architecture.
    pub target: Target,
    /// Bytes of memory that are free now.
    pub free: u64,
}

/// The devices of this machine in the order of their numbers; an error for each that cannot be used.
///
/// # Errors
/// A line: there is no driver, or no device.
pub fn devices() -> Result<Vec<Result<Found, Error>>, String> {
    let one = |ordinal| {
        let numbered = Numbered::of(ordinal)?;
        let driver = Driver::open(&numbered)?;
        let free = driver.check("asking for its memory", driver.context.mem_get_info())?.0 as u64;
        Ok(Found { target: of(&numbered)?, free })
    };
    Ok((0..driver::count()?).map(one).collect())
}

/// The target of the device of this number. It is not opened, and no other is asked.
///
/// # Errors
/// There is no driver, no such device, or it does not answer.
pub fn target(ordinal: usize) -> Result<Target, Error> {
    of(&Numbered::of(ordinal)?)
}

pub(super) fn of(device: &Numbered) -> Result<Target, Error> {
    let [major, minor] =
        [CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR]
            .map(|a| device.attribute(a) as u32);
    let (capability, name, memory) = (major * 10 + minor, device.name.clone(), device.memory()?);
    let ask = |a| device.attribute(a) as f64;
    let units = device.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) as u32;
    let clock = ask(CU_DEVICE_ATTRIBUTE_CLOCK_RATE) * 1e3;
    // Both edges of the memory's clock carry data.
    let pins = ask(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8.0;
    let bandwidth = 2.0 * ask(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) * 1e3 * pins;
    let registers = device.attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR) as u32;
    let per_clock = f64::from(units) * clock;
    let shared_memory = device.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    Ok(Target { name, memory, shared_memory, registers, ..shape(capability, units, per_clock, bandwidth) })
}

/// The target that programs are planned for where no device is: an H100 SXM, by its data sheet.
pub fn nominal() -> Target {
    let (units, clock) = (132, 1.83e9);
    let shape = shape(90, units, f64::from(units) * clock, 3.35e12);
    Target { name: "NVIDIA H100 SXM (nominal)".into(), memory: 80 << 30, shared_memory: 227 << 10, ..shape }
}

/// Blocks of so many threads and bytes of shared memory that one multiprocessor holds at once, and the part of its warps that they are.
pub fn resident(target: &Target, registers: u32, block: u32, shared: u64) -> (u32, f64) {
    let capability = target.isa.strip_prefix("sm_").and_then(|n| n.parse().ok()).unwrap_or(0u32);
    let (most_warps, most_blocks) = match capability {
        ..80 => (32, 16),
        80 | 90 | 100..120 => (64, 32),
        86 | 87 => (48, 16),
        _ => (48, 24),
    };
    let warps = block.div_ceil(target.warp.max(1)).max(1);
    // Registers are given out to warps, 256 at a time; every block takes a kilobyte of shared memory for itself.
    let of_warp = (registers.max(1) * target.warp).next_multiple_of(256);
    let by_registers = target.registers / of_warp / warps;
    let by_shared = (target.shared_memory + RESERVED) / (shared.next_multiple_of(128) + RESERVED);
    let blocks = (most_warps / warps).min(most_blocks).min(by_registers).min(by_shared as u32);
    (blocks, f64::from(blocks * warps) / f64::from(most_warps))
}

/// A target of this architecture and size. Operations of a multiprocessor and clock are those of NVIDIA's tables of arithmetic
/// throughput.
fn shape(capability: u32, units: u32, per_clock: f64, bandwidth: f64) -> Target {
    let lanes = if matches!(capability, 80 | 60 | 70..=75) { 64.0 } else { 128.0 };
    // Products of bf16 in tensor cores with sums in f32; none before 80.
    let tensor = match capability {
        ..80 => None,
        80 => Some(2048.0),
        81..90 => Some(1024.0),
        90 => Some(4096.0),
        100..110 => Some(8192.0),
        _ => Some(1024.0),
    };
    let f32_peak = (DType::F32, 2.0 * lanes * per_clock);
    let narrow = tensor.map(|n| (DType::BF16, n * per_clock));
    Target {
        name: String::new(),
        kind: "cuda".into(),
        isa: format!("sm_{capability}"),
        units,
        flops: [Some(f32_peak), narrow].into_iter().flatten().collect(),
        bandwidth,
        launch: LAUNCH,
        memory: 0,
        vector_bytes: 16,
        registers: REGISTERS,
        integer_dots: false,
        matrix_unit: tensor.is_some(),
        shared_memory: 0,
        warp: WARP,
        stack: 1 << 10,
        links: vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against NVIDIA's table of occupancy for 90.
    #[test]
    fn blocks_share_a_multiprocessor_as_its_limits_let_them() {
        let h100 = nominal();
        let blocks = |registers, block, shared| resident(&h100, registers, block, shared);
        assert_eq!(blocks(32, 256, 0), (8, 1.0));
        assert_eq!(blocks(64, 256, 0), (4, 0.5));
        assert_eq!(blocks(65, 256, 0), (3, 0.375));
        assert_eq!(blocks(255, 256, 0), (1, 0.125));
        assert_eq!(blocks(16, 32, 0), (32, 0.5));
        assert_eq!(blocks(32, 128, 48 << 10), (4, 0.25));
        assert_eq!(blocks(32, 128, 227 << 10), (1, 0.0625));
    }
}
