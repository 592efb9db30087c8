//! Low-rank adapters as PEFT knows them. In: settings of a run, or `adapter_config.json` and `adapter_model.safetensors`, hostile.
//! Out: which linear layers of a model are adapted and how ([`Adapter`]), and weights: of factors that begin, of factors beside their base,
//! of a base into which they are merged.

mod config;
mod source;

pub use config::{Lora, Targets};
pub use source::{Beside, Fresh, Merged};

use astrai_builders::{ModelConfig, Program, build};
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Adapter, linear_layers};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name of the adapter's configuration.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Name of the adapter's weights.
pub const ADAPTER_MODEL: &str = "adapter_model.safetensors";

/// Whether a folder holds an adapter and no model of its own.
pub fn is_adapter(folder: &Path) -> bool {
    let own = ["model.safetensors", "model.safetensors.index.json"];
    folder.join(ADAPTER_CONFIG).is_file() && !own.iter().any(|name| folder.join(name).exists())
}

/// The linear layers of a model that can be adapted, with the `[out, in]` of their weights.
///
/// # Errors
/// The configuration makes no graph.
pub fn layers(config: &ModelConfig) -> Result<BTreeMap<String, [usize; 2]>, String> {
    Ok(linear_layers(&build(config, &Program::full(1, 1)).map_err(|e| e.to_string())?))
}

/// An adapter's folder, held to a model.
pub struct Folder {
    /// Where it lies.
    pub path: PathBuf,
    /// What its configuration says.
    pub lora: Lora,
    /// The same for the model.
    pub adapter: Adapter,
    /// Its factors.
    pub factors: Checkpoint,
}

impl Folder {
    /// Opens the adapter in a folder for a model; every factor must be there with its shape, and nothing else.
    ///
    /// # Errors
    /// A file is missing or damaged, asks for what is not supported, or is of another model.
    pub fn open(path: &Path, config: &ModelConfig) -> Result<Folder, String> {
        let lora = Lora::read(path)?;
        let at = |e: String| format!("{}: {e}", path.join(ADAPTER_CONFIG).display());
        let adapter = lora.adapter(config).map_err(at)?;
        let factors = Checkpoint::open(&path.join(ADAPTER_MODEL)).map_err(|e| e.to_string())?;
        let shapes = layers(config)?;
        let expected: Vec<_> = shapes.iter().flat_map(|(m, shape)| adapter.tensors(m, *shape)).collect();
        factors.check(&expected, &|_| false).map_err(|e| e.to_string())?;
        for name in factors.names() {
            if let Some(t) = factors.get(name).filter(|t| !t.dtype().is_float()) {
                let path = path.join(ADAPTER_MODEL);
                return Err(format!("{}: `{name}` holds integers ({})", path.display(), t.dtype()));
            }
        }
        Ok(Folder { path: path.to_path_buf(), lora, adapter, factors })
    }

    /// The folder of the model that an adapter's folder names: beside the adapter, else from where the command runs.
    ///
    /// # Errors
    /// It names none, or there is none.
    pub fn base(path: &Path) -> Result<PathBuf, String> {
        let named = Lora::read(path)?.base.unwrap_or_default();
        let places = [path.join(&named), PathBuf::from(&named)];
        let found = places.into_iter().find(|at| !named.is_empty() && at.join("config.json").is_file());
        let file = path.join(ADAPTER_CONFIG);
        let at = format!("{}: base_model_name_or_path {named:?}", file.display());
        match found {
            // Nor is an adapter its own base.
            Some(base) if is_adapter(&base) => {
                Err(format!("{at} is an adapter itself; export that as a model first"))
            }
            Some(base) => Ok(base),
            None => Err(format!("{at} is no model directory here; give the model's, and this as --adapter")),
        }
    }
}

#[cfg(test)]
mod tests;
