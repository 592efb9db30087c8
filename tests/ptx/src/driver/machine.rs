//! What the emulated machine is and has: settings, devices, handles.

use super::graph::{Capture, Graph};
use super::module::{Function, Loaded};
use super::tasks::Task;
use super::{Code, code, current};
use crate::counts::Counts;
use crate::kernel::Kernel;
use crate::memory::Memory;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

pub(crate) struct Settings {
    pub arch: u32,
    pub sms: u32,
    pub driver: i32,
    pub seed: u64,
    pub threads: usize,
    pub counts: Option<String>,
    /// Function, number of its call, error.
    fail: Vec<(String, u64, Code)>,
}

pub(crate) struct Device {
    pub memory: Memory,
    /// The error that every call gives from now on.
    pub sticky: Code,
    pub retained: u32,
    /// Peak of used bytes, and the pool's threshold.
    pub peak: u64,
    pub threshold: u64,
    /// Bytes that were copied to the host.
    pub to_host: u64,
}

pub(crate) struct Stream {
    pub device: usize,
    /// Waits for the default stream, and it for this one.
    pub blocking: bool,
    pub last: Option<u64>,
    /// Tasks that the next one waits for, too.
    pub waits: Vec<u64>,
    pub capture: Option<usize>,
    pub priority: i32,
}

#[derive(Default)]
pub(crate) struct Event {
    pub task: Option<u64>,
    pub at: Option<Instant>,
    pub recorded: bool,
    /// Capture in which it was recorded, and the nodes before it.
    pub captured: Option<(usize, Vec<usize>)>,
}

/// Everything.
pub(crate) struct Machine {
    pub settings: Settings,
    pub initialised: bool,
    pub devices: Vec<Device>,
    pub tasks: BTreeMap<u64, Task>,
    next_task: u64,
    next_handle: usize,
    random: u64,
    pub streams: HashMap<usize, Stream>,
    pub events: HashMap<usize, Event>,
    pub modules: HashMap<usize, Loaded>,
    pub functions: HashMap<usize, Function>,
    pub captures: HashMap<usize, Capture>,
    pub graphs: HashMap<usize, Arc<Graph>>,
    /// Host memory that copies read and write late.
    pub pinned: BTreeMap<usize, (usize, bool)>,
    calls: HashMap<&'static str, u64>,
    all_calls: u64,
    /// Counts by kernel and its text's length, which tells apart kernels of one name.
    pub counts: BTreeMap<(String, usize), (Arc<Kernel>, Counts)>,
}

fn setting<T: std::str::FromStr>(name: &str, otherwise: T) -> T {
    match std::env::var(name) {
        Ok(v) => v.trim().parse().unwrap_or_else(|_| {
            eprintln!("emulated CUDA: {name}={v} is not understood and counts for nothing");
            otherwise
        }),
        Err(_) => otherwise,
    }
}

fn failures() -> Vec<(String, u64, Code)> {
    let text = std::env::var("ASTRAI_PTX_FAIL").unwrap_or_default();
    let one = |s: &str| {
        let (name, rest) = s.trim().split_once(':')?;
        let (n, code) = rest.split_once('=')?;
        Some((name.to_string(), n.parse().ok()?, code.parse().ok()?))
    };
    let mut out = vec![];
    for s in text.split(',').filter(|s| !s.trim().is_empty()) {
        match one(s) {
            Some(f) => out.push(f),
            None => eprintln!("emulated CUDA: ASTRAI_PTX_FAIL: `{s}` is not NAME:CALL=CODE"),
        }
    }
    out
}

impl Machine {
    pub fn new() -> Machine {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let settings = Settings {
            arch: setting("ASTRAI_PTX_ARCH", 82),
            sms: setting("ASTRAI_PTX_SMS", 108),
            driver: setting("ASTRAI_PTX_DRIVER", 13_000),
            seed: setting("ASTRAI_PTX_SEED", 1),
            threads: setting("ASTRAI_PTX_THREADS", cores),
            counts: std::env::var("ASTRAI_PTX_COUNTS").ok(),
            fail: failures(),
        };
        let limit = setting("ASTRAI_PTX_MEMORY", 16 << 30);
        let device = |n| Device {
            memory: Memory::new(n, limit),
            sticky: 0,
            retained: 0,
            peak: 0,
            threshold: 0,
            to_host: 0,
        };
        if settings.counts.is_some() {
            // SAFETY: the function takes nothing and does not panic.
            unsafe { libc::atexit(at_exit) };
        }
        Machine {
            random: settings.seed ^ 0x9E37_79B9_7F4A_7C15,
            settings,
            initialised: false,
            devices: (0..setting("ASTRAI_PTX_DEVICES", 2)).map(device).collect(),
            tasks: BTreeMap::new(),
            next_task: 0,
            next_handle: 0x1000,
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            captures: HashMap::new(),
            graphs: HashMap::new(),
            pinned: BTreeMap::new(),
            calls: HashMap::new(),
            all_calls: 0,
            counts: BTreeMap::new(),
        }
    }

    /// Counts a call; the error that it is to give.
    pub fn injected(&mut self, name: &'static str) -> Option<Code> {
        let n = self.calls.entry(name).or_insert(0);
        *n += 1;
        self.all_calls += 1;
        let (n, all) = (*n, self.all_calls);
        let hit = |f: &&(String, u64, Code)| f.0 == name && f.1 == n || f.0 == "*" && f.1 == all;
        self.settings.fail.iter().find(hit).map(|f| f.2)
    }

    pub fn random(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below.max(1)
    }

    pub fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    pub fn task_number(&mut self) -> u64 {
        self.next_task += 1;
        self.next_task
    }

    /// The device of the current context.
    pub fn current(&self) -> Option<usize> {
        let d = current().checked_sub(1)?;
        (d < self.devices.len()).then_some(d)
    }

    /// The device of the current context, where it still works.
    pub fn working(&self) -> Result<usize, Code> {
        if !self.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        let d = self.current().ok_or(code::INVALID_CONTEXT)?;
        match self.devices[d].sticky {
            0 => Ok(d),
            e => Err(e),
        }
    }

    pub fn device(&self, ordinal: i32) -> Result<usize, Code> {
        if !self.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        usize::try_from(ordinal).ok().filter(|d| *d < self.devices.len()).ok_or(code::INVALID_DEVICE)
    }

    /// The device fails for good: what waits on it never runs.
    pub fn fail(&mut self, device: usize, code: Code) {
        self.devices[device].sticky = code;
        self.tasks.retain(|_, t| t.device != device);
    }

    /// The device that has this address.
    pub fn owner(&self, at: u64) -> Result<usize, Code> {
        self.devices.iter().position(|d| d.memory.owns(at)).ok_or(code::INVALID_VALUE)
    }

    /// The key of a stream: the handles 0, 1 and 2 are the device's default stream.
    pub fn stream(&mut self, handle: usize) -> Result<usize, Code> {
        let device = self.working()?;
        if handle > 2 {
            let s = self.streams.get(&handle).ok_or(code::INVALID_HANDLE)?;
            return match self.devices[s.device].sticky {
                0 => Ok(handle),
                e => Err(e),
            };
        }
        let key = 0x10 + device;
        self.streams.entry(key).or_insert(Stream {
            device,
            blocking: true,
            last: None,
            waits: vec![],
            capture: None,
            priority: 0,
        });
        Ok(key)
    }

    /// True where the host range is pinned.
    pub fn is_pinned(&self, at: usize, len: usize) -> bool {
        let found = self.pinned.range(..=at).next_back();
        found.is_some_and(|(b, (n, _))| at + len <= b + n)
    }

    /// Writes counts of every kernel that ran.
    pub fn write_counts(&self) {
        let Some(path) = &self.settings.counts else { return };
        let kernels: Vec<_> = self.counts.values().map(|(k, c)| c.json(k)).collect();
        let devices: Vec<_> = (self.devices.iter())
            .map(|d| serde_json::json!({"peak_bytes": d.peak, "bytes_to_host": d.to_host, "allocations_left": d.memory.allocations()}))
            .collect();
        let calls: BTreeMap<_, _> = self.calls.iter().collect();
        let all = serde_json::json!({"kernels": kernels, "devices": devices, "calls": calls});
        if let Err(e) = std::fs::write(path, format!("{all:#}\n")) {
            eprintln!("emulated CUDA: {path}: {e}");
        }
    }
}

extern "C" fn at_exit() {
    if let Some(m) = &*super::machine() {
        m.write_counts();
    }
}
