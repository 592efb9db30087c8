//! Bounds of integer data. In: what a kernel does with integers that are known when it runs. Out: what must hold of them before.

use super::Operand;
use crate::Dim;

/// Integers in a buffer that say where a kernel reads and writes.
#[derive(Clone, Debug, PartialEq)]
pub struct IntegerList {
    /// The buffer, i32.
    pub at: Operand,
    /// How many.
    pub count: Dim,
}

/// A bound that a kernel's integer data must keep, else it would read or write out of bounds.
#[derive(Clone, Debug, PartialEq)]
pub enum Guard {
    /// Starts of sequences ascend from 0 to the tokens.
    Sequences {
        /// The starts.
        starts: IntegerList,
        /// Tokens.
        tokens: Dim,
        /// Where keys lie in pages: what tables and lengths must keep.
        pages: Option<PageGuard>,
    },
    /// Rows of a state that has so many; -1 stores nothing.
    Rows {
        /// The rows.
        list: IntegerList,
        /// Rows of the state.
        rows: usize,
    },
    /// Offsets of groups ascend from 0 to the rows.
    Groups {
        /// The offsets.
        offsets: IntegerList,
        /// Rows of all groups.
        rows: Dim,
    },
}

/// Tables of pages and lengths of sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct PageGuard {
    /// Tables, `[sequences, width]`.
    pub tables: IntegerList,
    /// Keys of each sequence.
    pub lens: IntegerList,
    /// Tokens of a page.
    pub page: usize,
    /// Pages there are.
    pub pages: Dim,
}

impl Guard {
    /// The buffers in which the integers lie.
    pub fn operands(&self) -> Vec<Operand> {
        match self {
            Guard::Sequences { starts, pages, .. } => {
                let of_pages = pages.iter().flat_map(|p| [p.tables.at, p.lens.at]);
                [starts.at].into_iter().chain(of_pages).collect()
            }
            Guard::Rows { list, .. } => vec![list.at],
            Guard::Groups { offsets, .. } => vec![offsets.at],
        }
    }
}
