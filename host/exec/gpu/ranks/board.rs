//! A board on the host where the ranks of one process announce their next runs.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::shard::RankError;

pub(super) struct Board {
    notes: Mutex<Notes>,
    changed: Condvar,
}

struct Notes {
    /// For each rank its announcements, by ascending number, from the last one of the slowest rank on. A rank may be several
    /// ahead, because only runs wait for the others.
    announced: Vec<VecDeque<(u64, usize)>>,
    /// The rank that stopped, and why.
    stopped: Vec<(u32, String)>,
}

impl Board {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            notes: Mutex::new(Notes {
                announced: vec![VecDeque::from([(0, 0)]); ranks],
                stopped: Vec::new(),
            }),
            changed: Condvar::new(),
        }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        // Each change is complete in itself, so that a panic leaves nothing half done.
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn announce(&self, rank: u32, step: u64, tokens: usize) {
        let mut notes = self.notes();
        let announced = &mut notes.announced;
        announced[rank as usize].push_back((step, tokens));
        // A rank compares only its last announcement.
        let last = |own: &VecDeque<(u64, usize)>| own.back().map_or(0, |(number, _)| *number);
        let slowest = announced.iter().map(last).min().unwrap_or(0);
        for own in announced {
            while own.front().is_some_and(|(number, _)| *number < slowest) {
                own.pop_front();
            }
        }
        self.changed.notify_all();
    }

    pub(super) fn stop(&self, rank: u32, reason: &str) {
        self.notes().stopped.push((rank, reason.to_owned()));
        self.changed.notify_all();
    }

    /// Why the others stopped this rank.
    pub(super) fn failure(&self, rank: u32) -> RankError {
        let notes = self.notes();
        let other = notes.stopped.iter().find(|(failed, _)| *failed != rank);
        let (failed, reason) = other.cloned().unwrap_or((rank, "it stopped itself".into()));
        RankError::Failed {
            rank,
            failed,
            reason,
        }
    }

    /// Waits until all ranks have announced the step, and compares.
    pub(super) fn agree(
        &self,
        rank: u32,
        step: u64,
        tokens: usize,
        timeout: Duration,
    ) -> Result<(), RankError> {
        let begin = Instant::now();
        let mut notes = self.notes();
        loop {
            let of = |other: usize| {
                let last = &notes.announced[other];
                last.iter().find(|(number, _)| *number == step)
            };
            let ranks = notes.announced.len();
            let differs = |other: &usize| of(*other).is_some_and(|(_, its)| *its != tokens);
            if let Some(other) = (0..ranks).find(differs) {
                return Err(RankError::Disagree {
                    rank,
                    tokens,
                    other: other as u32,
                    other_tokens: of(other).map_or(0, |(_, its)| *its),
                });
            }
            let Some(missing) = (0..ranks).find(|&other| of(other).is_none()) else {
                return Ok(());
            };
            let stopped = notes.stopped.iter().find(|(failed, _)| *failed != rank);
            if let Some((failed, reason)) = stopped.cloned() {
                return Err(RankError::Failed {
                    rank,
                    failed,
                    reason,
                });
            }
            let waited = begin.elapsed();
            let Some(left) = timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(RankError::Silent {
                    rank,
                    missing: missing as u32,
                    waited_ms: waited.as_millis() as u64,
                });
            };
            let woken = self.changed.wait_timeout(notes, left);
            notes = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(30);

    #[test]
    fn sizes_that_differ_are_an_error_on_both() {
        let board = Board::new(2);
        board.announce(0, 1, 64);
        board.announce(1, 1, 65);
        let expected = |rank, tokens, other, other_tokens| RankError::Disagree {
            rank,
            tokens,
            other,
            other_tokens,
        };
        assert_eq!(board.agree(0, 1, 64, SHORT), Err(expected(0, 64, 1, 65)));
        assert_eq!(board.agree(1, 1, 65, SHORT), Err(expected(1, 65, 0, 64)));
    }

    #[test]
    fn one_rank_may_be_a_step_ahead() {
        let board = Board::new(2);
        board.announce(0, 1, 64);
        board.announce(1, 1, 64);
        board.announce(0, 2, 8);
        assert_eq!(board.agree(1, 1, 64, SHORT), Ok(()));
    }

    /// Steps without a run do not wait.
    #[test]
    fn a_rank_may_be_many_steps_ahead() {
        let board = Board::new(2);
        for step in 1..=10 {
            board.announce(0, step, 60 + step as usize);
        }
        for step in 1..=10 {
            board.announce(1, step, 60 + step as usize);
            let said = board.agree(1, step, 60 + step as usize, SHORT);
            assert_eq!(said, Ok(()), "step {step}");
        }
        let kept = board
            .notes()
            .announced
            .iter()
            .map(|own| own.len())
            .sum::<usize>();
        assert_eq!(kept, 2, "nobody asks for earlier ones");
    }

    #[test]
    fn silence_and_failure_are_errors_in_time() {
        let board = Board::new(3);
        board.announce(0, 1, 64);
        board.announce(2, 1, 64);
        let begin = Instant::now();
        let said = board.agree(0, 1, 64, SHORT);
        assert!(
            matches!(
                said,
                Err(RankError::Silent {
                    rank: 0,
                    missing: 1,
                    ..
                })
            ),
            "{said:?}"
        );
        assert!(begin.elapsed() < 10 * SHORT);
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| board.agree(0, 1, 64, Duration::from_secs(60)));
            board.stop(1, "out of memory");
            let said = waits.join().unwrap().unwrap_err();
            assert!(said.to_string().contains("out of memory"), "{said}");
        });
    }
}
