//! Sockets that a server listens at. In: an address, a file, or a socket that whoever started this process has opened
//! (`LISTEN_FDS`, as systemd passes them). Out: one that listens.

use crate::failure::{Failure, bail};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The first descriptor that is passed to a process, by `sd_listen_fds(3)`.
pub const FIRST: RawFd = 3;

/// A socket that listens.
pub enum Socket {
    /// At a port.
    Tcp(TcpListener),
    /// At a file, which goes with the server where it is the server's own.
    Unix(UnixListener, Option<SocketFile>),
}

/// The file of a UNIX socket, removed when this is dropped.
pub struct SocketFile(pub PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Where somebody has removed it there is nothing to do.
        let _removed = std::fs::remove_file(&self.0);
    }
}

/// A socket at a file. One that a server has left behind is replaced; no other file is.
pub fn listen_at(path: &Path) -> Result<Socket, Failure> {
    let failed = |e: io::Error| format!("--unix-socket {}: {e}", path.display());
    let socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if socket {
        match UnixStream::connect(path) {
            Ok(_) => {
                bail!("--unix-socket {}: another server listens there; give another path", path.display())
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(failed)?;
            }
            Err(e) => return Err(failed(e).into()),
        }
    }
    let listener = UnixListener::bind(path).and_then(|l| l.set_nonblocking(true).map(|()| l));
    Ok(Socket::Unix(listener.map_err(failed)?, Some(SocketFile(path.to_path_buf()))))
}

/// An address, or what a name stands for.
pub fn host(text: &str) -> Result<IpAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let found = (text, 0).to_socket_addrs().ok().and_then(|mut all| all.next());
    found.map(|address| address.ip()).ok_or_else(|| "neither an address nor the name of one".into())
}

/// A socket at a port.
pub fn listen(host: IpAddr, port: u16) -> Result<Socket, Failure> {
    let remedy = |e: &io::Error| match e.kind() {
        io::ErrorKind::AddrNotAvailable => "give a --host of this machine",
        _ => "give another --port, or 0 for a free one",
    };
    let bound = TcpListener::bind((host, port));
    let bound = bound.and_then(|l| l.set_nonblocking(true).map(|()| l));
    let bound = bound.map_err(|e| format!("{}: {e}; {}", SocketAddr::new(host, port), remedy(&e)))?;
    Ok(Socket::Tcp(bound))
}

impl Socket {
    /// Its descriptor.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(listener) => listener.as_fd(),
            Socket::Unix(listener, _) => listener.as_fd(),
        }
    }
}

/// An option of a socket, a number.
fn option(fd: RawFd, name: libc::c_int) -> Option<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: value and size are written within this call, and any number may be given for a descriptor.
    let got = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut size) };
    (got == 0).then_some(value)
}

/// The socket that this process was started with, if it was; `path` is the file of it that is this server's. To be called once.
pub fn inherited(path: Option<&Path>) -> Result<Option<Socket>, Failure> {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u32>().ok());
    let Some(count) = number("LISTEN_FDS").filter(|n| *n > 0) else { return Ok(None) };
    // One that was meant for a process before this one.
    if number("LISTEN_PID").is_some_and(|pid| pid != std::process::id()) {
        return Ok(None);
    }
    if count > 1 {
        bail!("LISTEN_FDS: {count} sockets are passed, and one is served; pass one");
    }
    if option(FIRST, libc::SO_ACCEPTCONN) != Some(1) {
        bail!(
            "LISTEN_FDS: descriptor {FIRST} is no socket that listens; pass one that does, or unset the variable"
        );
    }
    // SAFETY: by the protocol of the variable the descriptor is this process's to own; it is open, as the option was read, and
    // nothing else takes it, as this is called once.
    let owned = unsafe { OwnedFd::from_raw_fd(FIRST) };
    // SAFETY: the descriptor is open; it is not to reach the compilers that this process starts.
    unsafe { libc::fcntl(FIRST, libc::F_SETFD, libc::FD_CLOEXEC) };
    let failed = |e: io::Error| format!("LISTEN_FDS: {e}");
    Ok(Some(match option(FIRST, libc::SO_DOMAIN) {
        Some(libc::AF_UNIX) => {
            let listener = UnixListener::from(owned);
            listener.set_nonblocking(true).map_err(failed)?;
            Socket::Unix(listener, path.map(|path| SocketFile(path.to_path_buf())))
        }
        Some(libc::AF_INET | libc::AF_INET6) => {
            let listener = TcpListener::from(owned);
            listener.set_nonblocking(true).map_err(failed)?;
            Socket::Tcp(listener)
        }
        _ => bail!("LISTEN_FDS: the socket is neither of a port nor of a file"),
    }))
}
