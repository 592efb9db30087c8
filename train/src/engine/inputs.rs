//! Inputs of an engine's programs.

use crate::batch::PackedBatch;
use crate::router::RouterLosses;
use crate::update::{ROUND_COUNTERS, UNSCALE};
use astrai_ir::DType;
use astrai_runtime::{Error, NOISE_COUNTERS, NOISE_WIDTH, Session, Value};

/// Inputs of the programs, kept from step to step.
pub(super) struct Inputs {
    pub(super) values: Vec<(&'static str, Value)>,
}

pub(super) const LOSS_SCALE: usize = 4;
pub(super) const ACCUMULATE: usize = 5;
const BALANCE: usize = 6;
const WIDTH: usize = 8;
pub(super) const LR: usize = 11;
const ROUNDING: usize = 15;
/// Behind the last input of the update.
pub(super) const UPDATE_END: usize = 17;

impl Inputs {
    pub(super) fn new() -> Inputs {
        let lists = ["input_ids", "positions", "starts", "targets"];
        let of_run = ["loss_scale", astrai_runtime::ACCUMULATE, "balance_scale", "z_scale"];
        let scalars = of_run.into_iter().chain(["lr", "correction1", "correction2", UNSCALE]);
        let list = |n| (n, Value::i32(&[0], &[]));
        let scalar = |n| (n, Value::f32(&[], &[0.0]));
        let mut values: Vec<_> = lists.into_iter().map(list).chain(scalars.map(scalar)).collect();
        let counter = |n| (n, Value { dtype: DType::I64, shape: vec![], bytes: vec![0; 8] });
        let noise = [(NOISE_WIDTH, Value::f32(&[0], &[]))].into_iter().chain(NOISE_COUNTERS.map(counter));
        values.splice(WIDTH..WIDTH, noise);
        values.extend(ROUND_COUNTERS.map(counter));
        Inputs { values }
    }

    pub(super) fn set(&mut self, batch: &PackedBatch) {
        let lists = [&batch.input_ids, &batch.positions, &batch.starts, &batch.targets];
        for ((_, v), list) in self.values.iter_mut().zip(lists) {
            v.shape[0] = list.len();
            v.bytes.clear();
            v.bytes.extend(list.iter().flat_map(|x| x.to_le_bytes()));
        }
    }

    /// Scalars of micro-batch `i` of `count`, whose loss is multiplied by `scale`.
    pub(super) fn of_micro_batch(&mut self, i: usize, count: usize, router: &RouterLosses, scale: f64) {
        self.scalar(ACCUMULATE, if i > 0 { 1.0 } else { 0.0 });
        for (at, cost) in [(BALANCE, router.load_balancing), (BALANCE + 1, router.z_loss)] {
            self.scalar(at, scale * cost / count as f64);
        }
    }

    /// Noise on the embeddings of sequences, each as wide as the root of its length allows.
    pub(super) fn noise(&mut self, starts: &[i32], seed: u64, draw: u64) {
        let width = &mut self.values[WIDTH].1;
        width.bytes.clear();
        for bounds in starts.windows(2) {
            let tokens = (bounds[1] - bounds[0]).max(0);
            let own = (1.0 / f64::from(tokens).sqrt()) as f32;
            (0..tokens).for_each(|_| width.bytes.extend(own.to_le_bytes()));
        }
        width.shape[0] = width.bytes.len() / 4;
        for (i, counter) in [(1, seed), (2, draw)] {
            self.values[WIDTH + i].1.bytes.copy_from_slice(&counter.to_le_bytes());
        }
    }

    /// Counters of the draws by which the updated weights, so many, are rounded in a step.
    pub(super) fn rounding(&mut self, seed: u64, step: u64, weights: usize) {
        self.values[ROUNDING].1.bytes.copy_from_slice(&seed.to_le_bytes());
        let draws = &mut self.values[ROUNDING + 1].1;
        draws.bytes.clear();
        (0..weights as u64).for_each(|i| draws.bytes.extend(((step << 20) + i).to_le_bytes()));
        draws.shape.clear();
        draws.shape.push(weights);
    }

    pub(super) fn scalar(&mut self, i: usize, x: f64) {
        self.values[i].1.bytes.copy_from_slice(&(x as f32).to_le_bytes());
    }

    /// Runs with those of these inputs that the program has.
    pub(super) fn run(&self, session: &mut Session, which: std::ops::Range<usize>) -> Result<(), Error> {
        let none = ("", &self.values[0].1);
        let mut given = [none; 15];
        let mut used = 0;
        let has = |name: &str| session.inputs().iter().any(|(n, _)| n == name);
        for (name, value) in self.values[which].iter().filter(|(name, _)| has(name)) {
            given[used] = (*name, value);
            used += 1;
        }
        session.execute(&given[..used])
    }
}
