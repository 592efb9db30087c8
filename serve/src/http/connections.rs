//! Connections, from accepting them to the last byte. A client may not hold one for nothing: its header must come in time,
//! and there are no more connections than there may be. When the server ends, each connection finishes what it is writing.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::write_timeout::WriteTimeout;
use super::{Ending, HttpSettings};

/// Connections at a time; more wait to be accepted.
const MOST: usize = 4096;

/// Time for the handshake of an encrypted connection.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// Bytes of a request's header.
const HEADER: usize = 64 << 10;

/// Time to write what is written when the server ends.
const FLUSH: Duration = Duration::from_secs(5);

/// Time for the first request of a connection that was accepted just before another process takes over: one that has said nothing yet is
/// closed then.
const FIRST_REQUEST: Duration = Duration::from_secs(1);

/// Where a server listens.
#[derive(Debug)]
pub enum Listener {
    /// At a port.
    Tcp(TcpListener),
    /// At a file, for this machine only.
    Unix(UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Listener {
        Listener::Tcp(listener)
    }
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Times of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// For the head of a request, and between two requests.
    idle: Duration,
    /// In which something of what is sent must be taken.
    stall: Duration,
}

impl Times {
    /// As they are set.
    pub fn of(settings: &HttpSettings) -> Times {
        Times { idle: settings.idle_timeout, stall: settings.stall_timeout }
    }
}

/// What all connections are served with.
#[derive(Clone)]
struct Service {
    router: Router,
    tls: Option<TlsAcceptor>,
    times: Times,
    /// Changes when connections are to finish what they are at: the time for it.
    closing: watch::Receiver<Duration>,
    places: Arc<Semaphore>,
}

/// Accepts and serves connections, encrypted where there is a certificate, until `stop` is ready, then lets requests finish for so long
/// as `patience`: by `drain`, while whoever comes is still told that the server ends, or, where another process listens at the same socket,
/// with their connections.
pub async fn accept(
    listener: Listener,
    router: Router,
    tls: Option<TlsAcceptor>,
    times: Times,
    stop: impl Future<Output = Ending>,
    patience: Duration,
    drain: impl AsyncFnOnce(Duration),
) {
    let (close, closing) = watch::channel(FLUSH);
    let service = Service { router, tls, times, closing, places: Arc::new(Semaphore::new(MOST)) };
    match service.accept(&listener, stop).await {
        Ending::Leave => {
            service.accept(&listener, drain(patience)).await;
            drop((listener, service));
            let _ = close.send(FLUSH);
        }
        Ending::HandOver => {
            drop((listener, service));
            sleep(FIRST_REQUEST).await;
            let _ = close.send(patience + FLUSH);
            let _ = timeout(patience, close.closed()).await;
            // What is left has had its time.
            drain(Duration::ZERO).await;
        }
    }
    let _ = timeout(FLUSH, close.closed()).await;
}

async fn next(listener: &Listener, places: &Arc<Semaphore>) -> io::Result<(Stream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
    let stream = match listener {
        Listener::Tcp(listener) => Stream::Tcp(listener.accept().await?.0),
        Listener::Unix(listener) => Stream::Unix(listener.accept().await?.0),
    };
    Ok((stream, place))
}

impl Service {
    /// Accepts and serves connections until `end` is ready.
    async fn accept<T>(&self, listener: &Listener, end: impl Future<Output = T>) -> T {
        let mut end = pin!(end);
        loop {
            let place = tokio::select! {
                end = &mut end => return end,
                place = next(listener, &self.places) => place,
            };
            match place {
                Ok((Stream::Tcp(stream), place)) => {
                    // Tokens are sent as they come.
                    let _ = stream.set_nodelay(true);
                    tokio::spawn(self.clone().open(stream, place));
                }
                Ok((Stream::Unix(stream), place)) => drop(tokio::spawn(self.clone().open(stream, place))),
                // Too many open files, say; what is open now will close.
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn open(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send, _place: OwnedSemaphorePermit) {
        match &self.tls {
            None => self.serve(stream).await,
            Some(tls) => {
                // A client that does not speak it is no error of ours.
                if let Ok(Ok(stream)) = timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
                    self.serve(stream).await;
                }
            }
        }
    }

    async fn serve(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send) {
        let stream = WriteTimeout::new(stream, self.times.stall);
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.times.idle).max_buf_size(HEADER);
        let service = TowerToHyperService::new(self.router.clone());
        let mut served = pin!(http.serve_connection(TokioIo::new(stream), service));
        let mut closing = self.closing.clone();
        tokio::select! {
            // A client that breaks off or speaks no HTTP is no error of ours.
            _ = &mut served => return,
            _ = closing.changed() => served.as_mut().graceful_shutdown(),
        }
        let time = *closing.borrow();
        let _ = timeout(time, served).await;
    }
}
