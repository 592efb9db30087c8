//! Group-relative policy optimisation (arXiv:2402.03300) on answers that were written and scored before, with the losses that TRL has.

use super::terms::{Objective, Terms, clamp, truth};
use super::{Batch, Column, Entry, Frozen, Strategy, lengths, read};
use astrai_ir::Value;
use serde::Deserialize;

pub(super) const GRPO: Entry = Entry {
    name: "grpo",
    description: "groups of answers with rewards; preset=seed computes AstrAI's numbers",
    make: |o| Ok(Box::new(read::<Grpo>(o)?.checked()?)),
};

/// How tokens are added up, and what differs with that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// The mean over answers of means over their tokens.
    Grpo,
    /// The mean over the tokens of a micro-batch.
    Bnpo,
    /// The sum over `max_completion_length` tokens an answer (arXiv:2503.20783).
    DrGrpo,
    /// The mean over the tokens of a step (arXiv:2503.14476).
    Dapo,
    /// Capped ratios as constant weights of log-probabilities (arXiv:2506.13585).
    Cispo,
    /// A soft gate instead of the clip (arXiv:2511.20347).
    Sapo,
    /// Weights of a gamma form, by the ratio of a whole answer.
    Vespo,
    /// Times the answer's length.
    Luspo,
}

/// By what a ratio is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Token,
    /// The exponential of the mean log-ratio of an answer (GSPO, arXiv:2507.18071).
    Sequence,
}

/// By what advantages are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// The standard deviation of the group's rewards.
    Group,
    /// That of all rewards.
    Batch,
    /// Nothing.
    None,
    /// As `group` with AstrAI's population deviation and its 1e-8.
    Population,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Preset {
    Seed,
}

/// Options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Grpo {
    /// AstrAI's numbers: bnpo, `population` advantages, clip 0.2, divergence 0.01.
    preset: Option<Preset>,
    loss_type: Option<Kind>,
    importance_sampling_level: Level,
    #[serde(alias = "clip_eps")]
    epsilon: f64,
    epsilon_high: Option<f64>,
    /// Cap of the ratio on both sides of the minimum.
    delta: Option<f64>,
    /// Of the divergence from the reference policy; 0 needs no reference.
    #[serde(alias = "kl_coef")]
    beta: Option<f64>,
    scale_rewards: Option<Scale>,
    max_completion_length: Option<f64>,
    /// Whether the log-probabilities of the policy that wrote the answers are read; without, each ratio is 1.
    old_model: bool,
    /// Answers of a group, for data that are to have so many.
    group_size: Option<usize>,
    sapo_temperature_pos: f64,
    sapo_temperature_neg: f64,
    vespo_k_pos: f64,
    vespo_lambda_pos: f64,
    vespo_k_neg: f64,
    vespo_lambda_neg: f64,
}

impl Default for Grpo {
    fn default() -> Grpo {
        Grpo {
            preset: None,
            loss_type: None,
            importance_sampling_level: Level::Token,
            epsilon: 0.2,
            epsilon_high: None,
            delta: None,
            beta: None,
            scale_rewards: None,
            max_completion_length: None,
            old_model: true,
            group_size: None,
            sapo_temperature_pos: 1.0,
            sapo_temperature_neg: 1.05,
            vespo_k_pos: 2.0,
            vespo_lambda_pos: 3.0,
            vespo_k_neg: 3.0,
            vespo_lambda_neg: 2.0,
        }
    }
}

/// Advantages of answers, group after group of `size`: rewards less their group's mean, scaled.
pub fn advantages(rewards: &[f32], size: usize, scale: Scale) -> Vec<f32> {
    let moments = |x: &[f32], unbiased: bool| {
        let n = x.len() as f64;
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let square = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
        (mean, (square / if unbiased { (n - 1.0).max(1.0) } else { n }).sqrt())
    };
    let (_, of_all) = moments(rewards, true);
    let mut out = Vec::with_capacity(rewards.len());
    for group in rewards.chunks(size.max(1)) {
        let (mean, deviation) = moments(group, scale != Scale::Population);
        let by = match scale {
            Scale::Group => deviation + 1e-4,
            Scale::Batch => of_all + 1e-4,
            Scale::None => 1.0,
            Scale::Population => deviation + 1e-8,
        };
        out.extend(group.iter().map(|r| ((f64::from(*r) - mean) / by) as f32));
    }
    out
}

impl Grpo {
    fn checked(self) -> Result<Grpo, String> {
        if self.kind() == Kind::DrGrpo && self.max_completion_length.is_none_or(|n| n.is_nan() || n < 1.0) {
            return Err("dr_grpo divides by max_completion_length: give it".into());
        }
        if self.kind() == Kind::Cispo && self.epsilon_high.is_none() {
            return Err("cispo caps ratios at epsilon_high: give it".into());
        }
        Ok(self)
    }

    fn kind(&self) -> Kind {
        self.loss_type.unwrap_or(if self.preset.is_some() { Kind::Bnpo } else { Kind::Dapo })
    }

    fn scale(&self) -> Scale {
        let otherwise = if self.preset.is_some() { Scale::Population } else { Scale::Group };
        self.scale_rewards.unwrap_or(otherwise)
    }

    fn beta(&self) -> f64 {
        self.beta.unwrap_or(if self.preset.is_some() { 0.01 } else { 0.0 })
    }

    /// The policy's part of each token's loss, and metrics of its own.
    fn policy(&self, t: &Terms, log_ratio: &Value, advantage: &Value) -> (Value, Vec<(&'static str, Value)>) {
        let by_sequence = self.importance_sampling_level == Level::Sequence;
        let log_weight = match by_sequence {
            true => t.spread(&(t.sum(log_ratio) / t.lengths())),
            false => log_ratio.clone(),
        };
        let ratio = log_weight.exp();
        let (up, down) =
            (advantage.greater(&advantage.full_like(0.0)), advantage.less(&advantage.full_like(0.0)));
        let (low, high) = (1.0 - self.epsilon, 1.0 + self.epsilon_high.unwrap_or(self.epsilon));
        match self.kind() {
            Kind::Cispo => {
                let cap = self.epsilon_high.unwrap_or(self.epsilon);
                let clipped = truth(ratio.greater(&ratio.full_like(cap))) * truth(up);
                let weight = clamp(&ratio, None, Some(cap)).detach();
                (-(weight * advantage * &t.logp), vec![("cispo_clip_ratio", t.mean(&clipped))])
            }
            Kind::Sapo => {
                let (pos, neg) = (self.sapo_temperature_pos, self.sapo_temperature_neg);
                let temperature = up.where_(&ratio.full_like(pos), &ratio.full_like(neg));
                let gate = (&temperature * (&ratio - 1.0)).sigmoid() * (4.0 / &temperature);
                (-(gate * advantage), vec![])
            }
            Kind::Vespo => {
                let log =
                    clamp(&t.sum(&clamp(log_ratio, Some(-20.0), Some(20.0))), Some(1e-8f64.ln()), Some(20.0));
                let log = t.spread(&log);
                let pick = |pos: f64, neg: f64| down.where_(&log.full_like(neg), &log.full_like(pos));
                let k = pick(self.vespo_k_pos, self.vespo_k_neg);
                let lambda = pick(self.vespo_lambda_pos, self.vespo_lambda_neg);
                let weight = (&lambda + k * &log - &lambda * log.exp()).exp().detach();
                let mean = (t.sum(&(&weight * &t.mask)) / t.lengths()).mean(&[], false);
                (-(weight * advantage * &t.logp), vec![("vespo/phi_seq_mean", mean)])
            }
            _ => {
                let clipped = clamp(&ratio, Some(low), Some(high));
                let capped = clamp(&ratio, None, self.delta);
                let loss = -(capped * advantage).minimum(&(clipped * advantage));
                let below = truth(ratio.less(&ratio.full_like(low))) * truth(down);
                let above = truth(ratio.greater(&ratio.full_like(high))) * truth(up);
                let of_answer = |x: &Value| t.sum(&(x * &t.mask)) / t.lengths();
                let mean = |x: &Value| if by_sequence { of_answer(x).mean(&[], false) } else { t.mean(x) };
                let metrics = vec![
                    ("clip_ratio/low_mean", mean(&below)),
                    ("clip_ratio/high_mean", mean(&above)),
                    ("clip_ratio/region_mean", mean(&(&below + &above))),
                    ("clip_ratio/low_min", of_answer(&below).min(&[], false)),
                    ("clip_ratio/high_max", of_answer(&above).max(&[], false)),
                ];
                (loss, metrics)
            }
        }
    }
}

impl Strategy for Grpo {
    fn frozen(&self) -> [bool; 2] {
        [self.beta() != 0.0, self.old_model]
    }

    fn denominator(&self, window: &[Batch]) -> f64 {
        match self.kind() {
            Kind::Dapo | Kind::Cispo | Kind::Vespo => {
                window.iter().map(|b| b.sequences().valid()).sum::<usize>().max(1) as f64
            }
            _ => window.len() as f64,
        }
    }

    fn columns(&self, batch: &Batch, frozen: &Frozen, _: &[Batch]) -> Result<Vec<Column>, String> {
        let Batch::Groups(groups) = batch else { return Err("grpo learns from groups of answers".into()) };
        if self.group_size.is_some_and(|n| n != groups.size) {
            return Err(format!("groups of {} answers, group_size says otherwise", groups.size));
        }
        let n = groups.sequences.tokens();
        let advantages = advantages(&groups.rewards, groups.size, self.scale());
        let mut columns = vec![("advantages", vec![advantages.len()], advantages)];
        if self.old_model {
            let old = frozen
                .old
                .clone()
                .ok_or("grpo needs the policy that wrote the answers, or old_model=false")?;
            columns.push(("old_logps", vec![n], old));
        }
        if self.beta() != 0.0 {
            let reference = frozen.reference.clone().ok_or("grpo with beta needs a reference model")?;
            columns.push(("ref_logps", vec![n], reference));
        }
        Ok(columns)
    }

    fn observed(&self, batch: &Batch) -> Vec<(&'static str, f64)> {
        let Batch::Groups(groups) = batch else { return vec![] };
        let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len().max(1) as f64;
        let deviation = |x: &[f64]| {
            let m = mean(x);
            (x.iter().map(|x| (x - m).powi(2)).sum::<f64>() / (x.len() as f64 - 1.0).max(1.0)).sqrt()
        };
        let rewards: Vec<f64> = groups.rewards.iter().map(|r| f64::from(*r)).collect();
        let deviations: Vec<f64> = rewards.chunks(groups.size.max(1)).map(deviation).collect();
        let alike = deviations.iter().filter(|d| **d < 1e-8).count() as f64 / deviations.len().max(1) as f64;
        let lengths = || lengths(&groups.sequences).into_iter().map(f64::from);
        vec![
            ("reward", mean(&rewards)),
            ("reward_std", mean(&deviations)),
            ("frac_reward_zero_std", alike),
            ("completions/min_length", lengths().fold(f64::INFINITY, f64::min)),
            ("completions/max_length", lengths().fold(0.0, f64::max)),
        ]
    }

    fn objective(&self, t: &Terms) -> Objective {
        let advantage = t.spread(&t.of("advantages", t.sequences));
        let old = if self.old_model { t.of_tokens("old_logps") } else { t.logp.detach() };
        let (mut each, mut metrics) = self.policy(t, &(&t.logp - old), &advantage);
        if self.beta() != 0.0 {
            let x = t.of_tokens("ref_logps") - &t.logp;
            let kl = x.exp() - x - 1.0;
            metrics.push(("kl", t.mean(&kl)));
            each = each + kl * self.beta();
        }
        metrics.push(("entropy", t.mean(&t.entropy)));
        metrics.push(("completions/mean_length", t.sum(&t.mask).mean(&[], false)));
        let each = each * &t.mask;
        let loss = match self.kind() {
            Kind::Grpo | Kind::Sapo => (t.sum(&each) / t.lengths()).mean(&[], false),
            Kind::Bnpo => t.mean(&each),
            Kind::Dapo | Kind::Cispo | Kind::Vespo => each.sum(&[], false),
            Kind::Luspo => t.sum(&each).mean(&[], false),
            Kind::DrGrpo => {
                let most = self.max_completion_length.unwrap_or(1.0) * t.sequences as f64;
                each.sum(&[], false) * (1.0 / most)
            }
        };
        Objective { loss, metrics }
    }
}
