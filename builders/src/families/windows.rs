//! Sliding windows. In: the keys by which a family says which layers have one. Out: the window of each layer; and back to keys.

use crate::config::rope_keys::LAYER_TYPES as TYPES;
use crate::config::{ConfigError, MAX_POSITIONS, ModelConfig, Raw};
use serde_json::{Map, Value, json};

/// Which layers have a sliding window, and the keys that say so.
#[derive(Clone, Copy)]
pub enum Windows {
    /// None of them, and there is no key.
    None,
    /// All layers that of `sliding_window`, where `null` is none; the value is what an absent key means.
    All(Option<usize>),
    /// As `All`, and `layer_types` may state the same.
    AllListed(Option<usize>),
    /// All layers if `use_sliding_window` is set; the value is the default window.
    AllSwitched(usize),
    /// If `use_sliding_window` is set, the layers that `layer_types` lists, else those from `max_window_layers` on; the values
    /// are the defaults of the window and of that number.
    UpperSwitched(usize, usize),
    /// The layers that `layer_types` lists, else those whose index the function accepts; the value is the default window.
    Pattern(usize, fn(usize) -> bool),
}

impl Windows {
    /// Keys that are read.
    pub(super) fn keys(self) -> &'static [&'static str] {
        match self {
            Windows::None => &[],
            Windows::All(_) => &["sliding_window"],
            Windows::AllSwitched(_) => &["use_sliding_window", "sliding_window"],
            Windows::AllListed(_) | Windows::Pattern(..) => &["sliding_window", "layer_types"],
            Windows::UpperSwitched(..) => {
                &["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"]
            }
        }
    }

    /// Gives the layers of `c` their windows.
    pub(super) fn read(self, raw: &Raw, c: &mut ModelConfig) -> Result<(), ConfigError> {
        let window = match self {
            Windows::None => None,
            Windows::All(default) | Windows::AllListed(default) => stated(raw, default)?,
            Windows::AllSwitched(default) | Windows::UpperSwitched(default, _) => stated(raw, Some(default))?,
            Windows::Pattern(default, windowed) => return pattern(raw, c, default, windowed),
        };
        let switched = matches!(self, Windows::AllSwitched(_) | Windows::UpperSwitched(..));
        let window = if switched && !raw.flag("use_sliding_window", false)? { None } else { window };
        let first = match self {
            Windows::UpperSwitched(_, default) => {
                raw.count_or_none("max_window_layers", MAX_POSITIONS)?.unwrap_or(default)
            }
            _ => 0,
        };
        let listed = matches!(self, Windows::AllListed(_) | Windows::UpperSwitched(..));
        let types = if listed { layer_types(raw, c.num_layers)? } else { None };
        for (i, layer) in c.layers.iter_mut().enumerate() {
            let windowed = types.as_ref().map_or(window.is_some() && i >= first, |t| t[i]);
            if windowed && window.is_none() {
                let problem = "lists sliding_attention while no sliding window is in use";
                return Err(raw.refuse("layer_types", problem, "state a window, or list none"));
            }
            if !windowed && window.is_some() && matches!(self, Windows::AllListed(_)) {
                let problem = "contradicts `sliding_window`";
                return Err(raw.refuse("layer_types", problem, "all layers have one window, or none"));
            }
            layer.attention.window = window.filter(|_| windowed);
        }
        Ok(())
    }

    /// Adds the keys of [`Windows::read`].
    pub(super) fn save(self, c: &ModelConfig, out: &mut Map<String, Value>) {
        let windows = || c.layers.iter().map(|l| l.attention.window);
        let window = windows().flatten().next();
        for key in self.keys() {
            let value = match *key {
                "use_sliding_window" => json!(window.is_some()),
                "max_window_layers" => json!(windows().position(|w| w.is_some()).unwrap_or(c.num_layers)),
                "layer_types" => {
                    let name = |w: Option<usize>| if w.is_some() { TYPES[1] } else { TYPES[0] };
                    windows().map(name).collect()
                }
                _ => json!(window),
            };
            out.insert((*key).into(), value);
        }
    }
}

/// The window that the file states, `None` for `null`; else the default.
fn stated(raw: &Raw, default: Option<usize>) -> Result<Option<usize>, ConfigError> {
    let window = raw.count_opt("sliding_window", MAX_POSITIONS)?;
    Ok(if raw.states("sliding_window") { window } else { default })
}

/// Windows on the layers that `layer_types` lists, else on those whose index `windowed` accepts.
pub(super) fn pattern(
    raw: &Raw,
    c: &mut ModelConfig,
    default: usize,
    windowed: impl Fn(usize) -> bool,
) -> Result<(), ConfigError> {
    let window = stated(raw, Some(default))?;
    let types = layer_types(raw, c.num_layers)?;
    for (i, layer) in c.layers.iter_mut().enumerate() {
        let windowed = types.as_ref().map_or_else(|| windowed(i), |t| t[i]);
        if windowed && window.is_none() {
            let problem = "is null while there are sliding layers";
            return Err(raw.refuse("sliding_window", problem, "state it, or list layer_types without them"));
        }
        layer.attention.window = window.filter(|_| windowed);
    }
    Ok(())
}

/// For each layer whether it is windowed, if the file lists the types of layers.
fn layer_types(raw: &Raw, num_layers: usize) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(types) = raw.texts("layer_types")? else { return Ok(None) };
    if types.len() != num_layers {
        let problem = format!("lists {} layers of {num_layers}", types.len());
        return Err(raw.refuse("layer_types", problem, "list every layer, or none"));
    }
    let windowed = |t: &&str| match TYPES.iter().position(|known| known == t) {
        Some(i) => Ok(i == 1),
        None => {
            let remedy = format!("supported: {}", TYPES.join(", "));
            Err(raw.refuse("layer_types", format!("lists {}", json!(t)), remedy))
        }
    };
    types.iter().map(windowed).collect::<Result<_, _>>().map(Some)
}
