//! How CTAs slow each other down.

/// How CTAs that run at the same time share the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contention {
    /// CTAs that share what one CTA of the device has. Keys take each of them so many times as long.
    pub ctas_sharing: u32,
    /// How many thousandths of its part of the device a CTA takes where others have nothing to do.
    pub solo_speedup: u32,
}

impl Contention {
    /// Each has its part, whatever others do.
    pub const NONE: Self = Self {
        ctas_sharing: 1,
        solo_speedup: 1000,
    };

    /// Of both: sharing where both do, and no more than either takes.
    pub fn and(self, other: Self) -> Self {
        if self.ctas_sharing == other.ctas_sharing {
            Self {
                ctas_sharing: self.ctas_sharing,
                solo_speedup: self.solo_speedup.min(other.solo_speedup),
            }
        } else {
            let alone = |contention: Self| contention.solo_speedup / contention.ctas_sharing;
            Self {
                ctas_sharing: 1,
                solo_speedup: alone(self).min(alone(other)).max(1000),
            }
        }
    }

    /// The speed, in thousandths, of each of `active` among so many: its part of the device or what it can take
    /// alone, whichever is less, and a little less than either where they are near each other.
    pub fn speed(self, active: u64, ctas: u64) -> u64 {
        if self.solo_speedup <= 1000 || active >= ctas {
            return 1000;
        }
        let least = (1e3 / f64::from(self.solo_speedup)).powi(4);
        let part = (active as f64 / ctas as f64).powi(4);
        (((1.0 + least) / (part + least)).sqrt().sqrt() * 1e3) as u64
    }
}

impl Default for Contention {
    fn default() -> Self {
        Self::NONE
    }
}
