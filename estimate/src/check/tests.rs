//! Which of several stretches counts, and which of their launches.

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
fn the_middle_step_of_the_middle_stretch_counts() {
    let checked = counted(&[&[1.3, 1.2, 0.1], &[1.0, 1.0, 5.0], &[0.4], &[1.5], &[0.9, 0.9]]);
    assert_eq!((checked.measured, checked.predicted, checked.error()), (1.0, 1.0, 0.0));
    assert!((checked.mean - 13.3 / 10.0).abs() < 1e-9, "{}", checked.mean);
    assert_eq!(counted(&[&[1.2], &[0.4], &[1.3]]).measured, 1.2);
    // Of two the faster stretch.
    assert_eq!(counted(&[&[1.3], &[1.2]]).measured, 1.2);
}

#[test]
fn launches_are_those_of_steps_at_like_speeds() {
    let stretch = |read, steps| Stretch {
        seconds: vec![1.0],
        profiles: vec![vec![Profile::default(); 2]; steps],
        now: Some(Speeds { read, exchange: None, product: None }),
    };
    let stretches = [stretch(30e9, 2), stretch(60e9, 3), stretch(31e9, 1)];
    let counted = |now: Option<Speeds>| steps_at(now, &stretches).len();
    assert_eq!((counted(stretches[0].now), counted(stretches[1].now), counted(None)), (3, 3, 6));
    assert_eq!(
        (middle(vec![5.0, 1.0, 9.0]), middle(vec![2.0, 1.0]), middle(vec![])),
        (Some(5.0), Some(1.0), None)
    );
}
