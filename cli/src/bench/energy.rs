//! Energy of a run: what the GPU consumes while runs follow each other without a pause.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    Failure,
    backend::meter::{Meter, MeterError},
    workload::json::positive,
};

/// The least time that is measured. Counters change several times a second.
const LEAST: Duration = Duration::from_secs(1);
/// Time of runs between two readings.
const BETWEEN: Duration = Duration::from_millis(20);
/// Time of runs before power is read, which NVML gives as an average of up to a second.
const BEFORE_POWER: Duration = Duration::from_secs(1);
/// Time after which a counter that has not changed is given up.
const MOST_STILL: Duration = Duration::from_secs(5);
/// The most runs between two readings.
const MOST_RUNS: u32 = 10_000;

/// The energy of a run, measured over many.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Energy {
    /// Energy of one run in joules, of the whole board, idle power included.
    #[serde(deserialize_with = "positive")]
    pub joules: f64,
    /// Mean power in watts.
    #[serde(deserialize_with = "positive")]
    pub watts: f64,
    /// Number of runs.
    pub runs: u32,
    /// Time of these runs in seconds.
    #[serde(deserialize_with = "positive")]
    pub seconds: f64,
    /// Whether power was read again and again, because the GPU counts no energy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_power: bool,
}

impl Energy {
    /// Picojoules for each of so many bytes or operations of a run.
    #[must_use]
    pub fn picojoules_per(&self, count: u64) -> f64 {
        self.joules * 1e12 / count.max(1) as f64
    }
}

/// Runs one after the other, with their time and number.
struct Runs<'a> {
    /// Does so many runs and returns how long they took.
    run: &'a mut dyn FnMut(u32) -> Result<Duration, Failure>,
    /// Number of runs between two readings.
    together: u32,
    time: Duration,
    count: u32,
}

impl Runs<'_> {
    /// Runs until the next reading, and returns the time that this took.
    fn on(&mut self) -> Result<Duration, Failure> {
        let took = (self.run)(self.together)?;
        self.time += took;
        self.count = self.count.saturating_add(self.together);
        Ok(took)
    }

    fn restart(&mut self) {
        (self.time, self.count) = (Duration::ZERO, 0);
    }

    /// Runs until the counter shows another number.
    fn until_changed(&mut self, meter: &mut dyn Meter, from: u64) -> Result<u64, Failure> {
        let begin = self.time;
        loop {
            self.on()?;
            let now = meter.millijoules()?.unwrap_or(from);
            if now != from {
                return Ok(now);
            }
            let waited = self.time - begin;
            if waited > MOST_STILL {
                let (millijoules, seconds) = (from, waited.as_secs_f64());
                return Err(MeterError::Still {
                    millijoules,
                    seconds,
                }
                .into());
            }
        }
    }

    fn energy(&self, joules: f64, from_power: bool) -> Energy {
        let seconds = self.time.as_secs_f64();
        Energy {
            joules: joules / f64::from(self.count),
            watts: joules / seconds,
            runs: self.count,
            seconds,
            from_power,
        }
    }
}

/// Measures for at least `time`, and a second. `run` does so many runs and returns how long they took.
pub(super) fn measure(
    meter: &mut dyn Meter,
    time: Duration,
    run: &mut dyn FnMut(u32) -> Result<Duration, Failure>,
) -> Result<Energy, Failure> {
    let time = time.max(LEAST);
    run(1)?;
    let one = run(1)?.max(Duration::from_nanos(100));
    let together = (BETWEEN.as_secs_f64() / one.as_secs_f64()).ceil();
    let mut runs = Runs {
        run,
        together: (together as u32).clamp(1, MOST_RUNS),
        time: Duration::ZERO,
        count: 0,
    };
    let Some(first) = meter.millijoules()? else {
        return by_power(meter, time, &mut runs);
    };
    // From one change of the counter to another, so that its steps are no error.
    let begin = runs.until_changed(meter, first)?;
    runs.restart();
    let mut end = begin;
    while runs.time < time {
        end = runs.until_changed(meter, end)?;
    }
    let joules = end.saturating_sub(begin) as f64 / 1e3;
    Ok(runs.energy(joules, false))
}

fn by_power(meter: &mut dyn Meter, time: Duration, runs: &mut Runs<'_>) -> Result<Energy, Failure> {
    while runs.time < BEFORE_POWER {
        runs.on()?;
    }
    runs.restart();
    let mut joules = 0.0;
    while runs.time < time {
        let took = runs.on()?;
        joules += f64::from(meter.milliwatts()?) / 1e3 * took.as_secs_f64();
    }
    Ok(runs.energy(joules, true))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A GPU of 500 W whose counter changes every 100 ms. It has run for `time` seconds.
    struct Gpu<'a> {
        time: &'a Cell<f64>,
        counts: bool,
        stands_still: bool,
    }

    impl Meter for Gpu<'_> {
        fn millijoules(&mut self) -> Result<Option<u64>, MeterError> {
            let ticks = match self.stands_still {
                true => 3.0,
                false => (self.time.get() * 10.0).floor(),
            };
            Ok(self.counts.then_some((ticks * 50_000.0) as u64))
        }

        fn milliwatts(&mut self) -> Result<u32, MeterError> {
            Ok(500_000)
        }
    }

    /// Measures runs of 300 µs.
    fn measured(counts: bool, stands_still: bool) -> Result<Energy, Failure> {
        let time = Cell::new(0.04);
        let mut gpu = Gpu {
            time: &time,
            counts,
            stands_still,
        };
        measure(&mut gpu, Duration::from_millis(500), &mut |runs| {
            let took = f64::from(runs) * 300e-6;
            time.set(time.get() + took);
            Ok(Duration::from_secs_f64(took))
        })
    }

    #[test]
    fn energy_is_counted_over_a_second_of_runs() {
        let energy = measured(true, false).unwrap();
        assert!((1.0..1.2).contains(&energy.seconds), "{energy:?}");
        assert!((energy.watts / 500.0 - 1.0).abs() < 0.03, "{energy:?}");
        assert!((energy.joules / 0.15 - 1.0).abs() < 0.03, "{energy:?}");
        assert!(!energy.from_power);
        let per_flop = energy.picojoules_per(1_000_000_000);
        assert!((per_flop / 150.0 - 1.0).abs() < 0.03, "{per_flop}");
    }

    #[test]
    fn a_gpu_that_counts_nothing_is_asked_for_its_power() {
        let energy = measured(false, false).unwrap();
        assert!(energy.from_power && energy.seconds >= 1.0, "{energy:?}");
        assert!((energy.watts - 500.0).abs() < 1e-6, "{energy:?}");
        assert!((energy.joules - 0.15).abs() < 1e-6, "{energy:?}");
    }

    #[test]
    fn a_counter_that_stands_still_is_an_error() {
        let error = measured(true, true).unwrap_err();
        assert!(matches!(error, Failure::Backend(_)), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("stayed at 150000 mJ"), "{said}");
    }
}
