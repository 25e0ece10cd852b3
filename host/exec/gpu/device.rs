//! The device description of a GPU.

use kernels_gpu::registry::Op;

use super::{Gpu, KvPool, LaunchSet};
use crate::{Error, plan::DeviceDescription, problem::Spec};

/// The description that fits a GPU best, by its name and compute capability.
fn nearest(name: &str, compute: (u32, u32)) -> &'static str {
    match compute {
        (8, 0) => "a100",
        (8, 9) => "rtx4090",
        (8, _) => "a6000",
        _ if name.contains("H100") => "h100",
        _ => "h200",
    }
}

impl Gpu {
    /// The description of this GPU for the planner: the most similar known device, with this GPU's number of SMs. If the program
    /// has no kernels of the GPU's own architecture, the plans use those of Ampere. It knows the variants that the GPU was opened with.
    #[must_use]
    pub fn device(&self) -> DeviceDescription {
        let name = nearest(&self.name, self.compute);
        let mut device = DeviceDescription::named(name).expect("it is built in");
        device.sms = self.multiprocessors;
        device.compute_capability = match self.arch() {
            "sm_80" => self.compute.min((8, 9)),
            _ => self.compute,
        };
        device.variants = Some(self.kernels.own_variants());
        // Of the newer GPUs, those for desktops have no more shared memory than Ada.
        if self.compute.0 >= 12 {
            let ada = DeviceDescription::named("rtx4090").expect("it is built in");
            device.shared_bytes_per_sm = ada.shared_bytes_per_sm;
            device.shared_bytes_per_cta = ada.shared_bytes_per_cta;
        }
        device
    }

    /// Checks that there are kernels for these heads on this GPU. Call it when a model is loaded.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`](crate::plan::PlanError::Unsupported) with the nearest supported heads, also where `variant_kernels!`
    /// made no kernels of a variant for them, or an error of the specification; [`Error::NoVariant`] for a variant that the GPU was not
    /// opened with. Planning for [`device`](Self::device) refuses the same.
    ///
    /// It does not know the scales of 8-bit keys and values: see [`supports_pool`](Self::supports_pool).
    pub fn supports(&self, spec: &Spec) -> Result<(), Error> {
        spec.variant
            .hooks
            .map_or(Ok(()), |name| self.hooks(name).map(drop))?;
        Ok(self.device().supports(spec)?)
    }

    /// [`supports`](Self::supports), and checks that kernels read a pool of this type and for these heads with these scales. Not all
    /// kernels take all [scales](super::KvScales), and planning does not know which a pool has. Nothing is read: addresses may be 0.
    ///
    /// # Errors
    /// As [`supports`](Self::supports); [`Error::DtypesDiffer`] or [`Error::Extent`] for a pool of another type or of other heads,
    /// [`Error::NoInstance`] for scales, [`Error::Shape`].
    pub fn supports_pool(&self, spec: &Spec, pool: &KvPool) -> Result<(), Error> {
        self.supports(spec)?;
        pool.check_dtype(spec)?;
        pool.check_heads(spec)?;
        pool.check_rope(spec, 0)?;
        pool.scales.check_kind(spec, pool.dtype)?;
        for key in LaunchSet::all(&self.device(), spec)?.keys() {
            let kernel = key.kernel;
            match kernel.info().op {
                Op::Decode => {
                    let kernel = self.decode_kernel(kernel, &spec.on_kernels(), pool);
                    pool.scales.check_kernel(kernel.info())?;
                }
                _ => pool.check_scales_of_prefills(spec, kernel.info())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_is_near_a_known_one() {
        for (name, compute, nearest_one) in [
            ("NVIDIA H200", (9, 0), "h200"),
            ("NVIDIA H100 PCIe", (9, 0), "h100"),
            ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
            ("NVIDIA RTX A6000", (8, 6), "a6000"),
            ("NVIDIA GeForce RTX 4090", (8, 9), "rtx4090"),
            ("NVIDIA B200", (10, 0), "h200"),
        ] {
            assert_eq!(nearest(name, compute), nearest_one);
            DeviceDescription::named(nearest_one).unwrap();
        }
    }
}
