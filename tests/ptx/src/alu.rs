//! Arithmetic: what depends on registers alone. In: an instruction, registers, the lanes that execute it. The loops over lanes
//! are compiled twice, for any processor and for one with AVX2 and fused multiply-add.

use crate::float::{self, directed, flush, maximum, minimum, total};
use crate::kernel::{Ins, Op, Round, Ty};
use crate::logic::{bits, carry, select, setp, special};
use crate::registers::{Regs, V32, V64};
use half::{bf16, f16};

/// Executes an instruction; false where it is none of arithmetic.
pub(crate) fn step(r: &mut Regs, i: &Ins, m: u32, fast: bool) -> bool {
    #[cfg(target_arch = "x86_64")]
    if fast {
        // SAFETY: `fast` is what `float::fast` found of this processor.
        return unsafe { step_fast(r, i, m) };
    }
    let _ = fast;
    body(r, i, m)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2,popcnt,lzcnt")]
fn step_fast(r: &mut Regs, i: &Ins, m: u32) -> bool {
    body(r, i, m)
}

#[inline(always)]
pub(crate) fn lanes32(f: impl Fn(usize) -> u32) -> V32 {
    let mut o = [0; 32];
    for (l, o) in o.iter_mut().enumerate() {
        *o = f(l);
    }
    o
}

#[inline(always)]
pub(crate) fn lanes64(f: impl Fn(usize) -> u64) -> V64 {
    let mut o = [0; 32];
    for (l, o) in o.iter_mut().enumerate() {
        *o = f(l);
    }
    o
}

#[inline(always)]
pub(crate) fn mask(f: impl Fn(usize) -> bool) -> u32 {
    let mut o = 0;
    for l in 0..32 {
        o |= u32::from(f(l)) << l;
    }
    o
}

#[inline(always)]
pub(crate) fn un32(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(u32) -> u32) {
    let a = r.v32(i.a);
    let o = lanes32(|l| f(a[l]));
    r.put32(i.d, &o, m);
}

#[inline(always)]
pub(crate) fn bin32(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(u32, u32) -> u32) {
    let (a, b) = (r.v32(i.a), r.v32(i.b));
    let o = lanes32(|l| f(a[l], b[l]));
    r.put32(i.d, &o, m);
}

#[inline(always)]
pub(crate) fn tri32(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(u32, u32, u32) -> u32) {
    let (a, b, c) = (r.v32(i.a), r.v32(i.b), r.v32(i.c));
    let o = lanes32(|l| f(a[l], b[l], c[l]));
    r.put32(i.d, &o, m);
}

#[inline(always)]
pub(crate) fn un64(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(u64) -> u64) {
    let a = r.v64(i.a);
    let o = lanes64(|l| f(a[l]));
    r.put64(i.d, &o, m);
}

#[inline(always)]
pub(crate) fn bin64(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(u64, u64) -> u64) {
    let (a, b) = (r.v64(i.a), r.v64(i.b));
    let o = lanes64(|l| f(a[l], b[l]));
    r.put64(i.d, &o, m);
}

#[inline(always)]
pub(crate) fn tri64(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(u64, u64, u64) -> u64) {
    let (a, b, c) = (r.v64(i.a), r.v64(i.b), r.v64(i.c));
    let o = lanes64(|l| f(a[l], b[l], c[l]));
    r.put64(i.d, &o, m);
}

#[inline(always)]
fn bin16(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(u16, u16) -> u16) {
    bin32(r, i, m, |a, b| u32::from(f(a as u16, b as u16)));
}

/// The inputs of an instruction of f32, its result with what its modifiers ask for. The loops stand here, and not in closures, so that
/// they are compiled as the function around them is.
#[inline(always)]
pub(crate) fn floats(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(f32, f32, f32) -> f32) {
    let (a, b, c) = (r.v32(i.a), r.v32(i.b), r.v32(i.c));
    let bits = f32::from_bits;
    let mut o = [0; 32];
    match (i.mods.ftz, i.mods.sat) {
        (false, false) => {
            for l in 0..32 {
                o[l] = total(f(bits(a[l]), bits(b[l]), bits(c[l])));
            }
        }
        (true, false) => {
            for l in 0..32 {
                o[l] = total(flush(f(flush(bits(a[l])), flush(bits(b[l])), flush(bits(c[l])))));
            }
        }
        (ftz, true) => {
            for l in 0..32 {
                let v = [a[l], b[l], c[l]].map(bits).map(|x| if ftz { flush(x) } else { x });
                let y = f(v[0], v[1], v[2]);
                let y = if y.is_nan() { 0.0 } else { y.clamp(0.0, 1.0) };
                o[l] = total(if ftz { flush(y) } else { y });
            }
        }
    }
    r.put32(i.d, &o, m);
}

#[inline(always)]
fn doubles(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(f64, f64, f64) -> f64) {
    let b = f64::from_bits;
    tri64(r, i, m, |x, y, z| f(b(x), b(y), b(z)).to_bits());
}

/// Instructions of half-precision: computed in f64 and rounded once.
#[inline(always)]
pub(crate) fn halves(r: &mut Regs, i: &Ins, m: u32, f: impl Fn(f64, f64, f64) -> f64) {
    let relu = i.mods.relu;
    let g = |x: f64, y: f64, z: f64| {
        let v = f(x, y, z);
        if relu && v < 0.0 { 0.0 } else { v }
    };
    let h = |v: u32| f16::from_bits(v as u16).to_f64();
    let b = |v: u32| bf16::from_bits(v as u16).to_f64();
    let fh = |x, y, z| u32::from(float::half(g(h(x), h(y), h(z))));
    let fb = |x, y, z| u32::from(float::brain(g(b(x), b(y), b(z))));
    match i.ty {
        Ty::F16 => tri32(r, i, m, fh),
        Ty::Bf16 => tri32(r, i, m, fb),
        Ty::F16x2 => tri32(r, i, m, |x, y, z| fh(x, y, z) | fh(x >> 16, y >> 16, z >> 16) << 16),
        _ => tri32(r, i, m, |x, y, z| fb(x, y, z) | fb(x >> 16, y >> 16, z >> 16) << 16),
    }
}

#[inline(always)]
fn body(r: &mut Regs, i: &Ins, m: u32) -> bool {
    use Op::*;
    if i.ty == Ty::Pred {
        return predicates(r, i, m);
    }
    match i.op {
        Mov if i.ty.wide() => un64(r, i, m, |a| a),
        Mov => un32(r, i, m, |a| a),
        Window => {
            let n = i.imm as u64;
            un64(r, i, m, |a| a.wrapping_add(n));
        }
        Setp => setp(r, i, m),
        Selp | Slct | Set | Testp | Pack | Unpack => select(r, i, m),
        Add | Sub | MulLo | MulHi | MulWide | MadLo | MadHi | MadWide | Fma | Div | Rem | Min | Max | Abs
        | Neg => return arithmetic(r, i, m),
        Rcp | Sqrt | Rsqrt | Ex2 | Lg2 | Sin | Cos | Tanh | Copysign => return special(r, i, m),
        And | Or | Xor | Not | Cnot | Shl | Shr | ShfL | ShfR | Bfe | Bfi | Bfind | Brev | Popc | Clz
        | Prmt | Lop3 | Sad | Dp4a => bits(r, i, m),
        _ => return false,
    }
    true
}

fn predicates(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let (a, b) = (r.pred(i.a), r.pred(i.b));
    let v = match i.op {
        Op::And => a & b,
        Op::Or => a | b,
        Op::Xor => a ^ b,
        Op::Not => !a,
        Op::Mov => a,
        _ => return false,
    };
    r.put_pred(i.d, v, m);
    true
}

#[inline(always)]
fn arithmetic(r: &mut Regs, i: &Ins, m: u32) -> bool {
    match i.ty {
        Ty::F32 => float32(r, i, m),
        Ty::F64 => float64(r, i, m),
        Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => half_float(r, i, m),
        Ty::U16 | Ty::S16 => short(r, i, m),
        Ty::U32 | Ty::S32 if i.mods.carry_in || i.mods.carry_out => carry(r, i, m),
        Ty::U32 | Ty::S32 => int32(r, i, m),
        Ty::U64 | Ty::S64 => int64(r, i, m),
        _ => false,
    }
}

#[inline(always)]
fn float32(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let round = i.mods.round;
    let nan = i.mods.nan;
    if round != Round::Nearest {
        let x = f64::from;
        match i.op {
            Op::Add => floats(r, i, m, |a, b, _| float::add(x(a), x(b), round)),
            Op::Sub => floats(r, i, m, |a, b, _| float::add(x(a), -x(b), round)),
            Op::MulLo => floats(r, i, m, |a, b, _| directed(x(a) * x(b), 0.0, round)),
            Op::Fma => floats(r, i, m, |a, b, c| float::add(x(a) * x(b), x(c), round)),
            Op::Div => floats(r, i, m, |a, b, _| float::divide(x(a), x(b), round)),
            _ => return false,
        }
        return true;
    }
    match i.op {
        Op::Add => floats(r, i, m, |a, b, _| a + b),
        Op::Sub => floats(r, i, m, |a, b, _| a - b),
        Op::MulLo => floats(r, i, m, |a, b, _| a * b),
        Op::Fma => floats(r, i, m, |a, b, c| a.mul_add(b, c)),
        Op::Div => floats(r, i, m, |a, b, _| a / b),
        Op::Min => floats(r, i, m, |a, b, _| minimum(a, b, nan)),
        Op::Max => floats(r, i, m, |a, b, _| maximum(a, b, nan)),
        Op::Abs => un32(r, i, m, |a| a & 0x7fff_ffff),
        Op::Neg => un32(r, i, m, |a| a ^ 0x8000_0000),
        _ => return false,
    }
    true
}

#[inline(always)]
fn float64(r: &mut Regs, i: &Ins, m: u32) -> bool {
    match i.op {
        Op::Add => doubles(r, i, m, |a, b, _| a + b),
        Op::Sub => doubles(r, i, m, |a, b, _| a - b),
        Op::MulLo => doubles(r, i, m, |a, b, _| a * b),
        Op::Fma => doubles(r, i, m, |a, b, c| a.mul_add(b, c)),
        Op::Div => doubles(r, i, m, |a, b, _| a / b),
        Op::Min => doubles(r, i, m, |a, b, _| a.min(b)),
        Op::Max => doubles(r, i, m, |a, b, _| a.max(b)),
        Op::Abs => un64(r, i, m, |a| a & (!0 >> 1)),
        Op::Neg => un64(r, i, m, |a| a ^ 1 << 63),
        _ => return false,
    }
    true
}

fn half_float(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let nan = i.mods.nan;
    let sign = if i.ty.bytes() == 4 { 0x8000_8000 } else { 0x8000 };
    match i.op {
        Op::Add => halves(r, i, m, |a, b, _| a + b),
        Op::Sub => halves(r, i, m, |a, b, _| a - b),
        Op::MulLo => halves(r, i, m, |a, b, _| a * b),
        Op::Fma => halves(r, i, m, |a, b, c| a.mul_add(b, c)),
        Op::Min => halves(r, i, m, |a, b, _| f64::from(minimum(a as f32, b as f32, nan))),
        Op::Max => halves(r, i, m, |a, b, _| f64::from(maximum(a as f32, b as f32, nan))),
        Op::Abs => un32(r, i, m, |a| a & !sign),
        Op::Neg => un32(r, i, m, |a| a ^ sign),
        _ => return false,
    }
    true
}

#[inline(always)]
fn short(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let s = i.ty == Ty::S16;
    match i.op {
        Op::Add => bin16(r, i, m, |a, b| a.wrapping_add(b)),
        Op::Sub => bin16(r, i, m, |a, b| a.wrapping_sub(b)),
        Op::MulLo => bin16(r, i, m, |a, b| a.wrapping_mul(b)),
        Op::MulHi if s => bin16(r, i, m, |a, b| ((i32::from(a as i16) * i32::from(b as i16)) >> 16) as u16),
        Op::MulHi => bin16(r, i, m, |a, b| ((u32::from(a) * u32::from(b)) >> 16) as u16),
        Op::MulWide if s => bin32(r, i, m, |a, b| (i32::from(a as i16) * i32::from(b as i16)) as u32),
        Op::MulWide => bin32(r, i, m, |a, b| (a & 0xffff) * (b & 0xffff)),
        Op::MadWide if s => tri32(r, i, m, |a, b, c| {
            (i32::from(a as i16) * i32::from(b as i16)).wrapping_add(c as i32) as u32
        }),
        Op::MadWide => tri32(r, i, m, |a, b, c| ((a & 0xffff) * (b & 0xffff)).wrapping_add(c)),
        Op::MadLo => tri32(r, i, m, |a, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff),
        Op::Div if s => {
            bin16(r, i, m, |a, b| if b == 0 { !0 } else { (a as i16).wrapping_div(b as i16) as u16 })
        }
        Op::Div => bin16(r, i, m, |a, b| a.checked_div(b).unwrap_or(!0)),
        Op::Rem if s => {
            bin16(r, i, m, |a, b| if b == 0 { a } else { (a as i16).wrapping_rem(b as i16) as u16 })
        }
        Op::Rem => bin16(r, i, m, |a, b| a.checked_rem(b).unwrap_or(a)),
        Op::Min if s => bin16(r, i, m, |a, b| (a as i16).min(b as i16) as u16),
        Op::Min => bin16(r, i, m, |a, b| a.min(b)),
        Op::Max if s => bin16(r, i, m, |a, b| (a as i16).max(b as i16) as u16),
        Op::Max => bin16(r, i, m, |a, b| a.max(b)),
        Op::Abs => un32(r, i, m, |a| u32::from((a as i16).unsigned_abs())),
        Op::Neg => un32(r, i, m, |a| a.wrapping_neg() & 0xffff),
        _ => return false,
    }
    true
}

#[inline(always)]
fn int32(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let s = i.ty == Ty::S32;
    let sat = i.mods.sat;
    let w = |x: u32| i64::from(x as i32);
    let u = u64::from;
    match i.op {
        Op::Add if sat => bin32(r, i, m, |a, b| (a as i32).saturating_add(b as i32) as u32),
        Op::Sub if sat => bin32(r, i, m, |a, b| (a as i32).saturating_sub(b as i32) as u32),
        Op::Add => bin32(r, i, m, |a, b| a.wrapping_add(b)),
        Op::Sub => bin32(r, i, m, |a, b| a.wrapping_sub(b)),
        Op::MulLo => bin32(r, i, m, |a, b| a.wrapping_mul(b)),
        Op::MulHi if s => bin32(r, i, m, |a, b| ((w(a) * w(b)) >> 32) as u32),
        Op::MulHi => bin32(r, i, m, |a, b| ((u(a) * u(b)) >> 32) as u32),
        Op::MulWide => {
            let (a, b) = (r.v32(i.a), r.v32(i.b));
            let o = if s { lanes64(|l| (w(a[l]) * w(b[l])) as u64) } else { lanes64(|l| u(a[l]) * u(b[l])) };
            r.put64(i.d, &o, m);
        }
        Op::MadLo => tri32(r, i, m, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Op::MadHi if s => tri32(r, i, m, |a, b, c| (((w(a) * w(b)) >> 32) as u32).wrapping_add(c)),
        Op::MadHi => tri32(r, i, m, |a, b, c| (((u(a) * u(b)) >> 32) as u32).wrapping_add(c)),
        Op::MadWide => {
            let (a, b, c) = (r.v32(i.a), r.v32(i.b), r.v64(i.c));
            let o = if s {
                lanes64(|l| ((w(a[l]) * w(b[l])) as u64).wrapping_add(c[l]))
            } else {
                lanes64(|l| (u(a[l]) * u(b[l])).wrapping_add(c[l]))
            };
            r.put64(i.d, &o, m);
        }
        Op::Div if s => {
            bin32(r, i, m, |a, b| if b == 0 { !0 } else { (a as i32).wrapping_div(b as i32) as u32 })
        }
        Op::Div => bin32(r, i, m, |a, b| a.checked_div(b).unwrap_or(!0)),
        Op::Rem if s => {
            bin32(r, i, m, |a, b| if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 })
        }
        Op::Rem => bin32(r, i, m, |a, b| a.checked_rem(b).unwrap_or(a)),
        Op::Min if s => bin32(r, i, m, |a, b| (a as i32).min(b as i32) as u32),
        Op::Min => bin32(r, i, m, |a, b| a.min(b)),
        Op::Max if s => bin32(r, i, m, |a, b| (a as i32).max(b as i32) as u32),
        Op::Max => bin32(r, i, m, |a, b| a.max(b)),
        Op::Abs => un32(r, i, m, |a| (a as i32).unsigned_abs()),
        Op::Neg => un32(r, i, m, |a| a.wrapping_neg()),
        _ => return false,
    }
    true
}

#[inline(always)]
fn int64(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let s = i.ty == Ty::S64;
    let w = |x: u64| i128::from(x as i64);
    let u = u128::from;
    match i.op {
        Op::Add => bin64(r, i, m, |a, b| a.wrapping_add(b)),
        Op::Sub => bin64(r, i, m, |a, b| a.wrapping_sub(b)),
        Op::MulLo => bin64(r, i, m, |a, b| a.wrapping_mul(b)),
        Op::MulHi if s => bin64(r, i, m, |a, b| ((w(a) * w(b)) >> 64) as u64),
        Op::MulHi => bin64(r, i, m, |a, b| ((u(a) * u(b)) >> 64) as u64),
        Op::MadLo => tri64(r, i, m, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Op::MadHi if s => tri64(r, i, m, |a, b, c| (((w(a) * w(b)) >> 64) as u64).wrapping_add(c)),
        Op::MadHi => tri64(r, i, m, |a, b, c| (((u(a) * u(b)) >> 64) as u64).wrapping_add(c)),
        Op::Div if s => {
            bin64(r, i, m, |a, b| if b == 0 { !0 } else { (a as i64).wrapping_div(b as i64) as u64 })
        }
        Op::Div => bin64(r, i, m, |a, b| a.checked_div(b).unwrap_or(!0)),
        Op::Rem if s => {
            bin64(r, i, m, |a, b| if b == 0 { a } else { (a as i64).wrapping_rem(b as i64) as u64 })
        }
        Op::Rem => bin64(r, i, m, |a, b| a.checked_rem(b).unwrap_or(a)),
        Op::Min if s => bin64(r, i, m, |a, b| (a as i64).min(b as i64) as u64),
        Op::Min => bin64(r, i, m, |a, b| a.min(b)),
        Op::Max if s => bin64(r, i, m, |a, b| (a as i64).max(b as i64) as u64),
        Op::Max => bin64(r, i, m, |a, b| a.max(b)),
        Op::Abs => un64(r, i, m, |a| (a as i64).unsigned_abs()),
        Op::Neg => un64(r, i, m, |a| a.wrapping_neg()),
        _ => return false,
    }
    true
}
