//! Composites over a row: rotary embedding, norms, softmax, as expressions over statistics that a row computes once; numbers of codes.

use super::{Lower, Lowered, below, cast, narrow};
use crate::kernel_ir::expr::Expr;
use crate::kernel_ir::index::Index;
use astrai_ir::ops::{BinaryKind, Op, ReduceKind, Rope, RopeLayout, UnaryKind};
use astrai_ir::{Code, DType, Dim, NodeId};

/// True for the composites below.
pub fn computes(op: &Op) -> bool {
    let known = |op: &Op| matches!(op, Op::Dequant(d) if d.code != Code::Fp4);
    matches!(op, Op::Rope(_) | Op::RmsNorm(_) | Op::Softmax(_)) || known(op)
}

impl Lower<'_> {
    /// An element of a composite over a row.
    pub(super) fn row(&mut self, id: NodeId, at: &[Index]) -> Lowered {
        let node = self.region.graph().node(id).clone();
        match &node.op {
            Op::Rope(r) => self.rope(r, &node.args, at),
            Op::RmsNorm(n) => self.rms_norm(n.eps.0, id, at),
            Op::Softmax(s) => self.softmax(s.log, id, at),
            Op::Dequant(d) => self.dequant(d.code, &node.args, at),
            op => Err(format!("`{}` has no loop form", op.name())),
        }
    }

    /// The value of a code, times the scale of its group, plus its offset.
    fn dequant(&mut self, code: Code, args: &[NodeId], at: &[Index]) -> Lowered {
        let last = |id: NodeId| self.ty(id).shape.last().and_then(Dim::size).ok_or("rows of no literal size");
        let group = last(args[0])? * code.per_element() / last(args[1])?.max(1);
        let every = |n: usize| {
            let mut of = at.to_vec();
            of.iter_mut().rev().take(1).for_each(|last| *last = last.div(&Dim::from(n)));
            of
        };
        let number = |l: &mut Self, id: NodeId, at: &[Index]| {
            let x = l.value(id, at)?;
            Ok::<_, String>(Box::new(cast(l.ty(id).dtype, DType::F32, x)))
        };
        let of = every(group);
        let (code, scale) = match (code, at.last()) {
            (Code::Int4, Some(i)) => {
                let two = self.value(args[0], &every(2))?;
                let two = cast(DType::U8, DType::I32, two);
                let int = |n: usize| Box::new(Expr::Int(Index::constant(Dim::from(n))));
                let by = |kind, x: Expr, y| Expr::Binary(kind, DType::I32, Box::new(x), y);
                let high = by(BinaryKind::Div, two.clone(), int(16));
                let low = by(BinaryKind::Sub, two, Box::new(by(BinaryKind::Mul, high.clone(), int(16))));
                let first = below(i.rem(&Dim::from(2)), Dim::from(1));
                let four = Expr::Select(Box::new(first), Box::new(low), Box::new(high));
                let code = cast(DType::I32, DType::F32, by(BinaryKind::Sub, four, int(8)));
                (Box::new(code), number(self, args[1], &of)?)
            }
            _ => (number(self, args[0], at)?, number(self, args[1], &of)?),
        };
        let scaled = Expr::Binary(BinaryKind::Mul, DType::F32, scale, code);
        match args.get(2) {
            Some(offsets) => {
                let offset = number(self, *offsets, &of)?;
                Ok(Expr::Binary(BinaryKind::Add, DType::F32, Box::new(scaled), offset))
            }
            None => Ok(scaled),
        }
    }

    fn rope(&mut self, r: &Rope, args: &[NodeId], at: &[Index]) -> Lowered {
        let (dim, half) = (Dim::from(r.dim), Dim::from(r.dim / 2));
        let dtype = self.ty(args[0]).dtype;
        let j = at[2].clone();
        let x = self.value(args[0], at)?;
        if j.range().is_some_and(|(lo, _)| lo >= r.dim as i64) {
            return Ok(x);
        }
        // Of either element of a pair its partner, the pair, and whether it is the first; whether all are the first, if that is
        // certain, and else where they are: where an index is below a size.
        let (sides, decided, test) = match r.layout {
            RopeLayout::Half => {
                let back = j.plus(&(&Dim::from(0) - &half));
                let sides = [(j.plus(&half), j.clone(), true), (back.clone(), back, false)];
                let h = (r.dim / 2) as i64;
                let first = j.range().and_then(|(lo, hi)| (hi < h || lo >= h).then_some(hi < h));
                (sides, first, (j.clone(), half.clone()))
            }
            RopeLayout::Interleaved => {
                let (pair, two) = (j.div(&Dim::from(2)), Dim::from(2));
                let even = pair.times(&two);
                let sides = [(even.plus(&Dim::from(1)), pair.clone(), true), (even, pair, false)];
                let rest = j.rem(&two);
                let first = rest.range().filter(|(lo, hi)| lo == hi).map(|(lo, _)| lo == 0);
                (sides, first, (rest, Dim::from(1)))
            }
        };
        let rotated = match decided {
            Some(first) => self.rotate(args, at, &x, &sides[usize::from(!first)], &half)?,
            None => {
                let a = self.rotate(args, at, &x, &sides[0], &half)?;
                let b = self.rotate(args, at, &x, &sides[1], &half)?;
                Expr::Select(Box::new(below(test.0, test.1)), Box::new(a), Box::new(b))
            }
        };
        self.within(j, dim, |_| Ok(narrow(dtype, rotated)), x)
    }

    /// x·cos ∓ partner·sin.
    fn rotate(
        &mut self,
        args: &[NodeId],
        at: &[Index],
        x: &Expr,
        (partner, pair, first): &(Index, Index, bool),
        half: &Dim,
    ) -> Lowered {
        let mut other = at.to_vec();
        other[2] = partner.clone();
        let other = self.clamped(args[0], &other, 2)?;
        let row = [at[0].clone(), pair.hold(half)];
        let (cos, sin) = (self.value(args[1], &row)?, self.value(args[2], &row)?);
        let mul =
            |a: &Expr, b: Expr| Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(a.clone()), Box::new(b));
        let kind = if *first { BinaryKind::Sub } else { BinaryKind::Add };
        Ok(Expr::Binary(kind, DType::F32, Box::new(mul(x, cos)), Box::new(mul(&other, sin))))
    }

    fn rms_norm(&mut self, eps: f64, id: NodeId, at: &[Index]) -> Lowered {
        let args = self.region.graph().node(id).args.clone();
        let dtype = self.ty(id).dtype;
        let row = &at[..at.len() - 1];
        let scale = self.statistic(id, 1, row, |l| {
            let mean = l.fold(ReduceKind::Mean, args[0], row, |l, k| {
                let x = l.value(args[0], k)?;
                Ok(Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(x.clone()), Box::new(x)))
            })?;
            let m = Expr::Binary(BinaryKind::Add, DType::F32, Box::new(mean), Box::new(Expr::Real(eps)));
            Ok(Expr::Unary(UnaryKind::Rsqrt, DType::F32, Box::new(m)))
        })?;
        let x = self.value(args[0], at)?;
        let w = self.value(args[1], &at[at.len() - 1..])?;
        let n = Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(x), Box::new(scale));
        Ok(narrow(dtype, Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(n), Box::new(w))))
    }

    fn softmax(&mut self, log: bool, id: NodeId, at: &[Index]) -> Lowered {
        let x = self.region.graph().node(id).args[0];
        let dtype = self.ty(id).dtype;
        let row = &at[..at.len() - 1];
        let sub = |a: Expr, b: Expr| Expr::Binary(BinaryKind::Sub, DType::F32, Box::new(a), Box::new(b));
        let top = self.statistic(id, 1, row, |l| l.fold(ReduceKind::Max, x, row, |l, k| l.value(x, k)))?;
        let sum = self.statistic(id, 2, row, |l| {
            let sum = l.fold(ReduceKind::Sum, x, row, |l, k| {
                let v = l.value(x, k)?;
                Ok(Expr::Unary(UnaryKind::Exp, DType::F32, Box::new(sub(v, top.clone()))))
            })?;
            let one = Expr::Real(1.0);
            Ok(match log {
                true => Expr::Unary(UnaryKind::Log, DType::F32, Box::new(sum)),
                false => Expr::Binary(BinaryKind::Div, DType::F32, Box::new(one), Box::new(sum)),
            })
        })?;
        let v = self.value(x, at)?;
        let shifted = sub(v, top);
        if log {
            return Ok(narrow(dtype, sub(shifted, sum)));
        }
        let e = Expr::Unary(UnaryKind::Exp, DType::F32, Box::new(shifted));
        Ok(narrow(dtype, Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(e), Box::new(sum))))
    }
}
