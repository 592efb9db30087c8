//! How the weights of a checkpoint are packed. In: the object under `quantization_config`. Out: a [`Packing`] whose numbers are in range,
//! or one line that names the method and what of it is not read. Which layers are packed the file itself says: lists of those that are
//! not need no reading.

use super::error::{ConfigError, show};
use super::raw::Raw;
use astrai_ir::Code;
use astrai_ir::packing::{Awq, Blocks, Compressed, Gptq, Packing, Share};
use serde_json::{Map, Value};

/// Where it stands.
pub(crate) const KEY: &str = "quantization_config";

/// Most neighbours that share a scale.
const MAX_GROUP: usize = 1 << 16;

/// What the configuration states; none where it states nothing.
pub(crate) fn read(raw: &Raw) -> Result<Option<Packing>, ConfigError> {
    let Some(q) = raw.object(KEY)? else { return Ok(None) };
    for key in ["modules_to_not_convert", "ignore"] {
        q.texts(key)?;
    }
    let read = match q.text("quant_method")? {
        Some("fp8") => fp8(&q)?,
        Some("compressed-tensors") => compressed(raw, &q)?,
        Some("gptq") => gptq(&q)?,
        Some("awq") => awq(&q)?,
        other => {
            let problem = match other {
                Some(other) => format!("has the quant_method {}", show(&Value::from(other))),
                None => "has no quant_method".to_string(),
            };
            let remedy = "supported: fp8, compressed-tensors, gptq, awq, and mxfp4 of gpt-oss; or give weights in bf16 or f32 and remove it";
            return Err(raw.refuse(KEY, problem, remedy));
        }
    };
    Ok(Some(read))
}

fn fp8(q: &Raw) -> Result<Packing, ConfigError> {
    q.one_of("fmt", &["e4m3", "float8_e4m3fn"])?;
    let key = "weight_block_size";
    let remedy = format!("fp8 has blocks of two sizes, each 1 to {MAX_GROUP}");
    let refused = |problem: String| q.refuse(key, problem, remedy.clone());
    // Without blocks a matrix has one scale.
    let Some((_, value)) = q.find(key)?.filter(|(_, v)| !v.is_null()) else {
        return Ok(Packing::Fp8(Blocks { rows: 0, columns: 0 }));
    };
    let sizes = value.as_array().map(|list| list.iter().map(size).collect::<Vec<_>>());
    match sizes.as_deref() {
        Some([Some(rows), Some(columns)]) => Ok(Packing::Fp8(Blocks { rows: *rows, columns: *columns })),
        _ => Err(refused(format!("is {}", show(value)))),
    }
}

fn size(value: &Value) -> Option<usize> {
    value.as_u64().filter(|n| (1..=MAX_GROUP as u64).contains(n)).map(|n| n as usize)
}

/// Bits of an integer.
fn code(q: &Raw, key: &'static str) -> Result<Code, ConfigError> {
    match q.count(key, 64)? {
        4 => Ok(Code::Int4),
        8 => Ok(Code::Int8),
        n => Err(q.refuse(key, format!("is {n}"), "integers of 4 and of 8 bits are read")),
    }
}

/// A group along the inputs; -1 is all of them.
fn share(q: &Raw, key: &'static str) -> Result<Share, ConfigError> {
    match q.find(key)? {
        Some((_, v)) if v.as_i64() == Some(-1) => Ok(Share::Row),
        _ => Ok(Share::Group(q.count(key, MAX_GROUP)?)),
    }
}

fn gptq(q: &Raw) -> Result<Packing, ConfigError> {
    let format = q.one_of("checkpoint_format", &["gptq", "gptq_v2"])?;
    if q.flag("is_marlin_format", false)? {
        return Err(q.refuse("is_marlin_format", "is true", "gptq and gptq_v2 are read, marlin is not"));
    }
    Ok(Packing::Gptq(Gptq {
        code: code(q, "bits")?,
        share: share(q, "group_size")?,
        act_order: q.flag("desc_act", false)?,
        less_one: format != Some("gptq_v2"),
    }))
}

fn awq(q: &Raw) -> Result<Packing, ConfigError> {
    q.one_of("version", &["gemm", "GEMM"])?;
    if code(q, "bits")? != Code::Int4 {
        return Err(q.refuse("bits", "is 8", "awq has integers of 4 bits"));
    }
    if !q.flag("zero_point", true)? {
        return Err(q.refuse("zero_point", "is false", "awq is read with zero points"));
    }
    Ok(Packing::Awq(Awq { share: share(q, "group_size")? }))
}

fn compressed(raw: &Raw, q: &Raw) -> Result<Packing, ConfigError> {
    let format = q.one_of("format", &["float-quantized", "int-quantized", "pack-quantized"])?;
    let format = format.ok_or_else(|| q.missing("format"))?;
    let dense = |v: &Value| match v {
        Value::Object(m) => m.get("format").is_none_or(|f| f.is_null() || f == "dense"),
        _ => v.is_null(),
    };
    for (key, harmless) in [
        ("sparsity_config", &dense as &dyn Fn(&Value) -> bool),
        ("transform_config", &|v| v.as_object().is_some_and(Map::is_empty)),
    ] {
        if let Some((_, v)) = q.find(key)?.filter(|(_, v)| !harmless(v)) {
            let problem = format!("is {}", show(v));
            return Err(q.refuse(key, problem, "the result would differ, so the model is refused"));
        }
    }
    let groups = q.find("config_groups")?.and_then(|(_, v)| v.as_object());
    let mut all = groups.into_iter().flat_map(Map::values);
    let (Some(Value::Object(group)), None) = (all.next(), all.next()) else {
        let problem = "is no object of one group";
        return Err(q.refuse("config_groups", problem, "all layers that are packed are packed alike"));
    };
    let key = format!("{KEY}.config_groups");
    raw.within(&key, group, &[], |group| {
        let targets = group.texts("targets")?.unwrap_or_default();
        if targets != ["Linear"] {
            let problem = format!("are {}", show(&Value::from(targets)));
            return Err(group.refuse("targets", problem, "[\"Linear\"] is read"));
        }
        let weights = group.object("weights")?.ok_or_else(|| group.missing("weights"))?;
        weights_of(&weights, format)
    })
}

/// The weights of a group of compressed-tensors.
fn weights_of(w: &Raw, format: &str) -> Result<Packing, ConfigError> {
    let float = format == "float-quantized";
    let kind = if float { "float" } else { "int" };
    w.one_of("type", &[kind])?;
    let code = match code(w, "num_bits")? {
        Code::Int8 if float => Code::Fp8,
        Code::Int4 if format != "pack-quantized" => {
            return Err(w.refuse("num_bits", "is 4", format!("{format} has 8 bits")));
        }
        code => code,
    };
    if let Some((_, v)) = w.find("actorder")?.filter(|(_, v)| !["static", "weight"].iter().any(|s| *v == s)) {
        let problem = format!("is {}", show(v));
        return Err(w.refuse("actorder", problem, "groups of neighbours are read: null, static or weight"));
    }
    let share = match w.one_of("strategy", &["tensor", "channel", "group"])? {
        Some("tensor") => Share::Tensor,
        Some("channel") => Share::Row,
        Some(_) => share(w, "group_size")?,
        None => return Err(w.missing("strategy")),
    };
    let zeros = !w.flag("symmetric", true)?;
    if zeros && (float || share == Share::Tensor) {
        return Err(w.refuse(
            "symmetric",
            "is false",
            "integers with a scale a row or group have zero points",
        ));
    }
    if share == Share::Tensor && format == "pack-quantized" {
        return Err(w.refuse("strategy", "is \"tensor\"", "packed integers have a scale a row or group"));
    }
    Ok(Packing::Compressed(Compressed { code, packed: format == "pack-quantized", share, zeros }))
}
