//! A graph made with the tensor front end: a line is fitted to points by gradient descent. The graph has the gradients; each run
//! of its kernels is one step.

use astrai_engine::{Kind, Machine};
use astrai_ir::{DType, Tape};
use astrai_runtime::{Options, Session, Value, compile};
use std::collections::HashMap;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let t = Tape::new();
    let (x, y) = (t.input("x", DType::F32, [4, 1]), t.input("y", DType::F32, [4, 1]));
    let (a, b) = (t.input("a", DType::F32, [1, 1]), t.input("b", DType::F32, [1]));
    let off = x.matmul(&a) + &b - &y;
    let loss = (off.clone() * &off).mean(&[], false);
    let grads = loss.backward(&[&a, &b]);
    let graph = t.finish(&[("loss", &loss), ("da", &grads[0]), ("db", &grads[1])])?;

    let machine = Machine::new(Kind::Cpu, 1)?;
    let program = compile(&graph, machine.backend(), &Options::default())?;
    let weights: HashMap<String, Value> = HashMap::new();
    let mut session = Session::new(Arc::new(program), &weights, &machine.device, &mut |_, _| {})?;

    let (x, y) = (Value::f32(&[4, 1], &[0.0, 1.0, 2.0, 3.0]), Value::f32(&[4, 1], &[1.0, 3.0, 5.0, 7.0]));
    let (mut a, mut b) = (0f32, 0f32);
    for step in 0..=200 {
        let (now_a, now_b) = (Value::f32(&[1, 1], &[a]), Value::f32(&[1], &[b]));
        let results = session.run(&[("x", &x), ("y", &y), ("a", &now_a), ("b", &now_b)])?;
        let [loss, da, db] = [0, 1, 2].map(|i| results[i].1.to_f32()[0]);
        if step % 100 == 0 {
            println!("step {step:3}: y = {a:.2} x + {b:.2}, loss {loss:.4}");
        }
        (a, b) = (a - 0.1 * da, b - 0.1 * db);
    }
    Ok(())
}
