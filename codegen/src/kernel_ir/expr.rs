//! The kernel IR: scalar expressions and loops that both dialects print. In: what `lower` makes of a region. Out: a list of
//! statements over one row of the result, in which every parallel loop and every reduction is marked as such.

use crate::kernel_ir::index::{Index, Var};
use astrai_ir::DType;
use astrai_ir::ops::{Activation, BinaryKind, CompareKind, ReduceKind, UnaryKind};
use std::rc::Rc;

/// A value of one element. Floating types are computed in f32.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// A number of a floating type.
    Real(f64),
    /// A number of an integer type, or an index.
    Int(Index),
    /// A local, with its type.
    Local(Rc<str>, DType),
    /// Element `at` of a buffer.
    Load {
        /// Which buffer.
        buf: usize,
        /// Position in elements.
        at: Index,
        /// Element type.
        dtype: DType,
    },
    /// Function of one value of this type.
    Unary(UnaryKind, DType, Box<Expr>),
    /// Activation.
    Act(Activation, Box<Expr>),
    /// Function of two values of this type.
    Binary(BinaryKind, DType, Box<Expr>, Box<Expr>),
    /// Relation of two values.
    Compare(CompareKind, Box<Expr>, Box<Expr>),
    /// Choice.
    Select(Box<Expr>, Box<Expr>, Box<Expr>),
    /// Element `at` of the random numbers on [0, 1) of these counters, 24 bits each.
    Uniform {
        /// The seed.
        seed: Box<Expr>,
        /// The step.
        step: Box<Expr>,
        /// The stream.
        stream: u32,
        /// Position in the stream.
        at: Index,
    },
    /// Conversion: (from, to).
    Cast(DType, DType, Box<Expr>),
}

/// One loop of a reduction: the value that each iteration adds.
#[derive(Clone, Debug)]
pub struct Part {
    /// Loop variable.
    pub var: Var,
    /// Statements of an iteration.
    pub body: Vec<Stmt>,
    /// What the iteration contributes.
    pub values: Vec<Expr>,
}

/// A statement.
#[derive(Clone, Debug)]
pub enum Stmt {
    /// A local.
    Let {
        /// Its name.
        name: Rc<str>,
        /// Its type.
        dtype: DType,
        /// Its value.
        value: Expr,
    },
    /// Element `at` of a buffer.
    Store {
        /// Which buffer.
        buf: usize,
        /// Position in elements.
        at: Index,
        /// Element type.
        dtype: DType,
        /// The value.
        value: Expr,
    },
    /// Independent iterations, spread over vector lanes or threads.
    Loop {
        /// Loop variable.
        var: Var,
        /// Statements of an iteration.
        body: Vec<Stmt>,
    },
    /// A local that accumulates over loops, in fixed lanes; one after another when loops surround the parts.
    Reduce {
        /// Name of the local.
        name: Rc<str>,
        /// What is accumulated.
        kind: ReduceKind,
        /// Type of the result.
        dtype: DType,
        /// Loops around every part, outermost first.
        outer: Vec<Var>,
        /// Innermost loops, one after another.
        parts: Vec<Part>,
        /// For a mean: the number of elements.
        count: Index,
    },
}

/// True when a statement or one inside it is a reduction.
pub fn reduces(body: &[Stmt]) -> bool {
    body.iter().any(|s| match s {
        Stmt::Reduce { .. } => true,
        Stmt::Loop { body, .. } => reduces(body),
        Stmt::Let { .. } | Stmt::Store { .. } => false,
    })
}

/// Calls this for each load of these statements but those in loops of their own, with the buffer and the position.
pub fn each_load(body: &[Stmt], found: &mut impl FnMut(usize, &Index)) {
    for s in body {
        match s {
            Stmt::Let { value, .. } | Stmt::Store { value, .. } => value.each_load(found),
            Stmt::Loop { .. } | Stmt::Reduce { .. } => {}
        }
    }
}

impl Expr {
    fn each_load(&self, found: &mut impl FnMut(usize, &Index)) {
        match self {
            Expr::Load { buf, at, .. } => found(*buf, at),
            Expr::Real(_) | Expr::Int(_) | Expr::Local(..) => {}
            Expr::Unary(_, _, x) | Expr::Act(_, x) | Expr::Cast(_, _, x) => x.each_load(found),
            Expr::Binary(_, _, x, y) | Expr::Compare(_, x, y) => {
                [x, y].iter().for_each(|e| e.each_load(found))
            }
            Expr::Uniform { seed, step, .. } => [seed, step].iter().for_each(|e| e.each_load(found)),
            Expr::Select(x, y, z) => [x, y, z].iter().for_each(|e| e.each_load(found)),
        }
    }
}
