//! CUDA kernels without a GPU: every kernel through NVRTC to machine code, its registers counted, and the same source run
//! on the processor and held against the interpreter.

mod cases;
mod device;
mod forms;
mod gpu;
mod ptx;

use crate::kernels::table::run;
use crate::machines::machine;
use astrai_codegen::cuda;
use astrai_engine::Machine;
use astrai_ir::kernel::Grid;
use astrai_ir::{Kernel, Op, Precision, Sizes, Tensor, eval};
use astrai_runtime::device::cuda::Nvrtc;
use astrai_runtime::{Compiled, Device, Error, Options, Session, Value, compile};
use cases::{Case, values};
use device::{Shim, target};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Registers of a thread that no kernel of loops may exceed; 64 let four blocks of 256 threads share a multiprocessor.
const REGISTERS: u32 = 64;
/// The same of cores, whose blocks have 256 threads at most: a whole block fits.
const CORE_REGISTERS: u32 = 255;
/// Architectures that kernels are compiled for.
const ARCHES: [&str; 2] = ["sm_80", "sm_90a"];
/// Multiprocessors of the targets: with one, tiles are as large as they become, with many as small, and keys are split.
const UNITS: [u32; 2] = [1, 132];
/// Most blocks of a launch, and the order of threads: all, and few in another order.
const ORDERS: [(u64, u64); 2] = [(u64::MAX, 1), (2, 77)];

fn compiled(case: &Case, machine: &Machine) -> Arc<Compiled> {
    let program = compile(&case.graph, machine.backend(), &Options::default());
    Arc::new(program.unwrap_or_else(|e| panic!("{}: {e}", case.name)))
}

fn kernels(programs: &[Arc<Compiled>]) -> Vec<&Kernel> {
    programs.iter().flat_map(|p| p.kernels.iter().flatten()).collect()
}

fn sizes(t: u64) -> Sizes {
    Sizes::from([("t".to_string(), t)])
}

type Results = Result<Vec<(String, Value)>, Error>;

fn results(case: &Case, program: &Arc<Compiled>, m: &Machine, t: u64) -> Results {
    let nothing: HashMap<String, Value> = HashMap::new();
    let mut session = Session::new(program.clone(), &nothing, &m.device, &mut |_, _| {})?;
    let values = values(case, &sizes(t));
    let values: Vec<(&str, Value)> = values.iter().map(|(n, v)| (&**n, Value::from_tensor(v))).collect();
    session.run(&values.iter().map(|(n, v)| (*n, v)).collect::<Vec<_>>())
}

/// Largest error allowed to an output, as a part of its largest magnitude.
fn tolerance(case: &Case, out: &Tensor) -> f64 {
    let ops = case.graph.nodes().iter().filter(|n| n.op.leaf_name().is_none());
    let most = ops.map(|n| n.op.tolerance(n.ty().dtype)).fold(0.0, f64::max);
    if out.dtype.is_float() && !case.name.starts_with("exact") { most } else { 0.0 }
}

fn compare(case: &Case, t: u64, got: &[(String, Value)]) {
    difference(case, t, got).unwrap_or_else(|e| panic!("{} {e}", case.name));
}

fn difference(case: &Case, t: u64, got: &[(String, Value)]) -> Result<(), String> {
    let want = eval(&case.graph, &values(case, &sizes(t)), &sizes(t), Precision::default()).unwrap();
    for (name, want) in &want {
        let got = got.iter().find(|(n, _)| n == name).unwrap().1.to_tensor().unwrap();
        let agree = crate::kernels::table::compare(&got, want, tolerance(case, want));
        agree.map_err(|e| format!("{name} at {t}: {e}"))?;
    }
    Ok(())
}

#[test]
fn loops_run_on_the_processor_agree_with_the_interpreter() {
    let Some(shim) = Shim::new(UNITS[1]) else { return };
    let machine = shim.machine();
    let cases = cases::cases();
    let programs: Vec<_> = cases.iter().map(|c| compiled(c, &machine)).collect();
    shim.load(&kernels(&programs)).unwrap();
    for (case, program) in cases.iter().zip(&programs) {
        assert!(program.plan.regions.iter().all(|r| r.form().name() == "loops"), "{}", case.name);
        for &t in &case.rows {
            let bits = ORDERS.map(|(blocks, seed)| {
                shim.order(blocks, seed);
                let got = results(case, program, &machine, t).unwrap();
                compare(case, t, &got);
                got
            });
            assert!(bits[0] == bits[1], "{} at {t}: the order of threads shows", case.name);
        }
    }
}

/// A table at all sizes, on targets that have large tiles and small, with many blocks and few.
fn cores_agree(at: usize) {
    let form = &forms::FORMS[at];
    let table = (form.table)();
    for units in UNITS {
        let Some(shim) = Shim::new(units) else { return };
        let machine = shim.machine();
        let program = table.compiled_on(&machine);
        assert!(program.kernels.iter().all(Option::is_some), "{}: a region without a kernel", form.name);
        let leaves = table.values(form.sizes[form.sizes.len() - 1]);
        let bits = ORDERS.map(|(blocks, seed)| {
            shim.order(blocks, seed);
            table.run_on([&machine], form.sizes);
            run(&mut table.session_on(&machine), &leaves)
        });
        assert!(bits[0] == bits[1], "{}: the order of threads shows", form.name);
    }
}

#[test]
fn dots_agree() {
    cores_agree(0);
}

#[test]
fn rows_and_columns_agree() {
    cores_agree(1);
}

#[test]
fn attention_agrees() {
    cores_agree(2);
}

#[test]
fn pages_agree() {
    cores_agree(3);
}

#[test]
fn gradients_of_attention_agree() {
    cores_agree(4);
}

#[test]
fn losses_agree() {
    cores_agree(5);
}

#[test]
fn experts_agree() {
    cores_agree(6);
}

#[test]
fn without_reductions_the_host_kernel_has_the_same_bits() {
    let Some(shim) = Shim::new(UNITS[1]) else { return };
    let there = shim.machine();
    // Orders of summation differ: the host has sixteen lanes, a block has its threads.
    let sums = |op: &Op| {
        matches!(op, Op::Reduce(_) | Op::Dot(_) | Op::RmsNorm(_) | Op::LayerNorm(_) | Op::Softmax(_))
    };
    let mut cases = cases::cases();
    // Nor has a host the memory that the largest may need.
    cases.retain(|c| c.name != "large" && !c.graph.nodes().iter().any(|n| sums(&n.op)));
    let on = |m: &Machine| cases.iter().map(|c| compiled(c, m)).collect::<Vec<_>>();
    let (programs, hosted) = (on(&there), on(machine()));
    shim.load(&kernels(&programs)).unwrap();
    machine().device.load(&kernels(&hosted)).unwrap();
    for (case, (program, hosted)) in cases.iter().zip(programs.iter().zip(&hosted)) {
        let t = case.rows[0].max(7);
        let (a, b) =
            (results(case, program, &there, t).unwrap(), results(case, hosted, machine(), t).unwrap());
        compare(case, t, &b);
        assert!(a == b, "{}: host and CUDA differ", case.name);
    }
}

#[test]
fn the_shim_sees_a_missing_barrier() {
    let Some(shim) = Shim::new(UNITS[1]) else { return };
    let machine = shim.machine();
    let case = cases::cases().into_iter().find(|c| c.name == "softmax_257").unwrap();
    let changed = |barrier: &str| {
        let mut program = Compiled::clone(&compiled(&case, &machine));
        for k in program.kernels.iter_mut().flatten() {
            // Another text is another kernel.
            let identity = format!("{}_{}", k.identity, barrier.len());
            k.source = k.source.replace("__syncthreads();", barrier).replace(&k.identity, &identity);
            k.entries.iter_mut().for_each(|e| e.symbol = e.symbol.replace(&k.identity, &identity));
            k.identity = identity;
        }
        results(&case, &Arc::new(program), &machine, 3)
    };
    let whole = changed("__syncthreads();").unwrap();
    assert_ne!(whole, changed("").unwrap(), "stale parts of a reduction went unseen");
    let missed = changed("if (threadIdx.x != 40) __syncthreads();").unwrap_err().to_string();
    assert!(missed.contains("miss the barrier"), "{missed}");
}

/// Every kernel of all tables, by name.
fn all_kernels() -> BTreeMap<String, Kernel> {
    let mut all = BTreeMap::new();
    for units in UNITS {
        let machine = Machine::over(Arc::new(astrai_runtime::device::null::Null::new(Box::new(
            cuda::Cuda::new(target(units)),
        ))));
        let mut add = |name: &str, program: &Compiled| {
            for (k, r) in program.kernels.iter().zip(&program.plan.regions) {
                let Some(k) = k else { continue };
                all.insert(format!("{} {name} {}", r.form().name(), k.identity), k.clone());
            }
        };
        cases::cases().iter().for_each(|c| add(&c.name, &compiled(c, &machine)));
        forms::FORMS.iter().for_each(|f| add(f.name, &(f.table)().compiled_on(&machine)));
    }
    all
}

#[test]
fn every_kernel_compiles_within_its_budget_of_registers() {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cache/nvrtc");
    let Some(path) = Nvrtc::find(&[cache]) else {
        return println!("skipped: no NVRTC in .cache/nvrtc; scripts/setup-cache.sh puts it there");
    };
    let nvrtc = Nvrtc::open(&path).unwrap();
    let all = all_kernels();
    let kernels: Vec<(&String, &Kernel)> = all.iter().collect();
    let started = std::time::Instant::now();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut most: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        while let Some((name, k)) = kernels.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            let form = name.split(' ').next().unwrap();
            for arch in ARCHES {
                let cubin =
                    nvrtc.cubin(name, &k.source, arch, cuda::OPTIONS).unwrap_or_else(|e| panic!("{e}"));
                assert!(cubin.image.starts_with(b"\x7fELF"), "{name} {arch}");
                assert_eq!(cubin.usage.len(), k.entries.len(), "{name}: {}", cubin.log);
                for u in &cubin.usage {
                    assert_eq!((u.spill_stores, u.spill_loads), (0, 0), "{name} {} {arch} spills", u.name);
                    let cap = if form == "loops" { REGISTERS } else { CORE_REGISTERS };
                    assert!((1..=cap).contains(&u.registers), "{name} {arch}: {} registers", u.registers);
                    let most = most.entry(form.to_string()).or_default();
                    *most = (most.0.max(u.registers), most.1.max(u.shared));
                }
            }
        }
        most
    };
    let parts = std::thread::scope(|s| {
        let jobs = [s.spawn(work), s.spawn(work)];
        jobs.into_iter().map(|j| j.join().unwrap()).collect::<Vec<_>>()
    });
    let mut most: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for (form, (registers, shared)) in parts.iter().flatten() {
        let of = most.entry(form).or_default();
        *of = (of.0.max(*registers), of.1.max(*shared));
    }
    let (n, (major, minor)) = (kernels.len() * ARCHES.len(), nvrtc.version());
    println!(
        "NVRTC {major}.{minor}: {n} programs in {:.1?}; registers, bytes shared: {most:?}",
        started.elapsed()
    );
}

#[test]
fn a_program_is_self_contained_and_says_how_it_is_launched() {
    for (name, k) in all_kernels() {
        assert!(k.source.starts_with("/* ") && !k.source.contains("#include"), "{name}");
        assert_eq!(k.source.matches("extern \"C\" __global__").count(), k.entries.len(), "{name}");
        for e in &k.entries {
            assert!(e.block.is_multiple_of(32) && e.block <= 256, "{name}");
            let Grid::Units(blocks) = &e.grid else { panic!("{name}: blocks are a size") };
            let known = blocks.eval(&|_| Some(1000)).unwrap();
            assert!(known > 0 && (blocks.eval(&|_| None).is_err() || blocks.size().is_some()), "{name}");
            let workspace = k.workspace.literal() != Some(0);
            let head = k.source.split(&format!("{}(", e.symbol)).nth(1).unwrap().split(')').next().unwrap();
            assert_eq!(head.contains("workspace"), workspace, "{name}");
            assert_eq!(head.ends_with("int64_t round"), !k.rounds.is_one(), "{name}");
        }
        let large = name.starts_with("loops large");
        assert_eq!(k.source.contains("#define INDEX int64_t"), large, "{name}");
    }
}
