//! gpt-oss: attention sinks, every other layer windowed, biases on all projections, experts with a clamped gate in
//! every layer. Source: `GptOssForCausalLM` of transformers.

use super::decoder;
use super::experts::{self, Counts};
use super::model_type::{AttentionBias, Defaults, ModelType};
use super::windows::Windows;
use crate::config::{
    Activation, ConfigError, MlpSpec, ModelConfig, Names, Raw, RopeScaling, RopeSpec, StackedExperts,
    StackedNames, Yarn,
};
use serde_json::{Map, Value, json};

/// The registration.
pub static GPT_OSS: ModelType = ModelType {
    name: "gpt_oss",
    architectures: &["GptOssForCausalLM"],
    description: "gpt-oss (20B, 120B): sinks, alternating windows, experts with a clamped gate in every layer",
    aliases: &[("dtype", "torch_dtype"), ("num_experts_per_tok", "experts_per_token")],
    // The original context stands with the rope, too.
    inert: &["output_router_logits", "router_aux_loss_coef", "initial_context_length"],
    names: &NAMES,
    defaults: Defaults {
        head_dim: Some(64),
        max_positions: Some(131_072),
        norm_eps: Some(1e-5),
        bias: AttentionBias::AllKey(true),
        windows: Windows::Pattern(128, |i| i.is_multiple_of(2)),
        ..decoder::DEFAULTS
    },
    resolve,
    save,
};

static NAMES: Names = Names { sinks: Some("self_attn.sinks"), ..decoder::NAMES };

static EXPERTS: StackedNames = StackedNames {
    router: ["mlp.router.weight", "mlp.router.bias"],
    gate_up: ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"],
    down: ["mlp.experts.down_proj", "mlp.experts.down_proj_bias"],
};

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

fn resolve(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, model)?;
    if c.activation != Activation::Silu {
        let remedy = "the gate of this model type is its own; state silu, or leave it out";
        return Err(raw.refuse("hidden_act", "is not silu", remedy));
    }
    packing(raw)?;
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
    for layer in &mut c.layers {
        layer.attention.sinks = true;
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

fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = decoder::save(c, model);
    // Without the key, the scaling of the published models would be read.
    out.entry("rope_scaling").or_insert_with(|| json!({"rope_type": "default"}));
    if let Some(MlpSpec::Stacked(e)) = c.layers.first().map(|l| &l.mlp) {
        out.insert("num_local_experts".into(), json!(e.count));
        out.insert("num_experts_per_tok".into(), json!(e.chosen));
        out.insert("swiglu_limit".into(), json!(e.limit));
        out.insert("swiglu_alpha".into(), json!(e.alpha));
    }
    out
}
