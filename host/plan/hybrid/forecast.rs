//! Predicted times of a hybrid batch in each mode.

use super::tiles::{MERGED_NS, Tiles};
use crate::plan::{
    data::{CtaSplit, PodForecast, alike},
    model::{PodConfig, PodDescription, Share},
};

/// Launches that are counted separately. Further launches count as the last one.
const LAUNCHES: usize = 4;

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
    /// Time before the first product of prefills that convert.
    pub first_ns: f64,
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
        first_ns: 0.0,
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
        self.launches[launch.min(LAUNCHES - 1)].add(count, ns);
    }

    fn launches(&self) -> impl Iterator<Item = &Tiles> {
        self.launches.iter().filter(|tiles| !tiles.is_empty())
    }

    fn tiles(&self) -> u32 {
        self.launches()
            .map(Tiles::count)
            .fold(0, u32::saturating_add)
    }

    /// When the last piece of keys is converted beside the products on a number of SMs. Only CTAs that have one of the tiles,
    /// or of the pieces of these, convert.
    fn converted(&self, ctas: u32, tiles: u32) -> f64 {
        self.conversion.beside(ctas.min(tiles).max(1))
    }

    /// Time on a number of SMs if no CTA is ever idle.
    fn busy(&self, ctas: u32) -> f64 {
        self.launches().map(|tiles| tiles.work_ns).sum::<f64>() / f64::from(ctas)
    }

    /// Time of each launch on a number of SMs if no tile is cut.
    fn whole(&self, ctas: u32) -> [f64; LAUNCHES] {
        self.launches.each_ref().map(|tiles| tiles.whole(ctas))
    }

    /// The same time with tiles cut along their keys into at most `most` pieces, where that is faster, and the number of pieces.
    fn cut(&self, ctas: u32, most: u32, whole: [f64; LAUNCHES]) -> (f64, u32) {
        if !self.divisible {
            return (whole.iter().sum(), self.tiles());
        }
        let launches = self.launches.iter().zip(whole);
        launches
            .map(|(tiles, whole)| tiles.cut(ctas, most, whole))
            .fold((0.0, 0), |(all, sum), (ns, pieces)| {
                (all + ns, pieces.saturating_add(sum))
            })
    }

    /// Time alone.
    fn alone(&self, sms: u32) -> f64 {
        self.cut(sms, u32::MAX, self.whole(sms)).0
    }

    /// Time beside decodes, with which prefills take `slower` times as long, the time that decodes lose where prefills are cut, and
    /// the number of pieces. Prefills are not cut if the decodes fill the device for longer, nor into more pieces than two for
    /// each CTA beside those that are short anyway.
    fn beside(&self, decode_ns: f64, ctas: u32, slower: f64) -> ([f64; 2], u32) {
        let whole = self.whole(ctas);
        let all: f64 = whole.iter().sum();
        if all * slower <= decode_ns {
            return ([all, 0.0], self.tiles());
        }
        let short = self.launches().map(|tiles| tiles.short(ctas));
        let most = short.fold(2 * ctas, u32::saturating_add);
        let (cut, pieces) = self.cut(ctas, most, whole);
        let merged = match cut < all {
            true => MERGED_NS,
            false => 0.0,
        };
        ([cut, merged], pieces)
    }

    /// Numbers of prefill CTAs to try: those of whole rounds, and parts of the device.
    fn numbers_of_ctas(&self, sms: u32) -> impl Iterator<Item = u32> {
        let least = (sms / LEAST_SHARE).max(1);
        let tiles = self.tiles();
        let rounds = (1..=ROUNDS).map(move |rounds| tiles.div_ceil(rounds));
        let parts = (0..=PARTS)
            .rev()
            .map(move |part| least + (sms - least) * part / PARTS);
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
            let whole: f64 = prefill.whole(sms).iter().sum();
            let prefill_ns = whole * self.prefill_slowdown;
            let time = overlapped(prefill_ns, decode_ns, self.overlap_loss);
            return (alike(time, [prefill_ns, decode_ns]), CtaSplit::default());
        }
        let mut best = ([f64::MAX; 2], CtaSplit::default());
        for ctas in prefill.numbers_of_ctas(sms) {
            let share = self.share(ctas, sms);
            let busy_ns = prefill.busy(ctas);
            let busy = |tiles: u32, ns: f64| {
                (ns * self.prefill_slowdown).max(prefill.converted(ctas, tiles))
            };
            // Never sooner than if no CTA were ever idle.
            let least = busy(ctas, busy_ns);
            if last(share.ends([least, least], decode_ns)) >= last(best.0) {
                continue;
            }
            let slower = self.prefill_slower(share);
            let ([beside, merged], pieces) = prefill.beside(decode_ns, ctas, slower);
            let times = [beside, busy_ns].map(|ns| busy(pieces, ns));
            let gaps = if self.is_apart() {
                LAST_APART
            } else {
                LAST_OF_BOTH
            };
            let done = share.done(times, decode_ns + merged, gaps);
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
/// or this, where each has SMs of its own,
const LAST_APART: f64 = 0.05;
/// and less the further apart their ends are, down to nothing at this part of the time.
const CLOSE: f64 = 0.3;

/// The fewest prefill CTAs to try are one per `LEAST_SHARE` SMs; `PARTS` steps lead from there to one per SM.
const LEAST_SHARE: u32 = 4;
const PARTS: u32 = 9;

/// The numbers of CTAs to try fill at most this many rounds of tiles.
const ROUNDS: u32 = 16;

impl Share {
    /// When each operation finishes, from their times alone. `busy_ns` is the mean time for which the prefill CTAs are
    /// busy, and `gaps` what it costs if both finish at the same time.
    fn done(&self, times: [f64; 2], decode_ns: f64, gaps: f64) -> [f64; 2] {
        let [prefill_ns, busy_ns] = times;
        let slow_prefill = prefill_ns * self.prefill;
        let behind = decode_ns + busy_ns * self.prefill * self.decode;
        let close = 1.0 - (slow_prefill - behind).abs() / (CLOSE * behind);
        let together = gaps * behind * close.max(0.0);
        let [prefilled, decoded] = self.ends(times, decode_ns);
        match prefilled <= decoded {
            true => [prefilled, decoded + together],
            false => [prefilled + together, decoded],
        }
    }

    /// The same if each filled the gaps of the other's last round.
    fn ends(&self, [prefill_ns, busy_ns]: [f64; 2], decode_ns: f64) -> [f64; 2] {
        let slow_prefill = prefill_ns * self.prefill;
        let behind = decode_ns + busy_ns * self.prefill * self.decode;
        if slow_prefill <= behind {
            return [slow_prefill, behind];
        }
        // The decodes finish first, and the rest of the prefills has the device alone.
        let decoded = decode_ns / (1.0 - self.decode);
        let all = prefill_ns + decoded * (1.0 - 1.0 / self.prefill);
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
    /// prefills in the tiles of each configuration and the time of the decodes by the bytes that they read in these, or none if these
    /// do not fit. `alone_ns` is the time of decodes alone.
    pub(in crate::plan) fn forecast(
        &self,
        sms: u32,
        prefill: &PrefillLoad,
        fused: impl Iterator<Item = Option<(PrefillLoad, f64)>>,
        alone_ns: f64,
    ) -> (PodForecast, Option<FusedChoice>) {
        let launched = self.prefill_ns * prefill.launches().count() as f64;
        let Conversion {
            before_ns,
            first_ns,
            ..
        } = prefill.conversion;
        // Where a launch converts the keys of prefills that run alone, no prefill does.
        let converted_ns = if before_ns > 0.0 { before_ns } else { first_ns };
        let prefill_ns = prefill.alone(sms) + launched + converted_ns;
        let both_ns = launched + self.decode_ns;
        let ([beside_ns, merged_ns], pieces) = prefill.beside(alone_ns, sms, 1.0);
        let converted = prefill.converted(sms, pieces);
        let [beside_ns, busy_ns] = [beside_ns, prefill.busy(sms)].map(|ns| ns.max(converted));
        // The decodes run on SMs that the prefills leave idle, and then on all of them.
        let waited_ns = self.streams_loss * busy_ns + self.idle_loss * (beside_ns - busy_ns);
        let alone_ns = alone_ns + self.decode_ns;
        let mut forecast = PodForecast {
            prefill_ns,
            decode_ns: alone_ns,
            serial_ns: prefill_ns + alone_ns + self.behind_ns,
            streams_ns: (beside_ns + both_ns).max(alone_ns + merged_ns + launched + waited_ns)
                + first_ns,
            fused_ns: f64::MAX,
            fused_done_ns: [0.0; 2],
        };
        let mut choice = None;
        for ((config, prefill), index) in self.configs.iter().zip(fused).zip(0..) {
            let Some((prefill, decode_ns)) = prefill else {
                continue;
            };
            let (done, ctas) = config.done(&prefill, decode_ns, sms);
            let done = done.map(|ns| ns + self.fused_ns + before_ns + first_ns);
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
