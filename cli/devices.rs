//! `astrai devices`: what this machine can run programs on.

use crate::estimate::measured;
use crate::failure::Done;
use crate::flags::DeviceName;
use crate::table::{bytes, count, table};
use astrai_engine::machine::nvrtc;
use astrai_ir::DType;
use astrai_runtime::Error;
use astrai_runtime::device::available_memory;
use astrai_runtime::device::cpu::{host_isa, host_levels};
use astrai_runtime::device::cuda::{self, Found};
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// List the devices of this machine, the processor and CUDA devices, or measure one
///
/// A CUDA device needs NVIDIA's driver (libcuda.so.1) and NVRTC, its run-time compiler; what is missing is said.
#[derive(Args)]
#[command(after_help = "Examples:\n  astrai devices\n  astrai devices --measure here.json")]
pub struct Devices {
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Measure a device and write its hardware file: peaks of arithmetic, bytes per second by how many are read again, starting threads,
    /// what a process takes; for --hardware of estimate, compile, train --dry-run, run --profile and bench
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    measure: Option<PathBuf>,
    /// What is measured: cpu (also auto), cuda or cuda:N
    #[arg(long, value_name = "DEVICE", requires = "measure")]
    device: Option<DeviceName>,
    /// Threads that are measured together; 0 means one a core
    #[arg(long, value_name = "N", default_value_t = 0, requires = "measure", value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
}

impl Devices {
    /// Prints the list, or measures.
    pub fn run(&self, out: &mut dyn Write) -> Done {
        if let Some(file) = &self.measure {
            measured(file, self.device, self.threads, out)?;
            return Ok(ExitCode::SUCCESS);
        }
        let found = cuda::devices();
        let compiler = nvrtc().map(|n| n.version()).map_err(|e| e.to_string());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let levels: Vec<&str> = host_levels().iter().map(|l| l.name()).collect();
        if self.json {
            let line = json!({
                "cpu": {
                    "cores": cores, "isa": host_isa().name(), "levels": levels, "memory_free": available_memory(),
                },
                "cuda": found.as_ref().map_or_else(|_| vec![], |all| all.iter().map(fields).collect()),
                "cuda_absent": found.as_ref().err(),
                "nvrtc": compiler.as_ref().ok().map(|(major, minor)| format!("{major}.{minor}")),
                "nvrtc_absent": compiler.as_ref().err(),
            });
            writeln!(out, "{line}")?;
            return Ok(ExitCode::SUCCESS);
        }
        let free = bytes(available_memory());
        let cpu = vec![
            "cpu".into(),
            format!("{cores} cores, {}", levels.join(", ")),
            free,
            String::new(),
            String::new(),
        ];
        let of = |(i, found): (usize, &Result<Found, Error>)| {
            let f = match found {
                Ok(f) => f,
                Err(why) => return vec![format!("cuda:{i}"), why.to_string()],
            };
            let t = &f.target;
            let what = format!("{}, {}, {} multiprocessors", t.name, t.isa, t.units);
            let peaks =
                format!("{}flop/s f32, {}B/s", count(t.peak(DType::F32) as u64), count(t.bandwidth as u64));
            vec![format!("cuda:{i}"), what, bytes(f.free), bytes(t.memory), peaks]
        };
        let rows: Vec<_> = [cpu].into_iter().chain(found.iter().flatten().enumerate().map(of)).collect();
        write!(out, "{}", table(&["device", "what", "free", "memory", "by its attributes"], &rows))?;
        found.err().map_or(Ok(()), |none| writeln!(out, "no CUDA device: {none}"))?;
        match compiler {
            Ok((major, minor)) => writeln!(out, "NVRTC {major}.{minor} compiles kernels for CUDA devices")?,
            Err(none) => writeln!(out, "no NVRTC, without which no CUDA device can be used: {none}")?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn fields(found: &Result<Found, Error>) -> serde_json::Value {
    let f = match found {
        Ok(f) => f,
        Err(why) => return json!({"error": why.to_string()}),
    };
    let t = &f.target;
    json!({
        "name": t.name, "arch": t.isa, "multiprocessors": t.units, "memory": t.memory, "memory_free": f.free,
        "shared_memory": t.shared_memory, "bandwidth": t.bandwidth, "flops_f32": t.peak(DType::F32),
    })
}
