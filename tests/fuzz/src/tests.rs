//! A few seeds in every run of the tests.

use crate::{Target, runner::Place, tally::Tally};

fn seeds(target: Target, seeds: std::ops::Range<u64>, tiny: bool) -> Tally {
    let place = Place::new(target, None).expect("a place to run");
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
    let tally = seeds(Target::Cpu, 0..200, true);
    assert!(tally.calls > 1000, "{tally:?}");
    assert!(tally.wrong.len() > 30, "{tally:?}");
}

#[test]
fn calls_on_an_emulated_gpu_are_refused_or_right() {
    let tally = seeds(Target::Emulated, 0..40, true);
    assert!(tally.calls > 100, "{tally:?}");
    assert!(tally.wrong.len() > 15, "{tally:?}");
}

/// A cap of 45 beside products of 120,000 in all: the log-sum says nothing of what their addition rounds.
#[test]
fn a_soft_cap_hides_large_products() {
    let text = include_str!("cases/soft_cap_of_large_products.json");
    let case = serde_json::from_str(text).expect("a case");
    let place = Place::new(Target::Emulated, None).expect("a place to run");
    if let Err(failure) = place.case(&case) {
        panic!("{failure}");
    }
}

/// What is written where a case fails is the case.
#[test]
fn a_case_is_the_same_as_a_file() {
    let draw = crate::draw::Draw {
        gpu: true,
        size: crate::draw::Size::Usual,
    };
    for seed in 0..200 {
        let case = draw.case(seed);
        let text = serde_json::to_string(&case).expect("a case is data");
        assert_eq!(case, serde_json::from_str(&text).expect("a case"));
    }
}
