//! A CUDA device that executes the PTX of every kernel and checks each access. In: programs of the tables. Out: their results, held
//! against the interpreter.

use super::cases::Draw;
use super::{UNITS, cases, compiled, difference, forms, results, target, wanted};
use crate::driver::checks_everything;
use crate::kernels::table::{compare, run};
use crate::machines::machine;
use astrai_codegen::cuda::{self, Cuda};
use astrai_engine::Machine;
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, Dim, Kernel, Op, Target};
use astrai_ptx::{Counts, Memory, Module, Mutant, nvrtc};
use astrai_runtime::device::{Block, Executable, Launch, Pointer, Space, Threads};
use astrai_runtime::{Device, Error};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Most blocks of a launch, and the seed of the orders of blocks and warps.
pub(super) const ORDERS: [(u64, u64); 3] = [(u64::MAX, 1), (1, 7), (3, 77)];

fn locked<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What launches of all kernels share.
struct Inside {
    memory: Mutex<Memory>,
    order: Mutex<(u64, u64)>,
    /// What each entry did.
    counts: Mutex<BTreeMap<String, (Arc<astrai_ptx::Kernel>, Counts)>>,
    /// Runs in place of the entry of its name, with so many instructions of warps a block.
    mutant: Mutex<Option<(Mutant, u64)>>,
    /// Sectors and passes are counted, too.
    counted: AtomicBool,
}

/// The device.
pub(super) struct Emulator {
    backend: Cuda,
    inside: Arc<Inside>,
}

impl Emulator {
    /// With so many multiprocessors; `None`, and a word, without NVRTC.
    pub(super) fn new(units: u32) -> Option<Arc<Emulator>> {
        Emulator::of(target(units))
    }

    /// In the place of this device.
    pub(super) fn of(target: Target) -> Option<Arc<Emulator>> {
        if nvrtc::ptx("", &[]).is_none() {
            println!("skipped: no NVRTC in .cache/nvrtc; scripts/setup-cache.sh puts it there");
            return None;
        }
        let inside = Inside {
            memory: Mutex::new(Memory::new(0, 1 << 50)),
            order: Mutex::new(ORDERS[0]),
            counts: Mutex::default(),
            mutant: Mutex::default(),
            counted: AtomicBool::new(false),
        };
        Some(Arc::new(Emulator { backend: Cuda::new(target), inside: Arc::new(inside) }))
    }

    pub(super) fn order(&self, order: (u64, u64)) {
        *locked(&self.inside.order) = order;
    }

    /// Counts sectors and passes from here on.
    pub(super) fn counting(self: Arc<Emulator>) -> Arc<Emulator> {
        self.inside.counted.store(true, Relaxed);
        self
    }

    /// Runs this in place of the entry of its name, with so many instructions of warps a block; or nothing.
    pub(super) fn instead(&self, mutant: Option<(Mutant, u64)>) {
        *locked(&self.inside.mutant) = mutant;
    }

    /// What each entry did since this was last asked.
    pub(super) fn took(&self) -> Vec<(Arc<astrai_ptx::Kernel>, Counts)> {
        std::mem::take(&mut *locked(&self.inside.counts)).into_values().collect()
    }
}

/// Memory that is given back when nothing holds it.
struct Held(Arc<Inside>, u64);

impl Drop for Held {
    fn drop(&mut self) {
        locked(&self.0.memory).free(self.1);
    }
}

fn refused((_, said): astrai_ptx::Refused) -> Error {
    Error::Input(said)
}

impl Threads for Emulator {}

impl Space for Emulator {
    fn available(&self) -> u64 {
        locked(&self.inside.memory).info().0
    }

    fn alloc(&self, lens: &[usize]) -> Result<Vec<Block>, Error> {
        let one = |len: &usize| -> Result<Block, Error> {
            let mut memory = locked(&self.inside.memory);
            let at = memory.alloc(*len as u64).ok_or_else(|| Error::Input("no memory".into()))?;
            memory.fill(at, &[0], *len).map_err(refused)?;
            Ok(Block::new(Pointer(at), *len, Arc::new(Held(self.inside.clone(), at))))
        };
        lens.iter().map(one).collect()
    }

    fn host(&self, _: Pointer) -> Option<*mut u8> {
        None
    }

    fn import(&self, _: &[u8]) -> Option<Pointer> {
        None
    }

    fn read(&self, at: Pointer, to: &mut [u8]) -> Result<(), Error> {
        if to.is_empty() { Ok(()) } else { locked(&self.inside.memory).read(at.0, to).map_err(refused) }
    }

    fn write(&self, at: Pointer, from: &[u8]) -> Result<(), Error> {
        if from.is_empty() { Ok(()) } else { locked(&self.inside.memory).write(at.0, from).map_err(refused) }
    }
}

/// PTX of a kernel, compiled once in a process.
fn modules(kernels: &[&Kernel]) -> Vec<Arc<Module>> {
    static MADE: OnceLock<Mutex<HashMap<String, Arc<Module>>>> = OnceLock::new();
    let made = MADE.get_or_init(Mutex::default);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        while let Some(k) = kernels.get(next.fetch_add(1, Relaxed)) {
            if locked(made).contains_key(&k.identity) {
                continue;
            }
            let options = [cuda::OPTIONS, &["--gpu-architecture=compute_80", "-lineinfo"]].concat();
            let text = nvrtc::ptx(&k.source, &options).unwrap_or_else(|| Err("no NVRTC".into()));
            let module = text.and_then(|t| Module::parse(&t));
            let module = module.unwrap_or_else(|e| panic!("{}: {e}", k.identity));
            locked(made).insert(k.identity.clone(), Arc::new(module));
        }
    };
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|s| (0..threads).for_each(|_| drop(s.spawn(work))));
    kernels.iter().map(|k| locked(made)[&k.identity].clone()).collect()
}

impl Device for Emulator {
    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn name(&self) -> &'static str {
        "emulator"
    }

    fn load(&self, kernels: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error> {
        let one = |(k, module): (&&Kernel, Arc<Module>)| {
            let loaded = Loaded { kernel: (*k).clone(), module, inside: self.inside.clone() };
            Arc::new(loaded) as Arc<dyn Executable>
        };
        Ok(kernels.iter().zip(modules(kernels)).map(one).collect())
    }
}

struct Loaded {
    kernel: Kernel,
    module: Arc<Module>,
    inside: Arc<Inside>,
}

impl Executable for Loaded {
    fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let value = |d: &Dim| d.eval(&|name| launch.size(name)).map_err(Error::Input);
        let mut args: Vec<u64> = launch.buffers.iter().map(|at| at.0).collect();
        if self.kernel.workspace.literal() != Some(0) {
            args.push(launch.workspace.at().0);
        }
        args.extend(launch.sizes.iter().map(|n| *n as u64));
        let (most, seed) = *locked(&self.inside.order);
        let mutant = locked(&self.inside.mutant).clone();
        for round in 0..value(&self.kernel.rounds)? {
            let mut args = args.clone();
            args.extend((!self.kernel.rounds.is_one()).then_some(round));
            let params: Vec<u8> = args.iter().flat_map(|a| a.to_le_bytes()).collect();
            for e in &self.kernel.entries {
                let Grid::Units(blocks) = &e.grid else { panic!("blocks are a size") };
                let blocks = value(blocks)?.min(most) as u32;
                let whole = self.module.kernel(&e.symbol).unwrap();
                let changed = mutant.as_ref().filter(|(m, _)| m.kernel.name == e.symbol);
                let kernel = changed.map_or(&**whole, |(m, _)| &m.kernel);
                let mut memory = locked(&self.inside.memory);
                let variables: Vec<u64> = (self.module.variables.iter())
                    .map(|v| {
                        let at = memory.alloc(v.bytes.len() as u64).unwrap();
                        memory.write(at, &v.bytes).unwrap();
                        at
                    })
                    .collect();
                let mut l = astrai_ptx::Launch::new(kernel, [blocks, 1, 1], [e.block, 1, 1], &params);
                (l.dynamic, l.seed, l.variables) = (value(&e.shared)? as usize, seed, &variables);
                l.counted = self.inside.counted.load(Relaxed);
                l.budget = changed.map_or(astrai_ptx::BUDGET, |(_, budget)| *budget);
                let counts = l.run(&mut memory).map_err(|f| Error::Input(f.to_string()))?;
                for at in &variables {
                    memory.free(*at);
                }
                let mut all = locked(&self.inside.counts);
                all.entry(e.symbol.clone())
                    .or_insert_with(|| (whole.clone(), Counts::default()))
                    .1
                    .add(&counts);
            }
        }
        Ok(())
    }
}

/// Orders that are tried; outside of continuous integration two of three.
fn orders() -> &'static [(u64, u64)] {
    if checks_everything() { &ORDERS } else { &ORDERS[..2] }
}

/// Says how much of the kernels was executed.
fn report(name: &str, device: &Emulator) {
    let counts = locked(&device.inside.counts);
    let (mut all, mut never, mut lanes) = (0, 0, 0);
    for (k, c) in counts.values() {
        all += k.instructions() - 1;
        never += c.never(k).len();
        lanes += c.lanes();
    }
    println!(
        "{name}: {} entries, {all} instructions, {never} never executed; {lanes} lane instructions",
        counts.len()
    );
}

#[test]
fn the_ptx_of_loops_agrees_with_the_interpreter() {
    let Some(device) = Emulator::new(132) else { return };
    let machine = Machine::over(device.clone());
    let cases = cases::cases();
    let programs: Vec<_> = cases.iter().map(|c| compiled(c, &machine)).collect();
    machine.device.load(&super::kernels(&programs)).unwrap();
    let mut wrong = vec![];
    for (case, program) in cases.iter().zip(&programs) {
        for at in case.runs() {
            let bits: Vec<_> = orders()
                .iter()
                .map(|order| {
                    device.order(*order);
                    results(case, program, &machine, at).unwrap_or_else(|e| panic!("{}: {e}", case.name))
                })
                .collect();
            let said = difference(case, &wanted(case, at), &bits[0]);
            let one_way = if bits.iter().all(|b| *b == bits[0]) { Ok(()) } else { Err("orders show".into()) };
            wrong.extend(said.and(one_way).err().map(|e| format!("{} at {at:?}: {e}", case.name)));
        }
    }
    assert!(wrong.is_empty(), "{} runs are wrong:\n{}", wrong.len(), wrong.join("\n"));
    report("loops", &device);
}

#[test]
fn without_reductions_the_host_kernel_has_the_same_values() {
    let Some(device) = Emulator::new(132) else { return };
    let there = Machine::over(device);
    // Orders of summation differ: the host has sixteen lanes, a block has its threads.
    let sums = |op: &Op| {
        matches!(op, Op::Reduce(_) | Op::Dot(_) | Op::RmsNorm(_) | Op::LayerNorm(_) | Op::Softmax(_))
    };
    let mut cases = cases::cases();
    // Nor has a host the memory that the largest may need.
    cases.retain(|c| c.name != "large" && !c.graph.nodes().iter().any(|n| sums(&n.op)));
    let on = |m: &Machine| cases.iter().map(|c| compiled(c, m)).collect::<Vec<_>>();
    let (programs, hosted) = (on(&there), on(machine()));
    for (m, all) in [(&there, &programs), (machine(), &hosted)] {
        m.device.load(&super::kernels(all)).unwrap();
    }
    for (case, (program, hosted)) in cases.iter().zip(programs.iter().zip(&hosted)) {
        let at = (case.rows[0].max(7), Draw::Plain(0));
        let (a, b) =
            (results(case, program, &there, at).unwrap(), results(case, hosted, machine(), at).unwrap());
        for ((name, a), (_, b)) in a.iter().zip(&b) {
            let agree = compare(&a.to_tensor().unwrap(), &b.to_tensor().unwrap(), 0.0);
            agree.unwrap_or_else(|e| panic!("{} {name}: host and CUDA differ: {e}", case.name));
        }
    }
}

/// A table at all sizes, with many blocks and few. Where a device with one multiprocessor has larger tiles, at the largest size also with
/// these.
fn core_agrees(at: usize) {
    let form = &forms::FORMS[at];
    let [Some(small), Some(device)] = UNITS.map(Emulator::new) else { return };
    let (table, machine) = ((form.table)(), Machine::over(device.clone()));
    let most = form.sizes.len() - 1;
    let leaves = table.values(form.sizes[most]);
    let session = |order: &(u64, u64)| {
        device.order(*order);
        if *order == ORDERS[0] {
            table.run_on([&machine], form.sizes);
        }
        run(&mut table.session_on(&machine), &leaves)
    };
    let bits: Vec<_> = orders().iter().map(session).collect();
    assert!(bits.iter().all(|b| *b == bits[0]), "{}: the order of blocks shows", form.name);
    report(form.name, &device);
    // Larger tiles, where there are some; not outside of continuous integration.
    if !checks_everything() {
        return;
    }
    let larger = Machine::over(small);
    let texts = |m: &Machine| -> Vec<String> {
        table.compiled_on(m).kernels.iter().flatten().map(|k| k.identity.clone()).collect()
    };
    if texts(&larger) != texts(&machine) {
        table.run_on([&larger], &form.sizes[most..]);
    }
}

#[test]
fn the_ptx_of_dots_agrees() {
    core_agrees(0);
}

#[test]
fn the_ptx_of_rows_and_columns_agrees() {
    core_agrees(1);
}

#[test]
fn the_ptx_of_attention_agrees() {
    core_agrees(2);
}

#[test]
fn the_ptx_of_pages_agrees() {
    core_agrees(3);
}

#[test]
fn the_ptx_of_gradients_of_attention_agrees() {
    core_agrees(4);
}

#[test]
fn the_ptx_of_losses_agrees() {
    core_agrees(5);
}

#[test]
fn the_ptx_of_experts_agrees() {
    core_agrees(6);
}

#[test]
fn the_ptx_of_draws_agrees() {
    core_agrees(7);
}
