//! What the passes hand to code generation and to the runtime: regions (what one kernel computes) and plans (which
//! kernels run in which order on which buffers). Plain data, so that its makers and readers stay strangers.

use crate::graph::{Graph, IrError, NodeId};
use crate::ops::{Op, Weight};
use crate::{Dim, GroupedForm, Symbol, Type};
use std::collections::HashMap;
use std::sync::Arc;

/// Which archetype computes a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Anchor {
    /// Loops over the result; reductions inside are loops too.
    Loops,
    /// The dot core on a packed weight, with a row prologue and a pointwise epilogue.
    Dot,
    /// The attention core.
    Attention,
    /// The core of attention's gradient.
    AttentionGrad,
    /// Cross-entropy of a linear layer, or its gradient, a few tokens' logits at a time.
    CrossEntropy,
    /// The dot core on rows in groups, each with a matrix of its own.
    Grouped,
    /// The dot core on sums of outer products by groups of rows.
    GroupedOuter,
    /// The choice of experts.
    Route,
    /// No kernel: ranks meet.
    Collective,
    /// No kernel: the interpreter runs it.
    Eval,
}

/// How a buffer's elements lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Layout {
    /// Row-major.
    Rows,
    /// A matrix `[n, k]` as `[n/32][k][32]`, padded with zeros to a multiple of 32 rows; matrices `[groups, k, n]` so one
    /// after another, each transposed.
    Panels,
}

/// What one kernel computes: a graph whose leaves `r0`, `r1`, … are buffers read and whose outputs `w0`, `w1`, … are
/// buffers written.
#[derive(Clone, Debug)]
pub struct Region {
    /// The archetype.
    pub anchor: Anchor,
    /// The computation.
    pub graph: Graph,
    /// Layout of each buffer read.
    pub layouts: Vec<Layout>,
    /// (write, read) that are one buffer: an element is read there before it is written.
    pub in_place: Vec<(usize, usize)>,
    /// Origins of the nodes, for the reader.
    pub origin: String,
}

impl Region {
    /// Types of the buffers read, in order.
    pub fn reads(&self) -> Vec<Type> {
        let mut reads = vec![None; self.layouts.len()];
        for n in self.graph.nodes() {
            if let Op::Input(i) = &n.op
                && let Some(at) = i.name.strip_prefix('r').and_then(|s| s.parse::<usize>().ok())
                && at < reads.len()
            {
                reads[at] = Some(i.ty.clone());
            }
        }
        reads.into_iter().map(|t| t.unwrap_or(Type::scalar(crate::DType::F32))).collect()
    }

    /// Types of the buffers written, in order.
    pub fn writes(&self) -> Vec<Type> {
        self.graph.outputs().iter().map(|(_, id)| self.graph.ty(*id).clone()).collect()
    }

    /// The region where symbols are never more than in a run of these sizes: what its [`bytes`](Self::bytes) are may hang on it.
    pub fn within(&self, size: &dyn Fn(&str) -> Option<u64>) -> Region {
        let mut region = self.clone();
        for s in &mut region.graph.symbols {
            s.max = size(&s.name).unwrap_or(s.max);
        }
        region
    }

    /// Bytes read and written once each; of a gathered table only the rows that are picked, of a state only the rows that are
    /// stored, of pages only what the sequences may hold, of grouped matrices no more than there are rows.
    pub fn bytes(&self) -> Dim {
        let mut sum = Dim::from(0);
        let g = &self.graph;
        let users = g.users();
        let mut paged = self.paged();
        paged.extend(self.grouped());
        for (id, n) in g.ids().zip(g.nodes()) {
            let Op::Input(_) = n.op else { continue };
            let mut picked = Vec::new();
            for &u in &users[id.index()] {
                match (&g.node(u).op, g.node(u).args.as_slice()) {
                    (Op::Gather(_), [x, ..]) if *x == id => picked.push(g.ty(u).bytes()),
                    (Op::Store(_), [state, _, _]) if *state == id => {}
                    _ => picked.push(paged.get(&id).cloned().unwrap_or_else(|| n.ty().bytes())),
                }
            }
            sum = &sum + &picked.into_iter().max().unwrap_or_default();
        }
        let written = |id: NodeId| match (&g.node(id).op, g.node(id).args.as_slice()) {
            (Op::Store(_), [_, _, value]) => g.ty(*value).bytes(),
            _ => g.ty(id).bytes(),
        };
        g.outputs().iter().fold(sum, |s, (_, id)| &s + &written(*id))
    }

    /// The buffers that hold more grouped matrices than there can be rows, with the bytes of one for each row.
    fn grouped(&self) -> HashMap<NodeId, Dim> {
        let g = &self.graph;
        let touched = |id: NodeId| {
            let form = GroupedForm::of(g, id)?;
            let most = bound(&g.symbols, &form.rows).ok()?;
            let matrix = Dim::from(form.n * form.k * form.right.dtype.bytes());
            (most < form.groups as u64).then(|| (form.right.base, &form.rows * &matrix))
        };
        g.ids().filter_map(touched).collect()
    }

    /// The buffers that hold pages, with the bytes of the keys or values that the sequences may have there.
    fn paged(&self) -> HashMap<NodeId, Dim> {
        let g = &self.graph;
        let mut found = HashMap::new();
        for n in g.nodes() {
            let Op::Attention(a) = &n.op else { continue };
            for &arg in n.args[1..3].iter().filter(|_| a.page.is_some()) {
                let mut at = arg;
                while g.node(at).op.is_view() || matches!(g.node(at).op, Op::Cast(_)) {
                    at = g.node(at).args[0];
                }
                let rows = &g.ty(n.args[5]).shape[0] * &a.span;
                let width = Dim::product(&g.ty(arg).shape[1..]);
                let width = &width * &Dim::from(g.ty(at).dtype.bytes());
                found.insert(at, &rows * &width);
            }
        }
        found
    }

    /// Floating-point operations.
    pub fn flops(&self) -> Dim {
        let g = &self.graph;
        g.nodes().iter().fold(Dim::from(0), |sum, n| {
            let args: Vec<&Type> = n.args.iter().map(|a| g.ty(*a)).collect();
            &sum + &n.op.flops(&args, &n.types)
        })
    }

    /// Text that two regions share exactly when one kernel serves both.
    pub fn key(&self) -> String {
        use std::fmt::Write;
        let mut key = format!("{:?} {:?} {:?}\n", self.anchor, self.layouts, self.in_place);
        for n in self.graph.nodes() {
            let _ = writeln!(key, "{:?} {:?}", n.op, n.args);
        }
        for s in &self.graph.symbols {
            let _ = write!(key, "{} ", s.name);
        }
        let _ = write!(key, "{:?}", self.graph.outputs());
        key
    }
}

/// Where a buffer's memory comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a block: parameter of the call. In the main body: input of the program.
    Param(usize),
    /// In a block: result of the call. In the main body: output of the program.
    Result(usize),
    /// Weight of the plan.
    Weight(usize),
    /// Literal numbers.
    Const(Vec<u8>),
    /// Bytes of the arena (of the main body, or of the scratch that calls share), from this offset.
    Arena(u64),
}

/// A value in memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Its type.
    pub ty: Type,
    /// Its memory.
    pub place: Place,
    /// Where it was made.
    pub origin: Arc<str>,
}

/// Index into a body's buffers.
pub type BufferId = usize;

/// One thing to do.
#[derive(Clone, Debug)]
pub enum Step {
    /// Run a kernel.
    Run {
        /// Index into the plan's regions.
        region: usize,
        /// Buffers read, as the region numbers them.
        reads: Vec<BufferId>,
        /// Buffers written.
        writes: Vec<BufferId>,
        /// Nodes of the planned graph that are computed here, for the reader.
        nodes: Vec<NodeId>,
        /// Where the computation was made.
        origin: Arc<str>,
    },
    /// Run a block.
    Call {
        /// Index into the plan's bodies.
        body: usize,
        /// Buffers bound to its parameters.
        args: Vec<BufferId>,
        /// Buffers bound to its results.
        results: Vec<BufferId>,
        /// Where the call was made.
        origin: Arc<str>,
    },
}

/// An ordered list of steps and the buffers they use: a block's, or the program's own.
#[derive(Clone, Debug, Default)]
pub struct Body {
    /// Name of the kind; empty for the program's own.
    pub name: String,
    /// Names and layouts of the parameters (of a block) or inputs (of the program).
    pub params: Vec<(String, Layout)>,
    /// Names of the results.
    pub results: Vec<String>,
    /// Values in memory.
    pub buffers: Vec<Buffer>,
    /// What to do, in order.
    pub steps: Vec<Step>,
    /// Bytes of arena that its own buffers need at the symbols' upper bounds.
    pub arena: u64,
}

/// A weight in the layout in which kernels read it.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedWeight {
    /// The buffer and the checkpoint tensors in it.
    pub weight: Weight,
    /// Its layout.
    pub layout: Layout,
}

/// A program before its kernels are written.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Symbols, in the order in which kernels take their values.
    pub symbols: Vec<Symbol>,
    /// Distinct regions.
    pub regions: Vec<Arc<Region>>,
    /// Bodies of the blocks.
    pub bodies: Vec<Body>,
    /// The program's own body.
    pub main: Body,
    /// Weights, each in each layout it is read in.
    pub weights: Vec<PlannedWeight>,
    /// Bytes of scratch that calls share, at the symbols' upper bounds.
    pub scratch: u64,
}

impl Plan {
    /// Value of a size at the symbols' upper bounds.
    pub fn bound(&self, d: &Dim) -> Result<u64, IrError> {
        bound(&self.symbols, d)
    }

    /// Number of kernel launches of one run.
    pub fn launches(&self) -> usize {
        self.main
            .steps
            .iter()
            .map(|s| match s {
                Step::Run { .. } => 1,
                Step::Call { body, .. } => self.bodies[*body].steps.len(),
            })
            .sum()
    }

    /// Every kernel launch of one run in order: (origin prefix of the call, region).
    pub fn each_launch(&self) -> Vec<(Arc<str>, usize)> {
        let mut out = Vec::new();
        let mut add = |prefix: &str, steps: &[Step]| {
            for s in steps {
                if let Step::Run { region, origin, .. } = s {
                    let at =
                        if prefix.is_empty() { origin.to_string() } else { format!("{prefix}.{origin}") };
                    out.push((at.into(), *region));
                }
            }
        };
        for s in &self.main.steps {
            match s {
                Step::Call { body, origin, .. } => add(origin, &self.bodies[*body].steps),
                step => add("", std::slice::from_ref(step)),
            }
        }
        out
    }
}

/// Value of a size at the upper bounds of the symbols.
pub fn bound(symbols: &[Symbol], d: &Dim) -> Result<u64, IrError> {
    d.eval(&|s| symbols.iter().find(|x| &*x.name == s).map(|x| x.max))
        .map_err(|message| IrError { origin: String::new(), message })
}
