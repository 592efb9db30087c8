//! Metrics as a table. In: rows, whose fields differ. Out: `metrics.csv` (RFC 4180): a column for each field that any row has, in the order in which they
//! appear, and a line a row, empty where it has no such field. A new field becomes the last column, in a file that replaces the
//! old one.

use super::appended::Appended;
use super::{Row, Writer};
use astrai_files::{FileError, System, csv_cell, read_text, replace};
use serde_json::{Map, Value};
use std::path::Path;

/// Longest file that is read to add a column, in bytes.
const LONGEST: u64 = 1 << 32;

/// The table being written.
#[derive(Debug)]
pub struct Csv {
    table: Appended,
    columns: Vec<String>,
}

impl Csv {
    /// Begins the table with these rows: of a run that goes on, those before.
    ///
    /// # Errors
    /// The system refuses.
    pub fn create(path: &Path, rows: &[Row]) -> Result<Csv, FileError> {
        let (mut columns, mut all) = (Vec::new(), Vec::with_capacity(rows.len()));
        for row in rows {
            let fields = fields(row, path)?;
            columns_of(&fields, &mut columns);
            all.push(fields);
        }
        let lines: String = all.iter().map(|fields| line(&columns, fields)).collect();
        Csv::begin(path, columns, &lines)
    }

    /// The table of these columns and lines, whole, to be continued.
    fn begin(path: &Path, columns: Vec<String>, lines: &str) -> Result<Csv, FileError> {
        let mut text = header(&columns);
        text.push_str(lines);
        replace(&System, path, text.as_bytes())?;
        Ok(Csv { table: Appended::open(path, text.len() as u64)?, columns })
    }
}

impl Writer for Csv {
    fn add(&mut self, row: &Row) -> Result<(), FileError> {
        let fields = fields(row, &self.table.path)?;
        let mut columns = self.columns.clone();
        columns_of(&fields, &mut columns);
        if columns.len() > self.columns.len() {
            let text = read_text(&self.table.path, LONGEST)?;
            // Of the file only whole lines are ours.
            let lines = text.get(header(&self.columns).len()..self.table.length as usize).unwrap_or_default();
            let more = ",".repeat(columns.len() - self.columns.len());
            let lines: String = lines.lines().map(|l| format!("{l}{more}\n")).collect();
            *self = Csv::begin(&self.table.path, columns, &lines)?;
        }
        self.table.add(line(&self.columns, &fields).as_bytes())
    }

    fn sync(&self) -> Result<(), FileError> {
        self.table.sync()
    }
}

fn fields(row: &Row, path: &Path) -> Result<Map<String, Value>, FileError> {
    super::fields(row).map_err(|e| FileError::refused(path, format!("a row is no JSON: {e}")))
}

fn columns_of(fields: &Map<String, Value>, columns: &mut Vec<String>) {
    for key in fields.keys() {
        if !columns.contains(key) {
            columns.push(key.clone());
        }
    }
}

fn header(columns: &[String]) -> String {
    match columns {
        [] => String::new(),
        _ => format!("{}\n", columns.iter().map(|c| csv_cell(c)).collect::<Vec<_>>().join(",")),
    }
}

fn line(columns: &[String], fields: &Map<String, Value>) -> String {
    let cell = |column: &String| match fields.get(column) {
        None => String::new(),
        // JSON has no word for it, a table has.
        Some(Value::Null) => "NaN".to_string(),
        Some(value) => csv_cell(value.as_str().unwrap_or(&value.to_string())),
    };
    format!("{}\n", columns.iter().map(cell).collect::<Vec<_>>().join(","))
}
