//! Accepts connections until the server ends.

use std::{future::Future, sync::Arc, time::Duration};

use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, oneshot},
    task::JoinSet,
};

use super::{
    ServeError,
    handlers::{self, Server},
    heads::Heads,
    patience::{Patience, after, left},
};

/// How long connections are read once the server begins to stop, so that a request which its client sent before that is
/// answered.
const ON_ITS_WAY: Duration = Duration::from_millis(500);
/// How long a connection is kept whose client sends no more. A client that only closed its sending side still waits for its answer.
const ALMOST_READY: Duration = Duration::from_millis(500);
/// How long clients may take to read why the engine failed.
const FAILURE_GRACE: Duration = Duration::from_secs(2);

/// Accepts connections until `shutdown`, and those that get 503 until the last answer has ended. If the engine fails, this
/// ends when its clients know.
pub(super) async fn accept(
    listener: TcpListener,
    server: &Arc<Server>,
    shutdown: impl Future<Output = ()>,
    mut failure: oneshot::Receiver<ServeError>,
) -> Result<(), ServeError> {
    let service = TowerToHyperService::new(handlers::router(server));
    let options = &server.options;
    let (receive, send, grace) = (options.receive, options.send, options.grace);
    let permits = Arc::new(Semaphore::new(
        options.connections.min(Semaphore::MAX_PERMITS),
    ));
    // Connections accepted before the stop, and those accepted after it, whose requests get 503.
    let (mut open, mut late) = (JoinSet::new(), JoinSet::new());
    tokio::pin!(shutdown);
    let end = tokio::time::sleep(Duration::MAX);
    tokio::pin!(end);
    let mut failed = None;
    loop {
        let stopping = *server.stopping.borrow();
        if stopping && open.is_empty() {
            break;
        }
        let accepted = async {
            let permit = Arc::clone(&permits)
                .acquire_owned()
                .await
                .expect("it is never closed");
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = open.join_next(), if !open.is_empty() => continue,
            Some(_) = late.join_next(), if !late.is_empty() => continue,
            () = &mut shutdown, if !stopping => {
                server.stopping.send_replace(true);
                end.as_mut().reset(after(grace));
                continue;
            }
            Ok(error) = &mut failure, if failed.is_none() => {
                failed = Some(error);
                server.stopping.send_replace(true);
                end.as_mut().reset(after(grace.min(FAILURE_GRACE)));
                continue;
            }
            () = &mut end, if stopping => break,
        };
        let Ok((stream, _)) = accepted else {
            // Usually too many files are open: wait until some are closed.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let mut http = hyper::server::conn::http1::Builder::new();
        let reads = Arc::default();
        http.timer(Heads::new(Arc::clone(&reads), receive, options.idle))
            // The timer knows the limits.
            .header_read_timeout(Duration::ZERO)
            .keep_alive(!stopping)
            .max_buf_size(64 << 10);
        let stream = Patience::new(stream, send, reads);
        let incoming = stream.incoming();
        let connection = http.serve_connection(TokioIo::new(stream), service.clone());
        let mut stops = server.stopping.subscribe();
        let connections = if stopping { &mut late } else { &mut open };
        connections.spawn(async move {
            let served = async {
                tokio::pin!(connection);
                // A client that goes away is not an error of the server.
                let mut ended = false;
                if !stopping {
                    let stopped = async { drop(stops.wait_for(|stopping| *stopping).await) };
                    tokio::select! {
                        _ = &mut connection => ended = true,
                        () = stopped => {
                            ended = tokio::time::timeout(ON_ITS_WAY, &mut connection).await.is_ok();
                            // This closes a connection whose client has sent nothing.
                            if !ended {
                                connection.as_mut().graceful_shutdown();
                            }
                        }
                    }
                }
                if !ended {
                    let _ = connection.await;
                }
            };
            tokio::select! {
                () = served => {}
                () = left(&incoming, ALMOST_READY) => {}
            }
            drop(permit);
        });
    }
    let answered = async { while late.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(ON_ITS_WAY, answered).await;
    match failed.or_else(|| failure.try_recv().ok()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
