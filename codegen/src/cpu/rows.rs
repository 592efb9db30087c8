//! Loops by rows of the result. In: a region whose form is loops. Out: C whose units are rows, or pieces of a vector.

use super::{Emitted, PHASE, prologue};
use crate::kernel_ir::expr::Stmt;
use crate::kernel_ir::index::Var;
use crate::kernel_ir::loops::{Loops, loops};
use crate::kernel_ir::print::{Dialect, Printer, dim};
use astrai_ir::{Dim, Region};

/// The kernel's text and its units.
pub(super) fn kernel(region: &Region, name: &str) -> Result<Emitted, String> {
    let l = loops(region, true)?;
    let units = match l.chunk {
        Some(n) => l.rows.ceil_div(&Dim::from(n)),
        None => l.rows.clone(),
    };
    let mut p = Printer::new(Dialect::C, 0);
    p.braces(&format!("void {name}_phase0{PHASE}"), |p| {
        prologue(p, region);
        p.statements(&l.before);
        p.braces("for (int64_t row = begin; row < end; row++)", |p| row(p, &l));
    });
    Ok(Emitted::one(p.finish(), units))
}

/// The statements of one row.
fn row(p: &mut Printer, l: &Loops) {
    if let Some(n) = l.chunk {
        // The only loop runs over a piece of the axis.
        if let [Stmt::Loop { var, body }] = l.body.as_slice() {
            let (v, total) = (&var.name, dim(&l.rows));
            p.line(&format!("const int64_t stop = i_min((row + 1) * {n}, {total});"));
            p.line("#pragma GCC ivdep");
            p.braces(&format!("for (int64_t {v} = row * {n}; {v} < stop; {v}++)"), |p| p.statements(body));
            return;
        }
    }
    lead(p, &l.row, &l.leading);
    p.statements(&l.body);
}

/// Indices of the leading axes from the row.
pub(super) fn lead(p: &mut Printer, row: &Var, leading: &[(Var, Dim, Dim)]) {
    for (v, divisor, size) in leading.iter().filter(|(v, ..)| v != row) {
        p.line(&format!("const int64_t {} = row / {} % {}; (void){0};", v.name, dim(divisor), dim(size)));
    }
}
