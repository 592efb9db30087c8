//! Flags that commands share, and what they stand for.

use crate::failure::Failure;
use crate::machine::Machine;
use astrai_ir::DType;
use astrai_runtime::Device;
use clap::{Args, ValueEnum};

/// Values of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    /// The best device of this machine: the processor
    Auto,
    /// Kernels in C on this machine's processor
    Cpu,
    /// None: programs are planned and their kernels written, nothing runs
    Null,
    /// The reference interpreter: slow, for proofs
    Interpreter,
}

/// Values of `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DTypeName {
    /// 32-bit floats
    F32,
    /// Weights and activations stored as bfloat16, arithmetic in 32-bit floats
    Bf16,
}

/// Where and how a program runs.
#[derive(Args, Clone, Debug)]
pub struct MachineFlags {
    /// What runs the program
    #[arg(long, value_enum, default_value_t = DeviceName::Auto)]
    pub device: DeviceName,
    /// How weights and activations are stored
    #[arg(long, value_enum, default_value_t = DTypeName::F32)]
    pub dtype: DTypeName,
    /// Threads; 0 means one a core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub threads: u16,
}

impl DTypeName {
    /// The element type.
    pub fn storage(self) -> DType {
        match self {
            DTypeName::F32 => DType::F32,
            DTypeName::Bf16 => DType::BF16,
        }
    }
}

impl MachineFlags {
    /// The type of weights and activations in memory.
    pub fn storage(&self) -> DType {
        self.dtype.storage()
    }

    /// The machine, for a command that runs programs.
    pub fn machine(&self) -> Result<Machine, Failure> {
        let device = match self.device {
            DeviceName::Auto | DeviceName::Cpu => Device::Host,
            DeviceName::Interpreter => Device::Interpreter,
            DeviceName::Null => {
                let line = "--device null runs nothing; plan with `astrai compile`, or use --device cpu";
                return Err(line.into());
            }
        };
        Ok(Machine::new(device, self.threads.into())?)
    }

    /// The machine, for a command that only plans: neither compiler nor kernel cache is touched.
    pub fn planner(&self) -> Result<Machine, Failure> {
        if self.device == DeviceName::Interpreter {
            return Err("--device interpreter compiles nothing; use cpu or null".into());
        }
        Ok(Machine::new(Device::Null, self.threads.into())?)
    }
}

/// Name of a device in results.
pub fn device_name(device: Device) -> &'static str {
    match device {
        Device::Host => "cpu",
        Device::Interpreter => "interpreter",
        Device::Null => "null",
    }
}
