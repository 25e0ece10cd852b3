//! A few seeds in every run of the tests.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use crate::{
    Target,
    draw::{Draw, Size},
    runner::Place,
    tally::Tally,
};

/// The emulated GPU is one of the process, and so is its compute capability.
static EMULATED: Mutex<()> = Mutex::new(());

fn seeds(target: Target, seeds: std::ops::Range<u64>, compute: i32) -> Tally {
    let _alone = EMULATED.lock().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new(target, None, compute).expect("a place to run");
    let tiny = true;
    let (draw, mut all) = (place.draw(tiny), Tally::default());
    for seed in seeds {
        match place.case(&draw.case(seed)) {
            Ok(tally) => all.add(tally),
            Err(failure) => panic!("seed {seed}: {failure}\n{:#?}", draw.case(seed)),
        }
    }
    all
}

#[test]
fn calls_on_the_cpu_are_refused_or_right() {
    let tally = seeds(Target::Cpu, 0..200, 90);
    assert!(tally.calls > 1000, "{tally:?}");
    assert!(tally.wrong.len() > 30, "{tally:?}");
}

#[test]
fn calls_on_an_emulated_gpu_are_refused_or_right() {
    let tally = seeds(Target::Emulated, 0..40, 90);
    assert!(tally.calls > 100, "{tally:?}");
    assert!(tally.wrong.len() > 15, "{tally:?}");
}

#[test]
fn calls_on_an_emulated_gpu_of_ampere_are_refused_or_right() {
    let tally = seeds(Target::Emulated, 40..50, 80);
    assert!(tally.calls > 50, "{tally:?}");
}

/// Each kind of call and each property of heads that the library has.
#[test]
fn nothing_is_left_out_of_what_is_drawn() {
    let draw = Draw {
        gpu: true,
        size: Size::Tiny,
    };
    let (mut special, mut extras) = (BTreeSet::new(), BTreeSet::new());
    for seed in 0..2000 {
        let case = draw.case(seed);
        for step in &case.steps {
            special.extend(case.special(Some(step)));
            let names = step.extras.iter().map(|extra| format!("{extra:?}"));
            extras.extend(names.map(|name| name.split('(').next().unwrap_or_default().to_owned()));
        }
    }
    assert_eq!(special.len(), 19, "{special:?}");
    assert_eq!(extras.len(), 5, "{extras:?}");
}

/// A cap of 45 beside products of 120,000 in all: the log-sum says nothing of what their addition rounds.
#[test]
fn a_soft_cap_hides_large_products() {
    let text = include_str!("cases/soft_cap_of_large_products.json");
    let case = serde_json::from_str(text).expect("a case");
    let _alone = EMULATED.lock().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new(Target::Emulated, None, 90).expect("a place to run");
    if let Err(failure) = place.case(&case) {
        panic!("{failure}");
    }
}

/// What is written where a case fails is the case.
#[test]
fn a_case_is_the_same_as_a_file() {
    let draw = Draw {
        gpu: true,
        size: Size::Usual,
    };
    for seed in 0..200 {
        let case = draw.case(seed);
        let text = serde_json::to_string(&case).expect("a case is data");
        assert_eq!(case, serde_json::from_str(&text).expect("a case"));
    }
}
