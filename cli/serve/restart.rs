//! A server that takes the place of this one, so that nobody is refused in between. In: the socket that both listen at. Out: a process
//! of the same command, and word when it is ready. Both sides keep to what systemd does: the socket is descriptor 3 (`LISTEN_FDS`), and
//! `READY=1` comes to the datagram socket that `NOTIFY_SOCKET` names.

use super::socket::FIRST;
use crate::failure::say;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use tempfile::TempDir;

/// How it is with a successor.
pub enum State {
    Starting,
    Ready,
    /// It ended without being ready.
    Gone,
}

/// A process that is to take over; it ends with this value unless it was ready.
pub struct Successor {
    process: Child,
    ready: bool,
    notices: UnixDatagram,
    _folder: TempDir,
}

impl Successor {
    /// Starts the command of this process again; if that fails, this one says so and goes on.
    pub fn start(socket: &OwnedFd) -> Option<Successor> {
        let started = Successor::try_start(socket);
        match &started {
            Ok(successor) => say(&format!("process {} starts to take over", successor.process.id())),
            Err(e) => say(&format!("warning: no process was started to take over: {e}; this one goes on")),
        }
        started.ok()
    }

    fn try_start(socket: &OwnedFd) -> io::Result<Successor> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("ready");
        let notices = UnixDatagram::bind(&path)?;
        notices.set_nonblocking(true)?;
        let mut args = std::env::args_os();
        let program = args.next().ok_or_else(|| io::Error::other("this process has no name"))?;
        let mut command = Command::new(program);
        command.args(args).env("LISTEN_FDS", "1").env_remove("LISTEN_PID").env("NOTIFY_SOCKET", &path);
        // As no copy has a number below 3, that number is in use from here on, and is no descriptor of the standard library's own.
        let copy = socket.try_clone()?;
        let from = copy.as_raw_fd();
        let pass = move || {
            // SAFETY: system calls alone, which are allowed between fork and exec; both descriptors are open.
            let passed = unsafe {
                if from == FIRST { libc::fcntl(FIRST, libc::F_SETFD, 0) } else { libc::dup2(from, FIRST) }
            };
            if passed < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        // SAFETY: the closure makes system calls alone and allocates nothing.
        let process = unsafe { command.pre_exec(pass) }.spawn()?;
        Ok(Successor { process, ready: false, notices, _folder: folder })
    }

    /// How it is by now.
    pub fn state(&mut self) -> State {
        let mut text = [0; 256];
        if let Ok(n) = self.notices.recv(&mut text) {
            self.ready |= text[..n].split(|byte| *byte == b'\n').any(|line| line == b"READY=1");
        }
        match self.process.try_wait() {
            _ if self.ready => State::Ready,
            Ok(None) => State::Starting,
            Ok(Some(status)) => {
                say(&format!(
                    "warning: the process that was to take over ended ({status}); this one goes on"
                ));
                State::Gone
            }
            Err(_) => State::Gone,
        }
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if !self.ready {
            // Both fail where it has ended.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// Tells whoever started this process that it is ready, if they want to know.
pub fn notify_ready() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = || {
        let socket = UnixDatagram::unbound()?;
        match path.as_bytes() {
            [b'@', name @ ..] => socket.send_to_addr(b"READY=1", &SocketAddr::from_abstract_name(name)?),
            _ => socket.send_to(b"READY=1", &path),
        }
    };
    if let Err(e) = sent() {
        say(&format!("warning: NOTIFY_SOCKET: {e}"));
    }
}
