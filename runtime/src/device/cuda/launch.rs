//! Launches. In: a loaded kernel, buffers and sizes of a region. Out: its phases on the stream of kernels, all of them in every round; or,
//! while this thread records, in the graph that is recorded.
//!
//! A kernel's parameters are the pointers of the buffers read, those of the buffers written, the workspace's where the kernel has
//! one, the values of the symbols as 64-bit integers in their order, and the number of the round where there are several.

use super::driver::{Driver, Launched, lock};
use crate::Error;
use crate::device::{Executable, Launch, Recording};
use astrai_ir::Dim;
use cudarc::driver::sys::{
    CUevent_flags, CUevent_record_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
    cuEventRecordWithFlags,
};
use cudarc::driver::{CudaEvent, CudaFunction, CudaGraph, CudaStream, LaunchConfig, PushKernelArg, result};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// A kernel on the device, without its text.
pub(super) struct Loaded {
    pub(super) driver: Arc<Driver>,
    pub(super) name: Arc<str>,
    pub(super) phases: Vec<Phase>,
    /// Bytes between its phases.
    pub(super) workspace: Dim,
    pub(super) rounds: Dim,
}

/// A phase of a kernel: its function, how many blocks, threads of one, and bytes that they share.
pub(super) struct Phase {
    pub(super) function: CudaFunction,
    pub(super) blocks: Dim,
    pub(super) block: u32,
    pub(super) shared: Dim,
}

/// What this thread records.
struct Capture {
    driver: Arc<Driver>,
    stream: Arc<CudaStream>,
    launches: u64,
    /// The first and the last.
    ends: Option<(Launched, Launched)>,
    /// Two before the first launch and one behind each, where they are timed.
    marks: Option<Vec<CudaEvent>>,
}

impl Capture {
    /// Keeps the time at which a replay comes here, as a node of the graph.
    fn mark(&mut self) -> Result<(), Error> {
        let Some(marks) = &mut self.marks else { return Ok(()) };
        let event = self.driver.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let event = self.driver.check("making an event", event)?;
        let flags = CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: event and stream are alive, and the stream records.
        let marked = unsafe { cuEventRecordWithFlags(event.cu_event(), self.stream.cu_stream(), flags) };
        marks.push(event);
        self.driver.check("recording", marked.result())
    }
}

thread_local! {
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

impl Executable for Loaded {
    fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let size = |name: &str| launch.size(name);
        let value = |d: &Dim| d.eval(&size).map_err(Error::Input);
        let (needs, rounds) = (value(&self.workspace)?, value(&self.rounds)?);
        let (name, room) = (&self.name, launch.workspace.len());
        if needs > room as u64 {
            let line = format!("kernel {name} wants {needs} bytes of workspace, planned were {room}");
            return Err(Error::Input(line));
        }
        let mut args: Vec<u64> = launch.buffers.iter().map(|at| at.0).collect();
        if self.workspace != Dim::from(0) {
            args.push(launch.workspace.at().0);
        }
        args.extend(launch.sizes.iter().map(|n| *n as u64));
        let counted = !self.rounds.is_one();
        args.extend(counted.then_some(0));
        let mut grids = Vec::with_capacity(self.phases.len());
        for phase in &self.phases {
            let blocks = value(&phase.blocks)?;
            let grid = u32::try_from(blocks).ok().filter(|n| i32::try_from(*n).is_ok());
            let grid = grid.ok_or_else(|| Error::Input(format!("kernel {name} wants {blocks} blocks")))?;
            let shared_mem_bytes = value(&phase.shared)? as u32;
            let (grid_dim, block_dim) = ((grid, 1, 1), (phase.block, 1, 1));
            grids.push(LaunchConfig { grid_dim, block_dim, shared_mem_bytes });
        }
        CAPTURE.with_borrow_mut(|capture| {
            let mut recording = capture.as_mut().filter(|c| Arc::ptr_eq(&c.driver, &self.driver));
            let stream = match &recording {
                Some(c) => c.stream.clone(),
                None => {
                    self.driver.enter()?;
                    self.driver.compute.clone()
                }
            };
            match &mut recording {
                Some(c) => {
                    c.launches += 1;
                    let named = (self.name.clone(), launch.origin.clone());
                    let first = c.ends.take().map_or_else(|| named.clone(), |(first, _)| first);
                    c.ends = Some((first, named));
                }
                None => {
                    let named = (self.name.clone(), launch.origin.clone());
                    self.driver.launched(&named, &named, 1);
                }
            }
            for round in 0..rounds {
                if let Some(last) = args.last_mut().filter(|_| counted) {
                    *last = round;
                }
                for (phase, grid) in self.phases.iter().zip(&grids).filter(|(_, g)| g.grid_dim.0 > 0) {
                    let mut call = stream.launch_builder(&phase.function);
                    args.iter().for_each(|a| _ = call.arg(a));
                    // SAFETY: the parameters are those that the emitter declares, in its order; buffers are as large as the region's
                    // types at these sizes (checked bounds of the plan).
                    if let Err(e) = unsafe { call.launch(*grid) } {
                        let doing = format!("launching kernel {name} of `{}`", launch.origin);
                        return self.driver.check(&doing, Err(e));
                    }
                }
            }
            recording.map_or(Ok(()), Capture::mark)
        })
    }
}

/// Launches as a graph of the driver's.
struct Graph {
    driver: Arc<Driver>,
    /// The driver wants one thread at a time.
    graph: Mutex<CudaGraph>,
    launches: u64,
    /// Kernels and origins of the first and the last.
    ends: (Launched, Launched),
    /// Events of the graph: two before the first launch and one behind each, where they are timed.
    marks: Vec<CudaEvent>,
}

// SAFETY: the driver's handles may be used from any thread, one at a time, which the lock sees to.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Recording for Graph {
    fn replay(&self, _sizes: &[i64]) -> Result<(), Error> {
        self.driver.enter()?;
        self.driver.launched(&self.ends.0, &self.ends.1, self.launches);
        let graph = lock(&self.graph);
        // SAFETY: the graph is alive; what it was recorded on is not needed any more.
        let launched =
            unsafe { result::graph::launch(graph.cu_graph_exec(), self.driver.compute.cu_stream()) };
        self.driver.check("launching a graph", launched)
    }

    fn seconds(&self) -> Result<Vec<f64>, Error> {
        let between = |ends: &[CudaEvent]| {
            let ms = self.driver.check("asking for the time of a launch", ends[0].elapsed_ms(&ends[1]))?;
            Ok(f64::from(ms) * 1e-3)
        };
        let all: Result<Vec<f64>, Error> = self.marks.windows(2).map(between).collect();
        // Between the first two there is nothing but keeping the time itself.
        let all = all?;
        let Some((nothing, launches)) = all.split_first() else { return Ok(vec![]) };
        Ok(launches.iter().map(|seconds| (seconds - nothing).max(0.0)).collect())
    }
}

/// This thread records as long as this lives and no longer, also where what it records panics.
struct Capturing(Arc<CudaStream>);

impl Drop for Capturing {
    fn drop(&mut self) {
        if CAPTURE.with_borrow_mut(Option::take).is_some() {
            // Nobody wants what was recorded, nor an error of it.
            let _unwanted = self.0.end_capture(CUgraphInstantiate_flags(0));
        }
    }
}

/// The first driver whose answer of the time between two events is the one asked for.
const TIMES: i32 = 12_080;

/// Records what `launches` launches from this thread. A stream that does nothing else takes them, so that other threads may go on. `None` for
/// what is to be timed by an older driver.
pub(super) fn record(
    driver: &Arc<Driver>,
    launches: &mut dyn FnMut() -> Result<(), Error>,
    timed: bool,
) -> Result<Option<Box<dyn Recording>>, Error> {
    driver.enter()?;
    if timed && driver.version()? < TIMES {
        return Ok(None);
    }
    let idle = lock(&driver.recorders).pop();
    let stream = idle.map_or_else(|| driver.context.new_stream(), Ok);
    let stream = driver.check("making a stream", stream)?;
    let begun = stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    driver.check("recording", begun)?;
    let marks = timed.then(Vec::new);
    let capture = Capture { driver: driver.clone(), stream: stream.clone(), launches: 0, ends: None, marks };
    CAPTURE.with_borrow_mut(|c| *c = Some(capture));
    let _capturing = Capturing(stream.clone());
    let mark = || CAPTURE.with_borrow_mut(|c| c.as_mut().map_or(Ok(()), Capture::mark));
    let done = mark().and_then(|()| mark()).and_then(|()| launches());
    let capture = CAPTURE.with_borrow_mut(Option::take);
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    done?;
    let graph = driver.check("recording", graph)?;
    lock(&driver.recorders).push(stream);
    let (launches, ends, marks) = capture.map_or((0, None, None), |c| (c.launches, c.ends, c.marks));
    Ok(graph.zip(ends).map(|(graph, ends)| {
        let (graph, marks) = (Mutex::new(graph), marks.unwrap_or_default());
        Box::new(Graph { driver: driver.clone(), graph, launches, ends, marks }) as Box<dyn Recording>
    }))
}
