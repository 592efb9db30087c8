//! Estimates as a workbook of XLSX. In: sheets of rows under their names. Out: the bytes of the file.

use crate::Refused;
use rust_xlsxwriter::{Format, Workbook, XlsxError};
use serde_json::Value;

/// Characters of a cell, at most.
const LONGEST: usize = 32_000;

/// A sheet.
#[derive(Clone, Debug)]
pub struct Sheet {
    /// Its name, of at most 31 characters.
    pub name: &'static str,
    /// Names of its columns.
    pub head: Vec<String>,
    /// Its rows.
    pub rows: Vec<Vec<Value>>,
}

/// A workbook of these sheets.
///
/// # Errors
/// There are more rows or columns than a sheet may have.
pub fn workbook(sheets: &[Sheet]) -> Result<Vec<u8>, Refused> {
    written(sheets).map_err(|e| format!("the workbook: {e}"))
}

fn written(sheets: &[Sheet]) -> Result<Vec<u8>, XlsxError> {
    let (mut book, bold) = (Workbook::new(), Format::new().set_bold());
    for sheet in sheets {
        let page = book.add_worksheet();
        page.set_name(sheet.name)?.set_freeze_panes(1, 0)?;
        for (column, name) in (0..).zip(&sheet.head) {
            page.write_with_format(0, column, name, &bold)?;
        }
        for (at, row) in (1..).zip(&sheet.rows) {
            for (column, cell) in (0..).zip(row) {
                match cell {
                    Value::Null => {}
                    Value::Number(n) => drop(page.write(at, column, n.as_f64().unwrap_or(f64::NAN))?),
                    Value::Bool(b) => drop(page.write(at, column, *b)?),
                    Value::String(text) => {
                        let text: String = text.chars().take(LONGEST).collect();
                        page.write(at, column, text)?;
                    }
                    other => drop(page.write(at, column, other.to_string())?),
                }
            }
        }
        page.autofit();
    }
    book.save_to_buffer()
}

impl Sheet {
    /// An object as rows of a name and a value, those of objects in it under a name with a dot.
    pub fn of_fields(name: &'static str, of: &Value) -> Sheet {
        let mut rows = Vec::new();
        add("", of, &mut rows);
        Sheet { name, head: ["name", "value"].map(str::to_string).to_vec(), rows }
    }
}

fn add(name: &str, of: &Value, rows: &mut Vec<Vec<Value>>) {
    match of {
        Value::Object(all) => {
            for (key, value) in all {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                add(&name, value, rows);
            }
        }
        Value::Array(list) if list.iter().any(Value::is_object) => {
            list.iter().enumerate().for_each(|(i, v)| add(&format!("{name}.{i}"), v, rows));
        }
        value => rows.push(vec![name.into(), value.clone()]),
    }
}
