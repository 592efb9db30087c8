//! Kernels that walk rows and keep columns: sums over leading axes (gradients of weights that were repeated over tokens),
//! and rows added at integer indices (gradients of embeddings). In: a region. Out: host C whose units are pieces of
//! columns, each with its own accumulators and the rows in order, so that any split over threads gives the same bits.

use super::{Emitted, PHASE, over_dims, prologue};
use crate::kernel_ir::expr::{Expr, Stmt};
use crate::kernel_ir::index::{Atom, Index, Var};
use crate::kernel_ir::loops::{row_of, summed_at};
use crate::kernel_ir::lower::Lower;
use crate::kernel_ir::print::{Dialect, Printer, dim, expr, identity, index, step};
use astrai_ir::ops::Reduce;
use astrai_ir::{DType, Dim, NodeId, Region};

/// Columns in a piece.
const WIDTH: usize = 64;

/// Sums over leading axes, or maxima.
pub(super) fn reduce_kernel(region: &Region, name: &str, id: NodeId, r: &Reduce) -> Result<Emitted, String> {
    let g = region.graph();
    let (root, arg) = (g.outputs()[0].1, g.node(id).args[0]);
    let shape = g.ty(root).shape.clone();
    let (width, lead) = shape.split_last().ok_or("a column sum without columns")?;
    let mut lower = Lower::new(region);
    let (row, leading, lead_at) = row_of(lead);
    let first = Var { name: "c0".into(), extent: width.clone(), depth: 1 };
    lower.open();
    let walked: Vec<Var> = r.axes.iter().map(|&a| lower.var(g.ty(arg).shape[a].clone())).collect();
    lower.open();
    let column = lower.var(Dim::from(WIDTH));
    lower.open();
    let here = Index::var(&first).add(&Index::var(&column));
    let kept = [lead_at.as_slice(), &[here]].concat();
    let value = lower.value(arg, &summed_at(r, g.ty(arg).rank(), &walked, kept))?;
    let (inner, of_row) = (lower.close(), lower.close());
    let out = lower.var(Dim::from(WIDTH));
    lower.open();
    lower.give(id, Expr::Load { buf: region.piece.reads.len(), at: Index::var(&out), dtype: DType::F32 });
    let at = [lead_at, vec![Index::var(&first).add(&Index::var(&out))]].concat();
    let result = lower.value(root, &at)?;
    let ty = g.ty(root);
    lower.push(Stmt::Store { buf: 0, at: Index::linear(&at, &ty.shape), dtype: ty.dtype, value: result });
    let (after, before_rows, before) = (lower.close(), lower.close(), lower.close());

    let mut p = Printer::new(Dialect::C, 0);
    let pieces = format!("(({} + {}) / {WIDTH})", over_dims(region, width), WIDTH - 1);
    let units = &row.extent * &width.ceil_div(&Dim::from(WIDTH));
    p.braces(&format!("void {name}_phase0{PHASE}"), |p| {
        prologue(p, region);
        p.statements(&before);
        p.braces("for (int64_t unit = begin; unit < end; unit++)", |p| {
            piece(p, &pieces, &dim(width));
            for (v, divisor, size) in leading.iter().filter(|(v, ..)| *v != row) {
                p.line(&format!("const int64_t {} = row / {} % {};", v.name, dim(divisor), dim(size)));
            }
            p.statements(&before_rows);
            p.line(&format!("float r{}[{WIDTH}];", region.piece.reads.len()));
            let acc = format!("r{}[{}]", region.piece.reads.len(), column.name);
            let c = &column.name;
            p.line(&format!(
                "for (int64_t {c} = 0; {c} < width; {c}++) {acc} = {};",
                identity(r.kind, DType::F32)
            ));
            p.around(&walked, |p| {
                p.statements(&of_row);
                p.line("#pragma GCC ivdep");
                p.braces(&format!("for (int64_t {c} = 0; {c} < width; {c}++)"), |p| {
                    p.statements(&inner);
                    p.line(&format!("{acc} = {};", step(r.kind, DType::F32, &acc, &expr(&value))));
                });
            });
            p.braces(&format!("for (int64_t {0} = 0; {0} < width; {0}++)", out.name), |p| {
                p.statements(&after)
            });
        });
    });
    Ok(Emitted::one(p.finish(), units))
}

/// The row of leading axes and the piece of columns of a unit.
fn piece(p: &mut Printer, pieces: &str, width: &str) {
    p.line(&format!("const int64_t row = unit / {pieces}; (void)row;"));
    p.line(&format!("const int64_t c0 = unit % {pieces} * {WIDTH};"));
    p.line(&format!("const int64_t width = i_min({WIDTH}, {width} - c0);"));
}

/// out = x, then out[indices[t]] += updates[t] for t in order; indices outside the matrix are passed over.
pub(super) fn scatter_kernel(region: &Region, name: &str, root: NodeId) -> Result<Emitted, String> {
    let g = region.graph();
    let node = g.node(root);
    let (x, indices, updates) = (node.args[0], node.args[1], node.args[2]);
    let ty = node.ty();
    let (rows, width, count) = (ty.shape[0].clone(), ty.shape[1].clone(), g.ty(indices).shape[0].clone());
    let first = Var { name: "c0".into(), extent: width.clone(), depth: 1 };
    let mut lower = Lower::new(region);
    lower.open();
    let fill = |lower: &mut Lower, id: NodeId, n: &Dim, to: Option<Index>| -> Result<_, String> {
        let row = lower.var(n.clone());
        lower.open();
        let target = to.unwrap_or_else(|| Index::var(&row));
        let column = lower.var(Dim::from(WIDTH));
        lower.open();
        let c = Index::var(&first).add(&Index::var(&column));
        let value = lower.value(id, &[Index::var(&row), c.clone()])?;
        let at = Index::linear(&[target, c], &ty.shape);
        let inner = lower.close();
        let of_row = lower.close();
        Ok((row, column, value, at, inner, of_row))
    };
    let start = fill(&mut lower, x, &rows, None)?;
    let hit = Index::atom(Atom::Local("hit".into(), 2, rows.clone()));
    let add = fill(&mut lower, updates, &count, Some(hit))?;
    lower.open();
    let t = Var { name: add.0.name.clone(), extent: count.clone(), depth: 2 };
    let raw = lower.value(indices, &[Index::var(&t)])?;
    let of_index = lower.close();
    let (around, before) = (lower.close(), lower.close());

    let mut p = Printer::new(Dialect::C, 0);
    let pieces = format!("(({} + {}) / {WIDTH})", over_dims(region, &width), WIDTH - 1);
    p.braces(&format!("void {name}_phase0{PHASE}"), |p| {
        prologue(p, region);
        p.statements(&before);
        p.braces("for (int64_t unit = begin; unit < end; unit++)", |p| {
            piece(p, &pieces, &dim(&width));
            p.statements(&around);
            // In place, what is added to lies there already.
            if region.piece.in_place.is_empty() {
                let (row, column, value, at, inner, of_row) = &start;
                p.around(std::slice::from_ref(row), |p| {
                    p.statements(of_row);
                    p.braces(&format!("for (int64_t {0} = 0; {0} < width; {0}++)", column.name), |p| {
                        p.statements(inner);
                        p.line(&format!("w0[{}] = {};", index(at), expr(value)));
                    });
                });
            }
            let (row, column, value, at, inner, of_row) = &add;
            p.around(std::slice::from_ref(row), |p| {
                p.statements(&of_index);
                p.line(&format!("const int64_t hit = {};", expr(&raw)));
                p.line(&format!("if (hit < 0 || hit >= {}) continue;", dim(&rows)));
                p.statements(of_row);
                p.line("#pragma GCC ivdep");
                p.braces(&format!("for (int64_t {0} = 0; {0} < width; {0}++)", column.name), |p| {
                    p.statements(inner);
                    p.line(&format!("w0[{0}] += {1};", index(at), expr(value)));
                });
            });
        });
    });
    Ok(Emitted::one(p.finish(), width.ceil_div(&Dim::from(WIDTH))))
}
