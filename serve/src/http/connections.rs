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
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};

use super::write_timeout::WriteTimeout;

/// Connections at a time; more wait to be accepted.
const MOST: usize = 4096;

/// Time for the header of a request, and between two requests.
const HEADER_TIME: Duration = Duration::from_secs(75);

/// Bytes of a request's header.
const HEADER: usize = 64 << 10;

/// Time to write what is written when the server ends.
const FLUSH: Duration = Duration::from_secs(5);

/// Accepts and serves connections until `drained` is ready, then lets them finish.
pub async fn accept(
    listener: TcpListener,
    service: Router,
    stall: Duration,
    drained: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(MOST));
    let (close, closing) = watch::channel(());
    let mut drained = pin!(drained);
    loop {
        let place = tokio::select! {
            () = &mut drained => break,
            place = next(&listener, &places) => place,
        };
        match place {
            Ok((stream, place)) => {
                // Tokens are sent as they come.
                let _ = stream.set_nodelay(true);
                let stream = WriteTimeout::new(stream, stall);
                tokio::spawn(connection(stream, place, service.clone(), closing.clone()));
            }
            // Too many open files, say; what is open now will close.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
    drop((listener, closing));
    let _ = close.send(());
    let _ = timeout(FLUSH, close.closed()).await;
}

async fn next(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

async fn connection(
    stream: WriteTimeout,
    _place: OwnedSemaphorePermit,
    service: Router,
    mut closing: watch::Receiver<()>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).max_buf_size(HEADER);
    let mut served = pin!(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)));
    tokio::select! {
        // A client that breaks off or speaks no HTTP is no error of ours.
        _ = &mut served => return,
        _ = closing.changed() => served.as_mut().graceful_shutdown(),
    }
    let _ = timeout(FLUSH, served).await;
}
