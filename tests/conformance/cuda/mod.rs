//! CUDA kernels without a GPU: every kernel through NVRTC to machine code, its registers counted, and its PTX executed and held
//! against the interpreter.

mod cases;
mod forms;
mod gpu;
mod mutants;
mod ptx;
mod traffic;

use crate::driver::checks_everything;
use astrai_codegen::cpu::{Cpu, Isa};
use astrai_codegen::cuda;
use astrai_engine::Machine;
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, DType, Kernel, Precision, Sizes, Target, Tensor, eval};
use astrai_runtime::device::cuda::Nvrtc;
use astrai_runtime::{Compiled, Error, Options, Session, Value, compile};
use cases::{At, Case, values};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Registers of a thread that no kernel of a form may exceed: 64 let four blocks of 256 threads share a multiprocessor, 128 two.
const REGISTERS: [(&str, u32); 9] = [
    ("loops", 64),
    ("route", 64),
    ("sample", 80),
    ("dot", 128),
    ("grouped", 128),
    ("outer", 128),
    ("loss", 128),
    ("attention", 255),
    ("attention_grad", 255),
];
/// Architectures that kernels are compiled for; the first everywhere, the others in continuous integration, of kernels that take more than half
/// their budget on the first, and of every eighth: where the first takes half or less, no other may take more than three quarters.
const ARCHES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];
/// Multiprocessors of the targets: with one, tiles are as large as they become, with many as small, and keys are split.
const UNITS: [u32; 2] = [1, 132];

/// The numbers of a device with so many multiprocessors; what the compiler searches costs as on a processor.
fn target(units: u32) -> Target {
    let flops = vec![(DType::F32, 60e12), (DType::BF16, 60e12)];
    let plain = Cpu::new(Isa::Plain, 1, 1 << 34).target().clone();
    let (name, isa) = ("cuda".to_string(), "sm_80".to_string());
    Target { kind: name.clone(), name, isa, units, flops, warp: 32, matrix_unit: true, ..plain }
}

fn compiled(case: &Case, machine: &Machine) -> Arc<Compiled> {
    let program = compile(&case.graph, machine.backend(), &Options::default());
    Arc::new(program.unwrap_or_else(|e| panic!("{}: {e}", case.name)))
}

fn kernels(programs: &[Arc<Compiled>]) -> Vec<&Kernel> {
    programs.iter().flat_map(|p| p.kernels.iter().flatten()).collect()
}

type Results = Result<Vec<(String, Value)>, Error>;

fn results(case: &Case, program: &Arc<Compiled>, m: &Machine, at: At) -> Results {
    let nothing: HashMap<String, Value> = HashMap::new();
    let mut session = Session::new(program.clone(), &nothing, &m.device, &mut |_, _| {})?;
    let values = values(case, at);
    let values: Vec<(&str, Value)> = values.iter().map(|(n, v)| (&**n, Value::from_tensor(v))).collect();
    session.run(&values.iter().map(|(n, v)| (*n, v)).collect::<Vec<_>>())
}

/// Largest error allowed to an output, as a part of its largest magnitude.
fn tolerance(case: &Case, out: DType) -> f64 {
    let ops = case.graph.nodes().iter().filter(|n| n.op.leaf_name().is_none());
    let most = ops.map(|n| n.op.tolerance(n.ty().dtype)).fold(0.0, f64::max);
    if out.is_float() && !case.name.starts_with("exact") { most } else { 0.0 }
}

/// What the interpreter says.
fn wanted(case: &Case, at: At) -> Vec<(String, Tensor)> {
    let sizes = Sizes::from([("t".to_string(), at.0)]);
    eval(&case.graph, &values(case, at), &sizes, Precision::default()).unwrap()
}

/// Whether a result is what is wanted, within its tolerance; of gates, which are products alone, each number within its own.
fn agrees(case: &Case, got: &Tensor, want: &Tensor) -> Result<(), String> {
    let allowed = tolerance(case, want.dtype);
    match case.name.starts_with("gated") {
        true => numbers_agree(got, want, allowed),
        false => crate::kernels::table::compare(got, want, allowed),
    }
}

/// Whether each number is what is wanted within this part of itself, those below a thousandth within that of a thousandth.
fn numbers_agree(got: &Tensor, want: &Tensor, allowed: f64) -> Result<(), String> {
    for (i, (a, b)) in (0..want.len()).map(|i| (got.at(i), want.at(i))).enumerate() {
        let allowed = allowed * b.abs().max(1e-3);
        let close = a == b || a.is_nan() && b.is_nan() || b.is_finite() && (a - b).abs() <= allowed;
        if !close {
            return Err(format!("element {i} is {a:?}, not {b:?} (allowed {allowed:e})"));
        }
    }
    Ok(())
}

/// The first result that is not what is wanted.
fn difference(case: &Case, want: &[(String, Tensor)], got: &[(String, Value)]) -> Result<(), String> {
    for (name, want) in want {
        let got = got.iter().find(|(n, _)| n == name).unwrap().1.to_tensor().unwrap();
        agrees(case, &got, want).map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

fn compare(case: &Case, at: At, got: &[(String, Value)]) {
    difference(case, &wanted(case, at), got).unwrap_or_else(|e| panic!("{} at {at:?}: {e}", case.name));
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
    // Outside of continuous integration a third of the kernels, for one architecture.
    let (arches, step) = if checks_everything() { (&ARCHES[..], 1) } else { (&ARCHES[..1], 3) };
    // Cases of several tables have kernels in common.
    let all = all_kernels();
    let mut seen = BTreeSet::new();
    let kernels: Vec<_> = all.iter().filter(|(_, k)| seen.insert(&k.identity)).step_by(step).collect();
    let started = std::time::Instant::now();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut most: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        let mut programs = 0;
        loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some((name, k)) = kernels.get(i) else { return (programs, most) };
            let form = name.split(' ').next().unwrap();
            let cap = REGISTERS.iter().find(|c| c.0 == form);
            let cap = cap.unwrap_or_else(|| panic!("no cap for {form}")).1;
            let (sampled, mut near) = (i.is_multiple_of(8), false);
            for arch in arches {
                let first = arch == &ARCHES[0];
                if !(first || near || sampled) {
                    continue;
                }
                let most_here = if first || near { cap } else { cap * 3 / 4 };
                programs += 1;
                let cubin =
                    nvrtc.cubin(name, &k.source, arch, cuda::OPTIONS).unwrap_or_else(|e| panic!("{e}"));
                assert!(cubin.image.starts_with(b"\x7fELF"), "{name} {arch}");
                assert_eq!(cubin.usage.len(), k.entries.len(), "{name}: {}", cubin.log);
                for u in &cubin.usage {
                    assert_eq!((u.spill_stores, u.spill_loads), (0, 0), "{name} {} {arch} spills", u.name);
                    near |= first && 2 * u.registers > cap;
                    assert!(
                        (1..=most_here).contains(&u.registers),
                        "{name} {arch}: {} registers",
                        u.registers
                    );
                    let most = most.entry(form.to_string()).or_default();
                    *most = (most.0.max(u.registers), most.1.max(u.shared));
                }
            }
        }
    };
    let parts = std::thread::scope(|s| {
        let jobs = [s.spawn(work), s.spawn(work)];
        jobs.into_iter().map(|j| j.join().unwrap()).collect::<Vec<_>>()
    });
    let mut most: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for (form, (registers, shared)) in parts.iter().flat_map(|(_, most)| most) {
        let of = most.entry(form).or_default();
        *of = (of.0.max(*registers), of.1.max(*shared));
    }
    let (n, (major, minor)) = (parts.iter().map(|(n, _)| n).sum::<usize>(), nvrtc.version());
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
