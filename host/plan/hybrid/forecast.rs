//! What a hybrid batch takes in each mode.

use crate::plan::{
    data::{CtaSplit, PodForecast, alike},
    model::{PodConfig, PodDescription, Share},
};

/// Rounds from which on tiles of all lengths fill the gaps.
const MANY: u32 = 16;

/// Classes of tiles by their time: so many for each doubling, from the first one's upper end on.
const CLASSES: usize = 96;
const FINE: f64 = 8.0;
const FIRST_NS: f64 = 500.0;

/// Launches that are counted one by one; further ones count as the last.
const LAUNCHES: usize = 4;

/// Partial states of prefills that are cut, written and merged.
const MERGED_NS: f64 = 8e3;

/// The tiles of one launch of prefills.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tiles {
    /// A bit for each class that has any.
    used: u128,
    /// How many, and what they take together, by what one takes.
    count: [u32; CLASSES],
    ns: [f64; CLASSES],
    /// All of them, on one CTA.
    work_ns: f64,
}

impl Tiles {
    const NONE: Self = Self {
        used: 0,
        count: [0; CLASSES],
        ns: [0.0; CLASSES],
        work_ns: 0.0,
    };

    /// What they take on so many CTAs, the longest first: no less than a fair part of all, and of those that take as long
    /// as some tile or longer as many rounds as there are.
    fn on(&self, ctas: u32) -> f64 {
        let (mut left, mut longer) = (self.used, 0_u32);
        let mut time = self.work_ns / f64::from(ctas);
        while left != 0 {
            let class = left.ilog2();
            left ^= 1 << class;
            let (count, ns) = (self.count[class as usize], self.ns[class as usize]);
            longer = longer.saturating_add(count);
            let rounds = longer.div_ceil(ctas);
            if rounds > MANY {
                break;
            }
            time = time.max(f64::from(rounds) * ns / f64::from(count));
        }
        time
    }
}

/// Tiles of prefills, and what each takes on an SM of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillLoad {
    launches: [Tiles; LAUNCHES],
    /// They may be cut along their keys.
    divisible: bool,
}

impl PrefillLoad {
    /// None yet.
    pub const fn new(divisible: bool) -> Self {
        Self {
            launches: [Tiles::NONE; LAUNCHES],
            divisible,
        }
    }

    /// Adds so many tiles of a launch.
    pub fn add(&mut self, launch: usize, count: u32, ns: f64) {
        let tiles = &mut self.launches[launch.min(LAUNCHES - 1)];
        let class = ((FINE * (ns / FIRST_NS).log2()) as usize).min(CLASSES - 1);
        let all = f64::from(count) * ns;
        tiles.used |= u128::from(count > 0) << class;
        tiles.count[class] = tiles.count[class].saturating_add(count);
        tiles.ns[class] += all;
        tiles.work_ns += all;
    }

    fn launches(&self) -> impl Iterator<Item = &Tiles> {
        self.launches.iter().filter(|tiles| tiles.used != 0)
    }

    fn tiles(&self) -> u32 {
        let tiles = self.launches().flat_map(|tiles| tiles.count);
        tiles.fold(0, u32::saturating_add)
    }

    /// What they take on so many SMs if no CTA is ever idle.
    fn busy(&self, ctas: u32) -> f64 {
        self.launches().map(|tiles| tiles.work_ns).sum::<f64>() / f64::from(ctas)
    }

    /// What they take on so many SMs, whole.
    fn whole(&self, ctas: u32) -> f64 {
        self.launches().map(|tiles| tiles.on(ctas)).sum()
    }

    /// The same, cut along their keys where that is sooner.
    fn on(&self, ctas: u32) -> f64 {
        let of_launch = |tiles: &Tiles| {
            let cut = tiles.work_ns / f64::from(ctas) + MERGED_NS;
            match self.divisible {
                true => tiles.on(ctas).min(cut),
                false => tiles.on(ctas),
            }
        };
        self.launches().map(of_launch).sum()
    }

    /// The same beside decodes, where prefills take `slower` times as long: they are not cut while the decodes fill the
    /// device for longer.
    fn beside(&self, decode_ns: f64, ctas: u32, slower: f64) -> f64 {
        let whole = self.whole(ctas);
        match whole * slower <= decode_ns {
            true => whole,
            false => self.on(ctas),
        }
    }

    /// Numbers of CTAs that are worth a thought: those of whole rounds, and parts of the device.
    fn numbers_of_ctas(&self, sms: u32) -> impl Iterator<Item = u32> {
        let least = (sms / LEAST_SHARE).max(1);
        let tiles = self.tiles();
        let rounds = (1..=MANY).map(move |rounds| tiles.div_ceil(rounds));
        let parts = (0..=PARTS).map(move |part| least + (sms - least) * part / PARTS);
        parts
            .chain(rounds)
            .filter(move |ctas| (least..=sms).contains(ctas))
    }
}

impl PodConfig {
    /// When the prefills and the decodes of a hybrid batch are done side by side, and with how many CTAs the
    /// soonest.
    fn done(&self, prefill: &PrefillLoad, decode_ns: f64, sms: u32) -> ([f64; 2], CtaSplit) {
        let decode_ns = decode_ns * self.decode_slowdown;
        if self.shares.is_empty() {
            let prefill_ns = prefill.whole(sms) * self.prefill_slowdown;
            let time = overlapped(prefill_ns, decode_ns, self.overlap_loss);
            return (alike(time, [prefill_ns, decode_ns]), CtaSplit::default());
        }
        let mut best = ([f64::MAX; 2], CtaSplit::default());
        for ctas in prefill.numbers_of_ctas(sms) {
            let share = self.share(ctas, sms);
            let slower = self.prefill_slower(share);
            let times = [prefill.beside(decode_ns, ctas, slower), prefill.busy(ctas)];
            let [alone, busy] = times.map(|ns| ns * self.prefill_slowdown);
            let done = share.done([alone, busy], decode_ns);
            if last(done) < last(best.0) {
                best = (done, CtaSplit::new(sms, ctas));
            }
        }
        best
    }

    /// With so many prefill CTAs.
    pub(in crate::plan) fn share(&self, prefill_ctas: u32, sms: u32) -> Share {
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

/// No fewer prefill CTAs than one for so many SMs are thought of, and between that and all so many numbers.
const LEAST_SHARE: u32 = 4;
const PARTS: u32 = 9;

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
        let launched = self.prefill_ns * prefill.launches().count() as f64;
        let prefill_ns = prefill.on(sms) + launched;
        let beside_ns = prefill.beside(alone_ns, sms, 1.0) + launched;
        let alone_ns = alone_ns + self.decode_ns;
        // Tiles that do not fill the device leave SMs to the decodes.
        let free = 1.0 - f64::from(prefill.tiles().min(sms)) / f64::from(sms);
        let loss =
            self.streams_loss + (self.apart_loss - self.streams_loss) * (2.0 * free).min(1.0);
        let mut forecast = PodForecast {
            prefill_ns,
            decode_ns: alone_ns,
            serial_ns: prefill_ns + alone_ns,
            streams_ns: overlapped(beside_ns, alone_ns, loss.min(self.streams_loss)),
            fused_ns: f64::MAX,
            fused_done_ns: [0.0; 2],
        };
        let mut choice = None;
        for ((config, prefill), index) in self.configs.iter().zip(fused).zip(0..) {
            let Some(prefill) = prefill else {
                continue;
            };
            let (done, ctas) = config.done(&prefill, decode_ns, sms);
            let done = done.map(|ns| ns + self.fused_ns);
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
mod tests;
