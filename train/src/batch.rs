//! Packed batches, which a training program reads in one step. In: items of a dataset. Out: sequences of different lengths one
//! after another, without padding, with their positions, cumulative lengths and targets. A batch is filled again and again in
//! the same memory, because a training step must not allocate.

use crate::data::DataError;

/// A masked target, which adds nothing to the loss (PyTorch's `ignore_index`); any negative one would do.
pub const IGNORED: i32 = -100;

/// Packed sequences with the target of each of their tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedBatch {
    /// Token ids. `[tokens]`
    pub input_ids: Vec<i32>,
    /// Position of each token in its sequence, from 0. `[tokens]`
    pub positions: Vec<i32>,
    /// Cumulative sequence lengths (`cu_seqlens`): where each sequence starts, and at last the number of tokens. `[sequences + 1]`
    pub starts: Vec<i32>,
    /// The next token, which the model predicts; negative where the target is masked. `[tokens]`
    pub targets: Vec<i32>,
    /// Log-probabilities of the targets under (the reference, the policy that wrote the answers), where they were computed. `[tokens]`, or empty
    pub logps: [Vec<f32>; 2],
}

/// A dataset: items that can be written into a batch of a kind ([`PackedBatch`] for next tokens, and those of
/// [`preference`](crate::preference) for the strategies that compare answers).
pub trait Items<B = PackedBatch> {
    /// How many there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes item number `item` behind what the batch holds. A batch's `fill` calls this; after an error the batch is to be
    /// cleared.
    ///
    /// # Errors
    /// There is no such item, or its data is not what it should be.
    fn append(&self, item: u64, batch: &mut B) -> Result<(), DataError>;
}

impl Default for PackedBatch {
    fn default() -> PackedBatch {
        PackedBatch::with_capacity(0)
    }
}

impl PackedBatch {
    /// An empty batch that `tokens` tokens fit in without allocation, however many sequences they make.
    pub fn with_capacity(tokens: usize) -> PackedBatch {
        let mut batch = PackedBatch {
            input_ids: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            starts: Vec::with_capacity(tokens + 1),
            targets: Vec::with_capacity(tokens),
            logps: Default::default(),
        };
        batch.clear();
        batch
    }

    /// Removes all sequences; keeps the memory.
    pub fn clear(&mut self) {
        self.input_ids.clear();
        self.positions.clear();
        self.starts.clear();
        self.starts.push(0);
        self.targets.clear();
        self.logps.iter_mut().for_each(Vec::clear);
    }

    /// Holds the numbered items of `source` and nothing else; empty after an error. Allocates only where the batch has never
    /// been as large.
    ///
    /// # Errors
    /// An item cannot be had.
    pub fn fill(
        &mut self,
        source: &dyn Items,
        items: impl IntoIterator<Item = u64>,
    ) -> Result<(), DataError> {
        self.clear();
        let all = items.into_iter().try_for_each(|item| source.append(item, self));
        self.complete();
        all.inspect_err(|_| self.clear())
    }

    /// Makes room for as many bounds as the tokens allow, so that a batch of more and shorter documents finds it.
    pub(crate) fn complete(&mut self) {
        self.starts.reserve(self.input_ids.len().saturating_sub(self.starts.len()) + 1);
    }

    /// Adds a sequence.
    ///
    /// # Panics
    /// `input_ids` and `targets` differ in length.
    pub fn push(&mut self, input_ids: &[i32], targets: &[i32]) {
        assert_eq!(input_ids.len(), targets.len(), "a target for each token");
        self.input_ids.extend_from_slice(input_ids);
        self.targets.extend_from_slice(targets);
        self.end(input_ids.len());
    }

    /// Adds a sequence whose token `t` is learnt where `trained[t]`: it is then the target of the token before it. The last token
    /// has no target.
    ///
    /// # Panics
    /// `ids` and `trained` differ in length.
    pub fn push_trained(&mut self, ids: &[i32], trained: &[bool]) {
        self.grow_trained(ids, trained);
        self.end(ids.len());
    }

    /// Adds all sequences of another batch.
    pub fn extend(&mut self, other: &PackedBatch) {
        let before = self.tokens() as i32;
        self.input_ids.extend_from_slice(&other.input_ids);
        self.positions.extend_from_slice(&other.positions);
        self.targets.extend_from_slice(&other.targets);
        self.logps.iter_mut().zip(&other.logps).for_each(|(to, from)| to.extend_from_slice(from));
        self.starts.extend(other.starts[1..].iter().map(|start| start + before));
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// Tokens whose target is not masked: what a mean loss is divided by.
    pub fn valid(&self) -> usize {
        self.targets.iter().filter(|&&target| target >= 0).count()
    }

    /// Room for `tokens` more: ids and targets, to be written and then closed with [`end`](Self::end).
    pub(crate) fn grow(&mut self, tokens: usize) -> (&mut [i32], &mut [i32]) {
        let before = self.input_ids.len();
        self.input_ids.resize(before + tokens, 0);
        self.targets.resize(before + tokens, IGNORED);
        (&mut self.input_ids[before..], &mut self.targets[before..])
    }

    /// The tokens of [`push_trained`](Self::push_trained), to be closed with [`end`](Self::end).
    pub(crate) fn grow_trained(&mut self, ids: &[i32], trained: &[bool]) {
        assert_eq!(ids.len(), trained.len(), "a mask for each token");
        let (to, targets) = self.grow(ids.len());
        to.copy_from_slice(ids);
        for t in 1..ids.len() {
            if trained[t] {
                targets[t - 1] = ids[t];
            }
        }
    }

    /// Makes the next `tokens` tokens that belong to no sequence yet a sequence.
    pub(crate) fn end(&mut self, tokens: usize) {
        let begin = self.positions.len();
        self.positions.extend(0..tokens as i32);
        self.starts.push((begin + tokens) as i32);
    }

    /// Masks the target of a token, counted from the first that belongs to no sequence yet.
    pub(crate) fn mask_target(&mut self, token: usize) {
        let at = self.positions.len() + token;
        self.targets[at] = IGNORED;
    }

    /// Tokens that belong to no sequence yet.
    pub(crate) fn open(&self) -> &[i32] {
        &self.input_ids[self.positions.len()..]
    }
}
