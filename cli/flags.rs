//! Flags that commands share, and what they stand for.

use crate::failure::{Failure, bail, warn};
use crate::progress::tell;
use astrai_builders::config::Slots;
use astrai_engine::machine::{Costs, Kind, Machine};
use astrai_engine::serving::{KvMemory, Published, Room, Speculation};
use astrai_estimate::hardware::Hardware;
use astrai_ir::{Code, DType, Narrow, Target};
use astrai_passes::Fidelity;
use astrai_runtime::device::cpu::{Isa, host_isa, host_levels};
use astrai_serve::recommended::{Asked, Recommended};
use astrai_serve::request::RequestError;
use clap::{Args, ValueEnum};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Values of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The processor.
    Auto,
    /// Kernels in C on this machine's processor.
    Cpu,
    /// Kernels on the CUDA device of this number.
    Cuda(u16),
    /// None: programs are planned and their kernels written, nothing runs.
    Null,
    /// The reference interpreter: slow, for proofs.
    Interpreter,
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceName, String> {
        match (text, text.strip_prefix("cuda:")) {
            ("auto", _) => Ok(DeviceName::Auto),
            ("cpu", _) => Ok(DeviceName::Cpu),
            ("cuda", _) => Ok(DeviceName::Cuda(0)),
            ("null", _) => Ok(DeviceName::Null),
            ("interpreter", _) => Ok(DeviceName::Interpreter),
            (_, Some(n)) => {
                n.parse().map(DeviceName::Cuda).map_err(|_| format!("`{n}` is no device's number"))
            }
            _ => Err("give auto, cpu, cuda, cuda:N, interpreter or null".into()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Auto => f.write_str("auto"),
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(n) => write!(f, "cuda:{n}"),
            DeviceName::Null => f.write_str("null"),
            DeviceName::Interpreter => f.write_str("interpreter"),
        }
    }
}

impl DeviceName {
    /// The device, for a command that runs programs; what to do `instead` where it runs none.
    pub fn kind(self, instead: &str) -> Result<Kind, Failure> {
        match self {
            DeviceName::Auto | DeviceName::Cpu => Ok(Kind::Cpu),
            DeviceName::Cuda(n) => Ok(Kind::Cuda(n.into())),
            DeviceName::Interpreter => Ok(Kind::Interpreter),
            DeviceName::Null => Err(format!("--device null runs nothing; {instead}").into()),
        }
    }

    /// Hardware by the name of a preset or file, which has to be of the device's kind.
    pub fn hardware(self, name: &str) -> Result<Hardware, Failure> {
        let hardware = Hardware::open(name)?;
        match (self, hardware.kind == "cpu") {
            (DeviceName::Interpreter, _) => {
                bail!("--device interpreter: how fast it is says nothing; leave --hardware out")
            }
            (DeviceName::Cuda(_), true) => {
                bail!("--hardware {name} is a processor, and --device {self} is none; leave one of them out")
            }
            (DeviceName::Auto | DeviceName::Cpu | DeviceName::Null, false) => {
                bail!(
                    "--hardware {name} is no processor, and kernels are for one; they are for a GPU with --device cuda"
                )
            }
            _ => Ok(hardware),
        }
    }

    /// What plans for the device, with these threads and vector instructions, as fast as this hardware: neither compiler nor kernel cache is
    /// touched. `None` for the interpreter, for which nothing is planned.
    pub fn planner(
        self,
        threads: usize,
        simd: SimdFlag,
        hardware: Option<&Hardware>,
    ) -> Result<Option<Machine>, Failure> {
        let kind = match self {
            DeviceName::Interpreter => return Ok(None),
            DeviceName::Cuda(n) => Kind::Cuda(n.into()),
            _ => Kind::Cpu,
        };
        let costs: Costs = &|kernels| hardware.map_or_else(|| kernels.clone(), |h| h.target(kernels));
        let machine = Machine::planner(kind, threads, simd.on(self)?, costs);
        warn(&machine.warnings);
        Ok(Some(machine))
    }
}

/// Values of `--simd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SimdName {
    /// All that this processor has
    Auto,
    /// 512-bit vectors, and the matrix unit for bf16
    Amx,
    /// 512-bit vectors, and their products of bf16 pairs
    #[value(name = "avx512bf16")]
    Avx512Bf16,
    /// 512-bit vectors
    Avx512,
    /// 256-bit vectors with fused multiply-add
    Avx2,
    /// 128-bit vectors of aarch64
    Neon,
    /// What every processor of the architecture has
    Plain,
}

/// Values of `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DTypeName {
    /// 32-bit floats
    F32,
    /// Weights and activations stored as bfloat16, arithmetic in 32-bit floats
    Bf16,
}

/// Values of `--fidelity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FidelityName {
    /// The same bits
    Exact,
    /// Sums and products may be computed in another order
    Standard,
    /// That, and weights may be folded into one another when they are loaded
    Fast,
}

impl FidelityName {
    /// Which rules it allows.
    pub fn fidelity(self) -> Fidelity {
        match self {
            FidelityName::Exact => Fidelity::Exact,
            FidelityName::Standard => Fidelity::Standard,
            FidelityName::Fast => Fidelity::Fast,
        }
    }
}

/// How far programs may go from the numbers of the model's graph.
#[derive(Args, Clone, Copy, Debug)]
pub struct FidelityFlags {
    /// How far programs may go from the numbers of the model's graph [default: exact; of models that keep latents in pages
    /// (DeepSeek) standard where they answer requests]
    #[arg(long, value_enum, value_name = "CLASS")]
    fidelity: Option<FidelityName>,
}

impl FidelityFlags {
    /// What was asked for.
    pub fn asked(self) -> Option<Fidelity> {
        self.fidelity.map(FidelityName::fidelity)
    }

    /// Refuses the flag where nothing heeds it.
    pub fn none(self, why: &str) -> Result<(), Failure> {
        if self.fidelity.is_some() { Err(format!("{why}; leave --fidelity out").into()) } else { Ok(()) }
    }
}

/// Vector instructions of the kernels.
#[derive(Args, Clone, Copy, Debug)]
pub struct SimdFlag {
    /// Vector instructions of the kernels; with less than the processor has they are slower
    #[arg(long, value_enum, default_value_t = SimdName::Auto)]
    simd: SimdName,
}

impl SimdFlag {
    /// What was asked for, on a device; kernels are only made to run where the processor has it.
    pub fn on(self, device: DeviceName) -> Result<Isa, Failure> {
        let asked = match self.simd {
            SimdName::Auto => return Ok(host_isa()),
            SimdName::Amx => Isa::Amx,
            SimdName::Avx512Bf16 => Isa::Avx512Bf16,
            SimdName::Avx512 => Isa::Avx512,
            SimdName::Avx2 => Isa::Avx2,
            SimdName::Neon => Isa::Neon,
            SimdName::Plain => Isa::Plain,
        };
        let levels = host_levels();
        let line = match device {
            DeviceName::Null => return Ok(asked),
            DeviceName::Interpreter => "the interpreter runs no kernels; leave --simd out".to_string(),
            DeviceName::Cuda(_) => "--simd is for kernels of the processor; leave it out".to_string(),
            _ if levels.contains(&asked) => return Ok(asked),
            _ => {
                let has: Vec<&str> = levels.iter().rev().map(|s| s.name()).collect();
                format!("--simd {}: this processor does not have it; it has {}", asked.name(), has.join(", "))
            }
        };
        Err(line.into())
    }
}

/// Where and how a program runs.
#[derive(Args, Clone, Debug)]
pub struct MachineFlags {
    /// What runs the program: cpu (also auto), cuda or cuda:N for a GPU, interpreter for the slow reference, null to plan only
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Auto)]
    pub device: DeviceName,
    /// How weights and activations are stored
    #[arg(long, value_enum, default_value_t = DTypeName::F32)]
    pub dtype: DTypeName,
    /// Vector instructions of the kernels
    #[command(flatten)]
    pub simd: SimdFlag,
    /// Threads; 0 means one a core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub threads: u16,
}

/// What costs are predicted by.
#[derive(Args, Clone, Debug)]
pub struct HardwareFlag {
    /// Hardware whose peaks costs are predicted by: a preset of `astrai estimate --list`, or a file of `astrai devices --measure`
    /// [default: typical peaks of the processor, attributes of the GPU]
    #[arg(long, value_name = "NAME|FILE")]
    pub hardware: Option<String>,
}

impl HardwareFlag {
    /// The hardware, which has to be of the device's kind.
    pub fn open(&self, device: DeviceName) -> Result<Option<Hardware>, Failure> {
        self.hardware.as_ref().map(|name| device.hardware(name)).transpose()
    }
}

/// How the weights of linear layers are stored.
#[derive(Args, Clone, Copy, Debug)]
pub struct QuantizeFlag {
    /// Round the weights of linear layers when they are loaded: int8, int4 or fp8, with a scale for each row (int4: for each 32
    /// neighbours), or by :group=N for each N neighbours; :asymmetric adds an offset to the scale, :head=none leaves the head as it
    /// is, which else has int8 (fp8: fp8). Inputs of layers with integers are rounded to int8 as well where the processor multiplies
    /// integers, with :activations=int8 everywhere, with :activations=none nowhere. Routers, norms and the embedding stay as they are
    #[arg(long, value_name = "TYPE")]
    pub quantize: Option<Narrow>,
}

impl QuantizeFlag {
    /// Refuses the flag where nothing heeds it.
    pub fn none(self, why: &str) -> Result<(), Failure> {
        if self.quantize.is_some() { Err(format!("{why}; leave --quantize out").into()) } else { Ok(()) }
    }
}

/// Values of `--kv-cache-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvName {
    /// As --dtype says
    Auto,
    /// Integers of eight bits, with a scale for each token and head
    Int8,
    /// Floats of eight bits (e4m3), with such scales
    #[value(alias = "fp8_e4m3")]
    Fp8,
}

/// How pages hold keys and values.
#[derive(Args, Clone, Copy, Debug)]
pub struct KvFlag {
    /// How pages hold keys and values, or the latents that these are made of
    #[arg(long, alias = "kv-dtype", value_enum, value_name = "TYPE", default_value_t = KvName::Auto)]
    kv_cache_dtype: KvName,
}

impl KvFlag {
    /// What pages hold codes of, if not numbers.
    pub fn code(self) -> Option<Code> {
        match self.kv_cache_dtype {
            KvName::Auto => None,
            KvName::Int8 => Some(Code::Int8),
            KvName::Fp8 => Some(Code::Fp8),
        }
    }

    /// Refuses the flag where nothing heeds it.
    pub fn none(self, why: &str) -> Result<(), Failure> {
        if self.code().is_some() { Err(format!("{why}; leave --kv-cache-dtype out").into()) } else { Ok(()) }
    }
}

/// What a served model runs on, and how much it may hold.
#[derive(Args, Clone, Debug)]
pub struct RoomFlags {
    /// An adapter in PEFT's layout, merged into the weights when they are loaded. Of serve also NAME=DIR, which may be repeated:
    /// requests choose it by its name, as their model
    #[arg(long, value_name = "DIR")]
    pub adapter: Vec<PathBuf>,
    /// How weights are stored
    #[command(flatten)]
    pub quantize: QuantizeFlag,
    /// Keep the weights on disk as kernels read them, in the folder of compiled kernels: later starts of the same files map them
    /// instead of packing them, with this flag or without
    #[arg(long)]
    pub keep_weights: bool,
    /// How pages are stored
    #[command(flatten)]
    pub pages: KvFlag,
    /// Most tokens of prompt and answer together [default: what the model takes and the memory holds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_model_len: Option<u32>,
    /// Memory for keys and values: a size, 4GiB say, or a part of what is free beside the weights, 40% say
    /// [default: what all sequences can use, at most 50%]
    #[arg(long, value_name = "SIZE")]
    pub kv_memory: Option<KvMemory>,
    /// How far steps may go
    #[command(flatten)]
    pub fidelity: FidelityFlags,
    /// Where steps run
    #[command(flatten)]
    pub machine: MachineFlags,
}

/// Name and folder of an adapter that has a name; a folder that is there as it was written has none.
pub fn named(adapter: &Path) -> Option<(&str, &Path)> {
    let (name, folder) = adapter.to_str()?.split_once('=')?;
    (!adapter.exists()).then(|| (name, Path::new(folder)))
}

impl RoomFlags {
    /// The model of a directory, with its adapter and its storage.
    pub fn published(&self, folder: &Path) -> Result<Published, Failure> {
        let published = Published::read_adapted(folder, self.merged()?, &mut tell())?;
        Ok(self.stored(published))
    }

    /// The model with its storage.
    pub fn stored(&self, published: Published) -> Published {
        let published = published.quantised(self.quantize.quantize).with_pages(self.pages.code());
        published.kept(self.keep_weights)
    }

    /// The adapter that is merged.
    pub fn merged(&self) -> Result<Option<&Path>, Failure> {
        match self.adapter.as_slice() {
            [] => Ok(None),
            [one] if named(one).is_none() => Ok(Some(one)),
            [_] => bail!("--adapter NAME=DIR goes with serve; give the adapter's DIR alone"),
            _ => bail!("--adapter: one adapter is merged into the weights; give one DIR"),
        }
    }

    /// Room for one sequence at a time.
    pub fn of_one(&self) -> Room {
        let context = self.max_model_len.map(|n| n as usize);
        let one = Room::of_one(self.machine.storage(), self.fidelity.asked());
        Room { context, kv: self.kv_memory, ..one }
    }
}

/// Whether tokens are proposed.
#[derive(Args, Clone, Debug)]
pub struct SpeculateFlag {
    /// Propose tokens and verify them in one step: those that followed the last few before, in prompt or answer, with ngram, or
    /// ngram:N for at most N at once (ngram is 4); those that the model's own module of multi-token prediction says with mtp, or
    /// mtp:N (mtp is 3). Answers stay the same
    #[arg(long, value_name = "HOW", conflicts_with = "draft")]
    pub speculate: Option<Speculation>,
    /// Propose the tokens that this smaller model of the same vocabulary would say, up to 4, and verify them in one step. Answers
    /// stay the same; where few proposals are accepted, few are made
    #[arg(long, value_name = "MODEL")]
    pub draft: Option<PathBuf>,
}

impl SpeculateFlag {
    /// How tokens are proposed, if they are.
    pub fn asked(&self) -> Option<Speculation> {
        self.draft.as_ref().map(|_| Speculation::Draft(4)).or(self.speculate)
    }
}

/// Room for adapters, to be costed or measured.
#[derive(Args, Clone, Copy, Debug)]
pub struct AdaptersFlag {
    /// With room for N adapters of rank 16 beside the weights, grouped in a step
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub adapters: Option<u32>,
}

impl AdaptersFlag {
    /// The room.
    pub fn slots(self) -> Option<Slots> {
        self.adapters.map(|n| Slots { slots: n as usize, rank: 16 })
    }
}

/// How tokens are chosen. What no flag says, the model's generation_config.json says, if it is there.
#[derive(Args, Clone, Debug)]
pub struct SamplingFlags {
    /// 0 takes the likeliest token each time; higher is freer [default: the model's, else 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Draw from the fewest tokens that have this probability together [default: the model's, else 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Draw from the N likeliest tokens; 0 from all [default: the model's, else 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Draw from tokens at least this fraction as likely as the likeliest [default: the model's, else 0]
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Make what is there already less likely; 1 changes nothing [default: the model's, else 1]
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f32>,
    /// Makes the text repeatable
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

impl SamplingFlags {
    /// What the flags ask for.
    pub fn asked(&self) -> Asked {
        Asked {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
        }
    }

    /// Refuses values out of their ranges, for a model of so many ids.
    pub fn check(&self, vocabulary: usize) -> Result<(), Failure> {
        let given = Recommended::default().fill(&self.asked());
        given.checked(vocabulary).map(drop).map_err(|e| as_flag(&e).into())
    }
}

/// A parameter of a request that cannot be honoured, by the name of its flag.
pub fn as_flag(e: &RequestError) -> String {
    format!("--{}: {}", e.param.replace('_', "-"), e.message)
}

impl MachineFlags {
    /// The type of weights and activations in memory.
    pub fn storage(&self) -> DType {
        match self.dtype {
            DTypeName::F32 => DType::F32,
            DTypeName::Bf16 => DType::BF16,
        }
    }

    /// The machine, for a command that runs programs; the user is warned of what it lacks.
    pub fn machine(&self) -> Result<Machine, Failure> {
        self.machine_as(None)
    }

    /// The same, whose programs cost what they do on this hardware; how many cores and how much memory it has is seen here.
    pub fn machine_as(&self, hardware: Option<&Hardware>) -> Result<Machine, Failure> {
        let device = self.device.kind("plan with `astrai compile`, or use --device cpu")?;
        let costs: Costs = &|kernels| {
            let of = |h: &Hardware| {
                let name = kernels.name.clone();
                Target { name, units: kernels.units, memory: kernels.memory, ..h.target(kernels) }
            };
            hardware.map_or_else(|| kernels.clone(), of)
        };
        let machine = Machine::with(device, self.threads.into(), self.simd.on(self.device)?, costs)?;
        warn(&machine.warnings);
        Ok(machine)
    }

    /// The machine, for a command that only plans, on this hardware.
    pub fn planner(&self, hardware: Option<&Hardware>) -> Result<Machine, Failure> {
        match self.device.planner(self.threads.into(), self.simd, hardware)? {
            Some(machine) => Ok(machine),
            None => bail!("--device interpreter compiles nothing; use cpu, cuda or null"),
        }
    }
}
