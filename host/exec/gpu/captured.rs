//! What captured graphs hold, compared with the plan that they would run.
//!
//! A graph keeps the launches, tensors and pools of its runs, and reads the plan from the workspace. So each run within a capture
//! leaves a [`Note`], and each launch of the graph compares its notes with the plan that is then in the workspace.

use std::{
    cell::RefCell,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    KvPool, LaunchSet, RunTensors, driver::Stream, launch_key::LaunchKey, launch_plan::PartNeeds,
    launch_set::LaunchSubset,
};
use crate::Error;

thread_local! {
    /// The captures that this thread has open, the innermost last.
    static OPEN: RefCell<Vec<(Stream, Vec<Note>)>> = const { RefCell::new(Vec::new()) };
}

/// What the plan in a workspace needs of the launches, tensors and pools of a run. Shared by the workspace and its graphs. The lock
/// only makes this sound for graphs on other threads: callers order uploads and launches themselves.
#[derive(Clone, Debug)]
pub(super) struct Uploaded(Arc<Mutex<Needs>>);

#[derive(Debug)]
struct Needs {
    /// The launch set of the workspace, if it has one.
    keys: Vec<LaunchKey>,
    /// Whether there is a plan.
    loaded: bool,
    tokens: u32,
    /// Of the launch set.
    launches: LaunchSubset,
    /// [`LaunchPlan::fingerprint`](super::launch_plan::LaunchPlan::fingerprint), or 0 with a launch set, whose launches
    /// read the plan's numbers on the device.
    fingerprint: u64,
    /// As [`Plan::fixed_splits`](crate::plan::Plan::fixed_splits).
    fixed_splits: bool,
    parts: Vec<PartNeeds>,
}

impl Uploaded {
    /// There is no plan yet in a workspace with this launch set.
    pub(super) fn new(set: Option<&LaunchSet>) -> Self {
        let needs = Needs {
            keys: set.map_or_else(Vec::new, |set| set.keys.clone()),
            loaded: false,
            tokens: 0,
            launches: LaunchSubset::NONE,
            fingerprint: 0,
            fixed_splits: false,
            parts: Vec::new(),
        };
        Self(Arc::new(Mutex::new(needs)))
    }

    fn needs(&self) -> MutexGuard<'_, Needs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is no plan any more.
    pub(super) fn clear(&self) {
        let mut needs = self.needs();
        (needs.loaded, needs.launches) = (false, LaunchSubset::NONE);
    }

    /// There is a plan of so many query tokens and of these parts, which needs these launches of the launch set. Without a
    /// launch set it has a fingerprint instead.
    pub(super) fn set(
        &self,
        tokens: u32,
        parts: &[PartNeeds],
        launches: LaunchSubset,
        fingerprint: u64,
        fixed_splits: bool,
    ) {
        let mut needs = self.needs();
        (needs.loaded, needs.tokens, needs.launches) = (true, tokens, launches);
        (needs.fingerprint, needs.fixed_splits) = (fingerprint, fixed_splits);
        needs.parts.clear();
        needs.parts.extend_from_slice(parts);
    }

    /// The launches of the launch set that the plan needs.
    pub(super) fn launches(&self) -> LaunchSubset {
        self.needs().launches
    }

    /// # Errors
    /// [`Error::NoPlan`].
    pub(super) fn check(&self) -> Result<(), Error> {
        match self.needs().loaded {
            true => Ok(()),
            false => Err(Error::NoPlan),
        }
    }
}

/// A run that was captured.
#[derive(Debug)]
pub(super) struct Note {
    uploaded: Uploaded,
    /// Its launches, of those of the launch set.
    launches: LaunchSubset,
    /// Of the plan that it was captured with.
    fingerprint: u64,
    /// Whether a decode reads two KV heads at a time.
    of_pairs: bool,
    /// Query tokens of its tensors.
    tokens: u32,
    /// Tokens in a page of its pools and the number of their pages.
    pools: Vec<PartNeeds>,
}

impl Note {
    fn new(
        uploaded: &Uploaded,
        launches: LaunchSubset,
        of_pairs: bool,
        tensors: &RunTensors<'_>,
    ) -> Self {
        let pool = |pool: &KvPool| PartNeeds {
            page_size: pool.k_strides.page_size,
            // Indices instead of page ids are only checked by kernels.
            pages: tensors.indices.map_or(pool.pages, |_| u32::MAX),
        };
        Self {
            uploaded: uploaded.clone(),
            launches,
            fingerprint: uploaded.needs().fingerprint,
            of_pairs,
            tokens: u32::try_from(tensors.q.shape[0]).unwrap_or(u32::MAX),
            pools: tensors.pools.iter().map(pool).collect(),
        }
    }

    /// Whether another note says the same.
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.uploaded.0, &other.uploaded.0)
            && (self.launches, self.fingerprint, self.of_pairs)
                == (other.launches, other.fingerprint, other.of_pairs)
            && (self.tokens, &self.pools) == (other.tokens, &other.pools)
    }

    /// Checks that the run can compute the plan that is in its workspace now.
    ///
    /// # Errors
    /// [`Error::NoPlan`], [`Error::NotInGraph`], [`Error::BeyondGraph`], [`Error::OtherLaunches`].
    pub(super) fn check(&self) -> Result<(), Error> {
        let needs = self.uploaded.needs();
        if !needs.loaded {
            return Err(Error::NoPlan);
        }
        if let Some(place) = needs.launches.beyond(self.launches) {
            let key = needs.keys.get(place);
            let launch = key.map_or_else(|| "that merges partial states".into(), LaunchKey::words);
            return Err(Error::NotInGraph { launch });
        }
        // Its bits would differ from those of the same request in other runs.
        if needs.fixed_splits && self.of_pairs {
            let launch = "of decodes that read one KV head at a time (for fixed splits)".into();
            return Err(Error::NotInGraph { launch });
        }
        let beyond = |what, planned, captured| Error::BeyondGraph {
            what,
            planned,
            captured,
        };
        if needs.tokens > self.tokens {
            return Err(beyond("query tokens", needs.tokens, self.tokens));
        }
        for (part, pool) in needs.parts.iter().zip(&self.pools) {
            if part.page_size != pool.page_size {
                let what = "tokens in a page";
                return Err(beyond(what, part.page_size, pool.page_size));
            }
            if part.pages > pool.pages {
                return Err(beyond("pages of a KV pool", part.pages, pool.pages));
            }
        }
        if needs.fingerprint != self.fingerprint {
            return Err(Error::OtherLaunches);
        }
        Ok(())
    }
}

/// Begins to collect the notes of the runs that this thread makes.
pub(super) fn open(stream: Stream) {
    OPEN.with_borrow_mut(|open| open.push((stream, Vec::new())));
}

/// The notes of the capture that was opened last, which ends.
pub(super) fn close() -> Vec<Note> {
    let last = OPEN.with_borrow_mut(Vec::pop);
    last.map_or_else(Vec::new, |(_, notes)| notes)
}

/// Refuses a call that cannot be captured if this thread captures its stream. A stream that has joined the capture is not known
/// here, nor are captures by other crates.
///
/// # Errors
/// [`Error::InCapture`].
pub(super) fn refuse(
    stream: Stream,
    call: &'static str,
    instead: &'static str,
) -> Result<(), Error> {
    let captures = OPEN.with_borrow(|open| open.iter().any(|(captured, _)| *captured == stream));
    match captures {
        true => Err(Error::InCapture { call, instead }),
        false => Ok(()),
    }
}

/// Notes a run of these launches on `stream`, if this thread captures. The stream may be another one that has joined a capture, so a run on
/// a stream of no capture counts for all that are open.
pub(super) fn note(
    uploaded: &Uploaded,
    launches: LaunchSubset,
    of_pairs: bool,
    tensors: &RunTensors<'_>,
    stream: Stream,
) {
    OPEN.with_borrow_mut(|open| {
        let known = open.iter().any(|(captured, _)| *captured == stream);
        for (captured, notes) in open {
            if known && *captured != stream {
                continue;
            }
            // The layers of a model say the same.
            let note = Note::new(uploaded, launches, of_pairs, tensors);
            if !notes.iter().any(|other| note.is(other)) {
                notes.push(note);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        exec::gpu::DeviceTensor,
        plan::DeviceDescription,
        problem::{Dtype, KvLayout, Spec},
    };

    const A: u64 = 1 << 30;

    fn stream(number: usize) -> Stream {
        Stream::from_raw(std::ptr::without_provenance_mut(number))
    }

    /// A plan of so many tokens and of parts with this page size and this number of pages.
    fn upload(uploaded: &Uploaded, tokens: u32, parts: &[(u32, u32)]) {
        let part = |&(page_size, pages): &(u32, u32)| PartNeeds { page_size, pages };
        let parts: Vec<_> = parts.iter().map(part).collect();
        uploaded.set(tokens, &parts, LaunchSubset::NONE, 0, false);
    }

    /// Notes a run of so many tokens over a pool of so many pages of 16.
    fn run(uploaded: &Uploaded, tokens: usize, pages: u32, on: Stream) {
        let spec = Spec::new(8, 2, 128);
        let q = DeviceTensor::new(A, Dtype::BF16, [tokens, 8, 128]);
        let pools = [KvPool::new(&spec, KvLayout::Nhd, 16, pages, A, A)];
        let tensors = RunTensors::new(&q, &pools, &q);
        note(uploaded, LaunchSubset::ALL, false, &tensors, on);
    }

    fn check(notes: &[Note]) -> Result<(), Error> {
        notes.iter().try_for_each(Note::check)
    }

    #[test]
    fn plans_beyond_what_was_captured_are_refused() {
        let uploaded = Uploaded::new(None);
        assert_eq!(uploaded.check(), Err(Error::NoPlan));
        upload(&uploaded, 2, &[(16, 10)]);
        open(stream(1));
        for _ in 0..80 {
            run(&uploaded, 4, 20, stream(1));
        }
        let notes = close();
        assert_eq!(notes.len(), 1, "80 layers say the same");
        // Also empty plans, and those with more parts than the graph has work for.
        let parts: [(u32, &[(u32, u32)]); 4] = [
            (4, &[(16, 20)]),
            (1, &[(16, 1)]),
            (0, &[]),
            (4, &[(16, 20), (8, 99)]),
        ];
        for (tokens, parts) in parts {
            upload(&uploaded, tokens, parts);
            assert_eq!(check(&notes), Ok(()), "{tokens} tokens, {parts:?}");
        }
        for (tokens, part, what, planned, captured) in [
            (5, (16, 20), "query tokens", 5, 4),
            (4, (16, 21), "pages of a KV pool", 21, 20),
            (4, (8, 20), "tokens in a page", 8, 16),
        ] {
            upload(&uploaded, tokens, &[part]);
            let error = check(&notes).unwrap_err();
            let expected = Error::BeyondGraph {
                what,
                planned,
                captured,
            };
            assert_eq!(error, expected);
            let text = error.to_string();
            let words = [planned.to_string(), captured.to_string(), what.into()];
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
        uploaded.clear();
        assert_eq!(check(&notes), Err(Error::NoPlan));
    }

    #[test]
    fn plans_that_need_a_launch_which_was_left_out_are_refused() {
        let spec = Spec::new(8, 2, 128);
        let device = DeviceDescription::named("h200").unwrap();
        let set = LaunchSet::decodes(&device, &spec).unwrap();
        let uploaded = Uploaded::new(Some(&set));
        assert_eq!(uploaded.launches(), LaunchSubset::NONE);
        let (keys, merges) = (set.keys(), set.keys().len());
        let q = DeviceTensor::new(A, Dtype::BF16, [1, 8, 128]);
        let pools = [KvPool::new(&spec, KvLayout::Nhd, 16, 20, A, A)];
        let tensors = RunTensors::new(&q, &pools, &q);
        let capture = |launches: &[LaunchSubset]| {
            open(stream(1));
            for &launches in launches {
                note(&uploaded, launches, false, &tensors, stream(1));
            }
            close()
        };
        let of = |places: &[usize]| {
            let mut subset = LaunchSubset::NONE;
            places.iter().for_each(|&place| subset.add(place));
            subset
        };
        let held = of(&[1, merges]);
        assert_eq!(capture(&[held, held, LaunchSubset::ALL]).len(), 2);
        let notes = capture(&[LaunchSubset::ALL, held]);
        for fits in [&[1, merges][..], &[1], &[merges], &[]] {
            uploaded.set(1, &[], of(fits), 0, false);
            assert_eq!(check(&notes), Ok(()), "{fits:?}");
        }
        for (needed, place) in [(of(&[0, 1]), 0), (of(&[1, 2, merges]), 2)] {
            uploaded.set(1, &[], needed, 0, false);
            let launch = keys[place].words();
            assert_eq!(check(&notes), Err(Error::NotInGraph { launch }));
        }
        let without_merges = capture(&[of(&[1])]);
        uploaded.set(1, &[], held, 0, false);
        let error = check(&without_merges).unwrap_err().to_string();
        assert!(error.contains("merges partial states"), "{error}");
        uploaded.clear();
        assert_eq!(uploaded.launches(), LaunchSubset::NONE);
    }

    /// Which kernel reads two KV heads at a time depends on the plan at the capture; fixed splits always have the other one.
    #[test]
    fn plans_with_fixed_splits_are_refused_by_graphs_that_read_two_heads_at_a_time() {
        let uploaded = Uploaded::new(None);
        let spec = Spec::new(8, 2, 128);
        let q = DeviceTensor::new(A, Dtype::BF16, [1, 8, 128]);
        let pools = [KvPool::new(&spec, KvLayout::Nhd, 16, 20, A, A)];
        let tensors = RunTensors::new(&q, &pools, &q);
        let capture = |of_pairs: &[bool]| {
            open(stream(1));
            for &of_pairs in of_pairs {
                note(&uploaded, LaunchSubset::ALL, of_pairs, &tensors, stream(1));
            }
            close()
        };
        upload(&uploaded, 1, &[(16, 10)]);
        let (one, some) = (capture(&[false, false]), capture(&[false, true]));
        assert_eq!([one.len(), some.len()], [1, 2]);
        for fixed in [false, true, false] {
            uploaded.set(1, &[], LaunchSubset::NONE, 0, fixed);
            assert_eq!(check(&one), Ok(()));
            let refused = matches!(check(&some), Err(Error::NotInGraph { launch }) if launch.contains("fixed splits"));
            assert_eq!(refused, fixed);
        }
    }

    #[test]
    fn each_run_of_a_graph_has_its_own_limits() {
        let (one, other) = (Uploaded::new(None), Uploaded::new(None));
        open(stream(1));
        run(&one, 8, 20, stream(1));
        run(&one, 8, 30, stream(1));
        run(&other, 2, 20, stream(1));
        let notes = close();
        assert_eq!(notes.len(), 3);
        upload(&one, 8, &[(16, 20)]);
        upload(&other, 2, &[(16, 20)]);
        assert_eq!(check(&notes), Ok(()));
        upload(&one, 8, &[(16, 21)]);
        assert!(check(&notes).is_err(), "the first layer has fewer pages");
        upload(&one, 8, &[(16, 20)]);
        upload(&other, 3, &[(16, 20)]);
        assert!(check(&notes).is_err(), "the other workspace");
    }

    #[test]
    fn a_run_counts_for_the_capture_that_has_it() {
        let uploaded = Uploaded::new(None);
        run(&uploaded, 1, 20, stream(1));
        open(stream(1));
        open(stream(2));
        run(&uploaded, 2, 20, stream(1));
        run(&uploaded, 3, 20, stream(2));
        // It may have joined either.
        run(&uploaded, 4, 20, stream(3));
        std::thread::scope(|threads| {
            threads.spawn(|| run(&uploaded, 5, 20, stream(1)));
        });
        let tokens = |notes: Vec<Note>| notes.iter().map(|note| note.tokens).collect::<Vec<_>>();
        assert_eq!(tokens(close()), [3, 4]);
        assert_eq!(tokens(close()), [2, 4]);
        assert!(close().is_empty());
    }
}
