//! Checks of device descriptions.

use std::ops::RangeInclusive;

use super::{DecodeDescription, DeviceDescription, HeadRate, QueryStep};
use crate::plan::{
    data::{Kernel, PlanError},
    model::{PodConfig, tiles::MOST_OF_TILE},
};

/// Maximum number of different tiles: a plan has at most this many launches.
const MAX_TILES: usize = 64;

/// Maximum number of CTAs on an SM: more than any device has.
const MAX_CTAS: u32 = 64;

/// Checks that a value is in its range. NaN is in no range.
fn within(name: &str, got: f64, range: RangeInclusive<f64>) -> Result<(), PlanError> {
    match range.contains(&got) {
        true => Ok(()),
        false => Err(PlanError::Device {
            reason: format!("{name} is {got}: give {} to {}", range.start(), range.end()),
        }),
    }
}

/// Checks the rows or the keys of a tile.
fn size(name: &str, got: u32) -> Result<(), PlanError> {
    within(name, got.into(), 1.0..=f64::from(MOST_OF_TILE))
}

impl PodConfig {
    fn check(&self) -> Result<(), PlanError> {
        let of = |name: &str| format!("pod.configs: {name} of {:?}", self.name);
        let tiles = [Some(self.prefill), self.decode].into_iter().flatten();
        let counts = tiles.flat_map(|tile| [("a tile's m", tile.m), ("a tile's n", tile.n)]);
        let counts = counts
            .chain([("virtual_decodes", self.virtual_decodes)])
            .chain(self.prefill_pack.map(|pack| ("prefill_pack", pack)));
        for (name, got) in counts {
            within(&of(name), got.into(), 1.0..=1e6)?;
        }
        for (name, got, least, most) in [
            ("prefill_slowdown", self.prefill_slowdown, 1e-3, 1e3),
            ("decode_slowdown", self.decode_slowdown, 1e-3, 1e3),
            ("overlap_loss", self.overlap_loss, 0.0, 10.0),
        ] {
            within(&of(name), got, least..=most)?;
        }
        for share in &self.shares {
            within(&of("a share's part"), share.part, 1e-3..=1.0)?;
            within(&of("a share's prefill"), share.prefill, 1e-3..=1e3)?;
            // At 1, decodes would never end.
            within(&of("a share's decode"), share.decode, 0.0..=0.999)?;
        }
        if !self.shares.is_sorted_by(|a, b| a.part < b.part) {
            return Err(PlanError::Device {
                reason: format!("{} must ascend", of("the parts of shares")),
            });
        }
        Ok(())
    }
}

impl DeviceDescription {
    /// Whether every value makes sense.
    ///
    /// # Errors
    /// [`PlanError::Device`] with the field and its value, [`PlanError::UnknownTile`] with the tiles that there are.
    pub fn check(&self) -> Result<(), PlanError> {
        let wrong = |reason: String| Err(PlanError::Device { reason });
        // Wide ranges around any real machine. Costs are sums of picoseconds in 64 bits, which must not overflow.
        for (name, got, least, most) in [
            ("read_bytes_per_ns", self.read_bytes_per_ns, 0.1, 1e6),
            ("flops_per_ns", self.flops_per_ns, 1.0, 1e8),
            ("launch_ns", self.launch_ns, 0.0, 1e9),
            ("merge_ns", self.merge_ns, 0.0, 1e9),
            ("merge_last_ns", self.merge_last_ns, 0.0, 1e9),
            ("merge_state_ns", self.merge_state_ns, 0.0, 1e9),
            ("sms", self.sms.into(), 1.0, 65536.0),
            (
                "decode_max_tiles",
                self.decode_max_tiles.into(),
                0.0,
                1024.0,
            ),
            ("pod.streams_loss", self.pod.streams_loss, 0.0, 10.0),
            ("pod.idle_loss", self.pod.idle_loss, 0.0, 10.0),
            ("pod.decode_alone", self.pod.decode_alone, 1e-3, 1e3),
            ("pod.prefill_ns", self.pod.prefill_ns, 0.0, 1e9),
            ("pod.decode_ns", self.pod.decode_ns, 0.0, 1e9),
            ("pod.fused_ns", self.pod.fused_ns, 0.0, 1e9),
            ("pod.behind_ns", self.pod.behind_ns, 0.0, 1e9),
            ("pod.tile_ns", self.pod.tile_ns, 0.0, 1e9),
        ] {
            within(name, got, least..=most)?;
        }
        if let Some(joint) = &self.decode.joint {
            for (name, got, least) in [
                ("decode.joint.cut_ns", joint.cut_ns, 0.0),
                ("decode.joint.apart_ns", joint.apart_ns, 0.0),
                ("decode.joint.behind_ns", joint.behind_ns, 0.0),
                ("decode.joint.bytes", joint.bytes, 1.0),
            ] {
                within(name, got, least..=1e9)?;
            }
        }
        for tile in &self.decode.tiles {
            for (name, got, least, most) in [
                ("share", f64::from(tile.share), 1.0, MAX_CTAS.into()),
                ("alone", tile.alone, 1.0, 100.0),
                ("read", tile.read, 1e-3, 1e3),
                ("flops_per_ns", tile.flops_per_ns, 1.0, 1e8),
                ("unit_ns", tile.unit_ns, 0.0, 1e9),
                ("queued_ns", tile.queued_ns.unwrap_or(0.0), 0.0, 1e9),
                ("state_ns", tile.state_ns.unwrap_or(0.0), 0.0, 1e9),
                ("cut_ns", tile.cut_ns.unwrap_or(0.0), 0.0, 1e9),
                ("spread_states", tile.spread_states.unwrap_or(0.0), 0.0, 1e3),
                ("few_keys", tile.few_keys.unwrap_or(0.0), 0.0, 1e9),
                ("joined", tile.joined.unwrap_or(0.0), 0.0, 1e3),
                (
                    "smaller units",
                    tile.smaller.map_or(0.0, |[units, _]| units),
                    0.0,
                    1e4,
                ),
                (
                    "smaller keys",
                    tile.smaller.map_or(0.0, |[_, keys]| keys),
                    0.0,
                    1e9,
                ),
                (
                    "wider.units",
                    tile.wider.map_or(0.0, |wider| wider.units),
                    0.0,
                    1e9,
                ),
            ] {
                let name = format!("decode.tiles: {name} of {} rows", tile.m);
                within(&name, got, least..=most)?;
            }
            if let Some(wider) = tile.wider.filter(|wider| wider.rows <= tile.m) {
                return wrong(format!(
                    "decode.tiles: {} rows are not wider than {}",
                    wider.rows, tile.m
                ));
            }
        }
        for config in &self.pod.configs {
            config.check()?;
        }
        let DecodeDescription { rows, keys, .. } = &self.decode;
        let by_q_len = &self.prefill.by_q_len;
        let tiles = [rows.len(), by_q_len.len()];
        if tiles.iter().sum::<usize>() > MAX_TILES {
            return wrong(format!(
                "{tiles:?} tiles of decode and prefill are more than the {MAX_TILES} that a plan can have"
            ));
        }
        for HeadRate { head_dim, part } in &self.prefill.of_heads {
            if !(1e-3..=1e3).contains(part) {
                return wrong(format!(
                    "prefill.of_heads: heads of {head_dim} reach {part} of the device: give 0.001 to 1000"
                ));
            }
        }
        for kernel in Kernel::ALL {
            let (ctas, unit_ns) = (self.ctas_per_sm(kernel), self.unit_ns(kernel));
            let most = MAX_CTAS.into();
            within(&format!("{kernel:?}: ctas_per_sm"), ctas.into(), 1.0..=most)?;
            within(&format!("{kernel:?}: unit_ns"), unit_ns, 0.0..=1e9)?;
        }
        if rows.contains(&0) || !rows.is_sorted_by(|a, b| a < b) {
            return wrong(format!(
                "decode: row tiles {rows:?} must ascend from at least 1"
            ));
        }
        if keys.is_some() && rows.is_empty() {
            return wrong("decode: tiles of any size need rows to choose from".to_owned());
        }
        for (name, keys) in [("decode", *keys), ("prefill", self.prefill.keys)] {
            if let Some(keys) = keys {
                size(&format!("{name}.keys"), keys)?;
            }
        }
        for &rows in rows {
            size("decode.rows", rows)?;
        }
        let only_for_some = |step: &&QueryStep| step.head_dim.is_some() || step.compute.is_some();
        let for_all = by_q_len.iter().skip_while(only_for_some);
        let query_steps: Vec<_> = for_all.clone().map(|step| step.up_to).collect();
        if let Some(late) = for_all.clone().find(only_for_some) {
            return wrong(format!("prefill.by_q_len: {late:?} must come first"));
        }
        if query_steps.last().is_none_or(Option::is_some) {
            return wrong(
                "prefill.by_q_len: the last step must be for all heads and have no bound"
                    .to_owned(),
            );
        }
        // The first leaf that includes a number decides: one behind a larger or equal bound for the same heads never would.
        // Numbers above the last bound for some heads have the leaves for all.
        for (index, step) in by_q_len.iter().enumerate() {
            let alike = |other: &&QueryStep| {
                (other.head_dim, other.compute) == (step.head_dim, step.compute)
            };
            let bound = |step: &QueryStep| step.up_to.unwrap_or(u32::MAX);
            let mut before = by_q_len[..index].iter().filter(alike);
            if let Some(before) = before.find(|before| bound(before) >= bound(step)) {
                return wrong(format!(
                    "prefill.by_q_len: {before:?} includes all numbers of {step:?}: the bounds for the same heads must ascend"
                ));
            }
        }
        for step in by_q_len {
            size("prefill.by_q_len: rows", step.rows)?;
            if step.pack == Some(0) {
                return wrong(format!(
                    "prefill.by_q_len: {step:?} holds nothing: give a pack of at least 1, or none"
                ));
            }
        }
        self.check_named_tiles()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_descriptions_say_what_is_wrong() {
        let reason = |change: fn(&mut DeviceDescription)| {
            let mut device = DeviceDescription::named("h200").unwrap();
            change(&mut device);
            device.check().unwrap_err().to_string()
        };
        assert!(reason(|d| d.read_bytes_per_ns = 0.0).contains("read_bytes_per_ns is 0"));
        assert!(reason(|d| d.sms = 0).contains("sms"));
        assert!(reason(|d| d.decode.rows = vec![32, 16]).contains("[32, 16]"));
        assert!(reason(|d| d.decode.keys = Some(64)).contains("rows to choose from"));
        assert!(
            reason(|d| d.prefill.by_q_len.last_mut().unwrap().up_to = Some(9)).contains("no bound")
        );
        // The leaves for some heads among themselves, and those for all.
        for leaf in [1, 3] {
            let twice = match leaf {
                1 => reason(|d| d.prefill.by_q_len.swap(1, 2)),
                _ => reason(|d| d.prefill.by_q_len.swap(3, 4)),
            };
            assert!(twice.contains("must ascend"), "{twice}");
        }
        assert!(reason(|d| d.prefill.by_q_len.clear()).contains("prefill.by_q_len"));
        assert!(reason(|d| d.prefill.by_q_len[0].pack = Some(0)).contains("holds nothing"));
        assert!(reason(|d| d.decode.ctas_per_sm = 0).contains("ctas_per_sm is 0: give 1 to 64"));
        assert!(
            reason(|d| d.prefill.keys = Some(0)).contains("prefill.keys is 0: give 1 to 65536")
        );
        assert!(reason(|d| d.merge_last_ns = f64::INFINITY).contains("merge_last_ns is inf"));
        assert!(reason(|d| d.decode.tiles[0].read = 1e-300).contains("read of 8 rows"));
        let narrow = |d: &mut DeviceDescription| d.decode.tiles[0].wider.as_mut().unwrap().rows = 8;
        assert!(reason(narrow).contains("8 rows are not wider than 8"));
        let joint = reason(|d| d.decode.joint.as_mut().unwrap().cut_ns = f64::NAN);
        assert!(
            joint.contains("decode.joint.cut_ns is NaN: give 0 to"),
            "{joint}"
        );
        let unknown = DeviceDescription::named("h20").unwrap_err().to_string();
        assert!(
            unknown.contains("h20") && unknown.contains("h200, h100"),
            "{unknown}"
        );
    }

    /// Values that forecasts of hybrid batches divide by or look up.
    #[test]
    fn wrong_configurations_of_hybrid_batches_say_what_is_wrong() {
        let reason = |change: fn(&mut PodConfig)| {
            let mut device = DeviceDescription::named("h200").unwrap();
            change(&mut device.pod.configs[1]);
            device.check().unwrap_err().to_string()
        };
        let name = "two kernels, prefill 128 × 64";
        for (change, said) in [
            (
                (|c| c.prefill_slowdown = 0.0) as fn(&mut PodConfig),
                "prefill_slowdown",
            ),
            (|c| c.decode_slowdown = f64::NAN, "decode_slowdown"),
            (|c| c.overlap_loss = -1.0, "overlap_loss"),
            (|c| c.prefill_pack = Some(0), "prefill_pack"),
            (|c| c.virtual_decodes = 0, "virtual_decodes"),
            (|c| c.decode.as_mut().unwrap().n = 0, "a tile's n"),
            (|c| c.shares[0].decode = 1.0, "a share's decode"),
            (|c| c.shares[0].part = 0.0, "a share's part"),
            (|c| c.shares.reverse(), "the parts of shares"),
        ] {
            let got = reason(change);
            assert!(got.contains(said) && got.contains(name), "{said}: {got}");
        }
    }
}
