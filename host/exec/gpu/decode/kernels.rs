//! The decode kernels of Hopper: which there are, and how their CTAs are made.

use kernels_gpu::{
    decode::{layout::KEYS, shape},
    sm90::{slim, wide},
};

use super::DecodeTile;
use crate::{
    Error,
    exec::gpu::module::{Carveout, Kernel, Modules},
    plan::Instance,
    problem::{Dtype, Spec},
};

/// Rows of the tiles that kernels are compiled for.
const ROWS: [u32; 4] = [8, 16, 64, 128];

/// One entry for each element type, head dimension, row tile, and with or without a soft cap.
const ENTRIES: [(Dtype, u32, u32, bool, &str); 48] = {
    macro_rules! entries {
        ($([$dtype:ident, $half:literal, $dim:literal, $rows:literal])*) => {[$(
            (Dtype::$dtype, $dim, $rows, false, concat!("decode_", $half, "_d", $dim, "_m", $rows)),
            (Dtype::$dtype, $dim, $rows, true, concat!("decode_", $half, "_d", $dim, "_m", $rows, "_cap")),
        )*]};
    }
    entries! {
        [BF16, "bf16", 64, 8] [BF16, "bf16", 64, 16] [BF16, "bf16", 64, 64] [BF16, "bf16", 64, 128]
        [BF16, "bf16", 128, 8] [BF16, "bf16", 128, 16] [BF16, "bf16", 128, 64] [BF16, "bf16", 128, 128]
        [BF16, "bf16", 256, 8] [BF16, "bf16", 256, 16] [BF16, "bf16", 256, 64] [BF16, "bf16", 256, 128]
        [F16, "f16", 64, 8] [F16, "f16", 64, 16] [F16, "f16", 64, 64] [F16, "f16", 64, 128]
        [F16, "f16", 128, 8] [F16, "f16", 128, 16] [F16, "f16", 128, 64] [F16, "f16", 128, 128]
        [F16, "f16", 256, 8] [F16, "f16", 256, 16] [F16, "f16", 256, 64] [F16, "f16", 256, 128]
    }
};

/// How a CTA of an entry is made.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    pub threads: u32,
    pub shared_bytes: u32,
    pub ctas_per_sm: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// The most units that a CTA may claim at a time.
    pub run: u32,
}

/// The form of the kernel with tiles of `rows` rows, where a CTA can have `shared_bytes`.
fn form(dim: u32, rows: u32, cap: bool, shared_bytes: u32) -> Option<Form> {
    if let Some(wide) = wide::Shape::find(dim, rows, cap) {
        return (wide.shared_bytes() <= shared_bytes).then_some(Form {
            threads: wide.threads(),
            shared_bytes: wide.shared_bytes(),
            ctas_per_sm: wide.ctas_per_sm,
            stages: wide.stages,
            run: 1,
        });
    }
    shape(dim, rows, shared_bytes).map(|shape| Form {
        threads: shape.threads,
        shared_bytes: shape.shared_bytes,
        ctas_per_sm: 1,
        stages: shape.stages,
        run: shape.units / 2,
    })
}

/// The kernels that run beside a prefill.
const ENTRIES_BESIDE: [(Dtype, slim::Shape, &str); 4] = [
    (Dtype::BF16, slim::SHAPE, "decode_bf16_d128_m8_slim"),
    (
        Dtype::BF16,
        slim::SHALLOW,
        "decode_bf16_d128_m8_slim_shallow",
    ),
    (Dtype::F16, slim::SHAPE, "decode_f16_d128_m8_slim"),
    (Dtype::F16, slim::SHALLOW, "decode_f16_d128_m8_slim_shallow"),
];

/// The kernels; none on architectures that have none.
#[derive(Default)]
pub struct Kernels {
    /// In the order of [`ENTRIES`].
    alone: Vec<Kernel>,
    /// In the order of [`ENTRIES_BESIDE`].
    beside: Vec<Kernel>,
}

impl Kernels {
    pub fn load(modules: &Modules, max_shared: u32) -> Result<Self, Error> {
        if modules.arch() != "sm_90a" {
            return Ok(Self::default());
        }
        let kernel = |name| modules.kernel(name, Carveout::Shared, max_shared);
        let alone = ENTRIES.iter().map(|&(.., name)| kernel(name));
        let beside = ENTRIES_BESIDE.iter().map(|&(.., name)| kernel(name));
        Ok(Self {
            alone: alone.collect::<Result<_, _>>()?,
            beside: beside.collect::<Result<_, _>>()?,
        })
    }

    /// What plans can ask for.
    pub fn instances(&self) -> Vec<Instance> {
        let instance = |&(_, dim, rows, cap, _): &(Dtype, u32, u32, bool, &str)| Instance {
            m: rows,
            n: wide::Shape::find(dim, rows, cap).map_or(KEYS, |wide| wide.keys),
            head_dim: Some(dim),
            head_dim_v: None,
            soft_cap: Some(cap),
        };
        let loaded = ENTRIES.iter().take(self.alone.len());
        // The same for both element types.
        let loaded = loaded.filter(|entry| entry.0 == Dtype::BF16);
        loaded.map(instance).collect()
    }

    /// Whether the architecture has any.
    pub fn is_empty(&self) -> bool {
        self.alone.is_empty()
    }

    /// The kernel with the smallest tile that covers the rows; the one that runs beside a prefill where it is
    /// asked for, and merging left to others.
    pub fn choose(
        &self,
        spec: &Spec,
        dtype: Dtype,
        tile: DecodeTile,
        merges: bool,
    ) -> Option<(&Kernel, Form)> {
        let (dim, cap) = (spec.head_dim_qk, spec.variant.soft_cap.is_some());
        let beside = tile.beside;
        let beside = beside.filter(|_| dim == 128 && tile.rows <= 8 && !cap && !merges);
        let beside = beside.and_then(|bytes| self.find_beside(dtype, slim::beside(bytes)));
        beside.or_else(|| {
            let rows = ROWS.into_iter().find(|&rows| rows >= tile.rows)?;
            let kernel = self.find(dtype, dim, rows, cap)?;
            Some((kernel, form(dim, rows, cap, kernel.max_dynamic_shared)?))
        })
    }

    fn find_beside(&self, dtype: Dtype, shape: slim::Shape) -> Option<(&Kernel, Form)> {
        let wanted = |&(d, s, _): &(Dtype, slim::Shape, &str)| (d, s) == (dtype, shape);
        let kernel = self.beside.get(ENTRIES_BESIDE.iter().position(wanted)?)?;
        let form = Form {
            threads: shape.threads(),
            shared_bytes: slim::shared_bytes(&shape),
            ctas_per_sm: 1,
            stages: shape.stages,
            run: 1,
        };
        Some((kernel, form))
    }

    fn find(&self, dtype: Dtype, dim: u32, rows: u32, cap: bool) -> Option<&Kernel> {
        let wanted = |&(d, h, r, c, _): &(Dtype, u32, u32, bool, &str)| {
            (d, h, r, c) == (dtype, dim, rows, cap)
        };
        self.alone.get(ENTRIES.iter().position(wanted)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_has_a_shape() {
        for (dtype, dim, rows, cap, name) in ENTRIES {
            assert!(form(dim, rows, cap, 227 << 10).is_some(), "{name}");
            let half = if dtype == Dtype::F16 { "f16" } else { "bf16" };
            let cap = if cap { "_cap" } else { "" };
            assert_eq!(name, format!("decode_{half}_d{dim}_m{rows}{cap}"));
        }
    }
}
