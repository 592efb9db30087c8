//! `dot`: contraction of two tensors (matrix product and its generalisations). Its dimension numbers, the batched and the
//! contracted axes, are attributes, so that no transposed variant exists.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::shard::{Label, Propagate, ShardingRule};
use crate::tensor::{strides, unravel};
use crate::{Dim, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Sum of products over the contracted axes. The result's axes are the batch axes, then the left's free axes, then the
/// right's free axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dot {
    /// Batch dimensions: pairs of (left, right) axes.
    pub batch: Vec<(usize, usize)>,
    /// Contracting dimensions: pairs of (left, right) axes.
    pub contract: Vec<(usize, usize)>,
}

/// The left or the right one of a pair of axes.
type Axis = fn(&(usize, usize)) -> usize;

impl Dot {
    /// Free axes of the left argument: neither batched nor contracted, ascending.
    pub fn left_free(&self, rank: usize) -> Vec<usize> {
        self.free(rank, |p| p.0)
    }

    /// Free axes of the right argument: neither batched nor contracted, ascending.
    pub fn right_free(&self, rank: usize) -> Vec<usize> {
        self.free(rank, |p| p.1)
    }

    /// Whether sums run over the first axes of both sides of these ranks, the rows, as those of a gradient of weights do, which has no batch.
    pub fn over_rows(&self, [left, right]: [usize; 2]) -> bool {
        let before = |free: Vec<usize>, axis: usize| free.first().is_some_and(|first| axis < *first);
        let rows =
            |&(a, b): &(usize, usize)| before(self.left_free(left), a) && before(self.right_free(right), b);
        self.batch.is_empty() && !self.contract.is_empty() && self.contract.iter().all(rows)
    }

    fn free(&self, rank: usize, side: Axis) -> Vec<usize> {
        let used: Vec<usize> = self.batch.iter().chain(&self.contract).map(side).collect();
        (0..rank).filter(|a| !used.contains(a)).collect()
    }

    fn check(&self, l: &Type, r: &Type) -> Result<(), String> {
        float("arguments", l)?;
        if l.dtype != r.dtype {
            return Err(format!("arguments must have one dtype, got {l} and {r}"));
        }
        let (mut left, mut right): (Vec<_>, Vec<_>) =
            self.batch.iter().chain(&self.contract).copied().unzip();
        left.sort_unstable();
        right.sort_unstable();
        let distinct = |v: &[usize], rank| v.is_sorted_by(|a, b| a < b) && v.last().is_none_or(|&a| a < rank);
        if !distinct(&left, l.rank()) || !distinct(&right, r.rank()) {
            return Err(format!(
                "dimension numbers {:?} {:?} do not fit {l} and {r}",
                self.batch, self.contract
            ));
        }
        for &(a, b) in self.batch.iter().chain(&self.contract) {
            if l.shape[a] != r.shape[b] {
                return Err(format!("axis {a} of {l} and axis {b} of {r} differ"));
            }
        }
        Ok(())
    }
}

impl Operator for Dot {
    const NAME: &'static str = "dot";
    /// Sums of many products: the error grows with the square root of their number at worst seen.
    const TOLERANCE: [f64; 2] = [16.0, 1e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let [l, r] = cx.exactly()?;
        self.check(l, r)?;
        let batch = self.batch.iter().map(|p| l.shape[p.0].clone());
        let left = self.left_free(l.rank()).into_iter().map(|a| l.shape[a].clone());
        let right = self.right_free(r.rank()).into_iter().map(|a| r.shape[a].clone());
        Ok(vec![Type::new(l.dtype, batch.chain(left).chain(right))])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let (lr, rr) = (cx.args[0].rank(), cx.args[1].rank());
        // Labels are the left's axes and, behind them, the right's free ones.
        let left: Vec<Label> = (0..lr).map(Some).collect();
        let mut right: Vec<Label> = (0..rr).map(|d| Some(lr + d)).collect();
        self.batch.iter().chain(&self.contract).for_each(|p| right[p.1] = Some(p.0));
        let batch = self.batch.iter().map(|p| Some(p.0));
        let free = self.right_free(rr).into_iter().map(|d| Some(lr + d));
        let out = batch.chain(self.left_free(lr).into_iter().map(Some)).chain(free).collect();
        let sums: Vec<usize> = self.contract.iter().map(|p| p.0).collect();
        [cx.labelled(&[left, right], &[out], &sums), cx.linear(&[&[0], &[1]])].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [l, r] = cx.args else { return Err("takes 2 arguments".into()) };
        let (ls, rs) = (strides(&l.shape), strides(&r.shape));
        let (lf, rf) = (self.left_free(l.shape.len()), self.right_free(r.shape.len()));
        let sizes: Vec<usize> = self.contract.iter().map(|p| l.shape[p.0]).collect();
        let steps: Vec<(usize, usize)> = (0..sizes.iter().product())
            .map(|k| {
                let at = unravel(k, &sizes);
                let zip = || at.iter().zip(&self.contract);
                (zip().map(|(i, p)| i * ls[p.0]).sum(), zip().map(|(i, p)| i * rs[p.1]).sum())
            })
            .collect();
        let (lv, rv) = (l.reals(), r.reals());
        cx.each(|o| {
            let at = unravel(o, cx.shape());
            let (mut lo, mut ro) = (0, 0);
            for (i, p) in at.iter().zip(&self.batch) {
                lo += i * ls[p.0];
                ro += i * rs[p.1];
            }
            let (at_l, at_r) = at[self.batch.len()..].split_at(lf.len());
            lo += at_l.iter().zip(&lf).map(|(i, &a)| i * ls[a]).sum::<usize>();
            ro += at_r.iter().zip(&rf).map(|(i, &a)| i * rs[a]).sum::<usize>();
            steps.iter().map(|(a, b)| lv[lo + a] * rv[ro + b]).sum()
        })
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (l, r, grad) = (cx.args[0], cx.args[1], cx.grad());
        let g = &mut *cx.graph;
        let (lr, rr) = (g.ty(l).rank(), g.ty(r).rank());
        let (lf, rf, nb) = (self.left_free(lr), self.right_free(rr), self.batch.len());
        // dl[batch, left, contract] = grad · r over the right's free axes; axes come out in that order and are put back. dr alike.
        let mut cotangent =
            |own: Axis, others: Axis, other: NodeId, free: &[usize], summed: &[usize], at: usize| {
                let batch = self.batch.iter().enumerate().map(|(i, p)| (i, others(p))).collect();
                let contract = summed.iter().enumerate().map(|(i, &a)| (at + i, a)).collect();
                let d = g.push(Dot { batch, contract }, &[grad, other])?;
                let mut contracted = self.contract.clone();
                contracted.sort_by_key(others);
                let free = free.iter().copied();
                let axes = self.batch.iter().map(own).chain(free).chain(contracted.iter().map(own)).collect();
                g.push(super::Permute { axes }.inverse(), &[d])
            };
        let dl = cotangent(|p| p.0, |p| p.1, r, &lf, &rf, nb + lf.len())?;
        let dr = cotangent(|p| p.1, |p| p.0, l, &rf, &lf, nb)?;
        Ok(vec![Some(dl), Some(dr)])
    }

    fn flops(&self, args: &[&Type], outs: &[Type]) -> Dim {
        let k = Dim::product(self.contract.iter().map(|p| &args[0].shape[p.0]));
        &(&outs[0].elements() * &k) * &Dim::from(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn products_by_hand() {
        let a = Tensor::f32(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let b = Tensor::f32(&[2, 2], &[5.0, 6.0, 7.0, 8.0]);
        let run = |batch: &[(usize, usize)], contract: &[(usize, usize)]| {
            let op = Dot { batch: batch.to_vec(), contract: contract.to_vec() };
            apply(op, &[a.clone(), b.clone()])[0].reals()
        };
        assert_eq!(run(&[], &[(1, 0)]), [19.0, 22.0, 43.0, 50.0]);
        assert_eq!(run(&[], &[(1, 1)]), [17.0, 23.0, 39.0, 53.0]);
        assert_eq!(run(&[(0, 0)], &[(1, 1)]), [17.0, 53.0]);
        assert_eq!(run(&[], &[(0, 1), (1, 0)]), [5.0 + 14.0 + 18.0 + 32.0]);
    }

    #[test]
    fn sums_over_rows_are_those_of_gradients_of_weights() {
        let over_rows = |batch: &[(usize, usize)], contract: &[(usize, usize)], ranks| {
            Dot { batch: batch.to_vec(), contract: contract.to_vec() }.over_rows(ranks)
        };
        assert!(over_rows(&[], &[(0, 0)], [2, 2]));
        assert!(over_rows(&[], &[(0, 0), (1, 1)], [3, 3]));
        // A product forward, its gradient of the rows, one of several side by side, one without columns.
        assert!(!over_rows(&[], &[(1, 1)], [2, 2]));
        assert!(!over_rows(&[], &[(1, 0)], [2, 2]));
        assert!(!over_rows(&[(0, 0)], &[(1, 1)], [3, 3]));
        assert!(!over_rows(&[], &[(0, 0)], [1, 2]));
    }
}
