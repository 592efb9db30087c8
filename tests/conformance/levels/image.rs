//! A program outside of this process. In: a program, weights, inputs. Out: all its memory in one piece with a list of launches,
//! and C that runs the list: an executable for any architecture then does what a session does.

use astrai_ir::kernel::Grid;
use astrai_ir::plan::{Body, Buffer, Place, Step};
use astrai_ir::{Backend, DType, Kernel, Op};
use astrai_runtime::device::null::Null;
use astrai_runtime::{Compiled, Value, WeightSource, laid_out};
use std::fmt::Write;

/// Runs the launches of standard input on the memory behind them; the memory is what it prints. Needs no C library.
const RUNNER: &str = include_str!("runner.c");

/// What the runner knows of a kernel.
const RUNNER_TYPES: &str = "
struct runner {
    int64_t (*units[8])(const int64_t *);
    void (*phase[8])(void *const *, const int64_t *, char *, int64_t, int64_t);
};
";

/// One unit of these kernels and of what runs them.
pub fn source(backend: &dyn Backend, kernels: &[&Kernel]) -> String {
    let mut text = backend.unit(kernels);
    text.push_str(RUNNER_TYPES);
    text.push_str("static const struct runner runners[] = {\n");
    for k in kernels {
        let units = k.entries.iter().map(|e| match &e.grid {
            Grid::Units(_) => "0, ".into(),
            Grid::Counted(symbol) => format!("{symbol}, "),
        });
        let phases = k.entries.iter().map(|e| format!("{}, ", e.symbol));
        let _ =
            writeln!(text, "    {{{{{}}}, {{{}}}}},", units.collect::<String>(), phases.collect::<String>());
    }
    text.push_str("};\n");
    text + RUNNER
}

/// A program's memory and launches.
pub struct Image {
    memory: Vec<u8>,
    launches: Vec<(usize, Vec<i64>, Vec<usize>)>,
    dims: Vec<i64>,
    scratch: u64,
    results: Vec<(String, DType, usize, usize)>,
}

impl Image {
    /// The program at the upper bounds of its symbols. `None` where a region has no kernel.
    pub fn new(
        p: &Compiled,
        null: &Null,
        weights: &dyn WeightSource,
        inputs: &[(&str, &Value)],
    ) -> Option<Image> {
        if p.kernels.iter().any(Option::is_none) {
            return None;
        }
        let mut image = Image {
            memory: vec![],
            launches: vec![],
            dims: p.plan.symbols.iter().map(|s| s.max as i64).chain([0, 1]).collect(),
            scratch: p.arena_bytes().unwrap(),
            results: vec![],
        };
        let arena = image.room((p.plan.main.arena + p.plan.scratch) as usize);
        let shared = arena + p.plan.main.arena as usize;
        let weights: Vec<usize> =
            p.plan.weights.iter().map(|w| image.put(&laid_out(w, weights, null).unwrap())).collect();
        let input = |name: &str| inputs.iter().find(|(n, _)| *n == name).unwrap().1;
        let params: Vec<usize> =
            p.plan.main.params.iter().map(|(name, _)| image.put(&input(name).bytes)).collect();
        let mut results = vec![];
        for (name, id) in p.graph.outputs() {
            let ty = p.graph.ty(*id);
            let bytes = p.plan.bound(&ty.bytes()).unwrap() as usize;
            results.push(image.room(bytes));
            image.results.push((name.clone(), ty.dtype, results[results.len() - 1], bytes));
        }
        let main = image.places(&p.plan.main, &|b| match b.place {
            Place::Param(i) => params[i],
            Place::Result(i) => results[i],
            Place::Weight(i) => weights[i.0],
            Place::Arena(o) => arena + o as usize,
            Place::Const(_) => unreachable!(),
        });
        for step in &p.plan.main.steps {
            match step {
                Step::Run { .. } => image.launch(p, step, &main),
                Step::Call { body, args, results, .. } => {
                    let body = &p.plan.bodies[body.0];
                    let inner = image.places(body, &|b| match b.place {
                        Place::Param(i) => main[args[i].0],
                        Place::Result(i) => main[results[i].0],
                        Place::Arena(o) => shared + o as usize,
                        Place::Weight(_) | Place::Const(_) => unreachable!(),
                    });
                    body.steps.iter().for_each(|s| image.launch(p, s, &inner));
                }
            }
        }
        Some(image)
    }

    /// Fresh bytes on a line of their own.
    fn room(&mut self, bytes: usize) -> usize {
        let at = self.memory.len();
        self.memory.resize(at + bytes.next_multiple_of(64).max(64), 0);
        at
    }

    fn put(&mut self, bytes: &[u8]) -> usize {
        let at = self.room(bytes.len());
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
        at
    }

    /// Where each buffer of a body lies.
    fn places(&mut self, body: &Body, place: &dyn Fn(&Buffer) -> usize) -> Vec<usize> {
        let one = |b: &Buffer| match &b.place {
            Place::Const(bits) => self.put(bits),
            _ => place(b),
        };
        body.buffers.iter().map(one).collect()
    }

    fn launch(&mut self, p: &Compiled, step: &Step, places: &[usize]) {
        let Step::Run { region, reads, writes, .. } = step else { panic!("a call in a call") };
        let k = p.kernels[region.0].as_ref().unwrap();
        let value = |d: &astrai_ir::Dim| p.plan.bound(d).unwrap() as i64;
        let units = k.entries.iter().map(|e| match &e.grid {
            Grid::Units(units) => value(units),
            Grid::Counted(_) => -1,
        });
        let geometry = [value(&k.rounds), k.entries.len() as i64].into_iter().chain(units).collect();
        let buffers = reads.iter().chain(writes).map(|b| places[b.0]).collect();
        self.launches.push((region.0, geometry, buffers));
    }

    /// What the runner reads; `number` of a region is that of its kernel in the runner's unit.
    pub fn bytes(&self, number: &dyn Fn(usize) -> usize) -> Vec<u8> {
        let round = |n: usize| n.next_multiple_of(64).max(64) as i64;
        let mut words =
            vec![round(self.memory.len()), round(self.scratch as usize), self.dims.len() as i64 - 2];
        words.extend(&self.dims);
        words.push(self.launches.len() as i64);
        for (region, geometry, places) in &self.launches {
            words.push(number(*region) as i64);
            words.extend(geometry);
            words.push(places.len() as i64);
            words.extend(places.iter().map(|p| *p as i64));
        }
        let header = [words.len() as i64];
        let words = header.iter().chain(&words).flat_map(|w| w.to_le_bytes());
        words.chain(self.memory.iter().copied()).collect()
    }

    /// Results by name in memory that the runner has printed; f32 ones as they are, bf16 ones widened.
    pub fn results(&self, memory: &[u8]) -> Vec<(String, Vec<f32>)> {
        assert_eq!(memory.len(), self.memory.len());
        let one = |(name, dtype, at, bytes): &(String, DType, usize, usize)| {
            let shape = vec![bytes / dtype.bytes()];
            let value = Value { dtype: *dtype, shape, bytes: memory[*at..at + bytes].to_vec() };
            (name.clone(), value.to_f32())
        };
        self.results.iter().map(one).collect()
    }
}

/// Names and types of a program's inputs.
pub fn inputs(p: &Compiled) -> Vec<(String, astrai_ir::Type)> {
    let input = |n: &astrai_ir::Node| match &n.op {
        Op::Input(i) => Some((i.name.clone(), i.ty.clone())),
        _ => None,
    };
    p.graph.nodes().iter().filter_map(input).collect()
}
