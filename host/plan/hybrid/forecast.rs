//! What a hybrid batch takes in each mode.

use crate::plan::{
    data::{CtaSplit, PodForecast, alike},
    model::{PodConfig, PodDescription, Share},
};

/// Rounds from which on tiles of all lengths fill the gaps.
const MANY: f64 = 16.0;

/// Tiles of prefills.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillLoad {
    /// What they take together if no CTA is ever idle.
    pub ns: f64,
    pub tiles: u32,
    /// They may be cut along their keys.
    pub divisible: bool,
}

impl PrefillLoad {
    /// What they take on so many of a device's SMs.
    pub fn on(&self, ctas: u32, sms: u32) -> f64 {
        if self.tiles == 0 {
            return self.ns;
        }
        let tile = self.ns * f64::from(sms) / f64::from(self.tiles);
        let rounds = f64::from(self.tiles) / f64::from(ctas.max(1));
        tile * if rounds < MANY { rounds.ceil() } else { rounds }
    }

    /// So few CTAs need no more rounds than `ctas` do: the others would keep SMs that decodes could have.
    fn fewest(&self, ctas: u32) -> u32 {
        let tiles = self.tiles.max(1);
        match tiles.div_ceil(ctas.max(1)) {
            rounds if f64::from(rounds) < MANY => tiles.div_ceil(rounds),
            _ => ctas,
        }
    }

    /// What they take alone, whole or cut along their keys.
    fn alone(&self, sms: u32) -> f64 {
        /// Partial states, written and merged.
        const MERGED_NS: f64 = 8e3;
        /// All SMs are busy then, at a lower clock.
        const SLOWER: f64 = 1.025;
        let whole = self.on(sms, sms);
        match self.divisible {
            true => whole.min(SLOWER * self.ns + MERGED_NS),
            false => whole,
        }
    }
}

impl PodConfig {
    /// When the prefills and the decodes of a hybrid batch are done side by side, and with how many CTAs the
    /// soonest.
    fn done(&self, prefill: &PrefillLoad, decode_ns: f64, sms: u32) -> ([f64; 2], CtaSplit) {
        let decode_ns = decode_ns * self.decode_slowdown;
        if self.shares.is_empty() {
            let prefill_ns = prefill.on(sms, sms) * self.prefill_slowdown;
            let time = overlapped(prefill_ns, decode_ns, self.overlap_loss);
            return (alike(time, [prefill_ns, decode_ns]), CtaSplit::default());
        }
        let mut best = ([f64::MAX; 2], CtaSplit::default());
        let mut ctas = prefill.fewest(sms);
        loop {
            let alone = prefill.on(ctas, sms) * self.prefill_slowdown;
            let busy = self.prefill_slowdown * prefill.ns * f64::from(sms) / f64::from(ctas);
            let done = self.share(ctas, sms).done([alone, busy], decode_ns);
            if last(done) < last(best.0) {
                best = (done, CtaSplit::new(sms, ctas));
            }
            if ctas <= (sms / LEAST_SHARE).max(1) {
                return best;
            }
            ctas = prefill.fewest(ctas - 1);
        }
    }

    /// With so many prefill CTAs.
    fn share(&self, prefill_ctas: u32, sms: u32) -> Share {
        let part = f64::from(prefill_ctas) / f64::from(sms);
        let next = self.shares.partition_point(|share| share.part < part);
        let [low, high] =
            [next.saturating_sub(1), next].map(|at| self.shares[at.min(self.shares.len() - 1)]);
        match low.part < high.part {
            true => low.between(high, part),
            false => Share { part, ..low },
        }
    }
}

/// Where both are done at the same time neither fills the gaps of the other's last round: that costs such a part,
const LAST_OF_BOTH: f64 = 0.03;
/// and less the further apart they are, up to this part.
const CLOSE: f64 = 0.3;

/// One prefill CTA for so many SMs, or the next fewer, is the last that is thought of.
const LEAST_SHARE: u32 = 4;

impl Share {
    /// When each is done, when alone they take so long. Of that time the CTAs of the prefill are busy for
    /// `busy_ns` in the mean.
    fn done(&self, [prefill_ns, busy_ns]: [f64; 2], decode_ns: f64) -> [f64; 2] {
        let slow_prefill = prefill_ns * self.prefill;
        let behind = decode_ns + busy_ns * self.prefill * self.decode;
        let close = 1.0 - (slow_prefill - behind).abs() / (CLOSE * behind);
        let together = LAST_OF_BOTH * behind * close.max(0.0);
        if slow_prefill <= behind {
            return [slow_prefill, behind + together];
        }
        // The decodes are done first, and the rest of the prefills has the device.
        let decoded = decode_ns / (1.0 - self.decode);
        let all = prefill_ns + decoded * (1.0 - 1.0 / self.prefill) + together;
        [all, decoded.min(all)]
    }
}

fn last([prefill, decode]: [f64; 2]) -> f64 {
    prefill.max(decode)
}

fn overlapped(prefill_ns: f64, decode_ns: f64, loss: f64) -> f64 {
    prefill_ns.max(decode_ns) + loss * prefill_ns.min(decode_ns)
}

/// The best fused form for a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedChoice {
    pub config: u32,
    pub ctas: CtaSplit,
}

impl PodDescription {
    /// Predicts the times of a hybrid batch on so many SMs, and the best configuration of the fused form.
    /// `fused` are the prefills in each configuration's tiles, where these fit. Of the decodes there are two times: by
    /// their bytes, and alone.
    pub(in crate::plan) fn forecast(
        &self,
        sms: u32,
        prefill: &PrefillLoad,
        fused: impl Iterator<Item = Option<PrefillLoad>>,
        [decode_ns, alone_ns]: [f64; 2],
    ) -> (PodForecast, Option<FusedChoice>) {
        let whole_ns = prefill.on(sms, sms);
        let prefill_ns = prefill.alone(sms);
        // Tiles that do not fill the device leave SMs to the decodes.
        let free = 1.0 - f64::from(prefill.tiles.min(sms)) / f64::from(sms);
        let loss =
            self.streams_loss + (self.apart_loss - self.streams_loss) * (2.0 * free).min(1.0);
        let mut forecast = PodForecast {
            prefill_ns,
            decode_ns: alone_ns,
            serial_ns: prefill_ns + alone_ns,
            streams_ns: overlapped(whole_ns, alone_ns, loss.min(self.streams_loss)),
            fused_ns: f64::MAX,
            fused_done_ns: [0.0; 2],
        };
        let mut choice = None;
        for ((config, prefill), index) in self.configs.iter().zip(fused).zip(0..) {
            let Some(prefill) = prefill else {
                continue;
            };
            let (done, ctas) = config.done(&prefill, decode_ns, sms);
            if last(done) < forecast.fused_ns {
                forecast.fused_ns = last(done);
                forecast.fused_done_ns = done;
                choice = Some(FusedChoice {
                    config: index,
                    ctas,
                });
            }
        }
        (forecast, choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{data::PodMode, model::DeviceDescription};

    fn h200() -> (PodDescription, u32) {
        let device = DeviceDescription::named("h200").unwrap();
        (device.pod, device.sms)
    }

    fn load(ns: f64, tiles: u32) -> PrefillLoad {
        PrefillLoad {
            ns,
            tiles,
            divisible: true,
        }
    }

    #[test]
    fn tiles_take_rounds() {
        assert_eq!(load(100.0, 264).on(132, 132), 100.0);
        assert_eq!(load(100.0, 256).on(132, 132), 100.0 * 264.0 / 256.0);
        assert_eq!(load(100.0, 264).on(88, 132), 150.0);
        // One tile for each of half the SMs takes as long as one for each of all.
        assert_eq!(load(50.0, 66).on(132, 132), load(100.0, 132).on(132, 132));
        assert_eq!(load(0.0, 0).on(132, 132), 0.0);
    }

    #[test]
    fn the_shortest_forecast_wins() {
        let (pod, sms) = h200();
        let forecast = |prefill: PrefillLoad, decode| {
            let fused = std::iter::once(Some(prefill));
            pod.forecast(sms, &prefill, fused, [decode, decode * pod.decode_alone])
        };
        let (even, _) = forecast(load(400e3, 1024), 400e3);
        assert_eq!(even.best(), PodMode::Fused);
        assert!(even.fused_ns < 0.75 * even.serial_ns && even.fused_ns > even.peak_ns());
        // Prefill is what takes long: it has every SM that saves it a round.
        let (_, choice) = forecast(load(700e3, 512), 400e3);
        assert_eq!(choice.unwrap().ctas, CtaSplit::new(sms, 128));
        let (_, choice) = forecast(load(700e3, 8192), 400e3);
        assert_eq!(choice.unwrap().ctas, CtaSplit::new(sms, sms));
        // Decode takes long: it has some SMs to itself.
        let (_, choice) = forecast(load(120e3, 256), 400e3);
        let ctas = choice.unwrap().ctas;
        assert!(ctas.prefill < sms && ctas.decode > sms, "{ctas:?}");
        // Nearly nothing to hide.
        let (lopsided, _) = forecast(load(1000e3, 1024), 5e3);
        assert_ne!(lopsided.best(), PodMode::Fused);
        // Prefills on a few of the SMs, decodes on the others.
        let (apart, _) = forecast(load(10e3, 16), 400e3);
        assert_eq!(apart.best(), PodMode::Streams);

        // Tiles for half of the SMs are cut, if they may be.
        let half = load(100e3, 64);
        let whole = PrefillLoad {
            divisible: false,
            ..half
        };
        let serial = |prefill| forecast(prefill, 50e3).0.serial_ns;
        assert!(serial(half) < serial(whole) - 80e3);

        let none = PodDescription::default();
        let (forecast, choice) = none.forecast(sms, &load(1.0, 1), std::iter::empty(), [1.0; 2]);
        assert_eq!((forecast.best(), choice), (PodMode::Serial, None));
    }

    #[test]
    fn devices_of_any_size_have_a_forecast() {
        let (pod, _) = h200();
        for sms in (1..10).chain([132, 10_000]) {
            for tiles in [0, 1, 7, 64, 1 << 20] {
                let load = load(1e3, tiles);
                let fused = std::iter::once(Some(load));
                let (forecast, choice) = pod.forecast(sms, &load, fused, [1e3; 2]);
                assert!(forecast.fused_ns.is_finite());
                let ctas = choice.unwrap().ctas;
                assert!((1..=sms).contains(&ctas.prefill), "{ctas:?} of {sms}");
            }
        }
    }

    #[test]
    fn shares_lie_between_those_measured() {
        let (pod, sms) = h200();
        let config = &pod.configs[0];
        assert!(config.shares.is_sorted_by(|a, b| a.part < b.part));
        assert_eq!(config.share(1, sms).prefill, config.shares[0].prefill);
        assert_eq!(config.share(sms, sms), *config.shares.last().unwrap());
        for two in config.shares.windows(2) {
            let ctas = (f64::from(sms) * (two[0].part + two[1].part) / 2.0) as u32;
            let prefill = config.share(ctas, sms).prefill;
            let [low, high] = [two[0].prefill, two[1].prefill];
            assert!((low.min(high)..=low.max(high)).contains(&prefill), "{ctas}");
        }
    }
}
