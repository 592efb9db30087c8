//! Routers under training. In: what a run asks of them, and what each run of the gradient's program shows. Out: which loss the
//! program has, and figures of a step: the losses before their factors, and how evenly experts are loaded.

use astrai_builders::Loss;
use astrai_runtime::Session;
use serde::{Deserialize, Serialize};

/// What is made of the routers of a model with experts. Their losses enter only where a factor is not 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Router {
    /// Loads of experts are counted.
    pub watched: bool,
    /// Factor on the loss that evens loads.
    pub balance: f64,
    /// Factor on the loss that keeps logits small.
    pub z: f64,
}

impl Router {
    /// The loss of the gradient's program.
    pub(crate) fn loss(&self) -> Loss {
        let balanced = self.balance != 0.0 || self.z != 0.0;
        if self.watched || balanced { Loss::Routed { balanced } } else { Loss::Scaled }
    }
}

/// What routers did in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// The loss that evens loads, before its factor; the mean over micro-batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_balance: Option<f64>,
    /// The loss that keeps logits small, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_z: Option<f64>,
    /// Tokens of the most loaded expert of a layer over the mean of its experts; the mean over layers.
    pub load_imbalance_mean: f64,
    /// The same of the worst layer.
    pub load_imbalance_max: f64,
    /// Entropy of a layer's loads over that of even ones, 0 to 1; the mean over layers.
    pub load_entropy: f64,
    /// Share of all experts that no token met.
    pub dead_expert_fraction: f64,
}

/// Loads and losses of the micro-batches of a step.
#[derive(Default)]
pub(crate) struct Loads {
    /// Tokens of each expert, layer after layer.
    tokens: Vec<f64>,
    experts: usize,
    losses: [Option<f64>; 2],
}

impl Loads {
    /// Nothing was seen yet; memory is kept.
    pub fn clear(&mut self) {
        self.tokens.fill(0.0);
        self.losses = [None; 2];
    }

    /// Adds what a run left.
    pub fn add(&mut self, run: &Session) {
        if let Some((shape, values)) = run.floats("router_load") {
            self.experts = shape.last().copied().unwrap_or(0);
            self.tokens.resize(shape.iter().product(), 0.0);
            self.tokens.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(x));
        }
        for (sum, name) in self.losses.iter_mut().zip(["router_balance", "router_z"]) {
            if let Some(x) = run.scalar(name) {
                *sum = Some(sum.unwrap_or(0.0) + f64::from(x));
            }
        }
    }

    /// What was seen of so many micro-batches; `None` where nothing is.
    pub fn seen(&self, batches: usize) -> Option<Seen> {
        if self.experts == 0 || self.tokens.is_empty() {
            return None;
        }
        let layers = || self.tokens.chunks(self.experts);
        let (count, n) = (layers().count() as f64, self.experts as f64);
        let imbalance =
            |l: &[f64]| l.iter().fold(0.0, |m: f64, x| m.max(*x)) * n / l.iter().sum::<f64>().max(1.0);
        let entropy = |l: &[f64]| {
            let sum = l.iter().sum::<f64>().max(1.0);
            let nats: f64 = l.iter().filter(|x| **x > 0.0).map(|x| -x / sum * (x / sum).ln()).sum();
            if n > 1.0 { nats / n.ln() } else { 1.0 }
        };
        let [balance, z] = self.losses.map(|x| x.map(|x| x / batches as f64));
        Some(Seen {
            router_balance: balance,
            router_z: z,
            load_imbalance_mean: layers().map(imbalance).sum::<f64>() / count,
            load_imbalance_max: layers().map(imbalance).fold(0.0, f64::max),
            load_entropy: layers().map(entropy).sum::<f64>() / count,
            dead_expert_fraction: self.tokens.iter().filter(|x| **x == 0.0).count() as f64
                / self.tokens.len() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_two_layers_by_hand() {
        let mut loads =
            Loads { tokens: vec![4.0, 4.0, 4.0, 4.0, 16.0, 0.0, 0.0, 0.0], experts: 4, ..Loads::default() };
        loads.losses = [Some(3.0), None];
        let seen = loads.seen(2).unwrap();
        assert_eq!((seen.router_balance, seen.router_z), (Some(1.5), None));
        assert_eq!((seen.load_imbalance_mean, seen.load_imbalance_max), (2.5, 4.0));
        assert_eq!((seen.load_entropy, seen.dead_expert_fraction), (0.5, 3.0 / 8.0));
        loads.clear();
        let idle = loads.seen(1).unwrap();
        assert_eq!((idle.load_imbalance_max, idle.dead_expert_fraction), (0.0, 1.0));
        assert_eq!(Loads::default().seen(1), None);
    }
}
