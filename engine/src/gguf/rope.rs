//! How a GGUF file scales rotations. In: its metadata, and the tensors of factors. Out: `rope_scaling` as transformers has it.

use super::config::Keys;
use astrai_runtime::weights::{Gguf, ROPE_FACTORS};
use serde_json::{Value, json};

/// Rotated pairs of a head, at most.
const PAIRS: usize = 1 << 13;

impl Keys<'_> {
    /// How rotations are scaled to longer contexts.
    pub(super) fn scaling(&self, file: &Gguf, config: &Value) -> Result<Option<Value>, String> {
        // Looked at before it is read: any tensor may have the name.
        let short = |name: &&str| file.shape(name).is_some_and(|s| s.len() == 1 && s[0] <= PAIRS);
        let [freqs, long, short] = ROPE_FACTORS.map(|n| Some(n).filter(short).and_then(|n| file.floats(n)));
        if let Some(factors) = freqs {
            return llama3(&factors, config).map(Some);
        }
        let number = |key: &str| self.get(key).cloned();
        if let Some((long, short)) = long.zip(short) {
            let factor = number("rope.scaling.attn_factor");
            return Ok(Some(json!({
                "type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": factor,
            })));
        }
        // What yarn adds for each power of e, of which the file has a tenth (so does llama.cpp's converter).
        let added = self.get("rope.scaling.yarn_log_multiplier").and_then(Value::as_f64).map(|x| 10.0 * x);
        let stated = self.get("rope.scaling.type").and_then(Value::as_str);
        let scaled = number("rope.scaling.factor").and_then(|f| f.as_f64()).is_some_and(|f| f != 1.0);
        match stated.or(scaled.then_some("linear")) {
            None | Some("none") => Ok(None),
            Some("linear") => {
                Ok(Some(json!({ "rope_type": "linear", "factor": number("rope.scaling.factor") })))
            }
            Some("yarn") => Ok(Some(json!({
                "rope_type": "yarn", "factor": number("rope.scaling.factor"),
                "original_max_position_embeddings": number("rope.scaling.original_context_length"),
                "mscale": added, "mscale_all_dim": added,
                "beta_fast": number("rope.scaling.yarn_beta_fast"), "beta_slow": number("rope.scaling.yarn_beta_slow"),
            }))),
            Some(other) => Err(format!("scales rotations by `{other}`, which is not known")),
        }
    }
}

/// Llama 3's scaling, of which files have the factors on each frequency: the largest is the scaling's, and the others must follow from it.
fn llama3(factors: &[f32], config: &Value) -> Result<Value, String> {
    const ORIGINAL: f64 = 8192.0;
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    let factor = factors.iter().fold(1f64, |m, f| m.max(f64::from(*f)));
    let (base, width) = (config["rope_theta"].as_f64().unwrap_or(1e4), 2.0 * factors.len() as f64);
    let wanted = |i: usize| {
        let length = 2.0 * std::f64::consts::PI * base.powf(2.0 * i as f64 / width);
        if length < ORIGINAL / HIGH {
            1.0
        } else if length > ORIGINAL / LOW {
            factor
        } else {
            let smooth = (ORIGINAL / length - LOW) / (HIGH - LOW);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    let off = |(i, f): (usize, &f32)| (f64::from(*f) - wanted(i)).abs() > 1e-3 * wanted(i);
    if factors.iter().enumerate().any(off) {
        return Err(format!("`{}` has factors that are not those of Llama 3", ROPE_FACTORS[0]));
    }
    Ok(json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL as u64,
    }))
}
