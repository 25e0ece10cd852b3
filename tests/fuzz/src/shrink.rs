//! Smaller cases that fail, too.

use tandem_attn::{
    plan::PlanOptions,
    problem::{Compute, Dtype},
};

use crate::case::{Appends, Case, Numbers, PoolLayout, Scales};

type Smaller = fn(&Case) -> Vec<Case>;

/// Every case without one of some things.
fn without(case: &Case, count: usize, remove: impl Fn(&mut Case, usize)) -> Vec<Case> {
    let one = |at| {
        let mut smaller = case.clone();
        remove(&mut smaller, at);
        smaller
    };
    (0..count).rev().map(one).collect()
}

fn with(case: &Case, change: impl Fn(&mut Case)) -> Vec<Case> {
    let mut smaller = case.clone();
    change(&mut smaller);
    vec![smaller]
}

/// What is tried, that which makes most of a difference first.
const WAYS: [Smaller; 24] = [
    |case| {
        without(case, case.steps.len(), |case, at| {
            drop(case.steps.remove(at))
        })
    },
    |case| {
        let last = case.steps.len().saturating_sub(1);
        let rows = case.steps.get(last).map_or(0, |step| step.rows.len());
        without(case, rows, |case, at| {
            case.steps.last_mut().expect("a step").rows.remove(at);
        })
    },
    |case| {
        let rows = case.steps.first().map_or(0, |step| step.rows.len());
        without(case, rows, |case, at| {
            case.steps[0].rows.remove(at);
        })
    },
    |case| {
        without(case, case.steps.len(), |case, at| {
            case.steps[at].others.clear();
        })
    },
    |case| with(case, |case| case.graph = false),
    |case| with(case, |case| case.wrong = 0),
    |case| with(case, |case| case.pools = [PoolLayout::default(); 2]),
    |case| with(case, |case| case.gaps = [0; 2]),
    |case| with(case, |case| case.numbers = Numbers::Usual),
    |case| {
        without(case, case.steps.len(), |case, at| {
            case.steps[at].extras.clear();
        })
    },
    |case| {
        with(case, |case| {
            if case.scales != Scales::InRow {
                (case.scales, case.appends) = (Scales::One, Appends::Copied);
            }
        })
    },
    |case| with(case, |case| case.spec.rotary = None),
    |case| with(case, |case| case.spec.compute = Compute::F16),
    |case| {
        with(case, |case| {
            let variant = &mut case.spec.variant;
            (variant.hooks, variant.adds_up) = (None, false);
        })
    },
    |case| {
        with(case, |case| {
            let spec = &mut case.spec;
            let of_keys = [spec.kv_dtype, Dtype::BF16];
            let of_16_bits = of_keys[usize::from(spec.kv_dtype.bytes() == 1)];
            (spec.q_dtype, spec.out_dtype) = (of_16_bits, of_16_bits);
        })
    },
    |case| with(case, |case| case.options = PlanOptions::default()),
    |case| with(case, |case| case.spec.variant.soft_cap = None),
    |case| with(case, |case| case.spec.variant.window_left = None),
    |case| with(case, |case| case.spec.variant.sink_tokens = 1),
    |case| {
        with(case, |case| {
            let variant = &mut case.spec.variant;
            (variant.sinks, variant.sink_tokens) = (false, 1);
        })
    },
    |case| {
        with(case, |case| {
            case.spec.q_heads /= case.spec.kv_heads;
            case.spec.kv_heads = 1;
        })
    },
    |case| with(case, |case| case.sms = 1),
    |case| {
        without(case, case.steps.len(), |case, at| {
            let step = &mut case.steps[at];
            (step.composed, step.update) = (false, false);
            (step.trees, step.masks) = (false, false);
        })
    },
    shorter,
];

/// Each request of the last step with half its own queries or keys.
fn shorter(case: &Case) -> Vec<Case> {
    let Some(last) = case.steps.len().checked_sub(1) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for at in 0..case.steps[last].rows.len() {
        let mut fewer = case.clone();
        let row = &mut fewer.steps[last].rows[at];
        row.queries /= 2;
        all.push(fewer);
        let mut fewer = case.clone();
        let row = &mut fewer.steps[last].rows[at];
        row.keys = (row.keys / 2).max(row.queries);
        all.push(fewer);
    }
    all
}

/// The smallest case that still fails, found step by step, and what it does.
pub fn shrink(
    mut case: Case,
    mut what: String,
    fails: impl Fn(&Case) -> Option<String>,
) -> (Case, String) {
    // Each try runs the case; this is enough for a case that a person can read.
    let mut tries = 300;
    loop {
        let before = case.clone();
        for way in WAYS {
            for smaller in way(&case) {
                if smaller == case || tries == 0 {
                    continue;
                }
                tries -= 1;
                if let Some(also) = fails(&smaller) {
                    (case, what) = (smaller, also);
                    break;
                }
            }
        }
        if case == before || tries == 0 {
            return (case, what);
        }
    }
}
