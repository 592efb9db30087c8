//! Inputs of an engine's programs.

use crate::batch::PackedBatch;
use crate::router::RouterLosses;
use crate::update::UNSCALE;
use astrai_runtime::{Error, Session, Value};

/// Inputs of the programs, kept from step to step.
pub(super) struct Inputs {
    pub(super) values: Vec<(&'static str, Value)>,
}

pub(super) const LOSS_SCALE: usize = 4;
pub(super) const ACCUMULATE: usize = 5;
const BALANCE: usize = 6;
pub(super) const LR: usize = 8;

impl Inputs {
    pub(super) fn new() -> Inputs {
        let lists = ["input_ids", "positions", "starts", "targets"];
        let of_run = ["loss_scale", astrai_runtime::ACCUMULATE, "balance_scale", "z_scale"];
        let scalars = of_run.into_iter().chain(["lr", "correction1", "correction2", UNSCALE]);
        let list = |n| (n, Value::i32(&[0], &[]));
        let scalar = |n| (n, Value::f32(&[], &[0.0]));
        Inputs { values: lists.into_iter().map(list).chain(scalars.map(scalar)).collect() }
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

    pub(super) fn scalar(&mut self, i: usize, x: f64) {
        self.values[i].1.bytes.copy_from_slice(&(x as f32).to_le_bytes());
    }

    /// Runs with those of these inputs that the program has.
    pub(super) fn run(&self, session: &mut Session, which: std::ops::Range<usize>) -> Result<(), Error> {
        let none = ("", &self.values[0].1);
        let mut given = [none; 12];
        let mut used = 0;
        let has = |name: &str| session.inputs().iter().any(|(n, _)| n == name);
        for (name, value) in self.values[which].iter().filter(|(name, _)| has(name)) {
            given[used] = (*name, value);
            used += 1;
        }
        session.execute(&given[..used])
    }
}
