//! Weights rounded for the inputs that they meet: GPTQ (arXiv:2210.17323) in the form of Babai's nearest plane, to which it is equal
//! (arXiv:2507.18553). In: a matrix, the Gram matrix of its inputs. Out: codes and scales whose products with those inputs are nearer to the
//! matrix's than those of codes rounded to nearest. With `X·Xᵀ = L·Lᵀ` the error of a row is `‖Lᵀ(w - q)‖²`; columns are rounded from the
//! last to the first, each to what makes up for those behind it. So no inverse is needed, and rows, which are independent, are solved some
//! at a time by each thread, with all of their columns at hand.

use super::narrow::{Grid, Quantisation};
use astrai_ir::{Code, Narrow};

/// What is added to the diagonal, of its mean: inputs that were not seen count as well.
const DAMPING: f64 = 0.01;
/// Rows that are solved at once, while a row of the factor is at hand.
const ROWS: usize = 16;
/// By how much ranges are tried to be narrowed, in steps: what is cut off may cost less than what all others gain.
const NARROWER: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72];

/// What is known of the inputs of a matrix.
pub struct Factor {
    /// Columns in the order in which they are rounded, the last first.
    order: Vec<usize>,
    /// The factor below its diagonal, `[k, k]` row-major, each column divided by its number on the diagonal.
    below: Vec<f32>,
    /// Squares of the numbers on the diagonal: what an error of a column costs.
    costs: Vec<f32>,
}

impl Factor {
    /// Of a Gram matrix `[k, k]`; none where all inputs were zero.
    ///
    /// # Errors
    /// It has what is no number.
    pub fn of(gram: &[f64], k: usize) -> Result<Option<Factor>, String> {
        let mean = (0..k).map(|i| gram[i * k + i]).sum::<f64>() / k as f64;
        if !gram.iter().sum::<f64>().is_finite() {
            return Err("has inputs that are no finite numbers".into());
        }
        if mean <= 0.0 {
            return Ok(None);
        }
        // The largest inputs first: what they lose all others can make up for.
        let mut order: Vec<usize> = (0..k).collect();
        order.sort_by(|a, b| gram[a * k + a].total_cmp(&gram[b * k + b]));
        let mut l: Vec<f64> = Vec::with_capacity(k * k);
        for (i, from) in order.iter().enumerate() {
            let start = l.len();
            l.extend(order.iter().map(|to| gram[from * k + to]));
            l[start + i] += DAMPING * mean;
        }
        for i in 0..k {
            let (above, row) = l.split_at_mut(i * k);
            for j in 0..i {
                let other = &above[j * k..][..=j];
                row[j] = (row[j] - dot(&row[..j], &other[..j])) / other[j];
            }
            let square = row[i] - dot(&row[..i], &row[..i]);
            // Sums of f32 may leave a little less than the damping.
            row[i] = square.max(DAMPING * mean / 2.0).sqrt();
        }
        let diagonal: Vec<f64> = (0..k).map(|i| l[i * k + i]).collect();
        let below = (0..k * k).map(|at| (l[at] / diagonal[at % k]) as f32).collect();
        Ok(Some(Factor { order, below, costs: diagonal.iter().map(|d| (d * d) as f32).collect() }))
    }

    /// Rounds a matrix `[n, k]` for these inputs, on all cores; also gives the numbers that its codes stand for.
    pub fn quantise(&self, numbers: &[f32], narrow: Narrow, group: usize) -> (Quantisation, Vec<f32>) {
        let (k, threads) = (self.order.len(), std::thread::available_parallelism().map_or(1, usize::from));
        let rows = (numbers.len() / k).div_ceil(threads).max(1);
        let mut wide = vec![0f32; numbers.len()];
        let mut all = Quantisation::default();
        std::thread::scope(|s| {
            let parts = numbers.chunks(rows * k).zip(wide.chunks_mut(rows * k));
            let part = |(from, to): (&[f32], &mut [f32])| {
                let mut made = Quantisation::default();
                let pieces = from.chunks(ROWS * k).zip(to.chunks_mut(ROWS * k));
                pieces.for_each(|(from, to)| self.solve(from, to, narrow, group, &mut made));
                made
            };
            let parts: Vec<_> = parts.map(|p| s.spawn(move || part(p))).collect();
            for done in parts {
                // A part that panicked would leave rows out; the panic goes on instead.
                all.append(done.join().unwrap_or_else(|p| std::panic::resume_unwind(p)));
            }
        });
        (all, wide)
    }

    /// Some rows.
    fn solve(&self, from: &[f32], to: &mut [f32], narrow: Narrow, group: usize, made: &mut Quantisation) {
        let (k, n) = (self.order.len(), from.len() / self.order.len());
        let groups = k / group;
        // What each column would best be, in the order in which they are rounded.
        let mut best: Vec<f32> =
            from.chunks(k).flat_map(|row| self.order.iter().map(|column| row[*column])).collect();
        let mut grids: Vec<Grid> = Vec::with_capacity(n * groups);
        let mut costs = vec![0f32; k];
        self.order.iter().zip(&self.costs).for_each(|(column, cost)| costs[*column] = *cost);
        for row in from.chunks(k) {
            let all = row.chunks(group).zip(costs.chunks(group));
            grids.extend(all.map(|(numbers, costs)| grid(numbers, costs, narrow)));
        }
        let mut codes = vec![0f32; from.len()];
        for (p, column) in self.order.iter().enumerate().rev() {
            let below = &self.below[p * k..][..p];
            for (r, best) in best.chunks_mut(k).enumerate() {
                let (at, grid) = (r * k + column, grids[r * groups + column / group]);
                codes[at] = grid.nearest(best[p]);
                to[at] = grid.number(codes[at]);
                let error = from[at] - to[at];
                best[..p].iter_mut().zip(below).for_each(|(x, l)| *x += error * l);
            }
        }
        grids.iter().for_each(|grid| grid.put(narrow, made));
        match narrow.code {
            Code::Int4 => {
                let pair = |[low, high]: &[f32; 2]| (low + 8.0) as u8 | ((high + 8.0) as u8) << 4;
                made.codes.extend(codes.as_chunks::<2>().0.iter().map(pair));
            }
            code => codes.iter().for_each(|x| code.dtype().encode(f64::from(*x), &mut made.codes)),
        }
    }
}

/// The grid of a group on which its numbers cost least; that of many codes is as good as its range.
fn grid(numbers: &[f32], costs: &[f32], narrow: Narrow) -> Grid {
    let tried = if narrow.code == Code::Int4 { &NARROWER[..] } else { &NARROWER[..1] };
    let cost = |grid: &Grid| -> f32 {
        let off = |x: f32| x - grid.number(grid.nearest(x));
        numbers.iter().zip(costs).map(|(x, cost)| cost * off(*x) * off(*x)).sum()
    };
    let grids = tried.iter().map(|factor| Grid::of(numbers, narrow, *factor)).map(|grid| (cost(&grid), grid));
    let least = grids.reduce(|best, next| if next.0 < best.0 { next } else { best });
    least.map_or_else(|| Grid::of(numbers, narrow, 1.0), |(_, grid)| grid)
}

/// In eight sums, so that the loop is one of vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, rest), (b, more)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(s, (a, b))| *s += a * b);
    }
    sums.iter().sum::<f64>() + rest.iter().zip(more).map(|(a, b)| a * b).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::quantise;
    use astrai_ir::DType;

    /// The numbers that codes and scales stand for.
    fn numbers(of: &Quantisation, narrow: Narrow, group: usize) -> Vec<f32> {
        let width = narrow.scales.bytes();
        let real = |bytes: &[u8], at: usize| {
            bytes.get(at * width..at * width + width).map_or(0.0, |b| narrow.scales.decode(b))
        };
        let value = |i: usize| match narrow.code {
            Code::Int4 => f64::from(of.codes[i / 2] >> (i % 2 * 4) & 15) - 8.0,
            code => code.dtype().decode(&of.codes[i..=i]),
        };
        let number = |i| real(&of.scales, i / group) * value(i) + real(&of.offsets, i / group);
        (0..of.codes.len() * narrow.code.per_element()).map(|i| number(i) as f32).collect()
    }

    #[test]
    fn products_are_nearer_than_those_of_weights_rounded_to_nearest() {
        let (k, n, mut state) = (96, 40, 7u64);
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / 8388608.0 - 1.0
        };
        let weights: Vec<f32> = (0..n * k).map(|_| next()).collect();
        // Inputs that go along with one another, some of them far larger than others; half of them are not seen.
        let mix: Vec<f32> = (0..k * k).map(|i| next() / (1.0 + (i % k) as f32)).collect();
        let mut input = || {
            let own: Vec<f32> = (0..k).map(|_| next()).collect();
            let row = |r: &[f32]| r.iter().zip(&own).map(|(a, b)| a * b).sum::<f32>() + 0.02 * own[0];
            mix.chunks(k).map(row).collect::<Vec<f32>>()
        };
        let [seen, held]: [Vec<Vec<f32>>; 2] = std::array::from_fn(|_| (0..400).map(|_| input()).collect());
        let mut gram = vec![0.0; k * k];
        for x in &seen {
            (0..k * k).for_each(|at| gram[at] += f64::from(x[at / k]) * f64::from(x[at % k]));
        }
        let factor = Factor::of(&gram, k).unwrap().unwrap();
        let loss = |rounded: &[f32]| -> f64 {
            let of = |x: &Vec<f32>, r: usize| {
                let off =
                    (0..k).map(|i| f64::from(x[i] * (weights[r * k + i] - rounded[r * k + i]))).sum::<f64>();
                off * off
            };
            held.iter().map(|x| (0..n).map(|r| of(x, r)).sum::<f64>()).sum()
        };
        let bytes: Vec<u8> = weights.iter().flat_map(|x| x.to_le_bytes()).collect();
        for kind in ["int4", "int4:asymmetric", "int8", "int8:group=32:asymmetric", "fp8"] {
            let narrow: Narrow = kind.parse().unwrap();
            let group = narrow.group_of(k).unwrap();
            let nearest = numbers(&quantise(&bytes, DType::F32, narrow, group), narrow, group);
            let (made, wide) = factor.quantise(&weights, narrow, group);
            let read = numbers(&made, narrow, group);
            // Offsets are rounded to the type of the scales, numbers are not.
            let most = if narrow.offsets { 2e-2 } else { 1e-6 };
            assert!(read.iter().zip(&wide).all(|(a, b)| (a - b).abs() < most), "{kind}");
            assert!(loss(&wide) < 0.5 * loss(&nearest), "{kind}: {} {}", loss(&wide), loss(&nearest));
        }
        assert!(Factor::of(&vec![0.0; k * k], k).unwrap().is_none());
        gram[3] = f64::NAN;
        assert!(Factor::of(&gram, k).is_err());
    }
}
