//! Memory: allocations, pools, copies, fills.

use super::machine::Machine;
use super::tasks::Work;
use super::{Answer, Code, Handle, api, code, put};
use std::sync::Arc;

impl Machine {
    fn allocate(&mut self, device: usize, n: usize) -> Result<u64, Code> {
        if n == 0 {
            return Err(code::INVALID_VALUE);
        }
        let first = self.devices[device].memory.reserve(n as u64);
        let at = match first {
            Some(at) => at,
            None => {
                // What is freed in a stream is free once the stream comes to it.
                self.finish_device(device)?;
                self.devices[device].memory.reserve(n as u64).ok_or(code::OUT_OF_MEMORY)?
            }
        };
        let (free, all) = self.devices[device].memory.info();
        let d = &mut self.devices[device];
        d.peak = d.peak.max(all - free);
        Ok(at)
    }

    fn allocate_in(&mut self, place: *mut u64, n: usize, stream: Handle) -> Answer {
        let s = self.stream(stream as usize)?;
        let device = self.streams[&s].device;
        let at = self.allocate(device, n)?;
        self.submit(s, Work::Open(at))?;
        put(place, at)
    }

    /// The whole range is in one allocation.
    fn inside(&self, at: u64, n: usize) -> Answer {
        let d = self.owner(at)?;
        let (base, len) = self.devices[d].memory.around(at).ok_or(code::INVALID_VALUE)?;
        if at + n as u64 > base + len { Err(code::INVALID_VALUE) } else { Ok(()) }
    }

    fn copy_in(&mut self, at: u64, from: *const u8, n: usize, stream: Handle, wait: bool) -> Answer {
        let s = self.stream(stream as usize)?;
        self.inside(at, n)?;
        if from.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let capturing = self.streams[&s].capture.is_some();
        let work = if capturing || !wait && self.is_pinned(from as usize, n) {
            Work::ToDevice(at, from as usize, n)
        } else {
            // SAFETY: the program says that so many bytes are there.
            Work::Write(at, Arc::new(unsafe { std::slice::from_raw_parts(from, n) }.to_vec()))
        };
        self.submit(s, work)?;
        if wait { self.finish(s) } else { Ok(()) }
    }

    fn copy_out(&mut self, to: *mut u8, at: u64, n: usize, stream: Handle, wait: bool) -> Answer {
        let s = self.stream(stream as usize)?;
        self.inside(at, n)?;
        if to.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let device = self.streams[&s].device;
        self.devices[device].to_host += n as u64;
        let late = self.streams[&s].capture.is_some() || self.is_pinned(to as usize, n);
        self.submit(s, Work::ToHost(to as usize, at, n))?;
        if wait || !late { self.finish(s) } else { Ok(()) }
    }

    fn between(&mut self, to: u64, from: u64, n: usize, stream: Handle, wait: bool) -> Answer {
        let s = self.stream(stream as usize)?;
        self.inside(to, n)?;
        self.inside(from, n)?;
        self.submit(s, Work::Copy(to, from, n))?;
        if wait { self.finish(s) } else { Ok(()) }
    }

    fn fill(&mut self, at: u64, pattern: &[u8], n: usize, stream: Handle) -> Answer {
        let s = self.stream(stream as usize)?;
        if !at.is_multiple_of(pattern.len() as u64) {
            return Err(code::INVALID_VALUE);
        }
        self.inside(at, n.saturating_mul(pattern.len()))?;
        self.submit(s, Work::Fill(at, pattern.to_vec(), n)).map(|_| ())
    }

    fn pin(&mut self, at: usize, n: usize, ours: bool) -> Answer {
        self.pinned.insert(at, (n, ours));
        Ok(())
    }

    fn host(&mut self, place: *mut Handle, n: usize) -> Answer {
        self.working()?;
        if n == 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut p = std::ptr::null_mut();
        // SAFETY: a fresh allocation, aligned to a page as the driver's are.
        if unsafe { libc::posix_memalign(&mut p, 4096, n) } != 0 {
            return Err(code::OUT_OF_MEMORY);
        }
        // SAFETY: as many bytes were allocated.
        unsafe { std::ptr::write_bytes(p.cast::<u8>(), 0xA5, n) };
        self.pin(p as usize, n, true)?;
        put(place, p)
    }

    fn pool(&self, device: i32, place: *mut Handle) -> Answer {
        let d = self.device(device)?;
        put(place, (0x900 + d) as Handle)
    }

    fn of_pool(&self, pool: Handle) -> Result<usize, Code> {
        (pool as usize).checked_sub(0x900).filter(|d| *d < self.devices.len()).ok_or(code::INVALID_HANDLE)
    }
}

/// Bytes that the device of this number has copied to the host: a symbol of this library alone.
#[unsafe(no_mangle)]
pub extern "C" fn astrai_ptx_bytes_to_host(device: usize) -> u64 {
    super::machine().as_ref().and_then(|m| m.devices.get(device)).map_or(0, |d| d.to_host)
}

api! {
    fn cuMemAlloc_v2(place: *mut u64, n: usize) |m| {
        let d = m.working()?;
        m.uncaptured()?;
        let at = m.allocate(d, n)?;
        m.devices[d].memory.open(at);
        put(place, at)
    }

    fn cuMemFree_v2(at: u64) |m| {
        m.working()?;
        m.uncaptured()?;
        if at == 0 {
            return Ok(());
        }
        let d = m.owner(at)?;
        // The driver waits for the device before it takes memory away.
        m.finish_device(d)?;
        if m.devices[d].memory.free(at) { Ok(()) } else { Err(code::INVALID_VALUE) }
    }

    fn cuMemAllocAsync(place: *mut u64, n: usize, stream: Handle) |m| { m.allocate_in(place, n, stream) }

    fn cuMemAllocFromPoolAsync(place: *mut u64, n: usize, pool: Handle, stream: Handle) |m| {
        m.of_pool(pool)?;
        m.allocate_in(place, n, stream)
    }

    fn cuMemFreeAsync(at: u64, stream: Handle) |m| {
        let s = m.stream(stream as usize)?;
        let d = m.owner(at)?;
        if m.devices[d].memory.around(at).is_none_or(|(base, _)| base != at) {
            return Err(code::INVALID_VALUE);
        }
        m.submit(s, Work::Free(at)).map(|_| ())
    }

    fn cuMemAllocManaged(place: *mut u64, n: usize, flags: u32) |m| { Err(code::NOT_SUPPORTED) }

    fn cuMemGetInfo_v2(free: *mut usize, all: *mut usize) |m| {
        let d = m.working()?;
        let (f, a) = m.devices[d].memory.info();
        put(free, f as usize)?;
        put(all, a as usize)
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, n: *mut usize, at: u64) |m| {
        let d = m.owner(at)?;
        let (b, len) = m.devices[d].memory.around(at).ok_or(code::INVALID_VALUE)?;
        if !base.is_null() {
            put(base, b)?;
        }
        if n.is_null() { Ok(()) } else { put(n, len as usize) }
    }

    fn cuMemHostAlloc(place: *mut Handle, n: usize, flags: u32) |m| { m.host(place, n) }
    fn cuMemAllocHost_v2(place: *mut Handle, n: usize) |m| { m.host(place, n) }

    fn cuMemFreeHost(p: Handle) |m| {
        match m.pinned.get(&(p as usize)) {
            Some((_, true)) => {}
            _ => return Err(code::INVALID_VALUE),
        }
        // Copies that are under way need it still.
        (0..m.devices.len()).try_for_each(|d| if m.devices[d].sticky == 0 { m.finish_device(d) } else { Ok(()) }).ok();
        m.pinned.remove(&(p as usize));
        // SAFETY: allocated by `host`, freed once.
        unsafe { libc::free(p) };
        Ok(())
    }

    fn cuMemHostRegister_v2(p: Handle, n: usize, flags: u32) |m| {
        m.working()?;
        if m.is_pinned(p as usize, 1) {
            return Err(712);
        }
        m.pin(p as usize, n, false)
    }

    fn cuMemHostUnregister(p: Handle) |m| {
        match m.pinned.get(&(p as usize)) {
            Some((_, false)) => {}
            _ => return Err(713),
        }
        (0..m.devices.len()).try_for_each(|d| if m.devices[d].sticky == 0 { m.finish_device(d) } else { Ok(()) }).ok();
        m.pinned.remove(&(p as usize));
        Ok(())
    }

    fn cuMemcpyHtoD_v2(at: u64, from: *const u8, n: usize) |m| {
        m.uncaptured()?;
        m.copy_in(at, from, n, std::ptr::null_mut(), true)
    }
    fn cuMemcpyHtoDAsync_v2(at: u64, from: *const u8, n: usize, stream: Handle) |m| {
        m.copy_in(at, from, n, stream, false)
    }
    fn cuMemcpyDtoH_v2(to: *mut u8, at: u64, n: usize) |m| {
        m.uncaptured()?;
        m.copy_out(to, at, n, std::ptr::null_mut(), true)
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut u8, at: u64, n: usize, stream: Handle) |m| {
        m.copy_out(to, at, n, stream, false)
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, n: usize) |m| {
        m.uncaptured()?;
        m.between(to, from, n, std::ptr::null_mut(), false)
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, n: usize, stream: Handle) |m| {
        m.between(to, from, n, stream, false)
    }
    fn cuMemcpyPeerAsync(to: u64, c: Handle, from: u64, d: Handle, n: usize, stream: Handle) |m| {
        m.between(to, from, n, stream, false)
    }

    fn cuMemsetD8_v2(at: u64, v: u8, n: usize) |m| { m.fill(at, &[v], n, std::ptr::null_mut()) }
    fn cuMemsetD16_v2(at: u64, v: u16, n: usize) |m| { m.fill(at, &v.to_le_bytes(), n, std::ptr::null_mut()) }
    fn cuMemsetD32_v2(at: u64, v: u32, n: usize) |m| { m.fill(at, &v.to_le_bytes(), n, std::ptr::null_mut()) }
    fn cuMemsetD8Async(at: u64, v: u8, n: usize, stream: Handle) |m| { m.fill(at, &[v], n, stream) }
    fn cuMemsetD16Async(at: u64, v: u16, n: usize, stream: Handle) |m| { m.fill(at, &v.to_le_bytes(), n, stream) }
    fn cuMemsetD32Async(at: u64, v: u32, n: usize, stream: Handle) |m| { m.fill(at, &v.to_le_bytes(), n, stream) }

    fn cuDeviceGetDefaultMemPool(pool: *mut Handle, device: i32) |m| { m.pool(device, pool) }
    fn cuDeviceGetMemPool(pool: *mut Handle, device: i32) |m| { m.pool(device, pool) }
    fn cuDeviceSetMemPool(device: i32, pool: Handle) |m| { m.of_pool(pool).map(|_| ()) }

    fn cuMemPoolTrimTo(pool: Handle, keep: usize) |m| { m.of_pool(pool).map(|_| ()) }

    fn cuMemPoolSetAttribute(pool: Handle, attribute: u32, value: *mut u64) |m| {
        let d = m.of_pool(pool)?;
        if value.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: a threshold or a high mark has 64 bits, a permission 32.
        match attribute {
            1..=3 => {}
            4 => m.devices[d].threshold = unsafe { *value },
            6 | 8 => m.devices[d].peak = 0,
            _ => return Err(code::INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: Handle, attribute: u32, value: *mut u64) |m| {
        let d = m.of_pool(pool)?;
        let (free, all) = m.devices[d].memory.info();
        match attribute {
            1..=3 => put(value.cast::<i32>(), 1),
            4 => put(value, m.devices[d].threshold),
            5 | 7 => put(value, all - free),
            6 | 8 => put(value, m.devices[d].peak),
            _ => Err(code::INVALID_VALUE),
        }
    }

    // Memory type of an address: 2 for the device, 1 for pinned memory; its device.
    fn cuPointerGetAttribute(value: *mut i32, attribute: u32, at: u64) |m| {
        let owner = m.owner(at).ok().filter(|d| m.devices[*d].memory.around(at).is_some());
        match (attribute, owner) {
            (2, Some(_)) => put(value, 2),
            (2, None) if m.is_pinned(at as usize, 1) => put(value, 1),
            (9, Some(d)) => put(value, d as i32),
            _ => Err(code::INVALID_VALUE),
        }
    }
}
