//! E-graph extraction. In: e-classes of e-nodes with costs, and the root e-classes. Out: a selection of one e-node for every
//! e-class that the roots need, in which a shared e-class costs once (DAG cost). Greedy: every e-class keeps its best derivation
//! so far, a selection closed under arguments; unions of derivations are closed, too, and an e-node is refused when its
//! arguments' derivations contain its own e-class, so that no cycle is selected.

use std::collections::{BTreeMap, BTreeSet};

/// The cost of a selection: picoseconds, then e-nodes that the original body does not have, then e-nodes. Of e-nodes of equal
/// cost the first is selected.
pub type ExtractionCost = (u64, u32, u32);

/// An e-node as the extractor sees it.
#[derive(Clone, Debug)]
pub struct ENode {
    /// E-classes of its arguments.
    pub args: Vec<usize>,
    /// Its own cost, without arguments.
    pub cost: ExtractionCost,
}

/// Which equal form is extracted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Extraction {
    /// The form of least cost.
    #[default]
    Cheapest,
    /// The costliest form that the same search finds; tests use it to prove the rules on unusual selections.
    Costliest,
    /// A random form of this seed, for the same purpose.
    Random(u64),
}

/// From e-class to the index of its selected e-node.
pub type Selection = BTreeMap<usize, usize>;

/// Most iterations of local improvement.
const ROUNDS: usize = 4;

/// The selection for `roots`; `None` when some root has no finite term. `classes[c]` are the e-nodes of e-class `c`.
pub fn extract(classes: &[Vec<ENode>], roots: &[usize], extraction: Extraction) -> Option<Selection> {
    match extraction {
        Extraction::Cheapest => {
            let found = Extractor { classes, costliest: false }.derivations();
            let first = selection_for(classes, &found, roots)?;
            Some(improve(classes, &found, roots, first))
        }
        Extraction::Costliest => {
            let found = Extractor { classes, costliest: true }.derivations();
            selection_for(classes, &found, roots)
        }
        Extraction::Random(seed) => {
            let mut dice = classes.to_vec();
            for (c, enodes) in dice.iter_mut().enumerate() {
                for (i, t) in enodes.iter_mut().enumerate() {
                    t.cost = (mix(seed ^ mix(((c as u64) << 20) ^ i as u64)) >> 40, 0, 1);
                }
            }
            let found = Extractor { classes: &dice, costliest: false }.derivations();
            selection_for(&dice, &found, roots)
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

fn sum(a: ExtractionCost, b: ExtractionCost) -> ExtractionCost {
    (a.0.saturating_add(b.0), a.1 + b.1, a.2 + b.2)
}

/// The cost of a selection.
pub fn total(classes: &[Vec<ENode>], selection: &Selection) -> ExtractionCost {
    selection.iter().fold((0, 0, 0), |s, (&c, &t)| sum(s, classes[c][t].cost))
}

/// A selection for one e-class and all e-classes that it depends on.
struct Derivation {
    selection: Selection,
    cost: ExtractionCost,
}

struct Extractor<'a> {
    classes: &'a [Vec<ENode>],
    costliest: bool,
}

impl Extractor<'_> {
    /// The best derivation found of every e-class, by a worklist: an e-class is visited again when the derivation of one of its
    /// arguments improves. Costs are monotone, so the worklist empties.
    fn derivations(&self) -> Vec<Option<Derivation>> {
        let n = self.classes.len();
        let mut users: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); n];
        for (c, enodes) in self.classes.iter().enumerate() {
            enodes.iter().flat_map(|t| &t.args).for_each(|&a| _ = users[a].insert(c));
        }
        let mut best: Vec<Option<Derivation>> = (0..n).map(|_| None).collect();
        let mut todo: BTreeSet<usize> = (0..n).collect();
        // Every e-class is visited once, then the users of improved ones; the limit matters for the costliest form only.
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
            let Some(selection) = union_of(best, &t.args) else { continue };
            if selection.contains_key(&c) {
                continue;
            }
            let cost = sum(total(self.classes, &selection), t.cost);
            let better = match &best[c] {
                None => true,
                Some(b) if self.costliest => cost > b.cost,
                Some(b) => cost < b.cost,
            };
            if better {
                let mut selection = selection;
                selection.insert(c, i);
                best[c] = Some(Derivation { selection, cost });
                improved = true;
            }
        }
        improved
    }
}

/// The union of the derivations of these e-classes; where two select different e-nodes for an e-class, the first counts. Like
/// each derivation the union is closed and acyclic.
fn union_of(best: &[Option<Derivation>], classes: &[usize]) -> Option<Selection> {
    let mut selection = Selection::new();
    for &a in classes {
        for (&c, &t) in &best[a].as_ref()?.selection {
            selection.entry(c).or_insert(t);
        }
    }
    Some(selection)
}

/// The union of the roots' derivations, without e-classes that no root needs.
fn selection_for(classes: &[Vec<ENode>], best: &[Option<Derivation>], roots: &[usize]) -> Option<Selection> {
    reachable(classes, &union_of(best, roots)?, roots)
}

/// The part of a selection that the roots need; `None` when it has a cycle or lacks an e-class.
fn reachable(classes: &[Vec<ENode>], selection: &Selection, roots: &[usize]) -> Option<Selection> {
    /// Depth-first search: 1 marks an e-class on the stack, 2 a finished one.
    fn walk(
        classes: &[Vec<ENode>],
        selection: &Selection,
        c: usize,
        seen: &mut BTreeMap<usize, u8>,
        out: &mut Selection,
    ) -> bool {
        match seen.insert(c, 1) {
            Some(1) => return false,
            Some(_) => {
                seen.insert(c, 2);
                return true;
            }
            None => {}
        }
        let Some(&t) = selection.get(&c) else { return false };
        out.insert(c, t);
        let fine = classes[c][t].args.iter().all(|&a| walk(classes, selection, a, seen, out));
        seen.insert(c, 2);
        fine
    }
    let (mut seen, mut out) = (BTreeMap::new(), Selection::new());
    roots.iter().all(|&r| walk(classes, selection, r, &mut seen, &mut out)).then_some(out)
}

/// Local improvement: changes the e-node of one e-class at a time while the total gets cheaper. It finds sharing between users
/// that the derivation of each user alone does not see.
fn improve(
    classes: &[Vec<ENode>],
    best: &[Option<Derivation>],
    roots: &[usize],
    mut selection: Selection,
) -> Selection {
    let mut cost = total(classes, &selection);
    for _ in 0..ROUNDS {
        let before = cost;
        for c in selection.keys().copied().collect::<Vec<_>>() {
            for (i, t) in classes[c].iter().enumerate() {
                if selection.get(&c).is_none_or(|now| *now == i) {
                    continue;
                }
                let Some(new) = union_of(best, &t.args) else { continue };
                let mut other = selection.clone();
                new.into_iter().for_each(|(k, v)| _ = other.entry(k).or_insert(v));
                other.insert(c, i);
                let Some(other) = reachable(classes, &other, roots) else { continue };
                let cheaper = total(classes, &other);
                if cheaper < cost {
                    (selection, cost) = (other, cheaper);
                }
            }
        }
        if cost == before {
            break;
        }
    }
    selection
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cheapest selection of all, by trying every one.
    fn brute(classes: &[Vec<ENode>], roots: &[usize]) -> Option<ExtractionCost> {
        let mut best: Option<ExtractionCost> = None;
        let mut at = vec![0; classes.len()];
        loop {
            let selection: Selection =
                at.iter().copied().enumerate().filter(|(c, t)| classes[*c].len() > *t).collect();
            if let Some(r) = reachable(classes, &selection, roots) {
                let cost = total(classes, &r);
                best = Some(best.map_or(cost, |b: ExtractionCost| b.min(cost)));
            }
            let Some(c) = (0..at.len()).find(|&c| at[c] + 1 < classes[c].len()) else { return best };
            at[c] += 1;
            at[..c].fill(0);
        }
    }

    /// Classes whose terms may refer to any class, cycles included.
    fn random(seed: u64) -> (Vec<Vec<ENode>>, Vec<usize>) {
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
                terms.push(ENode { args, cost: (next(20), 0, 1) });
            }
            terms.push(ENode {
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
            let found = extract(&classes, &roots, Extraction::Cheapest).unwrap();
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
        let t = |args: &[usize], cost| ENode { args: args.to_vec(), cost: (cost, 0, 1) };
        let classes = vec![
            vec![t(&[], 0)],
            vec![t(&[0], 10)],
            vec![t(&[0], 6), t(&[1], 1)],
            vec![t(&[0], 6), t(&[1], 1)],
            vec![t(&[2, 3], 0)],
        ];
        let found = extract(&classes, &[4], Extraction::Cheapest).unwrap();
        assert_eq!(total(&classes, &found).0, 12);
        let with_user = extract(&classes, &[4, 1], Extraction::Cheapest).unwrap();
        assert_eq!(total(&classes, &with_user).0, 12, "the shared one is there anyway");
    }

    #[test]
    fn cycles_are_never_chosen() {
        // 1 is free behind 2 and 2 behind 1; one of them has to be paid for.
        let t = |args: &[usize], cost| ENode { args: args.to_vec(), cost: (cost, 0, 1) };
        let classes = vec![vec![t(&[], 0)], vec![t(&[2], 0), t(&[0], 9)], vec![t(&[1], 0), t(&[0], 8)]];
        for extraction in
            [Extraction::Cheapest, Extraction::Costliest, Extraction::Random(1), Extraction::Random(2)]
        {
            let found = extract(&classes, &[1, 2], extraction).unwrap();
            assert!(reachable(&classes, &found, &[1, 2]).is_some(), "{extraction:?}");
        }
        let least = extract(&classes, &[1, 2], Extraction::Cheapest).unwrap();
        assert_eq!(total(&classes, &least).0, 8);
        assert_eq!(extract(&[vec![t(&[0], 1)]], &[0], Extraction::Cheapest), None);
    }
}
