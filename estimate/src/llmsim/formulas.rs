//! LLMSim's arithmetic. In: rows of its operators, a machine. Out: their times and its summary, in its units.

use super::{Machine, Schedule};
use serde_json::{Value, json};

/// Types of numbers by the names it prints: its enumeration makes FP8 an INT8 and BF16 an FP16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// 8 bits.
    Int8,
    /// 16 bits.
    Fp16,
    /// 32 bits.
    Fp32,
}

impl Number {
    /// As it prints it.
    pub fn name(self) -> &'static str {
        match self {
            Number::Int8 => "INT8",
            Number::Fp16 => "FP16",
            Number::Fp32 => "FP32",
        }
    }

    fn bytes(self) -> f64 {
        match self {
            Number::Int8 => 1.0,
            Number::Fp16 => 2.0,
            Number::Fp32 => 4.0,
        }
    }
}

/// Kinds of operators.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    /// A product of matrices.
    Matmul,
    /// Scores, or values by scores.
    Attention,
    /// A transfer at this bandwidth, GB/s.
    Transfer(f64),
}

/// One of its operators.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub what: What,
    /// Rows.
    pub m: u64,
    /// Columns; of transfers 0.
    pub n: u64,
    /// Length of the sums; of transfers their width.
    pub k: u64,
    /// Products side by side.
    pub batch: u64,
    /// Layers.
    pub layers: u64,
    /// Types of input, output and weight.
    pub types: [Number; 3],
    /// Microseconds of a layer: compute, memory, transfer.
    pub us: [f64; 3],
}

/// TFLOP/s of INT8 that its attention takes, whatever the hardware.
const TFLOPS_OF_ATTENTION: f64 = 500.0;

impl Row {
    pub(super) fn new(
        name: &'static str,
        what: What,
        [m, n, k, batch]: [u64; 4],
        layers: u64,
        types: [Number; 3],
    ) -> Row {
        Row { name, what, m, n, k, batch, layers, types, us: [0.0; 3] }
    }

    /// Its type, as it prints it.
    pub fn kind(&self) -> &'static str {
        match self.what {
            What::Matmul => "matmul",
            What::Attention => "attention",
            What::Transfer(_) => "transfer",
        }
    }

    fn time(&mut self, machine: &Machine) {
        let [m, n, k, batch] = [self.m, self.n, self.k, self.batch].map(|x| x as f64);
        let [input, output, weight] = self.types.map(Number::bytes);
        let [int8, fp32, bf16] = machine.mac;
        let hbm = machine.memory * 1e6;
        self.us = match self.what {
            What::Matmul => {
                let mac = match self.types[2] {
                    Number::Int8 => int8,
                    Number::Fp32 => fp32,
                    Number::Fp16 => bf16,
                };
                let bytes = m * k * batch * input + k * n * batch * weight + m * n * batch * output;
                [2.0 * m * k * n * batch / (mac * 1e6), bytes / hbm, 0.0]
            }
            What::Attention => {
                let values = self.name == "qkv";
                let bytes = if values {
                    k * n * batch * input + m * n * batch * output
                } else {
                    (m * k + k * n) * batch * input
                };
                [2.0 * m * n * k * batch / TFLOPS_OF_ATTENTION / 1e6 * weight, bytes / hbm, 0.0]
            }
            What::Transfer(gb_s) => [0.0, 0.0, m * k * batch * input / gb_s / 1000.0],
        };
    }

    /// Microseconds of a layer.
    pub fn single_layer_us(&self) -> f64 {
        self.us[0].max(self.us[1]) + self.us[2]
    }

    /// Milliseconds of all layers.
    pub fn total_ms(&self) -> f64 {
        let [c, m, t] = self.us.map(|us| us * self.layers as f64);
        (c.max(m) + t) / 1000.0
    }

    /// Bytes of its weights in all layers: one matrix a layer, however many are multiplied.
    pub fn weight_bytes(&self) -> f64 {
        match self.what {
            What::Matmul => (self.k * self.n * self.layers) as f64 * self.types[2].bytes(),
            _ => 0.0,
        }
    }
}

/// Its summary.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Sums of one-layer times, milliseconds: compute, memory, transfer, total.
    pub per_layer_ms: [f64; 4],
    /// Sum over operators of all layers.
    pub sum_total_ms: f64,
    /// The operator that takes longest, and its time.
    pub bottleneck: (&'static str, f64),
    /// TTFT or TPOT.
    pub latency_ms: f64,
    /// Tokens per second of all devices, and of one.
    pub throughput: [f64; 2],
    /// Bytes of weights of a device.
    pub weight_bytes: f64,
    /// Bytes of keys and values of a token: a device's, in all.
    pub kv_bytes: [u64; 2],
}

/// What it prints.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Its operators in its order.
    pub rows: Vec<Row>,
    /// Its summary.
    pub summary: Summary,
    /// The mode that the summary is of.
    pub decode: bool,
}

/// What it adds for the framework.
const OVERHEAD: f64 = 1.02;

const GIB: f64 = 1073741824.0;

impl Report {
    pub(super) fn of(mut rows: Vec<Row>, kv_bytes: &[u64; 2], s: &Schedule, machine: &Machine) -> Report {
        rows.iter_mut().for_each(|r| r.time(machine));
        let sum = |f: &dyn Fn(&Row) -> f64| rows.iter().map(f).sum::<f64>();
        let part = |i: usize| sum(&|r| r.us[i]) / 1000.0;
        let sum_total_ms = sum(&Row::total_ms);
        let latency_ms = sum_total_ms * OVERHEAD;
        let tokens = (if s.decode { s.batch } else { s.batch * s.seq }) as f64;
        let throughput = if latency_ms > 0.0 { tokens / (latency_ms / 1000.0) } else { 0.0 };
        let mut bottleneck = ("", 0.0);
        for r in &rows {
            if r.total_ms() > bottleneck.1 {
                bottleneck = (r.name, r.total_ms());
            }
        }
        let summary = Summary {
            per_layer_ms: [part(0), part(1), part(2), sum(&Row::single_layer_us) / 1000.0],
            sum_total_ms,
            bottleneck,
            latency_ms,
            throughput: [throughput, throughput / (s.tp * s.dp) as f64],
            weight_bytes: sum(&Row::weight_bytes),
            kv_bytes: *kv_bytes,
        };
        Report { rows, summary, decode: s.decode }
    }

    /// Share of a row in the time of all, percent.
    pub fn percent(&self, row: &Row) -> f64 {
        if self.summary.sum_total_ms > 0.0 { row.total_ms() / self.summary.sum_total_ms * 100.0 } else { 0.0 }
    }

    /// Rows and summary under the names of its records.
    pub fn json(&self) -> Value {
        let row = |r: &Row| {
            let mut row = json!({
                "name": r.name, "type": r.kind(), "m": r.m, "n": r.n, "k": r.k, "batch": r.batch, "layers": r.layers,
                "in_dtype": r.types[0].name(), "out_dtype": r.types[1].name(), "weight_dtype": r.types[2].name(),
                "compute_us": r.us[0], "memory_us": r.us[1], "transfer_us": r.us[2], "single_layer_us": r.single_layer_us(),
                "total_ms": r.total_ms(), "percent": self.percent(r), "weight_bytes_all_layers": r.weight_bytes(),
            });
            if let What::Transfer(gb_s) = r.what {
                row["bandwidth_gb_s"] = json!(gb_s);
            }
            row
        };
        let s = &self.summary;
        let [compute, memory, transfer, total] = s.per_layer_ms;
        let [kv_gpu, kv_all] = s.kv_bytes;
        let latency = if self.decode { "tpot_ms" } else { "ttft_ms" };
        json!({
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "summary": {
                "per_layer_compute_ms": compute, "per_layer_memory_ms": memory, "per_layer_transfer_ms": transfer,
                "per_layer_total_ms": total, "sum_total_ms": s.sum_total_ms,
                "bottleneck": {"name": s.bottleneck.0, "total_ms": s.bottleneck.1}, latency: s.latency_ms,
                "throughput_tokens_per_s": s.throughput[0], "throughput_tokens_per_s_per_gpu": s.throughput[1],
                "weight_bytes_per_gpu": s.weight_bytes, "weight_gb_per_gpu": s.weight_bytes / GIB,
                "kv_bytes_per_gpu": kv_gpu, "kv_gb_per_gpu": kv_gpu as f64 / GIB,
                "kv_bytes_total": kv_all, "kv_gb_total": kv_all as f64 / GIB,
            },
        })
    }
}
