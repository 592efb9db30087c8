//! Runs plans whose kernels are functions of a shared object: the shim's, or the host's own.

use crate::cuda::cases::Case;
use astrai_codegen::cpu::{Cpu, Isa};
use astrai_codegen::cuda::{self, Cuda, CudaKernel};
use astrai_ir::plan::{Place, Step};
use astrai_ir::{Backend, DType, Dim, Kernel, Op, Plan, Sizes, Tensor, Type};
use astrai_passes as passes;
use libloading::Library;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A case with its plan and the kernels of its regions.
pub struct Planned {
    pub case: Case,
    pub plan: Plan,
    pub cuda: Vec<CudaKernel>,
    pub host: Vec<Kernel>,
}

/// A processor, and a device of CUDA with the same costs.
pub fn backends() -> (Cpu, Cuda) {
    let processor = Cpu::new(Isa::Plain, 1, 1 << 34);
    let device = Cuda::new(processor.target().clone());
    (processor, device)
}

/// Plans a case; every region must be of the archetype `loops`.
pub fn plan(case: Case) -> Planned {
    let g = passes::canonicalise(&case.graph).unwrap();
    let (processor, device) = backends();
    let g = passes::decompose(&g, |op| device.native(op)).unwrap();
    let draft = passes::alias_states(passes::form_regions(&g, &device).unwrap(), &device);
    let plan = passes::schedule(&passes::assign_layouts(draft, &device, false), &device).unwrap();
    let (mut cuda, mut host_kernels) = (Vec::new(), Vec::new());
    for (i, r) in plan.regions.iter().enumerate() {
        assert_eq!(r.form().name(), "loops", "{}", case.name);
        let name = format!("{}_{i}", case.name);
        cuda.push(cuda::emit(r, &name).unwrap_or_else(|e| panic!("{name}: {e}")));
        host_kernels.push(processor.emit(r).unwrap_or_else(|e| panic!("{name}: {e}")).unwrap());
    }
    Planned { case, plan, cuda, host: host_kernels }
}

/// The first of these programs in `PATH`.
pub fn program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    names.iter().find_map(|n| std::env::split_paths(&path).map(|f| f.join(n)).find(|p| p.is_file()))
}

/// Compiles units side by side and loads them.
pub fn build(compiler: &Path, flags: &[&str], ext: &str, units: &[String]) -> Vec<Library> {
    let folder = tempfile::tempdir().unwrap();
    let one = |(i, text): (usize, &String)| {
        let (from, to) = (folder.path().join(format!("u{i}.{ext}")), folder.path().join(format!("u{i}.so")));
        std::fs::write(&from, text).unwrap();
        let run = Command::new(compiler).args(flags).arg("-o").arg(&to).arg(&from).output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{}", said.lines().take(12).collect::<Vec<_>>().join("\n"));
        // SAFETY: the object was made from our own source just now and has no initialisers of its own.
        unsafe { Library::new(&to) }.unwrap()
    };
    std::thread::scope(|s| {
        let jobs: Vec<_> = units.iter().enumerate().map(|u| s.spawn(move || one(u))).collect();
        jobs.into_iter().map(|j| j.join().unwrap()).collect()
    })
}

/// Bytes around a buffer that a kernel must leave alone.
const GUARD: usize = 64;

/// A buffer between guards, all of it NaN or minus one at first.
pub struct Buffer {
    words: Vec<u64>,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Buffer {
        Buffer { words: vec![u64::MAX; len.div_ceil(8) + 2 * GUARD / 8], len }
    }

    fn of(bytes: &[u8]) -> Buffer {
        let mut b = Buffer::new(bytes.len());
        b.bytes_mut()[GUARD..GUARD + bytes.len()].copy_from_slice(bytes);
        b
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let n = self.words.len() * 8;
        // SAFETY: the words are `n` initialised bytes, borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), n) }
    }

    fn address(&mut self) -> *mut u8 {
        self.bytes_mut()[GUARD..].as_mut_ptr()
    }

    fn content(&mut self) -> Vec<u8> {
        let len = self.len;
        let b = self.bytes_mut();
        let whole = b[..GUARD].iter().chain(&b[GUARD + len..]).all(|x| *x == 0xff);
        assert!(whole, "a kernel wrote outside its buffer");
        b[GUARD..GUARD + len].to_vec()
    }
}

fn concrete(ty: &Type, sizes: &Sizes) -> Vec<usize> {
    let size = |d: &Dim| d.eval(&|s| sizes.get(s).copied()).unwrap() as usize;
    ty.shape.iter().map(size).collect()
}

/// Runs a region, by its index, on its buffers and on the values of the symbols.
type RunRegion<'a> = &'a dyn Fn(usize, &[*mut u8], &[i64]);

/// Runs the plan's steps in order; `launch` runs a region on its buffers.
pub fn run(p: &Planned, leaves: &HashMap<String, Tensor>, sizes: &Sizes, launch: RunRegion) -> Vec<Tensor> {
    let dims: Vec<i64> = p.plan.symbols.iter().map(|s| sizes[&*s.name] as i64).collect();
    let body = &p.plan.main;
    let mut buffers: Vec<Buffer> = (body.buffers.iter())
        .map(|b| match &b.place {
            Place::Param(i) => Buffer::of(&leaves[&body.params[*i].0].to_bytes()),
            Place::Const(bits) => Buffer::of(bits),
            _ => Buffer::new(concrete(&b.ty, sizes).iter().product::<usize>() * b.ty.dtype.bytes()),
        })
        .collect();
    for step in &body.steps {
        let Step::Run { region, reads, writes, .. } = step else { panic!("{}: a call", p.case.name) };
        let at: Vec<*mut u8> = reads.iter().chain(writes).map(|&b| buffers[b.0].address()).collect();
        launch(region.0, &at, &dims);
    }
    let mut outs = vec![None; body.results.len()];
    for (b, made) in body.buffers.iter().zip(&mut buffers) {
        let bytes = made.content();
        if let Place::Result(i) = b.place {
            outs[i] = Some(Tensor::from_bytes(b.ty.dtype, &concrete(&b.ty, sizes), &bytes).unwrap());
        }
    }
    outs.into_iter().map(Option::unwrap).collect()
}

/// Values for the leaves of a graph: floats in ±2, integers in ±100; names say what else they must be.
pub fn values(case: &Case, sizes: &Sizes) -> HashMap<String, Tensor> {
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut leaves = HashMap::new();
    for n in case.graph.nodes() {
        let Op::Input(i) = &n.op else { continue };
        let shape = concrete(&i.ty, sizes);
        let count: usize = shape.iter().product();
        let below = i.name.strip_prefix("below").and_then(|b| b.parse::<f64>().ok());
        let value = match (i.ty.dtype, below) {
            (d, _) if i.name == "special" => {
                Tensor::float(d, &shape, (0..count).map(|i| special(i, random())).collect())
            }
            (d, _) if d.is_float() && i.name == "near1" => {
                Tensor::float(d, &shape, (0..count).map(|_| 0.8 + 0.4 * random()).collect())
            }
            (d, _) if d.is_float() => {
                Tensor::float(d, &shape, (0..count).map(|_| 4.0 * random() - 2.0).collect())
            }
            (DType::Bool, _) => {
                Tensor::int(DType::Bool, &shape, (0..count).map(|_| (random() < 0.5) as i64).collect())
            }
            (d, Some(b)) => Tensor::int(d, &shape, (0..count).map(|_| (random() * b) as i64).collect()),
            (d, None) => {
                Tensor::int(d, &shape, (0..count).map(|_| (256.0 * random()) as i64 - 128).collect())
            }
        };
        leaves.insert(i.name.clone(), value);
    }
    leaves
}

/// Zeros, infinities, NaN, denormals, the largest numbers of narrow types and what lies between two of their numbers.
fn special(i: usize, random: f64) -> f64 {
    const EDGES: [f64; 14] = [
        0.0,
        f64::INFINITY,
        f64::NAN,
        1e-40,
        6e-8,
        3e-8,
        6.2e-5,
        65504.0,
        65520.0,
        57344.0,
        61440.0,
        448.0,
        464.0,
        480.0,
    ];
    let x = match i / 2 {
        j if j < EDGES.len() => EDGES[j],
        // Multiples of 1/512 of a power of two: ties of every narrow type among them.
        _ => (1.0 + (random * 512.0).floor() / 512.0) * 2f64.powi((i % 61) as i32 - 40),
    };
    if i.is_multiple_of(2) { x } else { -x }
}
