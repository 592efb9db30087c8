//! One term for every class that is needed. In: terms with their costs, and the classes that must be computed. Out: a choice
//! whose shared parts cost once. Greedy over the DAG: every class keeps a whole derivation of itself, a set of classes with the
//! term each takes; derivations are closed, so a union of some is one, and a term whose arguments' derivations hold its own
//! class is refused: a cycle cannot be chosen.

use std::collections::{BTreeMap, BTreeSet};

/// What a choice costs: picoseconds, then terms that the body did not have, then terms. Ties between candidates go to the one
/// that stands first.
pub type Cost = (u64, u32, u32);

/// A term as the extractor sees it.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Classes of its arguments.
    pub args: Vec<usize>,
    /// What it costs by itself.
    pub cost: Cost,
}

/// Which choice is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Wanted {
    /// The cheapest.
    #[default]
    Cheapest,
    /// The dearest that the same search finds: rules must hold whatever is chosen.
    Dearest,
    /// One by the dice, for the same end.
    Random(u64),
}

/// Class to candidate.
pub type Choice = BTreeMap<usize, usize>;

/// Rounds in which single choices are improved.
const ROUNDS: usize = 4;

/// The choice for `roots`; `None` when some root has no finite term. `classes[c]` are the candidates of class `c`.
pub fn extract(classes: &[Vec<Candidate>], roots: &[usize], wanted: Wanted) -> Option<Choice> {
    match wanted {
        Wanted::Cheapest => {
            let found = Search { classes, dearest: false }.derivations();
            let joined = union(classes, &found, roots)?;
            Some(improve(classes, &found, roots, joined))
        }
        Wanted::Dearest => {
            let found = Search { classes, dearest: true }.derivations();
            union(classes, &found, roots)
        }
        Wanted::Random(seed) => {
            let mut dice = classes.to_vec();
            for (c, candidates) in dice.iter_mut().enumerate() {
                for (i, t) in candidates.iter_mut().enumerate() {
                    t.cost = (mix(seed ^ mix(((c as u64) << 20) ^ i as u64)) >> 40, 0, 1);
                }
            }
            let found = Search { classes: &dice, dearest: false }.derivations();
            union(&dice, &found, roots)
        }
    }
}

/// SplitMix64.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn sum(a: Cost, b: Cost) -> Cost {
    (a.0.saturating_add(b.0), a.1 + b.1, a.2 + b.2)
}

/// What a choice costs.
pub fn total(classes: &[Vec<Candidate>], choice: &Choice) -> Cost {
    choice.iter().fold((0, 0, 0), |s, (&c, &t)| sum(s, classes[c][t].cost))
}

/// A whole choice for one class and what is behind it.
struct Derivation {
    choice: Choice,
    cost: Cost,
}

struct Search<'a> {
    classes: &'a [Vec<Candidate>],
    dearest: bool,
}

impl Search<'_> {
    /// The best derivation found of every class, by a worklist: a class is looked at again when one of its arguments
    /// improves. Costs change in one direction only, so it ends.
    fn derivations(&self) -> Vec<Option<Derivation>> {
        let n = self.classes.len();
        let mut users: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); n];
        for (c, candidates) in self.classes.iter().enumerate() {
            candidates.iter().flat_map(|t| &t.args).for_each(|&a| _ = users[a].insert(c));
        }
        let mut best: Vec<Option<Derivation>> = (0..n).map(|_| None).collect();
        let mut todo: BTreeSet<usize> = (0..n).collect();
        // Every class once in order, then whatever an improvement touched; the bound cuts what is far from done,
        // the search for the dearest most of all.
        let mut left = 8 * n.max(64);
        while let Some(c) = todo.pop_first() {
            left -= 1;
            if left == 0 {
                break;
            }
            if self.improve(c, &mut best) {
                todo.extend(&users[c]);
            }
        }
        best
    }

    fn improve(&self, c: usize, best: &mut [Option<Derivation>]) -> bool {
        let mut improved = false;
        for (i, t) in self.classes[c].iter().enumerate() {
            let Some(choice) = joined(best, &t.args) else { continue };
            if choice.contains_key(&c) {
                continue;
            }
            let cost = sum(total(self.classes, &choice), t.cost);
            let better = match &best[c] {
                None => true,
                Some(b) if self.dearest => cost > b.cost,
                Some(b) => cost < b.cost,
            };
            if better {
                let mut choice = choice;
                choice.insert(c, i);
                best[c] = Some(Derivation { choice, cost });
                improved = true;
            }
        }
        improved
    }
}

/// The union of the derivations of these classes, the first of two terms for one class; closed and without cycles like each of
/// them, since what the first holds leads nowhere out of it.
fn joined(best: &[Option<Derivation>], classes: &[usize]) -> Option<Choice> {
    let mut choice = Choice::new();
    for &a in classes {
        for (&c, &t) in &best[a].as_ref()?.choice {
            choice.entry(c).or_insert(t);
        }
    }
    Some(choice)
}

/// The roots' derivations as one, without what none of them needs.
fn union(classes: &[Vec<Candidate>], best: &[Option<Derivation>], roots: &[usize]) -> Option<Choice> {
    reachable(classes, &joined(best, roots)?, roots)
}

/// The part of a choice that the roots need; `None` when it has a cycle or a hole.
fn reachable(classes: &[Vec<Candidate>], choice: &Choice, roots: &[usize]) -> Option<Choice> {
    /// Depth first: 1 for what is being looked at, 2 for what is done.
    fn walk(
        classes: &[Vec<Candidate>],
        choice: &Choice,
        c: usize,
        seen: &mut BTreeMap<usize, u8>,
        out: &mut Choice,
    ) -> bool {
        match seen.insert(c, 1) {
            Some(1) => return false,
            Some(_) => {
                seen.insert(c, 2);
                return true;
            }
            None => {}
        }
        let Some(&t) = choice.get(&c) else { return false };
        out.insert(c, t);
        let fine = classes[c][t].args.iter().all(|&a| walk(classes, choice, a, seen, out));
        seen.insert(c, 2);
        fine
    }
    let (mut seen, mut out) = (BTreeMap::new(), Choice::new());
    roots.iter().all(|&r| walk(classes, choice, r, &mut seen, &mut out)).then_some(out)
}

/// Changes one class's term at a time as long as the whole gets cheaper: what two users share, each alone did not see.
fn improve(
    classes: &[Vec<Candidate>],
    best: &[Option<Derivation>],
    roots: &[usize],
    mut choice: Choice,
) -> Choice {
    let mut cost = total(classes, &choice);
    for _ in 0..ROUNDS {
        let before = cost;
        for c in choice.keys().copied().collect::<Vec<_>>() {
            for (i, t) in classes[c].iter().enumerate() {
                if choice.get(&c).is_none_or(|now| *now == i) {
                    continue;
                }
                let Some(new) = joined(best, &t.args) else { continue };
                let mut other = choice.clone();
                new.into_iter().for_each(|(k, v)| _ = other.entry(k).or_insert(v));
                other.insert(c, i);
                let Some(other) = reachable(classes, &other, roots) else { continue };
                let cheaper = total(classes, &other);
                if cheaper < cost {
                    (choice, cost) = (other, cheaper);
                }
            }
        }
        if cost == before {
            break;
        }
    }
    choice
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cheapest choice of all, by trying every one.
    fn brute(classes: &[Vec<Candidate>], roots: &[usize]) -> Option<Cost> {
        let mut best: Option<Cost> = None;
        let mut at = vec![0; classes.len()];
        loop {
            let choice: Choice =
                at.iter().copied().enumerate().filter(|(c, t)| classes[*c].len() > *t).collect();
            if let Some(r) = reachable(classes, &choice, roots) {
                let cost = total(classes, &r);
                best = Some(best.map_or(cost, |b: Cost| b.min(cost)));
            }
            let Some(c) = (0..at.len()).find(|&c| at[c] + 1 < classes[c].len()) else { return best };
            at[c] += 1;
            at[..c].fill(0);
        }
    }

    /// Classes whose terms may refer to any class, cycles included.
    fn random(seed: u64) -> (Vec<Vec<Candidate>>, Vec<usize>) {
        let mut state = seed;
        let mut next = move |n: u64| {
            state = state.wrapping_add(1);
            mix(mix(state)) % n
        };
        let n = 4 + next(4) as usize;
        let mut classes = Vec::new();
        for c in 0..n {
            let mut terms = vec![];
            for _ in 0..1 + next(3) {
                let count = next(3);
                let args = (0..count)
                    .map(|_| if next(4) == 0 { next(n as u64) } else { next(c as u64 + 1) } as usize);
                let args: Vec<usize> = args.collect();
                terms.push(Candidate { args, cost: (next(20), 0, 1) });
            }
            terms.push(Candidate {
                args: (c > 0).then(|| c - 1).into_iter().collect(),
                cost: (10 + next(20), 0, 1),
            });
            classes.push(terms);
        }
        (classes, vec![n - 1, n / 2])
    }

    #[test]
    fn tiny_graphs_as_by_trying_everything() {
        let (mut equal, mut all) = (0, 0);
        for seed in 0..400 {
            let (classes, roots) = random(seed * 1000);
            let best = brute(&classes, &roots).unwrap();
            let found = extract(&classes, &roots, Wanted::Cheapest).unwrap();
            assert_eq!(
                reachable(&classes, &found, &roots).as_ref(),
                Some(&found),
                "closed and without cycles"
            );
            let cost = total(&classes, &found);
            assert!(cost >= best, "{seed}: {cost:?} is less than the least {best:?}");
            assert!(cost.0 <= best.0 + best.0 / 2 + 1, "{seed}: {cost:?} beside {best:?}");
            all += 1;
            equal += (cost == best) as usize;
        }
        println!("{equal} of {all} are the least");
        assert!(equal * 100 >= all * 97, "{equal} of {all} are the least");
    }

    #[test]
    fn what_is_shared_costs_once() {
        // 0: leaf. 1: costs 10. 2, 3: 6 alone, or 1 on the shared 1. 4: both.
        let t = |args: &[usize], cost| Candidate { args: args.to_vec(), cost: (cost, 0, 1) };
        let classes = vec![
            vec![t(&[], 0)],
            vec![t(&[0], 10)],
            vec![t(&[0], 6), t(&[1], 1)],
            vec![t(&[0], 6), t(&[1], 1)],
            vec![t(&[2, 3], 0)],
        ];
        let found = extract(&classes, &[4], Wanted::Cheapest).unwrap();
        assert_eq!(total(&classes, &found).0, 12);
        let with_user = extract(&classes, &[4, 1], Wanted::Cheapest).unwrap();
        assert_eq!(total(&classes, &with_user).0, 12, "the shared one is there anyway");
    }

    #[test]
    fn cycles_are_never_chosen() {
        // 1 is free behind 2 and 2 behind 1; one of them has to be paid for.
        let t = |args: &[usize], cost| Candidate { args: args.to_vec(), cost: (cost, 0, 1) };
        let classes = vec![vec![t(&[], 0)], vec![t(&[2], 0), t(&[0], 9)], vec![t(&[1], 0), t(&[0], 8)]];
        for wanted in [Wanted::Cheapest, Wanted::Dearest, Wanted::Random(1), Wanted::Random(2)] {
            let found = extract(&classes, &[1, 2], wanted).unwrap();
            assert!(reachable(&classes, &found, &[1, 2]).is_some(), "{wanted:?}");
        }
        let least = extract(&classes, &[1, 2], Wanted::Cheapest).unwrap();
        assert_eq!(total(&classes, &least).0, 8);
        assert_eq!(extract(&[vec![t(&[0], 1)]], &[0], Wanted::Cheapest), None);
    }
}
