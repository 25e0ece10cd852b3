//! Limits how many prompts are tokenized, and how many large bodies are parsed, concurrently.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use tokio::{sync::Semaphore, task::spawn_blocking};

use super::{api::Prompt, refusal::Refusal};
use crate::Text;

/// Prompts up to this number of bytes are short; they do not wait behind long ones.
pub(super) const SHORT: usize = 64 << 10;
/// A tokenizer takes about 250 bytes of memory and 10 µs per byte of text. For the longest body that is a gigabyte and
/// most of a minute, whether or not the model has positions for the prompt.
const LONG_AT_ONCE: usize = 2;
const SHORT_AT_ONCE: usize = 32;
/// A body is parsed in about 10 ns per byte.
const BODIES_AT_ONCE: usize = 2;
/// Long prompts that may wait: the last of them for about as long as 8 others take.
const LONG_WAITING: u64 = 16;

/// Two lanes to be tokenized: short prompts wait only for short ones, long prompts only for long ones. And one for bodies, which
/// are parsed before.
#[derive(Debug)]
pub(super) struct Lanes {
    short: Lane,
    long: Lane,
    bodies: Lane,
}

#[derive(Debug)]
struct Lane {
    free: Arc<Semaphore>,
    waiting: AtomicU64,
    most_waiting: u64,
}

/// Counts a request as waiting until it is dropped.
struct Waits<'a>(&'a AtomicU64);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Lanes {
    /// The lanes of a server with so many places. Long prompts that wait take at most half of them.
    pub(super) fn new(places: usize) -> Self {
        let lane = |at_once, most_waiting| Lane {
            free: Arc::new(Semaphore::new(at_once)),
            waiting: AtomicU64::new(0),
            most_waiting,
        };
        Self {
            // The places limit their number.
            short: lane(SHORT_AT_ONCE, u64::MAX),
            long: lane(LONG_AT_ONCE, (places as u64 / 2).min(LONG_WAITING)),
            bodies: lane(BODIES_AT_ONCE, u64::MAX),
        }
    }

    /// Number of requests that wait to be tokenized.
    pub(super) fn waiting(&self) -> u64 {
        let [short, long] = [&self.short, &self.long].map(|lane| lane.waiting.load(Relaxed));
        short + long
    }

    /// Tokens of prompts. A template may write much for a short conversation, so what it writes chooses a lane again.
    pub(super) async fn tokenize(
        &self,
        text: &Arc<Text>,
        mut prompts: Vec<Prompt>,
    ) -> Result<Vec<Vec<u32>>, Refusal> {
        let bytes = |prompts: &[Prompt]| prompts.iter().map(Prompt::text_bytes).sum();
        let mut given = bytes(&prompts);
        let is_chat = |prompt: &Prompt| matches!(prompt, Prompt::Chat(..));
        if given <= SHORT && prompts.iter().any(is_chat) {
            let text = Arc::clone(text);
            let render = move || prompts.into_iter().map(|one| one.render(&text)).collect();
            let rendered: Result<Vec<_>, _> = self.run(given, render).await?;
            prompts = rendered?;
            given = bytes(&prompts);
        }
        let text = Arc::clone(text);
        let encode = move || prompts.into_iter().map(|one| one.encode(&text)).collect();
        let encoded: Result<Vec<_>, _> = self.run(given, encode).await?;
        Ok(encoded?)
    }

    /// Runs work on `bytes` bytes of text when its lane is free. Work that has begun continues and keeps its place even
    /// if the client has gone.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        match bytes > SHORT {
            true => self.long.run(work).await,
            false => self.short.run(work).await,
        }
    }

    /// Parses a body of `bytes` bytes: a large one when its lane is free, on another thread. The threads
    /// that answer requests are few, and `/health` must not wait.
    pub(super) async fn parse<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        match bytes > SHORT {
            true => self.bodies.run(work).await,
            false => Ok(work()),
        }
    }
}

impl Lane {
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let free = Arc::clone(&self.free);
        let place = match Arc::clone(&free).try_acquire_owned() {
            Ok(place) => place,
            Err(_) => {
                let waits = self.waiting.fetch_add(1, Relaxed);
                let _waits = Waits(&self.waiting);
                if waits >= self.most_waiting {
                    let most = self.most_waiting;
                    return Err(Refusal::busy(&format!(
                        "the queue of prompts over {SHORT} bytes is full (limit {most}: half of --batch and --waiting together, up to {LONG_WAITING})"
                    )));
                }
                free.acquire_owned().await.expect("it is never closed")
            }
        };
        let worked = spawn_blocking(move || {
            let _place = place;
            work()
        });
        worked
            .await
            .map_err(|error| Refusal::failed(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        thread,
        time::Duration,
    };

    use super::*;
    use crate::ChatOptions;

    #[test]
    fn few_long_prompts_are_read_at_once_and_short_ones_pass_them() {
        let runtime = tokio::runtime::Builder::new_multi_thread().build();
        runtime.unwrap().block_on(async {
            let (lanes, [now, most]) = (Arc::new(Lanes::new(64)), [0, 0].map(AtomicUsize::new));
            let counted = Arc::new((now, most));
            let begin = |client: usize| {
                let (lanes, counted) = (Arc::clone(&lanes), Arc::clone(&counted));
                let task = tokio::spawn(async move {
                    let work = move || {
                        let (now, most) = &*counted;
                        most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                        thread::sleep(Duration::from_millis(50));
                        now.fetch_sub(1, SeqCst);
                    };
                    lanes.run(SHORT + 1, work).await
                });
                (client, task)
            };
            let tasks: Vec<_> = (0..12).map(begin).collect();
            assert_eq!(lanes.run(SHORT, || 7).await.unwrap(), 7);
            for (client, task) in tasks {
                match client % 3 {
                    // These clients go away. Work that has begun for them still keeps its place.
                    0 => task.abort(),
                    _ => task.await.unwrap().unwrap(),
                }
            }
            assert_eq!(counted.1.load(SeqCst), LONG_AT_ONCE);
            assert_eq!(lanes.waiting(), 0);
        });
    }

    /// A runtime with one thread: what is parsed on it delays all other requests.
    #[test]
    fn large_bodies_are_parsed_on_other_threads() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(async {
            let (lanes, own) = (Lanes::new(4), thread::current().id());
            let parsed = async |bytes| lanes.parse(bytes, || thread::current().id()).await;
            assert_eq!(parsed(SHORT).await.unwrap(), own);
            assert_ne!(parsed(SHORT + 1).await.unwrap(), own);
            // Bodies beyond those that are parsed wait, and are not counted as prompts.
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let ended = Arc::new(std::sync::Mutex::new(ended));
            let lanes = Arc::new(lanes);
            let tasks: Vec<_> = (0..20)
                .map(|_| {
                    let (lanes, ended) = (Arc::clone(&lanes), Arc::clone(&ended));
                    let work = move || ended.lock().unwrap().recv().is_err();
                    tokio::spawn(async move { lanes.parse(SHORT + 1, work).await })
                })
                .collect();
            while lanes.bodies.waiting.load(Relaxed) < 18 {
                tokio::task::yield_now().await;
            }
            assert_eq!(
                (lanes.waiting(), lanes.bodies.free.available_permits()),
                (0, 0)
            );
            drop(end);
            for task in tasks {
                assert!(task.await.unwrap().unwrap());
            }
        });
    }

    /// A template may write much for a short message.
    #[test]
    fn what_a_template_writes_is_long_or_short() {
        let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen2");
        let folder = tempfile::tempdir().unwrap();
        let [from, to] = [&fixture, folder.path()].map(|folder| folder.join("tokenizer.json"));
        std::fs::copy(from, to).unwrap();
        let template = "{% for m in messages %}{{ m.content * 1000 }}{% endfor %}";
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let text = Arc::new(Text::read(folder.path()).unwrap());
        let chat = |content: &str| {
            let message = serde_json::json!({"role": "user", "content": content});
            vec![Prompt::Chat(vec![message], ChatOptions::default())]
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().build();
        runtime.unwrap().block_on(async {
            let lanes = Arc::new(Lanes::new(64));
            let busy = Arc::clone(&lanes.long.free);
            let busy = busy.acquire_many_owned(LONG_AT_ONCE as u32).await.unwrap();
            let short = lanes.tokenize(&text, chat("a")).await.unwrap();
            assert_eq!(short[0].len(), 1000);
            let (waits, of, long) = (
                Arc::clone(&lanes),
                Arc::clone(&text),
                chat(&"a".repeat(100)),
            );
            let task = tokio::spawn(async move { waits.tokenize(&of, long).await });
            while lanes.waiting() == 0 {
                assert!(!task.is_finished(), "it did not wait");
                tokio::task::yield_now().await;
            }
            drop(busy);
            assert_eq!(task.await.unwrap().unwrap()[0].len(), 100_000);
        });
    }

    #[test]
    fn few_long_prompts_wait() {
        let runtime = tokio::runtime::Builder::new_multi_thread().build();
        runtime.unwrap().block_on(async {
            for (places, most) in [(2, 1), (3, 1), (1000, LONG_WAITING)] {
                let lanes = Arc::new(Lanes::new(places));
                let (end, ended) = std::sync::mpsc::channel::<()>();
                let ended = Arc::new(std::sync::Mutex::new(ended));
                let begin = || {
                    let (lanes, ended) = (Arc::clone(&lanes), Arc::clone(&ended));
                    let work = move || ended.lock().unwrap().recv().is_err();
                    tokio::spawn(async move { lanes.run(SHORT + 1, work).await })
                };
                let tasks: Vec<_> = (0..LONG_AT_ONCE as u64 + most).map(|_| begin()).collect();
                while lanes.waiting() < most {
                    tokio::task::yield_now().await;
                }
                let refused = lanes.run(SHORT + 1, || ()).await.unwrap_err();
                assert_eq!(refused.status, 429);
                assert_eq!(lanes.waiting(), most);
                assert_eq!(lanes.run(SHORT, || 7).await.unwrap(), 7);
                drop(end);
                for task in tasks {
                    assert!(task.await.unwrap().unwrap());
                }
            }
        });
    }
}
