//! What a description must be like.

use super::{DecodeDescription, DeviceDescription, HeadRate, QueryStep, TileCost};
use crate::plan::data::{Kernel, PlanError};

/// A plan has at most so many kinds of launches.
const MAX_TILES: usize = 64;

/// CTAs on an SM, more than any has.
const MAX_CTAS: u32 = 64;

impl DeviceDescription {
    /// Whether every value makes sense.
    ///
    /// # Errors
    /// [`PlanError::Device`] with the field and its value.
    pub fn check(&self) -> Result<(), PlanError> {
        let wrong = |reason: String| Err(PlanError::Device { reason });
        // What any machine has, with room: costs are summed in picoseconds, in 64 bits.
        for (name, got, least, most) in [
            ("read_bytes_per_ns", self.read_bytes_per_ns, 0.1, 1e6),
            ("flops_per_ns", self.flops_per_ns, 1.0, 1e8),
            ("latency_ns", self.latency_ns, 1e-3, 1e9),
            ("launch_ns", self.launch_ns, 0.0, 1e9),
            ("merge_ns", self.merge_ns, 0.0, 1e9),
            ("sms", self.sms.into(), 1.0, 65536.0),
            ("pod.streams_loss", self.pod.streams_loss, 0.0, 10.0),
            ("pod.apart_loss", self.pod.apart_loss, 0.0, 10.0),
            ("pod.prefill_ns", self.pod.prefill_ns, 0.0, 1e9),
            ("pod.decode_ns", self.pod.decode_ns, 0.0, 1e9),
            ("pod.fused_ns", self.pod.fused_ns, 0.0, 1e9),
            ("pod.tile_ns", self.pod.tile_ns, 0.0, 1e9),
        ] {
            if !(least..=most).contains(&got) {
                return wrong(format!("{name} is {got}: give {least} to {most}"));
            }
        }
        let DecodeDescription { rows, keys, .. } = &self.decode;
        let by_q_len = &self.prefill.by_q_len;
        let tiles = [rows.len(), by_q_len.len()];
        if tiles.iter().sum::<usize>() > MAX_TILES {
            return wrong(format!(
                "{tiles:?} tiles of decode and prefill are more than the {MAX_TILES} that a plan can have"
            ));
        }
        let reached = |tile: &&TileCost| {
            let positive = |x: f64| x > 0.0 && x.is_finite();
            !(positive(tile.read)
                && positive(tile.flops_per_ns)
                && tile.unit_ns >= 0.0
                && tile.queued_ns.is_none_or(|queued| queued >= 0.0)
                && tile
                    .state_ns
                    .is_none_or(|state| (0.0..=1e9).contains(&state))
                && (1..=MAX_CTAS).contains(&tile.share)
                && tile.alone >= 1.0
                && tile.alone <= 100.0)
        };
        if let Some(tile) = self.decode.tiles.iter().find(reached) {
            return wrong(format!("decode.tiles: {tile:?} does nothing"));
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
            if ctas == 0 {
                return wrong(format!("{kernel:?}: no CTA fits an SM"));
            }
            if ctas > MAX_CTAS {
                return wrong(format!(
                    "{kernel:?}: {ctas} CTAs on an SM: give at most {MAX_CTAS}"
                ));
            }
            if !(0.0..=1e9).contains(&unit_ns) {
                return wrong(format!("{kernel:?}: unit_ns is {unit_ns}: give 0 to 1e9"));
            }
        }
        if rows.contains(&0) || !rows.is_sorted_by(|a, b| a < b) {
            return wrong(format!(
                "decode: row tiles {rows:?} must ascend from at least 1"
            ));
        }
        if keys.is_some() && rows.is_empty() {
            return wrong("decode: tiles of any size need rows to choose from".to_owned());
        }
        if [*keys, self.prefill.keys].contains(&Some(0)) {
            return wrong("a key tile is 0".to_owned());
        }
        let of_any_head = by_q_len.iter().skip_while(|step| step.head_dim.is_some());
        let query_steps: Vec<_> = of_any_head.clone().map(|step| step.up_to).collect();
        if let Some(late) = of_any_head.clone().find(|step| step.head_dim.is_some()) {
            return wrong(format!("prefill.by_q_len: {late:?} must come first"));
        }
        let bounds = query_steps.iter().map(|up_to| up_to.unwrap_or(u32::MAX));
        if !bounds.is_sorted() || query_steps.last().is_none_or(Option::is_some) {
            return wrong(
                "prefill.by_q_len: the steps must ascend and the last must have no bound"
                    .to_owned(),
            );
        }
        let nothing = |step: &&QueryStep| step.rows == 0 || step.pack == Some(0);
        if let Some(step) = by_q_len.iter().find(nothing) {
            return wrong(format!("prefill.by_q_len: {step:?} holds nothing"));
        }
        Ok(())
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
        assert!(reason(|d| d.prefill.by_q_len[3].up_to = Some(9)).contains("no bound"));
        assert!(reason(|d| d.prefill.by_q_len.clear()).contains("prefill.by_q_len"));
        assert!(reason(|d| d.prefill.by_q_len[0].pack = Some(0)).contains("holds nothing"));
        let unknown = DeviceDescription::named("h20").unwrap_err().to_string();
        assert!(
            unknown.contains("h20") && unknown.contains("h200, h100"),
            "{unknown}"
        );
    }
}
