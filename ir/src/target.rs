//! What a program is made for, as plain data. The same rows feed code generation, the cost of kernels and the planner.

use crate::DType;

/// Vector instructions of a host. Kernels are the same C for all of them; the compiler's flags choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Simd {
    /// What every processor of the architecture has (x86-64: SSE2, no fused multiply-add).
    Plain,
    /// 128-bit vectors with fused multiply-add, which every aarch64 has.
    Neon,
    /// 256-bit vectors with fused multiply-add (x86-64-v3).
    Avx2,
    /// 512-bit vectors (x86-64-v4).
    Avx512,
    /// Those and sums of products of bf16 pairs (AVX512_BF16).
    Avx512Bf16,
    /// 512-bit vectors and the matrix unit for bf16.
    Amx,
}

impl Simd {
    /// All of them.
    pub const ALL: [Simd; 6] =
        [Simd::Plain, Simd::Neon, Simd::Avx2, Simd::Avx512, Simd::Avx512Bf16, Simd::Amx];

    /// Name in flags and results.
    pub fn name(self) -> &'static str {
        match self {
            Simd::Plain => "plain",
            Simd::Neon => "neon",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
            Simd::Avx512Bf16 => "avx512bf16",
            Simd::Amx => "amx",
        }
    }
}

/// Family of a target, which chooses the dialect of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TargetKind {
    /// C through the system's compiler.
    Host {
        /// Vector instructions.
        simd: Simd,
    },
    /// CUDA C++ for a compute capability such as 80 or 90.
    Cuda {
        /// Major and minor version as one number.
        capability: u32,
    },
}

/// A machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Name for the reader.
    pub name: String,
    /// Family.
    pub kind: TargetKind,
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
}

impl Target {
    /// A host of `threads` cores. The peaks are those of a server core of about 2.75 GHz and are replaced by measured ones
    /// where a figure matters.
    pub fn host(simd: Simd, threads: u32, memory: u64) -> Target {
        let per_core = match simd {
            Simd::Plain => 11e9,
            Simd::Neon => 44e9,
            Simd::Avx2 => 88e9,
            Simd::Avx512 | Simd::Avx512Bf16 | Simd::Amx => 174e9,
        };
        Target {
            name: format!("host {} x{threads}", simd.name()),
            kind: TargetKind::Host { simd },
            units: threads,
            flops: vec![(DType::F32, per_core * threads as f64)],
            bandwidth: 15e9 * threads as f64,
            launch: 2e-6,
            memory,
        }
    }

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
