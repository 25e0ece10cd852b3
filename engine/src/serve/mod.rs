//! A server with OpenAI's interface: completions and chat, streamed or whole, health, and metrics.
//!
//! | | |
//! |---|---|
//! | `POST /v1/completions`, `POST /v1/chat/completions` | a text; with `"stream": true` as server-sent events |
//! | `GET /v1/models`, `GET /v1/models/NAME` | the one model |
//! | `GET /health` | 200 while the engine runs and takes requests, else 503 |
//! | `GET /metrics` | Prometheus text |
//!
//! One thread has the engine. Requests that do not fit into the queue are refused (429). If a client disconnects, its request
//! is cancelled before the next step. A slow client keeps only the text that waits for it; a client that reads nothing is
//! disconnected. Requests for features that are not implemented are refused (400). A server that stops refuses new requests (503)
//! and ends when the last answer does, or after the grace period.

mod answer;
mod api;
mod fields;
mod json;
mod lanes;
mod listen;
mod metrics;
mod patience;
mod receive;
mod runner;

use std::{
    future::Future,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
    task::JoinSet,
    time::Instant,
};

use crate::{Engine, Text, TextStream};
use api::{Kind, Refusal};
use lanes::Lanes;
use metrics::Metrics;
use patience::Patience;
use runner::Runner;

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The model's name in the interface.
    pub name: String,
    /// Maximum number of open connections; more wait to be accepted.
    pub connections: usize,
    /// Maximum number of bytes of a request's body.
    pub body_bytes: usize,
    /// Maximum time in which a client must send its request.
    pub receive: Duration,
    /// How long a client may accept no byte that is sent to it. After that its connection is closed and its request
    /// cancelled.
    pub send: Duration,
    /// How long answers may continue once the server begins to stop. New requests are refused meanwhile.
    pub grace: Duration,
}

impl ServeOptions {
    /// Default limits.
    #[must_use]
    pub const fn new(name: String) -> Self {
        Self {
            name,
            connections: 1024,
            body_bytes: 4 << 20,
            receive: Duration::from_secs(30),
            send: Duration::from_secs(60),
            grace: Duration::from_secs(10),
        }
    }
}

/// State that handlers share.
struct Server {
    runner: Runner,
    text: Arc<Text>,
    options: ServeOptions,
    metrics: Arc<Metrics>,
    lanes: Lanes,
    /// Maximum number of tokens of a request.
    request_tokens: u32,
    answers: AtomicU64,
    /// Whether the server begins to stop.
    stopping: watch::Sender<bool>,
    /// When it started, in seconds since 1970.
    started: u64,
}

impl Server {
    /// The model in OpenAI's format.
    fn model(&self) -> serde_json::Value {
        let (id, created) = (&self.options.name, self.started);
        serde_json::json!({"id": id, "object": "model", "created": created, "owned_by": "tandem"})
    }
}

/// Serves on an address until `shutdown` and as [`serve`] after it, with its own runtime. `ready` receives the address; for port 0 it has the
/// port that the system chose.
///
/// # Errors
/// If listening on the address fails.
pub fn run(
    address: SocketAddr,
    engine: Engine,
    text: Text,
    options: ServeOptions,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = listen::on(address)?;
        ready(listener.local_addr()?);
        serve(listener, engine, text, options, shutdown).await;
        Ok(())
    })
}

/// How long connections are read once the server begins to stop, so that a request which its client sent before that is
/// answered.
const ON_ITS_WAY: Duration = Duration::from_millis(500);

/// Serves on a listener until `shutdown`. After that, answers under way have the [grace period](ServeOptions::grace) to end.
/// Until the last of them has ended, the server refuses new requests with 503 and says so in `/health`.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    text: Text,
    options: ServeOptions,
    shutdown: impl Future<Output = ()>,
) {
    let metrics = Arc::new(Metrics::new(engine.cache_type()));
    let (connections, grace) = (options.connections, options.grace);
    let (receive, send) = (options.receive, options.send);
    let request_tokens = engine.request_tokens();
    let server = Arc::new(Server {
        runner: Runner::start(engine, Arc::clone(&metrics)),
        text: Arc::new(text),
        options,
        metrics,
        lanes: Lanes::new(),
        request_tokens,
        answers: AtomicU64::new(0),
        stopping: watch::Sender::new(false),
        started: answer::seconds(),
    });
    let router = Router::new()
        .route(
            "/v1/completions",
            post(|state, request| answer(state, Kind::Completion, request)),
        )
        .route(
            "/v1/chat/completions",
            post(|state, request| answer(state, Kind::Chat, request)),
        )
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(health))
        .route("/metrics", get(metrics_text))
        .method_not_allowed_fallback(|request: Request| {
            nowhere(StatusCode::METHOD_NOT_ALLOWED, request)
        })
        .fallback(|request: Request| nowhere(StatusCode::NOT_FOUND, request))
        .with_state(Arc::clone(&server));
    let service = TowerToHyperService::new(router);

    let permits = Arc::new(Semaphore::new(connections));
    // Connections accepted before the stop, and those accepted after it, whose requests get 503.
    let (mut open, mut late) = (JoinSet::new(), JoinSet::new());
    tokio::pin!(shutdown);
    let end = tokio::time::sleep(Duration::MAX);
    tokio::pin!(end);
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
                end.as_mut().reset(Instant::now() + grace);
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
        http.timer(TokioTimer::new())
            .header_read_timeout(receive)
            .keep_alive(!stopping)
            .max_buf_size(64 << 10);
        let connection =
            http.serve_connection(TokioIo::new(Patience::new(stream, send)), service.clone());
        let mut stops = server.stopping.subscribe();
        let connections = if stopping { &mut late } else { &mut open };
        connections.spawn(async move {
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
            drop(permit);
        });
    }
    let answered = async { while late.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(ON_ITS_WAY, answered).await;
}

/// Answers requests for an unknown path or method.
async fn nowhere(status: StatusCode, request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!(
        "there is no {method} {path} here, only POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /v1/models/NAME, GET /health \
         and GET /metrics"
    );
    Refusal::new(status, message).into_response()
}

async fn models(State(server): State<Arc<Server>>) -> Response {
    let models = serde_json::json!({"object": "list", "data": [server.model()]});
    api::respond(StatusCode::OK, &models)
}

async fn model(State(server): State<Arc<Server>>, Path(name): Path<String>) -> Response {
    match name == server.options.name {
        true => api::respond(StatusCode::OK, &server.model()),
        false => Refusal::no_model(&name, &server.options.name).into_response(),
    }
}

async fn health(State(server): State<Arc<Server>>) -> Response {
    let unavailable = |why| (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    match server.runner.is_alive() {
        true if *server.stopping.borrow() => unavailable("the server is stopping\n"),
        true => (StatusCode::OK, "ok\n").into_response(),
        false => unavailable("the engine has failed: see the log\n"),
    }
}

async fn metrics_text(State(server): State<Arc<Server>>) -> Response {
    let kind = (header::CONTENT_TYPE, "text/plain; version=0.0.4");
    ([kind], server.metrics.to_string()).into_response()
}

/// Answers a request with a text or an error.
async fn answer(State(server): State<Arc<Server>>, kind: Kind, request: Request) -> Response {
    match begin(&server, kind, request).await {
        Ok(response) => response,
        Err(refusal) => {
            server.metrics.refused(refusal.status);
            refusal.into_response()
        }
    }
}

async fn begin(server: &Arc<Server>, kind: Kind, request: Request) -> Result<Response, Refusal> {
    if *server.stopping.borrow() {
        return Err(Refusal::failed(
            "the server is stopping: send the request to another one, or when it runs again"
                .to_owned(),
        ));
    }
    let (head, body) = request.into_parts();
    receive::json_only(&head.headers)?;
    let body = receive::whole(body, &server.options).await?;
    let begun = std::time::Instant::now();
    let asked = api::parse(kind, &body, &server.options.name)?;
    // Tokenizing a long prompt takes a while; other requests must not wait for it.
    let (text, prompt) = (Arc::clone(&server.text), asked.prompt);
    let bytes = prompt.text_bytes();
    let prompt = server.lanes.run(bytes, move || prompt.encode(&text)).await;
    let prompt = prompt.map_err(|error| Refusal::failed(error.to_string()))??;
    let prompt_tokens = prompt.len();
    let stream = match kind {
        Kind::Completion => TextStream::after(&server.text, &prompt)?,
        Kind::Chat => TextStream::default(),
    };
    let generation = asked.parameters.generation(prompt, server.request_tokens);
    let (taken, tokens) = server.runner.submit(generation, begun).await?;
    let index = server.answers.fetch_add(1, Ordering::Relaxed);
    let answer = answer::Answer {
        taken,
        tokens,
        assembly: answer::Assembly::new(Arc::clone(&server.text), stream, asked.parameters.stop),
        labels: answer::Labels::new(kind, index, &server.options.name),
        prompt_tokens,
        generated: 0,
    };
    match asked.parameters.stream {
        true => Ok(answer.streamed(asked.parameters.include_usage)),
        false => Ok(answer.whole().await),
    }
}
