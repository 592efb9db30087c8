//! Vectors of texts. In: what a program gives of each of a text's chunks. Out: the text's vector, of length 1.

use astrai_builders::config::Pooling;

use crate::scheduler::plan::Row;

/// Below this a vector's length counts as this much, as in PyTorch's `normalize`.
const SHORTEST: f64 = 1e-12;

/// What is known of a text's vector.
#[derive(Debug, Default)]
pub(super) struct Pooled {
    sum: Vec<f64>,
}

impl Pooled {
    /// Adds what a program gave of a row: the mean over its tokens counts for each of them, the state of its last token in place of
    /// what was before.
    pub fn add(&mut self, row: &Row, values: &[f32], pooling: Pooling) {
        // A text that was preempted is computed from its beginning.
        if row.at == row.tokens || pooling != Pooling::Mean {
            self.sum.clear();
        }
        self.sum.resize(values.len(), 0.0);
        let weight = if pooling == Pooling::Mean { row.tokens as f64 } else { 1.0 };
        self.sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += weight * f64::from(*x));
    }

    /// The vector.
    ///
    /// # Errors
    /// A number is none.
    pub fn vector(self) -> Result<Vec<f32>, &'static str> {
        let length = self.sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        if !length.is_finite() {
            return Err("the model gave a vector with numbers that are none");
        }
        let by = 1.0 / length.max(SHORTEST);
        Ok(self.sum.into_iter().map(|x| (x * by) as f32).collect())
    }
}
