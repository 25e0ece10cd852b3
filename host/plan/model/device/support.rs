//! Whether a device has kernels for a problem, and which come nearest.

use super::{DeviceDescription, Instance};
use crate::{
    plan::{
        data::{Kernel, PlanError, Tile, Unsupported, dims},
        model::tiles::{TileTable, solve},
    },
    problem::{Dtype, Spec},
};

fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<_> = items.into_iter().map(|item| item.to_string()).collect();
    items.join(", ")
}

impl Instance {
    /// The head dimensions of keys and values, where it is for particular ones.
    fn dims(&self) -> Option<(u32, u32)> {
        let qk = self.head_dim?;
        Some((qk, self.head_dim_v.unwrap_or(qk)))
    }
}

impl DeviceDescription {
    /// Whether the device has kernels for these heads: what can be asked when a model is loaded, before there is
    /// any batch. Planning refuses the same.
    ///
    /// A CPU computes every [`Spec`]. Of a GPU whose description lists no kernels, only element types and the
    /// solver's arithmetic are known.
    ///
    /// ```
    /// use tandem_attn::{plan::DeviceDescription, problem::Spec};
    ///
    /// let h200 = DeviceDescription::named("h200")?;
    /// h200.supports(&Spec::new(32, 8, 128))?;
    /// let error = h200.supports(&Spec::new(32, 8, 96)).unwrap_err();
    /// assert!(error.to_string().contains("no kernel for h200 has a head dimension of 96"));
    /// # Ok::<(), tandem_attn::plan::PlanError>(())
    /// ```
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] with what comes nearest, [`PlanError::Problem`] or [`PlanError::NoTile`].
    pub fn supports(&self, spec: &Spec) -> Result<(), PlanError> {
        spec.check()?;
        if self.is_cpu() {
            return Ok(());
        }
        self.check_dtypes(spec)?;
        self.check_dims(spec)?;
        TileTable::new(self, spec, None, None).map(drop)
    }

    /// [`supports`](Self::supports), and whether there is a kernel with the tile that all decodes are to have.
    pub(in crate::plan) fn supports_with(
        &self,
        spec: &Spec,
        decode: Option<Tile>,
    ) -> Result<(), PlanError> {
        self.supports(spec)?;
        match decode {
            Some(tile) if !self.is_cpu() => Ok(self.check_tile(spec, Kernel::Decode, tile)?),
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
        for (tensor, got) in tensors {
            if !matches!(got, Dtype::BF16 | Dtype::F16) {
                return Err(Unsupported::Dtype {
                    device: device(),
                    tensor,
                    got,
                });
            }
        }
        match tensors.iter().find(|(_, got)| *got != spec.q_dtype) {
            Some(&(tensor, got)) => Err(Unsupported::DtypesDiffer {
                device: device(),
                tensor,
                got,
                expected: spec.q_dtype,
            }),
            None => Ok(()),
        }
    }

    /// Every batch may have prefills. Heads without a decode kernel are prefills altogether.
    fn check_dims(&self, spec: &Spec) -> Result<(), Unsupported> {
        let compiled = self.compiled(Kernel::Prefill);
        if compiled.is_empty() || compiled.iter().any(|instance| instance.serves(spec)) {
            return Ok(());
        }
        let soft_cap = spec.variant.soft_cap.is_some();
        let same_cap = |i: &&Instance| i.soft_cap.is_none_or(|cap| cap == soft_cap);
        let mut there: Vec<_> = compiled
            .iter()
            .filter(same_cap)
            .filter_map(Instance::dims)
            .collect();
        there.sort_unstable();
        there.dedup();
        let (qk, v) = (spec.head_dim_qk, spec.head_dim_v);
        let holds = |dims: &&(u32, u32)| dims.0 >= qk && dims.1 >= v;
        Err(Unsupported::HeadDim {
            device: self.name.clone(),
            head_dim_qk: qk,
            head_dim_v: v,
            soft_cap,
            nearest: there
                .iter()
                .filter(holds)
                .min_by_key(|dims| dims.0 + dims.1)
                .copied(),
            there: list(there.iter().map(|&(qk, v)| dims(qk, v))),
        })
    }

    fn check_tile(&self, spec: &Spec, kernel: Kernel, got: Tile) -> Result<(), Unsupported> {
        let serving = self
            .compiled(kernel)
            .iter()
            .filter(|instance| instance.serves(spec));
        let mut tiles: Vec<_> = serving
            .map(|&Instance { m, n, .. }| Tile { m, n })
            .collect();
        tiles.sort_unstable();
        tiles.dedup();
        let there = if tiles.contains(&got) {
            return Ok(());
        } else if tiles.is_empty() {
            match solve(self, spec, kernel, got) {
                Ok(_) => return Ok(()),
                Err(infeasible) => format!("such a tile: {infeasible}"),
            }
        } else {
            format!("there are {}", list(tiles))
        };
        Err(Unsupported::Tile {
            device: self.name.clone(),
            kernel,
            got,
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            there,
        })
    }
}

#[cfg(test)]
mod tests;
