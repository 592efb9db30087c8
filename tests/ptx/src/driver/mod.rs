//! The driver's symbols. In: the calls of a program that loads `libcuda.so.1`. Out: what a driver would answer. Nothing runs when
//! it is launched: work waits in its stream until something forces it, and then runs in a seeded order among those that are
//! legal, so that a program that forgets to wait sees old bytes.
//!
//! Settings are variables of the environment:
//!
//! | variable | meaning |
//! |---|---|
//! | `ASTRAI_PTX_DEVICES` | number of devices, 2 |
//! | `ASTRAI_PTX_MEMORY` | bytes of each, 16 GiB |
//! | `ASTRAI_PTX_ARCH` | compute capability, 82: NVRTC knows PTX alone of it, and machine code, which takes as long again, is not executed here |
//! | `ASTRAI_PTX_SMS` | multiprocessors, 108 |
//! | `ASTRAI_PTX_DRIVER` | version of the driver, 13000 |
//! | `ASTRAI_PTX_SEED` | of all orders, 1 |
//! | `ASTRAI_PTX_THREADS` | threads that run the blocks of a launch, all processors |
//! | `ASTRAI_PTX_COUNTS` | file for counts of every kernel as JSON, written when the process ends |
//! | `ASTRAI_PTX_FAIL` | `cuMemAllocAsync:3=2,cuLaunchKernel:10=719`: the n-th call of a function gives this error; `*` is any function |

mod context;
mod graph;
mod machine;
mod memory;
mod module;
mod stream;
mod tasks;

use machine::Machine;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard};

pub(crate) type Code = u32;
pub(crate) type Handle = *mut c_void;
pub(crate) type Answer = Result<(), Code>;

/// Error codes that the driver answers with itself.
pub(crate) mod code {
    pub const INVALID_VALUE: u32 = 1;
    pub const OUT_OF_MEMORY: u32 = 2;
    pub const NOT_INITIALIZED: u32 = 3;
    pub const INVALID_DEVICE: u32 = 101;
    pub const INVALID_CONTEXT: u32 = 201;
    pub const NO_BINARY_FOR_GPU: u32 = 209;
    pub const INVALID_PTX: u32 = 218;
    pub const INVALID_HANDLE: u32 = 400;
    pub const NOT_FOUND: u32 = 500;
    pub const NOT_READY: u32 = 600;
    pub const OUT_OF_RESOURCES: u32 = 701;
    pub const NOT_SUPPORTED: u32 = 801;
    pub const CAPTURE_UNSUPPORTED: u32 = 900;
    pub const CAPTURE_INVALIDATED: u32 = 901;
    pub const CAPTURE_UNMATCHED: u32 = 903;
    pub const CAPTURE_UNJOINED: u32 = 904;
    pub const UNKNOWN: u32 = 999;
}

/// True where an error stays until the context is gone.
pub(crate) fn sticks(code: Code) -> bool {
    matches!(code, 214 | 220 | 700 | 702 | 710 | 714..=719)
}

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

thread_local! {
    /// The current context of a thread: a device's number plus one.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn machine() -> MutexGuard<'static, Option<Machine>> {
    MACHINE.lock().unwrap_or_else(|e| e.into_inner())
}

/// One call: counted, made to fail where that is asked for, and never a panic across the boundary.
pub(crate) fn enter(name: &'static str, f: impl FnOnce(&mut Machine) -> Answer) -> Code {
    let call = || {
        let mut guard = machine();
        let m = guard.get_or_insert_with(Machine::new);
        if let Some(code) = m.injected(name) {
            eprintln!("emulated CUDA: {name} fails with {code}, as asked");
            if sticks(code)
                && let Some(d) = m.current()
            {
                m.fail(d, code);
            }
            return code;
        }
        f(m).err().unwrap_or(0)
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).unwrap_or(code::UNKNOWN)
}

/// Declares symbols of the driver.
macro_rules! api {
    ($(fn $name:ident($($a:ident: $t:ty),* $(,)?) |$m:ident| $body:block)*) => { $(
        #[doc = concat!("The driver's `", stringify!($name), "`.")]
        /// # Safety
        /// As the driver's manual asks: places are valid, sizes are true.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, unused_variables)]
        pub unsafe extern "C" fn $name($($a: $t),*) -> $crate::driver::Code {
            $crate::driver::enter(stringify!($name), |$m| $body)
        }
    )* };
}
pub(crate) use api;

/// Writes an answer; a null place is an invalid value.
pub(crate) fn put<T>(place: *mut T, value: T) -> Answer {
    if place.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller of the driver gave a place for this type.
    unsafe { place.write(value) };
    Ok(())
}

pub(crate) fn current() -> usize {
    CURRENT.get()
}

pub(crate) fn set_current(c: usize) {
    CURRENT.set(c);
}
