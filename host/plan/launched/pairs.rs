//! Whether decodes are faster with two KV heads at a time: half as many units, each longer.

use kernels_gpu::registry::KernelInfo;

/// The most items whose lengths are compared.
pub(crate) const MOST_LENGTHS: usize = 4096;

/// What units cost, in the time of a key of one KV head.
#[derive(Clone, Copy)]
struct Cost {
    /// A unit of one head, beyond its keys.
    unit: f64,
    /// A unit of two heads, likewise.
    pair: f64,
    /// A launch of units of two heads, beyond one of units of one: its pipeline is longer.
    first: f64,
    /// How many times as fast two heads are loaded together.
    gain: f64,
}

/// 8-bit keys of 64 elements: fitted to 210 times of 61 batches, whole and in pieces of 256 to 3,072 keys (docs/notes/fp8.md). An
/// SM takes 1 µs for 212 keys of a head.
const OF_64_BYTES: Cost = Cost {
    unit: 583.0,
    pair: 954.0,
    first: 466.0,
    gain: 1.3,
};

/// Rows of 160 and 192 bytes: not fitted. Less than the 1.17 that rows of 64 bytes gained at first, so that pairs are taken where they
/// surely gain.
const OF_OTHERS: Cost = Cost {
    unit: 0.0,
    pair: 0.0,
    first: 0.0,
    gain: 1.1,
};

/// Whether a launch of these items is faster with two KV heads at a time. `lengths` are the keys of its items, the longest first.
pub(crate) fn gain_by_pairs(pair: &KernelInfo, lengths: &[u32], kv_heads: u32, sms: u32) -> bool {
    let cost = match pair.head_dim * pair.cache.map_or(2, |_| 1) {
        0..=64 => OF_64_BYTES,
        _ => OF_OTHERS,
    };
    // So many fill all SMs evenly, whatever their lengths.
    if lengths.len() > MOST_LENGTHS {
        return true;
    }
    let [kv_heads, sms] = [kv_heads, sms].map(|count| count as usize);
    let alone = end(lengths, kv_heads, sms, |keys| keys + cost.unit);
    let together = end(lengths, kv_heads / 2, sms, |keys| {
        2.0 * keys / cost.gain + cost.pair
    });
    together + cost.first < alone
}

/// When the last of `sms` CTAs ends, at least, if each item has as many units as `heads`. Of any `j · sms + 1` units, some CTA has `j
/// + 1`: it takes as long as the shortest of the longest.
fn end(lengths: &[u32], heads: usize, sms: usize, time: impl Fn(f64) -> f64) -> f64 {
    let of_unit = |unit: usize| time(f64::from(lengths[unit / heads]));
    let units = lengths.len() * heads;
    let work: f64 = lengths.iter().map(|&keys| time(f64::from(keys))).sum();
    let even = work * heads as f64 / sms as f64;
    let rounds = (0..).map(|j| j * sms..j * sms + 1);
    let rounds = rounds.take_while(|last| last.end <= units).zip(1..);
    rounds.fold(even, |latest, (last, of_cta)| {
        let shortest = (last.end - of_cta..last.end).map(of_unit);
        latest.max(shortest.sum())
    })
}

#[cfg(test)]
mod tests {
    use kernels_gpu::registry::KernelId;

    use super::*;

    fn pair() -> &'static KernelInfo {
        let of_64 = |id: &KernelId| id.info().kv_heads == 2 && id.info().head_dim == 64;
        let id = KernelId::all().find(of_64);
        id.expect("a kernel for two KV heads of 64").info()
    }

    /// µs on an H200, with one KV head at a time and with two: measured, where both were.
    #[test]
    fn half_as_many_units_must_keep_the_sms_busy() {
        let gain = |lengths: &[u32], kv_heads| gain_by_pairs(pair(), lengths, kv_heads, 132);
        // 64 × 8192: 167, 141.
        assert!(gain(&[8192; 64], 8));
        // 24 × 3000: two rounds of one head, one of two.
        assert!(gain(&[3000; 24], 8));
        // The longest of two heads ends last.
        let mut ragged: Vec<u32> = (1..=48).map(|i| 340 * i).rev().collect();
        assert!(!gain(&ragged, 4));
        ragged.truncate(3);
        assert!(!gain(&ragged, 8));
        // Few short units: those of two heads start later.
        assert!(!gain(&[700; 8], 8));
        assert!(!gain(&[], 8));
        assert!(gain(&[4; MOST_LENGTHS + 1], 8));
    }
}
