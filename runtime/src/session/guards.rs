//! Integers that say where a kernel reads and writes: bounds of sequences and groups, tables of pages, rows of a state. In: the guards
//! of a region, its buffers. Out: a word when they would lead it out of bounds. Those that are inputs are looked at once, before
//! a run.

use super::sizes::value;
use crate::Error;
use crate::device::{Device, Pointer};
use astrai_ir::region::{Guard, IntegerList, PageGuard};
use astrai_ir::{Dim, Sizes};
use std::borrow::Cow;

/// The buffers of a launch at the sizes of a run.
pub(super) struct Integers<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) buffers: &'a [Pointer],
    /// Bytes of a buffer as they were given, where it is an input.
    pub(super) given: &'a dyn Fn(usize) -> Option<&'a [u8]>,
    pub(super) sizes: &'a Sizes,
}

impl<'a> Integers<'a> {
    fn value(&self, d: &Dim) -> Result<u64, Error> {
        value(d, self.sizes)
    }

    fn read(&self, list: &IntegerList) -> Result<Cow<'a, [i32]>, Error> {
        let (at, count) = (self.buffers[list.at.0], self.value(&list.count)? as usize);
        if let Some(address) = self.device.host(at) {
            // SAFETY: the buffer holds `count` i32 at these sizes, aligned as every buffer is, which no launch writes now.
            return Ok(Cow::Borrowed(unsafe { std::slice::from_raw_parts(address.cast::<i32>(), count) }));
        }
        let integers =
            |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        // What was sent to the device needs not come back.
        if let Some(bytes) = (self.given)(list.at.0) {
            return Ok(integers(&bytes[..bytes.len().min(count * size_of::<i32>())]));
        }
        let mut bytes = vec![0; count * size_of::<i32>()];
        self.device.read(at, &mut bytes)?;
        Ok(integers(&bytes))
    }

    /// Refuses what the kernel could not follow.
    pub(super) fn check(&self, guard: &Guard) -> Result<(), Error> {
        match guard {
            Guard::Sequences { starts, tokens, pages } => {
                let (starts, tokens) = (self.read(starts)?, self.value(tokens)?);
                if !divides(&starts, tokens) {
                    return Err(Error::Input(format!(
                        "`starts` must ascend from 0 to the {tokens} tokens, one entry a sequence and the end"
                    )));
                }
                pages.as_ref().map_or(Ok(()), |p| self.check_pages(p, &starts))
            }
            Guard::Groups { offsets, rows } => {
                let rows = self.value(rows)?;
                match divides(&self.read(offsets)?, rows) {
                    true => Ok(()),
                    false => {
                        Err(Error::Input(format!("offsets of groups must ascend from 0 to the {rows} rows")))
                    }
                }
            }
            Guard::Rows { list, rows } => {
                let inside = |r: &i32| *r == -1 || usize::try_from(*r).is_ok_and(|r| r < *rows);
                match self.read(list)?.iter().find(|r| !inside(r)) {
                    None => Ok(()),
                    Some(bad) => Err(Error::Input(format!(
                        "row {bad} is outside the {rows} rows of the state; -1 stores nothing"
                    ))),
                }
            }
        }
    }

    fn check_pages(&self, p: &PageGuard, starts: &[i32]) -> Result<(), Error> {
        let (tables, lens) = (self.read(&p.tables)?, self.read(&p.lens)?);
        let (width, pages) = (tables.len() / lens.len().max(1), self.value(&p.pages)?);
        for (s, (&len, w)) in lens.iter().zip(starts.windows(2)).enumerate() {
            let (queries, most) = (w[1] - w[0], width * p.page);
            let keys = usize::try_from(len).ok().filter(|n| *n <= most && len >= queries);
            let Some(keys) = keys else {
                return Err(Error::Input(format!(
                    "`lens` of sequence {s} is {len}; it must be between its {queries} tokens and the {most} of its table"
                )));
            };
            let used = &tables[s * width..][..keys.div_ceil(p.page)];
            let inside = |p: &i32| u64::try_from(*p).is_ok_and(|p| p < pages);
            if let Some(bad) = used.iter().find(|p| !inside(p)) {
                return Err(Error::Input(format!("page {bad} of sequence {s} is outside the {pages} pages")));
            }
        }
        Ok(())
    }
}

/// True when these ascend from 0 to `n`.
fn divides(starts: &[i32], n: u64) -> bool {
    starts.first() == Some(&0)
        && starts.last().is_some_and(|e| i64::from(*e) == n as i64)
        && starts.is_sorted()
}
