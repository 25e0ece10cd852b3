//! Threads that begin together, and end when one of them fails.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::Failure;

/// Error of a rank that was waiting when another rank failed.
const ANOTHER: &str = "another rank failed";

/// The results of all ranks, or the error of the first rank that failed for its own reason.
pub(super) fn all<T>(mut found: Vec<Result<T, Failure>>) -> Result<Vec<T>, Failure> {
    let waited = |failure: &Failure| matches!(failure, Failure::Wrong(why) if why == ANOTHER);
    let cause = |of_rank: &Result<T, Failure>| of_rank.as_ref().is_err_and(|why| !waited(why));
    if let Some(rank) = found.iter().position(cause) {
        found.swap(0, rank);
    }
    found.into_iter().collect()
}

/// A barrier for threads. It also releases them when one of them fails.
pub(super) struct Gate {
    threads: usize,
    arrived: AtomicUsize,
    failed: AtomicBool,
}

impl Gate {
    pub(super) const fn new(threads: usize) -> Self {
        Self {
            threads,
            arrived: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        }
    }

    /// Releases all threads with an error.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    /// A guard that releases the others if this thread panics.
    pub(super) const fn enter(&self) -> Passing<'_> {
        Passing(self)
    }

    pub(super) fn wait(&self) -> Result<(), Failure> {
        let before = self.arrived.fetch_add(1, Ordering::SeqCst);
        let all = (before / self.threads + 1) * self.threads;
        while self.arrived.load(Ordering::SeqCst) < all {
            if self.failed.load(Ordering::SeqCst) {
                return Err(Failure::Wrong(ANOTHER.to_owned()));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// See [`Gate::enter`].
pub(super) struct Passing<'a>(&'a Gate);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_failed_says_why() {
        let waited = || Err::<u32, _>(Failure::Wrong(ANOTHER.to_owned()));
        let failed = || Err(Failure::Input("no kernel".to_owned()));
        let why = |found| all(found).unwrap_err().to_string();
        assert!(why(vec![Ok(1), waited(), failed()]).contains("no kernel"));
        assert!(why(vec![Ok(1), waited()]).contains(ANOTHER));
        assert_eq!(all(vec![Ok(1), Ok(2)]).unwrap(), [1, 2]);
    }

    /// The other threads once waited forever.
    #[test]
    fn a_thread_that_panics_releases_the_others() {
        let gate = Gate::new(2);
        let waited = std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.wait());
            let panics = scope.spawn(|| {
                let _passing = gate.enter();
                panic!("as the test asks");
            });
            assert!(panics.join().is_err());
            waits.join().unwrap()
        });
        assert_eq!(waited.unwrap_err().to_string(), ANOTHER);
    }
}
