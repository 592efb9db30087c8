//! Kernels that walk rows and keep columns: sums over leading axes (gradients of weights that were repeated over tokens),
//! and rows added at integer indices (gradients of embeddings). In: a region. Out: host C whose units are pieces of
//! columns, each with its own accumulators and the rows in order, so that any split over threads gives the same bits.

use crate::host::{PHASE, over_dims, prologue};
use crate::index::{Atom, Index, Var};
use crate::kernel::{Expr, Stmt};
use crate::loops::leading;
use crate::lower::Lower;
use crate::print::{Dialect, Printer, dim, expr, identity, index, step};
use astrai_ir::ops::{Op, Reduce, ReduceKind, Scatter, ScatterKind};
use astrai_ir::{DType, Dim, NodeId, Region};

/// Columns in a piece.
const WIDTH: usize = 64;

/// The reduction of a region that is better walked by rows: it keeps the last axis, and what follows it is pointwise.
fn column_reduce(region: &Region) -> Option<(NodeId, Reduce)> {
    let g = &region.graph;
    let [(_, root)] = g.outputs() else { return None };
    let mut at = *root;
    loop {
        let node = g.node(at);
        match &node.op {
            Op::Reduce(r) => {
                let rank = g.ty(node.args[0]).rank();
                let wide = node.ty().shape.last()?.size().is_none_or(|n| n >= 8);
                let sums = matches!(r.kind, ReduceKind::Sum | ReduceKind::Max | ReduceKind::Min);
                let keeps = !r.axes.contains(&(rank - 1)) && node.ty().dtype.is_float();
                return (wide && sums && keeps).then(|| (at, r.clone()));
            }
            op if op.is_pointwise() => {
                at = *node
                    .args
                    .iter()
                    .find(|a| g.ty(**a).shape == node.ty().shape && has_reduce(region, **a))?;
            }
            _ => return None,
        }
    }
}

fn has_reduce(region: &Region, id: NodeId) -> bool {
    let node = region.graph.node(id);
    matches!(node.op, Op::Reduce(_))
        || node.op.is_pointwise() && node.args.iter().any(|a| has_reduce(region, *a))
}

/// The kernel of a region that this form suits.
pub(crate) fn columns_kernel(region: &Region, name: &str) -> Option<Result<String, String>> {
    if let Some(root) = region.graph.outputs().first().map(|o| o.1)
        && let Op::Scatter(s) = &region.graph.node(root).op
    {
        return Some(scatter_kernel(region, name, root, s));
    }
    let (id, r) = column_reduce(region)?;
    Some(reduce_kernel(region, name, id, &r))
}

fn reduce_kernel(region: &Region, name: &str, id: NodeId, r: &Reduce) -> Result<String, String> {
    let g = &region.graph;
    let (root, arg) = (g.outputs()[0].1, g.node(id).args[0]);
    let shape = g.ty(root).shape.clone();
    let (width, lead) = shape.split_last().ok_or("a column sum without columns")?;
    let mut lower = Lower::new(region);
    let row = Var { name: "row".into(), extent: Dim::product(lead), depth: 1 };
    let first = Var { name: "c0".into(), extent: width.clone(), depth: 1 };
    let leading = leading(lead, &row);
    lower.open();
    let walked: Vec<Var> = r.axes.iter().map(|&a| lower.var(g.ty(arg).shape[a].clone())).collect();
    lower.open();
    let column = lower.var(Dim::from(WIDTH));
    lower.open();
    let here = Index::var(&first).add(&Index::var(&column));
    let mut kept = leading.iter().map(|(v, ..)| Index::var(v)).chain([here.clone()]);
    let at: Vec<Index> = (0..g.ty(arg).rank())
        .map(|a| match r.axes.iter().position(|x| *x == a) {
            Some(i) => Index::var(&walked[i]),
            None => kept.next().unwrap_or_default(),
        })
        .collect();
    let value = lower.value(arg, &at)?;
    let (inner, of_row) = (lower.close(), lower.close());
    let out = lower.var(Dim::from(WIDTH));
    lower.open();
    lower.give(id, Expr::Load { buf: region.layouts.len(), at: Index::var(&out), dtype: DType::F32 });
    let mut at: Vec<Index> = leading.iter().map(|(v, ..)| Index::var(v)).collect();
    at.push(Index::var(&first).add(&Index::var(&out)));
    let result = lower.value(root, &at)?;
    let ty = g.ty(root);
    lower.push(Stmt::Store { buf: 0, at: Index::linear(&at, &ty.shape), dtype: ty.dtype, value: result });
    let (after, before_rows, before) = (lower.close(), lower.close(), lower.close());

    let mut p = Printer::new(Dialect::Host, 0);
    let pieces = format!("(({} + {}) / {WIDTH})", over_dims(region, width), WIDTH - 1);
    let units = format!("{} * {pieces}", over_dims(region, &row.extent));
    p.line(&format!("int64_t {name}_units0(const int64_t *dims) {{ return {units}; }}"));
    p.braces(&format!("void {name}_phase0{PHASE}"), |p| {
        prologue(p, region);
        p.statements(&before);
        p.braces("for (int64_t unit = begin; unit < end; unit++)", |p| {
            piece(p, &pieces, &dim(width));
            for (v, divisor, size) in leading.iter().filter(|(v, ..)| *v != row) {
                p.line(&format!("const int64_t {} = row / {} % {};", v.name, dim(divisor), dim(size)));
            }
            p.statements(&before_rows);
            p.line(&format!("float r{}[{WIDTH}];", region.layouts.len()));
            let acc = format!("r{}[{}]", region.layouts.len(), column.name);
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
    Ok(p.finish())
}

/// The row of leading axes and the piece of columns of a unit.
fn piece(p: &mut Printer, pieces: &str, width: &str) {
    p.line(&format!("const int64_t row = unit / {pieces}; (void)row;"));
    p.line(&format!("const int64_t c0 = unit % {pieces} * {WIDTH};"));
    p.line(&format!("const int64_t width = i_min({WIDTH}, {width} - c0);"));
}

/// out = x, then out[indices[t]] += updates[t] for t in order; indices outside the matrix are passed over.
fn scatter_kernel(region: &Region, name: &str, root: NodeId, s: &Scatter) -> Result<String, String> {
    let g = &region.graph;
    let node = g.node(root);
    let (x, indices, updates) = (node.args[0], node.args[1], node.args[2]);
    let ty = node.ty();
    let plain = s.axis == 0 && s.batch == 0 && s.kind == ScatterKind::Add;
    if !plain || ty.rank() != 2 || g.ty(indices).rank() != 1 || ty.dtype != DType::F32 {
        return Err("a scatter other than rows of an f32 matrix has no kernel".into());
    }
    let (rows, width, count) = (ty.shape[0].clone(), ty.shape[1].clone(), g.ty(indices).shape[0].clone());
    let first = Var { name: "c0".into(), extent: width.clone(), depth: 1 };
    let mut lower = Lower::new(region);
    lower.open();
    let fill = |lower: &mut Lower, id: NodeId, n: &Dim, to: Option<Index>| -> Result<_, String> {
        let row = lower.var(n.clone());
        lower.open();
        let target = match &to {
            None => Index::var(&row),
            Some(i) => i.clone(),
        };
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

    let mut p = Printer::new(Dialect::Host, 0);
    let pieces = format!("(({} + {}) / {WIDTH})", over_dims(region, &width), WIDTH - 1);
    p.line(&format!("int64_t {name}_units0(const int64_t *dims) {{ return {pieces}; }}"));
    p.braces(&format!("void {name}_phase0{PHASE}"), |p| {
        prologue(p, region);
        p.statements(&before);
        p.braces("for (int64_t unit = begin; unit < end; unit++)", |p| {
            piece(p, &pieces, &dim(&width));
            p.statements(&around);
            // In place, what is added to lies there already.
            if region.in_place.is_empty() {
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
    Ok(p.finish())
}
