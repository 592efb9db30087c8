//! The view of LLMSim (github.com/zkkython/llmsim, commit 0c559c2): its formulas with their defects, so that its users find their
//! numbers again beside the true plan. In: a model's `config.json`, a schedule, hardware. Out: its operators with their times, its
//! summary, its graph.

mod formulas;
pub mod graph;
mod machine;
mod models;
pub mod verify;

pub use formulas::{Number, Report, Row, Summary};
pub use machine::Machine;

use crate::Refused;
use crate::report::{Sheet, workbook};
use serde_json::{Map, Value};

/// LLMSim's schedule. `world_size` and `num_nodes` are in its files and read by nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Sequences; the rows of every product in decode, unread in prefill but for throughput.
    pub batch: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    /// One token of each sequence in place of all.
    pub decode: bool,
    /// Ranks that share heads.
    pub tp: u64,
    /// Ranks with sequences of their own; only divides throughput.
    pub dp: u64,
    /// Ranks that share experts.
    pub ep: u64,
    /// A layer more for multi-token prediction.
    pub mtp: bool,
    /// Tokens are dispatched to experts and combined.
    pub deepep: bool,
    /// Dense layers are not divided by `tp`.
    pub dense_dp: bool,
}

impl Schedule {
    /// Rows of the products: `get_seq_length`.
    fn rows(&self) -> u64 {
        if self.decode { self.batch } else { self.seq }
    }

    /// Reads the object `schedule` of one of its records.
    ///
    /// # Errors
    /// One line that names the key.
    pub fn parse(value: &Value) -> Result<Schedule, Refused> {
        let fields = Keys { at: "schedule", fields: value.as_object().ok_or("schedule must be an object")? };
        let mode = fields.fields.get("mode").and_then(Value::as_str).unwrap_or("EXTEND");
        let decode = match mode.to_ascii_uppercase().as_str() {
            "EXTEND" => false,
            "DECODE" => true,
            _ => {
                return Err(format!(
                    "schedule.mode: `{}` is none; there are EXTEND, DECODE",
                    astrai_files::one_line(mode)
                ));
            }
        };
        Ok(Schedule {
            batch: fields.count("batch_size", 64)?,
            seq: fields.count("max_seqlen", 4096)?,
            decode,
            tp: fields.count("tp_size", 1)?,
            dp: fields.count("dp_size", 16)?,
            ep: fields.count("ep_size", 16)?,
            mtp: fields.flag("is_mtp", true)?,
            deepep: fields.flag("deepep", true)?,
            dense_dp: fields.flag("enable_moe_dense_fully_dp", false)?,
        })
    }
}

/// An object's keys with LLMSim's defaults.
struct Keys<'a> {
    at: &'static str,
    fields: &'a Map<String, Value>,
}

/// Most that a size may be; products of four of them fit 128 bits.
const MOST: u64 = 1 << 31;

impl Keys<'_> {
    fn given(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|v| !v.is_null())
    }

    fn count(&self, key: &str, default: u64) -> Result<u64, Refused> {
        match self.given(key) {
            None => Ok(default),
            Some(v) => v
                .as_u64()
                .filter(|n| (1..=MOST).contains(n))
                .ok_or_else(|| format!("{}.{key} must be a whole number from 1 to {MOST}", self.at)),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, Refused> {
        let wrong = || format!("{}.{key} must be true or false", self.at);
        self.given(key).map_or(Ok(default), |v| v.as_bool().ok_or_else(wrong))
    }
}

/// What LLMSim says of a model, by its `config.json`.
///
/// # Errors
/// Sizes that do not divide, or a key that is no size; one line that names it.
pub fn report(config: &Value, schedule: &Schedule, machine: &Machine) -> Result<Report, Refused> {
    let model = models::Model::parse(config)?;
    let rows = model.rows(schedule)?;
    Ok(Report::of(rows, &model.kv_bytes(schedule), schedule, machine))
}

/// Columns of its table.
pub const COLUMNS: [&str; 17] = [
    "Operator Name",
    "Type",
    "m",
    "n",
    "k",
    "batch",
    "layers",
    "Input",
    "Output",
    "Weight",
    "Compute(us)",
    "Memory(us)",
    "Transfer(us)",
    "Single Layer Latency(us)",
    "Total Time(ms)",
    "Percent(%)",
    "Weight/Single GPU All Layers",
];

impl Report {
    /// A workbook with its table and its summary.
    ///
    /// # Errors
    /// There are more rows than a sheet may have.
    pub fn workbook(&self) -> Result<Vec<u8>, Refused> {
        let mut whole = self.json();
        let rows = cells(whole["rows"].take());
        let head = COLUMNS.map(str::to_string).to_vec();
        workbook(&[Sheet { name: "operators", head, rows }, Sheet::of_fields("summary", &whole)])
    }

    /// Its table as comma-separated values.
    pub fn csv(&self) -> String {
        let cell = |v: &Value| v.as_str().map_or_else(|| v.to_string(), astrai_files::csv_cell);
        let line = |row: &Vec<Value>| row.iter().map(cell).collect::<Vec<_>>().join(",");
        let rows = cells(self.json()["rows"].take());
        let lines =
            std::iter::once(COLUMNS.map(astrai_files::csv_cell).join(",")).chain(rows.iter().map(line));
        lines.map(|line| line + "\n").collect()
    }
}

/// The cells of its columns, row by row.
fn cells(rows: Value) -> Vec<Vec<Value>> {
    let of =
        |row: &Value| row.as_object().map_or(vec![], |r| r.values().take(COLUMNS.len()).cloned().collect());
    rows.as_array().map_or(vec![], |rows| rows.iter().map(of).collect())
}

/// How its numbers differ from the true plan's, one by one.
pub const DIFFERENCES: [&str; 12] = [
    "attention's compute time takes 500 TFLOP/s (an INT8 peak) whatever the hardware",
    "transfers take fixed bandwidths (85, 100, 22.64, 18.58 GB/s) whatever the links",
    "keys and values of GQA are counted with hidden_size in place of head_dim",
    "weights of experts count one expert a layer, though their reading counts all",
    "prefill times leave the batch out, throughput multiplies by it",
    "norms, rope, softmax, the embedding, the head and sampling take no time",
    "attention counts all pairs; causal attention sees half of them",
    "all-reduce leaves out 2(n-1)/n and latency",
    "in decode the cache is read once, not once a sequence",
    "the product of scores and values runs over key heads only (Qwen3)",
    "world_size, num_nodes and the links of the hardware are not read",
    "every sum is multiplied by 1.02 for the framework",
];
