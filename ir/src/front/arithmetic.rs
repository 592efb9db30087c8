//! `+ - * /` and negation of values, with each other and with numbers on either side, owned or borrowed.

use super::Value;
use crate::graph::NodeId;
use crate::ops::{BinaryKind, Iota, UnaryKind};
use std::ops::{Add, Div, Mul, Neg, Sub};

impl Value {
    fn number(&self, kind: BinaryKind, x: f64, value_first: bool) -> Value {
        self.with(|g, v| {
            let c: NodeId = g.fill(v, x)?;
            if value_first { g.binary(kind, v, c) } else { g.binary(kind, c, v) }
        })
    }

    /// `x` everywhere, with the type of this.
    pub fn full_like(&self, x: f64) -> Value {
        self.with(|g, v| g.fill(v, x))
    }

    /// Positions along an axis, with the type of this.
    pub(crate) fn iota(&self, axis: usize) -> Value {
        self.with(|g, v| g.push(Iota { ty: g.ty(v).clone(), axis }, &[]))
    }

    pub(crate) fn both(&self, kind: BinaryKind, o: &Value) -> Value {
        self.with2(o, |g, a, b| g.binary(kind, a, b))
    }

    /// `self` to the power of a number.
    pub fn pow(&self, exponent: f64) -> Value {
        self.number(BinaryKind::Pow, exponent, true)
    }

    /// The larger of two, element by element.
    pub fn maximum(&self, o: &Value) -> Value {
        self.both(BinaryKind::Max, o)
    }

    /// The smaller of two, element by element.
    pub fn minimum(&self, o: &Value) -> Value {
        self.both(BinaryKind::Min, o)
    }

    /// `max(x, 0)`.
    pub fn relu(&self) -> Value {
        // The number first: at 0 the gradient is that of the constant, none.
        self.number(BinaryKind::Max, 0.0, false)
    }
}

macro_rules! operator {
    ($($trait:ident $method:ident)*) => { $(
        operator!($trait $method: &Value, &Value => |a, b| a.both(BinaryKind::$trait, b));
        operator!($trait $method: &Value, Value => |a, b| a.both(BinaryKind::$trait, &b));
        operator!($trait $method: Value, &Value => |a, b| a.both(BinaryKind::$trait, b));
        operator!($trait $method: Value, Value => |a, b| a.both(BinaryKind::$trait, &b));
        operator!($trait $method: &Value, f64 => |v, x| v.number(BinaryKind::$trait, x, true));
        operator!($trait $method: Value, f64 => |v, x| v.number(BinaryKind::$trait, x, true));
        operator!($trait $method: f64, &Value => |x, v| v.number(BinaryKind::$trait, x, false));
        operator!($trait $method: f64, Value => |x, v| v.number(BinaryKind::$trait, x, false));
    )* };
    ($trait:ident $method:ident: $left:ty, $right:ty => |$a:ident, $b:ident| $made:expr) => {
        impl $trait<$right> for $left {
            type Output = Value;
            fn $method(self, $b: $right) -> Value {
                let $a = self;
                $made
            }
        }
    };
}

operator! { Add add Sub sub Mul mul Div div }

impl Neg for &Value {
    type Output = Value;
    fn neg(self) -> Value {
        self.with(|g, x| g.unary(UnaryKind::Neg, x))
    }
}

impl Neg for Value {
    type Output = Value;
    fn neg(self) -> Value {
        -&self
    }
}
