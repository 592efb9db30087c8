//! LLMSim's hardware files. In: their JSON, or one of its names. Out: the numbers that its formulas read, in the units meant:
//! `hbm_bandwidth_gb_s` is TB/s, `mac_*_gflops` are TFLOP/s.

use crate::Refused;
use crate::hardware::{Hardware, Kernels, Precision};
use astrai_ir::target::Link;
use serde_json::{Map, Value};

/// What its formulas read of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Name for the reader.
    pub name: String,
    /// TB/s of memory.
    pub memory: f64,
    /// GB of memory, read by nothing.
    pub size: f64,
    /// TFLOP/s of 8-bit integers, 32-bit floats, 16-bit floats.
    pub mac: [f64; 3],
    /// GB/s of links inside a machine and between machines, read by nothing in its hand-written models.
    pub links: [f64; 2],
}

/// Name, GB, TB/s, TFLOP/s of int8, fp32, bf16, GB/s of link and rdma: its own files (fp32 of GPUs there is the bf16 peak).
type Preset = (&'static str, f64, f64, [f64; 3], [f64; 2]);
const PRESETS: [Preset; 5] = [
    ("default", 96.0, 1.8, [500.0, 125.0, 250.0], [85.0, 85.0]),
    ("klx_p800", 96.0, 1.8, [500.0, 125.0, 250.0], [85.0, 85.0]),
    ("h20", 96.0, 2.0, [296.0, 148.0, 148.0], [900.0, 200.0]),
    ("h800", 80.0, 3.35, [1979.0, 989.0, 989.0], [400.0, 200.0]),
    ("gb200", 192.0, 8.0, [5000.0, 2500.0, 2500.0], [1800.0, 300.0]),
];

/// Keys of its files, by section.
const KEYS: [(&str, &[&str]); 3] = [
    ("memory", &["hbm_size_gb", "cache_line_size"]),
    (
        "bandwidth",
        &[
            "hbm_bandwidth_gb_s",
            "dma_bandwidth_gb_s",
            "dma_bandwidth_decode_gb_s",
            "link_bandwidth_gb_s",
            "link_bandwidth_decode_gb_s",
            "rdma_bandwidth_gb_s",
            "rdma_bandwidth_decode_gb_s",
        ],
    ),
    ("compute", &["mac_int8_gflops", "mac_fp32_gflops", "mac_bf16_gflops"]),
];

impl Machine {
    /// One of its own presets.
    pub fn named(name: &str) -> Option<Machine> {
        let name = if name == "p800" { "klx_p800" } else { name };
        let (name, size, memory, mac, links) = PRESETS.iter().find(|p| p.0 == name)?;
        Some(Machine { name: name.to_string(), memory: *memory, size: *size, mac: *mac, links: *links })
    }

    /// The numbers of other hardware.
    pub fn of(h: &Hardware) -> Machine {
        let mac = [Precision::Int8, Precision::F32, Precision::Bf16].map(|p| h.peak(p) / 1e12);
        let link = |i: usize| h.links.get(i).map_or(85.0, |l| l.bandwidth / 1e9);
        Machine {
            name: h.name.clone(),
            memory: h.bandwidth / 1e12,
            size: h.memory / 1e9,
            mac,
            links: [link(0), link(1)],
        }
    }

    /// Reads one of its files.
    ///
    /// # Errors
    /// One line that names the key.
    pub fn parse(value: &Value) -> Result<Machine, Refused> {
        let empty = Map::new();
        let section = |key: &str| match value.get(key) {
            None => Ok(&empty),
            Some(v) => v.as_object().ok_or_else(|| format!("{key} must be an object")),
        };
        // LLMSim passes over a key that is misspelt and takes its default.
        for (part, known) in KEYS {
            if let Some(key) = section(part)?.keys().find(|k| !known.contains(&k.as_str())) {
                let key = astrai_files::one_line(key);
                return Err(format!("{part}.{key} is not known; known are {}", known.join(", ")));
            }
        }
        let number = |part: &str, key: &str, default: f64, (least, most): (f64, f64)| {
            let wrong = || {
                format!(
                    "{part}.{key} must be a number from {least} to {most} (in the units LLMSim means: TB/s of memory, TFLOP/s, GB, GB/s of links)"
                )
            };
            match section(part)?.get(key) {
                None => Ok(default),
                Some(v) => v.as_f64().filter(|v| (least..=most).contains(v)).ok_or_else(wrong),
            }
        };
        let mac = |key, default| number("compute", key, default, (0.01, 100_000.0));
        let link = |key| number("bandwidth", key, 85.0, (0.01, 20_000.0));
        let name = value.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
        Ok(Machine {
            name: astrai_files::one_line(name.unwrap_or("Default GPU")),
            memory: number("bandwidth", "hbm_bandwidth_gb_s", 1.8, (0.005, 100.0))?,
            size: number("memory", "hbm_size_gb", 96.0, (0.1, 10_000.0))?,
            mac: [
                mac("mac_int8_gflops", 500.0)?,
                mac("mac_fp32_gflops", 125.0)?,
                mac("mac_bf16_gflops", 250.0)?,
            ],
            links: [link("link_bandwidth_gb_s")?, link("rdma_bandwidth_gb_s")?],
        })
    }

    /// The same as hardware of ours.
    pub fn hardware(&self) -> Hardware {
        let [int8, f32, bf16] = self.mac;
        let link = |name: &str, devices, gb_s: f64, latency| Link {
            name: name.into(),
            devices,
            bandwidth: gb_s * 1e9,
            latency,
        };
        Hardware {
            name: self.name.clone(),
            kind: "accelerator".into(),
            units: 1,
            memory: self.size * 1e9,
            process: 0.0,
            bandwidth: self.memory * 1e12,
            caches: vec![],
            exchange: None,
            product: None,
            faster: 1.0,
            compute: vec![
                (Precision::F32, f32 * 1e12),
                (Precision::Bf16, bf16 * 1e12),
                (Precision::Int8, int8 * 1e12),
            ],
            launch: 2e-6,
            links: vec![link("link", 8, self.links[0], 5e-6), link("rdma", 65536, self.links[1], 10e-6)],
            power: None,
            price: None,
            kernels: Kernels::typical(),
            sources: vec!["a file of LLMSim's, units as meant".into()],
        }
    }
}
