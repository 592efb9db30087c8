//! The tensor front end: what a user writes, differentiates and runs by hand.

use astrai_ir::DType::{F32, I32};
use astrai_ir::{Dim, Symbol, Tape, Tensor, Type, Value, ops::RandomKind};
use std::collections::HashMap;

fn wave(shape: &[usize], phase: f32) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::f32(shape, &(0..n).map(|i| (phase + 1.7 * i as f32).sin()).collect::<Vec<_>>())
}

fn leaves<const N: usize>(pairs: [(&str, Tensor); N]) -> HashMap<String, Tensor> {
    pairs.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
}

#[test]
fn fifty_steps_of_sgd_lower_the_loss() {
    let t = Tape::new();
    let (x, y) = (t.input("x", F32, [16, 3]), t.input("y", F32, [16, 1]));
    let (w1, b1) = (t.weight("w1", F32, &[3, 12]), t.weight("b1", F32, &[12]));
    let (w2, b2) = (t.weight("w2", F32, &[12, 1]), t.weight("b2", F32, &[1]));
    let out = (x.matmul(&w1) + &b1).tanh().matmul(&w2) + &b2;
    let error = &out - &y;
    let loss = (&error * &error).mean(&[], false);
    let names = ["w1", "b1", "w2", "b2"];
    let grads = loss.backward(&[&w1, &b1, &w2, &b2]);
    let mut outputs: Vec<(&str, &Value)> = vec![("loss", &loss)];
    outputs.extend(names.into_iter().zip(&grads));

    let inputs = wave(&[16, 3], 0.2);
    let targets: Vec<f32> = (0..16).map(|i| (inputs.at(3 * i) * inputs.at(3 * i + 1)) as f32).collect();
    let mut values = leaves([
        ("x", inputs),
        ("y", Tensor::f32(&[16, 1], &targets)),
        ("w1", wave(&[3, 12], 0.5)),
        ("b1", wave(&[12], 0.9)),
        ("w2", wave(&[12, 1], 1.3)),
        ("b2", wave(&[1], 0.1)),
    ]);
    let mut losses = Vec::new();
    for _ in 0..50 {
        let got = t.run(&outputs, &values).unwrap();
        losses.push(got["loss"].at(0));
        for name in names {
            let (p, g) = (&values[name], &got[name]);
            let next = p.reals().iter().zip(g.reals()).map(|(p, g)| p - 0.05 * g).collect();
            values.insert(name.to_string(), Tensor::float(F32, &p.shape, next));
        }
    }
    assert!(losses[49] < 0.2 * losses[0], "{losses:?}");
}

#[test]
fn arithmetic_takes_numbers_on_either_side_and_broadcasts() {
    let t = Tape::new();
    let (a, b) = (t.input("a", F32, [2, 1]), t.input("b", F32, [3]));
    let v = leaves([("a", Tensor::f32(&[2, 1], &[1.0, 2.0])), ("b", Tensor::f32(&[3], &[1.0, 2.0, 4.0]))]);
    let run = |x: &Value| x.eval(&v).unwrap().reals();
    assert_eq!(run(&(&a + &b)), [2.0, 3.0, 5.0, 3.0, 4.0, 6.0]);
    assert_eq!(run(&(2.0 - &a)), [1.0, 0.0]);
    assert_eq!(run(&(8.0 / &b)), [8.0, 4.0, 2.0]);
    assert_eq!(run(&(-(&b * 3.0) / 2.0 - 0.5)), [-2.0, -3.5, -6.5]);
    assert_eq!(run(&(&b - 2.0).relu()), [0.0, 0.0, 2.0]);
    assert_eq!(run(&b.pow(2.0).maximum(&(&b + 1.0))), [2.0, 4.0, 16.0]);
    assert_eq!(run(&b.greater(&a).where_(&b, &a)), [1.0, 2.0, 4.0, 2.0, 2.0, 4.0]);
}

#[test]
fn products_reductions_and_views() {
    let t = Tape::new();
    let (a, b) = (t.input("a", F32, [2, 1, 2, 2]), t.input("b", F32, [3, 2, 1]));
    let v = leaves([("a", wave(&[2, 1, 2, 2], 0.0)), ("b", wave(&[3, 2, 1], 1.0))]);
    let run = |x: &Value| x.eval(&v).unwrap();
    let y = run(&a.matmul(&b));
    assert_eq!(y.shape, [2, 3, 2, 1]);
    let (av, bv) = (&v["a"], &v["b"]);
    // Element [1, 2, 1, 0]: row 1 of a[1, 0] times b[2].
    assert!((y.at(11) - (av.at(6) * bv.at(4) + av.at(7) * bv.at(5))).abs() < 1e-6);
    let x = b.reshape([2, 3]);
    assert_eq!(run(&x.max(&[-1], true)).shape, [2, 1]);
    assert!((run(&x.softmax(0).sum(&[0], false)).at(2) - 1.0).abs() < 1e-6);
    assert_eq!(run(&x.transpose(0, 1)).at(1), bv.at(3));
    let parts = x.split(1, &[1, 2]);
    assert_eq!(run(&parts[0].concat(&[&parts[1]], -1)), run(&x));
    let (top, at) = x.topk(2);
    let (top, at) = (run(&top), run(&at));
    assert_eq!(top.at(0), bv.at(at.int_at(0) as usize));
    assert_eq!(run(&x.argmax(1)).int_at(0), at.int_at(0));
    let i = t.constant(&Tensor::int(I32, &[2], vec![2, -1]));
    assert_eq!(run(&i.one_hot(3, F32)).reals(), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    let i = t.constant(&Tensor::int(I32, &[2], vec![1, 1]));
    assert_eq!(run(&t.full(F32, [2], 0.0).scatter_add(&i, &t.full(F32, [2], 1.5), 0)).reals(), [0.0, 3.0]);
}

#[test]
fn a_detached_factor_is_a_constant() {
    let t = Tape::new();
    let x = t.input("x", F32, [2]);
    let y = (&x * x.detach()).sum(&[], false);
    let z = x.detach().sum(&[], false);
    let v = leaves([("x", Tensor::f32(&[2], &[3.0, 5.0]))]);
    // d(x·c) = c, where d(x²) is 2x; what does not depend on x has gradient 0.
    assert_eq!(y.backward(&[&x])[0].eval(&v).unwrap().reals(), [3.0, 5.0]);
    assert_eq!((&x * &x).backward(&[&x])[0].eval(&v).unwrap().reals(), [6.0, 10.0]);
    assert_eq!(z.backward(&[&x])[0].eval(&v).unwrap().reals(), [0.0, 0.0]);
}

#[test]
fn the_first_mistake_is_kept() {
    let t = Tape::new();
    let (a, b) = (t.input("a", F32, [2]), t.input("b", F32, [3]));
    let bad = t.scope("layers.0", || &a + &b);
    let worse = (bad.softmax(7) * 2.0).sum(&[], false);
    let grads = worse.backward(&[&a]);
    for e in [t.finish(&[("y", &worse)]).unwrap_err(), grads[0].eval(&HashMap::new()).unwrap_err()] {
        assert_eq!(e.to_string(), "layers.0: [2] and [3] do not broadcast: 2 and 3 differ");
    }
    let (s, u) = (Tape::new(), Tape::new());
    let mixed = s.input("a", F32, [2]) + u.input("b", F32, [2]);
    assert!(mixed.eval(&HashMap::new()).unwrap_err().to_string().contains("two tapes"));
}

#[test]
fn symbols_take_their_sizes_from_the_inputs() {
    let t = Tape::with_symbols(vec![Symbol { name: "tokens".into(), min: 1, max: 8, multiple_of: 1 }]);
    let x = t.input("x", F32, vec![Dim::symbol("tokens"), Dim::from(2)]);
    let (seed, step) =
        (t.input("seed", astrai_ir::DType::I64, []), t.input("step", astrai_ir::DType::I64, []));
    let ty = Type::new(F32, [Dim::symbol("tokens"), Dim::from(2)]);
    let noisy = &x + t.random(RandomKind::Normal, ty, 3, &seed, &step) * 0.0;
    let scalar = |v| Tensor::int(astrai_ir::DType::I64, &[], vec![v]);
    let v = leaves([("x", wave(&[3, 2], 0.0)), ("seed", scalar(1)), ("step", scalar(2))]);
    assert_eq!(noisy.eval(&v).unwrap(), wave(&[3, 2], 0.0));
}
