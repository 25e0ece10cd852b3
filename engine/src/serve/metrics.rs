//! Counters, gauges and histograms in Prometheus format.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::http::StatusCode;

use super::{lanes::Lanes, places::Places};
use crate::{CacheType, Engine, StepReport};

#[derive(Debug, Default)]
pub(super) struct Metrics {
    cache_type: CacheType,
    submitted: AtomicU64,
    completed: AtomicU64,
    cancelled: AtomicU64,
    failed: AtomicU64,
    refused_busy: AtomicU64,
    refused: AtomicU64,
    left: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    steps: AtomicU64,
    step_requests: AtomicU64,
    preemptions: AtomicU64,
    cached_tokens: AtomicU64,
    lost_tokens: AtomicU64,
    running: AtomicU64,
    waiting: AtomicU64,
    pages: AtomicU64,
    free_pages: AtomicU64,
    cached_pages: AtomicU64,
    queue: Histogram,
    first: Histogram,
    between: Histogram,
    whole: Histogram,
}

/// The time from a request to the end of its answer, which is added once: when the engine has drawn its last token, or when a stop
/// text is found before. Its client may read the answer much later.
#[derive(Debug)]
pub(super) struct Whole {
    metrics: Arc<Metrics>,
    begun: Instant,
    is_added: AtomicBool,
}

impl Whole {
    pub(super) fn new(metrics: &Arc<Metrics>, begun: Instant) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            begun,
            is_added: AtomicBool::new(false),
        }
    }

    pub(super) fn ends(&self) {
        if !self.is_added.swap(true, Relaxed) {
            self.metrics.whole.add(self.begun.elapsed());
        }
    }
}

/// The counts of a request that the engine accepted. Dropping it before its end counts it as cancelled.
#[derive(Debug)]
pub(super) struct Counted {
    whole: Arc<Whole>,
    ended: bool,
}

impl Counted {
    pub(super) fn completed(&mut self) {
        self.whole.ends();
        self.end(|metrics| &metrics.completed);
    }

    pub(super) fn failed(&mut self) {
        self.end(|metrics| &metrics.failed);
    }

    fn end(&mut self, counter: impl FnOnce(&Metrics) -> &AtomicU64) {
        if !std::mem::replace(&mut self.ended, true) {
            counter(&self.whole.metrics).fetch_add(1, Relaxed);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.end(|metrics| &metrics.cancelled);
    }
}

/// Upper bounds of the histogram buckets, in milliseconds.
const CLASSES: [u64; 17] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
];

/// A histogram of times.
#[derive(Debug, Default)]
struct Histogram {
    classes: [AtomicU64; CLASSES.len() + 1],
    micros: AtomicU64,
}

impl Histogram {
    fn add(&self, time: Duration) {
        let class = CLASSES.partition_point(|&end| Duration::from_millis(end) < time);
        self.classes[class].fetch_add(1, Relaxed);
        self.micros.fetch_add(time.as_micros() as u64, Relaxed);
    }

    fn write(&self, f: &mut impl fmt::Write, name: &str, help: &str) -> fmt::Result {
        writeln!(f, "# HELP {name} {help}\n# TYPE {name} histogram")?;
        let mut all = 0;
        for (class, count) in self.classes.iter().enumerate() {
            all += count.load(Relaxed);
            let end = CLASSES
                .get(class)
                .map_or("+Inf".to_owned(), |&end| (end as f64 / 1e3).to_string());
            writeln!(f, "{name}_bucket{{le=\"{end}\"}} {all}")?;
        }
        let seconds = self.micros.load(Relaxed) as f64 / 1e6;
        writeln!(f, "{name}_sum {seconds}\n{name}_count {all}")
    }
}

impl Metrics {
    pub(super) fn new(cache_type: CacheType) -> Self {
        Self {
            cache_type,
            ..Self::default()
        }
    }

    pub(super) fn submitted(&self, prompt: usize, whole: Arc<Whole>) -> Counted {
        self.submitted.fetch_add(1, Relaxed);
        self.prompt_tokens.fetch_add(prompt as u64, Relaxed);
        let ended = false;
        Counted { whole, ended }
    }

    pub(super) fn started(&self, time: Duration) {
        self.queue.add(time);
    }

    pub(super) fn step(&self, step: &StepReport) {
        self.step_requests.fetch_add(step.requests.into(), Relaxed);
        self.preemptions.fetch_add(step.preempted.into(), Relaxed);
    }

    /// Counts a token of an answer.
    pub(super) fn token(&self) {
        self.generated_tokens.fetch_add(1, Relaxed);
    }

    pub(super) fn first_token(&self, time: Duration) {
        self.first.add(time);
    }

    pub(super) fn next_token(&self, time: Duration) {
        self.between.add(time);
    }

    pub(super) fn refused(&self, status: StatusCode) {
        let counter = match status {
            StatusCode::TOO_MANY_REQUESTS => &self.refused_busy,
            // The server stops because it was asked to.
            StatusCode::SERVICE_UNAVAILABLE => &self.refused,
            status if status.is_server_error() => &self.failed,
            _ => &self.refused,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// A client has gone before the engine took its request.
    pub(super) fn left(&self) {
        self.left.fetch_add(1, Relaxed);
    }

    /// Updates the values that the engine itself knows, after each step.
    pub(super) fn engine(&self, engine: &Engine) {
        let composer = engine.composer();
        for (gauge, value) in [
            (&self.steps, engine.steps()),
            (&self.cached_tokens, composer.cached_tokens()),
            (&self.lost_tokens, composer.lost_tokens()),
            (&self.running, composer.running() as u64),
            (&self.waiting, composer.waiting() as u64),
            (&self.pages, composer.pool().pages().into()),
            (&self.free_pages, composer.pool().free_pages().into()),
            (
                &self.cached_pages,
                composer
                    .prefix_cache()
                    .map_or(0, |cache| cache.pages().into()),
            ),
        ] {
            gauge.store(value, Relaxed);
        }
    }
}

impl Metrics {
    /// All metrics as text, with the number of those who wait in lanes, and of taken places.
    pub(super) fn text(&self, lanes: &Lanes, places: &Places) -> String {
        let mut text = String::new();
        let [waiting, taken, all] =
            [lanes.waiting(), places.taken() as u64, places.all() as u64].map(AtomicU64::new);
        let written = self.write(&mut text, &waiting, [&taken, &all]);
        written.expect("a string takes everything");
        text
    }

    fn write(
        &self,
        f: &mut impl fmt::Write,
        lanes: &AtomicU64,
        [taken, places]: [&AtomicU64; 2],
    ) -> fmt::Result {
        let counters = [
            (
                "tandem_requests_total",
                "Requests that the engine took. Each choice of an answer is one.",
                &self.submitted,
            ),
            (
                "tandem_requests_completed_total",
                "Requests with an answer to its end, a stop text included.",
                &self.completed,
            ),
            (
                "tandem_requests_cancelled_total",
                "Requests whose client had gone before the end of its answer.",
                &self.cancelled,
            ),
            (
                "tandem_requests_failed_total",
                "Requests without an answer for a fault of the server, taken or not.",
                &self.failed,
            ),
            (
                "tandem_requests_busy_total",
                "Requests refused because too many waited or arrived at once.",
                &self.refused_busy,
            ),
            (
                "tandem_requests_refused_total",
                "Requests refused for what they asked, how they came, or because the server was stopping.",
                &self.refused,
            ),
            (
                "tandem_requests_left_total",
                "Requests for a text whose client had gone before the engine took them.",
                &self.left,
            ),
            (
                "tandem_prompt_tokens_total",
                "Tokens of prompts, once for each choice.",
                &self.prompt_tokens,
            ),
            (
                "tandem_cached_tokens_total",
                "Tokens of prompts found in the prefix cache, once for each request.",
                &self.cached_tokens,
            ),
            (
                "tandem_lost_tokens_total",
                "Tokens computed again after preemption.",
                &self.lost_tokens,
            ),
            (
                "tandem_generated_tokens_total",
                "Tokens drawn for answers, those behind a stop text included.",
                &self.generated_tokens,
            ),
            ("tandem_steps_total", "Steps of the engine.", &self.steps),
            (
                "tandem_step_requests_total",
                "Requests in steps, once for each step.",
                &self.step_requests,
            ),
            (
                "tandem_preemptions_total",
                "Times that a request lost its pages to others.",
                &self.preemptions,
            ),
        ];
        let gauges = [
            (
                "tandem_running_requests",
                "Requests that hold pages.",
                &self.running,
            ),
            (
                "tandem_waiting_requests",
                "Requests that wait.",
                &self.waiting,
            ),
            (
                "tandem_lane_waiting_requests",
                "Requests that wait to be tokenized.",
                lanes,
            ),
            (
                "tandem_taken_places",
                "Choices from their arrival to their end: read, tokenized, in the engine, or behind their prompt.",
                taken,
            ),
            (
                "tandem_places",
                "Choices that may be there at once.",
                places,
            ),
            ("tandem_pages", "Pages of the caches.", &self.pages),
            (
                "tandem_free_pages",
                "Pages that nobody holds.",
                &self.free_pages,
            ),
            (
                "tandem_cached_pages",
                "Pages that the prefix cache holds.",
                &self.cached_pages,
            ),
        ];
        for (kind, values) in [("counter", &counters[..]), ("gauge", &gauges[..])] {
            for (name, help, value) in values {
                writeln!(
                    f,
                    "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {}",
                    value.load(Relaxed)
                )?;
            }
        }
        let (name, cache_type) = ("tandem_cache_info", self.cache_type);
        writeln!(
            f,
            "# HELP {name} How the caches store keys and values.\n# TYPE {name} gauge\n{name}{{type=\"{cache_type}\"}} 1"
        )?;
        for (histogram, name, help) in [
            (
                &self.queue,
                "tandem_queue_seconds",
                "Time from a request to its first step, waiting to be tokenized included.",
            ),
            (
                &self.first,
                "tandem_first_token_seconds",
                "Time to the first token, waiting included.",
            ),
            (
                &self.between,
                "tandem_between_tokens_seconds",
                "Time between tokens of an answer.",
            ),
            (
                &self.whole,
                "tandem_request_seconds",
                "Time from a request to the end of its answer, whether or not its client has read it.",
            ),
        ] {
            histogram.write(f, name, help)?;
        }
        Ok(())
    }
}
