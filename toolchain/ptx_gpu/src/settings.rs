//! What `PTX_DRIVER` says.

use ptx_run::Schedule;

/// The GPU that is played, and in which order things happen on it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Compute capability: 80 or 90.
    pub compute: i32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// In which order the warps of a launch go, from the launch's seed.
    pub schedule: fn(u64) -> Schedule,
    /// Of the first launch; the next ones count on.
    pub seed: u64,
    /// A line for each launch on standard error.
    pub log: bool,
    /// Millions of warp instructions that a launch may take.
    pub limit: u64,
    /// Launches are traced, this block of each: all warps go side by side then, whatever the schedule.
    pub trace: Option<u32>,
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
    /// From the environment.
    ///
    /// # Panics
    /// If it says something that is not known: a setting that is ignored would be worse.
    pub fn read() -> Self {
        let mut settings = Self::default();
        let text = std::env::var("PTX_DRIVER").unwrap_or_default();
        for pair in text.split_whitespace() {
            let known = pair
                .split_once('=')
                .and_then(|(name, value)| settings.set(name, value));
            assert!(known.is_some(), "PTX_DRIVER: {pair:?} is not known");
        }
        settings
    }

    fn set(&mut self, name: &str, value: &str) -> Option<()> {
        match name {
            "compute" => self.compute = value.parse().ok()?,
            "sms" => self.multiprocessors = value.parse().ok().filter(|&count| count > 0)?,
            "seed" => self.seed = value.parse().ok()?,
            "log" => self.log = value == "1",
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
