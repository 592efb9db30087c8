//! What NVRTC makes of CUDA kernels. In: planned programs. Out: registers and spills for the summary, PTX for the folder.

use super::Compile;
use crate::failure::{Failure, bail, warn};
use crate::flags::DeviceName;
use astrai_engine::machine::{Machine, cache, nvrtc};
use astrai_ir::Kernel;
use astrai_runtime::Compiled;
use astrai_runtime::device::cuda::{Cubin, architecture, compile};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

impl Compile {
    /// What NVRTC makes of the kernels, for a CUDA device; nothing for others, where nothing of it is shown, and where it is not
    /// wanted and not here.
    pub(super) fn machined<'a>(
        &self,
        programs: &'a [(&'static str, Compiled)],
        machine: &Machine,
        report: &mut Map<String, Value>,
    ) -> Result<Option<Machined<'a>>, Failure> {
        if !matches!(self.machine.device, DeviceName::Cuda(_)) {
            if self.ptx {
                bail!("--ptx is for kernels of CUDA devices; give --device cuda");
            }
            return Ok(None);
        }
        let shown = self.dump_after.is_none() && self.explained_kind().is_none();
        if !shown && self.output.is_none() && self.html.is_none() {
            return Ok(None);
        }
        match Machined::of(programs, machine)? {
            Ok(machined) => {
                machined.report(report);
                Ok(Some(machined))
            }
            Err(none) if self.ptx => bail!("--ptx: {none}"),
            Err(none) => {
                report.insert("nvrtc_absent".into(), json!(none));
                Ok(None)
            }
        }
    }
}

/// The distinct kernels of some programs as machine code.
pub struct Machined<'a> {
    arch: String,
    kernels: Vec<(&'a Kernel, Cubin)>,
}

impl Machined<'_> {
    /// Compiles every kernel for the machine's architecture, or reads what was compiled before; a line where there is no NVRTC.
    pub fn of<'a>(
        programs: &'a [(&'static str, Compiled)],
        machine: &Machine,
    ) -> Result<Result<Machined<'a>, String>, Failure> {
        let nvrtc = match nvrtc() {
            Ok(nvrtc) => nvrtc,
            Err(none) => return Ok(Err(none.to_string())),
        };
        let all = programs.iter().flat_map(|(_, program)| program.kernels.iter().flatten());
        let distinct: BTreeMap<&str, &Kernel> = all.map(|k| (&*k.identity, k)).collect();
        let kernels: Vec<&Kernel> = distinct.into_values().collect();
        let arch = architecture(&nvrtc, machine.isa())?;
        let (cache, warning) = cache()?;
        warn(warning.as_slice());
        let made = compile(&nvrtc, Some(&cache), machine.backend(), &kernels, &arch)?;
        Ok(Ok(Machined { arch, kernels: kernels.into_iter().zip(made).collect() }))
    }

    /// Machine code of a kernel.
    pub fn cubin(&self, identity: &str) -> Option<&Cubin> {
        self.kernels.iter().find(|(k, _)| k.identity == identity).map(|(_, made)| made)
    }

    /// Adds to a summary: the most that a kernel uses, and what all of them spill.
    pub fn report(&self, report: &mut Map<String, Value>) {
        let usage = || self.kernels.iter().flat_map(|(_, made)| &made.usage);
        report.insert("arch".into(), json!(self.arch));
        report.insert("registers".into(), json!(usage().map(|u| u.registers).max()));
        report.insert(
            "spill_bytes".into(),
            json!(usage().map(|u| u.spill_stores + u.spill_loads).sum::<u32>()),
        );
        report.insert("shared_bytes".into(), json!(usage().map(|u| u.shared).max()));
    }

    /// Writes the PTX of every kernel beside its source.
    pub fn write(&self, folder: &Path) -> Result<(), Failure> {
        for (kernel, made) in &self.kernels {
            let path = folder.join(format!("kernels/{}.ptx", kernel.identity));
            std::fs::write(&path, &made.ptx).map_err(|e| format!("{}: {e}", path.display()))?;
        }
        Ok(())
    }
}
