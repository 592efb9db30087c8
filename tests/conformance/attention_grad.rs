//! The gradient of attention through host kernels, against the interpreter: all forms of masks and heads, the same bits at
//! any number of threads and in any batch.

use crate::machines::host;
use astrai_engine::Machine;
use astrai_ir::ops::Attention;
use astrai_ir::{DType, Dim, Graph, NodeId, Real, Sizes, Symbol, Tensor, Type, eval, gradient};
use astrai_runtime::{Options, Session, Value, compile};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Clone)]
struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    dtype: DType,
    op: Attention,
}

fn case() -> Case {
    let op = Attention {
        scale: Real(0.3),
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        span: Dim::from(256),
        page: None,
    };
    Case { heads: 4, kv_heads: 4, d: 16, dv: 16, dtype: DType::F32, op }
}

/// Cases that differ from the plain one in everything the kernel distinguishes.
fn cases() -> Vec<Case> {
    let plain = case();
    let bidirectional = Attention { causal: false, ..plain.op.clone() };
    let windowed = Attention { window: Some(37), softcap: Some(Real(2.0)), ..plain.op.clone() };
    let sinks = Attention { sinks: true, ..plain.op.clone() };
    let mut cases = vec![
        plain.clone(),
        Case { kv_heads: 1, d: 20, dv: 12, ..plain.clone() },
        Case { op: bidirectional, kv_heads: 2, dv: 40, ..plain.clone() },
        Case { op: windowed.clone(), ..plain.clone() },
        Case { op: sinks, kv_heads: 2, d: 24, ..plain.clone() },
        Case { op: Attention { sinks: true, ..windowed }, heads: 6, kv_heads: 2, d: 9, dv: 17, ..plain },
    ];
    for i in [0, 1, 5] {
        cases.push(Case { dtype: DType::BF16, ..cases[i].clone() });
    }
    cases
}

fn symbol(name: &str, max: u64) -> Symbol {
    Symbol { name: name.into(), min: 1, max, multiple_of: 1 }
}

impl Case {
    /// Attention on slices of one projection; its cotangents are outputs. Without a cotangent as input it is all ones.
    fn graph(&self, ones: bool) -> Graph {
        let mut g = Graph::new(vec![symbol("tokens", 512), symbol("sequences", 8)]);
        let tokens = Dim::symbol("tokens");
        let (q, k, v) = (self.heads * self.d, self.kv_heads * self.d, self.kv_heads * self.dv);
        let qkv = g.input("qkv", self.dtype, vec![tokens.clone(), Dim::from(q + k + v)]).unwrap();
        let starts = &Dim::symbol("sequences") + &Dim::from(1);
        let starts = g.input("starts", DType::I32, vec![starts]).unwrap();
        let rows = |g: &mut Graph, first: usize, heads: usize, d: usize| {
            let x = g.slice(qkv, 1, Dim::from(first), Dim::from(heads * d)).unwrap();
            g.reshape(x, vec![tokens.clone(), Dim::from(heads), Dim::from(d)]).unwrap()
        };
        let mut wrt = vec![
            rows(&mut g, 0, self.heads, self.d),
            rows(&mut g, q, self.kv_heads, self.d),
            rows(&mut g, q + k, self.kv_heads, self.dv),
        ];
        if self.op.sinks {
            wrt.push(g.input("sinks", self.dtype, vec![Dim::from(self.heads)]).unwrap());
        }
        let mut args: Vec<NodeId> = wrt.iter().map(|&x| g.cast(x, DType::F32).unwrap()).collect();
        args.insert(3, starts);
        let both = g.push(self.op.clone(), &args).unwrap();
        let out = g.part(both, 0).unwrap();
        let out = g.cast(out, self.dtype).unwrap();
        let shape = g.ty(out).shape.clone();
        let cotangent = match ones {
            true => g.fill(out, 1.0).unwrap(),
            false => g.input("cotangent", self.dtype, shape).unwrap(),
        };
        let grads = gradient(&mut g, &[(out, cotangent)], &wrt).unwrap();
        for (name, d) in ["dq", "dk", "dv", "dsinks"].iter().zip(grads) {
            g.set_output(name, d.unwrap()).unwrap();
        }
        g.set_output("out", out).unwrap();
        g
    }

    /// Inputs for sequences of these lengths; a sequence's numbers depend on its `seeds` entry alone.
    fn inputs(&self, lens: &[usize], seeds: &[u32], ones: bool) -> Vec<(&'static str, Tensor)> {
        let wide = self.heads * self.d + self.kv_heads * (self.d + self.dv);
        let tokens = lens.iter().sum();
        let fill = |shape: &[usize], salt: u32| {
            let per_token: usize = shape[1..].iter().product();
            let mut x = Vec::new();
            for (&len, &seed) in lens.iter().zip(seeds) {
                let mut state = seed.wrapping_mul(977).wrapping_add(salt);
                x.extend((0..len * per_token).map(|_| uniform(&mut state)));
            }
            Tensor::float(self.dtype, shape, x)
        };
        let mut starts = vec![0i64];
        lens.iter().for_each(|&n| starts.push(starts[starts.len() - 1] + n as i64));
        let mut inputs = vec![
            ("qkv", fill(&[tokens, wide], 1)),
            ("starts", Tensor::int(DType::I32, &[starts.len()], starts)),
        ];
        if self.op.sinks {
            let mut state = 5;
            let x = (0..self.heads).map(|_| uniform(&mut state)).collect();
            inputs.push(("sinks", Tensor::float(self.dtype, &[self.heads], x)));
        }
        if !ones {
            inputs.push(("cotangent", fill(&[tokens, self.heads, self.dv], 2)));
        }
        inputs
    }

    /// A session of host kernels; none without a compiler.
    fn session(&self, machine: &Machine, ones: bool) -> Option<Session> {
        machine.cpu.as_ref()?;
        let program = compile(&self.graph(ones), machine.backend(), &Options::default()).unwrap();
        assert!(program.kernels.iter().all(Option::is_some), "the interpreter would run a region");
        let grads = program.plan.regions.iter().filter(|r| r.form().name() == "attention_grad");
        assert_eq!(grads.count(), 1);
        let none: HashMap<String, Value> = HashMap::new();
        Some(Session::new(Arc::new(program), &none, &machine.device, &mut |_, _| {}).unwrap())
    }
}

/// Between -1 and 1.
fn uniform(state: &mut u32) -> f64 {
    *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    f64::from(*state >> 8) / f64::from(1 << 23) - 1.0
}

fn run(session: &mut Session, inputs: &[(&str, Tensor)]) -> Vec<(String, Value)> {
    let values: Vec<(&str, Value)> = inputs.iter().map(|(n, t)| (*n, Value::from_tensor(t))).collect();
    let refs: Vec<(&str, &Value)> = values.iter().map(|(n, v)| (*n, v)).collect();
    session.run(&refs).unwrap()
}

fn check(case: &Case, got: &[(String, Value)], inputs: &[(&str, Tensor)], ones: bool) {
    let leaves: HashMap<String, Tensor> = inputs.iter().map(|(n, t)| (n.to_string(), t.clone())).collect();
    let sequences = leaves["starts"].len() as u64 - 1;
    let sizes = Sizes::from([("sequences".to_string(), sequences)]);
    let want = eval(&case.graph(ones), &leaves, &sizes, Default::default()).unwrap();
    let tolerance = if case.dtype == DType::F32 { 5e-5 } else { 1e-2 };
    for ((name, got), (_, want)) in got.iter().zip(&want) {
        assert_eq!((got.dtype, &got.shape), (want.dtype, &want.shape));
        let want = want.reals();
        let top = want.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let off = got.to_f32().iter().zip(&want).fold(0.0, |m: f64, (a, b)| m.max((f64::from(*a) - b).abs()));
        assert!(off <= tolerance * top, "{name} {:?} {:?}: off by {off} of {top}", case.dtype, case.op);
    }
}

#[test]
fn kernels_give_the_interpreters_gradients() {
    let machine = host(2);
    for case in cases() {
        let Some(mut session) = case.session(&machine, false) else { return };
        let inputs = case.inputs(&[3, 70, 1, 65], &[1, 2, 3, 4], false);
        let got = run(&mut session, &inputs);
        check(&case, &got, &inputs, false);
    }
}

/// The cotangent of a sum is no memory until somebody stores it.
#[test]
fn a_constant_cotangent_is_stored_first() {
    let machine = host(1);
    let Some(mut session) = case().session(&machine, true) else { return };
    let inputs = case().inputs(&[20], &[1], true);
    let got = run(&mut session, &inputs);
    check(&case(), &got, &inputs, true);
}

#[test]
fn threads_and_batch_do_not_change_a_bit() {
    let (one, two) = (host(1), host(2));
    for case in cases() {
        let Some(mut alone) = case.session(&one, false) else { return };
        let Some(mut shared) = case.session(&two, false) else { return };
        let (lens, seeds) = ([50, 1, 130, 17], [1, 2, 3, 4]);
        let batch = run(&mut alone, &case.inputs(&lens, &seeds, false));
        assert!(batch == run(&mut shared, &case.inputs(&lens, &seeds, false)), "{:?}", case.op);
        let mut row = 0;
        for (len, seed) in lens.into_iter().zip(seeds) {
            let own = run(&mut alone, &case.inputs(&[len], &[seed], false));
            for ((name, own), (_, all)) in own.iter().zip(&batch).filter(|((n, _), _)| n != "dsinks") {
                let bytes = own.bytes.len() / len;
                let part = &all.bytes[row * bytes..(row + len) * bytes];
                assert!(own.bytes == part, "{name} of a sequence of {len}: {:?}", case.op);
            }
            row += len;
        }
    }
}

/// A cotangent that only its reader's rounding leaves is written rounded, with the others, by one kernel.
#[test]
fn outputs_have_the_types_asked_for() {
    let machine = host(1);
    let Some(session) = Case { dtype: DType::BF16, ..case() }.session(&machine, false) else { return };
    let region = session.program().plan.regions.iter().find(|r| r.form().name() == "attention_grad").unwrap();
    let types: Vec<DType> = region.piece.write_types().iter().map(|t: &Type| t.dtype).collect();
    assert_eq!(types, [DType::BF16; 3]);
}
