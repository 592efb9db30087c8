//! Machines of the tests: this processor with each level of vector instructions that it has or can take the place of.

use crate::driver::checks_everything;
use crate::quick;
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::Target;
use astrai_runtime::device::KernelCache;
use astrai_runtime::device::cpu::{Compiler, Cpu, Isa, host_isa, host_levels, modelled_levels};
use std::sync::OnceLock;

/// The machine of all tests of a binary: two threads, the best instructions.
pub fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| host(2))
}

/// This processor with its best instructions. Outside of continuous integration its kernels are compiled with little optimisation too: what
/// users' flags make of them hold the golden cases, in `golden` and `gradients` here and by every command.
pub fn host(threads: usize) -> Machine {
    if checks_everything() { optimised(host_isa(), threads) } else { little_optimised(host_isa(), threads) }
}

/// Two threads with each level; the best comes last. Kernels are compiled with little optimisation, in a third of the
/// time: these tables hold their text against the interpreter. The golden models hold what users' flags make of it.
pub fn machines() -> &'static [Machine] {
    static MACHINES: OnceLock<Vec<Machine>> = OnceLock::new();
    MACHINES.get_or_init(|| levels().into_iter().map(|isa| little_optimised(isa, 2)).collect())
}

/// Those of them whose instructions the processor has.
pub fn own() -> &'static [Machine] {
    &machines()[modelled_levels().len()..]
}

/// An emulated GPU, where its driver and compiler are here; in continuous integration alone, for each table's kernels take NVRTC longer
/// than all levels of the processor take its compiler, and the tables of CUDA kernels execute every form on any machine.
pub fn emulated() -> Option<&'static Machine> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    let make = || match checks_everything() {
        true => crate::emulated::device(0).map(|device| Machine::over(device)),
        false => {
            println!("skipped: the emulated GPU; with CI=true it runs every table");
            None
        }
    };
    MACHINE.get_or_init(make).as_ref()
}

/// All of them with sixteen threads, more than a few queries have heads.
pub fn crowded() -> &'static [Machine] {
    static MACHINES: OnceLock<Vec<Machine>> = OnceLock::new();
    MACHINES.get_or_init(|| levels().into_iter().map(|isa| little_optimised(isa, 16)).collect())
}

/// Levels that the processor has, after those of which the kernels' text has a model. Outside of continuous integration every second from
/// the best down, and the least.
pub fn levels() -> Vec<Isa> {
    let mut own = host_levels();
    let (last, mut at) = (own.len().saturating_sub(1), 0..);
    own.retain(|_| at.next().is_some_and(|i| checks_everything() || i == 0 || (last - i).is_multiple_of(2)));
    [modelled_levels(), own].concat()
}

/// A device with so many threads, the processor as in [`host`].
pub fn on(device: Kind, threads: usize) -> Machine {
    if device == Kind::Cpu { host(threads) } else { Machine::new(device, threads).unwrap() }
}

/// This processor with these instructions. Kernels of levels below the best are compiled with little optimisation: their text is what
/// differs between levels.
pub fn level(isa: Isa, threads: usize) -> Machine {
    if isa == host_isa() { host(threads) } else { little_optimised(isa, threads) }
}

fn optimised(isa: Isa, threads: usize) -> Machine {
    Machine::with(Kind::Cpu, threads, isa, &Target::clone).unwrap()
}

fn little_optimised(isa: Isa, threads: usize) -> Machine {
    let Some(folder) = quick::folder() else { return optimised(isa, threads) };
    let compiler = Compiler::find(&std::env::split_paths(&quick::path()).collect::<Vec<_>>()).unwrap();
    let cache = KernelCache::open(&folder.join("kernels")).unwrap();
    Machine::on(Cpu::new(isa, threads, compiler, cache).unwrap())
}
