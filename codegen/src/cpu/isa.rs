//! Instruction sets of processors, and the compiler's flags for them. Kernels are the same C for all of them: flags choose.

use astrai_ir::{DType, Target};

/// Vector instructions of a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// What every processor of the architecture has (x86-64: SSE2, no fused multiply-add).
    Plain,
    /// 128-bit vectors with fused multiply-add, which every aarch64 has.
    Neon,
    /// 256-bit vectors with fused multiply-add (x86-64-v3).
    Avx2,
    /// 512-bit vectors (x86-64-v4).
    Avx512,
    /// Those and sums of products of bf16 pairs (AVX512_BF16) and of integers (AVX512_VNNI).
    Avx512Bf16,
    /// 512-bit vectors, sums of products of integers, and the matrix unit for bf16 and integers.
    Amx,
}

impl Isa {
    /// All of them.
    pub const ALL: [Isa; 6] = [Isa::Plain, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// Name in flags and results; bytes of a vector register, and how many registers there are; f32 operations per second of a
    /// server core of about 2.75 GHz.
    fn row(self) -> (&'static str, u32, u32, f64) {
        match self {
            Isa::Plain => ("plain", 16, 16, 11e9),
            Isa::Neon => ("neon", 16, 32, 44e9),
            Isa::Avx2 => ("avx2", 32, 16, 88e9),
            Isa::Avx512 => ("avx512", 64, 32, 174e9),
            Isa::Avx512Bf16 => ("avx512bf16", 64, 32, 174e9),
            Isa::Amx => ("amx", 64, 32, 174e9),
        }
    }

    /// Name in flags and results.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

/// Whether kernels add products of bf16 pairs with instructions of this set; where there is a matrix unit they do not.
pub fn adds_pairs(isa: &str) -> bool {
    Isa::named(isa) == Some(Isa::Avx512Bf16)
}

/// A processor of `threads` cores. The peaks are those of a server core of about 2.75 GHz and are replaced by measured ones where a
/// figure matters.
pub fn target(isa: Isa, threads: u32, memory: u64) -> Target {
    let (name, vector_bytes, registers, per_core) = isa.row();
    Target {
        name: format!("cpu {name} x{threads}"),
        kind: "cpu".into(),
        isa: name.into(),
        units: threads,
        flops: vec![(DType::F32, per_core * f64::from(threads))],
        bandwidth: 15e9 * f64::from(threads),
        launch: 2e-6,
        memory,
        vector_bytes,
        registers,
        integer_dots: matches!(isa, Isa::Avx2 | Isa::Avx512Bf16 | Isa::Amx),
        matrix_unit: isa == Isa::Amx,
        shared_memory: 0,
        warp: 1,
        stack: 8 << 20,
        links: vec![],
    }
}

/// Flags with which a unit is compiled, beside those that choose its instructions; never `-ffast-math`.
pub const FLAGS: &[&str] = &[
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fPIC",
    "-shared",
    "-w",
];

/// Flags that let a unit use these instructions, and no others. Plain C takes what the architecture's compiler assumes of
/// every processor, which on x86-64 it has to be told: some systems' compilers assume more.
pub fn instructions(isa: Isa) -> &'static [&'static str] {
    match isa {
        Isa::Plain if cfg!(target_arch = "x86_64") => &["-march=x86-64"],
        Isa::Plain => &[],
        Isa::Neon => &["-march=armv8-a"],
        Isa::Avx2 => &["-march=x86-64-v3"],
        Isa::Avx512 => &["-march=x86-64-v4", WIDE],
        Isa::Avx512Bf16 => &["-march=x86-64-v4", WIDE, "-mavx512bf16", "-mavx512vnni"],
        Isa::Amx => &["-march=x86-64-v4", WIDE, "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    }
}

/// Flags with which a processor without these instructions has their results nevertheless, slowly; for those where there is a
/// model in the kernels' text.
pub fn model(isa: Isa) -> Option<&'static [&'static str]> {
    (isa == Isa::Amx).then_some(&["-march=x86-64-v4", WIDE, "-DDOT_AMX_MODEL"])
}

/// Flags that let a unit use all that this processor has at this level: AVX-512 alone is without products of bf16, which
/// are slow where it is the best level.
pub fn native(isa: Isa) -> &'static [&'static str] {
    match isa {
        Isa::Avx512 => &["-march=native", WIDE, "-mno-avx512bf16"],
        _ if cfg!(target_arch = "x86_64") => &["-march=native", WIDE],
        _ => &["-march=native"],
    }
}

/// Compilers of x86-64 halve the vectors of their own accord on processors that once ran slower with whole ones.
const WIDE: &str = "-mprefer-vector-width=512";
