//! Batches of the strategies that compare answers: pairs (dpo, orpo, cpo, simpo), groups with rewards (grpo), answers with a
//! label (kto). In: records of a dataset, unpadded. Out: packed sequences, as [`PackedBatch`] has them, in an order that is
//! said here, and what belongs to each. Targets are those of completion tokens only; prompts are masked. Padding exists only in
//! files and in what `astrai data show` prints; no batch has any.

use crate::batch::{Items, PackedBatch};
use crate::data::DataError;

/// A sequence, and which of its tokens are learnt. Equal lengths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Token ids. `[tokens]`
    pub ids: Vec<i32>,
    /// Whether token `t` itself is learnt, that is, is the target of token `t - 1`. `[tokens]`
    pub trained: Vec<bool>,
}

/// A preference: the prompt is in both sequences, masked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pair {
    /// Prompt and the better completion.
    pub chosen: Sample,
    /// Prompt and the worse completion.
    pub rejected: Sample,
    /// Summed log-probabilities of both completions under the reference policy, where they were computed beforehand
    /// (`ref_chosen_logps`, `ref_rejected_logps`).
    pub reference: Option<[f32; 2]>,
}

/// Answers to one prompt, with their rewards.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Group {
    /// Token ids of the prompt.
    pub prompt: Vec<i32>,
    /// The answers without the prompt. `[G]`
    pub responses: Vec<Sample>,
    /// A reward each. `[G]`
    pub rewards: Vec<f32>,
    /// Log-probabilities of the answers' tokens under (the reference, the policy that wrote them), where the data have them. `[G]` lists
    pub logps: [Option<Vec<Vec<f32>>>; 2],
}

/// An answer that is wanted or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labelled {
    /// Prompt, masked, and completion.
    pub sample: Sample,
    /// Whether it is wanted.
    pub desirable: bool,
}

/// `B` pairs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairBatch {
    /// The better ones. `B` sequences
    pub chosen: PackedBatch,
    /// The worse ones, in the same order. `B` sequences
    pub rejected: PackedBatch,
    /// Log-probabilities of (chosen, rejected) under the reference. `[B]`, or empty where the data have none
    pub reference: Vec<[f32; 2]>,
}

/// `B` groups of `G` answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupBatch {
    /// Prompt and answer; answer `g` of group `b` is sequence `b * size + g`. `B * G` sequences
    pub sequences: PackedBatch,
    /// Answers of a group, `G`, the same for all; 0 while the batch is empty.
    pub size: usize,
    /// Rewards, in the order of the sequences. `[B * G]`
    pub rewards: Vec<f32>,
}

/// `B` labelled answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LabelledBatch {
    /// Prompt and completion. `B` sequences
    pub sequences: PackedBatch,
    /// Each prompt with the completion of another record, by which kto estimates the divergence. `B` sequences
    pub mismatched: PackedBatch,
    /// Whether each is wanted. `[B]`
    pub desirable: Vec<bool>,
}

/// What [`Items::append`] and a batch's `fill` need of a batch.
pub trait Batch: Sized {
    /// Removes all; keeps the memory.
    fn clear(&mut self);

    /// Called when the last record has been added.
    fn complete(&mut self) {}

    /// Holds the numbered records of `source` and nothing else; empty after an error.
    ///
    /// # Errors
    /// A record cannot be had.
    fn fill(
        &mut self,
        source: &dyn Items<Self>,
        items: impl IntoIterator<Item = u64>,
    ) -> Result<(), DataError> {
        self.clear();
        let all = items.into_iter().try_for_each(|item| source.append(item, self));
        all.inspect_err(|_| self.clear())?;
        self.complete();
        Ok(())
    }
}

impl Batch for PairBatch {
    fn clear(&mut self) {
        self.chosen.clear();
        self.rejected.clear();
        self.reference.clear();
    }
}

impl Batch for GroupBatch {
    fn clear(&mut self) {
        self.sequences.clear();
        self.rewards.clear();
        self.size = 0;
    }
}

impl Batch for LabelledBatch {
    fn clear(&mut self) {
        self.sequences.clear();
        self.mismatched.clear();
        self.desirable.clear();
    }
}

impl Sample {
    /// Tokens before the first that is learnt.
    pub fn prompt(&self) -> usize {
        self.trained.iter().position(|&t| t).unwrap_or(self.ids.len())
    }
}

impl PairBatch {
    /// Adds a pair. Pairs with log-probabilities of the reference and without do not mix: the caller has checked.
    pub fn push(&mut self, pair: &Pair) {
        self.chosen.push_trained(&pair.chosen.ids, &pair.chosen.trained);
        self.rejected.push_trained(&pair.rejected.ids, &pair.rejected.trained);
        self.reference.extend(pair.reference);
    }

    /// Pairs, `B`.
    pub fn pairs(&self) -> usize {
        self.chosen.sequences()
    }

    /// All sequences for one program: the `B` chosen, then the `B` rejected. `to` is overwritten.
    pub fn joined(&self, to: &mut PackedBatch) {
        to.clear();
        to.extend(&self.chosen);
        to.extend(&self.rejected);
    }
}

impl GroupBatch {
    /// Adds a group.
    ///
    /// # Errors
    /// It has another number of answers than those before it, or not a reward for each.
    pub fn push(&mut self, group: &Group) -> Result<(), DataError> {
        let size = group.responses.len();
        if size == 0 || size != group.rewards.len() || (self.size != 0 && self.size != size) {
            let want = if self.size == 0 { group.rewards.len() } else { self.size };
            return Err(DataError::Options(format!(
                "a group has {size} answers and {} rewards, not {want} of each; group answers alike",
                group.rewards.len()
            )));
        }
        self.size = size;
        for response in &group.responses {
            let ids = [group.prompt.as_slice(), &response.ids].concat();
            let mut trained = vec![false; group.prompt.len()];
            trained.extend_from_slice(&response.trained);
            self.sequences.push_trained(&ids, &trained);
        }
        for (to, of_answers) in self.sequences.logps.iter_mut().zip(&group.logps) {
            for (response, own) in group.responses.iter().zip(of_answers.iter().flatten()) {
                let (prompt, first) = (group.prompt.len(), to.len());
                to.resize(first + prompt + response.ids.len(), 0.0);
                // A token is the target of the one before it.
                let at = (first + prompt).saturating_sub(1);
                to[at..].iter_mut().zip(own.iter().take(response.ids.len())).for_each(|(to, x)| *to = *x);
            }
        }
        self.rewards.extend_from_slice(&group.rewards);
        Ok(())
    }

    /// Groups, `B`.
    pub fn groups(&self) -> usize {
        self.rewards.len() / self.size.max(1)
    }
}

impl LabelledBatch {
    /// Adds an answer, and its prompt with the completion of `other`.
    pub fn push(&mut self, record: &Labelled, other: &Sample) {
        let sample = &record.sample;
        self.sequences.push_trained(&sample.ids, &sample.trained);
        self.desirable.push(record.desirable);
        let (own, answer) = (sample.prompt(), other.prompt());
        let ids = [&sample.ids[..own], &other.ids[answer..]].concat();
        let trained = [&sample.trained[..own], &other.trained[answer..]].concat();
        self.mismatched.push_trained(&ids, &trained);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::IGNORED;

    fn sample(ids: &[i32], prompt: usize) -> Sample {
        Sample { ids: ids.to_vec(), trained: (0..ids.len()).map(|t| t >= prompt).collect() }
    }

    #[test]
    fn chosen_come_before_rejected_and_prompts_are_masked() {
        let mut batch = PairBatch::default();
        let pair =
            |a: &[i32], b: &[i32]| Pair { chosen: sample(a, 2), rejected: sample(b, 2), reference: None };
        batch.push(&pair(&[5, 0, 7], &[5, 0, 8, 9]));
        batch.push(&pair(&[1, 2, 0], &[1, 2, 4]));
        let mut joined = PackedBatch::default();
        batch.joined(&mut joined);
        assert_eq!((batch.pairs(), joined.sequences()), (2, 4));
        assert_eq!(joined.input_ids, [5, 0, 7, 1, 2, 0, 5, 0, 8, 9, 1, 2, 4]);
        assert_eq!(joined.starts, [0, 3, 6, 10, 13]);
        assert_eq!(joined.positions, [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2]);
        let n = IGNORED;
        assert_eq!(joined.targets, [n, 7, n, n, 0, n, n, 8, 9, n, n, 4, n]);
    }

    #[test]
    fn groups_are_of_one_size() {
        let mut batch = GroupBatch::default();
        let group = |n: usize| Group {
            prompt: vec![3, 4],
            responses: vec![sample(&[6], 0); n],
            rewards: vec![0.5; n],
            logps: [None, Some(vec![vec![-1.5]; n])],
        };
        batch.push(&group(2)).unwrap();
        assert!(batch.push(&group(3)).unwrap_err().to_string().contains("not 2 of each"));
        batch.push(&group(2)).unwrap();
        assert_eq!((batch.groups(), batch.size, batch.sequences.sequences()), (2, 2, 4));
        assert_eq!(batch.sequences.targets[..3], [IGNORED, 6, IGNORED]);
        assert_eq!(batch.sequences.logps[1][..6], [0.0, -1.5, 0.0, 0.0, -1.5, 0.0]);
        assert!(
            batch.sequences.logps[0].is_empty() && batch.sequences.logps[1].len() == batch.sequences.tokens()
        );
    }

    #[test]
    fn prompts_get_the_completion_of_another_record() {
        let mut batch = LabelledBatch::default();
        let (a, b) = (sample(&[1, 10], 1), sample(&[2, 3, 20, 21], 2));
        batch.push(&Labelled { sample: a.clone(), desirable: true }, &b);
        batch.push(&Labelled { sample: b, desirable: false }, &a);
        assert_eq!(batch.mismatched.input_ids, [1, 20, 21, 2, 3, 10]);
        assert_eq!(batch.mismatched.starts, [0, 3, 6]);
    }
}
