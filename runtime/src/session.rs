//! Runs a program. In: a program, a source of weights, threads. Out: results of runs. Memory is taken once: weights in the
//! layout that kernels read, one arena for everything between kernels, and the scratch of the most demanding kernel.

mod bind;
mod execute;

use crate::cc::{Compiler, KernelCache, Loaded};
use crate::compile::{Device, weight_bytes};
use crate::memory::Memory;
use crate::pack::pack;
use crate::pool::Pool;
use crate::profile::{Profile, ProfileRow};
use crate::weigh::WeightSource;
use crate::{Error, Program, Value};
use astrai_ir::ops::{Op, Weight};
use astrai_ir::{DType, Layout, Precision, Sizes, Target, Tensor, Type, eval};
use execute::{Addresses, Starts, check_starts, grow, run_kernel, run_region};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Where a buffer lies during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spot {
    Fixed(*mut u8),
    Input(usize),
    Output(usize),
}

/// One kernel launch with its buffers bound.
struct Launch {
    region: usize,
    kernel: Option<Loaded>,
    spots: Vec<Spot>,
    origin: Arc<str>,
}

/// A program with its weights, ready to run.
pub struct Session {
    program: Arc<Program>,
    pool: Arc<Pool>,
    launches: Vec<Launch>,
    inputs: Vec<(String, Type)>,
    outputs: Vec<(String, Type)>,
    arena: Memory,
    scratch: Memory,
    weights: Vec<Memory>,
    consts: Vec<Memory>,
    interpreted: Option<HashMap<String, Tensor>>,
    target: Target,
    profile: Option<Profile>,
    poisoned: Option<String>,
    /// Addresses of the inputs of the run; kernels only read there.
    given: Addresses,
    /// Copies of inputs that are not aligned, kept from run to run.
    staged: Vec<Memory>,
    result_memory: Vec<Memory>,
    /// Name, type and shape of the last run's results.
    results: Vec<(String, DType, Vec<usize>)>,
    dims: Vec<i64>,
    bound: Addresses,
    /// For each region that attends: which buffer divides its tokens into sequences.
    starts: Vec<Option<Starts>>,
}

/// How host kernels are built.
pub struct Tools<'a> {
    /// The C compiler.
    pub compiler: &'a Compiler,
    /// Where objects are kept.
    pub cache: &'a KernelCache,
}

// SAFETY: the raw addresses in `launches` point into memory that the session owns.
unsafe impl Send for Session {}

impl Session {
    /// Loads the weights and binds every kernel. Without `tools` the interpreter runs the program. `progress` hears
    /// (bytes done, bytes in all) of loading.
    pub fn new(
        program: Arc<Program>,
        source: &dyn WeightSource,
        pool: Arc<Pool>,
        tools: Option<Tools>,
        target: &Target,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        program.check_memory()?;
        let device = if tools.is_some() { Device::Host } else { Device::Interpreter };
        let arena_bytes = program.plan.main.arena + program.plan.scratch;
        let starts = program.plan.regions.iter().map(|r| Starts::of(r)).collect();
        let mut session = Session {
            inputs: leaves(&program),
            outputs: program
                .graph
                .outputs()
                .iter()
                .map(|(n, id)| (n.clone(), program.graph.ty(*id).clone()))
                .collect(),
            arena: Memory::zeroed(if device == Device::Host { arena_bytes as usize } else { 0 })?,
            scratch: Memory::zeroed(if device == Device::Host {
                program.scratch_bytes()? as usize
            } else {
                0
            })?,
            program,
            pool,
            launches: vec![],
            weights: vec![],
            consts: vec![],
            interpreted: None,
            target: target.clone(),
            profile: None,
            poisoned: None,
            given: Addresses(vec![]),
            staged: vec![],
            result_memory: vec![],
            results: vec![],
            dims: vec![],
            bound: Addresses(vec![]),
            starts,
        };
        match tools {
            None => session.interpreted = Some(interpreter_weights(&session.program, source)?),
            Some(tools) => {
                let kernels: Vec<_> = session.program.kernels.iter().flatten().collect();
                let loaded = tools.cache.load(tools.compiler, &kernels, session.pool.threads())?;
                session.load_weights(source, progress)?;
                session.bind(&loaded)?;
            }
        }
        Ok(session)
    }

    /// Names and types of the inputs.
    pub fn inputs(&self) -> &[(String, Type)] {
        &self.inputs
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// From here on every launch is timed.
    pub fn start_profile(&mut self) {
        self.profile = Some(Profile::default());
    }

    /// What was timed since.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.profile.take()
    }

    /// Runs once and copies the results out. Symbols take their values from the shapes of the inputs.
    pub fn run(&mut self, inputs: &[(&str, &Value)]) -> Result<Vec<(String, Value)>, Error> {
        self.execute(inputs)?;
        let own = |i: usize| {
            let (name, dtype, shape) = &self.results[i];
            (name.clone(), Value { dtype: *dtype, shape: shape.clone(), bytes: self.result(i).to_vec() })
        };
        Ok((0..self.results.len()).map(own).collect())
    }

    /// Bytes of the result that the last run left at this place.
    pub fn result(&self, i: usize) -> &[u8] {
        let (_, dtype, shape) = &self.results[i];
        &self.result_memory[i].bytes()[..shape.iter().product::<usize>() * dtype.bytes()]
    }

    /// Runs once; the results stay in the session's memory until the next run.
    pub fn execute(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        if let Some(why) = &self.poisoned {
            return Err(Error::Input(format!("an earlier run failed ({why}); open the session again")));
        }
        let mut values = Vec::with_capacity(self.inputs.len());
        for (name, _) in &self.inputs {
            let found = inputs.iter().find(|(n, _)| n == name);
            values.push(found.ok_or_else(|| Error::Input(format!("input `{name}` is missing")))?.1);
        }
        if let Some((extra, _)) = inputs.iter().find(|(n, _)| !self.inputs.iter().any(|(x, _)| x == n)) {
            return Err(Error::Input(format!("input `{extra}` is not one of the program's")));
        }
        let sizes = self.sizes(&values)?;
        if self.interpreted.is_some() {
            return self.interpret(inputs, &sizes);
        }
        self.results.clear();
        for (i, (name, ty)) in self.outputs.iter().enumerate() {
            let shape = concrete(ty, &sizes)?;
            grow(&mut self.result_memory, i, shape.iter().product::<usize>() * ty.dtype.bytes())?;
            self.results.push((name.clone(), ty.dtype, shape));
        }
        self.dims.clear();
        self.dims.extend(self.program.plan.symbols.iter().map(|s| sizes[&*s.name] as i64));
        self.given.0.clear();
        for (i, v) in values.iter().enumerate() {
            grow(&mut self.staged, i, 0)?;
            // Elements that lie on their own alignment are read where they are.
            let at = v.bytes.as_ptr().cast_mut();
            if at.align_offset(v.dtype.bytes()) == 0 {
                self.given.0.push(at);
                continue;
            }
            grow(&mut self.staged, i, v.bytes.len())?;
            self.staged[i].bytes_mut()[..v.bytes.len()].copy_from_slice(&v.bytes);
            self.given.0.push(self.staged[i].address());
        }
        for i in 0..self.launches.len() {
            if let Err(e) = self.launch(i, &sizes) {
                // A wrong input leaves nothing behind that the next run would read.
                if !matches!(e, Error::Input(_)) {
                    self.poisoned = Some(e.to_string());
                }
                return Err(e);
            }
        }
        Ok(())
    }

    fn launch(&mut self, i: usize, sizes: &Sizes) -> Result<(), Error> {
        let launch = &self.launches[i];
        self.bound.0.clear();
        self.bound.0.extend(launch.spots.iter().map(|s| match s {
            Spot::Fixed(p) => *p,
            Spot::Input(i) => self.given.0[*i],
            Spot::Output(i) => self.result_memory[*i].address(),
        }));
        if let Some(s) = &self.starts[launch.region] {
            check_starts(s, &self.bound, sizes)?;
        }
        let started = Instant::now();
        match &launch.kernel {
            Some(k) => run_kernel(&self.pool, k, &self.bound, &self.dims, &self.scratch)?,
            None => run_region(&self.program.plan.regions[launch.region], &self.bound, sizes)?,
        }
        let seconds = started.elapsed().as_secs_f64();
        if self.profile.is_some() {
            self.record(i, seconds, sizes)?;
        }
        Ok(())
    }

    fn record(&mut self, i: usize, seconds: f64, sizes: &Sizes) -> Result<(), Error> {
        let launch = &self.launches[i];
        let region = &self.program.plan.regions[launch.region];
        let value = |d: &astrai_ir::Dim| d.eval(&|s| sizes.get(s).copied()).map_err(Error::Input);
        let (bytes, flops) = (value(&region.bytes())?, value(&region.flops())?);
        let predicted = self.target.seconds(flops as f64, bytes as f64, DType::F32);
        let kernel = self.program.kernels[launch.region].as_ref();
        let row = ProfileRow {
            origin: launch.origin.clone(),
            kernel: kernel.map_or("interpreter".into(), |k| k.name.clone()),
            bytes,
            flops,
            predicted,
            measured: seconds,
            runs: 1,
        };
        let Some(profile) = &mut self.profile else { return Ok(()) };
        match profile.rows.get_mut(i) {
            Some(old) => {
                old.measured += seconds;
                old.predicted += predicted;
                old.runs += 1;
            }
            None => profile.rows.push(row),
        }
        Ok(())
    }

    /// Values of the symbols that make the inputs' shapes the declared ones.
    fn sizes(&self, values: &[&Value]) -> Result<Sizes, Error> {
        let mut sizes = Sizes::new();
        let symbols = &self.program.plan.symbols;
        for ((name, ty), v) in self.inputs.iter().zip(values) {
            if ty.dtype != v.dtype || ty.rank() != v.shape.len() {
                return Err(Error::Input(format!(
                    "input `{name}` must be {ty}, got {}{:?}",
                    v.dtype, v.shape
                )));
            }
            for (d, &n) in ty.shape.iter().zip(&v.shape) {
                for s in symbols {
                    let rest = d - &astrai_ir::Dim::symbol(&s.name);
                    if let (Some(c), false) = (rest.literal(), sizes.contains_key(&*s.name)) {
                        let value = n as i64 - c;
                        if value < s.min as i64 || value > s.max as i64 {
                            let m = format!(
                                "`{}` is {value} in input `{name}`, the program was made for {} to {}",
                                s.name, s.min, s.max
                            );
                            return Err(Error::Input(m));
                        }
                        if !(value as u64).is_multiple_of(s.multiple_of.max(1)) {
                            let (s, m) = (&s.name, s.multiple_of);
                            let m =
                                format!("`{s}` is {value} in input `{name}`, it must be a multiple of {m}");
                            return Err(Error::Input(m));
                        }
                        sizes.insert(s.name.to_string(), value as u64);
                    }
                }
            }
        }
        for ((name, ty), v) in self.inputs.iter().zip(values) {
            let want = concrete(ty, &sizes)?;
            if want != v.shape || v.bytes.len() != want.iter().product::<usize>() * v.dtype.bytes() {
                return Err(Error::Input(format!(
                    "input `{name}` must be {ty} = {want:?}, got {:?}",
                    v.shape
                )));
            }
        }
        for s in symbols {
            if !sizes.contains_key(&*s.name) {
                if uses_symbol(&self.program, &s.name) {
                    return Err(Error::Input(format!("no input says how large `{}` is", s.name)));
                }
                sizes.insert(s.name.to_string(), s.min);
            }
        }
        Ok(sizes)
    }

    fn interpret(&mut self, inputs: &[(&str, &Value)], sizes: &Sizes) -> Result<(), Error> {
        let mut leaves = HashMap::new();
        for (name, v) in inputs {
            leaves.insert(*name, v.to_tensor().map_err(Error::Input)?);
        }
        let weights = self.interpreted.iter().flatten().map(|(k, v)| (k.as_str(), v));
        let all: HashMap<&str, &Tensor> = leaves.iter().map(|(k, v)| (*k, v)).chain(weights).collect();
        let outs = eval::walk(&self.program.graph, &all, sizes, Precision::default())?;
        self.results.clear();
        for (i, (name, t)) in outs.iter().enumerate() {
            let bytes = t.to_bytes();
            grow(&mut self.result_memory, i, bytes.len())?;
            self.result_memory[i].bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
            self.results.push((name.clone(), t.dtype, t.shape.clone()));
        }
        Ok(())
    }

    /// Packs every weight, one checkpoint tensor at a time, in the order in which the plan lists them.
    fn load_weights(
        &mut self,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let plan = &self.program.plan;
        let total: u64 = plan.weights.iter().map(weight_bytes).sum();
        let mut done = 0;
        for w in &plan.weights {
            let mut memory = Memory::zeroed(weight_bytes(w) as usize)?;
            let ty = &w.weight.ty;
            let k: usize = ty.shape.iter().skip(1).filter_map(|d| d.size()).product();
            let mut first = 0;
            for part in w.weight.rows() {
                let t = source.tensor(&part.name).ok_or_else(|| missing(&part.name))?;
                check_shape(&part.name, &t.shape, part.rows, ty)?;
                pack(memory.bytes_mut(), ty.dtype, w.layout, first, k, &t.bytes, t.dtype);
                first += part.rows;
                source.done(&part.name);
            }
            done += memory.len() as u64;
            progress(done.min(total), total);
            self.weights.push(memory);
        }
        Ok(())
    }
}

fn concrete(ty: &Type, sizes: &Sizes) -> Result<Vec<usize>, Error> {
    let size = |d: &astrai_ir::Dim| d.eval(&|s| sizes.get(s).copied()).map(|n| n as usize);
    ty.shape.iter().map(size).collect::<Result<_, _>>().map_err(Error::Input)
}

/// True when the shape of a value has this symbol in it.
fn uses_symbol(program: &Program, name: &str) -> bool {
    let mut nodes = program.plan.regions.iter().flat_map(|r| r.graph.nodes()).chain(program.graph.nodes());
    let has = |t: &Type| t.shape.iter().any(|d| d.symbols().iter().any(|s| &**s == name));
    nodes.any(|n| n.types.iter().any(has))
}

fn leaves(program: &Program) -> Vec<(String, Type)> {
    let named = program.graph.nodes().iter().filter(|n| matches!(n.op, Op::Input(_) | Op::State(_)));
    named.filter_map(|n| Some((n.op.leaf_name()?.to_string(), n.ty().clone()))).collect()
}

fn missing(name: &str) -> Error {
    Error::Input(format!("the weights have no tensor `{name}`; is this the checkpoint of this config?"))
}

fn check_shape(name: &str, shape: &[usize], rows: usize, ty: &Type) -> Result<(), Error> {
    let mut want: Vec<usize> = ty.shape.iter().filter_map(|d| d.size()).collect();
    if let Some(first) = want.first_mut() {
        *first = rows;
    }
    match shape == want {
        true => Ok(()),
        false => Err(Error::Input(format!(
            "tensor `{name}` is {shape:?} in the weights, the model wants {want:?}"
        ))),
    }
}

/// Weights as the interpreter takes them: whole buffers by name.
fn interpreter_weights(
    program: &Program,
    source: &dyn WeightSource,
) -> Result<HashMap<String, Tensor>, Error> {
    let mut all = HashMap::new();
    for n in program.graph.nodes() {
        let Op::Weight(w) = &n.op else { continue };
        all.insert(w.name.clone(), whole_weight(w, source)?);
    }
    Ok(all)
}

fn whole_weight(w: &Weight, source: &dyn WeightSource) -> Result<Tensor, Error> {
    let shape: Vec<usize> = w.ty.shape.iter().filter_map(|d| d.size()).collect();
    let mut bytes = vec![0; shape.iter().product::<usize>() * w.ty.dtype.bytes()];
    let k: usize = shape.iter().skip(1).product();
    let mut first = 0;
    for part in w.rows() {
        let t = source.tensor(&part.name).ok_or_else(|| missing(&part.name))?;
        check_shape(&part.name, &t.shape, part.rows, &w.ty)?;
        pack(&mut bytes, w.ty.dtype, Layout::Rows, first, k, &t.bytes, t.dtype);
        first += part.rows;
    }
    Tensor::from_bytes(w.ty.dtype, &shape, &bytes).map_err(Error::Input)
}
