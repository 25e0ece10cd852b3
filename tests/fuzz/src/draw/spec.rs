//! The heads of a layer.

use tandem_attn::{
    Hooks,
    problem::{Compute, Dtype, Spec},
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

use super::{Draw, Size, chance, one};
use crate::{hooks, numeric::Rng};

impl Draw {
    pub(super) fn spec(self, rng: &mut Rng) -> Spec {
        let tiny = self.size == Size::Tiny;
        let kv_heads = 1 + rng.below(if tiny { 2 } else { 4 }) as u32;
        let group = match rng.below(12) {
            0 => 16,
            1 if !tiny => 40,
            2 => 5,
            _ => 1 + rng.below(8) as u32,
        };
        let mut spec = match (self.gpu, rng.below(20)) {
            // Tiles of 128 heads take too long for many emulated cases.
            (true, 0 | 19) if tiny => Spec::latent(one(rng, &[3, 16, 32, 64]), 512, 64),
            (true, 0 | 19) => Spec::latent(one(rng, &[3, 16, 32, 64, 128]), 512, 64),
            (true, 1) => Spec::new(kv_heads * group.min(8), kv_heads, one(rng, &[256, 512])),
            (true, 2) => {
                let (qk, v) = one(rng, &[(192, 128), (64, 512)]);
                Spec::new(kv_heads * group.min(8), kv_heads, qk).with_head_dim_v(v)
            }
            (true, 3 | 4) => {
                let dim = one(
                    rng,
                    &[16, 32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240],
                );
                Spec::new(kv_heads * group.min(8), kv_heads, dim)
            }
            (true, n) => Spec::new(
                kv_heads * group,
                kv_heads,
                if n % 2 == 0 { 64 } else { 128 },
            ),
            (false, 0) => Spec::latent(one(rng, &[3, 16]), 64, 16),
            (false, _) => {
                let dim = one(rng, &[16, 32, 48, 64, 128]);
                Spec::new(kv_heads * group, kv_heads, dim).with_head_dim_v(one(rng, &[16, 80, dim]))
            }
        };
        spec = spec.with_dtype(one(rng, &[Dtype::BF16, Dtype::F16]));
        if !self.gpu {
            spec.q_dtype = one(rng, &[Dtype::BF16, Dtype::F16, Dtype::F32]);
            spec.out_dtype = one(rng, &[Dtype::BF16, Dtype::F16, Dtype::F32]);
            spec.kv_dtype = one(rng, &[Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F8E5M2]);
        }
        let eight_bits = match spec.latent {
            true => self.gpu && chance(rng, 50),
            false => chance(rng, 15),
        };
        if eight_bits {
            spec.kv_dtype = Dtype::F8E4M3;
        }
        if eight_bits && spec.latent {
            // Rows of 656 bytes, and queries for them.
            (spec.q_dtype, spec.out_dtype) = (Dtype::BF16, Dtype::BF16);
        }
        spec.variant.causal = chance(rng, 90);
        if chance(rng, 25) {
            spec.variant.window_left = Some(rng.below(300) as u32);
        }
        if chance(rng, 15) && !(eight_bits && spec.latent) {
            spec.variant.soft_cap = Some(rng.between(5.0, 50.0));
        } else if eight_bits && !spec.latent && self.gpu && chance(rng, 25) {
            spec.kv_dtype = Dtype::F8E5M2;
        }
        spec.variant.sinks = chance(rng, 25);
        if spec.variant.sinks && !spec.latent && chance(rng, 30) {
            spec.variant.sink_tokens = 2 + rng.below(3) as u32;
        }
        let plain = spec.variant.soft_cap.is_none() && !eight_bits && !spec.latent;
        if self.gpu && plain && spec.head_dim_qk <= 128 && chance(rng, 14) {
            spec = self.with_hooks(rng, spec);
        } else if !spec.latent && chance(rng, 8) {
            spec.rotary = Some(hooks::rotary(spec.head_dim_qk, rng.bits()));
        } else if self.gpu && spec.kv_dtype == Dtype::F8E4M3 && !spec.latent && chance(rng, 30) {
            spec.compute = Compute::F8;
            if chance(rng, 70) {
                (spec.head_dim_qk, spec.head_dim_v) = (128, 128);
            }
        }
        if self.gpu && chance(rng, 10) {
            // Rounded before kernels read them, and written by merges.
            let [q, out] = one(rng, &[[true, true], [true, false], [false, true]]);
            spec.q_dtype = if q { Dtype::F32 } else { spec.q_dtype };
            spec.out_dtype = if out { Dtype::F32 } else { spec.out_dtype };
        }
        spec
    }

    /// Biases by distance or weights that are no softmax, where kernels for them come with the library, and a few where none do.
    fn with_hooks(self, rng: &mut Rng, spec: Spec) -> Spec {
        let mut any = [ALIBI, DISTANCE_BIAS, SIGMOID];
        rng.shuffle(&mut any);
        let compiled = |hooks: &&Hooks| match (hooks.name, spec.head_dim_qk, spec.kv_dtype) {
            (name, 64, Dtype::BF16) if name == DISTANCE_BIAS.name => true,
            (name, 128, Dtype::BF16) if name == SIGMOID.name => true,
            (name, ..) => name == ALIBI.name,
        };
        let hooks = match chance(rng, 10) {
            true => any.first(),
            false => any.iter().find(compiled),
        };
        let mut spec = spec.with_hooks(hooks.expect("linear biases are always there"));
        if spec.variant.adds_up {
            (spec.variant.sinks, spec.variant.sink_tokens) = (false, 1);
        }
        spec
    }
}
