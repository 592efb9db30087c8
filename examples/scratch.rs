use astrai::batch::Batch;
use astrai::machine::Machine;
use astrai::model::{Model, read_config};
use astrai_builders::{Logits, Program};
use astrai_ir::DType;
use astrai_runtime::Device;
use std::time::Instant;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let (config, w) = read_config(std::path::Path::new(&a[1]), false).unwrap();
    let dtype = DType::parse(&a[2]).unwrap();
    let seq: usize = a[3].parse().unwrap();
    let model = Model::fresh(config, w, 1);
    let machine = Machine::new(Device::Host, 2).unwrap();
    let program = Program { logits: Logits::Last, ..Program::full(1, seq as u64) };
    let t = Instant::now();
    let mut s = model.session(&program, dtype, &machine, &mut |_, _| {}).unwrap();
    println!("open {:.2}s", t.elapsed().as_secs_f64());
    let ids: Vec<i64> = (0..seq as i64).map(|i| 3 + i * 7 % 1000).collect();
    let b = Batch::new(&[&ids], model.config.vocab_size).unwrap();
    let names = s.inputs().to_vec();
    s.run(&b.inputs(&names)).unwrap();
    let mut ts = vec![];
    for _ in 0..7 { let t = Instant::now(); s.run(&b.inputs(&names)).unwrap(); ts.push(t.elapsed().as_secs_f64()); }
    ts.sort_by(f64::total_cmp);
    println!("median {:.4}s min {:.4} -> {:.1} tok/s", ts[3], ts[0], seq as f64 / ts[3]);
    s.start_profile();
    for _ in 0..3 { s.run(&b.inputs(&names)).unwrap(); }
    for r in s.take_profile().unwrap().by_kernel() {
        println!("{:9.3}ms pred {:9.3}ms {:6.1} GF/s {:6.1} GB/s  {} x{} {}", r.measured*1e3/3.0, r.predicted*1e3/3.0, r.flops as f64/1e9/(r.measured/3.0), r.bytes as f64/1e9/(r.measured/3.0), r.kernel, r.runs/3, r.origin);
    }
}
