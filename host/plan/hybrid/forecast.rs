//! Predicted times of a hybrid batch in each mode.

use crate::plan::{
    data::{CtaSplit, PodForecast, alike},
    model::{PodConfig, PodDescription, Share},
};

/// With more rounds than this, tiles of different lengths fill the gaps of the last round.
const MANY: u32 = 16;

/// Tiles are classified by their time: `FINE` classes for each doubling, from `FIRST_NS` on.
const CLASSES: usize = 96;
const FINE: f64 = 8.0;
const FIRST_NS: f64 = 500.0;

/// Launches that are counted separately. Further launches count as the last one.
const LAUNCHES: usize = 4;

/// Time to write and merge the partial states of prefills that are cut, in nanoseconds.
const MERGED_NS: f64 = 8e3;

/// The tiles of one launch of prefills.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tiles {
    /// One bit for each class that has tiles.
    used: u128,
    /// For each class, the number of tiles and their total time.
    count: [u32; CLASSES],
    ns: [f64; CLASSES],
    /// Time of all tiles on one CTA.
    work_ns: f64,
}

impl Tiles {
    const NONE: Self = Self {
        used: 0,
        count: [0; CLASSES],
        ns: [0.0; CLASSES],
        work_ns: 0.0,
    };

    /// Time of the tiles on a number of CTAs, the longest first: at least the even share of all work, and for each
    /// class the rounds that its tiles and all longer ones need.
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

/// The tiles of prefills, and the time of each on an SM of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillLoad {
    launches: [Tiles; LAUNCHES],
    /// Whether tiles may be cut along their keys.
    divisible: bool,
    /// The conversion of 8-bit keys that few rows see; many rows hide it.
    conversion: Conversion,
}

/// The conversion of 8-bit keys: by a launch before all else, or beside the products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conversion {
    /// Time of the launch.
    pub before_ns: f64,
    /// Pieces to convert beside the products, and the time of each.
    pub pieces: f64,
    pub piece_ns: f64,
}

/// Pieces that a prefill CTA converts before its first product: one for each of its consumer warps.
const FIRST_PIECES: f64 = 8.0;

impl Conversion {
    /// No keys are converted.
    pub const NONE: Self = Self {
        before_ns: 0.0,
        pieces: 0.0,
        piece_ns: 0.0,
    };

    /// When the last piece is converted: by one warp of each CTA.
    fn beside(&self, ctas: u32) -> f64 {
        (self.pieces / f64::from(ctas) - FIRST_PIECES).max(0.0) * self.piece_ns
    }
}

impl PrefillLoad {
    /// No tiles yet.
    pub const fn new(divisible: bool) -> Self {
        Self {
            launches: [Tiles::NONE; LAUNCHES],
            divisible,
            conversion: Conversion::NONE,
        }
    }

    /// The same with a conversion of keys.
    #[must_use]
    pub const fn converting(self, conversion: Conversion) -> Self {
        Self { conversion, ..self }
    }

    /// Adds `count` tiles of a launch that take `ns` each.
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

    /// Time on a number of SMs if no CTA is ever idle.
    fn busy(&self, ctas: u32) -> f64 {
        self.launches().map(|tiles| tiles.work_ns).sum::<f64>() / f64::from(ctas)
    }

    /// Time on a number of SMs if no tile is cut.
    fn whole(&self, ctas: u32) -> f64 {
        self.launches().map(|tiles| tiles.on(ctas)).sum()
    }

    /// The same, with tiles cut along their keys where that is faster.
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

    /// The same beside decodes, with which prefills take `slower` times as long. Prefills are not cut if the decodes
    /// fill the device for longer, nor into more pieces than two for each CTA.
    fn beside(&self, decode_ns: f64, ctas: u32, slower: f64) -> f64 {
        let whole = self.whole(ctas);
        match whole * slower <= decode_ns || self.tiles() > ctas {
            true => whole,
            false => self.on(ctas),
        }
    }

    /// Numbers of prefill CTAs to try: those of whole rounds, and parts of the device.
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
    /// When the prefills and the decodes of a hybrid batch finish side by side, with the numbers of CTAs that finish
    /// first.
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
            let converted = prefill.conversion.beside(ctas);
            let [alone, busy] = times.map(|ns| (ns * self.prefill_slowdown).max(converted));
            let done = share.done([alone, busy], decode_ns);
            if last(done) < last(best.0) {
                best = (done, CtaSplit::new(sms, ctas));
            }
        }
        best
    }

    /// How both operations slow each other down with this number of prefill CTAs.
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

/// If both finish at the same time, neither fills the gaps of the other's last round. That costs this part of the time,
const LAST_OF_BOTH: f64 = 0.03;
/// and less the further apart their ends are, down to nothing at this part of the time.
const CLOSE: f64 = 0.3;

/// The fewest prefill CTAs to try are one per `LEAST_SHARE` SMs; `PARTS` steps lead from there to one per SM.
const LEAST_SHARE: u32 = 4;
const PARTS: u32 = 9;

impl Share {
    /// When each operation finishes, from their times alone. `busy_ns` is the mean time for which the prefill CTAs are
    /// busy.
    fn done(&self, [prefill_ns, busy_ns]: [f64; 2], decode_ns: f64) -> [f64; 2] {
        let slow_prefill = prefill_ns * self.prefill;
        let behind = decode_ns + busy_ns * self.prefill * self.decode;
        let close = 1.0 - (slow_prefill - behind).abs() / (CLOSE * behind);
        let together = LAST_OF_BOTH * behind * close.max(0.0);
        if slow_prefill <= behind {
            return [slow_prefill, behind + together];
        }
        // The decodes finish first, and the rest of the prefills has the device alone.
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
    /// Predicts the times of a hybrid batch, and chooses the best configuration of the fused form. `fused` has the
    /// prefills in the tiles of each configuration, or none if these do not fit. The decodes have two times: by their
    /// bytes, and alone.
    pub(in crate::plan) fn forecast(
        &self,
        sms: u32,
        prefill: &PrefillLoad,
        fused: impl Iterator<Item = Option<PrefillLoad>>,
        [decode_ns, alone_ns]: [f64; 2],
    ) -> (PodForecast, Option<FusedChoice>) {
        let launched = self.prefill_ns * prefill.launches().count() as f64;
        let prefill_ns = prefill.on(sms) + launched + prefill.conversion.before_ns;
        let beside_ns = prefill.beside(alone_ns, sms, 1.0);
        let beside_ns = beside_ns.max(prefill.conversion.beside(sms)) + launched;
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
            let done = done.map(|ns| ns + self.fused_ns + prefill.conversion.before_ns);
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
