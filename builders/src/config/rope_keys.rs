//! The rope keys of a configuration. In: `rope_theta` with `rope_scaling` (the layout of most published files) or
//! `rope_parameters` (the newer one). Out: a `RopeSpec`; and back to keys for saving.

use super::error::{ConfigError, excerpt};
use super::raw::Raw;
use super::rope::{LongRope, RopeLayout, RopeScaling, RopeSpec, Yarn};
use super::spec::MAX_POSITIONS;
use serde_json::{Map, Value, json};

/// Base when the file states none; what every family here takes.
const DEFAULT_THETA: f64 = 10_000.0;

/// A scaling by its name in the file.
pub type ScalingName = &'static str;

/// What a family's rope may be, and where its keys stand.
pub struct RopeKeys {
    /// Which components form a pair.
    pub layout: RopeLayout,
    /// Scaling types that the family's reference computes.
    pub allowed: &'static [ScalingName],
    /// Share of a head that is rotated when the file states none; `None`: whole heads only.
    pub share: Option<f64>,
    /// Original context when the file states none; `None`: the longest.
    pub original: Option<usize>,
    /// For rope by layer type: the entry of `rope_parameters` to read.
    pub layer_type: Option<LayerType>,
}

/// Keys of the rope of one type of layers, where types differ (Gemma 3).
#[derive(Clone, Copy)]
pub struct LayerType {
    /// The entry of `rope_parameters`.
    pub name: &'static str,
    /// The base in the layout without `rope_parameters`.
    pub theta: &'static str,
    /// Base when neither is stated.
    pub default: f64,
    /// Scaling in the layout without `rope_parameters`, if there may be one.
    pub scaled: bool,
}

/// Rope of heads of `head_dim` components: of all layers, or of those of one type.
pub fn read(
    raw: &Raw,
    head_dim: usize,
    max_positions: usize,
    keys: &RopeKeys,
) -> Result<RopeSpec, ConfigError> {
    let (theta_key, default) =
        keys.layer_type.map_or(("rope_theta", DEFAULT_THETA), |t| (t.theta, t.default));
    let outer_theta = theta(raw, theta_key)?;
    let outer_share = share(raw, keys)?;
    let outer_original = raw.count_opt("original_max_position_embeddings", MAX_POSITIONS)?.or(keys.original);
    let Some((inner, key)) = inner(raw, keys)? else {
        let theta = outer_theta.unwrap_or(default);
        let dim = rotated(raw, head_dim, outer_share.or(keys.share))?;
        return Ok(RopeSpec { theta, dim, layout: keys.layout, scaling: RopeScaling::None });
    };
    if let Some((name, _)) = inner.entries().find(|(_, v)| v.is_object()) {
        let problem = format!("has an object under `{}`", excerpt(name));
        return Err(raw.refuse(key, problem, "rope by layer type is not supported for this model type"));
    }
    let inner_theta = theta(&inner, "rope_theta")?;
    let theta = same(raw, (theta_key, outer_theta), (key, "rope_theta", inner_theta))?.unwrap_or(default);
    let inner_share = share(&inner, keys)?;
    let factor = "partial_rotary_factor";
    let dim =
        rotated(raw, head_dim, same(raw, (factor, outer_share), (key, factor, inner_share))?.or(keys.share))?;
    let context = Context { outer_original, max_positions, dim };
    let scaling = scaling(&inner, &context, keys.allowed)?;
    if dim < 4 && matches!(scaling, RopeScaling::Ntk { .. }) {
        return Err(raw.refuse(
            key,
            "is of type ntk",
            format!("which needs more than {dim} rotated components"),
        ));
    }
    raw.absorb(inner);
    Ok(RopeSpec { theta, dim, layout: keys.layout, scaling })
}

/// The object that says how rope is scaled, in either layout, and its key.
fn inner<'a>(raw: &Raw<'a>, keys: &RopeKeys) -> Result<Option<(Raw<'a>, &'static str)>, ConfigError> {
    let old = raw.object("rope_scaling")?;
    let new = raw.object("rope_parameters")?;
    let Some(of) = keys.layer_type else {
        return match (old, new) {
            (Some(a), Some(b)) if !a.entries().eq(b.entries()) => {
                Err(raw.refuse("rope_scaling", "and `rope_parameters` disagree", "keep one of them"))
            }
            (_, Some(b)) => Ok(Some((b, "rope_parameters"))),
            (a, None) => Ok(a.map(|a| (a, "rope_scaling"))),
        };
    };
    let Some(new) = new else { return Ok(old.filter(|_| of.scaled).map(|o| (o, "rope_scaling"))) };
    if old.is_some() {
        let problem = "stands beside `rope_parameters`";
        return Err(raw.refuse("rope_scaling", problem, "keep one of them"));
    }
    if let Some((name, _)) = new.entries().find(|(name, _)| !LAYER_TYPES.contains(name)) {
        let problem = format!("has the key `{}`", excerpt(name));
        let remedy = format!("this model type has an object for each of {}", LAYER_TYPES.join(", "));
        return Err(raw.refuse("rope_parameters", problem, remedy));
    }
    Ok(new.object(of.name)?.map(|r| (r, "rope_parameters")))
}

/// Types of layers of which each may have a rope of its own.
pub const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// The one of two values that is stated; an error when they differ.
fn same(
    raw: &Raw,
    (outer_key, outer): (&'static str, Option<f64>),
    (object, inner_key, inner): (&str, &str, Option<f64>),
) -> Result<Option<f64>, ConfigError> {
    match (outer, inner) {
        (Some(a), Some(b)) if a != b => {
            let problem = format!("is {a} while `{object}.{inner_key}` is {b}");
            Err(raw.refuse(outer_key, problem, "keep one of them"))
        }
        (outer, inner) => Ok(inner.or(outer)),
    }
}

/// Components of a head that are rotated.
fn rotated(raw: &Raw, head_dim: usize, share: Option<f64>) -> Result<usize, ConfigError> {
    let Some(share) = share else { return Ok(head_dim) };
    // Truncated, as the reference does.
    let dim = (head_dim as f64 * share) as usize;
    if dim == 0 || !dim.is_multiple_of(2) {
        let problem = format!("is {share}, which is {dim} of {head_dim} components");
        return Err(raw.refuse("partial_rotary_factor", problem, "rope turns pairs; correct it"));
    }
    Ok(dim)
}

fn theta(raw: &Raw, key: &'static str) -> Result<Option<f64>, ConfigError> {
    raw.real_where(key, |x| x > 1.0 && x <= 1e15, "above 1, at most 1e15")
}

fn share(raw: &Raw, keys: &RopeKeys) -> Result<Option<f64>, ConfigError> {
    let key = "partial_rotary_factor";
    match keys.share {
        Some(_) => raw.real_where(key, |x| x > 0.0 && x <= 1.0, "above 0, at most 1"),
        None => raw.real_where(key, |x| x == 1.0, "1: this model type rotates whole heads"),
    }
}

/// What a scaling may refer to.
struct Context {
    outer_original: Option<usize>,
    max_positions: usize,
    /// Rotated components.
    dim: usize,
}

/// The scaling that the inner object asks for; without a type it is the default one.
fn scaling(inner: &Raw, context: &Context, allowed: &[ScalingName]) -> Result<RopeScaling, ConfigError> {
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
    let inner_original = inner.count_opt("original_max_position_embeddings", MAX_POSITIONS)?;
    let original = match (inner_original, context.outer_original) {
        // Versions of the reference differ in which of the two counts.
        (Some(a), Some(b)) if a != b && matches!(name, "llama3" | "yarn" | "longrope" | "su") => {
            let problem = format!("is {a} while the outer one is {b}");
            return Err(inner.refuse("original_max_position_embeddings", problem, "keep one of them"));
        }
        (inner, outer) => inner.or(outer).unwrap_or(context.max_positions),
    };
    match name {
        "linear" => Ok(RopeScaling::Linear { factor: factor(inner)? }),
        "ntk" => Ok(RopeScaling::Ntk { factor: factor(inner)? }),
        "llama3" => llama3(inner, original),
        "yarn" => yarn(inner, original).map(RopeScaling::Yarn),
        "longrope" | "su" => longrope(inner, original, context).map(RopeScaling::LongRope),
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

fn longrope(inner: &Raw, original: usize, context: &Context) -> Result<LongRope, ConfigError> {
    let divisors = |key: &'static str| {
        let list = inner.reals(key)?.ok_or_else(|| inner.missing(key))?;
        let want = context.dim / 2;
        if list.len() != want {
            let problem = format!("lists {} numbers", list.len());
            return Err(inner.refuse(key, problem, format!("there are {want} rotated pairs, one for each")));
        }
        match list.iter().find(|x| !(1e-6..=1e6).contains(*x)) {
            Some(x) => Err(inner.refuse(key, format!("lists {x}"), "each must be between 1e-6 and 1e6")),
            None => Ok(list),
        }
    };
    if original < 2 {
        let key = "original_max_position_embeddings";
        return Err(inner.refuse(key, format!("is {original}"), "it must be at least 2"));
    }
    Ok(LongRope {
        short: divisors("short_factor")?,
        long: divisors("long_factor")?,
        original_max_positions: original,
        max_positions: context.max_positions,
        factor: positive(inner, "factor")?,
        attention_factor: positive(inner, "attention_factor")?,
    })
}

/// The share of a head that `dim` components are, such that truncating gives `dim` again.
pub fn share_of(dim: usize, head_dim: usize) -> f64 {
    let share = dim as f64 / head_dim as f64;
    if (head_dim as f64 * share) as usize == dim { share } else { share.next_up() }
}

/// Adds `rope_theta` and `rope_scaling` (absent without scaling), the layout that every reader knows.
pub fn write(rope: &RopeSpec, out: &mut Map<String, Value>) {
    out.insert("rope_theta".into(), json!(rope.theta));
    if let RopeScaling::LongRope(l) = &rope.scaling {
        out.insert("original_max_position_embeddings".into(), json!(l.original_max_positions));
    }
    if let Some(scaling) = write_scaling(&rope.scaling) {
        out.insert("rope_scaling".into(), scaling);
    }
}

/// A scaling as the object of the file; `None` without one.
pub fn write_scaling(scaling: &RopeScaling) -> Option<Value> {
    Some(match scaling {
        RopeScaling::None => return None,
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
        RopeScaling::Yarn(y) => stated(json!({
            "rope_type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_max_positions,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
            "truncate": y.truncate,
            "attention_factor": y.attention_factor,
            "mscale": y.mscale,
            "mscale_all_dim": y.mscale_all_dim,
        })),
        RopeScaling::LongRope(l) => stated(json!({
            "type": "longrope",
            "short_factor": l.short,
            "long_factor": l.long,
            "factor": l.factor,
            "attention_factor": l.attention_factor,
        })),
    })
}

/// The keys that are stated: older readers accept exactly those of LongRoPE that always are.
fn stated(mut scaling: Value) -> Value {
    scaling.as_object_mut().into_iter().for_each(|map| map.retain(|_, value| !value.is_null()));
    scaling
}
