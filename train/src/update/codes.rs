//! Moments of Adam's in eight bits (block-wise, after arXiv:2110.02861). In: a moment as f32. Out: a code an element and the largest size of each block of elements
//! along the last axis, and back. Codes are close together where numbers are small: the first moment is its block's largest times the square of
//! code/127, with the code's sign, the second times the fourth power of code/255, and never 0 beside a moment that is not, for it is divided by.

use astrai_ir::ops::{BinaryKind, CompareKind, ReduceKind, State, UnaryKind, Weight};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Type};

/// Elements of a block at most.
const BLOCK: usize = 256;
/// Elements of a block at least: fewer would make scales a burden.
const SHORTEST: usize = 32;
/// Elements of a weight from which its moments are codes.
const SMALLEST: usize = 4096;

/// How a moment is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Codes {
    /// Elements of a block.
    pub block: usize,
    /// The first moment has a sign, the second none.
    pub signed: bool,
}

/// Elements of a block of a weight's moments: the largest power of two up to 256 that divides its rows; none where that is small, as is the weight.
pub(super) fn block(w: &Weight) -> Option<usize> {
    let sizes: Vec<usize> = w.ty.shape.iter().filter_map(Dim::size).collect();
    let block = 1 << sizes.last()?.trailing_zeros().min(BLOCK.trailing_zeros());
    let large = sizes.len() > 1 && sizes.iter().product::<usize>() >= SMALLEST;
    (large && block >= SHORTEST).then_some(block)
}

/// Type of the scales of a weight's moments.
pub(super) fn scales(w: &Weight, block: usize) -> Type {
    let mut shape = w.ty.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = Dim::from(last.size().unwrap_or(0) / block);
    }
    Type::new(DType::F32, shape)
}

impl Codes {
    /// Type of a code.
    pub(super) fn dtype(self) -> DType {
        if self.signed { DType::I8 } else { DType::U8 }
    }

    fn most(self) -> f64 {
        if self.signed { 127.0 } else { 255.0 }
    }

    /// The moment of these states: its value, codes, scales.
    pub(super) fn read(self, g: &mut Graph, w: &Weight, names: [&str; 2]) -> Result<[NodeId; 3], IrError> {
        let mut state = |name: &str, ty| g.push(State { name: format!("{name}{}", w.name), ty }, &[]);
        let codes = state(names[0], w.ty.with(self.dtype()))?;
        let scales = state(names[1], scales(w, self.block))?;
        let x = g.cast(codes, DType::F32)?;
        let x = g.scale(x, 1.0 / self.most())?;
        let size = if self.signed { g.unary(UnaryKind::Abs, x)? } else { g.mul(x, x)? };
        let power = if self.signed { g.mul(x, size)? } else { g.mul(size, size)? };
        let scale = self.spread(g, scales)?;
        Ok([g.mul(power, scale)?, codes, scales])
    }

    /// A moment as codes and scales.
    pub(super) fn write(self, g: &mut Graph, x: NodeId) -> Result<[NodeId; 2], IrError> {
        let size = g.unary(UnaryKind::Abs, x)?;
        let mut shape = g.ty(x).shape.clone();
        let last = shape.pop().and_then(|n| n.size()).unwrap_or(0);
        shape.extend([Dim::from(last / self.block), Dim::from(self.block)]);
        let cut = g.reshape(size, shape.clone())?;
        let scales = g.reduce(ReduceKind::Max, cut, &[shape.len() - 1])?;
        let tiny = g.fill(scales, 1e-30)?;
        let above = g.binary(BinaryKind::Max, scales, tiny)?;
        let above = self.spread(g, above)?;
        let mut part = g.div(size, above)?;
        for _ in 0..if self.signed { 1 } else { 2 } {
            part = g.unary(UnaryKind::Sqrt, part)?;
        }
        let code = g.scale(part, self.most())?;
        let half = g.fill(code, 0.5)?;
        let code = g.add(code, half)?;
        let code = if self.signed {
            let (zero, minus) = (g.fill(x, 0.0)?, g.unary(UnaryKind::Neg, code)?);
            let negative = g.compare(CompareKind::Lt, x, zero)?;
            g.select(negative, minus, code)?
        } else {
            let one = g.fill(code, 1.0)?;
            g.binary(BinaryKind::Max, code, one)?
        };
        // Towards zero: what was added rounds to the nearest.
        Ok([g.cast(code, self.dtype())?, scales])
    }

    /// A number of each block for each of its elements.
    fn spread(self, g: &mut Graph, scales: NodeId) -> Result<NodeId, IrError> {
        let mut shape = g.ty(scales).shape.clone();
        shape.push(Dim::from(1));
        let column = g.reshape(scales, shape.clone())?;
        shape.pop();
        let blocks = shape.last().and_then(Dim::size).unwrap_or(0);
        shape.push(Dim::from(self.block));
        let all = g.broadcast(column, &shape)?;
        shape.truncate(shape.len() - 2);
        shape.push(Dim::from(blocks * self.block));
        g.reshape(all, shape)
    }
}
