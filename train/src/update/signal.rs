//! How much of a gradient is signal, by Adam's moments. In: the moments of all tensors after a step, corrected. Out: the sums over all elements of the first
//! one's square and of the second; the signal is the former, and what the latter has beyond it is noise.

use super::{scalar, sum_of_all};
use astrai_ir::{Graph, IrError, NodeId};

/// The sums so far, parameters and results of a tensor's update, and outputs of the program.
pub const SUMS: [&str; 2] = ["moment_square", "moment_of_squares"];

/// Adds a tensor's moments to the sums.
pub(super) fn add(g: &mut Graph, first: NodeId, second: NodeId) -> Result<(), IrError> {
    let square = g.mul(first, first)?;
    for (name, x) in SUMS.into_iter().zip([square, second]) {
        let (before, own) = (scalar(g, name)?, sum_of_all(g, x)?);
        let sum = g.add(before, own)?;
        g.set_output(name, sum)?;
    }
    Ok(())
}

/// Signal over noise in decibels; none where there is no noise, as at the first step.
pub fn ratio([square, of_squares]: [f64; 2]) -> Option<f64> {
    let ratio = square / (of_squares - square);
    (ratio.is_finite() && ratio > 0.0).then(|| 10.0 * ratio.log10())
}

#[cfg(test)]
mod tests {
    use super::ratio;

    #[test]
    fn decibels_by_hand() {
        assert_eq!(ratio([1.0, 11.0]), Some(-10.0));
        assert_eq!([[1.0, 1.0], [1.0, 0.5], [f64::NAN, 1.0]].map(ratio), [None; 3]);
    }
}
