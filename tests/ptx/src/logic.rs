//! Arithmetic, continued: comparisons, choices, bits, carries, special functions.

use crate::alu::{bin32, bin64, floats, halves, lanes32, lanes64, mask, tri32, un32, un64};
use crate::float::{self, Number};
use crate::kernel::{Cmp, Ins, Join, Op, Round, Ty};
use crate::registers::Regs;
use half::{bf16, f16};

#[inline(always)]
fn holds<T: PartialOrd>(c: Cmp, a: &T, b: &T) -> bool {
    match c {
        Cmp::Eq => a == b,
        Cmp::Ne => matches!(a.partial_cmp(b), Some(o) if o.is_ne()),
        Cmp::Lt => a < b,
        Cmp::Le => a <= b,
        Cmp::Gt => a > b,
        Cmp::Ge => a >= b,
        Cmp::Equ => !matches!(a.partial_cmp(b), Some(o) if o.is_ne()),
        Cmp::Neu => a != b,
        Cmp::Ltu => !matches!(a.partial_cmp(b), Some(o) if o.is_ge()),
        Cmp::Leu => !matches!(a.partial_cmp(b), Some(o) if o.is_gt()),
        Cmp::Gtu => !matches!(a.partial_cmp(b), Some(o) if o.is_le()),
        Cmp::Geu => !matches!(a.partial_cmp(b), Some(o) if o.is_lt()),
        Cmp::Num => a.partial_cmp(b).is_some(),
        Cmp::Nan => a.partial_cmp(b).is_none(),
    }
}

/// Lanes for which a comparison holds.
#[inline(always)]
fn compared<T: PartialOrd>(c: Cmp, f: impl Fn(usize) -> (T, T)) -> u32 {
    macro_rules! each {
        ($($c:ident)*) => { match c { $(Cmp::$c => mask(|l| { let (a, b) = f(l); holds(Cmp::$c, &a, &b) }),)* } };
    }
    each!(Eq Ne Lt Le Gt Ge Equ Neu Ltu Leu Gtu Geu Num Nan)
}

#[inline(always)]
fn comparison(r: &Regs, i: &Ins, ty: Ty) -> u32 {
    let c = i.mods.cmp;
    if ty.wide() {
        let (a, b) = (r.v64(i.a), r.v64(i.b));
        return match ty {
            Ty::F64 => compared(c, |l| (f64::from_bits(a[l]), f64::from_bits(b[l]))),
            Ty::S64 => compared(c, |l| (a[l] as i64, b[l] as i64)),
            _ => compared(c, |l| (a[l], b[l])),
        };
    }
    let (a, b) = (r.v32(i.a), r.v32(i.b));
    let half = |v: u32| f16::from_bits(v as u16).to_f32();
    let brain = |v: u32| bf16::from_bits(v as u16).to_f32();
    match ty {
        Ty::F32 => compared(c, |l| (f32::from_bits(a[l]), f32::from_bits(b[l]))),
        Ty::S32 => compared(c, |l| (a[l] as i32, b[l] as i32)),
        Ty::U32 => compared(c, |l| (a[l], b[l])),
        Ty::S16 => compared(c, |l| (a[l] as i16, b[l] as i16)),
        Ty::F16 => compared(c, |l| (half(a[l]), half(b[l]))),
        Ty::Bf16 => compared(c, |l| (brain(a[l]), brain(b[l]))),
        _ => compared(c, |l| (a[l] as u16, b[l] as u16)),
    }
}

#[inline(always)]
pub(crate) fn setp(r: &mut Regs, i: &Ins, m: u32) {
    let v = comparison(r, i, i.ty);
    let c = r.pred(i.c);
    let (p, q) = match i.mods.join {
        Join::And => (v & c, !v & c),
        Join::Or => (v | c, !v | c),
        Join::Xor => (v ^ c, !v ^ c),
        _ => (v, !v),
    };
    r.put_pred(i.d, p, m);
    r.put_pred(i.e, q, m);
}

#[inline(always)]
pub(crate) fn select(r: &mut Regs, i: &Ins, m: u32) {
    match i.op {
        Op::Selp | Op::Slct => {
            let p = match (i.op, i.ty2) {
                (Op::Selp, _) => r.pred(i.c),
                (_, Ty::F32) => mask(|l| f32::from_bits(r.v32(i.c)[l]) >= 0.0),
                _ => mask(|l| r.v32(i.c)[l] as i32 >= 0),
            };
            if i.ty.wide() {
                let (a, b) = (r.v64(i.a), r.v64(i.b));
                let o = lanes64(|l| if p >> l & 1 == 1 { a[l] } else { b[l] });
                r.put64(i.d, &o, m);
            } else {
                let (a, b) = (r.v32(i.a), r.v32(i.b));
                let o = lanes32(|l| if p >> l & 1 == 1 { a[l] } else { b[l] });
                r.put32(i.d, &o, m);
            }
        }
        Op::Set => {
            let yes = if i.ty == Ty::F32 { 1f32.to_bits() } else { !0 };
            let v = comparison(r, i, i.ty2);
            r.put32(i.d, &lanes32(|l| if v >> l & 1 == 1 { yes } else { 0 }), m);
        }
        Op::Testp => {
            let v = if i.ty.wide() {
                let a = r.v64(i.a);
                mask(|l| test(f64::from_bits(a[l]), i.imm))
            } else {
                let a = r.v32(i.a);
                mask(|l| test(f32::from_bits(a[l]), i.imm))
            };
            r.put_pred(i.d, v, m);
        }
        Op::Pack => pack(r, i, m),
        _ => unpack(r, i, m),
    }
}

fn test<T: Number>(x: T, kind: i64) -> bool {
    match kind {
        0 => x.finite(),
        1 => x.infinite(),
        2 => !x.nan(),
        3 => x.nan(),
        4 => x.normal(),
        _ => x.subnormal(),
    }
}

fn parts(i: &Ins) -> (usize, u64) {
    let bits = i.ty2.bytes() * 8;
    (bits, if bits == 64 { !0 } else { (1 << bits) - 1 })
}

fn pack(r: &mut Regs, i: &Ins, m: u32) {
    let (bits, keep) = parts(i);
    let mut o = [0u64; 32];
    for (n, s) in i.range().enumerate() {
        let v = *r.v32(r.lists[s]);
        for l in 0..32 {
            o[l] |= (u64::from(v[l]) & keep) << (bits * n);
        }
    }
    if i.ty.wide() { r.put64(i.d, &o, m) } else { r.put32(i.d, &o.map(|v| v as u32), m) }
}

fn unpack(r: &mut Regs, i: &Ins, m: u32) {
    let (bits, keep) = parts(i);
    let a = if i.ty.wide() { *r.v64(i.a) } else { r.v32(i.a).map(u64::from) };
    for (n, s) in i.range().enumerate() {
        let slot = r.lists[s];
        r.put32(slot, &a.map(|v| (v >> (bits * n) & keep) as u32), m);
    }
}

/// Sums and products that read or write the carry.
#[inline(always)]
pub(crate) fn carry(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let (a, b, c) = (*r.v32(i.a), *r.v32(i.b), *r.v32(i.c));
    let (read, carry) = (i.mods.carry_in, r.carry);
    let (mut o, mut out) = ([0u32; 32], 0u32);
    for l in 0..32 {
        let cin = u64::from(read && carry >> l & 1 == 1);
        let (x, y) = (u64::from(a[l]), u64::from(b[l]));
        let signed = (i64::from(a[l] as i32) * i64::from(b[l] as i32)) as u64;
        let sum = match i.op {
            Op::Add => x + y + cin,
            // The carry of a difference is its borrow.
            Op::Sub => x.wrapping_sub(y).wrapping_sub(cin) & 0x1_ffff_ffff,
            Op::MadLo => ((x * y) & 0xffff_ffff) + u64::from(c[l]) + cin,
            Op::MadHi if i.ty == Ty::S32 => (signed >> 32) + u64::from(c[l]) + cin,
            Op::MadHi => ((x * y) >> 32) + u64::from(c[l]) + cin,
            _ => return false,
        };
        (o[l], out) = (sum as u32, out | ((sum >> 32 & 1) as u32) << l);
    }
    r.put32(i.d, &o, m);
    if i.mods.carry_out {
        r.carry = r.carry & !m | out & m;
    }
    true
}

/// Special functions: computed well and rounded, where a GPU's table is a unit or two in the last place away.
#[inline(always)]
pub(crate) fn special(r: &mut Regs, i: &Ins, m: u32) -> bool {
    let round = i.mods.round;
    if i.op == Op::Copysign {
        match i.ty.wide() {
            true => bin64(r, i, m, |a, b| a & 1 << 63 | b & (!0 >> 1)),
            false => bin32(r, i, m, |a, b| a & 0x8000_0000 | b & 0x7fff_ffff),
        }
        return true;
    }
    match (i.ty, i.op) {
        (Ty::F32, Op::Rcp) if round == Round::Nearest => floats(r, i, m, |a, _, _| 1.0 / a),
        (Ty::F32, Op::Rcp) => floats(r, i, m, |a, _, _| float::divide(1.0, f64::from(a), round)),
        (Ty::F32, Op::Sqrt) if round == Round::Nearest => floats(r, i, m, |a, _, _| a.sqrt()),
        (Ty::F32, Op::Sqrt) => floats(r, i, m, |a, _, _| float::root(f64::from(a), round)),
        (Ty::F32, Op::Rsqrt) => floats(r, i, m, |a, _, _| (1.0 / f64::from(a).sqrt()) as f32),
        (Ty::F32, Op::Ex2) => floats(r, i, m, |a, _, _| a.exp2()),
        (Ty::F32, Op::Lg2) => floats(r, i, m, |a, _, _| a.log2()),
        (Ty::F32, Op::Sin) => floats(r, i, m, |a, _, _| a.sin()),
        (Ty::F32, Op::Cos) => floats(r, i, m, |a, _, _| a.cos()),
        (Ty::F32, Op::Tanh) => floats(r, i, m, |a, _, _| a.tanh()),
        (Ty::F64, Op::Rcp) => un64(r, i, m, |a| (1.0 / f64::from_bits(a)).to_bits()),
        (Ty::F64, Op::Sqrt) => un64(r, i, m, |a| f64::from_bits(a).sqrt().to_bits()),
        (Ty::F64, Op::Rsqrt) => un64(r, i, m, |a| (1.0 / f64::from_bits(a).sqrt()).to_bits()),
        (Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2, Op::Ex2) => halves(r, i, m, |a, _, _| a.exp2()),
        (Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2, Op::Tanh) => halves(r, i, m, |a, _, _| a.tanh()),
        _ => return false,
    }
    true
}

fn prmt(a: u32, b: u32, sel: u32) -> u32 {
    let all = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |o, n| {
        let s = sel >> (4 * n) & 15;
        let byte = (all >> (8 * (s & 7))) as u8;
        let byte = if s & 8 != 0 { 0u8.wrapping_sub(byte >> 7) } else { byte };
        o | u32::from(byte) << (8 * n)
    })
}

fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    (0..8).filter(|n| table >> n & 1 == 1).fold(0, |o, n| {
        let x = if n & 4 != 0 { a } else { !a };
        let y = if n & 2 != 0 { b } else { !b };
        let z = if n & 1 != 0 { c } else { !c };
        o | x & y & z
    })
}

fn dp4a(i: &Ins, a: u32, b: u32, c: u32) -> u32 {
    let byte = |v: u32, n: u32, signed: bool| {
        let v = (v >> (8 * n)) as u8;
        if signed { i32::from(v as i8) } else { i32::from(v) }
    };
    let (sa, sb) = (i.ty.signed(), i.ty2.signed());
    (0..4).fold(c, |s, n| s.wrapping_add((byte(a, n, sa) * byte(b, n, sb)) as u32))
}

#[inline(always)]
pub(crate) fn bits(r: &mut Regs, i: &Ins, m: u32) {
    if i.ty.wide() {
        return long_bits(r, i, m);
    }
    let narrow = i.ty.bytes() == 2;
    let keep = if narrow { 0xffff } else { !0u32 };
    match i.op {
        Op::And => bin32(r, i, m, |a, b| a & b),
        Op::Or => bin32(r, i, m, |a, b| a | b),
        Op::Xor => bin32(r, i, m, |a, b| a ^ b),
        Op::Not => un32(r, i, m, |a| !a & keep),
        Op::Cnot => un32(r, i, m, |a| u32::from(a == 0)),
        Op::Shl => bin32(r, i, m, |a, b| a.checked_shl(b).unwrap_or(0) & keep),
        Op::Shr if i.ty == Ty::S16 => bin32(r, i, m, |a, b| ((a as i16) >> b.min(15)) as u32 & keep),
        Op::Shr if i.ty == Ty::S32 => bin32(r, i, m, |a, b| ((a as i32) >> b.min(31)) as u32),
        Op::Shr => bin32(r, i, m, |a, b| a.checked_shr(b).unwrap_or(0)),
        Op::ShfL | Op::ShfR => {
            let (left, wrap) = (i.op == Op::ShfL, i.mods.alt);
            tri32(r, i, m, |a, b, c| {
                let n = if wrap { c & 31 } else { c.min(32) };
                let both = u64::from(b) << 32 | u64::from(a);
                if left { ((both << n) >> 32) as u32 } else { (both >> n) as u32 }
            });
        }
        Op::Bfe => {
            let signed = i.ty == Ty::S32;
            tri32(r, i, m, |a, b, c| float::extract(u64::from(a), 32, signed, b, c) as u32);
        }
        Op::Bfi => {
            let (a, b, c, e) = (r.v32(i.a), r.v32(i.b), r.v32(i.c), r.v32(i.e));
            let o = lanes32(|l| float::insert(u64::from(a[l]), u64::from(b[l]), 32, c[l], e[l]) as u32);
            r.put32(i.d, &o, m);
        }
        Op::Bfind => {
            let (signed, shift) = (i.ty == Ty::S32, i.mods.alt);
            un32(r, i, m, |a| {
                let a = if signed && (a as i32) < 0 { !a } else { a };
                let at = 31u32.wrapping_sub(a.leading_zeros());
                if shift && a != 0 { 31 - at } else { at }
            });
        }
        Op::Brev => un32(r, i, m, |a| a.reverse_bits()),
        Op::Popc => un32(r, i, m, |a| a.count_ones()),
        Op::Clz => un32(r, i, m, |a| a.leading_zeros()),
        Op::Prmt => tri32(r, i, m, prmt),
        Op::Lop3 => {
            let t = i.imm as u32;
            tri32(r, i, m, |a, b, c| lop3(a, b, c, t));
        }
        Op::Sad if i.ty == Ty::S32 => {
            tri32(r, i, m, |a, b, c| (a as i32).abs_diff(b as i32).wrapping_add(c));
        }
        Op::Sad => tri32(r, i, m, |a, b, c| a.abs_diff(b).wrapping_add(c)),
        _ => {
            let i2 = i;
            tri32(r, i, m, |a, b, c| dp4a(i2, a, b, c));
        }
    }
}

#[inline(always)]
fn long_bits(r: &mut Regs, i: &Ins, m: u32) {
    let signed = i.ty == Ty::S64;
    match i.op {
        Op::And => bin64(r, i, m, |a, b| a & b),
        Op::Or => bin64(r, i, m, |a, b| a | b),
        Op::Xor => bin64(r, i, m, |a, b| a ^ b),
        Op::Not => un64(r, i, m, |a| !a),
        Op::Cnot => un64(r, i, m, |a| u64::from(a == 0)),
        Op::Shl | Op::Shr => {
            let (a, b, left) = (r.v64(i.a), r.v32(i.b), i.op == Op::Shl);
            let o = lanes64(|l| match (left, signed) {
                (true, _) => a[l].checked_shl(b[l]).unwrap_or(0),
                (_, true) => ((a[l] as i64) >> b[l].min(63)) as u64,
                _ => a[l].checked_shr(b[l]).unwrap_or(0),
            });
            r.put64(i.d, &o, m);
        }
        Op::Bfe => {
            let (a, b, c) = (r.v64(i.a), r.v32(i.b), r.v32(i.c));
            let o = lanes64(|l| float::extract(a[l], 64, signed, b[l], c[l]));
            r.put64(i.d, &o, m);
        }
        Op::Bfi => {
            let (a, b, c, e) = (r.v64(i.a), r.v64(i.b), r.v32(i.c), r.v32(i.e));
            let o = lanes64(|l| float::insert(a[l], b[l], 64, c[l], e[l]));
            r.put64(i.d, &o, m);
        }
        Op::Brev => un64(r, i, m, |a| a.reverse_bits()),
        // Counts have 32 bits.
        Op::Popc | Op::Clz | Op::Bfind => {
            let a = r.v64(i.a);
            let o = lanes32(|l| match i.op {
                Op::Popc => a[l].count_ones(),
                Op::Clz => a[l].leading_zeros(),
                _ if signed && (a[l] as i64) < 0 => 63u32.wrapping_sub((!a[l]).leading_zeros()),
                _ => 63u32.wrapping_sub(a[l].leading_zeros()),
            });
            r.put32(i.d, &o, m);
        }
        _ => {}
    }
}
