//! Graphs: work that streams capture instead of doing it, launched later as a whole.

use super::machine::Machine;
use super::tasks::Work;
use super::{Answer, Code, Handle, api, code, put};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Clone)]
pub(crate) struct Node {
    work: Work,
    deps: Vec<usize>,
}

pub(crate) struct Graph {
    nodes: Vec<Node>,
}

pub(crate) struct Capture {
    origin: usize,
    nodes: Vec<Node>,
    /// The last nodes of each stream that takes part.
    tails: HashMap<usize, Vec<usize>>,
    /// 2 allows calls that may wait.
    mode: u32,
    spoiled: bool,
}

impl Machine {
    pub fn capture_node(&mut self, capture: usize, stream: usize, work: Work) {
        let Some(c) = self.captures.get_mut(&capture) else { return };
        let deps = c.tails.remove(&stream).unwrap_or_default();
        c.nodes.push(Node { work, deps });
        c.tails.insert(stream, vec![c.nodes.len() - 1]);
    }

    /// A call that no capture survives.
    pub fn spoil(&mut self, capture: usize) -> Code {
        if let Some(c) = self.captures.get_mut(&capture) {
            c.spoiled = true;
        }
        code::CAPTURE_UNSUPPORTED
    }

    /// Refuses a call that may wait for the device while something is captured.
    pub fn uncaptured(&mut self) -> Answer {
        let strict = self.captures.iter_mut().find(|(_, c)| c.mode != 2);
        match strict {
            Some((_, c)) => {
                c.spoiled = true;
                Err(code::CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// The nodes that an event recorded in this stream stands for.
    pub fn captured_at(&self, capture: usize, stream: usize) -> Vec<usize> {
        self.captures.get(&capture).and_then(|c| c.tails.get(&stream)).cloned().unwrap_or_default()
    }

    /// A stream waits for nodes of a capture, and takes part in it from now on.
    pub fn join_capture(&mut self, capture: usize, stream: usize, nodes: &[usize]) -> Answer {
        let c = self.captures.get_mut(&capture).ok_or(code::CAPTURE_INVALIDATED)?;
        let tail = c.tails.entry(stream).or_default();
        tail.extend(nodes.iter().filter(|n| !tail.contains(n)).copied().collect::<Vec<_>>());
        if let Some(s) = self.streams.get_mut(&stream) {
            s.capture = Some(capture);
        }
        Ok(())
    }

    fn end_capture(&mut self, stream: usize) -> Result<Graph, Code> {
        let id = self.streams[&stream].capture.ok_or(code::INVALID_VALUE)?;
        let origin = self.captures.get(&id).map(|c| c.origin);
        if origin != Some(stream) {
            return Err(code::CAPTURE_UNMATCHED);
        }
        let c = self.captures.remove(&id).ok_or(code::CAPTURE_INVALIDATED)?;
        self.streams.values_mut().filter(|s| s.capture == Some(id)).for_each(|s| s.capture = None);
        if c.spoiled {
            return Err(code::CAPTURE_INVALIDATED);
        }
        // Everything must lead to the stream in which the capture began.
        let mut joined = vec![false; c.nodes.len()];
        let mut todo = c.tails.get(&stream).cloned().unwrap_or_default();
        while let Some(n) = todo.pop() {
            if !std::mem::replace(&mut joined[n], true) {
                todo.extend(&c.nodes[n].deps);
            }
        }
        if joined.contains(&false) {
            return Err(code::CAPTURE_UNJOINED);
        }
        Ok(Graph { nodes: c.nodes })
    }

    /// Runs a graph's nodes in an order that its edges allow.
    pub fn perform_graph(&mut self, device: usize, g: &Graph) {
        let mut done = vec![false; g.nodes.len()];
        for _ in 0..g.nodes.len() {
            let ready: Vec<usize> = (0..done.len())
                .filter(|n| !done[*n] && g.nodes[*n].deps.iter().all(|d| done[*d]))
                .take(8)
                .collect();
            let n = ready[self.random(ready.len())];
            done[n] = true;
            self.perform(device, &g.nodes[n].work);
            if self.devices[device].sticky != 0 {
                return;
            }
        }
    }

    fn graph(&self, g: Handle) -> Result<Arc<Graph>, Code> {
        self.graphs.get(&(g as usize)).cloned().ok_or(code::INVALID_HANDLE)
    }
}

api! {
    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32) |m| {
        let s = m.stream(stream as usize)?;
        // The default stream cannot be captured.
        if s <= 0xff {
            return Err(code::CAPTURE_UNSUPPORTED);
        }
        if m.streams[&s].capture.is_some() {
            return Err(code::INVALID_VALUE);
        }
        let id = m.handle();
        let tails = HashMap::from([(s, vec![])]);
        m.captures.insert(id, Capture { origin: s, nodes: vec![], tails, mode, spoiled: false });
        if let Some(s) = m.streams.get_mut(&s) {
            s.capture = Some(id);
        }
        Ok(())
    }

    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) |m| {
        let s = m.stream(stream as usize)?;
        let g = m.end_capture(s)?;
        let h = m.handle();
        m.graphs.insert(h, Arc::new(g));
        put(graph, h as Handle)
    }

    fn cuStreamIsCapturing(stream: Handle, status: *mut u32) |m| {
        let s = m.stream(stream as usize)?;
        let c = m.streams[&s].capture.and_then(|c| m.captures.get(&c));
        put(status, c.map_or(0, |c| 1 + u32::from(c.spoiled)))
    }

    fn cuGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, flags: u64) |m| {
        m.working()?;
        let g = m.graph(graph)?;
        let h = m.handle();
        m.graphs.insert(h, g);
        put(exec, h as Handle)
    }

    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) |m| {
        let g = m.graph(graph)?;
        if count.is_null() {
            return Err(code::INVALID_VALUE);
        }
        if !nodes.is_null() {
            // SAFETY: the count says how many places there are.
            let places = unsafe { *count };
            (0..places.min(g.nodes.len())).for_each(|n| {
                // SAFETY: as above.
                unsafe { nodes.add(n).write((n + 1) as Handle) };
            });
        }
        put(count, g.nodes.len())
    }

    fn cuGraphExecUpdate_v2(exec: Handle, graph: Handle, info: Handle) |m| {
        m.working()?;
        let g = m.graph(graph)?;
        let shape = |g: &Graph| g.nodes.iter().map(|n| (std::mem::discriminant(&n.work), n.deps.clone())).collect::<Vec<_>>();
        if shape(&*m.graph(exec)?) != shape(&g) {
            return Err(910);
        }
        m.graphs.insert(exec as usize, g);
        Ok(())
    }

    fn cuGraphLaunch(exec: Handle, stream: Handle) |m| {
        let s = m.stream(stream as usize)?;
        let g = m.graph(exec)?;
        m.submit(s, Work::Graph(g)).map(|_| ())
    }

    fn cuGraphUpload(exec: Handle, stream: Handle) |m| {
        m.stream(stream as usize)?;
        m.graph(exec).map(|_| ())
    }

    fn cuGraphExecDestroy(exec: Handle) |m| {
        m.graphs.remove(&(exec as usize)).map(|_| ()).ok_or(code::INVALID_HANDLE)
    }

    fn cuGraphDestroy(graph: Handle) |m| {
        m.graphs.remove(&(graph as usize)).map(|_| ()).ok_or(code::INVALID_HANDLE)
    }
}
