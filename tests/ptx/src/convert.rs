//! Conversions between types.

use crate::alu::{lanes32, lanes64};
use crate::float::{brain, directed, flush, half, total};
use crate::kernel::{Ins, Mods, Op, Round, Ty};
use crate::registers::Regs;
use half::{bf16, f16};

/// Executes a conversion.
pub(crate) fn step(r: &mut Regs, i: &Ins, m: u32, fast: bool) {
    #[cfg(target_arch = "x86_64")]
    if fast {
        // SAFETY: `fast` is what `float::fast` found of this processor.
        return unsafe { step_fast(r, i, m) };
    }
    let _ = fast;
    body(r, i, m);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2,popcnt,lzcnt")]
fn step_fast(r: &mut Regs, i: &Ins, m: u32) {
    body(r, i, m);
}

#[inline(always)]
fn body(r: &mut Regs, i: &Ins, m: u32) {
    if i.op == Op::CvtPair {
        return pair(r, i, m);
    }
    let (to, from) = (i.ty, i.ty2);
    let plain =
        i.mods.round == Round::Nearest && !i.mods.integer && !i.mods.sat && !i.mods.ftz && !i.mods.relu;
    let narrow = i.imm == 0;
    // The conversions that kernels make most.
    match (to, from) {
        (Ty::U64, Ty::U32) if narrow => {
            let a = r.v32(i.a);
            let o = lanes64(|l| u64::from(a[l]));
            r.put64(i.d, &o, m);
        }
        (Ty::S64, Ty::S32) if narrow => {
            let a = r.v32(i.a);
            let o = lanes64(|l| a[l] as i32 as i64 as u64);
            r.put64(i.d, &o, m);
        }
        (Ty::U32 | Ty::S32, Ty::U64 | Ty::S64) if !i.mods.wide && !i.mods.sat => {
            let a = r.v64(i.a);
            let o = lanes32(|l| a[l] as u32);
            r.put32(i.d, &o, m);
        }
        (Ty::F32, Ty::F16) if plain => {
            let a = r.v32(i.a);
            let o = lanes32(|l| total(f16::from_bits(a[l] as u16).to_f32()));
            r.put32(i.d, &o, m);
        }
        (Ty::Bf16, Ty::F32) if plain => {
            let a = r.v32(i.a);
            let o = lanes32(|l| u32::from(brain_of(f32::from_bits(a[l]))));
            r.put32(i.d, &o, m);
        }
        (Ty::F32, Ty::S32) if plain => {
            let a = r.v32(i.a);
            let o = lanes32(|l| (a[l] as i32 as f32).to_bits());
            r.put32(i.d, &o, m);
        }
        _ => general(r, i, m),
    }
}

/// bf16 nearest to a number, ties to even.
#[inline(always)]
fn brain_of(x: f32) -> u16 {
    let b = x.to_bits();
    if x.is_nan() { 0x7fff } else { (b.wrapping_add(0x7fff + (b >> 16 & 1)) >> 16) as u16 }
}

/// Two f32 in one register: the first source above.
fn pair(r: &mut Regs, i: &Ins, m: u32) {
    let (a, b) = (*r.v32(i.a), *r.v32(i.b));
    let one = |v: u32| {
        let x = f64::from(f32::from_bits(v));
        let x = if i.mods.relu && x < 0.0 { 0.0 } else { x };
        u32::from(narrow(i.ty == Ty::F16x2, x, i.mods))
    };
    r.put32(i.d, &lanes32(|l| one(a[l]) << 16 | one(b[l])), m);
}

/// A 16-bit number nearest to x, or cut off.
fn narrow(is_half: bool, x: f64, mods: Mods) -> u16 {
    let x = if mods.sat && is_half && x.is_finite() { x.clamp(-65504.0, 65504.0) } else { x };
    let bits = if is_half { half(x) } else { brain(x) };
    let back = if is_half { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() };
    if mods.round == Round::Zero && x.is_finite() && back.abs() > x.abs() { bits - 1 } else { bits }
}

/// A source's value: a number, or an integer.
enum Value {
    Number(f64),
    Integer(i128),
}

fn source(ty: Ty, v: u64) -> Value {
    use Value::*;
    match ty {
        Ty::F16 => Number(f16::from_bits(v as u16).to_f64()),
        Ty::Bf16 => Number(bf16::from_bits(v as u16).to_f64()),
        Ty::F32 | Ty::Tf32 => Number(f64::from(f32::from_bits(v as u32))),
        Ty::F64 => Number(f64::from_bits(v)),
        Ty::S8 => Integer(i128::from(v as i8)),
        Ty::S16 => Integer(i128::from(v as i16)),
        Ty::S32 => Integer(i128::from(v as i32)),
        Ty::S64 => Integer(i128::from(v as i64)),
        Ty::U8 => Integer(i128::from(v as u8)),
        Ty::U16 => Integer(i128::from(v as u16)),
        Ty::U64 => Integer(i128::from(v)),
        _ => Integer(i128::from(v as u32)),
    }
}

fn general(r: &mut Regs, i: &Ins, m: u32) {
    let a = if i.imm == 1 { *r.v64(i.a) } else { r.v32(i.a).map(u64::from) };
    let o = lanes64(|l| match source(i.ty2, a[l]) {
        Value::Number(x) => from_number(i, x, a[l]),
        Value::Integer(n) => from_integer(i, n),
    });
    if i.mods.wide { r.put64(i.d, &o, m) } else { r.put32(i.d, &o.map(|v| v as u32), m) }
}

/// Least and greatest integer of a type.
fn range(ty: Ty) -> (i128, i128) {
    let bits = ty.bytes() as u32 * 8;
    if ty.signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// An integer as the bits of a register: extended by its sign.
fn as_bits(ty: Ty, n: i128) -> u64 {
    match ty {
        Ty::S8 => n as i8 as i64 as u64,
        Ty::S16 => u64::from(n as i16 as u16),
        Ty::S32 => n as i32 as i64 as u64,
        Ty::U8 => u64::from(n as u8),
        Ty::U16 => u64::from(n as u16),
        Ty::U32 => u64::from(n as u32),
        _ => n as u64,
    }
}

fn from_integer(i: &Ins, n: i128) -> u64 {
    let round = i.mods.round;
    match i.ty {
        Ty::F32 if round == Round::Nearest => u64::from((n as f32).to_bits()),
        Ty::F32 => {
            let s = n as f64;
            u64::from(directed(s, (n - s as i128) as f64, round).to_bits())
        }
        Ty::F64 => (n as f64).to_bits(),
        Ty::F16 => u64::from(half(n as f64)),
        Ty::Bf16 => u64::from(brain(n as f64)),
        t => {
            let (low, high) = range(t);
            as_bits(t, if i.mods.sat { n.clamp(low, high) } else { n })
        }
    }
}

fn from_number(i: &Ins, x: f64, bits: u64) -> u64 {
    let Mods { round, integer, ftz, sat, relu, .. } = i.mods;
    let x = if ftz && matches!(i.ty2, Ty::F32) { f64::from(flush(x as f32)) } else { x };
    let to_integer = |x: f64| match round {
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
        _ => x.round_ties_even(),
    };
    if !i.ty.float() {
        let (low, high) = range(i.ty);
        if x.is_nan() {
            return if i.ty.wide() { 1 << 63 } else { 0 };
        }
        return as_bits(i.ty, (to_integer(x) as i128).clamp(low, high));
    }
    let x = if integer { to_integer(x).copysign(x) } else { x };
    let x = match () {
        _ if sat && i.ty != Ty::F16 && i.ty != Ty::Bf16 => {
            if x.is_nan() {
                0.0
            } else {
                x.clamp(0.0, 1.0)
            }
        }
        _ if relu && x < 0.0 => 0.0,
        _ => x,
    };
    match i.ty {
        Ty::F64 => x.to_bits(),
        Ty::F32 => {
            let y = if round == Round::Nearest || integer { x as f32 } else { directed(x, 0.0, round) };
            u64::from(total(if ftz { flush(y) } else { y }))
        }
        Ty::Tf32 => u64::from(tf32(bits as u32, round)),
        t => u64::from(narrow(t == Ty::F16, x, i.mods)),
    }
}

/// The nearest number of ten bits: ties away from zero, or to even.
fn tf32(b: u32, round: Round) -> u32 {
    if f32::from_bits(b).is_nan() {
        return 0x7fff_ffff;
    }
    let up = if round == Round::Away { 0x1000 } else { 0xfff + (b >> 13 & 1) };
    if b & 0x7f80_0000 == 0x7f80_0000 { b } else { b.wrapping_add(up) & 0xffff_e000 }
}
