//! Runs a program. In: a program, a source of weights, threads. Out: results of runs. Memory is taken once: weights in the
//! layout that kernels read, one arena for everything between kernels, and the scratch of the most demanding kernel. A run
//! on shapes like the last one's allocates nothing.

mod bind;
mod bounds;
mod execute;
mod interpret;
mod load;
mod run;
mod sizes;

use crate::buffers::{Buffer, Buffers};
use crate::cc::{Compiler, KernelCache, Loaded};
use crate::memory::Memory;
use crate::pool::Pool;
use crate::profile::{Cost, Profile};
use crate::weigh::WeightSource;
use crate::{Error, Program, Value};
use astrai_ir::ops::Op;
use astrai_ir::{Anchor, DType, Sizes, Target, Tensor, Type};
use astrai_passes::is_version;
use bounds::Bounds;
use execute::Addresses;
pub use load::laid_out;
use sizes::{Origin, origins};
use std::collections::HashMap;
use std::sync::Arc;

/// Where a buffer lies during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spot {
    Fixed(*mut u8),
    Input(usize),
    Output(usize),
}

/// A result: its name, its place among the graph's outputs, its type and, since the last run, its shape.
struct Outcome {
    name: String,
    at: usize,
    ty: Type,
    shape: Vec<usize>,
}

/// One kernel launch with its buffers bound.
struct Launch {
    region: usize,
    kernel: Option<Loaded>,
    spots: Vec<Spot>,
    origin: Arc<str>,
    /// Its bounds are looked at before the run.
    checked: bool,
}

/// A program with its weights, ready to run.
pub struct Session {
    program: Arc<Program>,
    pool: Arc<Pool>,
    launches: Vec<Launch>,
    inputs: Vec<(String, Type)>,
    arena: Memory,
    scratch: Memory,
    /// Address of each weight of the plan, in `packed` or in `shared`.
    weights: Vec<*mut u8>,
    /// Memory of each weight of the plan, where it has some of its own; sessions beside one another share it.
    packed: Vec<Option<Arc<Memory>>>,
    /// Kernels by name, for sessions beside this one.
    loaded: HashMap<String, Loaded>,
    owned: Vec<Memory>,
    /// Memory that outlives runs, and what of it the program uses.
    buffers: Buffers,
    shared: Vec<Arc<Buffer>>,
    interpreted: Option<HashMap<String, Tensor>>,
    target: Target,
    profile: Option<Profile>,
    /// Sizes, and what each launch costs at them.
    costed: (Sizes, Vec<Option<Cost>>),
    poisoned: Option<String>,
    /// Addresses of the inputs of the run; kernels only read there.
    given: Addresses,
    /// Copies of inputs that are not aligned, kept from run to run.
    staged: Vec<Memory>,
    /// Memory of each output of the graph; next versions of states have none here.
    result_memory: Vec<Memory>,
    results: Vec<Outcome>,
    /// Which of the values given is which input, and the shapes of the last run with what follows from them.
    order: Vec<usize>,
    shapes: Vec<Vec<usize>>,
    measured: bool,
    origins: Vec<Option<Origin>>,
    sizes: Sizes,
    dims: Vec<i64>,
    bound: Addresses,
    /// For each region which integers lead it.
    bounds: Vec<Option<Bounds>>,
    /// Launches whose bounds are looked at before a run, each set of inputs once.
    guards: Vec<usize>,
}

/// How host kernels are built.
#[derive(Clone, Copy)]
pub struct Tools<'a> {
    /// The C compiler.
    pub compiler: &'a Compiler,
    /// Where objects are kept.
    pub cache: &'a KernelCache,
}

// SAFETY: the raw addresses in `launches` and `weights` point into memory that the session owns, or keeps alive in `packed`,
// which nobody writes once it is filled, or in `shared`, which it touches only in its turn.
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
        Session::over(program, source, &Buffers::new(), pool, tools, target, progress)
    }

    /// [`new`](Self::new) over memory that outlives runs: states, and weights of the same name, type and shape that the
    /// program reads row-major, lie there; `source` is asked for the other weights.
    pub fn over(
        program: Arc<Program>,
        source: &dyn WeightSource,
        buffers: &Buffers,
        pool: Arc<Pool>,
        tools: Option<Tools>,
        target: &Target,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        program.check_memory_beside(buffers, None)?;
        let mut session = Session::empty(program, buffers, pool, tools.is_some(), target)?;
        match tools {
            None => session.interpreted = Some(session.whole_weights(source)?),
            Some(tools) => session.start(source, tools, None, progress)?,
        }
        Ok(session)
    }

    /// A session of another program of the same model over the same memory, on the same threads. Weights that both programs read
    /// alike lie in memory once, kernels that both have are built once; `source` is asked for the rest. Runs of the two take
    /// turns; each keeps its results until its own next run.
    ///
    /// # Errors
    /// As [`over`](Self::over).
    pub fn beside(
        &self,
        program: Arc<Program>,
        source: &dyn WeightSource,
        tools: Tools,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        program.check_memory_beside(&self.buffers, Some(&self.program))?;
        let mut session = Session::empty(program, &self.buffers, self.pool.clone(), true, &self.target)?;
        session.start(source, tools, Some(self), progress)?;
        Ok(session)
    }

    /// A session that has its memory, but no weights and no kernels yet.
    fn empty(
        program: Arc<Program>,
        buffers: &Buffers,
        pool: Arc<Pool>,
        kernels: bool,
        target: &Target,
    ) -> Result<Session, Error> {
        if program.plan.regions.iter().any(|r| r.anchor == Anchor::Collective) {
            let line =
                "the program is one rank's of several, which can only be planned; compile it without a mesh";
            return Err(Error::Input(line.into()));
        }
        let room = |bytes: u64| Memory::zeroed(if kernels { bytes as usize } else { 0 });
        let inputs = inputs(&program);
        let mut session = Session {
            origins: origins(&program, &inputs)?,
            inputs,
            arena: room(program.plan.main.arena + program.plan.scratch)?,
            scratch: room(program.scratch_bytes()?)?,
            results: outcomes(&program),
            bounds: program.plan.regions.iter().map(|r| Bounds::of(r)).collect(),
            guards: vec![],
            program,
            pool,
            launches: vec![],
            weights: vec![],
            packed: vec![],
            loaded: HashMap::new(),
            owned: vec![],
            buffers: buffers.clone(),
            shared: vec![],
            interpreted: None,
            target: target.clone(),
            profile: None,
            costed: (Sizes::new(), vec![]),
            poisoned: None,
            given: Addresses(vec![]),
            staged: vec![],
            result_memory: vec![],
            order: vec![],
            shapes: vec![],
            measured: false,
            sizes: Sizes::new(),
            dims: vec![],
            bound: Addresses(vec![]),
        };
        session.share()?;
        Ok(session)
    }

    /// Loads kernels and weights that no session beside it has, and binds every launch.
    fn start(
        &mut self,
        source: &dyn WeightSource,
        tools: Tools,
        beside: Option<&Session>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let program = self.program.clone();
        let known = |name: &str| beside.and_then(|b| b.loaded.get(name));
        let kernels = || program.kernels.iter().flatten();
        let fresh: Vec<_> = kernels().filter(|k| known(&k.name).is_none()).collect();
        self.loaded = tools.cache.load(tools.compiler, &fresh, &self.target, self.pool.threads())?;
        self.loaded.extend(kernels().filter_map(|k| Some((k.name.clone(), known(&k.name)?.clone()))));
        self.load_weights(source, beside, progress)?;
        self.bind()
    }

    /// Keeps the buffers of the program's states.
    fn share(&mut self) -> Result<(), Error> {
        for n in self.program.graph.nodes() {
            let Op::State(s) = &n.op else { continue };
            let buffer = self.buffers.get(&s.name);
            let buffer =
                buffer.ok_or_else(|| Error::Input(format!("no buffer for the state `{}`", s.name)))?;
            let want = literal(&s.ty);
            if (buffer.dtype, Some(&buffer.shape)) != (s.ty.dtype, want.as_ref()) {
                let (dtype, shape) = (buffer.dtype, &buffer.shape);
                let message = format!("the state `{}` is {}, its buffer {dtype}{shape:?}", s.name, s.ty);
                return Err(Error::Input(message));
            }
            self.shared.push(buffer.clone());
        }
        Ok(())
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
            let r = &self.results[i];
            let bytes = self.result(i).to_vec();
            (r.name.clone(), Value { dtype: r.ty.dtype, shape: r.shape.clone(), bytes })
        };
        Ok((0..self.results.len()).map(own).collect())
    }

    /// Bytes of the result that the last run left at this place.
    pub fn result(&self, i: usize) -> &[u8] {
        let r = &self.results[i];
        &self.result_memory[r.at].bytes()[..r.shape.iter().product::<usize>() * r.ty.dtype.bytes()]
    }

    /// Elements of the f32 result that the last run left at this place; they may be overwritten. `None` where there is none,
    /// or of another type.
    pub fn floats_mut(&mut self, i: usize) -> Option<&mut [f32]> {
        let r = self.results.get(i).filter(|r| r.ty.dtype == DType::F32)?;
        let memory = self.result_memory.get_mut(r.at)?;
        let count = r.shape.iter().product::<usize>();
        // SAFETY: the memory is aligned for f32, and its bytes are initialised; every pattern of bits is an f32.
        let (_, all, _) = unsafe { memory.bytes_mut().align_to_mut::<f32>() };
        all.get_mut(..count)
    }

    /// Shape and elements of an f32 result of the last run, by its name.
    pub fn floats(&self, name: &str) -> Option<(&[usize], impl Iterator<Item = f32>)> {
        let i = self.results.iter().position(|r| r.name == name && r.ty.dtype == DType::F32)?;
        let bytes = self.result(i).as_chunks::<4>().0;
        Some((&self.results[i].shape, bytes.iter().map(|b| f32::from_le_bytes(*b))))
    }

    /// The threads that run it.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The only element of a scalar f32 result of the last run.
    pub fn scalar(&self, name: &str) -> Option<f32> {
        let i = self.results.iter().position(|r| r.name == name)?;
        let bytes = self.result(i).first_chunk::<4>()?;
        (self.results[i].ty.dtype == DType::F32).then(|| f32::from_le_bytes(*bytes))
    }
}

/// Literal sizes of a type.
fn literal(ty: &Type) -> Option<Vec<usize>> {
    ty.shape.iter().map(|d| d.size()).collect()
}

fn inputs(program: &Program) -> Vec<(String, Type)> {
    let named = program.graph.nodes().iter().filter(|n| matches!(n.op, Op::Input(_)));
    named.filter_map(|n| Some((n.op.leaf_name()?.to_string(), n.ty().clone()))).collect()
}

/// Outputs that are not next versions of states.
fn outcomes(program: &Program) -> Vec<Outcome> {
    let g = &program.graph;
    let outcome = |(at, (name, id)): (usize, &(String, astrai_ir::NodeId))| {
        (!is_version(g, *id)).then(|| Outcome {
            name: name.clone(),
            at,
            ty: g.ty(*id).clone(),
            shape: vec![],
        })
    };
    g.outputs().iter().enumerate().filter_map(outcome).collect()
}
