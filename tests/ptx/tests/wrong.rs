//! Kernels that are wrong on purpose, each beside the same kernel put right: the first must be caught, the second must run.

mod kit;

use astrai_ptx::{Kind, Module};
use kit::{Run, module, skipped};

/// A kernel whose text under `#ifdef BAD` is the mistake.
struct Pair {
    name: &'static str,
    kind: Kind,
    /// What the message must say, too.
    says: &'static str,
    source: &'static str,
    run: Run,
}

fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

/// 64 threads, 64 floats in, 64 out.
fn usual() -> Run {
    Run::new(1, 64).floats(&ramp(64)).empty(256)
}

fn pair(name: &'static str, kind: Kind, says: &'static str, source: &'static str, run: Run) -> Pair {
    Pair { name, kind, says, source, run }
}

fn races() -> Vec<Pair> {
    use Kind::*;
    let four = || Run::new(4, 64).floats(&ramp(256)).floats(&ramp(256)).words(&[0; 4]);
    vec![
        pair("read after write in shared memory", SharedRace, "no barrier", "K k(float*x,float*y){__shared__ float s[64];
            s[T]=0; __syncthreads(); s[T]=x[T];
            #ifndef BAD
            __syncthreads();
            #endif
            y[T]=s[T^32];}", usual()),
        pair("write after read in shared memory", SharedRace, "no barrier", "K k(float*x,float*y){__shared__ float s[64];
            s[T]=x[T]; __syncthreads(); float v=s[T^32];
            #ifndef BAD
            __syncthreads();
            #endif
            s[T]=2*v; y[T]=v+s[T];}", usual()),
        pair("bytes of one word", SharedRace, "no barrier", "K k(float*x,float*y){__shared__ u8 s[64];
            s[T]=0; __syncthreads(); s[T]=(u8)x[T];
            #ifndef BAD
            __syncthreads();
            #endif
            y[T]=s[63-T];}", usual()),
        pair("lanes without __syncwarp", WarpRace, "__syncwarp", "K k(float*x,float*y){__shared__ float s[64];
            s[T]=x[T];
            #ifndef BAD
            __syncwarp();
            #endif
            y[T]=s[T^1];}", usual()),
        pair("half a __syncwarp", WarpRace, "__syncwarp", "K k(float*x,float*y){__shared__ float s[64]; s[T]=x[T];
            #ifdef BAD
            if (T%32<16) __syncwarp(0xffff);
            #else
            __syncwarp();
            #endif
            y[T]=s[T^16];}", usual()),
        pair("two values to one place", WarpRace, "another value", "K k(float*x,float*y){__shared__ float s;
            #ifdef BAD
            s=x[T%32];
            #else
            if (T==0) s=x[T];
            #endif
            __syncthreads(); y[T]=s;}", Run::new(1, 32).floats(&ramp(64)).empty(256)),
        pair("blocks write one place", GlobalRace, "block", "K k(u32*x,u32*y,u32*z){ if (T==0)
            #ifdef BAD
            z[0]=z[0]+1;
            #else
            atomicAdd(z,1);
            #endif
            }", four()),
        pair("a block reads what another writes", GlobalRace, "block", "K k(float*x,float*y,u32*z){ u32 i=B*64+T; x[i]=2;
            #ifdef BAD
            y[i]=x[(i+64)%256];
            #else
            y[i]=x[i];
            #endif
            }", four()),
        pair("warps of a block in global memory", GlobalRace, "barrier", "K k(float*x,float*y,u32*z){ u32 i=B*64+T; x[i]=2;
            #ifndef BAD
            __syncthreads();
            #endif
            y[i]=x[i^32];}", four()),
        pair("the last block without a fence", GlobalRace, "block", "K k(float*x,float*y,u32*z){ __shared__ u32 last;
            if (T==0) { y[B]=x[B*64];
            #ifndef BAD
            __threadfence();
            #endif
            last=atomicAdd(z,1)==gridDim.x-1; }
            __syncthreads();
            if (last && T==0) { __threadfence(); float s=0; for (int b=0;b<gridDim.x;b++) s+=((volatile float*)y)[b]; y[64]=s; }}",
            four()),
        pair("an atomic beside a plain read", SharedRace, "no barrier", "K k(float*x,float*y){__shared__ u32 s;
            if (T==0) s=0; __syncthreads(); if (T==0) atomicAdd(&s,1);
            #ifndef BAD
            __syncthreads();
            #endif
            if (T==32) y[T]=s; }", usual()),
    ]
}

fn places() -> Vec<Pair> {
    use Kind::*;
    vec![
        pair(
            "beyond the end",
            OutOfBounds,
            "past the start",
            "K k(float*x,float*y){
            #ifdef BAD
            y[T]=x[T+1];
            #else
            y[T]=x[T];
            #endif
            }",
            usual(),
        ),
        pair(
            "beyond shared memory",
            OutOfBounds,
            "of 256 bytes of shared",
            "K k(float*x,float*y){__shared__ float s[64];
            s[T]=x[T];
            #ifdef BAD
            if (T==63) s[T+(int)x[1]]=x[T];
            #endif
            y[T]=s[T+(int)x[0]];}",
            usual(),
        ),
        pair(
            "beyond dynamic shared memory",
            OutOfBounds,
            "of shared memory",
            "K k(float*x,float*y){extern __shared__ float s[];
            #ifdef BAD
            if (T==63) s[T+1]=x[T];
            #endif
            s[T]=x[T]; y[T]=s[T];}",
            Run { dynamic: 256, ..usual() },
        ),
        pair(
            "beyond a thread's array",
            OutOfBounds,
            "of local memory",
            "K k(float*x,float*y){float a[8];
            for (int i=0;i<8;i++) a[i]=x[i];
            #ifdef BAD
            y[T]=a[8+(int)x[T]];
            #else
            y[T]=a[(int)x[T]&7];
            #endif
            }",
            usual(),
        ),
        pair(
            "four floats at an odd place",
            Misaligned,
            "16 bytes",
            "K k(float*x,float*y){
            #ifdef BAD
            float4 v=*(float4*)(x+1);
            #else
            float4 v=*(float4*)(x+4);
            #endif
            y[T]=v.x+v.w;}",
            usual(),
        ),
        pair(
            "global memory that nothing wrote",
            NeverWritten,
            "",
            "K k(float*x,float*y){
            #ifdef BAD
            y[T]+=x[T];
            #else
            y[T]=x[T];
            #endif
            }",
            usual(),
        ),
        pair(
            "shared memory that nothing wrote",
            NeverWritten,
            "",
            "K k(float*x,float*y){__shared__ float s[65];
            s[T]=x[T]; __syncthreads();
            #ifdef BAD
            y[T]=s[T+1];
            #else
            y[T]=s[T];
            #endif
            }",
            usual(),
        ),
        pair(
            "an array that nothing wrote",
            NeverWritten,
            "own memory",
            "K k(float*x,float*y){float a[8];
            #ifdef BAD
            int n=4;
            #else
            int n=8;
            #endif
            for (int i=0;i<n;i++) a[(i+(int)x[0])&7]=x[i];
            y[T]=a[(int)x[T]&7];}",
            usual(),
        ),
    ]
}

fn barriers() -> Vec<Pair> {
    use Kind::*;
    vec![
        pair(
            "half a warp at the barrier",
            Divergence,
            "lanes",
            "K k(float*x,float*y){
            #ifdef BAD
            if (T<16) __syncthreads(); else y[T]=1;
            #else
            __syncthreads();
            #endif
            y[T]=x[T];}",
            usual(),
        ),
        pair(
            "two barriers",
            Deadlock,
            "barrier 1",
            "K k(float*x,float*y){
            #ifdef BAD
            if (T<32) asm volatile(\"bar.sync 1, 64;\"); else asm volatile(\"bar.sync 2, 64;\");
            #else
            asm volatile(\"bar.sync 1, 64;\");
            #endif
            y[T]=x[T];}",
            usual(),
        ),
        pair(
            "a shuffle without all lanes",
            Divergence,
            "of its mask",
            "K k(float*x,float*y){ float v=x[T];
            #ifdef BAD
            if (T%32<16) v+=__shfl_xor_sync(ALL,v,1);
            #else
            v+=__shfl_xor_sync(ALL,v,1);
            #endif
            y[T]=v;}",
            usual(),
        ),
        pair(
            "a lane outside its mask",
            Divergence,
            "own mask",
            "K k(float*x,float*y){ float v=x[T];
            #ifdef BAD
            v+=__shfl_xor_sync(0xffff,v,1);
            #else
            v+=__shfl_xor_sync(ALL,v,1);
            #endif
            y[T]=v;}",
            usual(),
        ),
        pair(
            "a copy that is not waited for",
            InFlight,
            "not waited",
            "K k(float*x,float*y){__shared__ __align__(16) float s[64];
            if (T<16) CP16(s+4*T,x+4*T); COMMIT;
            #ifdef BAD
            WAIT(1);
            #else
            WAIT(0);
            #endif
            __syncthreads(); y[T]=s[T];}",
            usual(),
        ),
        pair(
            "a copy without a barrier",
            SharedRace,
            "no barrier",
            "K k(float*x,float*y){__shared__ __align__(16) float s[64];
            s[T]=0; __syncthreads(); if (T<16) CP16(s+4*T,x+4*T); COMMIT; WAIT(0);
            #ifndef BAD
            __syncthreads();
            #endif
            if (T>31) y[T]=s[T]; }",
            Run { seed: 3, ..usual() },
        ),
        pair(
            "a copy over what is read",
            SharedRace,
            "no barrier",
            "K k(float*x,float*y){__shared__ __align__(16) float s[64];
            s[T]=x[T]; __syncthreads(); y[T]=s[T^32];
            #ifndef BAD
            __syncthreads();
            #endif
            if (T<8) CP16(s+4*T,x+4*T); COMMIT; WAIT(0); __syncthreads(); y[T]+=s[T];}",
            usual(),
        ),
        pair(
            "a loop without an end",
            Timeout,
            "does not end",
            "K k(float*x,float*y){
            #ifdef BAD
            while (((volatile float*)x)[0]==0) {}
            #endif
            y[T]=x[T];}",
            usual(),
        ),
        pair(
            "a trap",
            Trap,
            "",
            "K k(float*x,float*y){
            #ifdef BAD
            if (x[T]==40) __trap();
            #endif
            y[T]=x[T];}",
            usual(),
        ),
    ]
}

fn check(pairs: Vec<Pair>) {
    for p in pairs {
        let (Some(bad), Some(good)) = (module(p.source, &["-DBAD"]), module(p.source, &[])) else {
            return skipped();
        };
        for seed in [p.run.seed, 5, 11] {
            let run = Run { seed, ..p.run.clone() };
            let right = |m: &Module| run.go(m).map_err(|f| format!("{}: {f}", p.name));
            right(&good).unwrap_or_else(|e| panic!("a right kernel fails: {e}"));
            let f = run.go(&bad).map(|_| ()).expect_err(p.name);
            let said = f.to_string();
            assert!(f.kind == p.kind && said.contains(p.says), "{}: {said}", p.name);
            assert!(said.contains("kernel.cu:"), "{}: no line of the source: {said}", p.name);
        }
    }
}

#[test]
fn races_are_caught() {
    check(races());
}

#[test]
fn strange_addresses_are_caught() {
    check(places());
}

#[test]
fn missing_barriers_are_caught() {
    check(barriers());
}

/// What is caught needs no NVRTC: a text that was recorded, and the same with one instruction changed.
#[test]
fn recorded_texts_are_caught_too() {
    let text = include_str!("add.ptx");
    let run = |text: &str, n: u32| {
        let m = Module::parse(text).unwrap();
        Run::new(2, 64).floats(&ramp(100)).empty(400).word(1f32.to_bits()).word(n).go(&m)
    };
    assert_eq!(kit::as_floats(&run(text, 100).unwrap().0[1])[99], 100.0);
    assert_eq!(run(text, 101).unwrap_err().kind, Kind::OutOfBounds);
    let all = text.replace("[%rd7], %r8", "[%rd6], %r8");
    assert_eq!(run(&all, 100).unwrap_err().kind, Kind::WarpRace);
    let early = text.replace("[%rd5];", "[%rd5+2];");
    assert_eq!(run(&early, 100).unwrap_err().kind, Kind::Misaligned);
    let own = text.replace("ld.global.b32 	%r7, [%rd5]", "ld.global.b32 	%r7, [%rd2]");
    assert_eq!(run(&own, 100).unwrap_err().kind, Kind::NeverWritten);
    assert!(Module::parse(&text.replace("add.f32", "frob.f32")).unwrap_err().contains("frob"));
}
