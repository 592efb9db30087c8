//! One device through NVIDIA's driver, which is loaded when it is first asked for. In: the device's number. Out: its context, a stream
//! for kernels and one for copies into its memory, and the driver's errors as ours: a launch that failed is noticed only when
//! the device is waited for, so that launches are kept by name until then, and a device that failed refuses everything after.

use crate::Error;
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute_enum as Attribute, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a machine has of CUDA devices; a line in words where it has none.
///
/// # Errors
/// There is no driver, or it does not work.
pub(super) fn count() -> Result<usize, String> {
    // SAFETY: opens NVIDIA's driver by its name; where there is none, no other function of it may be called.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver (libcuda.so.1) is installed".into());
    }
    match CudaContext::device_count() {
        Ok(0) | Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => {
            Err("the CUDA driver sees no device".into())
        }
        Ok(n) => Ok(n as usize),
        Err(e) => Err(format!("the CUDA driver does not start: {}", words(e))),
    }
}

/// The driver's name and words for an error.
pub(super) fn words(e: DriverError) -> String {
    let text = |found: Result<&CStr, DriverError>| found.map(|t| t.to_string_lossy().into_owned()).ok();
    match text(e.error_string()) {
        Some(said) => format!("{:?}: {said}", e.0),
        None => format!("{:?}", e.0),
    }
}

/// True for errors after which the driver refuses everything else in the process's context.
fn is_final(e: DriverError) -> bool {
    use CUresult::*;
    matches!(
        e.0,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_UNKNOWN
    )
}

/// A device that is not open: what it is can be asked without taking its memory.
pub(super) struct Numbered {
    ordinal: usize,
    device: CUdevice,
    /// The driver's name of its model.
    pub(super) name: String,
}

impl Numbered {
    /// The device of this number.
    ///
    /// # Errors
    /// There is no driver, no device of this number, or it does not answer.
    pub(super) fn of(ordinal: usize) -> Result<Numbered, Error> {
        let fail = |message: String| Error::Device { device: format!("CUDA device {ordinal}"), message };
        let there = count().map_err(fail)?;
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < there);
        let number = number.ok_or_else(|| fail(format!("there are only {there}, numbered from 0")))?;
        let said = |e: DriverError| fail(words(e));
        let device = result::device::get(number).map_err(said)?;
        let name = result::device::get_name(device).map_err(said)?;
        Ok(Numbered { ordinal, device, name })
    }

    /// An attribute; 0 where the driver does not know it.
    pub(super) fn attribute(&self, attribute: Attribute) -> u64 {
        // SAFETY: the handle is the driver's.
        let asked = unsafe { result::device::get_attribute(self.device, attribute) };
        asked.map_or(0, |n| n.max(0) as u64)
    }

    /// Bytes of its memory.
    pub(super) fn memory(&self) -> Result<u64, Error> {
        // SAFETY: as above.
        let asked = unsafe { result::device::total_mem(self.device) };
        asked.map(|n| n as u64).map_err(|e| self.fail(e))
    }

    /// `CUDA device 0 (NVIDIA H100)`.
    fn whole(&self) -> String {
        format!("CUDA device {} ({})", self.ordinal, self.name)
    }

    fn fail(&self, e: DriverError) -> Error {
        Error::Device { device: self.whole(), message: words(e) }
    }
}

/// What was launched: the kernel and where its region comes from.
pub(super) type Launched = (Arc<str>, Arc<str>);

/// Launches since the device was last waited for.
#[derive(Default)]
struct Pending {
    count: u64,
    first: Option<Launched>,
    last: Option<Launched>,
}

impl Pending {
    /// Adds launches that came before these.
    fn after(&mut self, before: Pending) {
        self.count += before.count;
        self.first = before.first.or(self.first.take());
        self.last = self.last.take().or(before.last);
    }

    /// Which launches an error that was found now may come from.
    fn words(&self) -> String {
        let name = |(kernel, origin): &Launched| format!("kernel {kernel} of `{origin}`");
        match (self.count, &self.first, &self.last) {
            (_, None, _) | (_, _, None) => String::new(),
            (1, Some(only), _) => format!(" in {}", name(only)),
            (n, Some(first), Some(last)) => {
                format!(" in one of {n} launches, from {} to {}", name(first), name(last))
            }
        }
    }
}

/// A device that is open.
pub(super) struct Driver {
    pub(super) context: Arc<CudaContext>,
    /// Kernels, what follows them, and small copies run here, in the order in which they were asked for.
    pub(super) compute: Arc<CudaStream>,
    /// Large copies into the device's memory, beside kernels.
    pub(super) copies: Arc<CudaStream>,
    /// Streams that took recordings and wait for the next.
    pub(super) recorders: Mutex<Vec<Arc<CudaStream>>>,
    /// `CUDA device 0 (NVIDIA H100)`.
    name: String,
    /// Whether there are copies that kernels were not told to wait for. The lock is held until they are: another thread's launch must
    /// not slip in between.
    copying: Mutex<bool>,
    pending: Mutex<Pending>,
    failed: Mutex<Option<String>>,
}

impl Driver {
    /// Opens a device.
    ///
    /// # Errors
    /// It cannot be used.
    pub(super) fn open(numbered: &Numbered) -> Result<Driver, Error> {
        let said = |e: DriverError| numbered.fail(e);
        let context = CudaContext::new(numbered.ordinal).map_err(said)?;
        // SAFETY: streams are ordered here: copies wait for kernels and kernels for copies (`copy`, `enter`).
        unsafe { context.disable_event_tracking() };
        let (compute, copies) = (context.new_stream().map_err(said)?, context.new_stream().map_err(said)?);
        let (copying, pending, failed) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (name, recorders) = (numbered.whole(), Mutex::default());
        Ok(Driver { context, compute, copies, recorders, name, copying, pending, failed })
    }

    /// The driver's version: a thousand for each of CUDA's, ten for each minor one.
    pub(super) fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the driver writes the number to the place that it is given.
        let asked = unsafe { sys::cuDriverGetVersion(&mut version) };
        self.check("asking for its version", asked.result()).map(|()| version)
    }

    /// The device for people.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Makes the device this thread's.
    ///
    /// # Errors
    /// It failed before.
    pub(super) fn bind(&self) -> Result<(), Error> {
        if let Some(why) = &*lock(&self.failed) {
            return Err(self.error(format!("failed earlier ({why}); start the process again")));
        }
        self.check("using it", self.context.bind_to_thread())
    }

    /// [`bind`](Self::bind), and lets what follows on the stream of kernels wait for copies.
    pub(super) fn enter(&self) -> Result<(), Error> {
        self.bind()?;
        let mut copying = lock(&self.copying);
        if *copying {
            self.check("waiting for copies", self.compute.join(&self.copies))?;
            *copying = false;
        }
        Ok(())
    }

    /// A copy on the stream of copies, after the kernels before it and before those that follow.
    pub(super) fn copy(&self, copy: impl FnOnce() -> Result<(), DriverError>) -> Result<(), Error> {
        self.check("waiting for kernels", self.copies.join(&self.compute))?;
        let mut copying = lock(&self.copying);
        self.check("copying to it", copy())?;
        *copying = true;
        Ok(())
    }

    /// The driver's answer, as an error of ours where it is one.
    pub(super) fn check<T>(&self, doing: &str, answer: Result<T, DriverError>) -> Result<T, Error> {
        answer.map_err(|e| {
            let mut why = format!("{doing}: {}", words(e));
            if is_final(e) {
                why += &lock(&self.pending).words();
                lock(&self.failed).get_or_insert(why.clone());
            }
            self.error(why)
        })
    }

    /// Keeps the names of the first and the last of so many launches until the device was waited for.
    pub(super) fn launched(&self, first: &Launched, last: &Launched, count: u64) {
        let mut pending = lock(&self.pending);
        pending.count += count;
        pending.first.get_or_insert_with(|| first.clone());
        pending.last = Some(last.clone());
    }

    /// Waits for everything that was asked for.
    pub(super) fn wait(&self) -> Result<(), Error> {
        self.enter()?;
        // Launches that other threads add from here on are theirs to wait for.
        let before = std::mem::take(&mut *lock(&self.pending));
        let done = self.compute.synchronize();
        if done.is_err() {
            lock(&self.pending).after(before);
        }
        self.check("waiting for it", done)
    }

    /// An error of this device.
    pub(super) fn error(&self, message: String) -> Error {
        Error::Device { device: self.name.clone(), message }
    }
}

/// What was locked; a thread that panicked leaves nothing half done here.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
