//! CUDA kernels without a GPU: every kernel through NVRTC to machine code, its registers counted, and the same source run
//! on the processor and held against the interpreter.

mod cases;
pub mod ptx;
mod run;

use astrai_codegen::cpu::isa::{self, FLAGS};
use astrai_codegen::cuda::{self, CudaKernel, Mapping};
use astrai_ir::kernel::Grid;
use astrai_ir::{Backend, Op, Precision, Sizes, Tensor, eval};
use astrai_runtime::device::cpu::host_isa;
use astrai_runtime::device::cuda::Nvrtc;
use libloading::Library;
use run::{Planned, build, plan, program, values};
use std::path::Path;

/// Registers of a thread that no kernel may exceed; 64 let four blocks of 256 threads share a multiprocessor.
const REGISTERS: u32 = 64;
/// Architectures that kernels are compiled for.
const ARCHES: [&str; 2] = ["sm_80", "sm_90a"];
const CPP: [&str; 3] = ["g++", "clang++", "c++"];
const SHIM_FLAGS: [&str; 8] =
    ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fwrapv", "-fPIC", "-shared", "-w"];

type Launch = unsafe extern "C" fn(*const *mut u8, *const i64, i64, u64) -> i32;
type Phase = unsafe extern "C" fn(*const *mut u8, *const i64, *mut u8, i64, i64);

fn planned() -> Vec<Planned> {
    cases::cases().into_iter().map(plan).collect()
}

/// Runs a kernel through the shim.
fn launch(library: &Library, k: &CudaKernel, bufs: &[*mut u8], dims: &[i64], grid: u32, seed: u64) -> i32 {
    // SAFETY: the shim declares every launcher with this signature.
    let f = unsafe { library.get::<Launch>(format!("{}_launch", k.name).as_bytes()) }.unwrap();
    // SAFETY: buffers are those of the region, as large as its types at these sizes, with guards around.
    unsafe { f(bufs.as_ptr(), dims.as_ptr(), i64::from(grid), seed) }
}

fn shimmed(library: &Library, p: &Planned, sizes: &Sizes, seed: u64, most_blocks: u32) -> Vec<Tensor> {
    let leaves = values(&p.case, sizes);
    run::run(p, &leaves, sizes, &|region, bufs, dims| {
        let k = &p.cuda[region];
        let grid = k.grid(&|s| sizes.get(s).copied()).unwrap().min(most_blocks);
        let line = launch(library, k, bufs, dims, grid, seed);
        assert_eq!(line, 0, "{}: some threads miss the barrier in line {line}", k.name);
    })
}

fn hosted(library: &Library, p: &Planned, sizes: &Sizes) -> Vec<Tensor> {
    let leaves = values(&p.case, sizes);
    run::run(p, &leaves, sizes, &|region, bufs, dims| {
        let [entry] = p.host[region].entries.as_slice() else { panic!("{}: phases", p.case.name) };
        let Grid::Units(units) = &entry.grid else { panic!("{}: units", p.case.name) };
        let units = units.eval(&|s| sizes.get(s).copied()).unwrap() as i64;
        // SAFETY: the emitter declares phases with this signature; buffers are the region's.
        unsafe {
            let phase = library.get::<Phase>(entry.symbol.as_bytes()).unwrap();
            phase(bufs.as_ptr(), dims.as_ptr(), std::ptr::null_mut(), 0, units);
        }
    })
}

/// Largest error allowed to an output, as a part of its largest magnitude.
fn tolerance(p: &Planned, out: &Tensor) -> f64 {
    let ops = p.case.graph.nodes().iter().filter(|n| n.op.leaf_name().is_none());
    let most = ops.map(|n| n.op.tolerance(n.ty().dtype)).fold(0.0, f64::max);
    if out.dtype.is_float() && !p.case.name.starts_with("exact") { most } else { 0.0 }
}

fn compare(p: &Planned, sizes: &Sizes, got: &[Tensor]) {
    let leaves = values(&p.case, sizes);
    let want = eval(&p.case.graph, &leaves, sizes, Precision::default()).unwrap();
    for ((name, want), got) in want.iter().zip(got) {
        let top = want.reals().iter().filter(|x| x.is_finite()).fold(0f64, |m, x| m.max(x.abs()));
        let allowed = tolerance(p, want) * top;
        for (i, (a, b)) in got.reals().iter().zip(want.reals()).enumerate() {
            let same = *a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= allowed;
            assert!(
                same,
                "{} {name} at {sizes:?}: element {i} is {a}, should be {b} ± {allowed}",
                p.case.name
            );
        }
    }
}

fn sizes(t: u64) -> Sizes {
    Sizes::from([("t".to_string(), t)])
}

/// Cases that share a unit of the shim.
fn half(all: &[Planned]) -> usize {
    all.len().div_ceil(2)
}

/// Compiles the kernels of all cases for the shim, as two units.
fn shim_libraries(all: &[Planned]) -> Option<Vec<Library>> {
    let Some(compiler) = program(&CPP) else {
        println!("skipped: no C++ compiler for the shim");
        return None;
    };
    let units: Vec<String> = all
        .chunks(half(all))
        .map(|part| cuda::shim(&part.iter().flat_map(|p| &p.cuda).collect::<Vec<_>>()))
        .collect();
    Some(build(&compiler, &SHIM_FLAGS, "cpp", &units))
}

#[test]
fn the_source_run_on_the_processor_agrees_with_the_interpreter() {
    let all = planned();
    let Some(libraries) = shim_libraries(&all) else { return };
    for (part, library) in all.chunks(half(&all)).zip(&libraries) {
        for p in part {
            for t in &p.case.rows {
                let sizes = sizes(*t);
                let first = shimmed(library, p, &sizes, 1, u32::MAX);
                compare(p, &sizes, &first);
                // Another order of threads, and blocks that take several units each.
                let second = shimmed(library, p, &sizes, 77, 3);
                for (a, b) in first.iter().zip(&second) {
                    assert!(a.to_bytes() == b.to_bytes(), "{}: the order of threads shows", p.case.name);
                }
            }
        }
    }
}

#[test]
fn without_reductions_the_host_kernel_has_the_same_bits() {
    let mut all = planned();
    // Orders of summation differ: the host has sixteen lanes, a block has its threads.
    let sums = |op: &Op| {
        matches!(op, Op::Reduce(_) | Op::Dot(_) | Op::RmsNorm(_) | Op::LayerNorm(_) | Op::Softmax(_))
    };
    all.retain(|p| !p.case.graph.nodes().iter().any(|n| sums(&n.op)));
    let Some(libraries) = shim_libraries(&all) else { return };
    let Some(cc) = program(&["cc", "gcc", "clang"]) else { return println!("skipped: no C compiler") };
    let unit = run::backends().0.unit(&all.iter().flat_map(|p| &p.host).collect::<Vec<_>>());
    // All instructions of this processor, as the shim has: products and sums are fused alike.
    let flags = FLAGS.iter().map(|f| if *f == "-O3" { "-O1" } else { f });
    let flags: Vec<&str> = flags.chain(isa::instructions(host_isa()).iter().copied()).collect();
    let host = build(&cc, &flags, "c", &[unit]);
    for (part, library) in all.chunks(half(&all)).zip(&libraries) {
        for p in part {
            let sizes = sizes(p.case.rows[0].max(7));
            let (a, b) = (shimmed(library, p, &sizes, 5, u32::MAX), hosted(&host[0], p, &sizes));
            compare(p, &sizes, &b);
            for (a, b) in a.iter().zip(&b) {
                assert!(a.to_bytes() == b.to_bytes(), "{}: host and CUDA differ", p.case.name);
            }
        }
    }
}

#[test]
fn the_shim_sees_a_missing_barrier() {
    let Some(compiler) = program(&CPP) else { return println!("skipped: no C++ compiler") };
    let case = cases::cases().into_iter().find(|c| c.name == "softmax_257").unwrap();
    let mut p = plan(case);
    let whole = p.cuda[0].source.clone();
    let mut unit = |barrier: &str| {
        p.cuda[0].source = whole.replace("__syncthreads();", barrier);
        cuda::shim(&[&p.cuda[0]])
    };
    let units = [unit("__syncthreads();"), unit(""), unit("if (threadIdx.x != 40) __syncthreads();")];
    let libraries = build(&compiler, &SHIM_FLAGS, "cpp", &units);
    let x: Vec<f32> = (0..3 * 257).map(|i| (i % 29) as f32).collect();
    let run = |library: &Library| {
        let (mut x, mut y) = (x.clone(), vec![0f32; 3 * 257]);
        let bufs = [x.as_mut_ptr().cast(), y.as_mut_ptr().cast()];
        (launch(library, &p.cuda[0], &bufs, &[3], 3, 1), y.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
    };
    let (good, without, partly) = (run(&libraries[0]), run(&libraries[1]), run(&libraries[2]));
    assert_eq!((good.0, without.0), (0, 0));
    assert_ne!(good.1, without.1, "stale parts of a reduction went unseen");
    assert_ne!(partly.0, 0, "a thread that missed a barrier went unseen");
}

#[test]
fn every_kernel_compiles_within_its_budget_of_registers() {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cache/nvrtc");
    let Some(path) = Nvrtc::find(&[cache]) else {
        return println!("skipped: no NVRTC in .cache/nvrtc; scripts/setup-cache.sh puts it there");
    };
    let nvrtc = Nvrtc::open(&path).unwrap();
    let all = planned();
    let kernels: Vec<&CudaKernel> = all.iter().flat_map(|p| &p.cuda).collect();
    let started = std::time::Instant::now();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut most = (0, String::new());
        while let Some(k) = kernels.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            for arch in ARCHES {
                let cubin =
                    nvrtc.cubin(&k.name, &k.source, arch, cuda::OPTIONS).unwrap_or_else(|e| panic!("{e}"));
                assert!(cubin.image.starts_with(b"\x7fELF"), "{} {arch}", k.name);
                let [u] = cubin.usage.as_slice() else { panic!("{}: {}", k.name, cubin.log) };
                assert_eq!((u.spill_stores, u.spill_loads), (0, 0), "{} {arch} spills", k.name);
                assert!(
                    (1..=REGISTERS).contains(&u.registers),
                    "{} {arch}: {} registers",
                    k.name,
                    u.registers
                );
                most = most.max((u.registers, format!("{} {arch}", k.name)));
            }
        }
        most
    };
    let most = std::thread::scope(|s| {
        let jobs = [s.spawn(work), s.spawn(work)];
        jobs.into_iter().map(|j| j.join().unwrap()).max().unwrap()
    });
    let (n, (major, minor)) = (kernels.len() * ARCHES.len(), nvrtc.version());
    println!(
        "NVRTC {major}.{minor}: {n} programs in {:.1?}, at most {} registers ({})",
        started.elapsed(),
        most.0,
        most.1
    );
}

#[test]
fn a_program_is_self_contained_and_says_how_it_is_launched() {
    for p in planned() {
        for (k, r) in p.cuda.iter().zip(&p.plan.regions) {
            assert!(k.source.starts_with("/* "), "{}", k.name);
            assert!(!k.source.contains("#include"), "{}", k.name);
            assert_eq!(k.source.matches("extern \"C\" __global__").count(), 1, "{}", k.name);
            assert!(k.block.is_multiple_of(32) && k.block <= 256, "{}", k.name);
            let elements = r.piece.write_types()[0].elements().eval(&|_| Some(1000)).unwrap();
            let blocks = u64::from(k.grid(&|_| Some(1000)).unwrap());
            match k.mapping {
                Mapping::Flat => assert_eq!(blocks, elements.div_ceil(256), "{}", k.name),
                Mapping::Rows => assert!(blocks <= elements, "{}", k.name),
                Mapping::Elements => assert_eq!(blocks, elements, "{}", k.name),
            }
            assert!(k.grid(&|_| None).is_err() || k.units.size().is_some(), "{}", k.name);
        }
        let large = p.case.name == "large";
        assert!(
            p.cuda.iter().all(|k| k.source.contains("#define INDEX int64_t") == large),
            "{}",
            p.case.name
        );
    }
    assert!(cases::cases().iter().any(|c| c.graph.nodes().iter().any(|n| matches!(n.op, Op::LayerNorm(_)))));
}
