//! Readers of the estimates: hardware files, ours and LLMSim's, and traces of requests.

use crate::mutate::{Draws, bytes, object};
use crate::targets::{Run, shown};
use astrai_engine::load::Trace;
use astrai_estimate::hardware::{Hardware, PRESETS};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

pub fn hardware(d: &mut Draws) -> Vec<u8> {
    let (name, _) = PRESETS[d.below(PRESETS.len())];
    let ours = Hardware::open(name).expect("a preset").save();
    let theirs = json!({"name": "x", "memory": {"hbm_size_gb": 96, "cache_line_size": 128},
        "bandwidth": {"hbm_bandwidth_gb_s": 1.8, "link_bandwidth_gb_s": 85.0, "rdma_bandwidth_gb_s": 85.0},
        "compute": {"mac_int8_gflops": 500.0, "mac_fp32_gflops": 125.0, "mac_bf16_gflops": 250.0}});
    let sound: Value = if d.below(2) == 0 { ours } else { theirs };
    object(&sound, d)
}

pub fn read_hardware(input: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(input);
    let read = shown(Hardware::parse(&text, "x.json5"))?;
    let again = shown(Hardware::parse(&read.save().to_string(), "saved"));
    again.map(drop).map_err(|e| panic!("what is saved is not read: {e}"))
}

pub fn trace(d: &mut Draws) -> Vec<u8> {
    let line =
        |at: u32| json!({"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [1, at]});
    let lines: String = (0..3).map(|i| format!("{}\n", line(10 * i))).collect();
    bytes(lines.into_bytes(), d)
}

pub fn open_trace(folder: &Path) -> Run {
    let path = folder.join("trace.jsonl");
    Box::new(move |input| {
        shown(fs::write(&path, input))?;
        Trace::open(&path, 1000, u64::MAX)?.try_for_each(|asked| asked.map(drop))
    })
}
