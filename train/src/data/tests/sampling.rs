//! The order of training.

use super::*;
use proptest::prelude::*;

fn epoch(sampler: &Sampler, epoch: u64) -> Vec<u64> {
    sampler.range(epoch * sampler.items()..(epoch + 1) * sampler.items()).collect()
}

fn is_permutation(mut order: Vec<u64>) -> bool {
    order.sort_unstable();
    order.iter().copied().eq(0..order.len() as u64)
}

#[test]
fn the_order_never_changes() {
    let sampler = Sampler::new(10, 3407).unwrap();
    assert_eq!([epoch(&sampler, 0), epoch(&sampler, 1)], PINNED);
    let large = Sampler::new(1_000_000_007, u64::MAX).unwrap();
    let some = [0, 1, 2, 5_000_000_000_000].map(|global| large.item(global));
    assert_eq!(some, LARGE);
}

const PINNED: [[u64; 10]; 2] = [[6, 2, 3, 4, 5, 7, 1, 0, 9, 8], [9, 6, 5, 8, 2, 3, 0, 1, 4, 7]];
const LARGE: [u64; 4] = [69171521, 353297699, 729563244, 725613480];

#[test]
fn small_numbers_of_items_are_all_visited() {
    for items in 1..200 {
        let sampler = Sampler::new(items, 7).unwrap();
        (0..3).for_each(|e| assert!(is_permutation(epoch(&sampler, e)), "{items} items, epoch {e}"));
    }
    assert!(Sampler::new(0, 1).is_err() && Sampler::new(u64::MAX, 1).is_err());
    let most = Sampler::new(1 << 62, 1).unwrap();
    assert!(most.range(0..50).all(|item| item < 1 << 62));
}

#[test]
fn items_are_spread_evenly() {
    let sampler = Sampler::new(20_000, 1).unwrap();
    let order = epoch(&sampler, 0);
    let moved: f64 = order.iter().enumerate().map(|(i, &item)| (i as f64 - item as f64).abs()).sum();
    let third = moved / 20_000.0 / 20_000.0;
    assert!((third - 1.0 / 3.0).abs() < 0.01, "items move by {third} of the range, not by a third");
    let rising = order.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!((9_700..10_300).contains(&rising), "{rising} of 20000 neighbours rise");
}

#[test]
fn epochs_meet_without_a_gap() {
    let sampler = Sampler::new(10, 5).unwrap();
    let batches: Vec<u64> = (0..5).flat_map(|step| sampler.range(4 * step..4 * step + 4)).collect();
    assert_eq!(batches[..10], epoch(&sampler, 0));
    assert_eq!(batches[10..], epoch(&sampler, 1));
    assert_eq!((sampler.epoch(9), sampler.epoch(10)), (0, 1));
}

/// Ranks take every so many-th number; together they see what one alone would, whatever their number, also when it changes.
#[test]
fn ranks_share_the_order_of_one() {
    let sampler = Sampler::new(37, 5).unwrap();
    let alone: Vec<u64> = sampler.range(0..96).collect();
    for (world, other) in [(4, 2), (3, 8)] {
        let take = |rank: u64, world: u64, from: u64, to: u64| {
            (from + rank..to).step_by(world as usize).map(|g| (g, sampler.item(g)))
        };
        let first = (0..world).flat_map(|rank| take(rank, world, 0, 48));
        let then = (0..other).flat_map(|rank| take(rank, other, 48, 96));
        let mut all: Vec<(u64, u64)> = first.chain(then).collect();
        all.sort_unstable();
        assert_eq!(all.into_iter().map(|(_, item)| item).collect::<Vec<_>>(), alone);
    }
}

proptest! {
    #[test]
    fn an_epoch_is_a_permutation_of_its_own(items in 50u64..3000, seed: u64, number in 0u64..1 << 50) {
        let sampler = Sampler::new(items, seed).unwrap();
        let number = number / items;
        let (this, next) = (epoch(&sampler, number), epoch(&sampler, number + 1));
        prop_assert_ne!(&this, &next);
        prop_assert_ne!(&this, &epoch(&Sampler::new(items, seed ^ 1 << 40).unwrap(), number));
        prop_assert!(is_permutation(this) && is_permutation(next));
    }
}
