//! DeepSeekMoE as the files of deepseek_v2 and deepseek_v3 state it: many small experts, some of which all tokens share, the
//! first layers dense, the choice limited to the best groups of experts. Version 2 ranks by softmax, groups by their best;
//! version 3 by sigmoid and a correction, groups by their two best. Sources: arXiv:2405.04434, arXiv:2412.19437, and
//! `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` of transformers.

use super::experts::{self, Counts};
use crate::config::{
    ConfigError, ExpertsSpec, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, MlpSpec, ModelConfig, Raw, SharedSpec,
};
use astrai_ir::ops::{GroupScore, Groups, Scores};
use serde_json::{Map, Value, json};

/// Keys of training, and of how experts are spread over machines.
pub(super) const INERT: &[&str] =
    &["aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef"];

/// How a version chooses, and what it does when a key is absent, as in transformers.
pub(super) struct Version {
    /// `scoring_func`, the only one accepted.
    scoring: (&'static str, Scores),
    /// `topk_method` without groups, if the version has that.
    ungrouped: Option<&'static str>,
    /// `topk_method` with groups.
    grouped: (&'static str, GroupScore),
    /// The choice has a correction.
    correction: bool,
    /// The reference computes `norm_topk_prob`; the default if so.
    normalise: Option<bool>,
    count: usize,
    chosen: Option<usize>,
    intermediate: usize,
    shared: usize,
    /// Groups, and how many of them are kept.
    groups: Option<(usize, usize)>,
    scale: f64,
    /// Dense layers before the first experts.
    dense: usize,
}

/// DeepSeek-V2.
pub(super) const V2: Version = Version {
    scoring: ("softmax", Scores::Softmax),
    ungrouped: Some("greedy"),
    grouped: ("group_limited_greedy", GroupScore::Best),
    correction: false,
    normalise: None,
    count: 64,
    chosen: None,
    intermediate: 1407,
    shared: 2,
    groups: None,
    scale: 1.0,
    dense: 0,
};

/// DeepSeek-V3.
pub(super) const V3: Version = Version {
    scoring: ("sigmoid", Scores::Sigmoid),
    ungrouped: None,
    grouped: ("noaux_tc", GroupScore::BestTwo),
    correction: true,
    normalise: Some(true),
    count: 256,
    chosen: Some(8),
    intermediate: 2048,
    shared: 1,
    groups: Some((8, 4)),
    scale: 2.5,
    dense: 3,
};

/// Gives the layers of `c` their experts.
pub(super) fn put(raw: &Raw, v: &Version, c: &mut ModelConfig) -> Result<(), ConfigError> {
    let inner = raw.count_opt("moe_intermediate_size", MAX_WIDTH)?.unwrap_or(v.intermediate);
    let counts =
        Counts { count: ("n_routed_experts", Some(v.count)), chosen: ("num_experts_per_tok", v.chosen) };
    let mut spec = experts::read(raw, &counts, c.num_layers, inner, &experts::NAMES)?;
    let (scoring, scores) = v.scoring;
    raw.one_of("scoring_func", &[scoring])?;
    spec.scores = scores;
    spec.groups = groups(raw, v, &spec)?;
    spec.correction = v.correction;
    let normalise = raw.flag("norm_topk_prob", v.normalise.unwrap_or(false))?;
    if normalise && v.normalise.is_none() {
        let problem = "is true, which the references of this model type do not agree on";
        return Err(raw.refuse("norm_topk_prob", problem, "supported: false"));
    }
    spec.normalise = normalise;
    let scale = raw.real_where("routed_scaling_factor", |x| x > 0.0 && x <= 1e6, "above 0")?;
    spec.scale = scale.unwrap_or(v.scale);
    spec.shared = shared(raw, v, inner)?;
    let dense = raw.count_or_none("first_k_dense_replace", MAX_LAYERS)?.unwrap_or(v.dense);
    let every = raw.count_opt("moe_layer_freq", MAX_LAYERS)?.unwrap_or(1);
    for (i, layer) in c.layers.iter_mut().enumerate().skip(dense) {
        if i.is_multiple_of(every) {
            layer.mlp = MlpSpec::Experts(spec.clone());
        }
    }
    Ok(())
}

/// Shared experts are one MLP as wide as they are together.
fn shared(raw: &Raw, v: &Version, inner: usize) -> Result<Option<SharedSpec>, ConfigError> {
    let key = "n_shared_experts";
    let count = raw.count_or_none(key, MAX_EXPERTS)?.unwrap_or(if raw.states(key) { 0 } else { v.shared });
    let intermediate = count.saturating_mul(inner);
    if intermediate > MAX_WIDTH {
        let problem = format!("is {count}, of width {inner} each");
        return Err(raw.refuse(key, problem, format!("the widest MLP accepted is {MAX_WIDTH}")));
    }
    Ok((count > 0).then_some(SharedSpec { count: 1, intermediate }))
}

/// The groups that limit the choice, if there is more than one.
fn groups(raw: &Raw, v: &Version, spec: &ExpertsSpec) -> Result<Option<Groups>, ConfigError> {
    let (method, score) = v.grouped;
    let methods: Vec<&str> = v.ungrouped.into_iter().chain([method]).collect();
    let given = raw.one_of("topk_method", &methods)?.or(methods.first().copied());
    let [count, kept] = ["n_group", "topk_group"].map(|key| raw.count_opt(key, MAX_EXPERTS));
    let (count, kept) = (count?, kept?);
    if given == v.ungrouped && given.is_some() {
        return Ok(None);
    }
    let count = count.or(v.groups.map(|g| g.0)).ok_or_else(|| raw.missing("n_group"))?;
    let kept = kept.or(v.groups.map(|g| g.1)).ok_or_else(|| raw.missing("topk_group"))?;
    if count == 1 && kept == 1 {
        return Ok(None);
    }
    if !spec.count.is_multiple_of(count) {
        let problem = format!("is {count}, which does not divide the {} experts", spec.count);
        return Err(raw.refuse("n_group", problem, "groups have equal numbers of experts"));
    }
    let size = spec.count / count;
    if score == GroupScore::BestTwo && size < 2 {
        let problem = format!("is {count}, which leaves one expert in a group");
        return Err(raw.refuse("n_group", problem, "groups are ranked by their two best experts"));
    }
    if kept > count {
        let problem = format!("is {kept}, more than the {count} groups");
        return Err(raw.refuse("topk_group", problem, "it must be at most `n_group`"));
    }
    if spec.chosen > size * kept {
        let problem = format!("is {}, more than the {} experts of {kept} groups", spec.chosen, size * kept);
        return Err(raw.refuse("num_experts_per_tok", problem, "lower it, or raise `topk_group`"));
    }
    Ok(Some(Groups { count, kept, score }))
}

/// The keys of [`put`] for saving.
pub(super) fn save(v: &Version, c: &ModelConfig, out: &mut Map<String, Value>) {
    // A module of multi-token prediction is a layer behind the others.
    let all: Vec<&MlpSpec> =
        c.layers.iter().chain(c.mtp.as_ref().map(|m| &m.layer)).map(|l| &l.mlp).collect();
    let with: Vec<usize> = (0..all.len()).filter(|i| matches!(all[*i], MlpSpec::Experts(_))).collect();
    let first = with.first().copied().unwrap_or(all.len());
    let every = match with.get(1) {
        Some(second) => second - first,
        // The only one: the next multiple is behind the last layer.
        None if first == 0 => all.len(),
        None => first,
    };
    out.insert("first_k_dense_replace".into(), json!(first));
    out.insert("moe_layer_freq".into(), json!(every));
    let experts = all.iter().find_map(|mlp| if let MlpSpec::Experts(e) = mlp { Some(e) } else { None });
    let Some(e) = experts else {
        // A model without experts says nothing of them, but what has no default has to be stated.
        if v.chosen.is_none() {
            out.insert("num_experts_per_tok".into(), json!(1));
        }
        return;
    };
    let (count, kept) = e.groups.map_or((1, 1), |g| (g.count, g.kept));
    let method = v.ungrouped.filter(|_| e.groups.is_none()).unwrap_or(v.grouped.0);
    out.insert("n_routed_experts".into(), json!(e.count));
    out.insert("num_experts_per_tok".into(), json!(e.chosen));
    out.insert("moe_intermediate_size".into(), json!(e.intermediate));
    out.insert("n_shared_experts".into(), json!(e.shared.map_or(0, |s| s.intermediate / e.intermediate)));
    out.insert("n_group".into(), json!(count));
    out.insert("topk_group".into(), json!(kept));
    out.insert("topk_method".into(), json!(method));
    out.insert("scoring_func".into(), json!(v.scoring.0));
    out.insert("norm_topk_prob".into(), json!(e.normalise));
    out.insert("routed_scaling_factor".into(), json!(e.scale));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MlpSpec::{Dense, Experts};

    /// A plain model of `layers` layers, with the experts that these keys describe.
    fn read(v: &Version, layers: usize, keys: Value) -> Result<ModelConfig, ConfigError> {
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": {layers},
            "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 8}}"#
        );
        let mut c = ModelConfig::parse(&text, "config.json")?.config;
        let map = keys.as_object().cloned().unwrap_or_default();
        let raw = Raw::new("config.json", &map, &[]);
        put(&raw, v, &mut c)?;
        assert!(map.keys().all(|key| raw.was_read(key)));
        Ok(c)
    }

    #[test]
    fn the_published_numbers_and_the_defaults() {
        let c = read(&V3, 5, json!({})).unwrap();
        let e = experts::of(&c).unwrap();
        assert!(matches!(c.layers[2].mlp, Dense { .. }) && matches!(c.layers[3].mlp, Experts(_)));
        assert_eq!((e.count, e.chosen, e.intermediate, e.scale), (256, 8, 2048, 2.5));
        assert_eq!(e.groups, Some(Groups { count: 8, kept: 4, score: GroupScore::BestTwo }));
        assert_eq!(e.shared, Some(SharedSpec { count: 1, intermediate: 2048 }));
        assert!(e.scores == Scores::Sigmoid && e.correction && e.normalise);
        let lite = json!({"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "topk_method": "greedy", "scoring_func": "softmax"});
        let c = read(&V2, 2, lite).unwrap();
        let e = experts::of(&c).unwrap();
        assert_eq!((e.scores, e.groups, e.correction, e.normalise), (Scores::Softmax, None, false, false));
        assert_eq!(e.shared, Some(SharedSpec { count: 1, intermediate: 2816 }));
    }

    #[test]
    fn what_is_saved_is_read_again() {
        let limited = json!({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3});
        let lone = json!({"num_experts_per_tok": 3, "moe_layer_freq": 3, "first_k_dense_replace": 1, "n_shared_experts": 0});
        let sparse = json!({"moe_layer_freq": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1});
        for (v, keys) in
            [(&V2, limited), (&V2, lone), (&V3, sparse), (&V3, json!({"n_shared_experts": null}))]
        {
            for layers in [1, 4, 7] {
                let c = read(v, layers, keys.clone()).unwrap();
                let mut saved = Map::new();
                save(v, &c, &mut saved);
                assert_eq!(read(v, layers, Value::Object(saved)).unwrap(), c, "{keys} {layers}");
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_one_line_that_names_the_key() {
        let limited = |count: usize, kept: usize, chosen: usize| {
            json!({"topk_method": "group_limited_greedy", "n_group": count,
            "topk_group": kept, "num_experts_per_tok": chosen})
        };
        let cases = [
            (&V2, json!({}), "`num_experts_per_tok` is missing"),
            (&V2, limited(5, 1, 1), "`n_group` is 5, which does not divide the 64 experts"),
            (&V2, limited(4, 5, 1), "`topk_group` is 5, more than the 4 groups"),
            (&V2, limited(8, 2, 17), "`num_experts_per_tok` is 17, more than the 16 experts of 2 groups"),
            (
                &V2,
                json!({"topk_method": "group_limited_greedy", "num_experts_per_tok": 1}),
                "`n_group` is missing",
            ),
            (&V2, json!({"norm_topk_prob": true, "num_experts_per_tok": 1}), "`norm_topk_prob` is true"),
            (
                &V2,
                json!({"topk_method": "noaux_tc", "num_experts_per_tok": 1}),
                "supported: greedy, group_limited_greedy",
            ),
            (&V3, json!({"n_routed_experts": 6}), "`num_experts_per_tok` is 8, more than the 6 experts"),
            (&V3, json!({"n_routed_experts": 12}), "`n_group` is 8, which does not divide the 12 experts"),
            (&V3, json!({"n_group": 256}), "leaves one expert in a group"),
            (
                &V3,
                json!({"scoring_func": "softmax"}),
                "`scoring_func` is \"softmax\", which is not supported",
            ),
            (&V3, json!({"routed_scaling_factor": -1}), "`routed_scaling_factor` is -1"),
            (&V3, json!({"n_shared_experts": 1 << 14}), "the widest MLP accepted"),
            (&V3, json!({"moe_layer_freq": 0}), "`moe_layer_freq` is 0"),
        ];
        for (v, keys, says) in cases {
            let e = read(v, 2, keys).unwrap_err().to_string();
            assert!(e.contains(says) && !e.contains('\n'), "{e}");
        }
    }
}
