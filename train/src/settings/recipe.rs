//! What the engine is told of the settings.

use super::{
    Error, Moments, MuonScale, Optimizer, Packing, Recompute, Rounding, Settings, Storage, Strategy,
};
use crate::data::Kind;
use crate::engine::Recipe;
use crate::lora::{Lora, Targets};
use crate::router::RouterLosses;
use crate::strategies::{self, Options};
use crate::update::{self, Group, Muon, Rest, Rule, Scale};
use astrai_builders::ModelConfig;
use astrai_ir::DType;
use std::path::PathBuf;
use std::sync::Arc;

impl Settings {
    /// The default settings for batches of these sizes, for figures that depend on sizes only.
    pub fn of_sizes(batch: u64, seq: u64) -> Settings {
        Settings { batch: batch as usize, seq: seq as usize, ..Settings::default() }
    }

    /// What the engine is told of them.
    pub fn recipe(&self) -> Recipe {
        let (beta1, beta2, eps) = (self.beta1, self.beta2, self.eps);
        let rule = match self.optimizer {
            Optimizer::Adamw => Rule::AdamW { beta1, beta2, eps },
            Optimizer::Adam => Rule::Adam { beta1, beta2, eps },
            Optimizer::Nadamw => Rule::NAdamW { beta1, beta2, eps },
            Optimizer::Sgd => {
                Rule::Sgd { momentum: self.momentum.unwrap_or(0.9), nesterov: self.nesterov.unwrap_or(false) }
            }
            Optimizer::Muon => self.muon(),
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
                Storage::F16 => DType::F16,
            },
            wide: self.precision.iter().flatten().filter_map(|text| stays_wide(text).ok()).collect(),
            accumulate: self.accum > 1,
            recompute: match self.recompute {
                Recompute::None => astrai_runtime::Recompute::None,
                Recompute::Selective => astrai_runtime::Recompute::Selective,
                Recompute::Full => astrai_runtime::Recompute::Full,
            },
            optimizer: update::Optimizer {
                ema: self.ema,
                skip: self.skip_norm,
                scaled: self.dtype == Storage::F16,
                signal: self.grad_snr.unwrap_or(false),
                stochastic: (self.rounding == Some(Rounding::Stochastic)).then_some(self.seed),
                narrow_moments: self.moments == Moments::Bits8,
                groups: self.group.iter().flatten().filter_map(|text| group(text).ok()).collect(),
                ..update::Optimizer::new(rule, self.weight_decay, clip)
            },
            router: RouterLosses {
                count_loads: true,
                load_balancing: self.router_aux_loss_coef,
                z_loss: self.router_z_loss_coef,
            },
            adapter: None,
            frozen: self.freeze.clone().unwrap_or_default(),
            async_save: self.async_save.unwrap_or(false),
            neftune: self.neftune_alpha.map(|alpha| (alpha, self.seed)),
            objective: None,
        }
    }

    /// The adapter that is trained, if one is.
    pub fn lora(&self) -> Option<Lora> {
        let rank = self.lora_rank?;
        let plain = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        let targets = match self.lora_targets.as_deref().unwrap_or_default() {
            [] => Targets::AllLinear,
            [all] if all == "all-linear" => Targets::AllLinear,
            [pattern] if !plain(pattern) => Targets::Pattern(pattern.clone()),
            names => Targets::Names(names.to_vec()),
        };
        // Whoever reads the adapter later may do so from another folder.
        let whole = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
        Some(Lora {
            rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
            rslora: self.rslora.unwrap_or(false),
            dora: self.dora.unwrap_or(false),
            targets,
            ranks: vec![],
            alphas: vec![],
            dropout: 0.0,
            base: self.model.as_ref().map(|path| whole(path).display().to_string()),
        })
    }

    /// The same with the objective of the strategy and the adapter, for a model and records of so many answers.
    ///
    /// # Errors
    /// The adapter's targets are none of the model's, and those of [`objective`](Self::objective).
    pub fn recipe_of(
        &self,
        config: &ModelConfig,
        frozen: [bool; 2],
        answers: usize,
    ) -> Result<Recipe, Error> {
        let adapter = self.lora().map(|lora| lora.adapter(config)).transpose();
        let adapter = adapter.map_err(|e| Error(e.replacen("target_modules", "lora_targets", 1)))?;
        let recipe = Recipe { adapter, objective: self.objective(frozen)?, ..self.recipe() };
        let of_record = match self.strategy.kind() {
            Kind::Seq | Kind::Sft => return Ok(recipe),
            Kind::Dpo | Kind::Kto => 2,
            Kind::Grpo => answers,
        };
        let sequences = (self.batch * of_record) as u64;
        Ok(Recipe { sequences, tokens: sequences * self.seq as u64, ..recipe })
    }

    /// What is learnt of a batch, for data that have log-probabilities under (the reference, the policy that wrote the answers) or not; none
    /// where it is the plain cross-entropy of next tokens.
    ///
    /// # Errors
    /// The strategy has not these options.
    pub fn objective(&self, frozen: [bool; 2]) -> Result<Option<Arc<dyn strategies::Strategy>>, Error> {
        let all = self.set.iter().flatten().map(|text| strategies::option(text));
        let mut options = all.collect::<Result<Options, _>>().map_err(|e| Error(format!("set: {e}")))?;
        if matches!(self.strategy, Strategy::Seq | Strategy::Sft) && options.is_empty() {
            return Ok(None);
        }
        if self.strategy == Strategy::Grpo && self.old.is_none() && !frozen[1] {
            options.entry("old_model").or_insert(false.into());
        }
        let made = strategies::strategy(&self.strategy.name(), options);
        made.map(|s| Some(s.into())).map_err(|e| Error(format!("set: {e}")))
    }

    fn muon(&self) -> Rule {
        let scale = match self.muon_scale.unwrap_or_default() {
            MuonScale::Original => Scale::Original,
            MuonScale::MatchRmsAdamw => Scale::MatchRmsAdamw,
            MuonScale::SpectralUnclamped => Scale::SpectralUnclamped,
        };
        let matrices = Muon {
            momentum: self.momentum.unwrap_or(0.95),
            nesterov: self.nesterov.unwrap_or(true),
            coefficients: [3.4445, -4.775, 2.0315],
            steps: 5,
            scale,
            narrow: true,
        };
        let rate = self.adamw_lr.map_or(1.0, |lr| lr / self.lr);
        let rest = Rest { betas: [self.beta1, self.beta2], eps: self.eps, rate, weight_decay: 0.0 };
        Rule::Muon { matrices, rest }
    }
}

/// What stays f32, as it is given: `NAME=f32`.
pub(super) fn stays_wide(text: &str) -> Result<String, String> {
    match text.rsplit_once('=') {
        Some((name, "f32")) if !name.is_empty() => Ok(name.to_string()),
        Some((name, ty)) if !name.is_empty() => Err(format!(
            "precision: {name} cannot be {ty}: what is named stays f32, all else is of the type of dtype"
        )),
        _ => Err(format!("precision: `{text}` is not NAME=f32")),
    }
}

/// A group as it is given: `PATTERN:rate=X,decay=X`, either of the two or both.
pub(super) fn group(text: &str) -> Result<Group, String> {
    let wrong = || format!("group: `{text}` is not PATTERN:rate=X,decay=X, with numbers from 0");
    let (pattern, keys) = text.rsplit_once(':').filter(|(p, _)| !p.is_empty()).ok_or_else(wrong)?;
    let mut group = Group { pattern: pattern.to_string(), rate: 1.0, weight_decay: None };
    for key in keys.split(',') {
        let (key, x) = key.split_once('=').ok_or_else(wrong)?;
        let x: f64 = x.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0).ok_or_else(wrong)?;
        match key {
            "rate" => group.rate = x,
            "decay" => group.weight_decay = Some(x),
            _ => return Err(wrong()),
        }
    }
    Ok(group)
}
