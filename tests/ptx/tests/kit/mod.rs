//! What the tests of kernels share: CUDA C++ to a launch and its bytes back.
#![allow(dead_code)]

use astrai_ptx::{Count, Fault, Launch, Memory, Module, nvrtc};

/// What kernels are written in: no headers.
const HEAD: &str = "typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32; typedef unsigned long long u64;\n\
#define K extern \"C\" __global__ void\n#define T threadIdx.x\n#define B blockIdx.x\n\
static __device__ __forceinline__ u32 place(const void *p) { return (u32)__cvta_generic_to_shared(p); }\n\
#define CP16(d, s) asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16;\" :: \"r\"(place(d)), \"l\"(s) : \"memory\")\n\
#define COMMIT asm volatile(\"cp.async.commit_group;\" ::: \"memory\")\n\
#define WAIT(n) asm volatile(\"cp.async.wait_group %0;\" :: \"n\"(n) : \"memory\")\n\
#define ALL 0xffffffffu\n";

/// Compiles a kernel; none where there is no NVRTC.
pub fn module(source: &str, options: &[&str]) -> Option<Module> {
    let options =
        [&["--gpu-architecture=compute_80", "--std=c++17", "-lineinfo", "--disable-warnings"], options]
            .concat();
    let text = nvrtc::ptx(&format!("{HEAD}#line 1\n{source}"), &options)?
        .unwrap_or_else(|e| panic!("{source}: {e}"));
    Some(Module::parse(&text).unwrap_or_else(|e| panic!("{text}\n{e}")))
}

/// The buffers as they are afterwards, and counts.
pub type Ran = Result<(Vec<Vec<u8>>, Vec<Count>), Box<Fault>>;

/// A launch of the module's first kernel.
#[derive(Clone)]
pub struct Run {
    pub grid: u32,
    pub block: u32,
    pub dynamic: usize,
    pub seed: u64,
    pub threads: usize,
    pub budget: u64,
    pub counted: bool,
    /// Buffers: bytes that are there, or a number of bytes that nothing wrote.
    pub buffers: Vec<Result<Vec<u8>, usize>>,
    /// Parameters behind the buffers' addresses.
    pub rest: Vec<u8>,
}

impl Run {
    pub fn new(grid: u32, block: u32) -> Run {
        Run {
            grid,
            block,
            dynamic: 0,
            seed: 1,
            threads: 1,
            budget: 1 << 20,
            counted: false,
            buffers: vec![],
            rest: vec![],
        }
    }

    pub fn bytes(mut self, b: Vec<u8>) -> Run {
        self.buffers.push(Ok(b));
        self
    }

    pub fn floats(self, v: &[f32]) -> Run {
        let b = v.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.bytes(b)
    }

    pub fn words(self, v: &[u32]) -> Run {
        let b = v.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.bytes(b)
    }

    pub fn empty(mut self, bytes: usize) -> Run {
        self.buffers.push(Err(bytes));
        self
    }

    pub fn word(mut self, v: u32) -> Run {
        self.rest.extend(v.to_le_bytes());
        self
    }

    /// Runs it; the buffers as they are afterwards.
    pub fn go(&self, m: &Module) -> Ran {
        self.on(m, [self.grid, 1, 1])
    }

    /// Runs it on a grid of several axes.
    pub fn on(&self, m: &Module, grid: [u32; 3]) -> Ran {
        let mut memory = Memory::new(0, 1 << 30);
        let mut params = vec![];
        let mut places = vec![];
        for b in &self.buffers {
            let n = b.as_ref().map_or_else(|n| *n, Vec::len);
            let at = memory.alloc(n as u64).unwrap();
            if let Ok(b) = b {
                memory.write(at, b).unwrap();
            }
            places.push((at, n));
            params.extend(at.to_le_bytes());
        }
        params.extend(&self.rest);
        let variables: Vec<u64> = (m.variables.iter())
            .map(|v| {
                let at = memory.alloc(v.bytes.len() as u64).unwrap();
                memory.write(at, &v.bytes).unwrap();
                at
            })
            .collect();
        let mut l = Launch::new(&m.kernels[0], grid, [self.block, 1, 1], &params);
        (l.dynamic, l.seed, l.threads, l.budget) = (self.dynamic, self.seed, self.threads, self.budget);
        (l.counted, l.variables) = (self.counted, &variables);
        let counts = l.run(&mut memory)?;
        let read = |(at, n): &(u64, usize)| {
            let mut b = vec![0; *n];
            memory.read(*at, &mut b).unwrap();
            b
        };
        Ok((places.iter().map(read).collect(), counts))
    }
}

pub fn as_floats(b: &[u8]) -> Vec<f32> {
    b.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

pub fn as_words(b: &[u8]) -> Vec<u32> {
    b.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
}

/// Says that a test does nothing.
pub fn skipped() {
    println!("skipped: no NVRTC in .cache/nvrtc; scripts/setup-cache.sh puts it there");
}
