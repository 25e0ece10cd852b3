//! The steps that run before a server takes requests.

mod common;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use common::{PAGE_SIZE, PAGES, folder, options};
use tandem_engine::{Architecture, Backend, CpuBackend, Error, Weights, Work, calibrate::warm_up};

/// A step as a backend on a GPU tells it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    /// Requests with one token, and tokens of the others.
    decodes: usize,
    chunk: usize,
    keys: u32,
    /// Pages that the first two requests have in common.
    common: usize,
    /// Whether its rows have rules and log-probabilities.
    with_rules: bool,
}

/// A backend that records its steps and takes up to 6 requests in one.
struct Recording(CpuBackend, Arc<Mutex<Vec<Seen>>>);

impl Backend for Recording {
    common::of_the_backend_within!(but limits);

    fn step_tokens(&self) -> u32 {
        48
    }

    fn step_requests(&self) -> u32 {
        6
    }

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        let batch = &work.inputs.batch;
        let lengths = batch
            .qo_indptr
            .windows(2)
            .map(|at| (at[1] - at[0]) as usize);
        let lengths: Vec<_> = lengths.collect();
        let decodes = lengths.iter().filter(|&&tokens| tokens == 1).count();
        let table = &batch.parts[0].table;
        let common = match lengths.len() {
            0 | 1 => 0,
            _ => {
                let pairs = table.pages(0).iter().zip(table.pages(1));
                pairs.take_while(|(a, b)| a == b).count()
            }
        };
        let logits = &work.logits;
        assert!([0, work.rows.len()].contains(&logits.adjusted.len()));
        assert_eq!(logits.adjusted.len(), logits.log_probs.len());
        let slots: BTreeSet<_> = work.inputs.slots.iter().collect();
        assert_eq!(
            slots.len(),
            work.inputs.slots.len(),
            "each token has its own"
        );
        self.1.lock().unwrap().push(Seen {
            decodes,
            chunk: work.inputs.tokens.len() - decodes,
            keys: work.inputs.positions[0] + 1,
            common,
            with_rules: !logits.is_empty(),
        });
        self.0.begin(work)
    }
}

/// The first step of a size has no graph, the second captures one, and the third runs it.
#[test]
fn each_usual_step_runs_three_times() {
    let architecture = Architecture::read(&folder("llama3")).unwrap();
    let weights = Weights::open(&folder("llama3")).unwrap();
    let positions = architecture.positions;
    let options = options(PAGES, PAGE_SIZE);
    let backend = CpuBackend::load(architecture, &weights, &options, &mut |_| ()).unwrap();
    let seen = Arc::default();
    let mut backend = Recording(backend, Arc::clone(&seen));
    warm_up(&mut backend).unwrap();
    let seen = seen.lock().unwrap();
    let counts = |one: Seen| seen.iter().filter(|&&other| other == one).count();
    // 64 pages of 16 tokens.
    let long = [(1, positions), (2, positions), (4, 256), (6, 160)];
    for with_rules in [false, true] {
        for (decodes, keys) in long {
            for keys in [64, keys] {
                let step = Seen {
                    decodes,
                    chunk: 0,
                    keys,
                    common: 0,
                    with_rules,
                };
                assert_eq!(counts(step), 3, "{step:?}");
            }
            let prefixes = seen.iter().filter(|step| {
                step.decodes == decodes && step.common >= 20 && step.with_rules == with_rules
            });
            assert_eq!(
                prefixes.count(),
                if decodes > 1 { 3 } else { 0 },
                "{decodes}"
            );
        }
    }
    let hybrid = Seen {
        decodes: 5,
        chunk: 43,
        keys: 192,
        common: 0,
        with_rules: false,
    };
    assert_eq!(counts(hybrid), 3, "{hybrid:?}");
    let chunks: BTreeSet<_> = seen.iter().map(|step| step.chunk).collect();
    assert_eq!(chunks.into_iter().collect::<Vec<_>>(), [0, 16, 32, 43, 48]);
}
