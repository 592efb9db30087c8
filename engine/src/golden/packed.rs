//! A published quantised checkpoint held to a reference. In: a model's folder whose `golden.safetensors` has `input_ids`, `logits` and
//! `dequantised.<tensor>`. Out: a row for the logits of widened weights, one for those of codes where weights can stay codes, and a row a
//! tensor.

use super::narrow::{dequantised, logits};
use super::{Row, floats, largest};
use crate::machine::Machine;
use crate::model::Model;
use crate::{Error, Hear};
use astrai_runtime::Value;
use astrai_runtime::weights::Checkpoint;
use std::path::Path;

const FRONT: &str = "dequantised.";

/// Checks a folder; no rows of one of another kind.
///
/// # Errors
/// The golden file is not of this model, or the device failed.
pub fn rows(folder: &Path, machine: &Machine, hear: Hear) -> Result<Vec<Row>, Error> {
    let path = folder.join("golden.safetensors");
    if !path.is_file() || !folder.join("config.json").is_file() {
        return Ok(vec![]);
    }
    let file = Checkpoint::open(&path)?;
    let names: Vec<&str> = file.names().filter(|n| n.starts_with(FRONT)).collect();
    if names.is_empty() {
        return Ok(vec![]);
    }
    let mut model = Model::open(folder, false)?;
    let mut rows = Vec::new();
    for name in names {
        let tensor = &name[FRONT.len()..];
        let missing = || format!("{}: the model has no `{tensor}`", path.display());
        let t = model.source().tensor(tensor).ok_or_else(missing)?;
        let wide = Value { dtype: t.dtype, shape: t.shape, bytes: t.bytes.into_owned() }.to_f32();
        let want = floats(&file, &path, name, wide.len())?;
        let held = |got: &mut dyn Iterator<Item = f64>, name: String| {
            let top = largest(want.iter().map(|x| f64::from(*x)));
            let error = largest(got.zip(&want).map(|(a, b)| a - f64::from(*b))) / top;
            Row::compared(name, error, 1e-6, "of the largest magnitude")
        };
        rows.push(held(&mut wide.iter().map(|x| f64::from(*x)), name.to_string()));
        let kept = model.config.packed.as_ref().and_then(|p| p.of([tensor].into_iter()));
        if let Some(narrow) = kept {
            let codes = dequantised(model.source(), tensor, narrow)?.reals();
            rows.push(held(&mut codes.into_iter(), format!("{name} (codes)")));
        }
    }
    if let Some(codes) = model.config.packed.take().filter(|_| machine.backend().reads_codes()) {
        model.config.packed = Some(codes.rounding(false));
        let row = logits(&model, machine, &file, &path, "logits", hear)?;
        rows.push(Row { check: "logits (codes)".into(), ..row });
        model.config.packed = None;
    }
    rows.push(logits(&model, machine, &file, &path, "logits", hear)?);
    Ok(rows)
}
