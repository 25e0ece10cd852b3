//! Energy of a run: what the GPU consumes while runs follow each other without a pause.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{
    Failure,
    backend::{
        Loaded,
        meter::{Meter, MeterError},
    },
    workload::json::positive,
};

/// The least time that is measured. Counters change several times a second.
const LEAST: Duration = Duration::from_secs(1);
/// Time between two readings that wait for the counter to change. While the measured time passes, it is not read.
const BETWEEN: Duration = Duration::from_millis(20);
/// Time between two readings of power.
const BETWEEN_POWER: Duration = Duration::from_millis(100);
/// Time of runs before power is read, which NVML gives as an average of up to a second.
const BEFORE_POWER: Duration = Duration::from_secs(1);
/// Time after which a counter that has not changed is given up.
const MOST_STILL: Duration = Duration::from_secs(5);
/// The most runs that are queued together. Two such groups fit in the queue of a stream, so that the host does not wait there.
const MOST_RUNS: u32 = 128;

/// The energy of a run, measured over many.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Energy {
    /// Energy of one run in joules, of the whole board, idle power included.
    #[serde(deserialize_with = "positive")]
    pub joules: f64,
    /// Mean power in watts over `seconds`.
    #[serde(deserialize_with = "positive")]
    pub watts: f64,
    /// Number of runs that ended in this time.
    pub runs: u32,
    /// Time in seconds over which energy and runs were counted: wall-clock time between two readings.
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

/// A reading: when, and after how many runs.
#[derive(Clone, Copy)]
struct Reading {
    at: Duration,
    runs: u32,
}

impl Reading {
    /// The energy of the runs from this reading to a later one.
    fn energy_to(self, end: Self, joules: f64, from_power: bool) -> Energy {
        let seconds = (end.at - self.at).as_secs_f64();
        let runs = end.runs - self.runs;
        Energy {
            joules: joules / f64::from(runs.max(1)),
            watts: joules / seconds,
            runs,
            seconds,
            from_power,
        }
    }
}

/// Measures for at least `time`, and a second.
pub(super) fn measure(
    meter: &mut dyn Meter,
    time: Duration,
    loaded: &mut dyn Loaded,
) -> Result<Energy, Failure> {
    let begin = Instant::now();
    measure_by(meter, time, loaded, &|| begin.elapsed())
}

/// As [`measure`], with the time of a clock.
fn measure_by(
    meter: &mut dyn Meter,
    time: Duration,
    loaded: &mut dyn Loaded,
    clock: &dyn Fn() -> Duration,
) -> Result<Energy, Failure> {
    let time = time.max(LEAST);
    loaded.run(false)?;
    let one = loaded.run(false)?.max(Duration::from_nanos(100));
    let together = (BETWEEN.as_secs_f64() / one.as_secs_f64()).ceil() as u32;
    let together = together.clamp(1, MOST_RUNS);
    match meter.millijoules()? {
        Some(first) => by_counter(first, meter, time, (loaded, together), clock),
        None => by_power(meter, time, (loaded, together), clock),
    }
}

/// From one change of the counter to another, so that its steps are no error.
fn by_counter(
    first: u64,
    meter: &mut dyn Meter,
    time: Duration,
    (loaded, together): (&mut dyn Loaded, u32),
    clock: &dyn Fn() -> Duration,
) -> Result<Energy, Failure> {
    /// What the next reading is for.
    enum Phase {
        /// A change of the counter begins the measurement.
        Begin,
        /// The time is over: the counter as it is then.
        Over,
        /// The next change of the counter ends the measurement.
        End,
    }
    let (mut phase, mut last) = (Phase::Begin, first);
    let mut begin = (
        first,
        Reading {
            at: clock(),
            runs: 0,
        },
    );
    let (mut next, mut still_since) = (begin.1.at, begin.1.at);
    let mut energy = None;
    loaded.run_while(together, &mut |runs| {
        if clock() < next {
            return Ok(true);
        }
        let now = meter.millijoules()?.unwrap_or(last);
        let at = clock();
        next = at + BETWEEN;
        if let Phase::Over = phase {
            (phase, last, still_since) = (Phase::End, now, at);
            return Ok(true);
        }
        if now == last {
            let still = at - still_since;
            if still > MOST_STILL {
                return Err(MeterError::Still {
                    millijoules: last,
                    seconds: still.as_secs_f64(),
                }
                .into());
            }
            return Ok(true);
        }
        last = now;
        let reading = Reading { at, runs };
        if let Phase::Begin = phase {
            (phase, begin, next) = (Phase::Over, (now, reading), at + time);
            return Ok(true);
        }
        let joules = now.saturating_sub(begin.0) as f64 / 1e3;
        energy = Some(begin.1.energy_to(reading, joules, false));
        Ok(false)
    })?;
    Ok(energy.expect("runs go on until it is there"))
}

fn by_power(
    meter: &mut dyn Meter,
    time: Duration,
    (loaded, together): (&mut dyn Loaded, u32),
    clock: &dyn Fn() -> Duration,
) -> Result<Energy, Failure> {
    let mut next = clock() + BEFORE_POWER;
    let (mut begin, mut joules, mut energy) = (None, 0.0, None);
    let mut before = next;
    loaded.run_while(together, &mut |runs| {
        if clock() < next {
            return Ok(true);
        }
        let watts = f64::from(meter.milliwatts()?) / 1e3;
        let reading = Reading { at: clock(), runs };
        next = reading.at + BETWEEN_POWER;
        let since = std::mem::replace(&mut before, reading.at);
        let Some(begin) = begin else {
            begin = Some(reading);
            return Ok(true);
        };
        joules += watts * (reading.at - since).as_secs_f64();
        if reading.at - begin.at < time {
            return Ok(true);
        }
        energy = Some(begin.energy_to(reading, joules, true));
        Ok(false)
    })?;
    Ok(energy.expect("runs go on until it is there"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::backend::Results;

    /// Seconds that a reading takes.
    const READING: f64 = 0.004;

    /// A GPU of 500 W, and 100 W while it waits, whose counter changes every 100 ms.
    #[derive(Default)]
    struct Gpu {
        /// Seconds on the host's clock.
        time: Cell<f64>,
        /// Seconds of runs that are queued and have not ended.
        queued: Cell<f64>,
        joules: Cell<f64>,
        /// The counter, and the tick at which it changed.
        shown: Cell<(f64, u64)>,
        /// Seconds that the GPU waited.
        idle: Cell<f64>,
        readings: Cell<u32>,
        counts: bool,
        stands_still: bool,
    }

    impl Gpu {
        /// Lets time pass, in which the GPU does what is queued.
        fn pass(&self, seconds: f64) {
            let busy = self.queued.get().min(seconds);
            let idle = seconds - busy;
            self.queued.set(self.queued.get() - busy);
            self.idle.set(self.idle.get() + idle);
            self.time.set(self.time.get() + seconds);
            self.joules
                .set(self.joules.get() + 500.0 * busy + 100.0 * idle);
            let tick = (self.time.get() * 10.0) as u64;
            if tick != self.shown.get().1 {
                self.shown.set((self.joules.get(), tick));
            }
        }
    }

    struct Counter<'a>(&'a Gpu);

    impl Meter for Counter<'_> {
        fn millijoules(&mut self) -> Result<Option<u64>, MeterError> {
            let Self(gpu) = self;
            gpu.readings.set(gpu.readings.get() + 1);
            gpu.pass(READING);
            let joules = match gpu.stands_still {
                true => 150.0,
                false => gpu.shown.get().0,
            };
            Ok(gpu.counts.then_some((joules * 1e3) as u64))
        }

        fn milliwatts(&mut self) -> Result<u32, MeterError> {
            self.0.pass(READING);
            Ok(500_000)
        }
    }

    /// Runs of this many seconds.
    struct Runs<'a>(&'a Gpu, f64);

    impl Loaded for Runs<'_> {
        fn run(&mut self, _: bool) -> Result<Duration, Failure> {
            self.0.queued.set(self.1);
            self.0.pass(self.1);
            Ok(Duration::from_secs_f64(self.1))
        }

        fn run_while(
            &mut self,
            together: u32,
            more: &mut dyn FnMut(u32) -> Result<bool, Failure>,
        ) -> Result<(), Failure> {
            let group = self.1 * f64::from(together);
            self.0.queued.set(group);
            self.0.idle.set(0.0);
            for groups in 1.. {
                // The next group is queued, and the host waits for the one before it.
                self.0.queued.set(self.0.queued.get() + group);
                self.0.pass((self.0.queued.get() - group).max(0.0));
                if !more(together * groups)? {
                    break;
                }
            }
            Ok(())
        }

        fn results(&mut self) -> Result<Results, Failure> {
            unimplemented!("not asked")
        }
    }

    /// Measures runs of 300 µs.
    fn measured(gpu: &Gpu) -> Result<Energy, Failure> {
        let clock = || Duration::from_secs_f64(gpu.time.get());
        let time = Duration::from_millis(500);
        measure_by(&mut Counter(gpu), time, &mut Runs(gpu, 300e-6), &clock)
    }

    #[test]
    fn energy_is_counted_over_a_second_of_runs() {
        let gpu = Gpu {
            counts: true,
            ..Gpu::default()
        };
        let energy = measured(&gpu).unwrap();
        assert!((1.0..1.2).contains(&energy.seconds), "{energy:?}");
        assert!((energy.watts / 500.0 - 1.0).abs() < 0.03, "{energy:?}");
        assert!((energy.joules / 0.15 - 1.0).abs() < 0.03, "{energy:?}");
        assert!(!energy.from_power);
        let per_flop = energy.picojoules_per(1_000_000_000);
        assert!((per_flop / 150.0 - 1.0).abs() < 0.03, "{per_flop}");
        // Energy, watts, runs and seconds are of the same time.
        let of_runs = energy.joules * f64::from(energy.runs);
        assert!((of_runs / energy.watts / energy.seconds - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_gpu_runs_while_its_energy_is_read() {
        let gpu = Gpu {
            counts: true,
            ..Gpu::default()
        };
        measured(&gpu).unwrap();
        assert!(gpu.idle.get() < 1e-6, "it waited for {} s", gpu.idle.get());
        // Up to a change of the counter at both ends, and not in between.
        assert!(gpu.readings.get() < 20, "{} readings", gpu.readings.get());
    }

    #[test]
    fn time_in_which_the_gpu_waits_is_in_watts_and_seconds() {
        let gpu = Gpu {
            counts: true,
            ..Gpu::default()
        };
        let clock = || Duration::from_secs_f64(gpu.time.get());
        // 128 runs of 4 µs: two groups end before the counter is read.
        let mut runs = Runs(&gpu, 4e-6);
        let energy = measure_by(&mut Counter(&gpu), LEAST, &mut runs, &clock).unwrap();
        assert!(gpu.idle.get() > 0.0);
        assert!(energy.watts < 500.0, "{energy:?}");
        assert!((energy.joules / 0.002 - 1.0).abs() < 0.1, "{energy:?}");
    }

    #[test]
    fn a_gpu_that_counts_nothing_is_asked_for_its_power() {
        let energy = measured(&Gpu::default()).unwrap();
        assert!(energy.from_power && energy.seconds >= 1.0, "{energy:?}");
        assert!((energy.watts - 500.0).abs() < 1e-6, "{energy:?}");
        assert!((energy.joules / 0.15 - 1.0).abs() < 0.01, "{energy:?}");
    }

    #[test]
    fn a_counter_that_stands_still_is_an_error() {
        let gpu = Gpu {
            counts: true,
            stands_still: true,
            ..Gpu::default()
        };
        let error = measured(&gpu).unwrap_err();
        assert!(matches!(error, Failure::Backend(_)), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("stayed at 150000 mJ"), "{said}");
    }
}
