//! Vector instructions of this machine's processor. In: what it says of itself. Out: the levels that kernels may be compiled
//! for here, and the compiler's flags for one of them.

use astrai_codegen::cpu::Isa;
use astrai_codegen::cpu::isa as codegen;
use std::sync::OnceLock;

/// The best that this machine's processor has: the last level, but products of bf16 pairs only where they are quick.
pub fn host_isa() -> Isa {
    static BEST: OnceLock<Isa> = OnceLock::new();
    let good = |isa: &Isa| *isa != Isa::Avx512Bf16 || pairs_are_quick();
    *BEST.get_or_init(|| host_levels().into_iter().rfind(good).unwrap_or(Isa::Plain))
}

/// What this machine's processor has, the least first.
pub fn host_levels() -> Vec<Isa> {
    let mut levels = vec![Isa::Plain];
    if cfg!(target_arch = "aarch64") {
        levels.push(Isa::Neon);
    }
    #[cfg(target_arch = "x86_64")]
    {
        let has = [(Isa::Avx2, has_avx2()), (Isa::Avx512, has_avx512())];
        // Each is the one before it and more.
        levels.extend(has.iter().take_while(|(_, has)| *has).map(|(isa, _)| *isa));
        // Either is more than 512-bit vectors; a virtual machine may hide one and show the other.
        let more = [(Isa::Avx512Bf16, is_x86_feature_detected!("avx512bf16")), (Isa::Amx, has_amx())];
        // Every processor that has one of them multiplies integers.
        let wide = levels.last() == Some(&Isa::Avx512) && is_x86_feature_detected!("avx512vnni");
        levels.extend(more.iter().filter(|(_, has)| wide && *has).map(|(isa, _)| *isa));
    }
    levels
}

/// Levels that the processor lacks, but whose results its other instructions give, bit for bit and slowly: for tests.
pub fn modelled_levels() -> Vec<Isa> {
    let levels = host_levels();
    let lacks = |isa: &Isa| !levels.contains(isa) && codegen::model(*isa).is_some();
    if levels.contains(&Isa::Avx512) { Isa::ALL.into_iter().filter(lacks).collect() } else { Vec::new() }
}

/// The features of x86-64-v3.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    let vectors = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let bits = is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2");
    let others = is_x86_feature_detected!("lzcnt") && is_x86_feature_detected!("movbe");
    vectors && bits && others && is_x86_feature_detected!("f16c")
}

/// Those of x86-64-v4 beside them.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    let words = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512cd");
    let widths = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq");
    words && widths && is_x86_feature_detected!("avx512vl")
}

/// Whether kernels of this level, compiled for this very processor, have products of integers of eight bits that the level does not
/// name (AVX512_VNNI).
pub(super) fn multiplies_integers(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = isa == Isa::Avx512 && is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has && isa == host_isa()
}

/// Whether an instruction for products of bf16 pairs does twice as many operations as one for f32, in the same time: AMD's do.
/// Intel's, before the matrix unit or beside it, take so much longer that f32 is as fast or faster.
fn pairs_are_quick() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Tiles and their products of bf16 and of integers, and a system that lets this process use them.
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let tiles = [" amx_bf16", " amx_int8"].iter().all(|flag| flags.contains(flag));
    cfg!(target_os = "linux") && tiles && may_use_tiles()
}

/// Asks the system for the tiles' registers, which a process does not have from the start.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn may_use_tiles() -> bool {
    false
}

/// Flags that choose the instructions of kernels. The machine's own level is whatever the compiler finds here, which may be more;
/// then, and only then, kernels depend on the very processor.
pub(super) fn flags(isa: Isa) -> &'static [&'static str] {
    if isa == host_isa() {
        return codegen::native(isa);
    }
    match codegen::model(isa) {
        Some(model) if modelled_levels().contains(&isa) => model,
        _ => codegen::instructions(isa),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_end_with_the_best_and_have_flags_of_their_own() {
        let levels = host_levels();
        let best = host_isa();
        assert!(levels[0] == Isa::Plain && levels.contains(&best), "{best:?} of {levels:?}");
        let all: Vec<_> = levels.iter().map(|s| flags(*s)).collect();
        assert!(all.contains(&codegen::native(best)));
        assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");
    }
}
