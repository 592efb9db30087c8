//! Devices, contexts, errors.

use super::{Handle, api, code, current, put, set_current};
use std::ffi::c_char;

/// Names of errors with what they mean.
const ERRORS: [(u32, &str, &str); 30] = [
    (0, "CUDA_SUCCESS\0", "no error\0"),
    (1, "CUDA_ERROR_INVALID_VALUE\0", "invalid argument\0"),
    (2, "CUDA_ERROR_OUT_OF_MEMORY\0", "out of memory\0"),
    (3, "CUDA_ERROR_NOT_INITIALIZED\0", "initialization error\0"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE\0", "CUDA-capable device(s) is/are busy or unavailable\0"),
    (100, "CUDA_ERROR_NO_DEVICE\0", "no CUDA-capable device is detected\0"),
    (101, "CUDA_ERROR_INVALID_DEVICE\0", "invalid device ordinal\0"),
    (201, "CUDA_ERROR_INVALID_CONTEXT\0", "invalid device context\0"),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU\0", "no kernel image is available for execution on the device\0"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE\0", "uncorrectable ECC error encountered\0"),
    (218, "CUDA_ERROR_INVALID_PTX\0", "a PTX JIT compilation failed\0"),
    (
        222,
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION\0",
        "the provided PTX was compiled with an unsupported toolchain.\0",
    ),
    (400, "CUDA_ERROR_INVALID_HANDLE\0", "invalid resource handle\0"),
    (500, "CUDA_ERROR_NOT_FOUND\0", "named symbol not found\0"),
    (600, "CUDA_ERROR_NOT_READY\0", "device not ready\0"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS\0", "an illegal memory access was encountered\0"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES\0", "too many resources requested for launch\0"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT\0", "the launch timed out and was terminated\0"),
    (710, "CUDA_ERROR_ASSERT\0", "device-side assert triggered\0"),
    (
        712,
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED\0",
        "part or all of the requested memory range is already mapped\0",
    ),
    (
        713,
        "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED\0",
        "pointer does not correspond to a registered memory region\0",
    ),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION\0", "an illegal instruction was encountered\0"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS\0", "misaligned address\0"),
    (719, "CUDA_ERROR_LAUNCH_FAILED\0", "unspecified launch failure\0"),
    (801, "CUDA_ERROR_NOT_SUPPORTED\0", "operation not supported\0"),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED\0", "operation not permitted when stream is capturing\0"),
    (
        901,
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED\0",
        "operation failed due to a previous error during capture\0",
    ),
    (903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED\0", "capture was not initiated in this stream\0"),
    (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED\0", "capturing stream has unjoined work\0"),
    (999, "CUDA_ERROR_UNKNOWN\0", "unknown error\0"),
];

fn error(e: u32) -> Result<&'static (u32, &'static str, &'static str), u32> {
    ERRORS.iter().find(|n| n.0 == e).ok_or(code::INVALID_VALUE)
}

/// Attributes that are not zero, beside those that are settings.
const ATTRIBUTES: [(u32, i32); 37] = [
    (1, 1024),
    (2, 1024),
    (3, 1024),
    (4, 64),
    (5, 0x7fff_ffff),
    (6, 65535),
    (7, 65535),
    (8, 48 << 10),
    (9, 64 << 10),
    (10, 32),
    (11, 0x7fff_ffff),
    (12, 65536),
    (13, 1_410_000),
    (14, 512),
    (15, 1),
    (19, 1),
    (31, 1),
    (36, 1_215_000),
    (37, 5120),
    (38, 40 << 20),
    (39, 2048),
    (40, 3),
    (41, 1),
    (78, 1),
    (79, 1),
    (80, 1),
    (81, 164 << 10),
    (82, 65536),
    (95, 1),
    (97, super::module::SHARED_MOST as i32),
    (99, 1),
    (106, 32),
    (108, 32 << 20),
    (109, 128 << 20),
    (111, 1024),
    (115, 1),
    (87, 32),
];

api! {
    // NVRTC asks a driver that it finds for tables of its own, and takes an error for an answer.
    fn cuGetExportTable(table: *mut Handle, id: Handle) |m| { Err(code::NOT_FOUND) }
    fn cuInit(flags: u32) |m| {
        if m.devices.is_empty() {
            return Err(100);
        }
        m.initialised = true;
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut i32) |m| { put(version, m.settings.driver) }

    fn cuGetErrorName(e: u32, name: *mut *const c_char) |m| { put(name, error(e)?.1.as_ptr().cast()) }
    fn cuGetErrorString(e: u32, text: *mut *const c_char) |m| { put(text, error(e)?.2.as_ptr().cast()) }

    fn cuDeviceGetCount(count: *mut i32) |m| {
        if !m.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        put(count, m.devices.len() as i32)
    }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) |m| {
        m.device(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, device: i32) |m| {
        let d = m.device(device)?;
        let text = format!("emulated sm_{} {d}\0", m.settings.arch);
        let n = text.len().min(len.max(0) as usize);
        if n == 0 || name.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller's buffer has `len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, n);
            name.add(n - 1).write(0);
        }
        Ok(())
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) |m| { put(uuid, id(m.device(device)?)) }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) |m| { put(uuid, id(m.device(device)?)) }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) |m| {
        let d = m.device(device)?;
        put(bytes, m.devices[d].memory.info().1 as usize)
    }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32) |m| {
        let d = m.device(device)?;
        put(value, match attribute {
            16 => m.settings.sms as i32,
            33 => d as i32 + 1,
            75 => (m.settings.arch / 10) as i32,
            76 => (m.settings.arch % 10) as i32,
            a => ATTRIBUTES.iter().find(|x| x.0 == a).map_or(0, |x| x.1),
        })
    }

    fn cuDeviceCanAccessPeer(can: *mut i32, a: i32, b: i32) |m| {
        let (a, b) = (m.device(a)?, m.device(b)?);
        put(can, i32::from(a != b))
    }

    fn cuCtxEnablePeerAccess(context: Handle, flags: u32) |m| { m.working().map(|_| ()) }

    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: i32) |m| {
        let d = m.device(device)?;
        m.devices[d].retained += 1;
        put(context, (d + 1) as Handle)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) |m| {
        let d = m.device(device)?;
        if m.devices[d].retained == 0 {
            return Err(code::INVALID_CONTEXT);
        }
        m.devices[d].retained -= 1;
        if m.devices[d].retained == 0 {
            if m.devices[d].sticky == 0 {
                m.finish_device(d).ok();
            }
            m.write_counts();
            m.reset(d);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) |m| {
        let d = m.device(device)?;
        m.reset(d);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) |m| {
        let d = m.device(device)?;
        put(flags, 0)?;
        put(active, i32::from(m.devices[d].retained > 0))
    }

    fn cuCtxGetCurrent(context: *mut Handle) |m| { put(context, current() as Handle) }

    fn cuCtxSetCurrent(context: Handle) |m| {
        if context as usize > m.devices.len() {
            return Err(code::INVALID_CONTEXT);
        }
        set_current(context as usize);
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut i32) |m| { put(device, m.current().ok_or(code::INVALID_CONTEXT)? as i32) }

    fn cuCtxSynchronize() |m| {
        let d = m.working()?;
        m.uncaptured()?;
        m.finish_device(d)
    }

    fn cuCtxSetFlags(flags: u32) |m| { m.working().map(|_| ()) }
    fn cuCtxSetLimit(limit: u32, value: usize) |m| { m.working().map(|_| ()) }

    fn cuCtxGetLimit(value: *mut usize, limit: u32) |m| {
        m.working()?;
        put(value, match limit { 0 => 1024, 1 => 1 << 20, 2 => 8 << 20, _ => 0 })
    }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) |m| {
        m.working()?;
        put(least, 0)?;
        put(greatest, -5)
    }
}

fn id(device: usize) -> [u8; 16] {
    let mut id = *b"astrai-emulated\0";
    id[15] = device as u8;
    id
}

impl super::machine::Machine {
    /// Destroys a device's context: what it had is gone, and it works again.
    fn reset(&mut self, d: usize) {
        self.tasks.retain(|_, t| t.device != d);
        self.streams.retain(|_, s| s.device != d);
        self.modules.retain(|_, l| l.device() != d);
        self.functions.retain(|_, f| f.device() != d);
        self.devices[d].memory.clear();
        self.devices[d].sticky = 0;
    }
}
