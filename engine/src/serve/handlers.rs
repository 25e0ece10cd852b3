//! What the server answers.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    Router,
    extract::{Path, Request, State},
    http::{StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use tokio::{net::TcpListener, sync::watch};

use super::{
    ServeError, ServeOptions, access, answer,
    answer::{Answer, Choice, Labels},
    api::{self, Kind, Most},
    assembly::Assembly,
    clients::Wanted,
    lanes::Lanes,
    metrics::Metrics,
    places::Places,
    receive::{self, Bodies},
    refusal::{Refusal, respond},
    runner::{Runner, Running},
};
use crate::{Engine, Text, TextStream};

/// Tokens of a chat's answer if neither the request nor the options limit it.
const ANSWER_TOKENS: u64 = 2048;

/// State that handlers share.
pub(super) struct Server {
    runner: Runner,
    text: Arc<Text>,
    pub options: ServeOptions,
    metrics: Arc<Metrics>,
    bodies: Bodies,
    places: Places,
    lanes: Lanes,
    most: Most,
    answers: AtomicU64,
    /// Begins the ids of its answers, so that no other start of a server has the same.
    ids: u64,
    /// Whether the server begins to stop.
    pub stopping: watch::Sender<bool>,
    /// When it started, in seconds since 1970.
    started: u64,
    /// Whether only this machine can reach it.
    loopback: bool,
}

impl Server {
    /// Starts the engine.
    pub(super) fn start(
        listener: &TcpListener,
        engine: Engine,
        text: Text,
        options: ServeOptions,
    ) -> Result<(Arc<Self>, Running), ServeError> {
        let metrics = Arc::new(Metrics::new(engine.cache_type()));
        let composer = engine.composer();
        let (places, pool) = (Places::new(composer.limits()), composer.pool());
        let cache = u64::from(pool.pages()) * u64::from(pool.page_size());
        let usual = ANSWER_TOKENS.min(cache / 4).max(1) as u32;
        let most = Most {
            usual: options.sampling,
            positions: engine.architecture().positions,
            limit: composer.limits().request_tokens,
            request_tokens: engine.request_tokens(),
            answer_tokens: options.answer_tokens.unwrap_or(usual),
        };
        let address = listener.local_addr();
        let (runner, running) = Runner::start(engine, Arc::clone(&metrics), options.warn)?;
        let server = Self {
            runner,
            text: Arc::new(text),
            bodies: Bodies::new(options.body_bytes),
            options,
            metrics,
            lanes: Lanes::new(places.all()),
            places,
            most,
            answers: AtomicU64::new(0),
            ids: fastrand::u64(..),
            stopping: watch::Sender::new(false),
            started: answer::seconds(),
            loopback: address.is_ok_and(|address| address.ip().is_loopback()),
        };
        Ok((Arc::new(server), running))
    }

    /// The model in OpenAI's format.
    fn model(&self) -> serde_json::Value {
        let (id, created) = (&self.options.name, self.started);
        serde_json::json!({"id": id, "object": "model", "created": created, "owned_by": "tandem"})
    }

    /// A request that gets no answer.
    fn refused(&self, refusal: Refusal) -> Response {
        match refusal.has_left {
            true => self.metrics.left(),
            false => self.metrics.refused(refusal.status),
        }
        refusal.into_response()
    }
}

pub(super) fn router(server: &Arc<Server>) -> Router {
    Router::new()
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
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(|state, request| {
            nowhere(state, StatusCode::METHOD_NOT_ALLOWED, request)
        })
        .fallback(|state, request| nowhere(state, StatusCode::NOT_FOUND, request))
        .layer(from_fn_with_state(Arc::clone(server), allowed))
        .with_state(Arc::clone(server))
}

/// Lets a request through if its client may use the server.
async fn allowed(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let (uri, headers) = (request.uri(), request.headers());
    match access::check(&server.options, server.loopback, uri, headers) {
        Ok(()) => next.run(request).await,
        Err(refusal) => server.refused(refusal),
    }
}

/// Answers requests for an unknown path or method.
async fn nowhere(
    State(server): State<Arc<Server>>,
    status: StatusCode,
    request: Request,
) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!(
        "there is no {method} {path} here, only POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /v1/models/NAME, GET /health \
         and GET /metrics"
    );
    server.refused(Refusal::new(status, message))
}

async fn models(State(server): State<Arc<Server>>) -> Response {
    let models = serde_json::json!({"object": "list", "data": [server.model()]});
    respond(StatusCode::OK, &models)
}

async fn model(State(server): State<Arc<Server>>, Path(name): Path<String>) -> Response {
    match name == server.options.name {
        true => respond(StatusCode::OK, &server.model()),
        false => server.refused(Refusal::no_model(&name, &server.options.name)),
    }
}

async fn health(State(server): State<Arc<Server>>) -> Response {
    let unavailable = |why| (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    match server.runner.failure() {
        Some(why) => unavailable(format!("{why}\n")),
        None if *server.stopping.borrow() => unavailable("the server is stopping\n".to_owned()),
        None => (StatusCode::OK, "ok\n").into_response(),
    }
}

async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let kind = (header::CONTENT_TYPE, "text/plain; version=0.0.4");
    ([kind], server.metrics.text(&server.lanes, &server.places)).into_response()
}

/// Answers a request with a text or an error.
async fn answer(State(server): State<Arc<Server>>, kind: Kind, request: Request) -> Response {
    let mut arriving = Arriving(Some(&server.metrics));
    let begun = begin(&server, kind, request, &mut arriving).await;
    arriving.0 = None;
    begun.unwrap_or_else(|refusal| server.refused(refusal))
}

/// Counts a request whose client goes away meanwhile, or for which the server panics.
struct Arriving<'a>(Option<&'a Metrics>);

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        let Some(metrics) = self.0 else { return };
        match std::thread::panicking() {
            true => metrics.refused(StatusCode::INTERNAL_SERVER_ERROR),
            false => metrics.left(),
        }
    }
}

async fn begin(
    server: &Arc<Server>,
    kind: Kind,
    request: Request,
    arriving: &mut Arriving<'_>,
) -> Result<Response, Refusal> {
    if let Some(why) = server.runner.failure() {
        return Err(Refusal::failed(why));
    }
    if *server.stopping.borrow() {
        return Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the server is stopping: send the request to another one, or when it runs again",
        ));
    }
    let options = &server.options;
    let (head, body) = request.into_parts();
    receive::json_only(&head.headers)?;
    // A slow client takes no place.
    let room = server.places.check();
    let body = receive::whole(body, options, &server.bodies, room).await?;
    let begun = std::time::Instant::now();
    let mut place = server.places.take()?;
    let (at, bytes) = (Arc::clone(server), body.bytes.len());
    let parse = move || api::parse(kind, &body.bytes, &at.options.name);
    let asked = server.lanes.parse(bytes, parse).await??;
    server.places.extend(&mut place, asked.choices())?;
    // Tokenizing a long prompt takes a while; other requests must not wait for it.
    let prompts = server.lanes.tokenize(&server.text, asked.prompts).await?;
    let prompts: Vec<Arc<[u32]>> = prompts.into_iter().map(Arc::from).collect();
    let parameters = asked.parameters;
    for prompt in &prompts {
        parameters.check(prompt.len(), &server.most)?;
    }
    let each = parameters.choices as usize;
    let (mut choices, mut assemblies) = (Vec::new(), Vec::new());
    for prompt in &prompts {
        let stream = match kind {
            Kind::Completion => TextStream::after(&server.text, prompt)?,
            Kind::Chat => TextStream::default(),
        };
        let stream = match parameters.special_tokens {
            true => stream.with_special_tokens(&server.text)?,
            false => stream,
        };
        for _ in 0..each {
            let (text, stops) = (Arc::clone(&server.text), Arc::clone(&parameters.stop));
            let stream = stream.clone();
            assemblies.push(Assembly::new(text, stream, stops, parameters.min_tokens));
            let wanted = Wanted {
                prompt: Arc::clone(prompt),
                beside: parameters.generation(choices.len(), prompt.len(), &server.most),
            };
            let place = place.split(1).expect("there is one for each choice");
            choices.push((wanted, place));
        }
    }
    // From here on the engine's thread counts it.
    arriving.0 = None;
    let taken = server.runner.submit(choices, begun).await?;
    let choices = taken.into_iter().zip(assemblies);
    let index = server.answers.fetch_add(1, Ordering::Relaxed);
    let id = format!("{:016x}-{index}", server.ids);
    let answer = Answer {
        choices: choices
            .map(|(taken, text)| Choice::new(taken, text, kind))
            .collect(),
        labels: Labels::new(kind, &id, &options.name, parameters.log_probs.is_some()),
        prompt_tokens: prompts.iter().map(|prompt| prompt.len()).sum(),
        each,
        turn: 0,
    };
    match parameters.stream {
        true => Ok(answer.streamed(parameters.include_usage, options.keep_alive)),
        false => Ok(answer.whole().await),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::Limits;

    #[test]
    fn a_request_for_which_the_server_panics_has_failed() {
        let metrics = Metrics::default();
        drop(Arriving(Some(&metrics)));
        let panics = || {
            let _arriving = Arriving(Some(&metrics));
            panic!("on purpose");
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        let text = metrics.text(&Lanes::new(1), &Places::new(&Limits::default()));
        for line in [
            "tandem_requests_left_total 1",
            "tandem_requests_failed_total 1",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} in {text}");
        }
    }
}
