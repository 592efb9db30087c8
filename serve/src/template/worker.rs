//! Rendering apart from the program. A template is code of unknown origin, and no count of its steps bounds what one of them
//! takes. Programs that call [`sandbox`] therefore render in processes of their own, which have little memory and are killed when
//! their time is up or nobody waits for the prompt any more. In: a job as JSON behind its length, on a pipe. Out: the prompt, or why
//! there is none, the same way.

use super::render::{Job, perform, perform_here};
use super::{TemplateError, limits};
use serde::Serialize;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Tells a process that it is to render.
const ASKED: &str = "ASTRAI_RENDERS_TEMPLATES";

/// Processes that are kept for the next rendering: one for each core, on which somebody may render at the same time.
static IDLE: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(4, |cores| cores.get().max(4)));

/// A job longer than this leaves a process with memory that it will not need again.
const LARGE: usize = 1 << 22;

/// How often it is looked whether anybody still waits for a prompt.
const LOOK: Duration = Duration::from_millis(20);

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
static KEPT: Mutex<Vec<Worker>> = Mutex::new(Vec::new());

/// Has chat templates rendered in processes apart from this one, within limits of time and memory. To be called first in `main`:
/// these processes run this program again, and in them the function does not return.
pub fn sandbox() {
    if std::env::var_os(ASKED).is_some() {
        serve();
    }
    // The program that runs, also when the file has been replaced meanwhile.
    sandbox_by("/proc/self/exe".into());
}

/// The same for a program that cannot call [`sandbox`] first, a test say: the processes run `program`, which does.
pub fn sandbox_by(program: PathBuf) {
    // The first call decides.
    let _ = PROGRAM.set(program);
}

/// Does a job, apart from this process if it has called [`sandbox`]. `abandoned` is looked at now and then: nobody waits any more.
pub(super) fn run(job: &Job, abandoned: Option<&AtomicBool>) -> Result<String, TemplateError> {
    let Some(program) = PROGRAM.get() else { return perform(job) };
    let stopped = |why: &str| TemplateError::Stopped(why.to_owned());
    let frame = frame(job).map_err(|e| stopped(&format!("its variables are no JSON ({e})")))?;
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).pop();
    loop {
        let reused = kept.is_some();
        let mut worker = match kept.take() {
            Some(worker) => worker,
            None => Worker::start(program)
                .map_err(|e| stopped(&format!("there is no process to render it in ({e})")))?,
        };
        let until = Instant::now() + limits::TIME;
        let answer = worker.input.write_all(&frame).and_then(|()| worker.answer(until, abandoned));
        return match answer {
            Ok(Answer::Done(answer)) => {
                let large = frame.len().max(answer.len()) > LARGE;
                let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
                if !large && kept.len() < *IDLE {
                    kept.push(worker);
                }
                drop(kept);
                serde_json::from_slice(&answer).unwrap_or_else(|_| Err(stopped("its engine broke off")))
            }
            Ok(Answer::Late) => Err(stopped(&format!("it takes more than {} s", limits::TIME.as_secs()))),
            Ok(Answer::Unwanted) => Err(stopped("nobody waits for its prompt any more")),
            // One that was kept may have been ended by others; a fresh one tells what the template does.
            Ok(Answer::Ended) | Err(_) if reused => continue,
            Ok(Answer::Ended) | Err(_) => {
                let signal = worker.child.wait().ok().and_then(|status| status.signal());
                let how = signal.map_or_else(String::new, |signal| format!(", signal {signal}"));
                Err(stopped(&format!(
                    "it nests values too deep or takes more than {} MiB of memory{how}",
                    limits::MEMORY >> 20
                )))
            }
        };
    }
}

/// A process that renders; it ends when it is dropped.
struct Worker {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
}

enum Answer {
    Done(Vec<u8>),
    Late,
    Unwanted,
    Ended,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // One that has ended by itself is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    fn start(program: &PathBuf) -> io::Result<Worker> {
        let mut command = Command::new(program);
        command.env_clear().env(ASKED, "1").envs(std::env::var_os("TZ").map(|zone| ("TZ", zone)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // An interrupt from the terminal is the program's to hear.
        let mut child = command.process_group(0).spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Worker { child, input, output }),
            _ => Err(io::Error::other("it has no pipes")),
        }
    }

    fn answer(&mut self, until: Instant, abandoned: Option<&AtomicBool>) -> io::Result<Answer> {
        let (mut got, mut piece) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            if let Some((length, rest)) = got.split_first_chunk::<8>()
                && rest.len() as u64 >= u64::from_le_bytes(*length)
            {
                got.drain(..8);
                return Ok(Answer::Done(got));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Answer::Late);
            }
            if abandoned.is_some_and(|a| a.load(Ordering::Relaxed)) {
                return Ok(Answer::Unwanted);
            }
            let wait = left.min(LOOK).as_millis().max(1) as libc::c_int;
            let mut pipe = libc::pollfd { fd: self.output.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: there is one descriptor, and it lives as long as the call.
            if unsafe { libc::poll(&mut pipe, 1, wait) } > 0 {
                match self.output.read(&mut piece)? {
                    0 => return Ok(Answer::Ended),
                    n => got.extend_from_slice(&piece[..n]),
                }
            }
        }
    }
}

fn frame(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut frame = vec![0; 8];
    serde_json::to_writer(&mut frame, value)?;
    let length = frame.len() as u64 - 8;
    frame[..8].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// The life of a process that renders: it ends with the program that started it, whatever it is doing then.
fn serve() -> ! {
    let limit = |what, most| {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: the limits are read for the call alone. A lower limit that stands already stays, with an error.
        unsafe { libc::setrlimit(what, &limit) };
    };
    limit(libc::RLIMIT_AS, limits::MEMORY);
    limit(libc::RLIMIT_CORE, 0);
    let (send, jobs) = mpsc::channel::<Vec<u8>>();
    let render = move || {
        let mut parsed = HashMap::new();
        for job in jobs {
            let stopped = |why: String| Err(TemplateError::Stopped(why));
            let done = match serde_json::from_slice::<Job>(&job) {
                Ok(job) => catch_unwind(AssertUnwindSafe(|| perform_here(&job, &mut parsed)))
                    .unwrap_or_else(|_| stopped("its engine broke off".into())),
                Err(e) => stopped(format!("its variables cannot be read ({e})")),
            };
            if tell(&done).is_err() {
                break;
            }
        }
        std::process::exit(0);
    };
    // One thread for all jobs: to make one with so large a stack takes longer than an ordinary rendering.
    let started = thread::Builder::new().stack_size(limits::STACK).spawn(render);
    let mut input = io::stdin().lock();
    let mut read = || -> io::Result<Vec<u8>> {
        let (mut length, mut job) = ([0; 8], Vec::new());
        input.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        input.by_ref().take(length).read_to_end(&mut job)?;
        if job.len() as u64 == length { Ok(job) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    };
    match started {
        Ok(_) => while read().is_ok_and(|job| send.send(job).is_ok()) {},
        Err(e) if read().is_ok() => {
            // Nobody hears it where the program has ended.
            let _ = tell(&Err(TemplateError::Stopped(format!("there is no thread for it ({e})"))));
        }
        Err(_) => {}
    }
    std::process::exit(0)
}

/// Gives the program the end of its job.
fn tell(done: &Result<String, TemplateError>) -> io::Result<()> {
    io::stdout().write_all(&frame(done)?)?;
    io::stdout().flush()
}
