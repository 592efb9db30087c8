//! The PTX of every kernel, executed: held against the interpreter at the full grid and at a few blocks, in several orders, with
//! every access checked.

use super::run::{self, Planned, values};
use super::{compare, planned, sizes};
use astrai_codegen::cuda::{self, CudaKernel};
use astrai_ir::{Dim, Sizes, Tensor};
use astrai_ptx::{Count, Counts, Fault, Launch, Memory, Module, nvrtc};

/// The module of a kernel; none where there is no NVRTC.
fn module(k: &CudaKernel) -> Option<Module> {
    let options = [cuda::OPTIONS, &["--gpu-architecture=compute_80", "-lineinfo"]].concat();
    let text = nvrtc::ptx(&k.source, &options)?.unwrap_or_else(|e| panic!("{}: {e}", k.name));
    Some(Module::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", k.name)))
}

/// A case with its modules.
pub struct Emulated {
    pub case: Planned,
    pub modules: Vec<Module>,
}

/// All cases, compiled by two threads; none where there is no NVRTC.
pub fn emulated() -> Option<Vec<Emulated>> {
    let all = planned();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut out = vec![];
        loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(p) = all.get(i) else { return Some(out) };
            out.push((i, p.cuda.iter().map(module).collect::<Option<Vec<_>>>()?));
        }
    };
    let made = std::thread::scope(|s| {
        let jobs = [s.spawn(work), s.spawn(work)];
        jobs.into_iter().map(|j| j.join().unwrap()).collect::<Option<Vec<_>>>()
    });
    let Some(made) = made else {
        println!("skipped: no NVRTC in .cache/nvrtc; scripts/setup-cache.sh puts it there");
        return None;
    };
    let mut made: Vec<_> = made.into_iter().flatten().collect();
    made.sort_by_key(|(i, _)| *i);
    Some(all.into_iter().zip(made).map(|(case, (_, modules))| Emulated { case, modules }).collect())
}

/// How a case is run.
pub struct Way {
    pub seed: u64,
    pub most_blocks: u32,
    pub budget: u64,
}

/// Runs the kernels of a case, each on memory of its own; what each did is given to `see`.
pub fn execute(
    e: &Emulated,
    modules: &[Module],
    sizes: &Sizes,
    way: &Way,
    see: &mut dyn FnMut(usize, &[Count]),
) -> Result<Vec<Tensor>, Box<Fault>> {
    let p = &e.case;
    let leaves = values(&p.case, sizes);
    let fault = std::cell::RefCell::new(None);
    let see = std::cell::RefCell::new(see);
    let size = |d: &Dim| d.eval(&|s| sizes.get(s).copied()).unwrap();
    let out = run::run(p, &leaves, sizes, &|region, bufs, dims| {
        if fault.borrow().is_some() {
            return;
        }
        let piece = &p.plan.regions[region].piece;
        let (reads, writes) = (piece.read_types(), piece.write_types());
        let bytes = |t: &astrai_ir::Type| size(&t.elements()) as usize * t.dtype.bytes();
        let mut memory = Memory::new(0, 1 << 32);
        let mut params: Vec<u8> = vec![];
        let mut places = vec![];
        for (i, (t, host)) in reads.iter().chain(&writes).zip(bufs).enumerate() {
            let n = bytes(t);
            let at = memory.alloc(n as u64).unwrap();
            if i < reads.len() && n > 0 {
                // SAFETY: the buffer has the bytes of its type.
                memory.write(at, unsafe { std::slice::from_raw_parts(*host, n) }).unwrap();
            }
            places.push((at, *host, n));
            params.extend(at.to_le_bytes());
        }
        dims.iter().for_each(|d| params.extend(d.to_le_bytes()));
        let k = &p.cuda[region];
        let grid = k.grid(&|s| sizes.get(s).copied()).unwrap().min(way.most_blocks);
        if grid == 0 {
            return;
        }
        let kernel = &modules[region].kernels[0];
        let variables: Vec<u64> = (modules[region].variables.iter())
            .map(|v| {
                let at = memory.alloc(v.bytes.len() as u64).unwrap();
                memory.write(at, &v.bytes).unwrap();
                at
            })
            .collect();
        let mut l = Launch::new(kernel, [grid, 1, 1], [k.block, 1, 1], &params);
        (l.seed, l.budget, l.variables) = (way.seed, way.budget, &variables);
        match l.run(&mut memory) {
            Ok(counts) => see.borrow_mut()(region, &counts),
            Err(f) => *fault.borrow_mut() = Some(f),
        }
        for (at, host, n) in &places[reads.len()..] {
            // SAFETY: the buffer has the bytes of its type.
            memory.read(*at, unsafe { std::slice::from_raw_parts_mut(*host, *n) }).unwrap();
        }
    });
    fault.into_inner().map_or(Ok(out), Err)
}

/// The full grid, and a few blocks in other orders.
pub const WAYS: [Way; 3] = [
    Way { seed: 1, most_blocks: u32::MAX, budget: 1 << 24 },
    Way { seed: 7, most_blocks: 1, budget: 1 << 24 },
    Way { seed: 77, most_blocks: 3, budget: 1 << 24 },
];

#[test]
fn the_ptx_of_every_kernel_agrees_with_the_interpreter() {
    let Some(all) = emulated() else { return };
    let (mut kernels, mut lanes, mut never, mut instructions) = (0, 0, 0, 0);
    for e in &all {
        let mut counts = vec![Counts::default(); e.modules.len()];
        for t in &e.case.case.rows {
            let sizes = sizes(*t);
            let mut first: Option<Vec<Tensor>> = None;
            for way in &WAYS {
                let got = execute(e, &e.modules, &sizes, way, &mut |k, c| counts[k].add(c));
                let got = got.unwrap_or_else(|f| panic!("{} at {t}: {f}", e.case.case.name));
                let first = first.get_or_insert_with(|| got.clone());
                for (a, b) in first.iter().zip(&got) {
                    assert!(a.to_bytes() == b.to_bytes(), "{}: the order of blocks shows", e.case.case.name);
                }
                compare(&e.case, &sizes, &got);
            }
        }
        kernels += counts.len();
        for (c, m) in counts.iter().zip(&e.modules) {
            lanes += c.lanes();
            never += c.never(&m.kernels[0]).len();
            instructions += m.kernels[0].instructions() - 1;
        }
    }
    println!(
        "{kernels} kernels: {instructions} instructions, {never} never executed; {lanes} lane instructions"
    );
}
