//! Whether a device has kernels for a problem, and otherwise the nearest ones.

mod there;

use std::collections::BTreeSet;

use kernels_gpu::registry::{Arch, Element, KernelId, KernelInfo, Op};

use self::there::list;
use super::DeviceDescription;
use crate::{
    plan::{
        data::{Kernel, PlanError, Tile, Unsupported, dims},
        model::tiles::{
            Choice, MOST_OF_TILE, TileTable, alone, decode_of_tile, has_hooks, runnable, serves,
        },
    },
    problem::{Compute, Dtype, Spec},
    step::Pairing,
};

impl DeviceDescription {
    /// Checks that the device has kernels for these heads. Call it when a model is loaded, before there is
    /// any batch. Planning refuses the same specifications.
    ///
    /// This call does not know the page size. On a GPU, values of 512 elements, and prompts with head dimensions between
    /// those of the kernels (such as 48 or 160, not 224 and 240; 80, 96 and 112 with a soft cap or hooks), need pages of a
    /// multiple of 8 tokens. Planning refuses them on other pages.
    ///
    /// Decodes run as prefills if no decode kernel holds the query heads of a KV head. [`PlanError::NoTile`] names the largest number
    /// where there is no prefill kernel.
    ///
    /// A CPU supports every [`Spec`] with `Compute::F16`.
    ///
    /// ```
    /// use tandem_attn::{plan::DeviceDescription, problem::Spec};
    ///
    /// let h200 = DeviceDescription::named("h200")?;
    /// h200.supports(&Spec::new(32, 8, 128))?;
    /// let error = h200.supports(&Spec::new(32, 8, 272)).unwrap_err();
    /// assert!(error.to_string().contains("no kernel for h200 has a head dimension of 272"));
    /// # Ok::<(), tandem_attn::plan::PlanError>(())
    /// ```
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] with the nearest supported heads, [`PlanError::Problem`] or [`PlanError::NoTile`].
    pub fn supports(&self, spec: &Spec) -> Result<(), PlanError> {
        spec.check()?;
        if self.is_cpu() {
            return Ok(self.check_compute(spec)?);
        }
        self.check_dtypes(spec)?;
        self.check_compute(spec)?;
        self.check_rotary(spec)?;
        self.check_dims(spec)?;
        TileTable::new(self, spec, None).map(drop)
    }

    /// [`supports`](Self::supports), and whether there is a kernel with the tile that all decodes are to have.
    pub(in crate::plan) fn supports_with(
        &self,
        spec: &Spec,
        decode: Option<Tile>,
    ) -> Result<(), PlanError> {
        self.supports(spec)?;
        match decode {
            Some(tile) => Ok(self.check_tile(spec, tile)?),
            _ => Ok(()),
        }
    }

    fn check_dtypes(&self, spec: &Spec) -> Result<(), Unsupported> {
        let device = || self.name.clone();
        let tensors = [
            ("queries", spec.q_dtype),
            ("keys and values", spec.kv_dtype),
            ("outputs", spec.out_dtype),
        ];
        // Here, an 8-bit cache type needs a kernel for any heads. Whether these heads have one is checked with the
        // dimensions.
        // Prefills with Ampere's instructions read widened keys, and run decodes that have no kernel.
        let older = !Arch::Sm90a.runs_on(self.compute_capability);
        let of = |element: Element, cap: bool| {
            let is = |id: KernelId| id.info().takes_cache(element) && id.info().cap == cap;
            let widened = |id: KernelId| older && id.info().cap == cap;
            runnable(self, Op::Decode).any(is) || runnable(self, Op::Prefill).any(widened)
        };
        let cap = spec.variant.soft_cap.is_some();
        let [e4m3, e5m2] = [Element::E4m3, Element::E5m2].map(|element| of(element, cap));
        for (tensor, got) in tensors {
            let is_cache = tensor == "keys and values";
            let there_is = match got {
                Dtype::BF16 | Dtype::F16 => true,
                Dtype::F8E4M3 => is_cache && e4m3,
                Dtype::F8E5M2 => is_cache && e5m2,
                // F32 queries are rounded before the run, and merges write F32 outputs.
                Dtype::F32 => !is_cache,
            };
            if !there_is {
                let capped = is_cache && cap && of(Element::E5m2, false) && got == Dtype::F8E5M2;
                return Err(Unsupported::Dtype {
                    device: device(),
                    tensor: match capped {
                        true => "keys and values (with a soft cap)",
                        false => tensor,
                    },
                    got,
                    there: match (is_cache, e4m3, e5m2) {
                        (true, true, true) => "BF16, F16, F8E4M3 or F8E5M2",
                        (true, true, false) => "BF16, F16 or F8E4M3",
                        (true, ..) => "BF16 or F16",
                        _ => "BF16, F16 or F32",
                    },
                });
            }
        }
        let of_rows = spec.on_kernels().q_dtype;
        let differs = |(tensor, got): &&(&str, Dtype)| {
            let converted = *tensor != "keys and values" && *got == Dtype::F32;
            *got != of_rows && got.bytes() > 1 && !converted
        };
        match tensors.iter().find(differs) {
            Some(&(tensor, got)) => Err(Unsupported::DtypesDiffer {
                device: device(),
                tensor,
                got,
                expected: of_rows,
            }),
            None => Ok(()),
        }
    }

    /// Checks that there are kernels with 8-bit products, if the specification asks for these.
    fn check_compute(&self, spec: &Spec) -> Result<(), Unsupported> {
        let rows = runnable(self, Op::Prefill).map(|id| id.info());
        let of_8_bits = rows.filter(|row| row.products_of_8_bits && !self.is_cpu());
        if spec.compute == Compute::F16 || of_8_bits.clone().any(|row| serves(self, row, spec)) {
            return Ok(());
        }
        let there: BTreeSet<_> = of_8_bits.map(|row| row.head_dim).collect();
        Err(Unsupported::Compute {
            device: self.name.clone(),
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            kv_dtype: spec.kv_dtype,
            there: match there.is_empty() {
                true => "none on this device".into(),
                false => format!(
                    "keys and values in F8E4M3 with a head dimension of {}, without hooks",
                    list(there).replace(", ", " or ")
                ),
            },
        })
    }

    /// Checks that there are decodes that apply the rotary embedding.
    fn check_rotary(&self, spec: &Spec) -> Result<(), Unsupported> {
        let Some(rope) = spec.rotary else {
            return Ok(());
        };
        let rows = runnable(self, Op::Decode).map(|id| id.info());
        let turning = rows.filter(|row| row.turns);
        let there = |of: fn(&KernelInfo) -> u32| turning.clone().map(of).collect::<BTreeSet<_>>();
        let (heads, rows) = (there(|row| row.head_dim), there(|row| row.rows));
        let most = rows.last().copied().unwrap_or(0);
        let (qk, v) = (spec.head_dim_qk, spec.head_dim_v);
        let halves = rope.pairing == Pairing::HalfSplit;
        let what = if heads.is_empty() {
            "at all".into()
        } else if let Some(hooks) = spec.variant.hooks {
            format!("with the variant {hooks:?} (supported: no variant)")
        } else if spec.variant.soft_cap.is_some() {
            "with a soft cap (supported: no soft cap)".into()
        } else if spec.kv_dtype.bytes() == 1 {
            format!("with keys in {:?} (supported: BF16, F16)", spec.kv_dtype)
        } else if spec.rounds_queries() {
            "with queries in F32 (supported: the type of the keys)".into()
        } else if qk != v || !heads.contains(&qk) {
            let heads = list(heads);
            format!(
                "with a head dimension of {} (supported: {heads})",
                dims(qk, v)
            )
        } else if spec.group() > most {
            let group = spec.group();
            format!("with {group} query heads per KV head (supported: up to {most})")
        } else if halves && !rope.dim.is_multiple_of(32) {
            let dim = rope.dim;
            format!("with {dim} rotated elements in pairs of halves (supported: multiples of 32)")
        } else {
            return Ok(());
        };
        Err(Unsupported::Rotary {
            device: self.name.clone(),
            what,
        })
    }

    /// Checks the head dimensions of prefills, because every batch may have prefills. Heads without decode kernels
    /// always run as prefills; latent heads and heads with values of 512 always run as decodes.
    fn check_dims(&self, spec: &Spec) -> Result<(), Unsupported> {
        if spec.latent {
            return self.check_latent(spec);
        }
        let prefills = self.rows_for_prompts(spec);
        if self.prefill.keys.is_some() || prefills.clone().any(|row| serves(self, row, spec)) {
            return Ok(());
        }
        if let Some(hooks) = spec.variant.hooks {
            let rows = prefills.filter(|row| has_hooks(self, hooks, row));
            let of = |row: &KernelInfo| (row.head_dim, row.value_dim, format!("{:?}", row.element));
            let there: BTreeSet<_> = rows.map(of).collect();
            let name = |(qk, v, element): &(u32, u32, String)| {
                format!("{} in {}", dims(*qk, *v), element.to_uppercase())
            };
            return Err(Unsupported::Hooks {
                device: self.name.clone(),
                hooks,
                head_dim_qk: spec.head_dim_qk,
                head_dim_v: spec.head_dim_v,
                dtype: spec.on_kernels().q_dtype,
                kv_dtype: spec.kv_dtype,
                there: match (there.is_empty(), spec.kv_dtype.bytes()) {
                    (_, 1) => "keys in BF16 or F16".into(),
                    (true, _) => "none that can run prompts".into(),
                    (false, _) => {
                        list(there.iter().map(name))
                            + "; compile others with `variant_kernels!` in your own crate"
                    }
                },
            });
        }
        let padded = self.padded_up_to(spec);
        let too_large = self.too_large(spec);
        let soft_cap = spec.variant.soft_cap.is_some();
        let same_cap = |row: &&KernelInfo| row.cap == soft_cap && !row.latent;
        let dims_of = |row: &KernelInfo| (row.head_dim, row.value_dim);
        let there: BTreeSet<_> = prefills.filter(same_cap).map(dims_of).collect();
        let (qk, v) = (spec.head_dim_qk, spec.head_dim_v);
        let holds = |dims: &&(u32, u32)| dims.0 >= qk && dims.1 >= v;
        Err(Unsupported::HeadDim {
            device: self.name.clone(),
            head_dim_qk: qk,
            head_dim_v: v,
            soft_cap,
            kv_dtype: spec.kv_dtype,
            nearest: there
                .iter()
                .filter(holds)
                .min_by_key(|dims| dims.0 + dims.1)
                .copied(),
            there: match there.is_empty() {
                true => "none".into(),
                false => list(there.iter().map(|&(qk, v)| dims(qk, v))) + &padded,
            } + &too_large,
        })
    }

    fn check_latent(&self, spec: &Spec) -> Result<(), Unsupported> {
        let kernels = runnable(self, Op::Decode).map(|id| id.info());
        let mut latent = kernels.filter(|row| row.latent);
        if latent.clone().any(|row| serves(self, row, spec)) {
            return Ok(());
        }
        let what = match latent.next() {
            None => "at all".to_owned(),
            Some(_) if spec.variant.soft_cap.is_some() => "with a soft cap".to_owned(),
            Some(_) if spec.variant.hooks.is_some() => "with a variant of hooks".to_owned(),
            Some(_) if spec.kv_dtype != spec.on_kernels().q_dtype => {
                format!(
                    "with keys in {:?} and queries in {:?} (supported: one type for both, or F8E4M3 with its scales in \
                     rows of 656 bytes (KvScales::InRow) beside BF16)",
                    spec.kv_dtype, spec.q_dtype
                )
            }
            Some(row) => format!(
                "with keys of {} (supported: {})",
                dims(spec.head_dim_qk, spec.head_dim_v),
                dims(row.head_dim, row.value_dim)
            ),
        };
        Err(Unsupported::Latent {
            device: self.name.clone(),
            what,
        })
    }

    /// Checks that the kernels support masks as bits. Kernels of latent heads do not.
    pub(in crate::plan) fn supports_masks(&self, spec: &Spec) -> Result<(), Unsupported> {
        if !spec.latent || self.is_cpu() {
            return Ok(());
        }
        Err(Unsupported::Latent {
            device: self.name.clone(),
            what:
                "with ancestors or masks (Batch::ancestors, Batch::masks: give each draft token as a request of its own, by Batch::of_indices, or use heads that are not latent)"
                    .into(),
        })
    }

    fn check_tile(&self, spec: &Spec, got: Tile) -> Result<(), Unsupported> {
        if decode_of_tile(self, spec, got).is_some() {
            return Ok(());
        }
        let kernels = alone(self, spec, Op::Decode).into_iter();
        let mut tiles: Vec<_> = kernels.map(|id| Choice::of(id).tile).collect();
        tiles.sort_unstable();
        Err(Unsupported::Tile {
            device: self.name.clone(),
            kernel: Kernel::Decode,
            got,
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            there: match self.decode.keys {
                Some(_) => format!("1 to {MOST_OF_TILE} rows and keys"),
                None => list(tiles),
            },
        })
    }
}

#[cfg(test)]
mod tests;
