//! Golden cases of text, as `astrai verify` checks them: calls of tools, structured output. In: a folder with such files. Out: a row a file.

use crate::Error;
use crate::golden::Row;
use astrai_files::read_present;
use astrai_serve::golden::FILES;
use serde_json::Value;
use std::path::Path;

/// Bytes of a file of cases.
const LARGEST: u64 = 1 << 26;

/// Failures that a row tells of.
const SHOWN: usize = 3;

/// A row for each file of cases that the folder has; none if it has none.
///
/// # Errors
/// A file is unreadable, or no JSON.
pub fn rows(folder: &Path) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    for (name, check) in FILES {
        let path = folder.join(name);
        let Some(bytes) = read_present(&path, LARGEST).map_err(|e| e.to_string())? else { continue };
        let file: Value = serde_json::from_slice(&bytes)
            .map_err(|e| format!("{}: is no JSON ({e}); fetch it again", path.display()))?;
        let told = check(&file);
        let failed = told.failed.len();
        let mut note = format!("{} of {} cases", told.cases.saturating_sub(failed), told.cases);
        told.failed.iter().take(SHOWN).for_each(|line| note += &format!("; {line}"));
        let verdict = match (told.cases, failed) {
            (0, _) => "missing",
            (_, 0) => "ok",
            _ => "off",
        };
        let (error, tolerance) = (Some(failed as f64), Some(0.0));
        rows.push(Row { check: name.into(), error, tolerance, verdict, note });
    }
    Ok(rows)
}
