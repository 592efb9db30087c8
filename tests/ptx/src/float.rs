//! Numbers as a GPU has them: roundings that processors lack, NaN, narrow types, fields of bits.

use crate::kernel::Round;
use half::{bf16, f16};

/// True where the processor has the instructions that the loops over lanes are compiled for.
pub(crate) fn fast() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Bits of a result; a NaN is the one that GPUs make.
#[inline(always)]
pub(crate) fn total(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}

/// Subnormal numbers as zero of their sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

#[inline(always)]
pub(crate) fn minimum(a: f32, b: f32, nan: bool) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) | (_, true) if nan => f32::NAN,
        (true, _) => b,
        (_, true) => a,
        _ if a == b => f32::from_bits(a.to_bits() | b.to_bits()),
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    }
}

#[inline(always)]
pub(crate) fn maximum(a: f32, b: f32, nan: bool) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) | (_, true) if nan => f32::NAN,
        (true, _) => b,
        (_, true) => a,
        _ if a == b => f32::from_bits(a.to_bits() & b.to_bits()),
        _ => {
            if a > b {
                a
            } else {
                b
            }
        }
    }
}

/// The f32 beside `s + e`, where `e` is what `s` lost to rounding.
pub(crate) fn directed(s: f64, e: f64, round: Round) -> f32 {
    let f = s as f32;
    if !s.is_finite() {
        return f;
    }
    let (above, below) =
        (f64::from(f) > s || f64::from(f) == s && e < 0.0, f64::from(f) < s || f64::from(f) == s && e > 0.0);
    match round {
        Round::Down if above => f.next_down(),
        Round::Up if below => f.next_up(),
        Round::Zero if above && s > 0.0 => f.next_down(),
        Round::Zero if below && s < 0.0 => f.next_up(),
        _ => f,
    }
}

/// Exact sum, rounded once.
pub(crate) fn add(a: f64, b: f64, round: Round) -> f32 {
    let s = a + b;
    let t = s - a;
    let e = (a - (s - t)) + (b - t);
    directed(s, e, round)
}

pub(crate) fn divide(a: f64, b: f64, round: Round) -> f32 {
    let q = a / b;
    let left = (-q).mul_add(b, a);
    directed(q, if left == 0.0 || !left.is_finite() { 0.0 } else { left / b }, round)
}

pub(crate) fn root(a: f64, round: Round) -> f32 {
    let s = a.sqrt();
    directed(s, (-s).mul_add(s, a), round)
}

/// f16 nearest to a number.
pub(crate) fn half(x: f64) -> u16 {
    if x.is_nan() { 0x7fff } else { f16::from_f64(x).to_bits() }
}

/// bf16 nearest to a number.
pub(crate) fn brain(x: f64) -> u16 {
    if x.is_nan() { 0x7fff } else { bf16::from_f64(x).to_bits() }
}

/// A field of bits, with its sign where it has one.
pub(crate) fn extract(a: u64, width: u32, signed: bool, at: u32, len: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    let sign = if signed { a >> (at + len - 1).min(width - 1) & 1 } else { 0 };
    let field = if at >= width { 0 } else { a >> at };
    let n = len.min(width.saturating_sub(at));
    let keep = if n >= 64 { !0 } else { (1u64 << n) - 1 };
    let fill = if sign == 1 { !keep } else { 0 };
    field & keep | fill
}

pub(crate) fn insert(a: u64, b: u64, width: u32, at: u32, len: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    if at >= width || len == 0 {
        return b;
    }
    let keep = if len >= 64 { !0 } else { (1u64 << len) - 1 };
    b & !(keep << at) | (a & keep) << at
}

/// What is asked of a floating number.
pub(crate) trait Number: Copy {
    fn finite(self) -> bool;
    fn infinite(self) -> bool;
    fn nan(self) -> bool;
    fn normal(self) -> bool;
    fn subnormal(self) -> bool;
}

macro_rules! number {
    ($($t:ty)*) => { $(impl Number for $t {
        fn finite(self) -> bool { self.is_finite() }
        fn infinite(self) -> bool { self.is_infinite() }
        fn nan(self) -> bool { self.is_nan() }
        fn normal(self) -> bool { self.is_normal() }
        fn subnormal(self) -> bool { self.is_subnormal() }
    })* };
}
number!(f32 f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directed_roundings_surround_the_exact_result() {
        let (a, b) = (1.0f64, f64::from(2f32.powi(-30)));
        assert_eq!(add(a, b, Round::Down), 1.0);
        assert_eq!(add(a, b, Round::Up), 1f32.next_up());
        assert_eq!(add(-a, -b, Round::Zero), -1.0);
        assert_eq!(divide(1.0, 3.0, Round::Up), divide(1.0, 3.0, Round::Down).next_up());
        assert_eq!(root(4.0, Round::Up), 2.0);
        // Lost even in f64.
        assert_eq!(add(1.0, -1e-40, Round::Down), 1f32.next_down());
    }

    #[test]
    fn fields_of_bits_are_as_the_manual_has_them() {
        assert_eq!(extract(0xABCD, 32, false, 4, 8), 0xBC);
        assert_eq!(extract(0xF0, 32, true, 4, 4) as i64, -1);
        assert_eq!(insert(0xF, 0, 32, 28, 8) as u32, 0xF000_0000);
    }
}
