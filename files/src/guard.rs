//! Libraries that panic on some of what they read. In: a call of one. Out: what it gives, or what it says, as text for an error.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls a library that believes what it reads; where it panics, gives what it says and prints nothing. What the call has
/// touched is not to be used after a panic, except to drop it.
pub fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    // A panic that becomes an error is not to be printed as well.
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                before(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let done = panic::catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(outer);
    done.map_err(|said| {
        let text = said.downcast_ref::<String>().map(String::as_str).or(said.downcast_ref::<&str>().copied());
        text.unwrap_or("no reason given").to_owned()
    })
}
