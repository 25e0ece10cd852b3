//! The settings of `PTX_DRIVER`.

use ptx_run::Schedule;

use crate::gpu::Architecture;

/// Properties of the emulated GPU and its schedule.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Compute capability: 80 or 90.
    pub compute: i32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// The schedule of a launch, made from the launch's seed.
    pub schedule: fn(u64) -> Schedule,
    /// Seed of the first launch; later launches increment it.
    pub seed: u64,
    /// Whether each launch writes a line to standard error.
    pub log: bool,
    /// Maximum warp instructions of a launch, in millions.
    pub limit: u64,
    /// The block to trace in each launch. In a traced launch all warps run in parallel, whatever the schedule.
    pub trace: Option<u32>,
}

impl Settings {
    pub(crate) const fn architecture(&self) -> Architecture {
        Architecture {
            compute: self.compute,
            multiprocessors: self.multiprocessors,
        }
    }

    /// With one of three orders of warps, for tests: in turn for 0, at random for 1, each as far as it can for 2, and again from 3 on.
    #[must_use]
    pub fn in_order(number: u64, seed: u64) -> Self {
        let schedule: fn(u64) -> Schedule = match number % 3 {
            0 => |_| Schedule::RoundRobin,
            1 => Schedule::Random,
            _ => Schedule::Late,
        };
        Self {
            schedule,
            seed,
            ..Self::default()
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            compute: 90,
            multiprocessors: 2,
            schedule: Schedule::Random,
            seed: 0,
            log: false,
            limit: 1_000,
            trace: None,
        }
    }
}

impl Settings {
    /// Reads the settings from the environment.
    ///
    /// # Panics
    /// If a setting is unknown: ignoring it silently would be worse.
    pub fn read() -> Self {
        let mut settings = Self::default();
        let text = std::env::var("PTX_DRIVER").unwrap_or_default();
        for pair in text.split_whitespace() {
            let known = pair
                .split_once('=')
                .and_then(|(name, value)| settings.set(name, value));
            assert!(
                known.is_some(),
                "PTX_DRIVER: {pair:?} is not known: give name=value pairs as in toolchain/ptx_gpu/src/lib.rs, such as compute=90 log=1"
            );
        }
        settings
    }

    fn set(&mut self, name: &str, value: &str) -> Option<()> {
        match name {
            "compute" => {
                self.compute = value
                    .parse()
                    .ok()
                    .filter(|compute| [80, 90].contains(compute))?
            }
            "sms" => self.multiprocessors = value.parse().ok().filter(|&count| count > 0)?,
            "seed" => self.seed = value.parse().ok()?,
            "log" => {
                self.log = match value {
                    "0" => false,
                    "1" => true,
                    _ => return None,
                }
            }
            "limit" => self.limit = value.parse().ok()?,
            "schedule" => {
                self.schedule = match value {
                    "round" => |_| Schedule::RoundRobin,
                    "random" => Schedule::Random,
                    "late" => Schedule::Late,
                    _ => return None,
                }
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `log=true` meant off, and a GPU of any capability had kernels of one of the two.
    #[test]
    fn values_without_a_meaning_are_refused() {
        let mut settings = Settings::default();
        for (name, value) in [
            ("log", "true"),
            ("compute", "100"),
            ("sms", "0"),
            ("speed", "1"),
        ] {
            assert_eq!(settings.set(name, value), None, "{name}={value}");
        }
        assert_eq!(settings.set("log", "1"), Some(()));
        assert!(settings.log);
        assert_eq!(settings.set("log", "0"), Some(()));
        assert!(!settings.log);
    }
}
