//! Runs a program. In: a program, a source of weights, threads. Out: results of runs. Memory is taken once: weights in the
//! layout that kernels read, one arena for everything between kernels, and the scratch of the most demanding kernel; sessions over
//! the same buffers may share the two. A run on shapes like the last one's allocates nothing.

mod bind;
mod guards;
mod keep;
mod load;
mod record;
mod run;
mod sizes;

use crate::buffers::{Buffer, Buffers, Room};
use crate::device::{Block, Device, Executable, Pointer};
use crate::profile::{LaunchCost, Profile};
use crate::source::WeightSource;
use crate::{Compiled, Error, Value};
use astrai_ir::ops::Op;
use astrai_ir::plan::RegionId;
use astrai_ir::{DType, Sizes, Type};
use astrai_passes::is_version;
pub use load::laid_out;
use record::Recordings;
pub(crate) use sizes::concrete;
use sizes::{Origin, origins};
use std::sync::Arc;

/// Where a buffer lies during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spot {
    Fixed(Pointer),
    Input(usize),
    Output(usize),
}

/// A result: its name, its place among the graph's outputs, its type and, since the last run, its shape.
struct Outcome {
    name: String,
    at: usize,
    ty: Type,
    shape: Vec<usize>,
    /// Its bytes, where this process does not see those of the device.
    copy: Vec<u8>,
}

/// One kernel launch with its buffers bound.
struct BoundLaunch {
    region: RegionId,
    kernel: Option<Arc<dyn Executable>>,
    spots: Vec<Spot>,
    origin: Arc<str>,
    /// Its guards are looked at before the run.
    checked: bool,
}

/// A program with its weights, ready to run.
pub struct Session {
    program: Arc<Compiled>,
    device: Arc<dyn Device>,
    /// One for each region that has a kernel.
    kernels: Vec<Option<Arc<dyn Executable>>>,
    launches: Vec<BoundLaunch>,
    inputs: Vec<(String, Type)>,
    arena: Arc<Block>,
    workspace: Arc<Block>,
    /// Where each weight of the plan lies, in `packed` or in `shared`.
    weights: Vec<Pointer>,
    /// Memory of each weight of the plan, where it has some of its own; sessions beside one another share it.
    packed: Vec<Option<Block>>,
    owned: Vec<Block>,
    /// Memory that outlives runs, and what of it the program uses.
    buffers: Buffers,
    shared: Vec<Arc<Buffer>>,
    profile: Option<Profile>,
    /// Sizes, and what each launch costs at them.
    costed: (Sizes, Vec<Option<LaunchCost>>),
    poisoned: Option<String>,
    /// Runs begun.
    runs: u64,
    recordings: Recordings,
    /// Where the inputs of the run lie; kernels only read there.
    given: Vec<Pointer>,
    /// Copies of inputs that kernels cannot read where they are, kept from run to run.
    staged: Vec<Block>,
    /// Memory of each output of the graph; next versions of states have none here.
    result_memory: Vec<Block>,
    results: Vec<Outcome>,
    /// Which of the values given is which input, and the shapes of the last run with what follows from them.
    order: Vec<usize>,
    shapes: Vec<Vec<usize>>,
    measured: bool,
    origins: Vec<Option<Origin>>,
    sizes: Sizes,
    dims: Vec<i64>,
    bound: Vec<Pointer>,
    /// Launches whose guards are looked at before a run, each set of inputs once.
    guarded: Vec<usize>,
}

impl Session {
    /// Loads the weights and binds every kernel. `progress` hears (bytes done, bytes in all) of loading.
    ///
    /// # Errors
    /// Memory, weights or the compiler of kernels fail.
    pub fn new(
        program: Arc<Compiled>,
        source: &dyn WeightSource,
        device: &Arc<dyn Device>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        Session::over(program, source, &Buffers::new(device), progress)
    }

    /// [`new`](Self::new) over memory that outlives runs: states, and weights of the same name, type and shape that the
    /// program reads row-major, lie there; `source` is asked for the other weights.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn over(
        program: Arc<Compiled>,
        source: &dyn WeightSource,
        buffers: &Buffers,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        Session::start(program, source, buffers, None, progress)
    }

    /// A session of another program of the same model over the same memory, on the same device. Weights that both programs read
    /// alike lie in memory once, kernels that both have are built once; `source` is asked for the rest. Runs of the two take
    /// turns; each keeps its results until its own next run.
    ///
    /// # Errors
    /// As [`over`](Self::over).
    pub fn beside(
        &self,
        program: Arc<Compiled>,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        Session::start(program, source, &self.buffers, Some(self), progress)
    }

    fn start(
        program: Arc<Compiled>,
        source: &dyn WeightSource,
        buffers: &Buffers,
        beside: Option<&Session>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        if program.plan.has_collectives() {
            let line =
                "the program is one rank's of several, which can only be planned; compile it without a mesh";
            return Err(Error::Input(line.into()));
        }
        let device = buffers.device().clone();
        program.check_memory_beside(&*device, Some(buffers), beside.map(|b| &*b.program))?;
        let inputs = inputs(&program);
        let room = buffers.room(Compiled::room(&[&program])?);
        let Room { arena, workspace } = room.map_or_else(|| Room::of(&*device, &[&program]), Ok)?;
        let mut session = Session {
            origins: origins(&program, &inputs)?,
            inputs,
            arena,
            workspace,
            results: outcomes(&program),
            kernels: vec![],
            guarded: vec![],
            program,
            device,
            launches: vec![],
            weights: vec![],
            packed: vec![],
            owned: vec![],
            buffers: buffers.clone(),
            shared: vec![],
            profile: None,
            costed: (Sizes::new(), vec![]),
            poisoned: None,
            runs: 0,
            recordings: Recordings::default(),
            given: vec![],
            staged: vec![],
            result_memory: vec![],
            order: vec![],
            shapes: vec![],
            measured: false,
            sizes: Sizes::new(),
            dims: vec![],
            bound: vec![],
        };
        session.share_states()?;
        session.load_kernels()?;
        session.load_weights(source, beside, progress)?;
        session.bind()?;
        Ok(session)
    }

    fn load_kernels(&mut self) -> Result<(), Error> {
        let program = self.program.clone();
        let kernels: Vec<_> = program.kernels.iter().flatten().collect();
        let mut loaded = self.device.load(&kernels)?.into_iter();
        self.kernels = program.kernels.iter().map(|k| k.as_ref().and_then(|_| loaded.next())).collect();
        Ok(())
    }

    /// Keeps the buffers of the program's states.
    fn share_states(&mut self) -> Result<(), Error> {
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
    pub fn program(&self) -> &Compiled {
        &self.program
    }

    /// Whether a run failed and left behind what the next would read: none is begun any more.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.is_some()
    }

    /// The device that runs it.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
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
        let len = r.shape.iter().product::<usize>() * r.ty.dtype.bytes();
        match self.device.host(self.result_memory[r.at].at()) {
            // SAFETY: the session's own memory, that long, which only its runs write.
            Some(address) => unsafe { std::slice::from_raw_parts(address, len) },
            None => &r.copy,
        }
    }

    /// The same of the result of this name.
    pub fn result_of(&self, name: &str) -> Option<&[u8]> {
        self.results.iter().position(|r| r.name == name).map(|i| self.result(i))
    }

    /// Elements of the f32 result that the last run left at this place; they may be overwritten. `None` where there is none,
    /// or of another type.
    pub fn floats_mut(&mut self, i: usize) -> Option<&mut [f32]> {
        let r = self.results.get_mut(i).filter(|r| r.ty.dtype == DType::F32)?;
        let count = r.shape.iter().product::<usize>();
        let bytes = match self.device.host(self.result_memory[r.at].at()) {
            // SAFETY: the session's own memory, that long, borrowed mutably here.
            Some(address) => unsafe { std::slice::from_raw_parts_mut(address, count * size_of::<f32>()) },
            None => &mut r.copy,
        };
        // SAFETY: the bytes are initialised; every pattern of bits is an f32. What is not aligned is no result of a device's memory.
        let (_, all, _) = unsafe { bytes.align_to_mut::<f32>() };
        all.get_mut(..count)
    }

    /// Shape and elements of an f32 result of the last run, by its name.
    pub fn floats(&self, name: &str) -> Option<(&[usize], impl Iterator<Item = f32>)> {
        let i = self.results.iter().position(|r| r.name == name && r.ty.dtype == DType::F32)?;
        let bytes = self.result(i).as_chunks::<4>().0;
        Some((&self.results[i].shape, bytes.iter().map(|b| f32::from_le_bytes(*b))))
    }

    /// Makes room for `len` bytes at place `i` of a list of blocks.
    fn grow(
        &mut self,
        i: usize,
        len: usize,
        list: impl Fn(&mut Session) -> &mut Vec<Block>,
    ) -> Result<(), Error> {
        while list(self).len() <= i {
            let empty = self.alloc(0)?;
            list(self).push(empty);
        }
        if list(self)[i].len() < len {
            let fresh = self.alloc(len)?;
            list(self)[i] = fresh;
        }
        Ok(())
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

fn inputs(program: &Compiled) -> Vec<(String, Type)> {
    let named = program.graph.nodes().iter().filter(|n| matches!(n.op, Op::Input(_)));
    named.filter_map(|n| Some((n.op.leaf_name()?.to_string(), n.ty().clone()))).collect()
}

/// Outputs that are not next versions of states.
fn outcomes(program: &Compiled) -> Vec<Outcome> {
    let g = &program.graph;
    let outcome = |(at, (name, id)): (usize, &(String, astrai_ir::NodeId))| {
        (!is_version(g, *id)).then(|| Outcome {
            name: name.clone(),
            at,
            ty: g.ty(*id).clone(),
            shape: vec![],
            copy: vec![],
        })
    };
    g.outputs().iter().enumerate().filter_map(outcome).collect()
}
