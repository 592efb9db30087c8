//! Speculation by n-gram lookup: what came before may come again. In: the tokens of a sequence, and how many of the last proposals
//! were accepted. Out: tokens that may come next, those that followed the latest earlier place where the last three stood, or the
//! last two. Where these stood is kept, token by token, so that a step costs the same however long a sequence is. A proposal that is rejected
//! costs a part of a step: so who is seldom right proposes few tokens, then pauses, and longer each time; and who is new begins with what
//! those before it learnt.

use crate::pages::Tokens;
use std::collections::HashMap;

/// The running average of what is accepted of a step's proposals, below which there is a pause; the first sequence begins above it.
const LEAST: f32 = 0.2;
const FIRST: f32 = 0.3;

/// Weight of the newest step in a sequence's average, and in that of all.
const NEWEST: f32 = 0.25;
const NEWEST_OF_ALL: f32 = 0.05;

/// Steps of a pause: the first, and the longest.
const PAUSES: [u32; 2] = [16, 1024];

/// What all sequences together have learnt: the running average of what was accepted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experience(f32);

impl Default for Experience {
    fn default() -> Experience {
        Experience(FIRST)
    }
}

/// Proposes for one sequence.
#[derive(Debug)]
pub(super) struct Proposer {
    /// Of this step.
    pub proposed: u32,
    /// Of these.
    pub accepted: u32,
    average: f32,
    /// Below this part a pause pays.
    least: f32,
    /// Steps that are left of a pause, and how long the next one is.
    idle: u32,
    pause: u32,
    seen: Seen,
    tokens: Vec<u32>,
    /// What a draft model proposes for the coming step.
    pub suggested: Vec<u32>,
}

impl Proposer {
    /// For a new sequence, where a proposal costs this part of a step.
    pub fn new(experience: Experience, cost: f32) -> Proposer {
        let ([pause, _], Experience(average), least) = (PAUSES, experience, LEAST.max(cost));
        let (seen, tokens, suggested) = (Seen::default(), Vec::new(), Vec::new());
        let idle = if average < least { pause } else { 0 };
        let average = average.max(least);
        Proposer { proposed: 0, accepted: 0, average, least, idle, pause, seen, tokens, suggested }
    }

    /// How many of `most` tokens are worth a try in the coming step: few while few are accepted, none in a pause.
    pub fn worth(&mut self, most: usize) -> usize {
        if most == 0 || self.idle > 0 {
            self.idle = self.idle.saturating_sub(1);
            return 0;
        }
        // After a pause one is tried, whatever it costs.
        let more = if self.average > self.least { (self.average * most as f32) as usize } else { 0 };
        (1 + more).min(most)
    }

    /// Up to `most` tokens that may come next.
    pub fn propose(&mut self, tokens: &Tokens, most: usize) -> &[u32] {
        self.tokens.clear();
        let few = self.worth(most);
        if few == 0 {
            return &[];
        }
        let Some(from) = self.seen.find(tokens) else { return &[] };
        let length = tokens.len();
        for at in from..from + few {
            // What repeats itself goes on with what is proposed.
            let token = at.checked_sub(length).map_or_else(|| tokens.get(at), |at| self.tokens[at]);
            self.tokens.push(token);
        }
        &self.tokens
    }

    /// Learns from a step with proposals, once; says how many there were and how many were accepted. A proposal costs this part of a
    /// step: where fewer are accepted, there is a pause.
    pub fn learn(&mut self, Experience(all): &mut Experience, cost: f32) -> [u64; 2] {
        let step = [std::mem::take(&mut self.proposed), std::mem::take(&mut self.accepted)];
        let [proposed, accepted] = step;
        if proposed > 0 {
            let part = accepted as f32 / proposed as f32;
            *all += (part - *all) * NEWEST_OF_ALL;
            self.average += (part - self.average) * NEWEST;
            let [first, longest] = PAUSES;
            if accepted > 0 {
                self.pause = first;
            }
            self.least = LEAST.max(cost);
            if self.average < self.least {
                self.idle = self.pause;
                self.pause = (2 * self.pause).min(longest);
                // One try after the pause, and then the next unless it was right.
                self.average = self.least;
            }
        }
        step.map(u64::from)
    }
}

/// Where the latest of each three tokens, and of each two, end.
#[derive(Debug, Default)]
struct Seen {
    threes: HashMap<[u32; 3], u32>,
    twos: HashMap<[u32; 2], u32>,
    /// Tokens at whose places something may end that is known.
    known: usize,
}

impl Seen {
    /// What followed the latest earlier place of the last three tokens, else of the last two: where it begins.
    fn find(&mut self, tokens: &Tokens) -> Option<usize> {
        let last = tokens.len().checked_sub(1)?;
        let two = |at: usize| Some([tokens.get(at.checked_sub(1)?), tokens.get(at)]);
        let three = |at: usize| Some([tokens.get(at.checked_sub(2)?), tokens.get(at - 1), tokens.get(at)]);
        for at in self.known..last {
            two(at).map(|two| self.twos.insert(two, at as u32));
            three(at).map(|three| self.threes.insert(three, at as u32));
        }
        self.known = last;
        let found = three(last).and_then(|three| self.threes.get(&three));
        let found = found.or_else(|| two(last).and_then(|two| self.twos.get(&two)));
        found.map(|at| *at as usize + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Prompt;

    #[test]
    fn what_followed_is_proposed_again() {
        for (text, most, want) in [
            (&[1, 2, 3, 4, 5, 1, 2, 3][..], 3, &[4, 5, 1][..]),
            (&[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1, &[4]),
            (&[1, 2, 3, 4, 9, 2, 3, 5, 7, 2, 3], 1, &[5]),
            (&[7, 7, 7], 4, &[7, 7, 7, 7]),
            (&[1, 2, 1, 2], 4, &[1, 2, 1, 2]),
            (&[1, 2, 3, 4], 4, &[]),
            (&[1, 2, 1, 2], 0, &[]),
            (&[1], 4, &[]),
        ] {
            let tokens = Tokens::new(Prompt::new(text.to_vec(), vec![]), 4);
            let mut proposer = Proposer::new(Experience(1.0), 0.0);
            assert_eq!(proposer.propose(&tokens, most), want, "{text:?}");
        }
    }

    /// Found step by step as in a walk over all that came before.
    #[test]
    fn places_are_found_as_by_a_walk() {
        let (mut seen, mut state) = (Seen::default(), 7_u32);
        let mut tokens = Tokens::new(Prompt::new(vec![1, 2, 3], vec![]), 4);
        for step in 0..400 {
            let length = tokens.len();
            let ends = |n: usize| {
                let same = |at: &usize| (0..n).all(|i| tokens.get(at - i) == tokens.get(length - 1 - i));
                (n - 1..length - 1).rev().find(same).map(|at| at + 1)
            };
            // Some steps do not look.
            if step % 3 != 1 {
                assert_eq!(seen.find(&tokens), ends(3).or_else(|| ends(2)), "{step}");
            }
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            tokens.push((state >> 24) % 6);
        }
    }

    #[test]
    fn what_costs_much_is_tried_once_after_a_pause() {
        let cost = 0.9;
        let mut proposer = Proposer::new(Experience(0.3), cost);
        let mut tries = || (0..10_000).map(|_| proposer.worth(4)).find(|n| *n > 0);
        assert_eq!(tries(), Some(1), "a pause, then one");
        assert_eq!(Proposer::new(Experience(1.0), cost).worth(4), 4);
    }

    #[test]
    fn who_is_seldom_right_pauses_and_tries_again() {
        let tokens = Tokens::new(Prompt::new(vec![1, 2, 1, 2], vec![]), 4);
        let mut all = Experience::default();
        let mut tries = |right: bool, steps: u32| {
            let mut proposer = Proposer::new(all, 0.0);
            let mut of_step = || {
                let proposed = proposer.propose(&tokens, 4).len() as u32;
                (proposer.proposed, proposer.accepted) = (proposed, if right { proposed } else { 0 });
                proposer.learn(&mut all, 0.0)
            };
            let each: Vec<u64> = (0..steps).map(|_| of_step()[0]).collect();
            [each.iter().filter(|n| **n > 0).count() as u64, each.iter().sum()]
        };
        let [steps, tokens] = tries(true, 3000);
        assert!(steps == 3000 && tokens > 11_900, "{tokens}");
        let [steps, tokens] = tries(false, 3000);
        assert!((5..30).contains(&steps) && tokens < 40, "{steps} {tokens}");
        // Many short answers: those that come later wait before they try, and try with one token.
        let tokens: Vec<u64> = (0..100).map(|_| tries(false, 64)[1]).collect();
        assert!(tokens[50..].iter().all(|n| *n <= 2), "{tokens:?}");
        // Whoever is right again is believed again.
        let right: u64 = (0..20).map(|_| tries(true, 64)[1]).sum();
        assert!(right > 20 * 64 * 2, "{right}");
    }
}
