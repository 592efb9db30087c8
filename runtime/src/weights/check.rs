//! In: the tensors a model needs. Out: nothing, or one line with everything that keeps the checkpoint from being that
//! model's, so that a user sees the pattern (another size, another family, a head left out) at once.

use std::collections::BTreeSet;

use super::error::{WeightsError, list, quote};
use super::{Checkpoint, Stored};

impl Checkpoint {
    /// Holds the checkpoint to `expected` (name, shape). A tensor outside it is surplus unless `allow_extra` says so.
    ///
    /// # Errors
    /// [`WeightsError::Mismatch`], naming missing, misshapen and surplus tensors, the first few of each.
    pub fn check(
        &self,
        expected: &[(String, Vec<usize>)],
        allow_extra: &dyn Fn(&str) -> bool,
    ) -> Result<(), WeightsError> {
        let (mut missing, mut misshapen) = (Vec::new(), Vec::new());
        for (name, shape) in expected {
            match self.find(name) {
                None => missing.push(quote(name)),
                Some(Stored { tensor, .. }) if tensor.shape != *shape => {
                    misshapen.push(format!("{} is {:?} instead of {shape:?}", quote(name), tensor.shape));
                }
                Some(_) => {}
            }
        }
        let wanted: BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        let surplus: Vec<String> =
            self.names().filter(|name| !wanted.contains(name) && !allow_extra(name)).map(quote).collect();
        let kinds = [("missing", missing), ("misshapen", misshapen), ("surplus", surplus)];
        let found: Vec<String> = kinds
            .iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(kind, names)| format!("{} tensors {kind}: {}", names.len(), list(names)))
            .collect();
        if found.is_empty() {
            return Ok(());
        }
        let trouble = format!(
            "{}; these weights are not of the model that config.json describes, get both from one place",
            found.join("; ")
        );
        Err(WeightsError::Mismatch { path: self.path.clone(), trouble })
    }
}
