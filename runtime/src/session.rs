//! Runs a program. In: a program, a source of weights, threads. Out: results of runs. Memory is taken once: weights in the
//! layout that kernels read, one arena for everything between kernels, and the scratch of the most demanding kernel.

use crate::cc::{Compiler, KernelCache, Loaded};
use crate::compile::{Device, weight_bytes};
use crate::memory::Memory;
use crate::pack::pack;
use crate::pool::Pool;
use crate::profile::{Profile, ProfileRow};
use crate::weigh::WeightSource;
use crate::{Error, Program, Value};
use astrai_ir::ops::{Op, Weight};
use astrai_ir::plan::{Body, Buffer, Place, Step};
use astrai_ir::{DType, Precision, Region, Sizes, Target, Tensor, Type, eval};
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

    /// Bytes held: weights, arena and scratch.
    pub fn bytes(&self) -> u64 {
        let all = self.weights.iter().chain(&self.consts).chain([&self.arena, &self.scratch]);
        all.map(|m| m.len() as u64).sum()
    }

    /// From here on every launch is timed.
    pub fn start_profile(&mut self) {
        self.profile = Some(Profile::default());
    }

    /// What was timed since.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.profile.take()
    }

    /// Runs once. Symbols take their values from the shapes of the inputs.
    pub fn run(&mut self, inputs: &[(&str, &Value)]) -> Result<Vec<(String, Value)>, Error> {
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
        let mut outs = Vec::with_capacity(self.outputs.len());
        for (name, ty) in &self.outputs {
            let shape = concrete(ty, &sizes)?;
            let bytes = shape.iter().product::<usize>() * ty.dtype.bytes();
            outs.push((name.clone(), Value { dtype: ty.dtype, shape, bytes: vec![0; bytes] }));
        }
        let dims: Vec<i64> = self.program.plan.symbols.iter().map(|s| sizes[&*s.name] as i64).collect();
        // Vectors of bytes may lie at any address; kernels expect elements aligned.
        let mut staged: Vec<Memory> = Vec::new();
        for v in &values {
            let mut m = Memory::zeroed(v.bytes.len())?;
            m.bytes_mut()[..v.bytes.len()].copy_from_slice(&v.bytes);
            staged.push(m);
        }
        let results: Vec<*mut u8> = outs.iter_mut().map(|(_, v)| v.bytes.as_mut_ptr()).collect();
        for i in 0..self.launches.len() {
            if let Err(e) = self.launch(i, &dims, &staged, &results, &sizes) {
                self.poisoned = Some(e.to_string());
                return Err(e);
            }
        }
        Ok(outs)
    }

    fn launch(
        &mut self,
        i: usize,
        dims: &[i64],
        inputs: &[Memory],
        results: &[*mut u8],
        sizes: &Sizes,
    ) -> Result<(), Error> {
        let launch = &self.launches[i];
        let at = |s: &Spot| match s {
            Spot::Fixed(p) => *p,
            Spot::Input(i) => inputs[*i].address(),
            Spot::Output(i) => results[*i],
        };
        let bufs = Addresses(launch.spots.iter().map(at).collect());
        let started = Instant::now();
        match &launch.kernel {
            Some(k) => run_kernel(&self.pool, k, &bufs, dims, self.scratch.address(), self.scratch.len())?,
            None => run_region(&self.program.plan.regions[launch.region], &bufs, sizes)?,
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
        match symbols.iter().find(|s| !sizes.contains_key(&*s.name)) {
            Some(s) => Err(Error::Input(format!("no input says how large `{}` is", s.name))),
            None => Ok(sizes),
        }
    }

    fn interpret(&self, inputs: &[(&str, &Value)], sizes: &Sizes) -> Result<Vec<(String, Value)>, Error> {
        let mut leaves = HashMap::new();
        for (name, v) in inputs {
            leaves.insert(*name, v.to_tensor().map_err(Error::Input)?);
        }
        let weights = self.interpreted.iter().flatten().map(|(k, v)| (k.as_str(), v));
        let all: HashMap<&str, &Tensor> = leaves.iter().map(|(k, v)| (*k, v)).chain(weights).collect();
        let outs = eval::walk(&self.program.graph, &all, sizes, Precision::default())?;
        Ok(outs.iter().map(|(n, t)| (n.clone(), Value::from_tensor(t))).collect())
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

    fn bind(&mut self, loaded: &HashMap<String, Loaded>) -> Result<(), Error> {
        let program = self.program.clone();
        let plan = &program.plan;
        let base = self.arena.address();
        let main: Vec<Spot> = self.spots(&plan.main, &|p| match p {
            Place::Param(i) => Spot::Input(*i),
            Place::Result(i) => Spot::Output(*i),
            // SAFETY: `place` keeps every offset and length inside the arena.
            Place::Arena(o) => Spot::Fixed(unsafe { base.add(*o as usize) }),
            Place::Weight(_) | Place::Const(_) => Spot::Fixed(base),
        })?;
        // SAFETY: the shared scratch follows the main body's part of the arena.
        let shared = unsafe { base.add(plan.main.arena as usize) };
        let consts: Vec<Vec<Option<*mut u8>>> =
            plan.bodies.iter().map(|b| self.const_spots(b)).collect::<Result<_, Error>>()?;
        for step in &plan.main.steps {
            match step {
                Step::Run { region, reads, writes, origin } => {
                    let spots = reads.iter().chain(writes).map(|b| main[*b]).collect();
                    self.add(*region, spots, origin.clone(), loaded);
                }
                Step::Call { body, args, results, origin } => {
                    let inner = &plan.bodies[*body];
                    let spot = |i: usize, b: &Buffer| match &b.place {
                        Place::Param(p) => main[args[*p]],
                        Place::Result(r) => main[results[*r]],
                        // SAFETY: `place` keeps every offset and length inside the shared scratch.
                        Place::Arena(o) => Spot::Fixed(unsafe { shared.add(*o as usize) }),
                        Place::Weight(_) | Place::Const(_) => Spot::Fixed(consts[*body][i].unwrap_or(shared)),
                    };
                    let spots: Vec<Spot> =
                        inner.buffers.iter().enumerate().map(|(i, b)| spot(i, b)).collect();
                    for s in &inner.steps {
                        if let Step::Run { region, reads, writes, origin: at } = s {
                            let bound = reads.iter().chain(writes).map(|b| spots[*b]).collect();
                            self.add(*region, bound, format!("{origin}.{at}").into(), loaded);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, region: usize, spots: Vec<Spot>, origin: Arc<str>, loaded: &HashMap<String, Loaded>) {
        let kernel = self.program.kernels[region].as_ref().and_then(|k| loaded.get(&k.name).cloned());
        self.launches.push(Launch { region, kernel, spots, origin });
    }

    fn spots(&mut self, body: &Body, place: &dyn Fn(&Place) -> Spot) -> Result<Vec<Spot>, Error> {
        let consts = self.const_spots(body)?;
        let spot = |(i, b): (usize, &Buffer)| match (&b.place, consts[i]) {
            (_, Some(p)) => Spot::Fixed(p),
            (Place::Weight(w), _) => Spot::Fixed(self.weights[*w].address()),
            (p, _) => place(p),
        };
        Ok(body.buffers.iter().enumerate().map(spot).collect())
    }

    /// Copies of a body's literal numbers.
    fn const_spots(&mut self, body: &Body) -> Result<Vec<Option<*mut u8>>, Error> {
        let mut spots = Vec::with_capacity(body.buffers.len());
        for b in &body.buffers {
            spots.push(match &b.place {
                Place::Const(bits) => {
                    let mut m = Memory::zeroed(bits.len())?;
                    m.bytes_mut()[..bits.len()].copy_from_slice(bits);
                    let at = m.address();
                    self.consts.push(m);
                    Some(at)
                }
                _ => None,
            });
        }
        Ok(spots)
    }
}

/// Addresses of a launch's buffers, shared by the pool's threads.
struct Addresses(Vec<*mut u8>);

// SAFETY: kernels write disjoint parts of the buffers per unit; the addresses themselves are only read.
unsafe impl Sync for Addresses {}

fn run_kernel(
    pool: &Pool,
    k: &Loaded,
    bufs: &Addresses,
    dims: &[i64],
    scratch: *mut u8,
    scratch_len: usize,
) -> Result<(), Error> {
    let scratch = Addresses(vec![scratch]);
    // SAFETY: the emitted functions read `dims` up to the number of symbols, which `dims` holds.
    let needs = k.scratch.map_or(0, |f| unsafe { f(dims.as_ptr()) });
    if needs < 0 || needs as usize > scratch_len {
        return Err(Error::Input(format!(
            "a kernel wants {needs} bytes of scratch, planned were {scratch_len}"
        )));
    }
    for (units, phase) in &k.phases {
        // SAFETY: as above.
        let n = unsafe { units(dims.as_ptr()) };
        let (bufs, scratch) = (&bufs, &scratch);
        pool.run(n.max(0) as usize, &|_, range| {
            // SAFETY: buffers are as large as the region's types at these sizes (checked bounds of the plan); units are
            // independent, so that ranges on different threads touch disjoint results.
            unsafe {
                phase(bufs.0.as_ptr(), dims.as_ptr(), scratch.0[0], range.start as i64, range.end as i64)
            }
        });
    }
    Ok(())
}

/// Runs a region without a kernel through the interpreter.
fn run_region(region: &Region, bufs: &Addresses, sizes: &Sizes) -> Result<(), Error> {
    let reads = region.reads();
    let mut leaves = HashMap::new();
    for (i, ty) in reads.iter().enumerate() {
        let shape = concrete(ty, sizes)?;
        let len = shape.iter().product::<usize>() * ty.dtype.bytes();
        // SAFETY: the buffer holds a value of this type at these sizes.
        let bytes = unsafe { std::slice::from_raw_parts(bufs.0[i], len) };
        leaves.insert(format!("r{i}"), Tensor::from_bytes(ty.dtype, &shape, bytes).map_err(Error::Input)?);
    }
    let by_ref: HashMap<&str, &Tensor> = leaves.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let outs = eval::walk(&region.graph, &by_ref, sizes, Precision::default())?;
    for (i, (_, t)) in outs.iter().enumerate() {
        let bytes = t.to_bytes();
        // SAFETY: as above; the result's buffer is nobody else's during this launch.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), bufs.0[reads.len() + i], bytes.len()) };
    }
    Ok(())
}

fn concrete(ty: &Type, sizes: &Sizes) -> Result<Vec<usize>, Error> {
    let size = |d: &astrai_ir::Dim| d.eval(&|s| sizes.get(s).copied()).map(|n| n as usize);
    ty.shape.iter().map(size).collect::<Result<_, _>>().map_err(Error::Input)
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
        pack(&mut bytes, w.ty.dtype, astrai_ir::Layout::Rows, first, k, &t.bytes, t.dtype);
        first += part.rows;
    }
    Tensor::from_bytes(w.ty.dtype, &shape, &bytes).map_err(Error::Input)
}
