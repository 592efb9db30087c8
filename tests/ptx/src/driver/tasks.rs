//! Work that waits in streams. In: what the program asks for, in its streams' orders. Out: the same work done in one of the
//! orders that streams and events allow, when something needs its result and no earlier.

use super::graph::Graph;
use super::machine::Machine;
use super::module::Prepared;
use super::{Answer, Code, code};
use crate::memory::Refused;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

/// A function of the program that a stream calls.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

#[derive(Clone)]
pub(crate) enum Work {
    Record(usize),
    Open(u64),
    Free(u64),
    /// Bytes that were copied when the call was made.
    Write(u64, Arc<Vec<u8>>),
    /// Host memory that is read when the copy runs: to, from, bytes.
    ToDevice(u64, usize, usize),
    ToHost(usize, u64, usize),
    Copy(u64, u64, usize),
    Fill(u64, Vec<u8>, usize),
    Launch(Arc<Prepared>),
    Graph(Arc<Graph>),
    Host(HostFunction, usize),
}

pub(crate) struct Task {
    pub device: usize,
    pub deps: Vec<u64>,
    pub work: Work,
}

/// Tasks that may wait before some must run, so that they do not fill memory.
const MOST: usize = 8192;

impl Machine {
    /// Adds work to a stream, or to the graph that it captures; the task's number where there is one.
    pub fn submit(&mut self, stream: usize, work: Work) -> Result<Option<u64>, Code> {
        let s = &self.streams[&stream];
        if let Some(c) = s.capture {
            self.capture_node(c, stream, work);
            return Ok(None);
        }
        let (device, blocking) = (s.device, s.blocking);
        let null = 0x10 + device;
        let mut deps: Vec<u64> = s.last.iter().chain(&s.waits).copied().collect();
        if stream == null {
            let others = self.streams.values().filter(|o| o.device == device && o.blocking);
            deps.extend(others.filter_map(|o| o.last));
        } else if blocking {
            deps.extend(self.streams.get(&null).and_then(|n| n.last));
        }
        deps.retain(|d| self.tasks.contains_key(d));
        let number = self.task_number();
        self.tasks.insert(number, Task { device, deps, work });
        if let Some(s) = self.streams.get_mut(&stream) {
            s.last = Some(number);
            s.waits.clear();
        }
        if self.tasks.len() > MOST {
            let first = self.tasks.keys().next().copied();
            self.drain(device, first.into_iter().collect())?;
        }
        Ok(Some(number))
    }

    /// Runs what a stream has asked for.
    pub fn finish(&mut self, stream: usize) -> Answer {
        let s = &self.streams[&stream];
        if let Some(c) = s.capture {
            return Err(self.spoil(c));
        }
        let (device, mut wanted) = (s.device, s.last.iter().chain(&s.waits).copied().collect::<Vec<_>>());
        if stream == 0x10 + device {
            wanted.extend(
                self.streams.values().filter(|o| o.device == device && o.blocking).filter_map(|o| o.last),
            );
        }
        self.drain(device, wanted)
    }

    /// Runs all of a device.
    pub fn finish_device(&mut self, device: usize) -> Answer {
        let all = self.tasks.iter().filter(|(_, t)| t.device == device).map(|(n, _)| *n).collect();
        self.drain(device, all)
    }

    fn ready(&self, n: u64) -> bool {
        self.tasks.get(&n).is_some_and(|t| !t.deps.iter().any(|d| self.tasks.contains_key(d)))
    }

    /// Runs tasks until these are done: mostly what they need, now and then something else that may run.
    pub fn drain(&mut self, device: usize, wanted: Vec<u64>) -> Answer {
        let mut needed = BTreeSet::new();
        let mut todo = wanted;
        while let Some(n) = todo.pop() {
            if let Some(t) = self.tasks.get(&n)
                && needed.insert(n)
            {
                todo.extend(&t.deps);
            }
        }
        loop {
            needed.retain(|n| self.tasks.contains_key(n));
            if needed.is_empty() || self.devices[device].sticky != 0 {
                break;
            }
            let astray = self.random(8) == 0;
            let pick = if astray {
                let any: Vec<u64> = self.tasks.keys().copied().filter(|n| self.ready(*n)).take(64).collect();
                any[self.random(any.len())]
            } else {
                let some: Vec<u64> = needed.iter().copied().filter(|n| self.ready(*n)).take(8).collect();
                some[self.random(some.len())]
            };
            if let Some(t) = self.tasks.remove(&pick) {
                self.perform(t.device, &t.work);
            }
        }
        match self.devices[device].sticky {
            0 => Ok(()),
            e => Err(e),
        }
    }

    /// Runs one ready task of a device, for programs that ask again and again whether something is done.
    pub fn advance(&mut self, device: usize) {
        let any: Vec<u64> =
            self.tasks.keys().copied().filter(|n| self.ready(*n) && self.tasks[n].device == device).collect();
        if any.is_empty() {
            return;
        }
        let pick = any[self.random(any.len())];
        if let Some(t) = self.tasks.remove(&pick) {
            self.perform(t.device, &t.work);
        }
    }

    /// Does a piece of work; what goes wrong stays with the device.
    pub fn perform(&mut self, device: usize, work: &Work) {
        let refused = |what: &str, (kind, said): Refused| {
            eprintln!("emulated CUDA: {what}: {said}");
            kind.code()
        };
        let memory = &mut self.devices[device].memory;
        let done = match work {
            Work::Record(e) => {
                if let Some(e) = self.events.get_mut(e) {
                    e.at = Some(Instant::now());
                }
                Ok(())
            }
            Work::Open(at) => {
                memory.open(*at);
                Ok(())
            }
            Work::Free(at) => {
                memory.free(*at);
                Ok(())
            }
            Work::Write(at, bytes) => {
                memory.write(*at, bytes).map_err(|e| refused("a copy to the device", e))
            }
            Work::ToDevice(at, from, n) => {
                // SAFETY: the program keeps the memory of an asynchronous copy until the copy is done.
                let bytes = unsafe { std::slice::from_raw_parts(*from as *const u8, *n) };
                memory.write(*at, bytes).map_err(|e| refused("a copy to the device", e))
            }
            Work::ToHost(to, at, n) => {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts_mut(*to as *mut u8, *n) };
                memory.read(*at, bytes).map_err(|e| refused("a copy to the host", e))
            }
            Work::Fill(at, pattern, n) => memory.fill(*at, pattern, *n).map_err(|e| refused("a fill", e)),
            Work::Copy(to, from, n) => self.copy(*to, *from, *n).map_err(|e| refused("a copy", e)),
            Work::Launch(p) => self.launch(device, p),
            Work::Graph(g) => {
                self.perform_graph(device, g);
                Ok(())
            }
            Work::Host(f, data) => {
                // SAFETY: the program gave the function for this.
                unsafe { f(*data as *mut c_void) };
                Ok(())
            }
        };
        if let Err(e) = done {
            self.fail(device, e);
        }
    }

    fn copy(&mut self, to: u64, from: u64, n: usize) -> Result<(), Refused> {
        let unknown = |c: Code| (crate::Kind::OutOfBounds, format!("error {c}: an address of no device"));
        let (a, b) = (self.owner(to).map_err(unknown)?, self.owner(from).map_err(unknown)?);
        if a == b {
            return self.devices[a].memory.copy(to, from, n);
        }
        let both = self.devices.get_disjoint_mut([a, b]);
        let Ok([d, s]) = both else { return Err(unknown(code::INVALID_DEVICE)) };
        d.memory.copy_from(to, &s.memory, from, n)
    }
}
