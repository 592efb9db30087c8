//! Machines of the tests: this processor with each level of vector instructions that it has or can take the place of.

use astrai_engine::machine::{Kind, Machine};
use astrai_runtime::device::KernelCache;
use astrai_runtime::device::cpu::{Compiler, Cpu, Isa, host_isa, host_levels, modelled_levels};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::OnceLock;

/// The machine of all tests of a binary: two threads, the best instructions.
pub fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| level(host_isa(), 2))
}

/// Two threads with each level; the best comes last.
pub fn machines() -> &'static [Machine] {
    static MACHINES: OnceLock<Vec<Machine>> = OnceLock::new();
    MACHINES.get_or_init(|| levels().into_iter().map(|isa| level(isa, 2)).collect())
}

/// Those of them whose instructions the processor has.
pub fn own() -> &'static [Machine] {
    &machines()[modelled_levels().len()..]
}

/// All of them with sixteen threads, more than a few queries have heads.
pub fn crowded() -> &'static [Machine] {
    static MACHINES: OnceLock<Vec<Machine>> = OnceLock::new();
    MACHINES.get_or_init(|| levels().into_iter().map(|isa| level(isa, 16)).collect())
}

/// Levels that the processor has, after those of which the kernels' text has a model.
pub fn levels() -> Vec<Isa> {
    [modelled_levels(), host_levels()].concat()
}

/// This processor with these instructions. Kernels of the best are compiled as users' are, those of others with little
/// optimisation, in half the time: their text is what differs between levels, and it is held against the interpreter.
pub fn level(isa: Isa, threads: usize) -> Machine {
    match quick().filter(|_| isa != host_isa()) {
        Some((compiler, cache)) => Machine::on(Cpu::new(isa, threads, compiler, cache).unwrap()),
        None => Machine::with(Kind::Cpu, threads, isa).unwrap(),
    }
}

/// The system's compiler as a script that optimises little, and a folder for what it makes.
fn quick() -> Option<(Compiler, KernelCache)> {
    let path: Vec<_> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let identity = Compiler::find(&path)?.identity().replace(|c: char| !c.is_alphanumeric(), "-");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("quick").join(identity);
    let cache = KernelCache::open(&folder.join("kernels")).unwrap();
    let script = folder.join("cc");
    if !script.exists() {
        let real = path.iter().map(|p| p.join("cc")).find(|p| p.exists())?;
        // Whole at once: another test may look for it meanwhile.
        let new = tempfile::NamedTempFile::new_in(&folder).unwrap().into_temp_path();
        std::fs::write(&new, format!("#!/bin/sh\nexec {} \"$@\" -O1\n", real.display())).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
        new.persist(&script).unwrap();
    }
    Some((Compiler::find(&[folder])?, cache))
}
