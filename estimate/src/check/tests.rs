//! Which of several stretches counts.

use super::*;
use crate::hardware::Hardware;

fn counted(stretches: &[&[f64]]) -> Checked {
    let mut hardware = Hardware::open("h100-sxm").unwrap();
    hardware.kernels.step = 1.0;
    let of = |seconds: &&[f64]| Stretch { seconds: seconds.to_vec(), ..Stretch::default() };
    let measured =
        Measured { programs: vec![("forward", vec![])], stretches: stretches.iter().map(of).collect() };
    beside(measured, &hardware).unwrap()
}

#[test]
fn of_five_stretches_neither_the_slow_ones_nor_the_one_that_is_far_too_fast_counts() {
    let checked = counted(&[&[1.2, 1.3], &[1.1, 1.0], &[0.4], &[1.5], &[1.1, 1.1]]);
    assert_eq!((checked.measured, checked.predicted, checked.error()), (1.0, 1.0, 0.0));
    assert!((checked.mean - 8.7 / 8.0).abs() < 1e-9, "{}", checked.mean);
    // Of three the middle one.
    assert_eq!(counted(&[&[1.2], &[0.4], &[1.3]]).measured, 1.2);
    assert_eq!(counted(&[&[1.3, 1.2]]).measured, 1.2);
}
