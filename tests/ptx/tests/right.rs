//! Kernels that are right: what NVRTC makes of them computes what the source says.

mod kit;

use half::{bf16, f16};
use kit::{Run, as_floats, as_words, module, skipped};

fn random(n: usize, seed: u32) -> Vec<u32> {
    let mut s = seed;
    let mut next = || {
        s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        s ^ s >> 15
    };
    (0..n).map(|_| next()).collect()
}

fn floats(n: usize, seed: u32) -> Vec<f32> {
    random(n, seed).iter().map(|v| (v >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Words in, words out: a thread an element.
fn words(source: &str, input: &[u32]) -> Option<Vec<u32>> {
    let m = module(
        &format!("K k(const u32*x,u32*y,u32 n){{ u32 i=B*64+T; if (i<n) {{ u32 v=x[i]; {source} }} }}"),
        &[],
    )?;
    let n = input.len();
    let run = Run::new(n.div_ceil(64) as u32, 64).words(input).empty(4 * n).word(n as u32);
    Some(as_words(&run.go(&m).unwrap_or_else(|e| panic!("{source}: {e}")).0[1]))
}

type Row = (&'static str, fn(u32) -> u32);

#[test]
fn integers_and_bits() {
    let rows: [Row; 18] = [
        ("y[i]=v/7+v%7;", |v| v / 7 + v % 7),
        ("y[i]=(int)v/-13*3+(int)v%11;", |v| ((v as i32) / -13 * 3 + (v as i32) % 11) as u32),
        ("u64 w=(u64)v*v*v; y[i]=(u32)(w/1000003)^(u32)(w>>32);", |v| {
            let w = u64::from(v).wrapping_mul(u64::from(v)).wrapping_mul(u64::from(v));
            (w / 1_000_003) as u32 ^ (w >> 32) as u32
        }),
        ("y[i]=__popc(v)+__clz(v)*100+__brev(v);", |v| {
            v.count_ones().wrapping_add(v.leading_zeros() * 100).wrapping_add(v.reverse_bits())
        }),
        ("y[i]=__byte_perm(v,~v,0x7210)^__funnelshift_l(v,v*3,v);", |v| {
            let (a, b) = (v.to_le_bytes(), (!v).to_le_bytes());
            let p = u32::from_le_bytes([a[0], a[1], a[2], b[3]]);
            let both = u64::from(v.wrapping_mul(3)) << 32 | u64::from(v);
            p ^ ((both << (v & 31)) >> 32) as u32
        }),
        ("y[i]=min((int)v,5)+max(v,77u)-abs((int)v);", |v| {
            ((v as i32).min(5) as u32).wrapping_add(v.max(77)).wrapping_sub((v as i32).unsigned_abs())
        }),
        ("y[i]=__mulhi((int)v,(int)0x9e3779b9)+__umulhi(v,v);", |v| {
            let a = ((i64::from(v as i32) * i64::from(0x9e37_79b9u32 as i32)) >> 32) as u32;
            a.wrapping_add(((u64::from(v) * u64::from(v)) >> 32) as u32)
        }),
        ("y[i]=(u32)((short)v>>3)+(u16)(v*5)/(u16)9;", |v| {
            ((v as i16 >> 3) as u32).wrapping_add(u32::from((v.wrapping_mul(5) as u16) / 9))
        }),
        ("signed char c=v; y[i]=c*c-c;", |v| {
            let c = i32::from(v as i8);
            (c * c - c) as u32
        }),
        (
            "switch(v%7){case 0:y[i]=3;break;case 1:y[i]=v*5;break;case 2:y[i]=v^9;break;case 3:y[i]=1;break;case 4:y[i]=v+8;break;case 5:y[i]=77;break;default:y[i]=~v;}",
            |v| match v % 7 {
                0 => 3,
                1 => v.wrapping_mul(5),
                2 => v ^ 9,
                3 => 1,
                4 => v.wrapping_add(8),
                5 => 77,
                _ => !v,
            },
        ),
        (
            "u32 s=0; for (u32 j=0;j<v%50;j++) { if (j%3==v%3) continue; s+=j*v; if (s>1000000) break; } y[i]=s;",
            |v| {
                let mut s = 0u32;
                for j in 0..v % 50 {
                    if j % 3 == v % 3 {
                        continue;
                    }
                    s = s.wrapping_add(j.wrapping_mul(v));
                    if s > 1_000_000 {
                        break;
                    }
                }
                s
            },
        ),
        (
            "u32 a[9]; for (int j=0;j<9;j++) a[(j*v+j)%9]=0; for (int j=0;j<9;j++) a[j]=j*v; y[i]=a[v%9];",
            |v| (v % 9).wrapping_mul(v),
        ),
        ("float f=__uint_as_float(v&0x7effffff); y[i]=(u32)(int)f+(u32)f;", |v| {
            let f = f32::from_bits(v & 0x7eff_ffff);
            (f as i32 as u32).wrapping_add(f as u32)
        }),
        ("y[i]=__float_as_uint((float)v)^__float_as_uint((float)(int)v);", |v| {
            (v as f32).to_bits() ^ (v as i32 as f32).to_bits()
        }),
        ("double d=(double)v/3.0; y[i]=(u32)(d*1.5)+(u32)__double2ll_rn(sqrt(d));", |v| {
            let d = f64::from(v) / 3.0;
            ((d * 1.5) as u32).wrapping_add(d.sqrt().round_ties_even() as i64 as u32)
        }),
        (
            "float f=(float)(v>>8); y[i]=__float_as_uint(__fdiv_rn(f,3.f))+__float_as_uint(__fsqrt_rn(f))+__float_as_uint(__fmaf_rn(f,f,-1.f));",
            |v| {
                let f = (v >> 8) as f32;
                (f / 3.0)
                    .to_bits()
                    .wrapping_add(f.sqrt().to_bits())
                    .wrapping_add(f.mul_add(f, -1.0).to_bits())
            },
        ),
        (
            "float f=(float)(int)v*1e-3f; y[i]=__float_as_uint(floorf(f)+ceilf(f)*2+rintf(f)*4+truncf(f)*8);",
            |v| {
                let f = (v as i32 as f32) * 1e-3;
                (f.floor() + f.ceil() * 2.0 + f.round_ties_even() * 4.0 + f.trunc() * 8.0).to_bits()
            },
        ),
        ("y[i]=__dp4a((int)v,(int)(v*77),(int)v);", |v| {
            let (a, b) = (v.to_le_bytes(), v.wrapping_mul(77).to_le_bytes());
            (0..4).fold(v as i32, |s, n| s.wrapping_add(i32::from(a[n] as i8) * i32::from(b[n] as i8))) as u32
        }),
    ];
    let mut input = random(150, 5);
    input.extend([0, 1, 2, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff]);
    for (source, want) in rows {
        // Products and sums are fused only where the source says so.
        let Some(got) = words(source, &input) else { return skipped() };
        for (x, y) in input.iter().zip(&got) {
            assert_eq!(*y, want(*x), "{source} of {x:#x}");
        }
    }
}

/// An expression, what it should be, and errors allowed: relative, absolute.
type Function = (&'static str, fn(f64) -> f64, f64, f64);

#[test]
fn functions_of_floats() {
    let rows: [Function; 12] = [
        ("expf(v*20)", |x| (x * 20.0).exp(), 3e-6, 0.0),
        ("__expf(v*3)", |x| (x * 3.0).exp(), 1e-6, 0.0),
        ("logf(v*v+1e-3f)", |x| (x * x + 1e-3).ln(), 2e-6, 1e-6),
        ("tanhf(v*4)", |x| (x * 4.0).tanh(), 1e-6, 1e-7),
        ("rsqrtf(v*v+.5f)", |x| 1.0 / (x * x + 0.5).sqrt(), 3e-7, 0.0),
        ("sinf(v*9)+cosf(v*5)", |x| (x * 9.0).sin() + (x * 5.0).cos(), 1e-6, 2e-6),
        ("erff(v*2)", |x| erf(x * 2.0), 2e-6, 1e-6),
        ("powf(fabsf(v)+.1f,2.5f)", |x| (x.abs() + 0.1).powf(2.5), 2e-6, 0.0),
        ("(float)exp((double)v*9)", |x| (x * 9.0).exp(), 1e-7, 0.0),
        ("(float)(cbrt((double)v)+log(2.0+v))", |x| x.cbrt() + (2.0 + x).ln(), 1e-6, 1e-6),
        ("__fdividef(v,3.f)+1.f/(v+2.f)", |x| x / 3.0 + 1.0 / (x + 2.0), 1e-6, 1e-6),
        ("sinf(v*1e6f)", |x| f64::from((x as f32) * 1e6f32).sin(), 1e-5, 1e-6),
    ];
    let x = floats(200, 9);
    for (e, f, relative, absolute) in rows {
        let source = format!("K k(const float*x,float*y){{ u32 i=B*40+T; float v=x[i]; y[i]={e}; }}");
        let Some(m) = module(&source, &[]) else { return skipped() };
        let run = Run::new(5, 40).floats(&x).empty(800);
        let got = as_floats(&run.go(&m).unwrap_or_else(|f| panic!("{e}: {f}")).0[1]);
        for (x, y) in x.iter().zip(got) {
            let want = f(f64::from(*x));
            let error = (f64::from(y) - want).abs();
            assert!(error <= want.abs() * relative + absolute, "{e} of {x}: {y}, not {want}");
        }
    }
}

/// By its series, for arguments of small size.
fn erf(x: f64) -> f64 {
    let term = |(t, s): (f64, f64), n: i32| {
        let t = -t * x * x / f64::from(n);
        (t, s + t / f64::from(2 * n + 1))
    };
    2.0 / std::f64::consts::PI.sqrt() * (1..80).fold((x, x), term).1
}

#[test]
fn lanes_speak_to_each_other() {
    let source = "K k(const u32*x,u32*y){ u32 v=x[T]; u32 s=v; for (int d=16;d;d/=2) s+=__shfl_xor_sync(ALL,s,d);
        u32 up=__shfl_up_sync(ALL,v,3), down=__shfl_down_sync(ALL,v,5,16), from=__shfl_sync(ALL,v,v&31);
        u32 b=__ballot_sync(ALL,v&1), any=__any_sync(ALL,v==x[7]), all=__all_sync(ALL,v==v), m=__match_any_sync(ALL,v&3);
        u32 r=__reduce_add_sync(ALL,v), low=__reduce_min_sync(ALL,v);
        u32 c=__syncthreads_count(v&2), o=__syncthreads_or(v==x[3]);
        u32 half=0; if (T&1) half=__activemask();
        u32*o8=y+16*T; o8[0]=s;o8[1]=up;o8[2]=down;o8[3]=from;o8[4]=b;o8[5]=any;o8[6]=all;o8[7]=m;o8[8]=r;o8[9]=low;o8[10]=c;o8[11]=o;o8[12]=half;
        atomicAdd(y+2048,v); atomicMax(y+2049,v); atomicCAS(y+2050,0,1); atomicInc(y+2051,9); atomicExch(y+2052,5); atomicAdd((float*)(y+2053),.5f); y[2054+T]=atomicAdd(y+2118,2); }";
    let Some(m) = module(source, &[]) else { return skipped() };
    let x = random(64, 3);
    let y: Vec<u32> = vec![0; 2119];
    let got = as_words(&Run::new(1, 64).words(&x).words(&y).go(&m).unwrap_or_else(|e| panic!("{e}")).0[1]);
    for t in 0..64usize {
        let (w, l) = (t / 32 * 32, t % 32);
        let warp = &x[w..w + 32];
        let sum = warp.iter().fold(0u32, |a, b| a.wrapping_add(*b));
        let bits = |f: &dyn Fn(u32) -> bool| {
            warp.iter().enumerate().fold(0u32, |o, (n, v)| o | u32::from(f(*v)) << n)
        };
        let want = [
            sum,
            if l < 3 { warp[l] } else { warp[l - 3] },
            if l % 16 + 5 < 16 { warp[l + 5] } else { warp[l] },
            warp[(warp[l] & 31) as usize],
            bits(&|v| v & 1 == 1),
            u32::from(warp.contains(&x[7])),
            1,
            bits(&|v| v & 3 == warp[l] & 3),
            sum,
            *warp.iter().min().unwrap(),
            x.iter().filter(|v| **v & 2 != 0).count() as u32,
            1,
            if l % 2 == 1 { 0xaaaa_aaaa } else { 0 },
        ];
        assert_eq!(&got[16 * t..16 * t + 13], &want, "thread {t}");
    }
    let sum = x.iter().fold(0u32, |a, b| a.wrapping_add(*b));
    assert_eq!(&got[2048..2054], &[sum, *x.iter().max().unwrap(), 1, 64 % 10, 5, 32f32.to_bits()]);
    let mut old = got[2054..].to_vec();
    old.sort_unstable();
    assert_eq!(old, (0..65).map(|n| 2 * n).collect::<Vec<_>>());
}

#[test]
fn halves_and_pairs() {
    let source = "K k(const u32*x,u32*y){ u32 a=x[T], b=x[T+32], c=x[T+64], r, q, h; u16 n;
        asm(\"fma.rn.f16x2 %0,%1,%2,%3;\":\"=r\"(r):\"r\"(a),\"r\"(b),\"r\"(c)); asm(\"fma.rn.bf16x2 %0,%1,%2,%3;\":\"=r\"(q):\"r\"(a),\"r\"(b),\"r\"(c));
        asm(\"max.bf16x2 %0,%1,%2;\":\"=r\"(h):\"r\"(a),\"r\"(b)); asm(\"{.reg .b16 l,u; mov.b32 {l,u},%1; add.f16 l,l,u; mov.b16 %0,l;}\":\"=h\"(n):\"r\"(a));
        y[4*T]=r; y[4*T+1]=q; y[4*T+2]=h; y[4*T+3]=n; }";
    let Some(m) = module(source, &[]) else { return skipped() };
    // Halves of moderate size in both formats.
    let x: Vec<u32> = random(96, 8).iter().map(|v| v & 0x83ff_83ff | 0x3c00_3c00).collect();
    let got = as_words(&Run::new(1, 32).words(&x).empty(512).go(&m).unwrap_or_else(|e| panic!("{e}")).0[1]);
    for t in 0..32 {
        let (a, b, c) = (x[t], x[t + 32], x[t + 64]);
        for s in [0, 16] {
            let f = |v: u32| f16::from_bits((v >> s) as u16).to_f64();
            let g = |v: u32| bf16::from_bits((v >> s) as u16).to_f64();
            let at = |n: usize| (got[4 * t + n] >> s) as u16;
            assert_eq!(at(0), f16::from_f64(f(a) * f(b) + f(c)).to_bits());
            assert_eq!(at(1), bf16::from_f64(g(a) * g(b) + g(c)).to_bits());
            assert_eq!(at(2), bf16::from_f64(g(a).max(g(b))).to_bits());
        }
        let f = |v: u32| f16::from_bits(v as u16).to_f32();
        assert_eq!(got[4 * t + 3], u32::from(f16::from_f32(f(a) + f(a >> 16)).to_bits()));
    }
}

/// C = A Bᵀ by tensor cores, copies of two stages and swizzled shared memory.
const GEMM: &str = "K k(const u16*A,const u16*W,float*C,int M,int N,int K_){
    __shared__ __align__(128) u16 sa[2][32*32], sb[2][32*32];
    int t=T, w=t/32, l=t%32, m0=blockIdx.y*32, n0=blockIdx.x*32, wm=(w&1)*16, wn=(w>>1)*16; float c[2][4]={};
    auto at=[](int r,int q){ return r*32+((q^(r>>1&3))*8); };
    auto load=[&](int s,int k){ int r=t/4,q=t%4; CP16(sa[s]+at(r,q),A+(size_t)min(m0+r,M-1)*K_+k*32+q*8); CP16(sb[s]+at(r,q),W+(size_t)min(n0+r,N-1)*K_+k*32+q*8); COMMIT; };
    int nk=K_/32; load(0,0);
    for (int k=0;k<nk;k++){ if (k+1<nk) load(k+1&1,k+1); else COMMIT; WAIT(1); __syncthreads();
      for (int h=0;h<2;h++){ u32 a[4],b[4];
        asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];\":\"=r\"(a[0]),\"=r\"(a[1]),\"=r\"(a[2]),\"=r\"(a[3]):\"r\"(place(sa[k&1]+at(wm+(l&15),h*2+(l>>4)))));
        asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];\":\"=r\"(b[0]),\"=r\"(b[1]),\"=r\"(b[2]),\"=r\"(b[3]):\"r\"(place(sb[k&1]+at(wn+(l&7)+((l>>4)<<3),h*2+((l>>3)&1)))));
        for (int j=0;j<2;j++) asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\":\"+f\"(c[j][0]),\"+f\"(c[j][1]),\"+f\"(c[j][2]),\"+f\"(c[j][3]):\"r\"(a[0]),\"r\"(a[1]),\"r\"(a[2]),\"r\"(a[3]),\"r\"(b[2*j]),\"r\"(b[2*j+1])); }
      __syncthreads(); }
    for (int j=0;j<2;j++) for (int e=0;e<4;e++){ int r=m0+wm+l/4+8*(e/2), n=n0+wn+8*j+l%4*2+e%2; if (r<M&&n<N) C[(size_t)r*N+n]=c[j][e]; } }";

#[test]
fn products_of_matrices() {
    let Some(m) = module(GEMM, &[]) else { return skipped() };
    for (rows, cols, k) in [(33, 37, 64), (32, 32, 32), (5, 70, 96)] {
        let brains = |n: usize, s| floats(n, s).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let (a, w) = (brains(rows * k, 1), brains(cols * k, 2));
        let bytes = |v: &[bf16]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let run = Run::new(1, 128).bytes(bytes(&a)).bytes(bytes(&w)).empty(4 * rows * cols);
        let run = run.word(rows as u32).word(cols as u32).word(k as u32);
        let grid = [cols.div_ceil(32) as u32, rows.div_ceil(32) as u32, 1];
        let counted = Run { counted: true, ..run };
        let (out, counts) = counted.on(&m, grid).unwrap_or_else(|e| panic!("{e}"));
        let c = as_floats(&out[2]);
        for i in 0..rows * cols {
            let (r, n) = (i / cols, i % cols);
            let want: f64 = (0..k).map(|x| a[r * k + x].to_f64() * w[n * k + x].to_f64()).sum();
            assert!((f64::from(c[i]) - want).abs() < 1e-4, "{r},{n}: {} not {want}", c[i]);
        }
        let kernel = &m.kernels[0];
        for (pc, c) in counts.iter().enumerate().filter(|(pc, _)| kernel.text(*pc).contains("ldmatrix")) {
            assert_eq!(c.units, c.ideal, "passes of {}", kernel.text(pc));
        }
    }
}

#[test]
fn fragments_of_every_type() {
    // One product of 16 × 8: how elements lie in registers, the same formula for all.
    let shapes = [
        ("m16n8k16", "f32.f16.f16.f32", 16, 2, 4),
        ("m16n8k8", "f32.bf16.bf16.f32", 8, 2, 4),
        ("m16n8k8", "f32.tf32.tf32.f32", 8, 1, 4),
        ("m16n8k4", "f32.tf32.tf32.f32", 4, 1, 4),
        ("m16n8k32", "s32.s8.s8.s32", 32, 4, 4),
        ("m16n8k16", "s32.u8.s8.s32", 16, 4, 4),
        ("m16n8k16", "f16.f16.f16.f16", 16, 2, 2),
    ];
    for (shape, types, k, each, sums) in shapes {
        let (na, nb) = (16 * k / 32 / each, 8 * k / 32 / each);
        let regs =
            |from: usize, n: usize| (from..from + n).map(|i| format!("%{i}")).collect::<Vec<_>>().join(",");
        let outs = (0..sums).map(|i| format!("\"+r\"(d[{i}])")).collect::<Vec<_>>().join(",");
        let ins = (0..na + nb).map(|i| format!("\"r\"(x[{i}*32+T])")).collect::<Vec<_>>().join(",");
        let (d, a, b) = (regs(0, sums), regs(sums, na), regs(sums + na, nb));
        let source = format!(
            "K k(const u32*x,u32*y){{ u32 d[{sums}]={{}}; asm volatile(\"mma.sync.aligned.{shape}.row.col.{types} {{{d}}},{{{a}}},{{{b}}},{{{d}}};\":{outs}:{ins}); for (int i=0;i<{sums};i++) y[i*32+T]=d[i]; }}"
        );
        let Some(m) = module(&source, &[]) else { return skipped() };
        let value =
            |r: usize, c: usize, s: usize| ((r * 7 + c * 3 + s) % 5) as i32 - i32::from(types.contains('f'));
        let signed = |v: i32| if types.contains("u8") { v.abs() } else { v };
        let code = |v: i32| match types.split('.').nth(1).unwrap() {
            "f16" => u32::from(f16::from_f32(v as f32).to_bits()),
            "bf16" => u32::from(bf16::from_f32(v as f32).to_bits()),
            "tf32" => (v as f32).to_bits(),
            _ => u32::from(v as i8 as u8),
        };
        let mut x = vec![];
        for n in 0..na + nb {
            for l in 0..32 {
                let (g, t) = (l / 4, l % 4);
                let word = (0..each).fold(0u32, |w, h| {
                    let v = if n < na {
                        signed(value(g + 8 * (n & 1), t * each + h + 4 * each * (n >> 1), 0))
                    } else {
                        value(t * each + h + 4 * each * (n - na), g, 1)
                    };
                    w | code(v) << (32 / each * h)
                });
                x.push(word);
            }
        }
        let run = Run::new(1, 32).words(&x).empty(128 * sums);
        let got = as_words(&run.go(&m).unwrap_or_else(|e| panic!("{types}: {e}")).0[1]);
        for l in 0..32 {
            for n in 0..4 {
                let (row, col) = (l / 4 + 8 * (n / 2), l % 4 * 2 + n % 2);
                let want: i32 = (0..k).map(|j| signed(value(row, j, 0)) * value(j, col, 1)).sum();
                let v = match (types.starts_with('s'), sums) {
                    (true, _) => got[32 * n + l] as i32,
                    (_, 2) => {
                        f16::from_bits((got[32 * (n / 2) + l] >> (16 * (n % 2))) as u16).to_f32() as i32
                    }
                    _ => f32::from_bits(got[32 * n + l]) as i32,
                };
                assert_eq!(v, want, "{shape} {types} at {row},{col}");
            }
        }
    }
}

#[test]
fn constants_structures_and_dynamic_memory() {
    let source = "struct P { float a; int n; double d; }; __constant__ float table[4]={1,2,4,8}; __device__ int total=40;
        K k(float*y,P p){ extern __shared__ float s[]; s[T]=table[T&3]*p.a; __syncthreads();
        if (T<p.n) y[T]=s[blockDim.x-1-T]+(float)p.d+total; }";
    let Some(m) = module(source, &[]) else { return skipped() };
    let mut run = Run { dynamic: 256, ..Run::new(1, 64) }.empty(256);
    run.rest.extend(3f32.to_le_bytes());
    run = run.word(60);
    run.rest.extend(0.5f64.to_le_bytes());
    let y = as_floats(&run.go(&m).unwrap_or_else(|e| panic!("{e}")).0[0]);
    for t in 0..60 {
        assert_eq!(y[t], [1.0, 2.0, 4.0, 8.0][(63 - t) & 3] * 3.0 + 40.5);
    }
}

/// As NVRTC 13.0 writes it; 13.5 takes a 32-bit address. What optimises little leaves functions behind that nothing calls.
#[test]
fn dynamic_memory_has_a_wide_address_too() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 room[];
        .visible .entry k(.param .u64 k_param_0) {
        .reg .b32 %r<3>; .reg .b64 %rd<6>;
        ld.param.u64 %rd1, [k_param_0]; cvta.to.global.u64 %rd2, %rd1;
        mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; mov.u64 %rd4, room; add.s64 %rd4, %rd4, %rd3;
        st.shared.u32 [%rd4], %r1; ld.shared.u32 %r2, [%rd4]; add.s64 %rd5, %rd2, %rd3; st.global.u32 [%rd5], %r2;
        ret; }
        .func (.param .b32 result) never_called(.param .b32 x) { }";
    let m = astrai_ptx::Module::parse(text).unwrap();
    let run = Run { dynamic: 128, ..Run::new(1, 32) }.empty(128);
    let y = run.go(&m).unwrap_or_else(|e| panic!("{e}")).0.remove(0);
    let want: Vec<u8> = (0..32u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(y, want);
}

#[test]
fn blocks_on_several_threads_give_the_same() {
    let source = "K k(const float*x,float*y,u32 n){ __shared__ float s[128]; for (u32 r=B;r<n;r+=gridDim.x){ s[T]=x[r*128+T]; __syncthreads();
        for (int d=64;d;d/=2){ if (T<d) s[T]+=s[T+d]; __syncthreads(); } if (T==0) y[r]=s[0]; __syncthreads(); } }";
    let Some(m) = module(source, &[]) else { return skipped() };
    let x = floats(128 * 300, 4);
    let run = |grid, threads, seed| {
        let r = Run { threads, seed, ..Run::new(grid, 128) }.floats(&x).empty(1200).word(300);
        r.go(&m).unwrap_or_else(|e| panic!("{e}"))
    };
    let first = run(300, 1, 1);
    for (grid, threads, seed) in [(300, 2, 1), (300, 4, 2), (7, 3, 9), (1, 1, 5)] {
        let other = run(grid, threads, seed);
        assert!(first.0 == other.0, "grid {grid}, threads {threads}");
        if grid == 300 {
            assert_eq!(first.1, other.1, "counts");
        }
    }
}

/// Instructions of lanes a second of this processor's time, for a few kinds of kernels.
#[test]
#[ignore = "a measurement"]
fn speed() {
    let row = "K k(const float*x,float*y){ __shared__ float s[256]; float m=-1e30f; const float*r=x+B*2048;
        for (int i=T;i<2048;i+=256) m=fmaxf(m,r[i]); s[T]=m; __syncthreads(); for (int d=128;d;d/=2){ if (T<d) s[T]=fmaxf(s[T],s[T+d]); __syncthreads(); } m=s[0]; __syncthreads();
        float z=0; for (int i=T;i<2048;i+=256) z+=__expf(r[i]-m); s[T]=z; __syncthreads(); for (int d=128;d;d/=2){ if (T<d) s[T]+=s[T+d]; __syncthreads(); } z=1/s[0];
        for (int i=T;i<2048;i+=256) y[B*2048+i]=__expf(r[i]-m)*z; }";
    let alu = "K k(const float*x,float*y){ float a=x[B*256+T], b=1.5f; for (int i=0;i<400;i++) { a=a*b+0.25f; b=b*0.999f+a*1e-3f; } y[B*256+T]=a+b; }";
    let product = Run::new(1, 128)
        .bytes(vec![0x3c; 256 * 256 * 2])
        .bytes(vec![0x3c; 256 * 256 * 2])
        .empty(256 * 256 * 4);
    let product = product.word(256).word(256).word(256);
    let rows = [
        ("softmax", row, [64, 1, 1], Run::new(64, 256).floats(&floats(64 * 2048, 1)).empty(64 * 2048 * 4)),
        ("arithmetic", alu, [64, 1, 1], Run::new(64, 256).floats(&floats(64 * 256, 1)).empty(64 * 256 * 4)),
        ("tensor cores", GEMM, [8, 8, 1], product),
    ];
    for (name, source, grid, run) in rows {
        let Some(m) = module(source, &[]) else { return skipped() };
        let time = || {
            let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: a place for the time of this thread.
            unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
            t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
        };
        let run = Run { budget: 1 << 28, ..run };
        let begin = time();
        let (_, counts) = run.on(&m, grid).unwrap_or_else(|e| panic!("{e}"));
        let spent = time() - begin;
        let lanes: u64 = counts.iter().map(|c| c.lanes).sum();
        println!(
            "{name}: {lanes} lane instructions in {spent:.3} s, {:.0} million a second",
            lanes as f64 / spent / 1e6
        );
    }
}
