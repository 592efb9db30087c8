//! Routers of mixture-of-experts models under training. In: coefficients of the auxiliary losses, and the outputs of each run of
//! the gradient program. Out: which loss the program computes, and metrics of a step: the auxiliary losses before their
//! coefficients, and how evenly the router loads the experts.

use astrai_builders::Loss;
use astrai_runtime::Session;
use serde::{Deserialize, Serialize};

/// Auxiliary losses of the routers. A loss enters the program only where its coefficient is not 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// The program counts the tokens that each expert gets.
    pub count_loads: bool,
    /// Coefficient of the load-balancing loss (Switch Transformer, arXiv:2101.03961).
    pub load_balancing: f64,
    /// Coefficient of the router z-loss (ST-MoE, arXiv:2202.08906).
    pub z_loss: f64,
}

impl RouterLosses {
    /// Whether either is added to the loss.
    pub(crate) fn balanced(&self) -> bool {
        self.load_balancing != 0.0 || self.z_loss != 0.0
    }

    /// The loss that the gradient program computes of next tokens.
    pub(crate) fn loss(&self) -> Loss {
        let balanced = self.balanced();
        if self.count_loads || balanced { Loss::Routed { balanced } } else { Loss::Scaled }
    }
}

/// Router metrics of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterStats {
    /// The load-balancing loss before its coefficient; the mean over micro-batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_balance: Option<f64>,
    /// The router z-loss before its coefficient; the mean over micro-batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_z: Option<f64>,
    /// Tokens of the most loaded expert of a layer over the mean of its experts; the mean over layers.
    pub load_imbalance_mean: f64,
    /// The same of the worst layer.
    pub load_imbalance_max: f64,
    /// Entropy of a layer's expert loads over that of equal loads, 0 to 1; the mean over layers.
    pub load_entropy: f64,
    /// Share of all experts that got no token.
    pub dead_expert_fraction: f64,
}

/// Tokens of each expert and auxiliary losses, summed over the micro-batches of a step.
#[derive(Default)]
pub(crate) struct ExpertLoads {
    /// Tokens of each expert, layer after layer.
    tokens: Vec<f64>,
    experts: usize,
    losses: [Option<f64>; 2],
}

impl ExpertLoads {
    /// Sets all sums to zero; keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.fill(0.0);
        self.losses = [None; 2];
    }

    /// Adds the outputs of one run of the gradient program.
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

    /// Metrics of a step of so many micro-batches; `None` for a model without experts.
    pub fn stats(&self, batches: usize) -> Option<RouterStats> {
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
        Some(RouterStats {
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
        let mut loads = ExpertLoads {
            tokens: vec![4.0, 4.0, 4.0, 4.0, 16.0, 0.0, 0.0, 0.0],
            experts: 4,
            ..ExpertLoads::default()
        };
        loads.losses = [Some(3.0), None];
        let seen = loads.stats(2).unwrap();
        assert_eq!((seen.router_balance, seen.router_z), (Some(1.5), None));
        assert_eq!((seen.load_imbalance_mean, seen.load_imbalance_max), (2.5, 4.0));
        assert_eq!((seen.load_entropy, seen.dead_expert_fraction), (0.5, 3.0 / 8.0));
        loads.clear();
        let idle = loads.stats(1).unwrap();
        assert_eq!((idle.load_imbalance_max, idle.dead_expert_fraction), (0.0, 1.0));
        assert_eq!(ExpertLoads::default().stats(1), None);
    }
}
