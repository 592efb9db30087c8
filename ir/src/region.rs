//! What one kernel computes. In: a piece of a graph whose leaves are buffers, matched once by the archetype that computes it. Out:
//! a region: its form (operands, sizes, what of the graph the kernel takes along), the bounds that its integer data must keep,
//! its traffic and its flops. Emission and the runtime read these and derive nothing again.

mod guards;

pub use guards::{Guard, IntegerList, PageGuard};

use crate::graph::{Graph, NodeId};
use crate::kernel::{Kernel, Products};
use crate::ops::{Attention, LinearCrossEntropy, Reduce, Route};
use crate::{Code, DType, Dim, Type};
use std::fmt;

/// One of the buffers that a region reads, by its place in the list of what the region reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Operand(pub usize);

/// How a buffer's elements lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Layout {
    /// Row-major.
    Rows,
    /// A matrix `[n, k]` as `[n/rows][k/group][rows][group]`, padded with zeros to whole panels and groups; matrices
    /// `[groups, k, n]` so one after another, each transposed.
    Panels {
        /// Rows of the matrix that a panel has.
        rows: usize,
        /// Neighbours along `k` that stay together: 2 where instructions multiply pairs.
        group: usize,
    },
}

impl Layout {
    /// True for panels.
    pub fn is_packed(self) -> bool {
        self != Layout::Rows
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layout::Rows => f.write_str("rows"),
            Layout::Panels { rows, group } => write!(f, "panels {rows}x{group}"),
        }
    }
}

/// A side of a dot in memory: element `(i, k)` of the operand lies at `offset + i·free + k·along`, in elements. One of the
/// strides is 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Side<At = Operand> {
    /// Where it is read.
    pub at: At,
    /// Its element type, f32 or bf16.
    pub dtype: DType,
    /// Position of the first element.
    pub offset: Dim,
    /// Stride from one row (left) or column (right) of the result to the next.
    pub free: Dim,
    /// Stride along the sum.
    pub along: Dim,
}

/// Dots side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct DotBatch {
    /// How many.
    pub count: Dim,
    /// Stride from one left side to the next, in elements.
    pub left: Dim,
    /// Stride from one right side to the next.
    pub right: Dim,
}

/// A dot `[m, k] · [k, n]`, or several side by side. What follows the dot, element by element, is its epilogue.
#[derive(Clone, Debug, PartialEq)]
pub struct DotForm<At = Operand> {
    /// The dot in the region's graph.
    pub node: NodeId,
    /// Where there are several; both sides then lie in memory.
    pub batch: Option<DotBatch>,
    /// Rows of the result: all free axes of the left side.
    pub m: Dim,
    /// Columns of the result: all free axes of the right side.
    pub n: Dim,
    /// Length of the sums.
    pub k: Dim,
    /// The left side, where it lies in memory.
    pub left: Option<Side<At>>,
    /// True when the left side may be an expression, computed a row at a time: the prologue.
    pub rows: bool,
    /// The right side; where codes are stored in its place, the codes.
    pub right: Side<At>,
    /// What the codes stand for, where they are stored.
    pub codes: Option<DotCodes<At>>,
}

/// Codes of a dot's right side: neighbours along the sum share a scale.
#[derive(Clone, Debug, PartialEq)]
pub struct DotCodes<At = Operand> {
    /// What a code stands for.
    pub code: Code,
    /// Neighbours that share a scale.
    pub group: usize,
    /// Scales `[n, k / group]`.
    pub scales: At,
    /// Their type.
    pub dtype: DType,
    /// Offsets, of the same shape and type, where codes have some.
    pub offsets: Option<At>,
    /// Neighbours of the left side that share a scale, where its rows are rounded to integers, which are multiplied by the codes.
    pub rounded: Option<usize>,
}

/// A grouped dot `[rows, k]` by matrices `[n, k]` or, transposed, a dot `[rows, n]` by `[n, k]`. Its left side is the prologue,
/// computed a row at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedForm<At = Operand> {
    /// The dot in the region's graph.
    pub node: NodeId,
    /// Rows of all groups together.
    pub rows: Dim,
    /// Matrices.
    pub groups: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// The first matrix as a right side.
    pub right: Side<At>,
    /// Stride from one matrix to the next.
    pub group: Dim,
    /// Where each group's rows begin, i32 `[groups + 1]`.
    pub offsets: At,
    /// What the matrices are stored as, where `right` are codes.
    pub codes: Option<DotCodes<At>>,
}

/// Sums of outer products by groups of rows: `[groups, m, n]`.
#[derive(Clone, Debug, PartialEq)]
pub struct OuterForm<At = Operand> {
    /// The product in the region's graph.
    pub node: NodeId,
    /// Both sides as those of a dot that sums over rows.
    pub sides: [Side<At>; 2],
    /// Groups.
    pub groups: usize,
    /// Rows and columns of a group's matrix.
    pub size: [usize; 2],
    /// Where each group's rows begin, i32 `[groups + 1]`.
    pub offsets: At,
}

/// What adapters add to the results of joined linear layers, as `LowRank` says. The rows `[tokens, k]` are the prologue.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRankForm {
    /// The operator in the region's graph.
    pub node: NodeId,
    /// Tokens, and those of them that have an adapter.
    pub rows: [Dim; 2],
    /// Slots, the length of a row, the rank and the columns of all results.
    pub sizes: [usize; 4],
    /// Factors A and B of all slots.
    pub factors: [Whole; 2],
    /// Columns of each layer's result.
    pub columns: Vec<usize>,
    /// The slot of each token, tokens by slot, where those of each slot begin.
    pub lists: [Operand; 3],
}

/// A value `[tokens, heads, d]` as strides over a buffer; the elements of a head lie one after another.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// The buffer.
    pub at: Operand,
    /// Type of its elements.
    pub dtype: DType,
    /// Position of the first element.
    pub offset: Dim,
    /// Stride from one token to the next.
    pub row: Dim,
    /// Stride from one head to the next.
    pub head: Dim,
}

/// A buffer that is read whole, with the type of its elements.
pub type Whole = (Operand, DType);

/// Which result of the operator a buffer written gets, in the order of the region's outputs, with its type.
pub type Results = Vec<(u32, DType)>;

/// Attention of ragged sequences, dense or over pages.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionForm {
    /// The operator's attributes.
    pub op: Attention,
    /// Queries, keys, values; where codes are stored in the place of keys and values, the codes.
    pub qkv: [Heads; 3],
    /// What the codes stand for, where they are stored, and the scales of keys and of values, f32, one for each head of a row.
    pub codes: Option<(Code, [Heads; 2])>,
    /// Query heads, key heads, elements of a query's and of a value's head.
    pub sizes: [usize; 4],
    /// Query tokens.
    pub tokens: Dim,
    /// Sequences.
    pub sequences: Dim,
    /// Where each sequence's tokens begin, i32 `[sequences + 1]`.
    pub starts: Operand,
    /// Tables of pages `[sequences, width]` with that width, and lengths `[sequences]`, where keys lie in pages.
    pub pages: Option<(Operand, usize, Operand)>,
    /// A logit for each head without a value.
    pub sinks: Option<Whole>,
    /// Results: 0 the output, 1 the log-sum-exp.
    pub results: Results,
}

/// Gradient of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGradForm {
    /// The forward operator's attributes.
    pub op: Attention,
    /// Queries, keys, values, output, output's cotangent.
    pub heads: [Heads; 5],
    /// Query heads, key heads, elements of a query's and of a value's head.
    pub sizes: [usize; 4],
    /// Query tokens.
    pub tokens: Dim,
    /// Sequences.
    pub sequences: Dim,
    /// Log-sum-exp of the forward run, f32 `[tokens, heads]`.
    pub lse: Operand,
    /// Where each sequence's tokens begin.
    pub starts: Operand,
    /// A logit for each head without a value.
    pub sinks: Option<Whole>,
    /// Results: cotangents of queries, keys, values, sinks.
    pub results: Results,
}

/// Cross-entropy of a linear layer, or its gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct LossForm {
    /// The forward operator's attributes.
    pub op: LinearCrossEntropy,
    /// True for the gradient.
    pub gradient: bool,
    /// Tokens, and the most of them that there may be.
    pub tokens: (Dim, usize),
    /// Rows of the weight, and columns.
    pub size: [usize; 2],
    /// Type of the hidden states as the graph has them.
    pub dtype: DType,
    /// Hidden states `[tokens, width]`.
    pub hidden: Whole,
    /// Weight `[vocabulary, width]`.
    pub weight: Whole,
    /// Target ids, i32 `[tokens]`.
    pub targets: Operand,
    /// Cotangents of the losses and of the first statistics, f32 `[tokens]` each; the gradient's.
    pub cotangents: Vec<Operand>,
    /// Results; of the gradient: 0 by the hidden states, 1 by the weight; from 2 on the losses and statistics.
    pub results: Results,
}

/// The choice of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteForm {
    /// The operator's attributes.
    pub op: Route,
    /// Tokens.
    pub tokens: Dim,
    /// Experts.
    pub experts: usize,
    /// Logits, f32 `[tokens, experts]`.
    pub logits: Operand,
    /// What is added to scores for choosing alone, f32 `[experts]`.
    pub correction: Option<Operand>,
    /// Results: choice, weights, slots, places, offsets.
    pub results: Results,
}

/// Tokens drawn from rows of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleForm {
    /// Rows.
    pub rows: Dim,
    /// Logits of a row.
    pub vocabulary: usize,
    /// Logits, f32 `[rows, vocabulary]`.
    pub logits: Operand,
    /// How each row is drawn, f32 and i32.
    pub drawings: [Operand; 2],
}

/// Loops over the result, and how they stand.
#[derive(Clone, Debug, PartialEq)]
pub enum LoopsForm {
    /// Rows of the result one after another; reductions inside are loops of their own.
    Rows,
    /// Columns of the result are kept while rows of this reduction's argument are walked.
    Columns(NodeId, Reduce),
    /// Rows of an f32 matrix to which others are added at integer indices.
    ScatterAdd(NodeId),
    /// Rows of a state that are stored at integer indices.
    StoreRows(NodeId),
}

/// The archetype that computes a region, with all that its emission reads beside the graph of the region.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Loops.
    Loops(LoopsForm),
    /// The dot core.
    Dot(DotForm),
    /// The dot core on rows in groups, each with a matrix of its own.
    Grouped(GroupedForm),
    /// The dot core on sums of outer products by groups of rows.
    Outer(OuterForm),
    /// What adapters add to linear layers, each row by the factors of its own.
    LowRank(LowRankForm),
    /// The attention core.
    Attention(AttentionForm),
    /// The core of attention's gradient.
    AttentionGrad(AttentionGradForm),
    /// Cross-entropy of a linear layer, or its gradient, some tokens' logits at a time.
    Loss(LossForm),
    /// The choice of experts.
    Route(RouteForm),
    /// Tokens drawn from rows of logits.
    Sample(SampleForm),
    /// No kernel: ranks exchange values.
    Collective,
    /// No kernel: the reference interpreter runs it.
    Interpreted,
}

impl Form {
    /// Types of both sides of the products; none of what has no products. What codes are multiplied by is of their type where it is rounded
    /// to integers; what is computed on the way to a product is of the other side's, beside codes of bf16, which these are numbers of.
    pub fn sides(&self) -> Option<[DType; 2]> {
        let of = |left: Option<&Side>, codes: &Option<DotCodes>, right: DType| match codes {
            Some(DotCodes { rounded: None, .. }) => [left.map_or(DType::BF16, |s| s.dtype), right],
            Some(_) => [right; 2],
            None => [left.map_or(right, |s| s.dtype), right],
        };
        match self {
            Form::Dot(d) => Some(of(d.left.as_ref(), &d.codes, d.right.dtype)),
            Form::Grouped(g) => Some(of(None, &g.codes, g.right.dtype)),
            Form::Outer(o) => Some(o.sides.each_ref().map(|s| s.dtype)),
            Form::Attention(a) => Some([a.qkv[0].dtype, a.qkv[1].dtype]),
            Form::AttentionGrad(a) => Some([a.heads[0].dtype, a.heads[1].dtype]),
            Form::Loss(l) => Some([l.hidden.1, l.weight.1]),
            _ => None,
        }
    }

    /// Name of the archetype in dumps and profiles.
    pub fn name(&self) -> &'static str {
        match self {
            Form::Loops(_) => "loops",
            Form::Dot(_) => "dot",
            Form::Grouped(_) => "grouped",
            Form::Outer(_) => "outer",
            Form::LowRank(_) => "low_rank",
            Form::Attention(_) => "attention",
            Form::AttentionGrad(_) => "attention_grad",
            Form::Loss(_) => "loss",
            Form::Route(_) => "route",
            Form::Sample(_) => "sample",
            Form::Collective => "collective",
            Form::Interpreted => "interpreted",
        }
    }

    /// True when a kernel computes it.
    pub fn has_kernel(&self) -> bool {
        !matches!(self, Form::Collective | Form::Interpreted)
    }
}

/// A buffer that a region reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Its leaf in the region's graph.
    pub leaf: NodeId,
    /// Its layout.
    pub layout: Layout,
}

/// A region before it is matched: a graph whose leaves are the buffers read and whose outputs are the buffers written.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The computation.
    pub graph: Graph,
    /// The buffers read.
    pub reads: Vec<Read>,
    /// (write, read) that are one buffer: an element is read there before it is written.
    pub in_place: Vec<(usize, Operand)>,
}

impl Piece {
    /// The operand that a leaf is.
    pub fn operand(&self, leaf: NodeId) -> Option<Operand> {
        self.reads.iter().position(|r| r.leaf == leaf).map(Operand)
    }

    /// Layout of an operand.
    pub fn layout(&self, at: Operand) -> Layout {
        self.reads.get(at.0).map_or(Layout::Rows, |r| r.layout)
    }

    /// Types of the buffers read, in order.
    pub fn read_types(&self) -> Vec<Type> {
        self.reads.iter().map(|r| self.graph.ty(r.leaf).clone()).collect()
    }

    /// Types of the buffers written, in order.
    pub fn write_types(&self) -> Vec<Type> {
        self.graph.outputs().iter().map(|(_, id)| self.graph.ty(*id).clone()).collect()
    }

    /// Text that two pieces of one plan share exactly when one kernel serves both.
    pub fn key(&self) -> String {
        use std::fmt::Write;
        let mut key = format!("{:?} {:?}\n", self.reads, self.in_place);
        for n in self.graph.nodes() {
            let _ = writeln!(key, "{:?} {:?}", n.op, n.args);
        }
        let _ = write!(key, "{:?} {:?}", self.graph.symbols, self.graph.outputs());
        key
    }
}

/// What an archetype found in a piece.
#[derive(Clone, Debug, PartialEq)]
pub struct Matched {
    /// The archetype's form.
    pub form: Form,
    /// Bounds that integer data must keep.
    pub guards: Vec<Guard>,
    /// Bytes read and written in a run, each once.
    pub bytes: Dim,
    /// Floating-point operations of a run.
    pub flops: Dim,
}

/// What one kernel computes.
#[derive(Clone, Debug)]
pub struct Region {
    /// The computation and its buffers.
    pub piece: Piece,
    /// What the archetype found in it.
    pub matched: Matched,
    /// Origins of the nodes, for the reader.
    pub origin: String,
}

impl Region {
    /// The archetype's form.
    pub fn form(&self) -> &Form {
        &self.matched.form
    }

    /// The computation.
    pub fn graph(&self) -> &Graph {
        &self.piece.graph
    }

    /// Type of the numbers that its kernel multiplies: bf16 where no side is wider, unless vectors do.
    pub fn product(&self, kernel: Option<&Kernel>) -> DType {
        let narrow = self.form().sides().is_some_and(|sides| sides.iter().all(|d| d.bytes() <= 2));
        let vectors = kernel.is_some_and(|k| k.products == Products::Vectors);
        if narrow && !vectors { DType::BF16 } else { DType::F32 }
    }

    /// Bytes read and written in a run.
    pub fn bytes(&self) -> &Dim {
        &self.matched.bytes
    }

    /// Floating-point operations of a run.
    pub fn flops(&self) -> &Dim {
        &self.matched.flops
    }
}
