//! gpt-oss: sinks in every softmax, every other layer windowed, biases on all projections, experts with a clamped gate in
//! every layer. Source: `GptOssForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use super::experts::{self, Counts};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{
    Activation, ConfigError, MAX_POSITIONS, MlpSpec, ModelConfig, Raw, RopeScaling, RopeSpec, StackedExperts,
    StackedNames, Yarn,
};
use crate::registry::{ModelType, Names};
use serde_json::{Map, Value, json};

/// The registration.
pub static GPT_OSS: ModelType = ModelType {
    name: "gpt_oss",
    architectures: &["GptOssForCausalLM"],
    description: "gpt-oss (20B, 120B): sinks, alternating windows, experts with a clamped gate in every layer",
    keys: &[decoder::KEYS, ROPE_KEYS, KEYS],
    aliases: &[("dtype", "torch_dtype"), ("num_experts_per_tok", "experts_per_token")],
    // The original context stands with the rope, too.
    inert: &["output_router_logits", "router_aux_loss_coef", "initial_context_length"],
    names: &NAMES,
    resolve,
    save,
};

const KEYS: &[&str] = &[
    "attention_bias",
    "layer_types",
    "num_experts_per_tok",
    "num_local_experts",
    "quantization_config",
    "sliding_window",
    "swiglu_alpha",
    "swiglu_limit",
];

static NAMES: Names = Names { sinks: Some("self_attn.sinks"), ..decoder::NAMES };

static EXPERTS: StackedNames = StackedNames {
    router: ["mlp.router.weight", "mlp.router.bias"],
    gate_up: ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"],
    down: ["mlp.experts.down_proj", "mlp.experts.down_proj_bias"],
};

const DEFAULTS: Defaults =
    Defaults { head_dim: Some(64), max_positions: Some(131_072), norm_eps: Some(1e-5), ..decoder::DEFAULTS };

/// Base of the rotation when no key states it.
const THETA: f64 = 150_000.0;

/// Stretch when no key says how rope is scaled.
const YARN: Yarn = Yarn {
    factor: 32.0,
    original_max_positions: 4096,
    attention_factor: None,
    beta_fast: 32.0,
    beta_slow: 1.0,
    mscale: None,
    mscale_all_dim: None,
    truncate: false,
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &GPT_OSS, &DEFAULTS)?;
    if c.activation != Activation::Silu {
        let remedy = "the gate of this model type is its own; state silu, or leave it out";
        return Err(raw.refuse("hidden_act", "is not silu", remedy));
    }
    packing(raw)?;
    let bias = raw.flag("attention_bias", true)?;
    let windows = windows(raw, c.num_layers)?;
    let rope = match c.layers.first() {
        Some(layer) => rope(raw, &layer.attention.rope)?,
        None => return Ok(c),
    };
    let keys = Counts { count: ("num_local_experts", Some(128)), chosen: ("num_experts_per_tok", Some(4)) };
    let (count, chosen) = experts::counts(raw, &keys, c.num_layers)?;
    let positive = |key| raw.real_where(key, |x| (1e-3..=1e6).contains(&x), "between 1e-3 and 1e6");
    let mlp = StackedExperts {
        count,
        chosen,
        intermediate: c.intermediate_size,
        limit: positive("swiglu_limit")?.unwrap_or(7.0),
        alpha: positive("swiglu_alpha")?.unwrap_or(1.702),
        names: &EXPERTS,
    };
    for (layer, window) in c.layers.iter_mut().zip(windows) {
        layer.attention.qkv_bias = bias;
        layer.attention.o_bias = bias;
        layer.attention.sinks = true;
        layer.attention.window = window;
        layer.attention.rope = rope.clone();
        layer.mlp = MlpSpec::Stacked(mlp.clone());
    }
    Ok(c)
}

/// Refuses weights that are packed otherwise than in MXFP4, which is read where it stands in the file.
fn packing(raw: &Raw) -> Result<(), ConfigError> {
    let key = "quantization_config";
    let Some(packed) = raw.object(key)? else { return Ok(()) };
    match packed.text("quant_method")? {
        Some("mxfp4") => Ok(()),
        other => {
            let problem = format!("has the quant_method {}", json!(other));
            Err(raw.refuse(key, problem, "supported: mxfp4; or give weights in bf16 or f32 and remove it"))
        }
    }
}

/// Rope as it was read, with this type's own defaults where nothing was stated.
fn rope(raw: &Raw, read: &RopeSpec) -> Result<RopeSpec, ConfigError> {
    let mut rope = read.clone();
    let inner = match raw.object("rope_parameters")? {
        Some(inner) => Some(inner),
        None => raw.object("rope_scaling")?,
    };
    let stated = inner.as_ref().is_some_and(|r| r.states("rope_theta"));
    if !stated && raw.find("rope_theta")?.is_none() {
        rope.theta = THETA;
    }
    if inner.is_none() {
        rope.scaling = RopeScaling::Yarn(YARN);
    }
    Ok(rope)
}

/// The window of each layer: of those that `layer_types` lists, else of the first and every other.
fn windows(raw: &Raw, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = match raw.count_opt("sliding_window", MAX_POSITIONS)? {
        None if !raw.states("sliding_window") => Some(128), // the reference's default
        stated => stated,
    };
    let types = decoder::layer_types(raw, layers)?;
    let windowed: Vec<bool> = types.unwrap_or_else(|| (0..layers).map(|i| i.is_multiple_of(2)).collect());
    if window.is_none() && windowed.contains(&true) {
        let problem = "is null while there are sliding layers";
        return Err(raw.refuse("sliding_window", problem, "state it, or list layer_types without them"));
    }
    Ok(windowed.into_iter().map(|w| window.filter(|_| w)).collect())
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    let windows = || c.layers.iter().map(|l| l.attention.window);
    let name = |w: Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    out.insert("layer_types".into(), windows().map(name).collect());
    out.insert("sliding_window".into(), json!(windows().flatten().next()));
    // Left out, it would mean the stretch of the published models.
    out.entry("rope_scaling").or_insert_with(|| json!({"rope_type": "default"}));
    let Some(layer) = c.layers.first() else { return out };
    out.insert("attention_bias".into(), json!(layer.attention.qkv_bias));
    if let MlpSpec::Stacked(e) = &layer.mlp {
        out.insert("num_local_experts".into(), json!(e.count));
        out.insert("num_experts_per_tok".into(), json!(e.chosen));
        out.insert("swiglu_limit".into(), json!(e.limit));
        out.insert("swiglu_alpha".into(), json!(e.alpha));
    }
    out
}
