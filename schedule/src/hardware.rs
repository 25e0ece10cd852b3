//! Descriptions of machines for the scheduler, as data.
//!
//! The known descriptions are the JSON files in `schedule/hardware/`. They describe the step without attention; attention
//! uses the planner's [`DeviceDescription`].

use serde::{Deserialize, Serialize};

use super::{ScheduleError, error::embedded};
use tandem_attn::plan::DeviceDescription;

/// A GPU and its connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Short name.
    pub name: String,
    /// Name of the planner's description of the device.
    pub attention: String,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Fraction of the memory available for weights, keys and values.
    pub usable_memory: f64,
    /// Performance of linear layers.
    pub gemm: Gemm,
    /// Connection between the GPUs of a node.
    pub link: Interconnect,
    /// Connection between nodes.
    pub network: Interconnect,
    /// Bandwidth between device and host memory.
    pub host_bytes_per_ns: f64,
}

/// Time of linear layers: the time to read the weights and the time to compute, joined by a p-norm. The two overlap,
/// but not perfectly near the ridge; `knee` is p (infinite for the ideal roofline).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gemm {
    /// 16-bit throughput that large matrices reach.
    pub flops_per_ns: f64,
    /// Bandwidth that weight reads reach.
    pub bytes_per_ns: f64,
    /// Row tiles, ascending. Tokens are rounded up to the first tile that holds them all, or else to a multiple of the
    /// last tile.
    pub tiles: Vec<u32>,
    /// Exponent p of the norm.
    pub knee: f64,
}

/// A connection between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interconnect {
    /// Bandwidth of one GPU, each way.
    pub bytes_per_ns: f64,
    /// Latency of one operation.
    pub latency_ns: f64,
}

const EMBEDDED: [(&str, &str); 4] = [
    ("h200", include_str!("../hardware/h200.json")),
    ("h100", include_str!("../hardware/h100.json")),
    ("a100", include_str!("../hardware/a100.json")),
    ("a6000", include_str!("../hardware/a6000.json")),
];

impl Hardware {
    /// The description of known hardware.
    ///
    /// # Errors
    /// [`ScheduleError::Unknown`].
    pub fn named(name: &str) -> Result<Self, ScheduleError> {
        Self::from_json(embedded("hardware", &EMBEDDED, name)?)
    }

    /// Names of the known hardware.
    pub fn names() -> impl Iterator<Item = &'static str> {
        EMBEDDED.iter().map(|(name, _)| *name)
    }

    /// Reads a description and checks it.
    ///
    /// # Errors
    /// [`ScheduleError::Description`].
    pub fn from_json(json: &str) -> Result<Self, ScheduleError> {
        let wrong = |reason| ScheduleError::Description {
            kind: "hardware",
            reason,
        };
        let hardware: Self =
            serde_json::from_str(json).map_err(|error| wrong(error.to_string()))?;
        for (name, got) in [
            ("usable_memory", hardware.usable_memory),
            ("gemm.flops_per_ns", hardware.gemm.flops_per_ns),
            ("gemm.bytes_per_ns", hardware.gemm.bytes_per_ns),
            ("link.bytes_per_ns", hardware.link.bytes_per_ns),
            ("network.bytes_per_ns", hardware.network.bytes_per_ns),
            ("host_bytes_per_ns", hardware.host_bytes_per_ns),
        ] {
            // Far beyond any real machine, yet times stay finite.
            if !(1e-6..=1e12).contains(&got) {
                return Err(wrong(format!("{name} is {got}: give 1e-6 to 1e12")));
            }
        }
        for (name, got) in [
            ("link.latency_ns", hardware.link.latency_ns),
            ("network.latency_ns", hardware.network.latency_ns),
        ] {
            if !(0.0..=1e12).contains(&got) {
                return Err(wrong(format!("{name} is {got}: give 0 to 1e12")));
            }
        }
        if hardware.usable_memory > 1.0 {
            return Err(wrong(format!(
                "usable_memory is {}: it is a part of the memory, at most 1",
                hardware.usable_memory
            )));
        }
        if hardware.gemm.knee.is_nan() || hardware.gemm.knee < 1.0 {
            return Err(wrong(format!(
                "knee is {}: give at least 1",
                hardware.gemm.knee
            )));
        }
        let tiles = &hardware.gemm.tiles;
        // Multiples of the last tile must fit 32 bits.
        const MOST_ROWS: u32 = 1 << 20;
        if tiles.first().is_none_or(|&tile| tile == 0)
            || tiles.last().is_some_and(|&tile| tile > MOST_ROWS)
            || !tiles.is_sorted_by(|a, b| a < b)
        {
            return Err(wrong(format!(
                "gemm.tiles {tiles:?} must ascend from at least 1 to at most {MOST_ROWS}"
            )));
        }
        hardware.device()?;
        Ok(hardware)
    }

    /// The planner's description of the device.
    ///
    /// # Errors
    /// [`ScheduleError::Description`] if the planner has no such device.
    pub fn device(&self) -> Result<DeviceDescription, ScheduleError> {
        DeviceDescription::named(&self.attention).map_err(|error| ScheduleError::Description {
            kind: "hardware",
            reason: error.to_string(),
        })
    }
}

impl Gemm {
    /// Number of rows computed for `tokens` tokens.
    #[must_use]
    pub fn quantised(&self, tokens: u32) -> u32 {
        let fits = self.tiles.iter().copied().find(|&tile| tile >= tokens);
        fits.unwrap_or_else(|| tokens.next_multiple_of(self.tile()))
    }

    /// The row tile of large matrices.
    #[must_use]
    pub fn tile(&self) -> u32 {
        self.tiles.last().copied().unwrap_or(1)
    }

    /// Time to multiply `tokens` tokens by `weights` 16-bit weights.
    #[must_use]
    pub fn ns(&self, tokens: u32, weights: f64) -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        let read = 2.0 * weights / self.bytes_per_ns;
        let compute = 2.0 * weights * f64::from(self.quantised(tokens)) / self.flops_per_ns;
        let (short, long) = (read.min(compute), read.max(compute));
        long * (1.0 + (short / long).powf(self.knee)).powf(self.knee.recip())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_embedded_description_is_sound() {
        for name in Hardware::names() {
            let hardware = Hardware::named(name).unwrap();
            assert_eq!(hardware.name, name);
            let json = serde_json::to_string(&hardware).unwrap();
            assert_eq!(Hardware::from_json(&json).unwrap(), hardware);
        }
    }

    #[test]
    fn wrong_descriptions_say_what_is_wrong() {
        let json = serde_json::to_string(&Hardware::named("a100").unwrap()).unwrap();
        let reason = |from: &str, to: &str| {
            assert!(json.contains(from), "{json}");
            let error = Hardware::from_json(&json.replace(from, to)).unwrap_err();
            error.to_string()
        };
        assert!(reason("\"knee\":2.5", "\"knee\":0.5").contains("knee is 0.5"));
        assert!(reason("[16,32,64,128]", "[16,8]").contains("[16, 8]"));
        assert!(reason("[16,32,64,128]", "[16,4294967295]").contains("at most 1048576"));
        assert!(reason("\"usable_memory\":0.9", "\"usable_memory\":1.5").contains("1.5"));
        assert!(reason("\"attention\":\"a100\"", "\"attention\":\"a10\"").contains("a10"));
    }

    #[test]
    fn tiles_quantise_and_the_knee_is_smooth() {
        let Hardware { gemm, .. } = Hardware::named("a6000").unwrap();
        let quantised = [1, 17, 128, 129, 256, 257].map(|tokens| gemm.quantised(tokens));
        assert_eq!(quantised, [16, 32, 128, 256, 256, 384]);
        let times: Vec<_> = (1..2000).map(|tokens| gemm.ns(tokens, 1e9)).collect();
        assert!(times.is_sorted() && gemm.ns(0, 1e9) == 0.0);
        let ideal = Gemm {
            knee: f64::INFINITY,
            ..gemm
        };
        assert_eq!(ideal.ns(1, 1e9), 2e9 / ideal.bytes_per_ns);
    }
}
