//! Speculation by n-gram lookup: what came before may come again. In: the tokens of a sequence, and how many of the last proposals
//! were accepted. Out: tokens that may come next, those that followed the latest earlier place where the last three stood, or the
//! last two. A proposal that is rejected costs a part of a step, so that whoever is seldom right pauses, and longer each time.

use crate::pages::Tokens;

/// The running average of what is accepted of a step's proposals, below which there is a pause; a new sequence begins above it.
const LEAST: f32 = 0.2;
const FIRST: f32 = 0.3;

/// Weight of the newest step in the average.
const NEWEST: f32 = 0.25;

/// Steps of a pause: the first, and the longest.
const PAUSES: [u32; 2] = [16, 1024];

/// Proposes for one sequence.
#[derive(Debug)]
pub(super) struct Proposer {
    /// Of this step.
    pub proposed: u32,
    /// Of these.
    pub accepted: u32,
    average: f32,
    /// Steps that are left of a pause, and how long the next one is.
    idle: u32,
    pause: u32,
    tokens: Vec<u32>,
}

impl Default for Proposer {
    fn default() -> Proposer {
        let [pause, _] = PAUSES;
        Proposer { proposed: 0, accepted: 0, average: FIRST, idle: 0, pause, tokens: Vec::new() }
    }
}

impl Proposer {
    /// Up to `most` tokens that may come next.
    pub fn propose(&mut self, tokens: &Tokens, most: usize) -> &[u32] {
        self.tokens.clear();
        if most == 0 || self.idle > 0 {
            self.idle = self.idle.saturating_sub(1);
            return &[];
        }
        let Some(from) = find(tokens) else { return &[] };
        let length = tokens.len();
        for at in from..from + most {
            // What repeats itself goes on with what is proposed.
            let token = at.checked_sub(length).map_or_else(|| tokens.get(at), |at| self.tokens[at]);
            self.tokens.push(token);
        }
        &self.tokens
    }

    /// Learns from a step with proposals, once; says how many there were and how many were accepted.
    pub fn learn(&mut self) -> [u64; 2] {
        let step = [std::mem::take(&mut self.proposed), std::mem::take(&mut self.accepted)];
        let [proposed, accepted] = step;
        if proposed > 0 {
            self.average += (accepted as f32 / proposed as f32 - self.average) * NEWEST;
            let [first, longest] = PAUSES;
            if accepted > 0 {
                self.pause = first;
            }
            if self.average < LEAST {
                self.idle = self.pause;
                self.pause = (2 * self.pause).min(longest);
                // One try after the pause, and then the next unless it was right.
                self.average = LEAST;
            }
        }
        step.map(u64::from)
    }
}

/// What followed the latest earlier place of the last three tokens, else of the last two: where it begins.
fn find(tokens: &Tokens) -> Option<usize> {
    let length = tokens.len();
    let last = tokens.get(length.checked_sub(1)?);
    let before = tokens.get(length.checked_sub(2)?);
    let third = length.checked_sub(3).map(|at| tokens.get(at));
    let mut pair = None;
    for at in (1..length - 1).rev() {
        if tokens.get(at) == last && tokens.get(at - 1) == before {
            if at >= 2 && Some(tokens.get(at - 2)) == third {
                return Some(at + 1);
            }
            pair.get_or_insert(at + 1);
        }
    }
    pair
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
            assert_eq!(Proposer::default().propose(&tokens, most), want, "{text:?}");
        }
    }

    #[test]
    fn who_is_seldom_right_pauses_and_tries_again() {
        let tokens = Tokens::new(Prompt::new(vec![1, 2, 1, 2], vec![]), 4);
        let tries = |right: bool| {
            let mut proposer = Proposer::default();
            (0..3000)
                .filter(|_| {
                    let proposed = proposer.propose(&tokens, 4).len() as u32;
                    (proposer.proposed, proposer.accepted) = (proposed, if right { proposed } else { 0 });
                    proposer.learn()[0] > 0
                })
                .count()
        };
        assert_eq!(tries(true), 3000);
        assert!((5..20).contains(&tries(false)), "{}", tries(false));
    }
}
