//! Element types. In: names and bits as files and the command line have them. Out: one enum with sizes, and the
//! rounding of a real number to each type, which is what a cast means everywhere in the project.

use std::fmt;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// 8-bit float, 4 exponent bits, no infinities ("e4m3fn", OCP 8-bit floating point).
    F8E4M3,
    /// 8-bit float, 5 exponent bits (OCP 8-bit floating point).
    F8E5M2,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// Truth value, one byte, 0 or 1.
    Bool,
}

use DType::*;

impl DType {
    /// Every type, in declaration order.
    pub const ALL: [DType; 10] = [F32, F16, BF16, F8E4M3, F8E5M2, I64, I32, I8, U8, Bool];

    /// Lower-case name used in dumps, flags and JSON: `f32`, `bf16`, `i64`, …
    pub fn name(self) -> &'static str {
        match self {
            F32 => "f32",
            F16 => "f16",
            BF16 => "bf16",
            F8E4M3 => "f8e4m3",
            F8E5M2 => "f8e5m2",
            I64 => "i64",
            I32 => "i32",
            I8 => "i8",
            U8 => "u8",
            Bool => "bool",
        }
    }

    /// The type with this [`name`](Self::name).
    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            F32 | I32 => 4,
            F16 | BF16 => 2,
            I64 => 8,
            F8E4M3 | F8E5M2 | I8 | U8 | Bool => 1,
        }
    }

    /// True for the floating-point types.
    pub fn is_float(self) -> bool {
        matches!(self, F32 | F16 | BF16 | F8E4M3 | F8E5M2)
    }

    /// True when every value of `narrow` is one of this type.
    pub fn represents(self, narrow: DType) -> bool {
        match self {
            F32 => matches!(narrow, F16 | BF16 | F8E4M3 | F8E5M2 | I8 | U8 | Bool),
            F16 => matches!(narrow, F8E4M3 | F8E5M2 | I8 | U8 | Bool),
            BF16 => matches!(narrow, F8E5M2 | F8E4M3 | I8 | U8 | Bool),
            I64 => matches!(narrow, I32 | I8 | U8 | Bool),
            I32 => matches!(narrow, I8 | U8 | Bool),
            _ => false,
        }
    }

    /// Nearest value of this floating type, ties to even; the identity for other types.
    pub fn round(self, x: f64) -> f64 {
        match self {
            F32 => x as f32 as f64,
            F16 => half::f16::from_f64(x).to_f64(),
            BF16 => half::bf16::from_f64(x).to_f64(),
            F8E4M3 => f8_decode(f8_encode(x, 4), 4),
            F8E5M2 => f8_decode(f8_encode(x, 5), 5),
            _ => x,
        }
    }

    /// The value of this integer type that is `x` modulo its range; truth for bool; the identity for floating types.
    pub fn wrap(self, x: i64) -> i64 {
        match self {
            I32 => x as i32 as i64,
            I8 => x as i8 as i64,
            U8 => x as u8 as i64,
            Bool => (x != 0) as i64,
            _ => x,
        }
    }

    /// Little-endian bits of `x` after rounding to this floating type.
    pub fn encode(self, x: f64, out: &mut Vec<u8>) {
        match self {
            F32 => out.extend((x as f32).to_le_bytes()),
            F16 => out.extend(half::f16::from_f64(x).to_le_bytes()),
            BF16 => out.extend(half::bf16::from_f64(x).to_le_bytes()),
            F8E4M3 => out.push(f8_encode(x, 4)),
            F8E5M2 => out.push(f8_encode(x, 5)),
            I64 => out.extend((x as i64).to_le_bytes()),
            I32 => out.extend((x as i32).to_le_bytes()),
            I8 => out.push(x as i8 as u8),
            U8 => out.push(x as u8),
            Bool => out.push((x != 0.0) as u8),
        }
    }

    /// The number that `bits` (this type's little-endian bytes) stand for, as f64.
    pub fn decode(self, b: &[u8]) -> f64 {
        match self {
            F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64,
            F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f64(),
            BF16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f64(),
            F8E4M3 => f8_decode(b[0], 4),
            F8E5M2 => f8_decode(b[0], 5),
            _ => self.decode_int(b) as f64,
        }
    }

    /// The integer that `bits` of an integer or bool type stand for.
    pub fn decode_int(self, b: &[u8]) -> i64 {
        match self {
            I64 => i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]),
            I32 => i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as i64,
            I8 => b[0] as i8 as i64,
            U8 => b[0] as i64,
            Bool => (b[0] != 0) as i64,
            _ => self.decode(b) as i64,
        }
    }

    /// Unit roundoff: half the distance from 1 to the next larger value; 0 for exact types.
    pub fn epsilon(self) -> f64 {
        match self {
            F32 => 2f64.powi(-24),
            F16 => 2f64.powi(-11),
            BF16 => 2f64.powi(-8),
            F8E4M3 => 2f64.powi(-4),
            F8E5M2 => 2f64.powi(-3),
            _ => 0.0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// (mantissa bits, exponent bias, largest finite value) of the 8-bit format with `exp` exponent bits.
fn f8_format(exp: u32) -> (i32, i32, f64) {
    if exp == 4 { (3, 7, 448.0) } else { (2, 15, 57344.0) }
}

fn f8_encode(x: f64, exp: u32) -> u8 {
    let (m, bias, max) = f8_format(exp);
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let (nan, inf) = if exp == 4 { (0x7f, 0x7f) } else { (0x7e, 0x7c) };
    if x.is_nan() {
        return sign | nan;
    }
    if x.is_infinite() {
        return sign | inf;
    }
    let a = x.abs();
    // The quantum of the binade of `a`, never below the subnormal one.
    let e = if a == 0.0 { 1 - bias } else { (a.log2().floor() as i32).max(1 - bias) };
    let e = if a >= 2f64.powi(e + 1) { e + 1 } else { e };
    let r = (a / 2f64.powi(e - m)).round_ties_even() * 2f64.powi(e - m);
    if r > max {
        return sign | inf;
    }
    if r < 2f64.powi(1 - bias) {
        return sign | (r / 2f64.powi(1 - bias - m)) as u8;
    }
    let e = if r >= 2f64.powi(e + 1) { e + 1 } else { e };
    let frac = (r / 2f64.powi(e - m)) as i32 - (1 << m);
    sign | (((e + bias) << m) | frac) as u8
}

fn f8_decode(b: u8, exp: u32) -> f64 {
    let (m, bias, _) = f8_format(exp);
    let sign = if b & 0x80 != 0 { -1.0 } else { 1.0 };
    let (e, frac) = (((b & 0x7f) >> m) as i32, (b & ((1 << m) - 1)) as f64);
    if exp == 4 && b & 0x7f == 0x7f {
        return f64::NAN;
    }
    if exp == 5 && e == 31 {
        return if frac == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    let scale = 2f64.powi(-m);
    if e == 0 {
        return sign * frac * scale * 2f64.powi(1 - bias);
    }
    sign * (1.0 + frac * scale) * 2f64.powi(e - bias)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f8_value_survives_a_round_trip() {
        for exp in [4, 5] {
            for b in 0..=255u8 {
                let x = f8_decode(b, exp);
                if x.is_nan() {
                    assert!(f8_decode(f8_encode(x, exp), exp).is_nan());
                } else {
                    assert_eq!(f8_encode(x, exp), b, "{exp} {b:#x} {x}");
                }
            }
        }
        assert_eq!(DType::F8E4M3.round(449.0), 448.0);
        assert_eq!(DType::F8E5M2.round(1e9), f64::INFINITY);
    }

    #[test]
    fn names_parse_back() {
        for d in DType::ALL {
            assert_eq!(DType::parse(d.name()), Some(d));
        }
        assert_eq!(DType::parse("f64"), None);
    }
}
