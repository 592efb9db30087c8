//! Packing: which documents share a sequence. In: lengths, and the most tokens of a sequence. Out: bins of pieces of documents.
//! `bfd` is best-fit decreasing: longest first, equal lengths in their original order, each into the bin with the least room that is
//! enough, the oldest of such bins; else into a new one.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How documents share sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bins {
    /// Each has one of its own, cut to the most tokens
    #[default]
    Simple,
    /// Best-fit decreasing; a document that is too long is cut
    Bfd,
    /// The same, but a document that is too long is split into pieces first, none of which sees the others
    BfdSplit,
}

/// Which end of a document stays where it is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The beginning
    #[default]
    KeepStart,
    /// The end
    KeepEnd,
}

/// Part of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Which document.
    pub document: usize,
    /// Its first token here.
    pub begin: usize,
    /// Behind its last token here.
    pub end: usize,
    /// Its length before it was cut, by which documents are put in order; that of a piece of a split is its own.
    pub whole: usize,
}

impl Slice {
    /// Tokens.
    pub fn len(&self) -> usize {
        self.end - self.begin
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.begin == self.end
    }
}

/// The pieces that documents of these lengths are packed as, before they share bins.
pub fn pieces(lengths: &[usize], most: usize, bins: Bins, truncation: Truncation) -> Vec<Slice> {
    let most = most.max(1);
    let of = |(document, &length): (usize, &usize)| -> Vec<Slice> {
        if bins == Bins::BfdSplit && length > most {
            let begins = (0..length).step_by(most);
            let piece = |begin: usize| {
                let end = (begin + most).min(length);
                Slice { document, begin, end, whole: end - begin }
            };
            return begins.map(piece).collect();
        }
        let kept = length.min(most);
        let begin = if truncation == Truncation::KeepEnd { length - kept } else { 0 };
        vec![Slice { document, begin, end: begin + kept, whole: length }]
    };
    lengths.iter().enumerate().flat_map(of).collect()
}

/// Bins of indices of [`pieces`], none of more than `most` tokens, in the order in which they were begun.
pub fn pack(pieces: &[Slice], most: usize, bins: Bins) -> Vec<Vec<usize>> {
    if bins == Bins::Simple {
        return (0..pieces.len()).map(|i| vec![i]).collect();
    }
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(pieces[i].whole));
    let mut packed: Vec<Vec<usize>> = Vec::new();
    // Bins by the room they have left: the first entry of at least a length is the best fit.
    let mut room: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for i in order {
        let length = pieces[i].len();
        let fit = room.range(length..).find_map(|(&left, of)| of.first().map(|&bin| (left, bin)));
        let (left, bin) = match fit {
            Some((left, bin)) => {
                if let Some(of) = room.get_mut(&left) {
                    of.remove(&bin);
                    if of.is_empty() {
                        room.remove(&left);
                    }
                }
                (left, bin)
            }
            None => {
                packed.push(Vec::new());
                (most.max(length), packed.len() - 1)
            }
        };
        packed[bin].push(i);
        room.entry(left - length).or_default().insert(bin);
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        /// As the rule is written: by looking at every bin.
        #[test]
        fn bins_are_those_of_the_plain_rule(lengths in prop::collection::vec(0_usize..40, 0..60), most in 1_usize..30) {
            for bins in [Bins::Bfd, Bins::BfdSplit] {
                let pieces = pieces(&lengths, most, bins, Truncation::KeepEnd);
                let mut order: Vec<usize> = (0..pieces.len()).collect();
                order.sort_by_key(|&i| std::cmp::Reverse(pieces[i].whole));
                let mut plain: Vec<(usize, Vec<usize>)> = vec![];
                for i in order {
                    let fits = |b: &&mut (usize, Vec<usize>)| b.0 >= pieces[i].len();
                    match plain.iter_mut().filter(fits).min_by_key(|b| b.0) {
                        Some(bin) => {
                            bin.0 -= pieces[i].len();
                            bin.1.push(i);
                        }
                        None => plain.push((most - pieces[i].len(), vec![i])),
                    }
                }
                let packed = pack(&pieces, most, bins);
                prop_assert_eq!(&packed, &plain.into_iter().map(|b| b.1).collect::<Vec<_>>());
                let total: usize = pieces.iter().map(Slice::len).sum();
                let want: usize = lengths.iter().map(|&n| if bins == Bins::Bfd { n.min(most) } else { n }).sum();
                prop_assert_eq!(total, want);
            }
        }
    }
}
