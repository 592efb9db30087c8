//! What the families with experts share: their numbers, read and checked.

use crate::config::{ConfigError, ExpertNames, ExpertsSpec, MAX_EXPERTS, Raw};

/// Keys by which training configurations weigh or report the router's losses. They are no part of what is computed here: the
/// loss is the cross-entropy alone.
pub(super) const LOSS_KEYS: &[&str] = &["output_router_logits", "router_aux_loss_coef"];

/// Experts of every layer by the key `count` and how many of them a token has, with the family's defaults for both.
pub(super) fn read(
    raw: &Raw,
    key: &'static str,
    defaults: (usize, usize),
    layers: usize,
    intermediate: usize,
    names: &'static ExpertNames,
) -> Result<ExpertsSpec, ConfigError> {
    let (count, chosen) = counts(raw, key, defaults, layers)?;
    Ok(ExpertsSpec { count, chosen, intermediate, normalise: true, names })
}

/// Experts of every layer by the key `count`, and how many of them a token has.
pub(super) fn counts(
    raw: &Raw,
    key: &'static str,
    defaults: (usize, usize),
    layers: usize,
) -> Result<(usize, usize), ConfigError> {
    let count = raw.count_opt(key, MAX_EXPERTS)?.unwrap_or(defaults.0);
    if count.checked_mul(layers).is_none_or(|all| all > MAX_EXPERTS) {
        let problem = format!("is {count}, in {layers} layers");
        let remedy = format!("the most accepted is {MAX_EXPERTS} in all layers together");
        return Err(raw.refuse(raw.spelled(key), problem, remedy));
    }
    let chosen = raw.count_opt("num_experts_per_tok", MAX_EXPERTS)?.unwrap_or(defaults.1);
    if chosen > count {
        let problem = format!("is {chosen}, more than the {count} experts");
        let remedy = format!("it must be at most `{}`", raw.spelled(key));
        return Err(raw.refuse("num_experts_per_tok", problem, remedy));
    }
    Ok((count, chosen))
}
