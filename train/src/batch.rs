//! A ragged batch of sequences, as the programs take it.

/// Sequences one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids `[tokens]`.
    pub input_ids: Vec<i32>,
    /// Positions `[tokens]`, from 0 in each sequence.
    pub positions: Vec<i32>,
    /// Bounds of the sequences `[sequences + 1]`, from 0 to the number of tokens.
    pub starts: Vec<i32>,
    /// Next tokens `[tokens]`; negative: ignored.
    pub targets: Vec<i32>,
}

impl Batch {
    /// Number of targets that count.
    pub fn valid(&self) -> usize {
        self.targets.iter().filter(|t| **t >= 0).count()
    }
}
