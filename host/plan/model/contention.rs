//! How CTAs slow each other down.

/// How CTAs that run at the same time share the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contention {
    /// Number of CTAs that share the part of one CTA of the device. Each takes this many times as long for its keys.
    pub ctas_sharing: u32,
    /// Speed of a CTA while all others are idle, in thousandths of the speed that its part of the device allows.
    pub solo_speedup: u32,
}

impl Contention {
    /// Each CTA has its part, whatever others do.
    pub const NONE: Self = Self {
        ctas_sharing: 1,
        solo_speedup: 1000,
    };

    /// The contention of both together: CTAs share if both do in the same way, and speed up no more than either.
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

    /// The speed of each of `active` CTAs among `ctas`, in thousandths: as its part of the device or its speed alone
    /// allow, whichever is less, with a smooth transition between the two.
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
