//! Streams and events.

use super::machine::{Event, Stream};
use super::tasks::{HostFunction, Work};
use super::{Handle, api, code, put};

const NON_BLOCKING: u32 = 1;
const EXTERNAL: u32 = 1;

api! {
    fn cuStreamCreate(stream: *mut Handle, flags: u32) |m| {
        let device = m.working()?;
        let h = m.handle();
        let blocking = flags & NON_BLOCKING == 0;
        m.streams.insert(h, Stream { device, blocking, last: None, waits: vec![], capture: None, priority: 0 });
        put(stream, h as Handle)
    }

    fn cuStreamCreateWithPriority(stream: *mut Handle, flags: u32, priority: i32) |m| {
        let device = m.working()?;
        let h = m.handle();
        let blocking = flags & NON_BLOCKING == 0;
        m.streams.insert(h, Stream { device, blocking, last: None, waits: vec![], capture: None, priority });
        put(stream, h as Handle)
    }

    fn cuStreamGetPriority(stream: Handle, priority: *mut i32) |m| {
        let s = m.stream(stream as usize)?;
        put(priority, m.streams[&s].priority)
    }

    // What the stream was asked for still runs.
    fn cuStreamDestroy_v2(stream: Handle) |m| {
        m.streams.remove(&(stream as usize)).map(|_| ()).ok_or(code::INVALID_HANDLE)
    }

    fn cuStreamSynchronize(stream: Handle) |m| {
        let s = m.stream(stream as usize)?;
        m.finish(s)
    }

    fn cuStreamQuery(stream: Handle) |m| {
        let s = m.stream(stream as usize)?;
        let st = &m.streams[&s];
        if let Some(c) = st.capture {
            return Err(m.spoil(c));
        }
        let (device, last) = (st.device, st.last);
        if last.is_none_or(|l| !m.tasks.contains_key(&l)) {
            return Ok(());
        }
        m.advance(device);
        match m.devices[device].sticky {
            0 => Err(code::NOT_READY),
            e => Err(e),
        }
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) |m| {
        let s = m.stream(stream as usize)?;
        let e = m.events.get(&(event as usize)).ok_or(code::INVALID_HANDLE)?;
        if let Some((c, nodes)) = e.captured.clone() {
            return m.join_capture(c, s, &nodes);
        }
        let task = e.task;
        // An event of before the capture is no part of the graph.
        if m.streams[&s].capture.is_some() {
            return Err(code::CAPTURE_UNSUPPORTED + 5);
        }
        if let Some(s) = m.streams.get_mut(&s) {
            s.waits.extend(task);
        }
        Ok(())
    }

    fn cuLaunchHostFunc(stream: Handle, f: Option<HostFunction>, data: Handle) |m| {
        let s = m.stream(stream as usize)?;
        let f = f.ok_or(code::INVALID_VALUE)?;
        m.submit(s, Work::Host(f, data as usize)).map(|_| ())
    }

    fn cuEventCreate(event: *mut Handle, flags: u32) |m| {
        m.working()?;
        let h = m.handle();
        m.events.insert(h, Event::default());
        put(event, h as Handle)
    }

    fn cuEventDestroy_v2(event: Handle) |m| {
        m.events.remove(&(event as usize)).map(|_| ()).ok_or(code::INVALID_HANDLE)
    }

    fn cuEventRecord(event: Handle, stream: Handle) |m| {
        let s = m.stream(stream as usize)?;
        let h = event as usize;
        if !m.events.contains_key(&h) {
            return Err(code::INVALID_HANDLE);
        }
        let capture = m.streams[&s].capture;
        let captured = capture.map(|c| (c, m.captured_at(c, s)));
        let task = if captured.is_none() { m.submit(s, Work::Record(h))? } else { None };
        m.events.insert(h, Event { task, at: None, recorded: true, captured });
        Ok(())
    }

    // External: a node of the graph that is captured, which keeps the time whenever the graph is launched.
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: u32) |m| {
        let s = m.stream(stream as usize)?;
        let h = event as usize;
        if !m.events.contains_key(&h) {
            return Err(code::INVALID_HANDLE);
        }
        if flags != EXTERNAL || m.streams[&s].capture.is_none() {
            return Err(code::INVALID_VALUE);
        }
        m.submit(s, Work::Record(h))?;
        m.events.insert(h, Event { recorded: true, ..Event::default() });
        Ok(())
    }

    fn cuEventSynchronize(event: Handle) |m| {
        let device = m.working()?;
        let e = m.events.get(&(event as usize)).ok_or(code::INVALID_HANDLE)?;
        if e.captured.is_some() {
            return Err(code::CAPTURE_UNSUPPORTED + 7);
        }
        let task = e.task;
        m.drain(device, task.into_iter().collect())
    }

    fn cuEventQuery(event: Handle) |m| {
        let device = m.working()?;
        let e = m.events.get(&(event as usize)).ok_or(code::INVALID_HANDLE)?;
        if e.task.is_none_or(|t| !m.tasks.contains_key(&t)) {
            return Ok(());
        }
        m.advance(device);
        match m.devices[device].sticky {
            0 => Err(code::NOT_READY),
            e => Err(e),
        }
    }

    fn cuEventElapsedTime_v2(ms: *mut f32, from: Handle, to: Handle) |m| {
        m.working()?;
        elapsed(m, ms, from, to)
    }

    fn cuEventElapsedTime(ms: *mut f32, from: Handle, to: Handle) |m| {
        m.working()?;
        elapsed(m, ms, from, to)
    }
}

fn elapsed(m: &super::machine::Machine, ms: *mut f32, from: Handle, to: Handle) -> super::Answer {
    let find = |h: Handle| m.events.get(&(h as usize)).filter(|e| e.recorded).ok_or(code::INVALID_HANDLE);
    let (a, b) = (find(from)?.at.ok_or(code::NOT_READY)?, find(to)?.at.ok_or(code::NOT_READY)?);
    // Orders of streams are arbitrary: the second may have come first.
    let s = if b >= a { (b - a).as_secs_f32() } else { -(a - b).as_secs_f32() };
    put(ms, s * 1e3)
}
