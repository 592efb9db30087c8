//! Integers that say where a kernel reads and writes: bounds of sequences and groups, tables of pages, rows of a state. In: a region, its
//! buffers. Out: a word when they would lead it past its memory. Those that are inputs are looked at once, before a run.

use super::execute::Addresses;
use crate::Error;
use astrai_ir::ops::Op;
use astrai_ir::{Dim, Graph, NodeId, Region, Sizes};

/// Where a kernel finds such integers.
pub(super) enum Bounds {
    /// What divides the queries of attention into sequences, and where its keys are.
    Sequences { starts: List, tokens: Dim, pages: Option<Pages> },
    /// Rows of a state that has so many.
    Rows { list: List, rows: usize },
    /// What divides rows into groups.
    Groups { offsets: List, rows: Dim },
}

/// Integers in a buffer.
pub(super) struct List {
    buffer: usize,
    count: Dim,
}

/// Keys in pages.
pub(super) struct Pages {
    tables: List,
    lens: List,
    page: usize,
    pages: Dim,
}

impl List {
    /// The whole buffer below views of `id`.
    fn of(g: &Graph, mut id: NodeId) -> Option<List> {
        while g.node(id).op.is_view() {
            id = g.node(id).args[0];
        }
        let buffer = g.node(id).op.leaf_name()?.strip_prefix('r')?.parse().ok()?;
        Some(List { buffer, count: g.ty(id).elements() })
    }

    fn read<'a>(&self, bufs: &'a Addresses, sizes: &Sizes) -> Result<&'a [i32], Error> {
        let count = value(&self.count, sizes)? as usize;
        // SAFETY: the buffer holds `count` i32 at these sizes, aligned as every buffer is.
        Ok(unsafe { std::slice::from_raw_parts(bufs.0[self.buffer].cast::<i32>(), count) })
    }
}

fn value(d: &Dim, sizes: &Sizes) -> Result<u64, Error> {
    d.eval(&|s| sizes.get(s).copied()).map_err(Error::Input)
}

impl Bounds {
    /// What a region is led by, when it lies in buffers.
    pub(super) fn of(region: &Region) -> Option<Bounds> {
        let g = &region.graph;
        let node = |n: &astrai_ir::Node| match (&n.op, n.args.as_slice()) {
            (Op::Attention(_) | Op::AttentionGrad(_), args) => {
                let pages = match &n.op {
                    Op::Attention(a) => a.page.and_then(|page| {
                        let (tables, lens) = (List::of(g, args[4])?, List::of(g, args[5])?);
                        let pages = g.ty(args[1]).shape[0].div_exact(&Dim::from(page))?;
                        Some(Pages { tables, lens, page, pages })
                    }),
                    _ => None,
                };
                let tokens = g.ty(args[0]).shape[0].clone();
                Some(Bounds::Sequences { starts: List::of(g, args[3])?, tokens, pages })
            }
            (Op::GroupedDot(_) | Op::GroupedOuter(_), &[x, _, offsets]) => {
                Some(Bounds::Groups { offsets: List::of(g, offsets)?, rows: g.ty(x).shape[0].clone() })
            }
            (Op::Store(_), &[state, rows, _]) => {
                Some(Bounds::Rows { list: List::of(g, rows)?, rows: g.ty(state).shape[0].size()? })
            }
            _ => None,
        };
        g.nodes().iter().find_map(node)
    }

    /// The buffers in which they lie.
    pub(super) fn buffers(&self) -> Vec<usize> {
        match self {
            Bounds::Sequences { starts, pages, .. } => {
                let of_pages = pages.iter().flat_map(|p| [p.tables.buffer, p.lens.buffer]);
                [starts.buffer].into_iter().chain(of_pages).collect()
            }
            Bounds::Rows { list, .. } => vec![list.buffer],
            Bounds::Groups { offsets, .. } => vec![offsets.buffer],
        }
    }

    /// Refuses what the kernel could not follow.
    pub(super) fn check(&self, bufs: &Addresses, sizes: &Sizes) -> Result<(), Error> {
        match self {
            Bounds::Sequences { starts, tokens, pages } => {
                let (starts, tokens) = (starts.read(bufs, sizes)?, value(tokens, sizes)?);
                if !divides(starts, tokens) {
                    return Err(Error::Input(format!(
                        "`starts` must ascend from 0 to the {tokens} tokens, one entry a sequence and the end"
                    )));
                }
                pages.as_ref().map_or(Ok(()), |p| p.check(starts, bufs, sizes))
            }
            Bounds::Groups { offsets, rows } => {
                let rows = value(rows, sizes)?;
                match divides(offsets.read(bufs, sizes)?, rows) {
                    true => Ok(()),
                    false => {
                        Err(Error::Input(format!("offsets of groups must ascend from 0 to the {rows} rows")))
                    }
                }
            }
            Bounds::Rows { list, rows } => {
                let inside = |r: &i32| *r == -1 || usize::try_from(*r).is_ok_and(|r| r < *rows);
                match list.read(bufs, sizes)?.iter().find(|r| !inside(r)) {
                    None => Ok(()),
                    Some(bad) => Err(Error::Input(format!(
                        "row {bad} is outside the {rows} rows of the state; -1 stores nothing"
                    ))),
                }
            }
        }
    }
}

/// True when these ascend from 0 to `n`.
fn divides(starts: &[i32], n: u64) -> bool {
    starts.first() == Some(&0)
        && starts.last().is_some_and(|e| i64::from(*e) == n as i64)
        && starts.is_sorted()
}

impl Pages {
    fn check(&self, starts: &[i32], bufs: &Addresses, sizes: &Sizes) -> Result<(), Error> {
        let (tables, lens) = (self.tables.read(bufs, sizes)?, self.lens.read(bufs, sizes)?);
        let (width, pages) = (tables.len() / lens.len().max(1), value(&self.pages, sizes)?);
        for (s, (&len, w)) in lens.iter().zip(starts.windows(2)).enumerate() {
            let (queries, most) = (w[1] - w[0], width * self.page);
            let keys = usize::try_from(len).ok().filter(|n| *n <= most && len >= queries);
            let Some(keys) = keys else {
                return Err(Error::Input(format!(
                    "`lens` of sequence {s} is {len}; it must be between its {queries} tokens and the {most} of its table"
                )));
            };
            let used = &tables[s * width..][..keys.div_ceil(self.page)];
            let inside = |p: &i32| u64::try_from(*p).is_ok_and(|p| p < pages);
            if let Some(bad) = used.iter().find(|p| !inside(p)) {
                return Err(Error::Input(format!("page {bad} of sequence {s} is outside the {pages} pages")));
            }
        }
        Ok(())
    }
}
