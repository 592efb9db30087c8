//! Rows stored into a state. In: a region whose result is a store of rows. Out: host C that writes them where the state lies,
//! each element computed on its way. A unit has a place on the leading axes of a row and every row of one residue class, in
//! order: of equal rows the last stays, whatever the threads. Rows outside the state are passed over.

use super::{Emitted, PHASE, prologue};
use crate::kernel_ir::index::Index;
use crate::kernel_ir::loops::{row_of, store_row};
use crate::kernel_ir::lower::Lower;
use crate::kernel_ir::print::{Dialect, Printer, dim, expr};
use astrai_ir::{Dim, NodeId, Region};

/// Residue classes of rows.
const PARTS: usize = 8;

/// The kernel of a region that stores rows.
pub(super) fn kernel(region: &Region, name: &str, root: NodeId) -> Result<Emitted, String> {
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
    lower.open();
    let from = lower.var(count.clone());
    lower.open();
    let hit = lower.value(rows, &[Index::var(&from)])?;
    let of_index = lower.close();
    lower.open();
    store_row(&mut lower, region, [root, value], &from, &axes, 2)?;
    let (of_row, of_unit, before) = (lower.close(), lower.close(), lower.close());

    let mut p = Printer::new(Dialect::C, 0);
    let units = &place.extent * &count.at_most(&Dim::from(PARTS));
    p.braces(&format!("void {name}_phase0{PHASE}"), |p| {
        prologue(p, region);
        p.statements(&before);
        p.line(&format!("const int64_t parts = i_min({PARTS}, {});", dim(count)));
        p.braces("for (int64_t unit = begin; unit < end; unit++)", |p| {
            p.line("const int64_t row = unit / parts, part = unit % parts; (void)row;");
            for (v, divisor, size) in leading.iter().filter(|(v, ..)| *v != place) {
                p.line(&format!("const int64_t {} = row / {} % {};", v.name, dim(divisor), dim(size)));
            }
            p.statements(&of_unit);
            p.around(std::slice::from_ref(&from), |p| {
                p.statements(&of_index);
                p.line(&format!("const int64_t hit = {};", expr(&hit)));
                let skip = format!("hit < 0 || hit >= {} || hit % parts != part", dim(&shape[0]));
                p.line(&format!("if ({skip}) continue;"));
                p.statements(&of_row);
            });
        });
    });
    Ok(Emitted::one(p.finish(), units))
}
