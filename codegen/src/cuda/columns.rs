//! Kernels over the rows of a matrix. In: sums over leading axes, rows added at integer indices, rows stored into a state. Out: phases
//! in which every sum has one order and every element one block: no two blocks write one place, whatever the indices.

use super::program::Program;
use super::rows::{REGISTERS, digits};
use crate::kernel_ir::expr::{Expr, Stmt};
use crate::kernel_ir::index::{Atom, Index, Var};
use crate::kernel_ir::loops::{row_of, store_row, summed_at};
use crate::kernel_ir::lower::Lower;
use crate::kernel_ir::print::{Printer, dim, expr, identity, index, step};
use astrai_ir::ops::Reduce;
use astrai_ir::plan::bound;
use astrai_ir::{DType, Dim, Kernel, NodeId, Region};

/// Threads of a block that sums columns: a warp along the columns, so many warps along what is summed.
const SUM_THREADS: usize = 256;
/// Columns of a unit.
const WIDTH: usize = 32;
/// Rows that a unit sums at least, and most units that share a sum.
const PARTS: (usize, usize) = (512, 32);
/// Threads of a block that moves a row.
const ROW_THREADS: usize = 128;

/// Sums over leading axes, or maxima.
pub(super) fn reduce(region: &Region, name: &str, id: NodeId, r: &Reduce) -> Result<Kernel, String> {
    let g = region.graph();
    let (root, arg) = (g.outputs()[0].1, g.node(id).args[0]);
    let shape = g.ty(root).shape.clone();
    let (width, lead) = shape.split_last().ok_or("a column sum without columns")?;
    let mut lower = Lower::new(region);
    let (row, leading, lead_at) = row_of(lead);
    let column = Var { name: "column".into(), extent: width.clone(), depth: 1 };
    let here = [lead_at, vec![Index::var(&column)]].concat();
    lower.open();
    let axes: Vec<Var> = r.axes.iter().map(|&a| lower.var(g.ty(arg).shape[a].clone())).collect();
    lower.open();
    let value = lower.value(arg, &summed_at(r, g.ty(arg).rank(), &axes, here.clone()))?;
    let (inner, around) = (lower.close(), lower.close());
    lower.open();
    lower.give(id, Expr::Local("sum".into(), DType::F32));
    let result = lower.value(root, &here)?;
    let ty = g.ty(root);
    lower.push(Stmt::Store { buf: 0, at: Index::linear(&here, &ty.shape), dtype: ty.dtype, value: result });
    let (after, before) = (lower.close(), lower.close());

    let walks = Dim::product(axes.iter().map(|v| &v.extent));
    let walk = Var { name: "walk".into(), extent: walks.clone(), depth: 2 };
    let inside = |i: usize| Dim::product(axes[i + 1..].iter().map(|v| &v.extent));
    let walked: Vec<_> =
        axes.iter().enumerate().map(|(i, v)| (v.clone(), inside(i), v.extent.clone())).collect();
    let one = Dim::from(1);
    let parts = walks.ceil_div(&Dim::from(PARTS.0)).at_most(&Dim::from(PARTS.1)).at_least(&one);
    let shared = bound(&g.symbols, &parts).is_ok_and(|n| n > 1);
    let parts = if shared { parts } else { one };
    let (pieces, elements) = (width.ceil_div(&Dim::from(WIDTH)), &row.extent * width);
    let bytes = if shared { &(&elements * &parts) * &Dim::from(size_of::<f32>()) } else { Dim::from(0) };
    let units = &(&pieces * &parts) * &row.extent;
    let join = |a: &str, b: &str| format!("{a} = {};", step(r.kind, DType::F32, a, b));
    let finish = |p: &mut Printer| {
        p.alone(|p| {
            digits(p, &row, &leading);
            p.statements(&after);
        });
    };
    let mut program = Program::new(region, name, SUM_THREADS as u32, REGISTERS).workspace(bytes);
    program.entry(&units, 0, |p| {
        p.alone(|p| p.statements(&before));
        p.line(&format!("__shared__ float lines[BLOCK / 32][{WIDTH}];"));
        p.line("const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;");
        p.line(&format!("const index_t walks = {}, parts = {};", dim(&walks), dim(&parts)));
        p.line("const index_t each = (walks + parts - 1) / parts;");
        p.braces(
            &format!("for (index_t unit = blockIdx.x; unit < {}; unit += gridDim.x)", dim(&units)),
            |p| {
                p.line(&format!("const index_t column = unit % {} * {WIDTH} + lane;", dim(&pieces)));
                p.line(&format!("const index_t part = unit / {} % parts;", dim(&pieces)));
                p.line(&format!("const index_t row = unit / {} / parts; (void)row;", dim(&pieces)));
                p.line(&format!("float sum = {};", identity(r.kind, DType::F32)));
                p.braces(&format!("if (column < {})", dim(width)), |p| {
                    digits(p, &row, &leading);
                    p.alone(|p| p.statements(&around));
                    p.line("const index_t end = (part + 1) * each < walks ? (part + 1) * each : walks;");
                    p.line("#pragma unroll 4");
                    p.braces(
                        "for (index_t walk = part * each + warp; walk < end; walk += BLOCK / 32)",
                        |p| {
                            if let [alone] = axes.as_slice() {
                                p.line(&format!("const index_t {} = walk; (void){0};", alone.name));
                            } else {
                                digits(p, &walk, &walked);
                            }
                            p.alone(|p| p.statements(&inner));
                            p.line(&join("sum", &expr(&value)));
                        },
                    );
                });
                p.line("lines[warp][lane] = sum;");
                p.line("__syncthreads();");
                p.braces(&format!("if (warp == 0 && column < {})", dim(width)), |p| {
                    p.line(&format!(
                        "for (int i = 1; i < BLOCK / 32; i++) {}",
                        join("sum", "lines[i][lane]")
                    ));
                    match shared {
                        true => p.line(&format!(
                            "((float *)workspace)[(row * parts + part) * (int64_t){} + column] = sum;",
                            dim(width)
                        )),
                        false => finish(p),
                    }
                });
                p.line("__syncthreads();");
            },
        );
    });
    if shared {
        let blocks = elements.ceil_div(&Dim::from(SUM_THREADS));
        program.entry(&blocks, 0, |p| {
            p.alone(|p| p.statements(&before));
            p.line(&format!("const index_t parts = {}, elements = {};", dim(&parts), dim(&elements)));
            let head = "for (index_t unit = (index_t)blockIdx.x * BLOCK + threadIdx.x; unit < elements; unit += (index_t)gridDim.x * BLOCK)";
            p.braces(head, |p| {
                p.line(&format!("const index_t row = unit / {0}, column = unit % {0};", dim(width)));
                let at = format!("((const float *)workspace)[(row * parts + part) * (int64_t){} + column]", dim(width));
                p.line(&format!("float sum = {};", identity(r.kind, DType::F32)));
                p.line(&format!("for (index_t part = 0; part < parts; part++) {}", join("sum", &at)));
                finish(p);
            });
        });
    }
    Ok(program.finish())
}

/// Integer indices of rows, and where the values of a row come from.
struct Indexed {
    /// Loop variable of the index, its statements and value.
    index: (Var, Vec<Stmt>, Expr),
    /// Rows of the matrix, and indices.
    rows: Dim,
    count: Dim,
}

impl Indexed {
    fn lower(lower: &mut Lower, indices: NodeId, count: &Dim, rows: &Dim) -> Result<Indexed, String> {
        let var = lower.var(count.clone());
        lower.open();
        let value = lower.value(indices, &[Index::var(&var)])?;
        Ok(Indexed { index: (var, lower.close(), value), rows: rows.clone(), count: count.clone() })
    }

    /// Units of an index each, whose row `hit` lies in the matrix and is no other's between `first` and `end`; so many blocks share one, each a
    /// `part` of it.
    fn units(&self, p: &mut Printer, [first, end]: [&str; 2], parts: &Dim, body: impl FnOnce(&mut Printer)) {
        let (var, statements, value) = &self.index;
        p.line(&format!("const auto index_of = [&](index_t {}) -> int64_t {{", var.name));
        p.line(&format!("    (void){};", var.name));
        p.alone(|p| p.statements(statements));
        p.line(&format!("    return {};", expr(value)));
        p.line("};");
        p.line(&format!("const index_t count = {};", dim(&self.count)));
        let parts = dim(parts);
        let head = format!("for (index_t at = blockIdx.x; at < count * {parts}; at += gridDim.x)");
        p.braces(&head, |p| {
            p.line(&format!("const index_t unit = at / {parts}, part = at % {parts}; (void)part;"));
            p.line("const int64_t hit = index_of(unit);");
            p.line(&format!("if (hit < 0 || hit >= {}) continue;", dim(&self.rows)));
            p.line("bool other = false;");
            p.line(&format!(
                "for (index_t t = {first} + threadIdx.x; t < {end} && !other; t += BLOCK) other = index_of(t) == hit;"
            ));
            p.line("if (block_any(other)) continue;");
            body(p);
        });
    }
}

/// out = x, then out[indices[t]] += updates[t] for t in order; indices outside the matrix are passed over. The first index of a row
/// adds all of its updates.
pub(super) fn scatter(region: &Region, name: &str, root: NodeId) -> Result<Kernel, String> {
    let g = region.graph();
    let node = g.node(root);
    let (x, indices, updates) = (node.args[0], node.args[1], node.args[2]);
    let ty = node.ty();
    let (rows, width, count) = (ty.shape[0].clone(), ty.shape[1].clone(), g.ty(indices).shape[0].clone());
    let mut lower = Lower::new(region);
    let indexed = Indexed::lower(&mut lower, indices, &count, &rows)?;
    let fill = |lower: &mut Lower, id: NodeId, n: &Dim, to: Option<Index>| -> Result<_, String> {
        let row = lower.var(n.clone());
        lower.open();
        let column = lower.var(width.clone());
        lower.open();
        let (c, target) = (Index::var(&column), to.unwrap_or_else(|| Index::var(&row)));
        let value = lower.value(id, &[Index::var(&row), c.clone()])?;
        let at = Index::linear(&[target, c], &ty.shape);
        let (inner, of_row) = (lower.close(), lower.close());
        Ok((row, column, value, at, inner, of_row))
    };
    let start = fill(&mut lower, x, &rows, None)?;
    let hit = Index::atom(Atom::Local("hit".into(), 1, rows.clone()));
    let add = fill(&mut lower, updates, &count, Some(hit))?;
    let before = lower.close();

    let mut program = Program::new(region, name, ROW_THREADS as u32, REGISTERS);
    // In place, what is added to lies there already.
    if region.piece.in_place.is_empty() {
        let (row, column, value, at, inner, of_row) = &start;
        program.entry(&rows, 0, |p| {
            p.statements(&before);
            let head =
                format!("for (index_t {0} = blockIdx.x; {0} < {1}; {0} += gridDim.x)", row.name, dim(&rows));
            p.braces(&head, |p| {
                p.statements(of_row);
                columns(p, column, |p| {
                    p.statements(inner);
                    p.line(&format!("w0[{}] = {};", index(at), expr(value)));
                });
            });
        });
    }
    program.entry(&count, 0, |p| {
        p.statements(&before);
        p.line("__shared__ int32_t found[BLOCK], counts[BLOCK / 32];");
        indexed.units(p, ["0", "unit"], &Dim::from(1), |p| {
            p.braces("for (index_t first = unit; first < count; first += BLOCK)", |p| {
                p.line("const index_t t = first + threadIdx.x;");
                p.line("const bool same = t < count && index_of(t) == hit;");
                p.line("const int all = block_list(same, t, found, counts);");
                p.braces("for (int i = 0; i < all; i++)", |p| {
                    let (row, column, value, at, inner, of_row) = &add;
                    p.line(&format!("const index_t {} = found[i];", row.name));
                    p.statements(of_row);
                    columns(p, column, |p| {
                        p.statements(inner);
                        p.line(&format!("w0[{0}] += {1};", index(at), expr(value)));
                    });
                });
                p.line("__syncthreads();");
            });
        });
    });
    Ok(program.finish())
}

/// A loop over columns that the threads of a block share.
fn columns(p: &mut Printer, column: &Var, body: impl FnOnce(&mut Printer)) {
    let (c, n) = (&column.name, dim(&column.extent));
    p.braces(&format!("for (index_t {c} = threadIdx.x; {c} < {n}; {c} += BLOCK)"), |p| p.alone(body));
}

/// Rows stored where the state lies; of equal indices the last stays, and those outside the state are passed over.
pub(super) fn store(region: &Region, name: &str, root: NodeId) -> Result<Kernel, String> {
    let g = region.graph();
    let &[_, rows, value] = g.node(root).args.as_slice() else {
        return Err("a store of a whole state".into());
    };
    if region.piece.in_place.is_empty() || g.outputs().len() != 1 {
        return Err("rows are stored where the state lies".into());
    }
    let (shape, count) = (&g.ty(root).shape, &g.ty(rows).shape[0]);
    let lead = shape[1..].split_last().map_or(vec![], |(_, lead)| lead.to_vec());
    let (place, leading, axes) = row_of(&lead);
    let mut lower = Lower::new(region);
    let indexed = Indexed::lower(&mut lower, rows, count, &shape[0])?;
    let from = Var { name: "unit".into(), extent: count.clone(), depth: 1 };
    lower.open();
    if shape.len() == 1 {
        // One element, of which one thread has the loop's only turn.
        let var = lower.var(Dim::from(1));
        lower.open();
        store_row(&mut lower, region, [root, value], &from, &axes, 1)?;
        let body = lower.close();
        lower.push(Stmt::Loop { var, body });
    } else {
        store_row(&mut lower, region, [root, value], &from, &axes, 1)?;
    }
    let (of_row, before) = (lower.close(), lower.close());
    let mut program = Program::new(region, name, ROW_THREADS as u32, REGISTERS);
    program.entry(&(count * &place.extent), 0, |p| {
        p.statements(&before);
        indexed.units(p, ["unit + 1", "count"], &place.extent, |p| {
            p.line("const index_t row = part; (void)row;");
            digits(p, &place, &leading);
            p.statements(&of_row);
        });
    });
    Ok(program.finish())
}
