//! Hardware as data. In: a JSON or JSON5 file with spelled-out units, one of LLMSim's (recognised by its keys, its mislabelled units
//! understood), or the name of a preset. Out: peaks, bandwidth, memory, links, and how far kernels reach them.

mod kernels;
mod presets;
mod read;
mod told;

pub use kernels::{ARCHETYPES, Kernels, Reach, SAME};
pub use presets::{PRESETS, preset};

use crate::Refused;
use crate::quantity::Kind;
use astrai_engine::machine::{Machine, Speeds};
use astrai_ir::target::Link;
use astrai_ir::{DType, Target};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Longest hardware file read, bytes.
const LONGEST: u64 = 1 << 20;

/// Most objects and lists of a hardware file.
const MOST: usize = 200;
/// Of how many times the largest cache that is known nothing is found in it.
const CACHED: f64 = 4.0;

/// Types of numbers that machines multiply, by their names in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Precision {
    /// 32-bit floats, of the vector units.
    #[default]
    F32,
    /// 32-bit floats that come to a unit for bf16 in pieces.
    F32Pieces,
    /// 16-bit brain floats.
    Bf16,
    /// 16-bit brain floats that vectors multiply as 32-bit floats.
    Bf16Vectors,
    /// 8-bit floats.
    Fp8,
    /// 8-bit integers.
    Int8,
    /// 4-bit floats.
    Fp4,
}

impl Precision {
    /// All of them.
    pub const ALL: [Precision; 7] = [
        Precision::F32,
        Precision::F32Pieces,
        Precision::Bf16,
        Precision::Bf16Vectors,
        Precision::Fp8,
        Precision::Int8,
        Precision::Fp4,
    ];

    /// Its key in files.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "fp32",
            Precision::F32Pieces => "fp32_pieces",
            Precision::Bf16 => "bf16",
            Precision::Bf16Vectors => "bf16_vectors",
            Precision::Fp8 => "fp8",
            Precision::Int8 => "int8",
            Precision::Fp4 => "fp4",
        }
    }

    /// That of a program's element type.
    pub fn of(dtype: DType) -> Precision {
        match dtype.bytes() {
            1 => Precision::Int8,
            2 => Precision::Bf16,
            _ => Precision::F32,
        }
    }
}

/// A machine as one of its ranks sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// Name for the reader.
    pub name: String,
    /// `gpu`, `xpu`, `accelerator` or `cpu`.
    pub kind: String,
    /// Multiprocessors or cores; how many tiles of a product are computed at once.
    pub units: u32,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes of it that a process takes beside what is planned: its program, threads, compiled kernels.
    pub process: f64,
    /// Bytes per second that memory gives.
    pub bandwidth: f64,
    /// Bytes that caches hold between kernels, and the bytes per second that each gives, the smallest first; none where that is not known.
    pub caches: Vec<(f64, f64)>,
    /// Bytes per second of what other cores have just written; none where that is not known.
    pub exchange: Option<f64>,
    /// Operations per second of small products in the cores' own caches; none where that is not known.
    pub product: Option<f64>,
    /// By how much memory was read faster beside a run than the hardware's file says, of which `caches` are; 1 for the file.
    pub faster: f64,
    /// Peak operations per second by type of number, without sparsity.
    pub compute: Vec<(Precision, f64)>,
    /// Seconds between the starts of two small kernels.
    pub launch: f64,
    /// Links to other devices, the fastest first.
    pub links: Vec<Link>,
    /// Watts of a device at work.
    pub power: Option<f64>,
    /// US dollars an hour of a device.
    pub price: Option<f64>,
    /// How far kernels reach the peaks.
    pub kernels: Kernels,
    /// Where the numbers are from.
    pub sources: Vec<String>,
}

impl Hardware {
    /// A preset by its name, or what a file says.
    ///
    /// # Errors
    /// One line that names the file and the key.
    pub fn open(name: &str) -> Result<Hardware, Refused> {
        match preset(name) {
            Some(found) => found,
            None if name.contains(['/', '.']) => Hardware::read(Path::new(name)),
            None => Err(format!(
                "--hardware {name}: there is no such preset; there are {}, or give a file",
                PRESETS.map(|(name, _)| name).join(", ")
            )),
        }
    }

    /// Reads a file, of ours or of LLMSim's.
    ///
    /// # Errors
    /// One line that names the file and the key.
    pub fn read(path: &Path) -> Result<Hardware, Refused> {
        let text = astrai_files::read_text(path, LONGEST).map_err(|e| e.to_string())?;
        Hardware::parse(&text, &astrai_files::shown(path))
    }

    /// Reads the text of a file of this name.
    ///
    /// # Errors
    /// One line that names the file and the key.
    pub fn parse(text: &str, file: &str) -> Result<Hardware, Refused> {
        // The parser of JSON5 calls itself for each of them.
        if text.bytes().filter(|b| matches!(b, b'[' | b'{')).count() > MOST {
            return Err(format!("{file}: holds more than {MOST} objects and lists, a machine has few"));
        }
        let read = told::value(text).and_then(|value| read::hardware(&value));
        read.map_err(|line| format!("{file}: {line}"))
    }

    /// The file that [`parse`](Self::parse) reads.
    pub fn save(&self) -> Value {
        let compute: Map<String, Value> =
            self.compute.iter().map(|(p, v)| (p.name().into(), json!(Kind::Rate.show(*v)))).collect();
        let link = |l: &Link| {
            json!({"name": l.name, "devices": l.devices, "bandwidth": Kind::Bandwidth.show(l.bandwidth),
                   "latency": Kind::Time.show(l.latency)})
        };
        let mut out = json!({
            "name": self.name, "kind": self.kind, "units": self.units,
            "memory": {"size": Kind::Size.show(self.memory), "bandwidth": Kind::Bandwidth.show(self.bandwidth)},
            "compute": compute, "launch": Kind::Time.show(self.launch),
            "links": self.links.iter().map(link).collect::<Vec<_>>(),
            "kernels": self.kernels.save(), "sources": self.sources,
        });
        if self.process > 0.0 {
            out["memory"]["process"] = json!(Kind::Size.show(self.process));
        }
        let optional = [
            ("exchange", self.exchange.map(|v| Kind::Bandwidth.show(v))),
            ("product", self.product.map(|v| Kind::Rate.show(v))),
            ("power", self.power.map(|v| Kind::Power.show(v))),
            ("price", self.price.map(|v| Kind::Price.show(v))),
        ];
        for (key, value) in optional {
            if let Some(value) = value {
                out[key] = json!(value);
            }
        }
        let cache = |(size, bandwidth): &(f64, f64)| json!({"size": Kind::Size.show(*size), "bandwidth": Kind::Bandwidth.show(*bandwidth)});
        if !self.caches.is_empty() {
            out["cache"] = self.caches.iter().map(cache).collect();
        }
        out
    }

    /// Peak of a type of number; where the machine has no row for it, that of the next wider one.
    pub fn peak(&self, precision: Precision) -> f64 {
        let of = |p: Precision| self.compute.iter().find(|(q, _)| *q == p).map(|(_, v)| *v);
        let wider: &[Precision] = match precision {
            Precision::Fp4 => {
                &[Precision::Fp4, Precision::Fp8, Precision::Int8, Precision::Bf16, Precision::F32]
            }
            Precision::Fp8 => &[Precision::Fp8, Precision::Int8, Precision::Bf16, Precision::F32],
            Precision::Int8 => &[Precision::Int8, Precision::Fp8, Precision::Bf16, Precision::F32],
            Precision::Bf16 => &[Precision::Bf16, Precision::F32],
            Precision::F32Pieces => &[Precision::F32Pieces, Precision::F32],
            Precision::Bf16Vectors => &[Precision::Bf16Vectors, Precision::F32],
            Precision::F32 => &[Precision::F32],
        };
        wider.iter().find_map(|p| of(*p)).or(self.compute.first().map(|(_, v)| *v)).unwrap_or(1.0)
    }

    /// Bytes per second of so many bytes that are read again and again. Between the sizes that were measured, a part of them is found in the cache
    /// that is too small for all.
    pub fn rate(&self, bytes: f64) -> f64 {
        let (told, by) = self.told(bytes);
        told * by
    }

    /// The same for bytes of which a core asks for as many lines at a time as it can: a faster memory answers each of them only a little sooner, a slower one a
    /// little later.
    pub fn paced(&self, bytes: f64) -> f64 {
        let (told, by) = self.told(bytes);
        told * by.sqrt()
    }

    /// What the file says of so many bytes, and by how much they are read faster now: as memory is, where they come little faster than from it.
    fn told(&self, bytes: f64) -> (f64, f64) {
        let memory = self.bandwidth / self.faster;
        let last = self.caches.last().map(|(size, _)| (CACHED * size, memory));
        let mut levels = self.caches.iter().copied().chain(last);
        let mut told = memory;
        if let Some((mut small, mut fast)) = levels.next() {
            told = fast;
            for (size, rate) in levels {
                if bytes <= small {
                    break;
                }
                let part = ((bytes / small).ln() / (size / small).ln()).clamp(0.0, 1.0);
                told = fast * (rate / fast).powf(part);
                (small, fast) = (size, rate);
            }
        }
        (told, if told < 2.0 * memory { self.faster } else { 1.0 })
    }

    /// The same machine at these speeds, or as its file has them: what is cached little faster than memory changes with it, and all arithmetic with small products.
    pub fn at(&self, now: Option<Speeds>) -> Hardware {
        let Some(now) = now else { return self.clone() };
        // A file that does not know of a speed has it in its other numbers.
        let known = |told: Option<f64>, now: Option<f64>| told.map(|told| now.unwrap_or(told));
        let part = |told: Option<f64>, now: Option<f64>| told.zip(now).map_or(1.0, |(told, now)| now / told);
        let (memory, computing) = (now.read / self.bandwidth, part(self.product, now.product));
        Hardware {
            bandwidth: self.bandwidth * memory,
            faster: self.faster * memory,
            exchange: known(self.exchange, now.exchange),
            product: known(self.product, now.product),
            compute: self.compute.iter().map(|(p, rate)| (*p, rate * computing)).collect(),
            // Threads start by what they tell one another, too.
            launch: self.launch / part(self.exchange, now.exchange),
            ..self.clone()
        }
    }

    /// The link over which a group of so many ranks exchanges values: the fastest that joins them all.
    pub fn link(&self, ranks: u32) -> Option<&Link> {
        self.links.iter().find(|l| l.devices >= ranks).or(self.links.last())
    }

    /// The numbers of a target that this machine decides, over those of the kernels that are planned for it.
    pub fn target(&self, kernels: &Target) -> Target {
        let row = |p| (p, self.peak(Precision::of(p)));
        Target {
            name: self.name.clone(),
            units: self.units,
            flops: [DType::F32, DType::BF16].map(row).to_vec(),
            bandwidth: self.bandwidth,
            launch: self.launch,
            memory: self.memory as u64,
            links: self.links.clone(),
            ..kernels.clone()
        }
    }

    /// What plans for it, and runs nothing: kernels of a processor or of a GPU, whatever is here.
    pub fn planner(&self) -> Machine {
        Machine::elsewhere(self.kind == "cpu", &|kernels| self.target(kernels))
    }
}

#[cfg(test)]
mod tests;
