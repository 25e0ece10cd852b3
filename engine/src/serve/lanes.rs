//! Limits how many prompts are tokenized concurrently.

use std::sync::Arc;

use tokio::{
    sync::Semaphore,
    task::{JoinError, spawn_blocking},
};

/// Prompts up to this number of bytes are short; they do not wait behind long ones.
const SHORT: usize = 64 << 10;
/// A tokenizer takes about 250 bytes of memory and 10 µs per byte of text. For the longest body that is a gigabyte and
/// most of a minute, whether or not the model has positions for the prompt.
const LONG_AT_ONCE: usize = 2;
const SHORT_AT_ONCE: usize = 32;

/// Two semaphores: short prompts wait only for short ones, long prompts only for long ones.
#[derive(Debug)]
pub(super) struct Lanes {
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
}

impl Lanes {
    pub(super) fn new() -> Self {
        Self {
            short: Arc::new(Semaphore::new(SHORT_AT_ONCE)),
            long: Arc::new(Semaphore::new(LONG_AT_ONCE)),
        }
    }

    /// Runs work on `bytes` bytes of text when its lane is free. Work that has begun continues and keeps its place even
    /// if the client has gone.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let lane = match bytes > SHORT {
            true => &self.long,
            false => &self.short,
        };
        let place = Arc::clone(lane).acquire_owned().await;
        spawn_blocking(move || {
            let _place = place.expect("it is never closed");
            work()
        })
        .await
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

    #[test]
    fn few_long_prompts_are_read_at_once_and_short_ones_pass_them() {
        let runtime = tokio::runtime::Builder::new_multi_thread().build();
        runtime.unwrap().block_on(async {
            let (lanes, [now, most]) = (Arc::new(Lanes::new()), [0, 0].map(AtomicUsize::new));
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
        });
    }
}
