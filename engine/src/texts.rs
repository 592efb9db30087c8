//! Golden cases of text, as `astrai verify` checks them: calls of tools, structured output. In: a folder with such files. Out: a row a file.

use crate::Error;
use crate::golden::Row;
use astrai_serve::golden::check;
use std::path::Path;

/// Failures that a row tells of.
const SHOWN: usize = 3;

/// A row for each file of cases that the folder has; none if it has none.
///
/// # Errors
/// A file is unreadable, or no JSON.
pub fn rows(folder: &Path) -> Result<Vec<Row>, Error> {
    let row = |(name, told): (&'static str, astrai_serve::golden::Told)| {
        let failed = told.failed.len();
        let mut note = format!("{} of {} cases", told.cases.saturating_sub(failed), told.cases);
        told.failed.iter().take(SHOWN).for_each(|line| note += &format!("; {line}"));
        let verdict = match (told.cases, failed) {
            (0, _) => "missing",
            (_, 0) => "ok",
            _ => "off",
        };
        Row { check: name.into(), error: Some(failed as f64), tolerance: Some(0.0), verdict, note }
    };
    Ok(check(folder)?.into_iter().map(row).collect())
}
