//! What the engine is told of the settings.

use super::{Optimizer, Packing, Recompute, Settings, Storage, Strategy};
use crate::engine::Recipe;
use crate::router::RouterLosses;
use crate::update::{self, Rule};
use astrai_ir::DType;

impl Settings {
    /// The default settings for batches of these sizes, for figures that depend on sizes only.
    pub fn of_sizes(batch: u64, seq: u64) -> Settings {
        Settings { batch: batch as usize, seq: seq as usize, ..Settings::default() }
    }

    /// What the engine is told of them.
    pub fn recipe(&self) -> Recipe {
        let rule = match self.optimizer {
            Optimizer::Adamw => Rule::AdamW { beta1: self.beta1, beta2: self.beta2, eps: self.eps },
            Optimizer::Sgd => Rule::Sgd { momentum: self.momentum },
        };
        let clip = (self.clip > 0.0).then_some(self.clip);
        // A document may be as short as the token that ends it.
        let apart = self.packing == Packing::Masked || self.strategy == Strategy::Sft;
        let sequences = if apart { self.batch * self.seq } else { self.batch } as u64;
        Recipe {
            tokens: (self.batch * self.seq) as u64,
            sequences,
            span: self.seq as u64,
            storage: match self.dtype {
                Storage::F32 => DType::F32,
                Storage::Bf16 => DType::BF16,
            },
            accumulate: self.accum > 1,
            recompute: match self.recompute {
                Recompute::None => astrai_runtime::Recompute::None,
                Recompute::Selective => astrai_runtime::Recompute::Selective,
                Recompute::Full => astrai_runtime::Recompute::Full,
            },
            optimizer: update::Optimizer { rule, weight_decay: self.weight_decay, clip },
            router: RouterLosses {
                count_loads: true,
                load_balancing: self.router_aux_loss_coef,
                z_loss: self.router_z_loss_coef,
            },
        }
    }
}
