//! The integers of one step, as the paged programs take them: tokens of some sequences, each at the end of what its pages
//! hold, ragged, without any padding of tokens. In: tokens and pages. Out: a program's inputs by name. Refilled in place, so
//! that whoever has warmed up allocates nothing here.

use astrai_ir::Type;
use astrai_ir::ops::Drawing;
use astrai_runtime::{Error, Value};

use crate::pages::Page;

/// What a step computes: for each sequence the next few tokens of it.
///
/// Inputs, all `i32`: `input_ids`, `positions` (of each token in its sequence) and `slots` (where its key and value go: page
/// times page size plus the row in the page), `[tokens]`; `starts` (the first token of each sequence, and the number of
/// tokens), `[sequences + 1]`; `tables` (pages of each sequence in the order of positions; what stands behind the last is not
/// read), `[sequences, table]`, or, where pages hold latents, places of these pages in the list `pages` `[context]` of those in
/// use, each once; where windowed layers have pages of their own, `window_slots` and `window_tables` in the same way; `adapters` (the slot of each token's adapter, or -1), `[tokens]`, and by [grouping](StepBatch::group) these `adapter_rows` (tokens with an
/// adapter in the order of slots), `adapter_places` (where among these each token stands, or 0) and `adapter_offsets` (where those of each
/// slot begin, `[slots + 1]`); `lens` (keys of each sequence after this step) and `last` (index of its last token, the one
/// whose logits are wanted), `[sequences]`; and how the next token of each sequence is drawn, where the program does that (see
/// [`Drawing`]): `sampling` `[sequences, 3]`, `f32`, and `draws` `[sequences, 19]`. Of a module of multi-token prediction `next_slots`
/// `[tokens]`: where its own state of each token goes, or -1.
#[derive(Clone, Debug)]
pub struct StepBatch {
    page: usize,
    table: usize,
    inputs: [(&'static str, Value); INPUTS],
    /// Where pages are listed.
    page_index: Option<PageIndex>,
    /// Slots for adapters.
    slots: usize,
    /// Whether the program is a module's, which keeps hidden states of its own.
    module: bool,
}

/// Where in the list of pages in use each page stands.
#[derive(Clone, Debug, Default)]
struct PageIndex {
    /// By page; it counts only where the list agrees.
    of: Vec<u32>,
    /// The list.
    pages: Vec<Page>,
    /// Entries of each row of the tables that are no zero.
    filled: Vec<usize>,
}

impl PageIndex {
    /// The place of a page, which is listed if it was not.
    fn find(&mut self, page: Page) -> u32 {
        let at = page as usize;
        if self.of.len() <= at {
            self.of.resize(at + 1, 0);
        }
        let place = self.of[at];
        if self.pages.get(place as usize) == Some(&page) {
            return place;
        }
        self.of[at] = self.pages.len() as u32;
        self.pages.push(page);
        self.of[at]
    }

    /// Notes that a row of the tables has so many entries; says how many it had.
    fn fill(&mut self, row: usize, entries: usize) -> usize {
        if self.filled.len() <= row {
            self.filled.resize(row + 1, 0);
        }
        std::mem::replace(&mut self.filled[row], entries)
    }
}

const IDS: usize = 0;
const POSITIONS: usize = 1;
const SLOTS: usize = 2;
const STARTS: usize = 3;
const TABLES: usize = 4;
const LENS: usize = 5;
const LAST: usize = 6;
const PAGES: usize = 7;
const WINDOW_SLOTS: usize = 8;
const WINDOW_TABLES: usize = 9;
const ADAPTERS: usize = 10;
const ADAPTER_ROWS: usize = 11;
const ADAPTER_PLACES: usize = 12;
const ADAPTER_OFFSETS: usize = 13;
const SAMPLING: usize = 14;
const DRAWS: usize = 15;
const NEXT: usize = 16;
const INPUTS: usize = 17;

/// Rows of tokens, and tables, of each group of pages.
const GROUPS: [(usize, usize); 2] = [(SLOTS, TABLES), (WINDOW_SLOTS, WINDOW_TABLES)];

impl StepBatch {
    /// No sequences yet, in pages of `page` tokens, at most `table` of them a sequence.
    pub fn new(page: usize, table: usize) -> StepBatch {
        let names = ["input_ids", "positions", "slots", "starts", "tables", "lens", "last", "pages"];
        let names = [&names[..], &["window_slots", "window_tables", "adapters"]].concat();
        let names = [&names[..], &["adapter_rows", "adapter_places", "adapter_offsets"]].concat();
        let names = [&names[..], &["sampling", "draws", "next_slots"]].concat();
        let inputs = std::array::from_fn(|i| {
            let tables = GROUPS.iter().any(|(_, tables)| *tables == i);
            let empty = match i {
                SAMPLING => Value::f32(&[0, Drawing::REALS], &[]),
                DRAWS => Value::i32(&[0, Drawing::INTEGERS], &[]),
                _ => Value::i32(if tables { &[0, 0] } else { &[0] }, &[]),
            };
            (names[i], empty)
        });
        let mut batch = StepBatch { page, table, inputs, page_index: None, slots: 0, module: false };
        GROUPS.iter().for_each(|(_, tables)| batch.inputs[*tables].1.shape[1] = table);
        batch.clear();
        batch
    }

    /// The same where pages hold latents.
    pub fn of_latents(page: usize, table: usize) -> StepBatch {
        StepBatch { page_index: Some(PageIndex::default()), ..StepBatch::new(page, table) }
    }

    /// No sequences yet, in the form that a program of these inputs takes.
    pub fn of_program(inputs: &[(String, Type)], page: usize, table: usize) -> StepBatch {
        let input = |name: &str| inputs.iter().find(|(n, _)| n == name);
        let offsets = input("adapter_offsets").and_then(|(_, ty)| ty.shape.first()?.size());
        let batch = match input("pages") {
            Some(_) => StepBatch::of_latents(page, table),
            None => StepBatch::new(page, table),
        };
        let slots = offsets.map_or(0, |n| n.saturating_sub(1));
        StepBatch { slots, module: input("next_slots").is_some(), ..batch }
    }

    /// Whether the program is a module's.
    pub(super) fn is_module(&self) -> bool {
        self.module
    }

    /// Takes the sequences out.
    pub fn clear(&mut self) {
        self.reset_for(0);
    }

    /// Takes the sequences out; exactly so many come, or more. Their rows of the tables keep what they had behind their pages,
    /// which nobody reads: writing zeros there would cost more than all the rest.
    pub(super) fn reset_for(&mut self, sequences: usize) {
        for (i, (_, v)) in self.inputs.iter_mut().enumerate() {
            v.shape[0] = 0;
            let kept = GROUPS.iter().any(|(_, tables)| *tables == i) && !v.bytes.is_empty();
            v.bytes.resize(if kept { sequences * self.table * 4 } else { 0 }, 0);
        }
        self.put(STARTS, 0);
        if let Some(index) = &mut self.page_index {
            index.pages.clear();
        }
    }

    /// Adds a sequence: tokens behind the `done` first, which are in `pages`, as many as these have room for.
    ///
    /// # Errors
    /// A token is outside the vocabulary of `vocabulary` ids, a page outside the `all` pages there are, there is no token, or
    /// there are too few or too many pages; the batch is then as before.
    pub fn push(
        &mut self,
        tokens: &[u32],
        done: usize,
        pages: &[Page],
        [vocabulary, all]: [usize; 2],
    ) -> Result<(), Error> {
        let (page, table, sequence) = (self.page, self.table, self.sequences());
        let wrong = |what: String| Err(Error::Input(format!("sequence {sequence}: {what}")));
        if let Some(t) = tokens.iter().find(|t| **t as usize >= vocabulary) {
            return wrong(format!("token {t} is outside the vocabulary of {vocabulary}"));
        }
        if let Some(p) = pages.iter().find(|p| **p as usize >= all) {
            return wrong(format!("page {p} is outside the {all} pages"));
        }
        let (n, room) = (tokens.len(), pages.len());
        if n == 0 || room > table || done.saturating_add(n) > room * page {
            return wrong(format!(
                "{n} tokens behind {done}, {room} pages of {page}: wants tokens, room for them, {table} pages at most"
            ));
        }
        self.append(tokens.iter().copied(), done, [pages, &[]], None);
        Ok(())
    }

    /// [`push`](Self::push) of what is known to be sound, with the pages of each group, none of one that there is not, and the slot of the
    /// sequence's adapter.
    pub(super) fn append(
        &mut self,
        tokens: impl Iterator<Item = u32>,
        done: usize,
        pages: [&[Page]; 2],
        adapter: Option<u32>,
    ) {
        let adapter = adapter.map_or(-1, |slot| slot as i32);
        let mut at = done;
        for token in tokens {
            self.put(IDS, token as i32);
            self.put(POSITIONS, at as i32);
            self.put(ADAPTERS, adapter);
            if self.module {
                self.put(NEXT, -1);
            }
            for ((slots, _), pages) in GROUPS.iter().zip(pages) {
                if let Some(&page) = pages.get(at / self.page) {
                    self.put(*slots, (page as usize * self.page + at % self.page) as i32);
                }
            }
            at += 1;
        }
        let end = self.tokens() as i32;
        self.put(STARTS, end);
        self.put(LAST, end - 1);
        self.put(LENS, at as i32);
        self.draw(self.sequences() - 1, &Drawing::GREEDY);
        // Of a prompt that is computed in chunks, pages of later ones hold nothing yet; of those listed, every row is worked on.
        let [all, window] = pages.map(|pages| &pages[..at.div_ceil(self.page).min(pages.len())]);
        let Some(mut index) = self.page_index.take() else {
            self.add_row(TABLES, all.iter().copied());
            self.add_row(WINDOW_TABLES, window.iter().copied());
            return;
        };
        let known = index.pages.len();
        let row = self.add_row(TABLES, all.iter().map(|page| index.find(*page)));
        // What stands behind is looked up too, so that it has to be a place.
        let before = index.fill(row / (self.table * 4), all.len());
        let entries = self.inputs[TABLES].1.bytes[row..].as_chunks_mut::<4>().0;
        let stale = before.min(self.table).max(all.len());
        entries[all.len()..stale].fill([0; 4]);
        let list = &mut self.inputs[PAGES].1;
        index.pages[known..].iter().for_each(|page| list.bytes.extend(page.to_le_bytes()));
        list.shape[0] = index.pages.len();
        self.page_index = Some(index);
    }

    /// Lets a module keep its state of the newest token of the last sequence, whose pages these are, as that of the token behind it.
    pub(super) fn keep_next(&mut self, at: usize, pages: &[Page]) {
        let place =
            pages.get(at / self.page).map_or(-1, |&page| (page as usize * self.page + at % self.page) as i32);
        if let Some(last) = self.inputs[NEXT].1.bytes.last_chunk_mut::<4>() {
            *last = place.to_le_bytes();
        }
    }

    /// Says how the next token of a sequence is drawn; unsaid, it is the likeliest.
    pub(super) fn draw(&mut self, sequence: usize, drawing: &Drawing) {
        let reals = drawing.reals().map(f32::to_le_bytes);
        let integers = drawing.integers().map(i32::to_le_bytes);
        for (i, bytes) in [(SAMPLING, reals.as_flattened()), (DRAWS, integers.as_flattened())] {
            let v = &mut self.inputs[i].1;
            v.shape[0] = v.shape[0].max(sequence + 1);
            v.bytes.resize(v.shape[0] * bytes.len(), 0);
            v.bytes[sequence * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Lists tokens by the slots of their adapters. Where none has one, the first stands there, in the first slot, for what nobody reads.
    pub(super) fn group(&mut self) {
        if self.slots == 0 {
            return;
        }
        let tokens = self.tokens();
        let slot_of = |batch: &StepBatch, token: usize| {
            let slot = usize::try_from(batch.get(ADAPTERS, token)).ok();
            slot.filter(|slot| *slot < batch.slots)
        };
        // First how many tokens each slot has, behind it; then where each ends.
        self.zeros(ADAPTER_OFFSETS, self.slots + 1);
        for token in 0..tokens {
            if let Some(slot) = slot_of(self, token) {
                self.set(ADAPTER_OFFSETS, slot + 1, self.get(ADAPTER_OFFSETS, slot + 1) + 1);
            }
        }
        for slot in 1..=self.slots {
            self.set(
                ADAPTER_OFFSETS,
                slot,
                self.get(ADAPTER_OFFSETS, slot - 1) + self.get(ADAPTER_OFFSETS, slot),
            );
        }
        let rows = self.get(ADAPTER_OFFSETS, self.slots);
        self.zeros(ADAPTER_ROWS, rows.max(1) as usize);
        self.zeros(ADAPTER_PLACES, tokens);
        // Each slot's offset goes on to its end as its tokens are placed, from which the next one's began.
        for token in 0..tokens {
            let Some(slot) = slot_of(self, token) else { continue };
            let place = self.get(ADAPTER_OFFSETS, slot);
            self.set(ADAPTER_ROWS, place as usize, token as i32);
            self.set(ADAPTER_PLACES, token, place);
            self.set(ADAPTER_OFFSETS, slot, place + 1);
        }
        for slot in (1..self.slots).rev() {
            self.set(ADAPTER_OFFSETS, slot, self.get(ADAPTER_OFFSETS, slot - 1));
        }
        self.set(ADAPTER_OFFSETS, 0, 0);
        if rows == 0 {
            (1..=self.slots).for_each(|slot| self.set(ADAPTER_OFFSETS, slot, 1));
        }
    }

    /// Adds a row to tables, unless there are no pages; gives where it begins.
    fn add_row(&mut self, tables: usize, pages: impl ExactSizeIterator<Item = Page>) -> usize {
        let (tables, width) = (&mut self.inputs[tables].1, self.table * 4);
        let row = tables.shape[0] * width;
        if pages.len() > 0 {
            tables.shape[0] += 1;
            if tables.bytes.len() < row + width {
                tables.bytes.resize(row + width, 0);
            }
            let entries = tables.bytes[row..].as_chunks_mut::<4>().0;
            entries.iter_mut().zip(pages).for_each(|(to, page)| *to = page.to_le_bytes());
        }
        row
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.inputs[LENS].1.shape[0]
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.inputs[IDS].1.shape[0]
    }

    /// All inputs by name.
    pub fn all(&self) -> [(&'static str, &Value); INPUTS] {
        self.inputs.each_ref().map(|(name, v)| (*name, v))
    }

    /// Those inputs that a program names.
    pub fn inputs(&self, names: &[(String, Type)]) -> Vec<(&'static str, &Value)> {
        self.all().into_iter().filter(|(n, _)| names.iter().any(|(x, _)| x == n)).collect()
    }

    /// A copy of an input's integers; none of a name that there is not.
    pub fn list(&self, name: &str) -> Vec<i32> {
        let input = self.inputs.iter().filter(|(n, _)| *n == name);
        input.flat_map(|(_, v)| v.bytes.as_chunks::<4>().0).map(|b| i32::from_le_bytes(*b)).collect()
    }

    /// Makes an input so many zeros.
    fn zeros(&mut self, i: usize, n: usize) {
        let v = &mut self.inputs[i].1;
        v.bytes.clear();
        v.bytes.resize(n * 4, 0);
        v.shape[0] = n;
    }

    fn get(&self, i: usize, at: usize) -> i32 {
        i32::from_le_bytes(self.inputs[i].1.bytes.as_chunks::<4>().0[at])
    }

    fn set(&mut self, i: usize, at: usize, x: i32) {
        self.inputs[i].1.bytes.as_chunks_mut::<4>().0[at] = x.to_le_bytes();
    }

    fn put(&mut self, i: usize, x: i32) {
        let v = &mut self.inputs[i].1;
        v.bytes.extend(x.to_le_bytes());
        v.shape[0] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stand_behind_what_the_pages_hold() {
        let mut b = StepBatch::new(4, 3);
        for _ in 0..2 {
            b.clear();
            b.push(&[5, 6, 7], 3, &[8, 2], [50, 9]).unwrap();
            b.push(&[9], 0, &[1], [50, 9]).unwrap();
            assert_eq!((b.sequences(), b.tokens()), (2, 4));
            assert_eq!((b.list("input_ids"), b.list("slots")), (vec![5, 6, 7, 9], vec![35, 8, 9, 4]));
            assert_eq!((b.list("positions"), b.list("starts")), (vec![3, 4, 5, 0], vec![0, 3, 4]));
            assert_eq!((b.list("lens"), b.list("last")), (vec![6, 1], vec![2, 3]));
            assert_eq!(b.list("tables"), [8, 2, 0, 1, 0, 0]);
            assert!(b.all().iter().all(|(_, v)| v.bytes.len() == v.shape.iter().product::<usize>() * 4));
            assert_eq!(b.inputs[TABLES].1.shape, [2, 3]);
        }
        for (tokens, done, pages) in [
            (&[50][..], 0, &[1][..]),
            (&[u32::MAX], 0, &[1]),
            (&[1], 4, &[1]),
            (&[], 0, &[1]),
            (&[1], usize::MAX, &[1]),
            (&[1], 0, &[9]),
            (&[1], 0, &[1; 4]),
        ] {
            assert!(b.push(tokens, done, pages, [50, 9]).is_err(), "{tokens:?} {done} {pages:?}");
            assert_eq!(b.sequences(), 2);
        }
    }

    #[test]
    fn pages_in_use_are_listed_once_and_those_for_later_not_at_all() {
        let mut b = StepBatch::of_latents(4, 4);
        for round in 0..2 {
            b.clear();
            b.push(&[5, 6], 8, &[8, 2, 5, 6][..3 + round], [50, 9]).unwrap();
            b.push(&[9], 4, &[8, 1], [50, 9]).unwrap();
            assert_eq!((b.list("pages"), b.list("tables")), (vec![8, 2, 5, 1], vec![0, 1, 2, 0, 0, 3, 0, 0]));
            assert_eq!((b.list("slots"), b.all()[PAGES].1.shape.clone()), (vec![20, 21, 4], vec![4]));
            b.clear();
            b.push(&[9], 0, &[7], [50, 9]).unwrap();
            b.push(&[9], 0, &[2], [50, 9]).unwrap();
            assert_eq!((b.list("pages"), b.list("tables")), (vec![7, 2], vec![0, 0, 0, 0, 1, 0, 0, 0]));
        }
    }

    #[test]
    fn rows_of_tables_are_kept_for_as_many_sequences_as_come() {
        let mut b = StepBatch::new(4, 2);
        b.push(&[1; 8], 0, &[3, 4], [9, 9]).unwrap();
        b.push(&[1; 8], 0, &[5, 6], [9, 9]).unwrap();
        b.reset_for(1);
        b.append([1].into_iter(), 0, [&[7], &[]], None);
        assert_eq!((b.list("tables"), b.all()[TABLES].1.shape.clone()), (vec![7, 4], vec![1, 2]));
        b.append([1].into_iter(), 0, [&[8], &[]], Some(3));
        assert_eq!(b.list("adapters"), [-1, 3]);
        let lists = |slots: usize, of: &[Option<u32>]| {
            let mut b = StepBatch { slots, ..StepBatch::new(4, 2) };
            of.iter().for_each(|adapter| b.append([1, 2].into_iter(), 0, [&[0], &[]], *adapter));
            b.group();
            ["rows", "places", "offsets"].map(|name| b.list(&format!("adapter_{name}")))
        };
        let grouped = [vec![6, 7, 0, 1, 4, 5], vec![2, 3, 0, 0, 4, 5, 0, 1], vec![0, 2, 2, 6]];
        assert_eq!(lists(3, &[Some(2), None, Some(2), Some(0)]), grouped);
        assert_eq!(lists(2, &[None]), [vec![0], vec![0, 0], vec![0, 1, 1]]);
        assert!(lists(0, &[None]).iter().all(Vec::is_empty));
        assert_eq!(b.list("tables"), [7, 4, 8, 0]);
        let drawing = Drawing { top_k: 5, words: [1 << 32 | 7; Drawing::DRAWS + 1], ..Drawing::GREEDY };
        b.draw(1, &drawing);
        let rows = [Drawing::GREEDY, drawing].map(|d| d.integers().to_vec()).concat();
        assert_eq!((b.list("draws"), b.sequences()), (rows, 2));
    }
}
