//! The profiler: measured time of each kernel beside what its bytes and flops predict.

use std::sync::Arc;

/// What a launch costs at the sizes of a run.
#[derive(Clone, Copy)]
pub(crate) struct LaunchCost {
    pub bytes: u64,
    pub flops: u64,
    /// Seconds that the target's roofline allows.
    pub seconds: f64,
}

/// One launch of a run.
#[derive(Clone, Debug)]
pub struct ProfileRow {
    /// Where the kernel comes from.
    pub origin: Arc<str>,
    /// Name of the kernel.
    pub kernel: String,
    /// Name of its archetype's form.
    pub form: &'static str,
    /// Bytes predicted for the sizes of the run, summed over runs.
    pub bytes: u64,
    /// Floating-point operations predicted for the sizes of the run, summed over runs.
    pub flops: u64,
    /// Seconds that the target's roofline allows, summed over runs.
    pub predicted: f64,
    /// Seconds measured, summed over runs.
    pub measured: f64,
    /// Runs summed.
    pub runs: u64,
}

impl ProfileRow {
    pub(crate) fn add(&mut self, other: &ProfileRow) {
        self.bytes += other.bytes;
        self.flops += other.flops;
        self.predicted += other.predicted;
        self.measured += other.measured;
        self.runs += other.runs;
    }
}

/// Launches in order.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// One row a launch.
    pub rows: Vec<ProfileRow>,
}

impl Profile {
    /// Rows of equal kernel summed, the slowest first: (kernel, origin of the first, launches, predicted, measured).
    pub fn by_kernel(&self) -> Vec<ProfileRow> {
        let mut sums: Vec<ProfileRow> = Vec::new();
        for row in &self.rows {
            match sums.iter_mut().find(|s| s.kernel == row.kernel) {
                Some(s) => s.add(row),
                None => sums.push(row.clone()),
            }
        }
        sums.sort_by(|a, b| b.measured.total_cmp(&a.measured));
        sums
    }
}
