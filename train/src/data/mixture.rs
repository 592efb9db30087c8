//! Mixtures: several datasets as one, in given shares. In: datasets and weights. Out: items by number. An epoch is as long as it takes to
//! see each dataset whole: one with more weight than its size is seen more than once. Which item a number means is arithmetic,
//! so that a run resumes, and any number of ranks share the order, as with one dataset.

use super::DataError;
use crate::batch::Items;
use std::sync::Arc;

/// A dataset of a mixture, and how often its items occur.
type Part<B> = (Arc<dyn Items<B> + Send + Sync>, u64);

/// Several datasets as one.
pub struct Mixture<B> {
    parts: Vec<Part<B>>,
}

impl<B> std::fmt::Debug for Mixture<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|(_, items)| items)).finish()
    }
}

impl<B> Clone for Mixture<B> {
    fn clone(&self) -> Mixture<B> {
        Mixture { parts: self.parts.clone() }
    }
}

impl<B> Mixture<B> {
    /// A mixture in which the datasets' items occur in the ratio of the weights; without weights each item occurs once.
    ///
    /// # Errors
    /// There are not as many weights as datasets, one is not above 0, or one dataset would have to be seen more than a million times.
    pub fn new(
        parts: Vec<Arc<dyn Items<B> + Send + Sync>>,
        weights: Option<&[f64]>,
    ) -> Result<Mixture<B>, DataError> {
        let sizes: Vec<u64> = parts.iter().map(|part| part.len()).collect();
        let Some(weights) = weights else {
            return Ok(Mixture { parts: parts.into_iter().zip(sizes).collect() });
        };
        if weights.len() != parts.len() || weights.iter().any(|w| !w.is_finite() || *w <= 0.0) {
            let message = format!(
                "{} weights {weights:?} for {} datasets: give each one above 0",
                weights.len(),
                parts.len()
            );
            return Err(DataError::Options(message));
        }
        // The dataset that lasts longest is seen once.
        let epoch = sizes.iter().zip(weights).map(|(&n, w)| n as f64 / w).fold(0.0, f64::max);
        let occur: Vec<u64> =
            weights.iter().zip(&sizes).map(|(w, &n)| ((epoch * w).round() as u64).max(n)).collect();
        if let Some(i) = (0..sizes.len()).find(|&i| occur[i] > sizes[i].saturating_mul(1_000_000)) {
            let message = format!(
                "dataset {i} of {} items would occur {} times an epoch; give it less weight, or more data",
                sizes[i], occur[i]
            );
            return Err(DataError::Options(message));
        }
        Ok(Mixture { parts: parts.into_iter().zip(occur).collect() })
    }

    /// Items of each dataset in an epoch.
    pub fn occurrences(&self) -> impl Iterator<Item = u64> {
        self.parts.iter().map(|(_, items)| *items)
    }
}

impl<B> Items<B> for Mixture<B> {
    fn len(&self) -> u64 {
        self.occurrences().sum()
    }

    fn append(&self, item: u64, batch: &mut B) -> Result<(), DataError> {
        let mut left = item;
        for (part, occur) in &self.parts {
            if left < *occur {
                return part.append(left % part.len(), batch);
            }
            left -= occur;
        }
        Err(DataError::Options(format!("item {item} was asked for, {} there are", self.len())))
    }
}

/// Neighbouring items of a dataset: those to train on, or those held out.
pub struct Subset<B> {
    /// The whole.
    pub items: Arc<dyn Items<B> + Send + Sync>,
    /// The first of them.
    pub first: u64,
    /// How many.
    pub count: u64,
}

impl<B> Items<B> for Subset<B> {
    fn len(&self) -> u64 {
        self.count
    }

    fn append(&self, item: u64, batch: &mut B) -> Result<(), DataError> {
        match item < self.count {
            true => self.items.append(self.first + item, batch),
            false => Err(DataError::Options(format!("item {item} was asked for, {} there are", self.count))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Numbers(u64, u64);

    impl Items<Vec<u64>> for Numbers {
        fn len(&self) -> u64 {
            self.1
        }

        fn append(&self, item: u64, batch: &mut Vec<u64>) -> Result<(), DataError> {
            batch.push(self.0 + item);
            Ok(())
        }
    }

    fn mixed(weights: Option<&[f64]>) -> Result<Vec<u64>, DataError> {
        let mixture = Mixture::new(vec![Arc::new(Numbers(0, 3)), Arc::new(Numbers(100, 6))], weights)?;
        let mut all = vec![];
        (0..mixture.len()).try_for_each(|i| mixture.append(i, &mut all))?;
        assert!(mixture.append(mixture.len(), &mut all).is_err());
        Ok(all)
    }

    #[test]
    fn shares_are_the_weights_and_each_item_occurs() {
        assert_eq!(mixed(None).unwrap(), [0, 1, 2, 100, 101, 102, 103, 104, 105]);
        let even = mixed(Some(&[0.5, 0.5])).unwrap();
        assert_eq!(even, [0, 1, 2, 0, 1, 2, 100, 101, 102, 103, 104, 105]);
        let most = mixed(Some(&[3.0, 1.0])).unwrap();
        assert_eq!((most.len(), most.iter().filter(|&&x| x < 100).count()), (24, 18));
        let few = mixed(Some(&[1.0, 3.0])).unwrap();
        assert_eq!((few.len(), few.iter().filter(|&&x| x < 100).count()), (12, 3));
        for wrong in [&[1.0][..], &[1.0, 0.0], &[f64::NAN, 1.0], &[1.0, 1e-9]] {
            assert!(mixed(Some(wrong)).is_err(), "{wrong:?}");
        }
    }
}
