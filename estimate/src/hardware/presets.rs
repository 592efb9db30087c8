//! Machines by name. In: a name. Out: what the file of that name in `estimate/hardware` says, its sources included.

use super::Hardware;
use crate::Refused;

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../hardware/", $name, ".json5")))),*]
    };
}

/// Names and files.
pub const PRESETS: [(&str, &str); 12] = presets![
    "h100-sxm", "h200", "h800", "h20", "a100-80g", "l20", "l40s", "rtx-4090", "b200", "gb200", "p800",
    "mi300x",
];

/// The machine of this name, if there is one; case and `_` for `-` do not matter, LLMSim's names are understood.
pub fn preset(name: &str) -> Option<Result<Hardware, Refused>> {
    let name = name.to_ascii_lowercase().replace('_', "-");
    let name = match name.as_str() {
        "h100" => "h100-sxm",
        "a100" => "a100-80g",
        "rtx4090" | "4090" => "rtx-4090",
        "klx-p800" => "p800",
        other => other,
    };
    let (name, text) = PRESETS.iter().find(|(n, _)| *n == name)?;
    Some(Hardware::parse(text, &format!("{name}.json5")))
}
