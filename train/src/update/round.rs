//! Rounding at random (stochastic rounding). In: f32 numbers and two counters. Out: the same in bf16, each the nearest below or above with such
//! chances that the mean is the number itself; a number that bf16 has stays as it is. The draws are a function of the counters and of an
//! element's place, so that a run that goes on draws the same, and so do ranks that hold the same weight.

use astrai_ir::ops::{CompareKind, Input, Random, RandomKind, UnaryKind};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Type};

/// Counters of the draws, i64: the seed, a scalar, and a number of each tensor, `[tensors]`, which differs from step to step.
pub const COUNTERS: [&str; 2] = ["round_seed", "round_draw"];
/// The random stream; weights and noise are drawn from others.
const STREAM: u32 = 0x726f_756e;

/// The counters as parameters of a tensor's update.
pub(super) fn counters(g: &mut Graph) -> Result<[NodeId; 2], IrError> {
    let mut counter = |name: &str| g.push(Input { name: name.into(), ty: Type::scalar(DType::I64) }, &[]);
    Ok([counter(COUNTERS[0])?, counter(COUNTERS[1])?])
}

/// The counter of this name for a tensor of so many.
pub(super) fn counter_of(g: &mut Graph, name: &str, (at, count): (usize, usize)) -> Result<NodeId, IrError> {
    if name == COUNTERS[0] {
        return g.push(Input { name: name.into(), ty: Type::scalar(DType::I64) }, &[]);
    }
    let ty = Type::new(DType::I64, [Dim::from(count)]);
    let all = g.push(Input { name: name.into(), ty }, &[])?;
    let one = g.slice(all, 0, Dim::from(at), Dim::from(1))?;
    g.reshape(one, vec![])
}

/// `x` rounded to bf16. The neighbour on the other side of `x` is what 5/8 to 5/4 of the distance from the nearest rounds to.
pub(super) fn at_random(g: &mut Graph, x: NodeId, draws: [NodeId; 2]) -> Result<NodeId, IrError> {
    let nearest = g.cast(x, DType::BF16)?;
    let near = g.cast(nearest, DType::F32)?;
    let off = g.sub(x, near)?;
    let size = g.unary(UnaryKind::Abs, near)?;
    let reach = g.scale(size, 1.25 / 256.0)?;
    let back = g.unary(UnaryKind::Neg, reach)?;
    let zero = g.fill(off, 0.0)?;
    let below = g.compare(CompareKind::Lt, off, zero)?;
    let reach = g.select(below, back, reach)?;
    let beyond = g.add(near, reach)?;
    let beyond = g.cast(beyond, DType::BF16)?;
    let other = g.cast(beyond, DType::F32)?;
    let gap = g.sub(other, near)?;
    // Which of the two is drawn: the other with the part of the gap that x is off.
    let ty = g.ty(x).clone();
    let drawn = g.push(Random { kind: RandomKind::Uniform, ty, stream: STREAM }, &draws)?;
    let reached = g.mul(drawn, gap)?;
    let [reached, off] = [reached, off].map(|x| g.unary(UnaryKind::Abs, x));
    let beyond_it = g.compare(CompareKind::Lt, reached?, off?)?;
    let taken = g.select(beyond_it, other, near)?;
    g.cast(taken, DType::BF16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use astrai_ir::{Precision, Sizes, Tensor, eval};
    use std::collections::HashMap;

    const EACH: usize = 4096;

    /// `EACH` numbers of each of these, rounded by draw number `draw`.
    fn rounded(all: &[f32], draw: i64) -> Vec<Vec<f64>> {
        let mut g = Graph::default();
        let x = g.input("x", DType::F32, vec![Dim::from(all.len()), Dim::from(EACH)]).unwrap();
        let draws = counters(&mut g).unwrap();
        let y = at_random(&mut g, x, draws).unwrap();
        g.set_output("y", y).unwrap();
        let values: Vec<f32> = all.iter().flat_map(|x| [*x; EACH]).collect();
        let counter = |x: i64| Tensor::int(DType::I64, &[], vec![x]);
        let leaves = HashMap::from([
            ("x".to_string(), Tensor::f32(&[all.len(), EACH], &values)),
            (COUNTERS[0].to_string(), counter(7)),
            (COUNTERS[1].to_string(), counter(draw)),
        ]);
        let out = eval(&g, &leaves, &Sizes::new(), Precision { exact: false }).unwrap();
        out[0].1.reals().chunks(EACH).map(<[f64]>::to_vec).collect()
    }

    /// Inside a power of two, just below and above one, tiny, negative, and numbers that bf16 has.
    #[test]
    fn the_mean_is_the_number_and_each_is_a_neighbour() {
        let kept = [1.0, -0.75, 0.0, 2f32.powi(-100), f32::INFINITY];
        let between = [1.001f32, 1.0039, 0.9999, 2.0001, 1.9999, -3.3333, 1e-20, -7.7e12];
        let all = [&kept[..], &between].concat();
        for (x, seen) in all.iter().zip(rounded(&all, 3)) {
            let x = f64::from(*x);
            if seen.iter().all(|y| *y == x) {
                assert!(DType::BF16.round(x) == x, "{x} is none of bf16");
                continue;
            }
            let (least, most) = seen.iter().fold((f64::MAX, f64::MIN), |(a, b), y| (a.min(*y), b.max(*y)));
            assert!(
                least < x && x < most && seen.iter().all(|y| *y == least || *y == most),
                "{x}: {least} {most}"
            );
            let gap = most - least;
            assert!(gap <= x.abs() / 127.9, "{x}: {least} and {most} are no neighbours");
            let mean = seen.iter().sum::<f64>() / EACH as f64;
            // A fair coin's mean is off by 1/128 of the gap at one standard deviation.
            assert!((mean - x).abs() < 4.0 * gap / 128.0, "{x}: mean {mean}");
        }
        assert_eq!(rounded(&between, 3), rounded(&between, 3));
        assert_ne!(rounded(&between, 3), rounded(&between, 4));
    }
}
