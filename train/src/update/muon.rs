//! Muon's direction (Jordan, 2024): the momentum of a matrix, orthogonalised by Newton and Schulz's iteration. In: the momentum of a
//! weight. Out: its direction, already times the scale of its shape. Each matrix of a joined weight is orthogonalised by itself; equal
//! ones, such as experts', in one batch.

use astrai_ir::ops::{Concat, Dot, ReduceKind, UnaryKind, Weight};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId};

/// How Muon orthogonalises and scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether the gradient enters the direction once more.
    pub nesterov: bool,
    /// Coefficients of x, x³ and x⁵ in a step.
    pub coefficients: [f64; 3],
    /// Steps of the iteration.
    pub steps: u32,
    /// Factor on the direction by the matrix's sizes.
    pub scale: Scale,
    /// Whether each value of the iteration is rounded to bf16, as PyTorch's is.
    pub narrow: bool,
}

/// The factor of a matrix `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// √max(1, rows / columns).
    Original,
    /// 0.2 √max(rows, columns): steps as large as AdamW's (arXiv:2502.16982).
    MatchRmsAdamw,
    /// √(rows / columns).
    SpectralUnclamped,
}

impl Scale {
    fn of(self, rows: usize, columns: usize) -> f64 {
        let ratio = rows as f64 / columns as f64;
        match self {
            Scale::Original => ratio.max(1.0).sqrt(),
            Scale::MatchRmsAdamw => 0.2 * (rows.max(columns) as f64).sqrt(),
            Scale::SpectralUnclamped => ratio.sqrt(),
        }
    }
}

impl Muon {
    /// The scaled orthogonal direction of `u`, which has the weight's shape: `[rows, columns]`, or `[experts, rows, columns]`.
    pub(super) fn direction(&self, g: &mut Graph, u: NodeId, w: &Weight) -> Result<NodeId, IrError> {
        let shape = g.ty(u).shape.clone();
        let sizes: Vec<usize> = shape.iter().filter_map(Dim::size).collect();
        let whole = match sizes[..] {
            [experts, rows, columns] => self.batch(g, u, [experts, rows, columns])?,
            [_, columns] => {
                let rows: Vec<usize> = w.rows().iter().map(|part| part.rows).collect();
                match rows[..] {
                    [first, ..] if rows.iter().all(|n| *n == first) => {
                        self.batch(g, u, [rows.len(), first, columns])?
                    }
                    _ => self.each(g, u, &rows, columns)?,
                }
            }
            _ => return Err(g.error(format!("{}: Muon is for matrices", w.name))),
        };
        g.reshape(whole, shape)
    }

    /// Matrices of different heights, one below another.
    fn each(&self, g: &mut Graph, u: NodeId, rows: &[usize], columns: usize) -> Result<NodeId, IrError> {
        let (mut at, mut parts) = (0, Vec::with_capacity(rows.len()));
        for &n in rows {
            let part = g.slice(u, 0, Dim::from(at), Dim::from(n))?;
            let made = self.batch(g, part, [1, n, columns])?;
            parts.push(g.reshape(made, vec![Dim::from(n), Dim::from(columns)])?);
            at += n;
        }
        g.push(Concat { axis: 0 }, &parts)
    }

    /// `count` matrices at once, `[count, rows, columns]`.
    fn batch(&self, g: &mut Graph, u: NodeId, [count, rows, columns]: [usize; 3]) -> Result<NodeId, IrError> {
        let dims = |sizes: [usize; 3]| sizes.map(Dim::from).to_vec();
        let mut x = g.reshape(u, dims([count, rows, columns]))?;
        x = self.rounded(g, x)?;
        let turned = rows > columns;
        if turned {
            x = g.permute(x, &[0, 2, 1])?;
        }
        let shape = g.ty(x).shape.clone();
        let square = g.mul(x, x)?;
        let sum = g.reduce(ReduceKind::Sum, square, &[2])?;
        let sum = g.reduce(ReduceKind::Sum, sum, &[1])?;
        let norm = g.unary(UnaryKind::Sqrt, sum)?;
        let least = g.fill(norm, 1e-7)?;
        let norm = g.binary(astrai_ir::ops::BinaryKind::Max, norm, least)?;
        let norm = g.reshape(norm, dims([count, 1, 1]))?;
        let norm = g.broadcast(norm, &shape)?;
        x = g.div(x, norm)?;
        x = self.rounded(g, x)?;
        let dot = |g: &mut Graph, a, b, axis| {
            g.push(Dot { batch: vec![(0, 0)], contract: vec![(2, axis)] }, &[a, b])
        };
        let [a, b, c] = self.coefficients;
        for _ in 0..self.steps {
            let gram = dot(g, x, x, 2)?;
            let gram = self.rounded(g, gram)?;
            let fourth = dot(g, gram, gram, 1)?;
            let (first, second) = (g.scale(gram, b)?, g.scale(fourth, c)?);
            let update = g.add(first, second)?;
            let update = self.rounded(g, update)?;
            let (kept, more) = (g.scale(x, a)?, dot(g, update, x, 1)?);
            x = g.add(kept, more)?;
            x = self.rounded(g, x)?;
        }
        if turned {
            x = g.permute(x, &[0, 2, 1])?;
        }
        g.scale(x, self.scale.of(rows, columns))
    }

    fn rounded(&self, g: &mut Graph, x: NodeId) -> Result<NodeId, IrError> {
        if !self.narrow {
            return Ok(x);
        }
        let narrow = g.cast(x, DType::BF16)?;
        g.cast(narrow, DType::F32)
    }
}
