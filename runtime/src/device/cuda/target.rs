//! What the compiler is told of a CUDA device. In: the driver's attributes. Out: a target; and the devices of this machine for people.

use super::driver::{self, Driver};
use crate::Error;
use astrai_ir::{DType, Target};
use cudarc::driver::sys::CUdevice_attribute_enum::*;

/// Threads of a warp.
const WARP: u32 = 32;

/// 32-bit registers of a multiprocessor.
const REGISTERS: u32 = 65_536;

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

/// The devices of this machine in the order of their numbers.
///
/// # Errors
/// A line: there is no driver, or no device, or one cannot be used.
pub fn devices() -> Result<Vec<Found>, String> {
    let one = |ordinal| {
        let driver = Driver::open(ordinal)?;
        let free = driver.check("asking for its memory", driver.context.mem_get_info())?.0 as u64;
        Ok(Found { target: target(&driver)?, free })
    };
    (0..driver::count()?).map(one).collect::<Result<_, Error>>().map_err(|e| e.to_string())
}

/// The target of an open device.
pub(super) fn target(driver: &Driver) -> Result<Target, Error> {
    let (major, minor) = driver.check("asking what it is", driver.context.compute_capability())?;
    let capability = u32::try_from(major * 10 + minor).unwrap_or(0);
    let name = driver.check("asking its name", driver.context.name())?;
    let memory = driver.check("asking for its memory", driver.context.total_mem())? as u64;
    let ask = |a| driver.attribute(a) as f64;
    let units = driver.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) as u32;
    let clock = ask(CU_DEVICE_ATTRIBUTE_CLOCK_RATE) * 1e3;
    // Both edges of the memory's clock carry data.
    let pins = ask(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8.0;
    let bandwidth = 2.0 * ask(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) * 1e3 * pins;
    let registers = driver.attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR) as u32;
    let per_clock = f64::from(units) * clock;
    let shared_memory = driver.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    Ok(Target { name, memory, shared_memory, registers, ..shape(capability, units, per_clock, bandwidth) })
}

/// The target that programs are planned for where no device is: an H100 SXM, by its data sheet.
pub fn nominal() -> Target {
    let (units, clock) = (132, 1.83e9);
    let shape = shape(90, units, f64::from(units) * clock, 3.35e12);
    Target { name: "NVIDIA H100 SXM (nominal)".into(), memory: 80 << 30, shared_memory: 227 << 10, ..shape }
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
        matrix_unit: tensor.is_some(),
        shared_memory: 0,
        warp: WARP,
        stack: 1 << 10,
        links: vec![],
    }
}
