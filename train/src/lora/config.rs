//! In: the text of `adapter_config.json`, or settings. Out: rank, scale and targets, resolved for a model; and the text again. Every key
//! that PEFT may write is known to be read, to change nothing here, or to be refused unless it is empty.

use super::{ADAPTER_CONFIG, layers};
use astrai_builders::ModelConfig;
use astrai_files::{one_line, read_text};
use astrai_runtime::{Adapter, Factors};
use fancy_regex::Regex;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Longest configuration read, in bytes.
const LONGEST: u64 = 4 << 20;
/// Largest rank.
const RANK: u64 = 1 << 16;

/// Which linear layers are adapted.
#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// All in the layers, experts' included, but for routers.
    AllLinear,
    /// Those of these names, or whose names end in one of them behind a dot.
    Names(Vec<String>),
    /// Those whose whole name matches a regular expression.
    Pattern(String),
}

/// A low-rank adapter's configuration, in PEFT's terms.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rank of the factors.
    pub rank: usize,
    /// The product is scaled by alpha over the rank.
    pub alpha: f64,
    /// Over its root instead (arXiv:2312.03732).
    pub rslora: bool,
    /// Whether magnitudes are trained apart (arXiv:2402.09353).
    pub dora: bool,
    /// What is adapted.
    pub targets: Targets,
    /// Other ranks, by the end of a module's name, a regular expression.
    pub ranks: Vec<(String, usize)>,
    /// Other alphas, likewise.
    pub alphas: Vec<(String, f64)>,
    /// Part of the inputs that training leaves out.
    pub dropout: f64,
    /// The model that is adapted.
    pub base: Option<String>,
}

/// Keys that say nothing about what is computed.
const REMARKS: [&str; 9] = [
    "task_type",
    "inference_mode",
    "peft_version",
    "auto_mapping",
    "revision",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "ensure_weight_tying",
];

/// Ways to draw factors that leave the base as it was published.
const DRAWS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

impl Lora {
    /// Reads the configuration in an adapter's folder.
    ///
    /// # Errors
    /// There is none, it is no JSON, or asks for what is not supported: a line with the key.
    pub fn read(folder: &Path) -> Result<Lora, String> {
        let path = folder.join(ADAPTER_CONFIG);
        let text = read_text(&path, LONGEST).map_err(|e| e.to_string())?;
        Lora::parse(&text).map_err(|e| format!("{}: {}", path.display(), one_line(&e)))
    }

    /// Reads the text of `adapter_config.json`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Lora, String> {
        let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let mut take = |key: &str| keys.remove(key).filter(|v| !v.is_null());
        match take("peft_type") {
            Some(Value::String(kind)) if kind == "LORA" => {}
            other => return Err(format!("peft_type: {} is not LORA", other.unwrap_or_default())),
        }
        let rank = match take("r").as_ref().and_then(Value::as_u64) {
            Some(rank @ 1..=RANK) => rank as usize,
            _ => return Err(format!("r: the rank is a number from 1 to {RANK}")),
        };
        let number = |key: &str, v: Option<Value>, unless: f64| {
            let x = v.map_or(Some(unless), |v| v.as_f64()).filter(|x| x.is_finite());
            x.ok_or_else(|| format!("{key}: not a number"))
        };
        let alpha = number("lora_alpha", take("lora_alpha"), 8.0)?;
        let dropout = number("lora_dropout", take("lora_dropout"), 0.0)?;
        let mut flag = |key: &str| match take(key) {
            None => Ok(false),
            Some(Value::Bool(is)) => Ok(is),
            Some(other) => Err(format!("{key}: {other} is neither true nor false")),
        };
        let (rslora, dora) = (flag("use_rslora")?, flag("use_dora")?);
        match take("bias") {
            None => {}
            Some(Value::String(bias)) if bias == "none" => {}
            Some(other) => return Err(format!("bias: {other} is not supported, \"none\" is")),
        }
        match take("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(how)) if DRAWS.contains(&how.as_str()) => {}
            Some(other) => {
                return Err(format!(
                    "init_lora_weights: {other} changes the base model, which is not supported"
                ));
            }
        }
        let targets = targets(take("target_modules"))?;
        let patterns = |key: &str, v: Option<Value>| match v {
            None => Ok(vec![]),
            Some(Value::Object(map)) => map
                .into_iter()
                .map(|(pattern, x)| match x.as_f64().filter(|x| x.is_finite()) {
                    Some(x) => Ok((pattern, x)),
                    None => Err(format!("{key}: {pattern:?} has no number")),
                })
                .collect(),
            Some(other) => Err(format!("{key}: {other} is no object")),
        };
        let ranks = patterns("rank_pattern", take("rank_pattern"))?.into_iter().map(|(pattern, x)| {
            let fits = x.fract() == 0.0 && (1.0..=RANK as f64).contains(&x);
            fits.then(|| (pattern.clone(), x as usize))
                .ok_or_else(|| format!("rank_pattern: {pattern:?} has the rank {x}"))
        });
        let ranks = ranks.collect::<Result<_, String>>()?;
        let alphas = patterns("alpha_pattern", take("alpha_pattern"))?;
        let base = match take("base_model_name_or_path") {
            None => None,
            Some(Value::String(base)) => Some(base),
            Some(other) => return Err(format!("base_model_name_or_path: {other} is no path")),
        };
        let empty = |v: &Value| match v {
            Value::Null | Value::Bool(false) => true,
            Value::String(s) => s.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        match keys.iter().find(|(key, v)| !REMARKS.contains(&key.as_str()) && !empty(v)) {
            Some((key, v)) => Err(format!("{key}: {v} is not supported; export the adapter without it")),
            None => Ok(Lora { rank, alpha, rslora, dora, targets, ranks, alphas, dropout, base }),
        }
    }

    /// The text of `adapter_config.json` for an adapter of a model, as PEFT reads it.
    pub fn text(&self, adapter: &Adapter) -> String {
        let targets = match &self.targets {
            Targets::AllLinear => json!(adapter.modules.keys().collect::<Vec<_>>()),
            Targets::Names(names) => json!(names),
            Targets::Pattern(pattern) => json!(pattern),
        };
        let patterns = |list: &[(String, f64)]| {
            list.iter().map(|(k, x)| (k.clone(), json!(x))).collect::<Map<String, Value>>()
        };
        let ranks: Map<String, Value> = self.ranks.iter().map(|(k, r)| (k.clone(), json!(r))).collect();
        let whole = self.alpha.fract() == 0.0 && self.alpha.abs() < 1e15;
        let alpha = if whole { json!(self.alpha as i64) } else { json!(self.alpha) };
        let keys = json!({
            "alpha_pattern": patterns(&self.alphas), "base_model_name_or_path": self.base, "bias": "none",
            "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "lora_alpha": alpha,
            "lora_dropout": self.dropout, "modules_to_save": null, "peft_type": "LORA", "r": self.rank,
            "rank_pattern": ranks, "target_modules": targets, "task_type": "CAUSAL_LM", "use_dora": self.dora,
            "use_rslora": self.rslora,
        });
        format!("{keys:#}\n")
    }

    /// Which linear layers of a model are adapted, and how.
    ///
    /// # Errors
    /// A target names none of them, or a pattern is no regular expression.
    pub fn adapter(&self, config: &ModelConfig) -> Result<Adapter, String> {
        let layers = layers(config)?;
        let ends = |name: &str, target: &str| {
            name.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let chosen: Vec<&String> = match &self.targets {
            Targets::AllLinear => layers.keys().collect(),
            Targets::Names(names) => {
                if let Some(none) = names.iter().find(|t| !layers.keys().any(|name| ends(name, t))) {
                    return Err(unknown(none, &layers));
                }
                layers.keys().filter(|name| names.iter().any(|t| ends(name, t))).collect()
            }
            Targets::Pattern(pattern) => {
                let whole = regex(&format!(r"\A(?:{pattern})\z"), pattern)?;
                let mut chosen = Vec::new();
                for name in layers.keys() {
                    if matches(&whole, name)? {
                        chosen.push(name);
                    }
                }
                if chosen.is_empty() {
                    return Err(unknown(pattern, &layers));
                }
                chosen
            }
        };
        let ending = |(pattern, _): &(String, f64)| regex(&format!(r"\A(?:.*\.)?(?:{pattern})\z"), pattern);
        let by_name = |list: &[(String, f64)]| {
            list.iter().map(|p| Ok((ending(p)?, p.1))).collect::<Result<Vec<_>, String>>()
        };
        let ranks: Vec<_> = self.ranks.iter().map(|(p, r)| (p.clone(), *r as f64)).collect();
        let (ranks, alphas) = (by_name(&ranks)?, by_name(&self.alphas)?);
        let mut modules = BTreeMap::new();
        for name in chosen {
            let of = |list: &[(Regex, f64)], unless: f64| {
                for (pattern, x) in list {
                    if matches(pattern, name)? {
                        return Ok(*x);
                    }
                }
                Ok::<f64, String>(unless)
            };
            let (rank, alpha) = (of(&ranks, self.rank as f64)?, of(&alphas, self.alpha)?);
            let scale = alpha / if self.rslora { rank.sqrt() } else { rank };
            modules.insert(name.clone(), Factors { rank: rank as usize, scale });
        }
        Ok(Adapter { modules, dora: self.dora })
    }

    /// Refuses what only matters in training and is not supported there.
    ///
    /// # Errors
    /// There is dropout.
    pub fn check_trainable(&self) -> Result<(), String> {
        match self.dropout == 0.0 {
            true => Ok(()),
            false => Err(format!("lora_dropout: {} is not supported in training; set it to 0", self.dropout)),
        }
    }
}

fn targets(v: Option<Value>) -> Result<Targets, String> {
    let wrong = || "target_modules: neither names nor a regular expression".to_string();
    match v {
        Some(Value::String(all)) if all == "all-linear" => Ok(Targets::AllLinear),
        Some(Value::String(pattern)) => Ok(Targets::Pattern(pattern)),
        Some(Value::Array(names)) if !names.is_empty() => {
            let name = |v: Value| match v {
                Value::String(name) if !name.is_empty() => Ok(name),
                _ => Err(wrong()),
            };
            Ok(Targets::Names(names.into_iter().map(name).collect::<Result<_, String>>()?))
        }
        _ => Err(wrong()),
    }
}

fn regex(whole: &str, pattern: &str) -> Result<Regex, String> {
    Regex::new(whole)
        .map_err(|e| format!("{pattern:?} is no regular expression: {}", one_line(&e.to_string())))
}

fn matches(pattern: &Regex, name: &str) -> Result<bool, String> {
    pattern.is_match(name).map_err(|e| format!("a regular expression takes too long: {e}"))
}

/// What is said of a target that is none.
fn unknown(target: &str, layers: &BTreeMap<String, [usize; 2]>) -> String {
    let mut ends: Vec<&str> = layers.keys().filter_map(|name| name.rsplit('.').next()).collect();
    ends.sort_unstable();
    ends.dedup();
    format!(
        "target_modules: {target:?} names no linear layer that can be adapted; there are {}",
        ends.join(", ")
    )
}
