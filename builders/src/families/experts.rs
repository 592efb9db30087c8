//! What the families with experts share: their numbers, read and checked, and the layers that have them.

use crate::config::{
    Balance, ConfigError, ExpertNames, ExpertsSpec, MAX_EXPERTS, MAX_LAYERS, MlpSpec, ModelConfig, Raw,
};
use astrai_ir::ops::Scores;
use serde_json::{Map, Value, json};

/// Keys by which training configurations weigh or report the router's losses. They are no part of what is computed here: the
/// loss is the cross-entropy alone.
pub(super) const LOSS_KEYS: &[&str] = &["output_router_logits", "router_aux_loss_coef"];

/// Weight names that most families of transformers share.
pub(super) static NAMES: ExpertNames = ExpertNames {
    router: "mlp.gate",
    correction: "mlp.gate.e_score_correction_bias",
    gate: "mlp.experts.{e}.gate_proj",
    up: "mlp.experts.{e}.up_proj",
    down: "mlp.experts.{e}.down_proj",
    shared: ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"],
};

/// The keys of two numbers, with a family's defaults for them; without one, the key has to be stated.
pub(super) struct Counts {
    /// Experts of a layer.
    pub count: (&'static str, Option<usize>),
    /// How many of them a token has.
    pub chosen: (&'static str, Option<usize>),
}

/// Experts chosen by softmax, their weights normalised: for the family to adjust.
pub(super) fn read(
    raw: &Raw,
    keys: &Counts,
    layers: usize,
    intermediate: usize,
    names: &'static ExpertNames,
) -> Result<ExpertsSpec, ConfigError> {
    let (count, chosen) = counts(raw, keys, layers)?;
    Ok(ExpertsSpec {
        count,
        chosen,
        intermediate,
        scores: Scores::Softmax,
        groups: None,
        correction: false,
        normalise: true,
        scale: 1.0,
        shared: None,
        balance: Balance::Global,
        skip_unrouted: false,
        names,
    })
}

/// Experts of a layer, and how many of them a token has.
pub(super) fn counts(raw: &Raw, keys: &Counts, layers: usize) -> Result<(usize, usize), ConfigError> {
    let number = |(key, default): (&'static str, Option<usize>)| {
        raw.count_opt(key, MAX_EXPERTS)?.or(default).ok_or_else(|| raw.missing(key))
    };
    let (count, chosen) = (number(keys.count)?, number(keys.chosen)?);
    if count.checked_mul(layers).is_none_or(|all| all > MAX_EXPERTS) {
        let problem = format!("is {count}, in {layers} layers");
        let remedy = format!("the most accepted is {MAX_EXPERTS} in all layers together");
        return Err(raw.refuse(raw.spelled(keys.count.0), problem, remedy));
    }
    if chosen > count {
        let problem = format!("is {chosen}, more than the {count} experts");
        let remedy = format!("it must be at most `{}`", raw.spelled(keys.count.0));
        return Err(raw.refuse(keys.chosen.0, problem, remedy));
    }
    Ok((count, chosen))
}

/// Keys by which files say which layers have experts: every nth, but for those listed.
pub(super) const EVERY_NTH: &[&str] = &["decoder_sparse_step", "mlp_only_layers"];

/// Gives experts to every nth layer that is not listed as dense ([`EVERY_NTH`]).
pub(super) fn put_every_nth(raw: &Raw, spec: &ExpertsSpec, c: &mut ModelConfig) -> Result<(), ConfigError> {
    let step = raw.count_opt("decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
    let dense = dense_layers(raw)?;
    for (i, layer) in c.layers.iter_mut().enumerate() {
        if (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64)) {
            layer.mlp = MlpSpec::Experts(spec.clone());
        }
    }
    Ok(())
}

/// Layers whose MLP is dense whatever the step.
fn dense_layers(raw: &Raw) -> Result<Vec<u64>, ConfigError> {
    let key = "mlp_only_layers";
    let Some((_, value)) = raw.find(key)? else { return Ok(vec![]) };
    let wrong = || raw.refuse(key, "is no list of layer numbers", "list layers from 0, or leave it empty");
    let list = value.as_array().ok_or_else(wrong)?;
    list.iter().map(|v| v.as_u64().ok_or_else(wrong)).collect()
}

/// The experts of the first layer that has them.
pub(super) fn of(c: &ModelConfig) -> Option<&ExpertsSpec> {
    c.layers.iter().find_map(|l| match &l.mlp {
        MlpSpec::Experts(e) => Some(e),
        _ => None,
    })
}

/// The keys of [`EVERY_NTH`] for saving: every layer, but for those listed.
pub(super) fn save_every_nth(c: &ModelConfig, out: &mut Map<String, Value>) {
    let dense = |i: &usize| matches!(c.layers[*i].mlp, MlpSpec::Dense { .. });
    out.insert("decoder_sparse_step".into(), json!(1));
    out.insert("mlp_only_layers".into(), json!((0..c.layers.len()).filter(dense).collect::<Vec<_>>()));
}
