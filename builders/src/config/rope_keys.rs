//! The rope keys of a configuration. In: `rope_theta` with `rope_scaling` (the layout of most published files) or
//! `rope_parameters` (the newer one). Out: a `RopeSpec`; and back to keys for saving.

use super::error::{ConfigError, excerpt};
use super::raw::Raw;
use super::rope::{RopeLayout, RopeScaling, RopeSpec, Yarn};
use super::spec::MAX_POSITIONS;
use serde_json::{Map, Value, json};

/// Keys that [`read`] looks at.
pub const ROPE_KEYS: &[&str] = &[
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
];

/// Base when the file states none; what every family here takes.
const DEFAULT_THETA: f64 = 10_000.0;

/// A scaling by its name in the file.
pub type ScalingName = &'static str;

/// Rope of all layers. `allowed` lists the scaling types that the family's reference computes; `dim` is the number of
/// rotated components.
pub fn read(
    raw: &Raw,
    dim: usize,
    max_positions: usize,
    layout: RopeLayout,
    allowed: &[ScalingName],
) -> Result<RopeSpec, ConfigError> {
    let old = raw.object("rope_scaling")?;
    let new = raw.object("rope_parameters")?;
    let outer_theta = theta(raw)?;
    whole_head(raw)?;
    let outer_original = raw.count_opt("original_max_position_embeddings", MAX_POSITIONS)?;
    let (inner, key) = match (old, new) {
        (Some(a), Some(b)) if !a.entries().eq(b.entries()) => {
            return Err(raw.refuse("rope_scaling", "and `rope_parameters` disagree", "keep one of them"));
        }
        (_, Some(b)) => (Some(b), "rope_parameters"),
        (a, None) => (a, "rope_scaling"),
    };
    let Some(inner) = inner else {
        let theta = outer_theta.unwrap_or(DEFAULT_THETA);
        return Ok(RopeSpec { theta, dim, layout, scaling: RopeScaling::None });
    };
    if let Some((name, _)) = inner.entries().find(|(_, v)| v.is_object()) {
        let problem = format!("has an object under `{}`", excerpt(name));
        return Err(raw.refuse(key, problem, "rope by layer type is not supported for this model type"));
    }
    whole_head(&inner)?;
    let inner_theta = theta(&inner)?;
    if let (Some(a), Some(b)) = (outer_theta, inner_theta)
        && a != b
    {
        let problem = format!("is {a} while `{key}.rope_theta` is {b}");
        return Err(raw.refuse("rope_theta", problem, "keep one of them"));
    }
    let scaling = scaling(&inner, outer_original, max_positions, allowed)?;
    if dim < 4 && matches!(scaling, RopeScaling::Ntk { .. }) {
        return Err(raw.refuse(
            key,
            "is of type ntk",
            format!("which needs more than {dim} rotated components"),
        ));
    }
    raw.absorb(inner);
    Ok(RopeSpec { theta: inner_theta.or(outer_theta).unwrap_or(DEFAULT_THETA), dim, layout, scaling })
}

fn theta(raw: &Raw) -> Result<Option<f64>, ConfigError> {
    raw.real_where("rope_theta", |x| x > 1.0 && x <= 1e15, "above 1, at most 1e15")
}

fn whole_head(raw: &Raw) -> Result<(), ConfigError> {
    let only = "1: this model type rotates whole heads";
    raw.real_where("partial_rotary_factor", |x| x == 1.0, only).map(|_| ())
}

/// The scaling that the inner object asks for; without a type it is the default one.
fn scaling(
    inner: &Raw,
    outer: Option<usize>,
    max_positions: usize,
    allowed: &[ScalingName],
) -> Result<RopeScaling, ConfigError> {
    let (newer, older) = (inner.text("rope_type")?, inner.text("type")?);
    if let (Some(a), Some(b)) = (newer, older)
        && a != b
    {
        let problem = format!("is \"{}\" while `rope_type` is \"{}\"", excerpt(b), excerpt(a));
        return Err(inner.refuse("type", problem, "keep one of them"));
    }
    let key = if newer.is_some() { "rope_type" } else { "type" };
    let name = newer.or(older).unwrap_or("default");
    if name != "default" && !allowed.contains(&name) {
        let list = allowed.join(", ");
        let remedy = format!("this model type supports: default, {list}");
        return Err(inner.refuse(key, format!("is \"{}\"", excerpt(name)), remedy));
    }
    let original = match (inner.count_opt("original_max_position_embeddings", MAX_POSITIONS)?, outer) {
        // Versions of the reference differ in which of the two counts.
        (Some(a), Some(b)) if a != b && matches!(name, "llama3" | "yarn") => {
            let problem = format!("is {a} while the outer one is {b}");
            return Err(inner.refuse("original_max_position_embeddings", problem, "keep one of them"));
        }
        (inner, outer) => inner.or(outer).unwrap_or(max_positions),
    };
    match name {
        "linear" => Ok(RopeScaling::Linear { factor: factor(inner)? }),
        "ntk" => Ok(RopeScaling::Ntk { factor: factor(inner)? }),
        "llama3" => llama3(inner, original),
        "yarn" => yarn(inner, original).map(RopeScaling::Yarn),
        _ => Ok(RopeScaling::None),
    }
}

fn factor(inner: &Raw) -> Result<f64, ConfigError> {
    inner
        .real_where("factor", |x| (1.0..=1e6).contains(&x), "between 1 and 1e6")?
        .ok_or_else(|| inner.missing("factor"))
}

fn positive(inner: &Raw, key: &'static str) -> Result<Option<f64>, ConfigError> {
    inner.real_where(key, |x| (1e-6..=1e6).contains(&x), "between 1e-6 and 1e6")
}

fn llama3(inner: &Raw, original_max_positions: usize) -> Result<RopeScaling, ConfigError> {
    let required = |key| positive(inner, key)?.ok_or_else(|| inner.missing(key));
    let (low_freq_factor, high_freq_factor) = (required("low_freq_factor")?, required("high_freq_factor")?);
    if low_freq_factor >= high_freq_factor {
        let problem = format!("is {low_freq_factor}, high_freq_factor {high_freq_factor}");
        return Err(inner.refuse("low_freq_factor", problem, "it must be the smaller of the two"));
    }
    Ok(RopeScaling::Llama3 {
        factor: factor(inner)?,
        low_freq_factor,
        high_freq_factor,
        original_max_positions,
    })
}

fn yarn(inner: &Raw, original_max_positions: usize) -> Result<Yarn, ConfigError> {
    // Zero counts as unstated for the two scales, as in the reference.
    let scale = |key| {
        Ok::<_, ConfigError>(
            inner.real_where(key, |x| (0.0..=1e6).contains(&x), "between 0 and 1e6")?.filter(|x| *x != 0.0),
        )
    };
    let yarn = Yarn {
        factor: factor(inner)?,
        original_max_positions,
        attention_factor: positive(inner, "attention_factor")?,
        beta_fast: positive(inner, "beta_fast")?.unwrap_or(32.0),
        beta_slow: positive(inner, "beta_slow")?.unwrap_or(1.0),
        mscale: scale("mscale")?,
        mscale_all_dim: scale("mscale_all_dim")?,
        truncate: inner.flag("truncate", true)?,
    };
    if yarn.beta_fast < yarn.beta_slow {
        let problem = format!("is {}, beta_slow {}", yarn.beta_fast, yarn.beta_slow);
        return Err(inner.refuse("beta_fast", problem, "it must be the larger of the two"));
    }
    Ok(yarn)
}

/// Adds `rope_theta` and `rope_scaling` (absent without scaling), the layout that every reader knows.
pub fn write(rope: &RopeSpec, out: &mut Map<String, Value>) {
    out.insert("rope_theta".into(), json!(rope.theta));
    let scaling = match &rope.scaling {
        RopeScaling::None => return,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        // The key AstrAI reads is the older one.
        RopeScaling::Ntk { factor } => json!({"type": "ntk", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_positions,
        }),
        RopeScaling::Yarn(y) => write_yarn(y),
    };
    out.insert("rope_scaling".into(), scaling);
}

fn write_yarn(y: &Yarn) -> Value {
    let mut map = Map::new();
    map.insert("rope_type".into(), json!("yarn"));
    map.insert("factor".into(), json!(y.factor));
    map.insert("original_max_position_embeddings".into(), json!(y.original_max_positions));
    map.insert("beta_fast".into(), json!(y.beta_fast));
    map.insert("beta_slow".into(), json!(y.beta_slow));
    map.insert("truncate".into(), json!(y.truncate));
    let optional = [
        ("attention_factor", y.attention_factor),
        ("mscale", y.mscale),
        ("mscale_all_dim", y.mscale_all_dim),
    ];
    for (key, value) in optional {
        if let Some(x) = value {
            map.insert(key.into(), json!(x));
        }
    }
    Value::Object(map)
}
