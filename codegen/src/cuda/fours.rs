//! Loops whose threads take four neighbours at once. In: a loop's variable and statements. Out: the same statements of one lane of four, what
//! is read and written four at a time, and the text around them. Instructions for memory are a quarter then, and of narrow elements a warp still
//! fills its sectors.

use crate::kernel_ir::expr::{Expr, Stmt};
use crate::kernel_ir::index::{Atom, Index, Var};
use crate::kernel_ir::print::{Printer, element, index};
use astrai_ir::{DType, Dim, Region};

/// Elements of an access.
pub(super) const FOUR: usize = 4;

/// Four neighbours of a buffer: which, where the first lies, their type.
type Access = (usize, Index, DType);

/// A loop by fours.
pub(super) struct Fours {
    var: Var,
    /// Numbers of the buffers of registers, those read and those written: behind the region's own.
    first: [usize; 2],
    reads: Vec<Access>,
    writes: Vec<Access>,
    /// Statements of a lane.
    body: Vec<Stmt>,
}

/// The loop by fours; none where results or the loop's length do not allow it. What is read at other places stays a lane's own access.
pub(super) fn fours(region: &Region, var: &Var, body: &[Stmt]) -> Option<Fours> {
    var.extent.div_exact(&Dim::from(FOUR))?;
    let first = [region.piece.reads.len(), region.piece.write_types().len()];
    let mut f = Fours { var: var.clone(), first, reads: vec![], writes: vec![], body: vec![] };
    for s in body {
        let s = match s {
            Stmt::Let { name, dtype, value } => {
                Stmt::Let { name: name.clone(), dtype: *dtype, value: f.lane_of(value) }
            }
            Stmt::Store { buf, at, dtype, value } if f.neighbours(at) => {
                let value = f.lane_of(value);
                f.writes.push((*buf, at.clone(), *dtype));
                Stmt::Store { buf: f.first[1] + f.writes.len() - 1, at: f.lane(), dtype: *dtype, value }
            }
            Stmt::Store { .. } | Stmt::Loop { .. } | Stmt::Reduce { .. } => return None,
        };
        f.body.push(s);
    }
    (!f.writes.is_empty()).then_some(f)
}

impl Fours {
    fn lane(&self) -> Index {
        Index::atom(Atom::Local("lane".into(), self.var.depth, Dim::from(FOUR)))
    }

    /// True where the variable counts neighbours in memory, and fours of them begin at multiples of four.
    fn neighbours(&self, at: &Index) -> bool {
        let four = Dim::from(FOUR);
        let counts = |a: &Atom| matches!(a, Atom::Var(v) if *v == self.var);
        let whole = |(c, a): &(Dim, Atom)| counts(a) || c.div_exact(&four).is_some();
        let runs = at.coefficient(&self.var).is_some_and(|c| c.is_one());
        runs && at.terms.iter().all(whole) && at.offset.div_exact(&four).is_some()
    }

    /// The expression of a lane.
    fn lane_of(&mut self, e: &Expr) -> Expr {
        if let Expr::Load { buf, at, dtype } = e
            && self.neighbours(at)
        {
            let access = (*buf, at.clone(), *dtype);
            let known = self.reads.iter().position(|a| *a == access);
            let k = known.unwrap_or_else(|| {
                self.reads.push(access);
                self.reads.len() - 1
            });
            return Expr::Load { buf: self.first[0] + k, at: self.lane(), dtype: *dtype };
        }
        let mut of = |x: &Expr| Box::new(self.lane_of(x));
        match e {
            Expr::Unary(kind, dtype, x) => Expr::Unary(*kind, *dtype, of(x)),
            Expr::Act(act, x) => Expr::Act(*act, of(x)),
            Expr::Binary(kind, dtype, a, b) => Expr::Binary(*kind, *dtype, of(a), of(b)),
            Expr::Compare(kind, a, b) => Expr::Compare(*kind, of(a), of(b)),
            Expr::Select(c, a, b) => Expr::Select(of(c), of(a), of(b)),
            Expr::Cast(from, to, x) => Expr::Cast(*from, *to, of(x)),
            Expr::Real(_) | Expr::Int(_) | Expr::Local(..) | Expr::Load { .. } | Expr::Uniform { .. } => {
                e.clone()
            }
        }
    }

    /// The four iterations from the local `four` on.
    pub fn print(&self, p: &mut Printer) {
        let (v, [read, written]) = (&self.var.name, self.first);
        p.braces("", |p| {
            p.line(&format!("const index_t {v} = four; (void){v};"));
            for (k, (buf, at, dtype)) in self.reads.iter().enumerate() {
                let (ty, k, at) = (element(*dtype), read + k, index(at));
                p.line(&format!("const four_of<{ty}> from{k} = *(const four_of<{ty}> *)(r{buf} + {at});"));
                p.line(&format!("const auto &r{k} = from{k}.x;"));
            }
            for (k, (_, _, dtype)) in self.writes.iter().enumerate() {
                let (ty, k) = (element(*dtype), written + k);
                p.line(&format!("four_of<{ty}> to{k};"));
                p.line(&format!("auto &w{k} = to{k}.x;"));
            }
            p.line("#pragma unroll");
            p.braces(&format!("for (int lane = 0; lane < {FOUR}; lane++)"), |p| {
                p.line(&format!("const index_t {v} = four + lane; (void){v};"));
                p.statements(&self.body);
            });
            for (k, (buf, at, dtype)) in self.writes.iter().enumerate() {
                let (ty, k, at) = (element(*dtype), written + k, index(at));
                p.line(&format!("*(four_of<{ty}> *)(w{buf} + {at}) = to{k};"));
            }
        });
    }
}
