//! Leaving in order. In: SIGINT and SIGTERM. Out: a flag that the training loop reads between steps, so that the step is
//! finished and saved. A second signal does not wait: the process ends at once with 130 or 143, which loses nothing,
//! because checkpoints appear whole or not at all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

/// From here on a file that would become longer than the user's limit (`ulimit -f`) is an error of the write that meets it,
/// and not the end of the process.
///
/// # Errors
/// The system refuses a handler.
pub fn survive_file_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Whether the run was asked to end; clones share the answer.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    requested: Arc<AtomicBool>,
}

impl Stop {
    /// Registers for SIGINT and SIGTERM, for the rest of the process.
    ///
    /// # Errors
    /// The system refuses a handler.
    pub fn on_signals() -> io::Result<Stop> {
        let stop = Stop::default();
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the exit looks at what the flag was before this signal sets it.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop.requested))?;
            flag::register(signal, Arc::clone(&stop.requested))?;
        }
        Ok(stop)
    }

    /// Whether to finish the step, save and leave.
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Asks for the end as a signal would.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }
}
