//! The integers of one step, as the paged programs take them: what the scheduler decided, ragged, without any padding of
//! tokens. Refilled in place, so that a server that has warmed up allocates nothing here.

use crate::pages::Page;

/// What a step computes: for each sequence the next few tokens of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// Ids, `[tokens]`.
    pub input_ids: Vec<i32>,
    /// Their positions in their sequences, `[tokens]`.
    pub positions: Vec<i32>,
    /// The first token of each sequence, and the number of tokens: `[sequences + 1]`.
    pub starts: Vec<i32>,
    /// Where each token's keys and values go: page times page size plus the row in the page, `[tokens]`.
    pub slots: Vec<i32>,
    /// Pages of each sequence in the order of positions, `[sequences, table]`; zeros behind the last.
    pub tables: Vec<i32>,
    /// Length of a row of `tables`: pages of the sequence that has most.
    pub table: usize,
    /// Keys of each sequence after this step, `[sequences]`.
    pub lens: Vec<i32>,
    /// Index in `input_ids` of the last token of each sequence, `[sequences]`: the tokens whose logits are wanted.
    pub last: Vec<i32>,
}

impl StepBatch {
    /// An empty one with space for so many tokens and sequences.
    pub fn new(tokens: usize, sequences: usize) -> StepBatch {
        let space = Vec::with_capacity;
        StepBatch {
            input_ids: space(tokens),
            positions: space(tokens),
            starts: space(sequences + 1),
            slots: space(tokens),
            tables: Vec::new(),
            table: 0,
            lens: space(sequences),
            last: space(sequences),
        }
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.lens.len()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    pub(super) fn clear(&mut self, table: usize) {
        let lists = [&mut self.input_ids, &mut self.positions, &mut self.starts, &mut self.slots];
        lists.into_iter().for_each(Vec::clear);
        [&mut self.tables, &mut self.lens, &mut self.last].into_iter().for_each(Vec::clear);
        self.starts.push(0);
        self.table = table;
    }

    /// Adds a sequence: `count` of its tokens after the `computed` first.
    pub(super) fn push(
        &mut self,
        tokens: &[u32],
        computed: usize,
        count: usize,
        pages: &[Page],
        size: usize,
    ) {
        for position in computed..computed + count {
            self.input_ids.push(tokens[position] as i32);
            self.positions.push(position as i32);
            self.slots.push((pages[position / size] as usize * size + position % size) as i32);
        }
        let end = self.input_ids.len() as i32;
        self.starts.push(end);
        self.last.push(end - 1);
        self.lens.push((computed + count) as i32);
        self.tables.extend(pages.iter().map(|&p| p as i32));
        self.tables.resize(self.lens.len() * self.table, 0);
    }
}
