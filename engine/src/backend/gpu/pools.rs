//! The page pools of a GPU: BF16, or E4M3 with or without a scale for each token and KV head.

use cudarc::driver::result::memcpy_dtod_async;
use half::bf16;
use tandem_attn::{
    exec::gpu::{AppendScales, DeviceBuffer, DevicePtr, Gpu, KvPool, KvScales, Stream},
    kv::PageCopy,
    plan::DeviceDescription,
    problem::{KvLayout, Spec},
    tensor::{Element, F8E4M3},
};
use tandem_schedule::CacheType;

use super::{
    GpuOptions,
    buffers::cuda,
    store::{OnDevice, repeat},
};
use crate::{Architecture, Error, Weights};

/// Random numbers of 8 bits from which pools are filled.
const NOISE: usize = 1 << 24;

/// The keys and values of all layers.
pub(super) struct Pools {
    layers: Vec<[Side; 2]>,
    /// Heads, with the type of the pools.
    spec: Spec,
    cache_type: CacheType,
    page_size: u32,
    pages: u32,
}

/// The keys or the values of a layer.
struct Side {
    numbers: Numbers,
    /// `[pages, page_size, kv_heads]`.
    scales: Option<DeviceBuffer<f32>>,
}

/// `[pages, page_size, kv_heads, head_dim]`.
enum Numbers {
    Bf16(DeviceBuffer<bf16>),
    E4m3(DeviceBuffer<F8E4M3>),
}

impl Numbers {
    const fn address(&self) -> DevicePtr {
        match self {
            Self::Bf16(numbers) => numbers.address(),
            Self::E4m3(numbers) => numbers.address(),
        }
    }
}

impl Pools {
    /// Allocates pools for all layers of a model.
    pub(super) fn new(
        gpu: &Gpu,
        a: &Architecture,
        options: &GpuOptions,
        tokens: u32,
    ) -> Result<Self, Error> {
        let (cache_type, page_size) = (options.cache_type, options.page_size);
        let spec = cache_type.spec(*a.spec());
        let pages = tokens.div_ceil(page_size);
        let rows = pages as usize * (page_size * spec.kv_heads) as usize;
        let elements = rows * spec.head_dim_qk as usize;
        let side = || -> Result<Side, tandem_attn::Error> {
            Ok(Side {
                numbers: match cache_type.is_8_bit() {
                    false => Numbers::Bf16(DeviceBuffer::zeroed(gpu, elements)?),
                    true => Numbers::E4m3(DeviceBuffer::zeroed(gpu, elements)?),
                },
                scales: match cache_type.is_scaled() {
                    false => None,
                    true => Some(DeviceBuffer::zeroed(gpu, rows)?),
                },
            })
        };
        let layers = a.layers.iter().map(|_| Ok([side()?, side()?]));
        Ok(Self {
            layers: layers.collect::<Result<_, tandem_attn::Error>>()?,
            spec,
            cache_type,
            page_size,
            pages,
        })
    }

    pub(super) const fn pages(&self) -> u32 {
        self.pages
    }

    /// The pool of a layer, as calls take it.
    pub(super) fn layer(&self, index: usize) -> KvPool {
        let [k, v] = &self.layers[index];
        let [of_k, of_v] = [k, v].map(|side| side.numbers.address());
        let (layout, page_size) = (KvLayout::Nhd, self.page_size);
        let pool = KvPool::new(&self.spec, layout, page_size, self.pages, of_k, of_v);
        let shape = [self.pages, page_size, self.spec.kv_heads].map(|extent| extent as usize);
        match (&k.scales, &v.scales) {
            (Some(k), Some(v)) => pool.with_scales(KvScales::Token {
                k: k.tensor(shape),
                v: v.tensor(shape),
            }),
            _ => pool,
        }
    }

    /// Where the scales of appended keys and values come from.
    pub(super) const fn append_scales(&self) -> AppendScales {
        match self.cache_type.is_scaled() {
            true => AppendScales::Computed,
            false => AppendScales::Given,
        }
    }

    /// Copies pages in all layers, with their scales.
    pub(super) fn copy(&self, copies: &[PageCopy], stream: Stream) -> Result<(), Error> {
        let rows = u64::from(self.page_size * self.spec.kv_heads);
        let row_bytes = u64::from(self.spec.head_dim_qk * self.spec.kv_dtype.bytes());
        for copy in copies {
            for side in self.layers.iter().flatten() {
                let numbers = (side.numbers.address(), rows * row_bytes);
                let scales = side.scales.as_ref();
                let scales = scales.map(|scales| (scales.address(), rows * 4));
                for (address, bytes) in [numbers].into_iter().chain(scales) {
                    let at = |page: u32| address + u64::from(page) * bytes;
                    // SAFETY: the composer only names pages of the pool.
                    unsafe {
                        memcpy_dtod_async(
                            at(copy.to),
                            at(copy.from),
                            bytes as usize,
                            stream.as_raw().cast(),
                        )
                    }
                    .map_err(|error| cuda("cuMemcpyDtoDAsync", &error))?;
                }
            }
        }
        Ok(())
    }

    /// Fills the pools for measurements, which start without prompts: with numbers between −1 and 1.
    pub(super) fn fill(
        &mut self,
        gpu: &Gpu,
        weights: &Weights,
        store: &mut OnDevice<'_>,
    ) -> Result<(), Error> {
        let sides = || self.layers.iter().flatten();
        let (mut noise, mut at) = (None, 0);
        for side in sides() {
            match &side.numbers {
                Numbers::Bf16(numbers) => store.fill(numbers, 3)?,
                Numbers::E4m3(numbers) => {
                    let noise = match &mut noise {
                        Some(noise) => noise,
                        none => none.insert(self.noise(gpu, weights)?),
                    };
                    repeat(noise, at, numbers)?;
                    at = (at + 0x12_3400) % noise.len();
                }
            }
        }
        let rows = sides().find_map(|side| side.scales.as_ref().map(DeviceBuffer::len));
        let scales = vec![1.0 / LARGEST; rows.unwrap_or(0)];
        for side in self.layers.iter_mut().flatten() {
            if let Some(of_side) = &mut side.scales {
                of_side.write(0, &scales)?;
            }
        }
        Ok(())
    }

    /// Random numbers between −1 and 1, or as large as the type allows if scales divide them by that.
    fn noise(&self, gpu: &Gpu, weights: &Weights) -> Result<DeviceBuffer<F8E4M3>, Error> {
        let factor = if self.cache_type.is_scaled() {
            LARGEST
        } else {
            1.0
        };
        let numbers: Vec<f32> = weights.get("noise", &[NOISE / 3, 3])?;
        let numbers = numbers.iter().map(|x| F8E4M3::from_f32(x * factor));
        let numbers: Vec<F8E4M3> = numbers.collect();
        Ok(DeviceBuffer::from_slice(gpu, &numbers)?)
    }
}

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;

/// Checks that a GPU has kernels for the heads of a model and for caches of a type.
pub(super) fn check(
    device: &DeviceDescription,
    spec: &Spec,
    cache_type: CacheType,
) -> Result<(), Error> {
    device.supports(spec)?;
    match cache_type.missing(device, spec) {
        None => Ok(()),
        Some(reason) => Err(Error::CacheType {
            cache_type,
            device: device.name.clone(),
            reason,
        }),
    }
}

#[cfg(test)]
mod tests {
    use tandem_attn::{
        exec::gpu::LaunchSet,
        plan::{BatchLimits, Bound, PlanOptions, Planner, SplitMode, pod::PodMode},
        problem::{Batch, PageTable},
    };

    use super::*;

    fn on(device: &str, spec: &Spec) -> [Result<(), Error>; 3] {
        let device = DeviceDescription::named(device).unwrap();
        CacheType::ALL.map(|cache_type| check(&device, spec, cache_type))
    }

    /// Heads of Llama 3, Qwen 2.5 and 3, Mistral and Gemma 3, with and without windows.
    #[test]
    fn the_families_have_kernels_on_hopper() {
        for (q_heads, kv_heads, dim) in [
            (32, 8, 128),
            (32, 8, 64),
            (64, 8, 128),
            (28, 4, 128),
            (14, 2, 64),
            (16, 8, 128),
            (8, 4, 256),
            (4, 1, 256),
            (16, 1, 128),
        ] {
            let spec = Spec::new(q_heads, kv_heads, dim);
            for spec in [spec, spec.with_window_left(1023)] {
                for checked in on("h200", &spec).into_iter().chain(on("h100", &spec)) {
                    checked.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
                }
                // Also with the kernels of fixed splits.
                let device = DeviceDescription::named("h200").unwrap();
                let fixed = PlanOptions::default()
                    .with_pod(PodMode::Serial)
                    .with_split(SplitMode::Fixed { tokens: 256 });
                let spec = CacheType::E4m3Scaled.spec(spec);
                let set = LaunchSet::decodes_with(&device, &spec, &fixed).unwrap();
                assert!(set.keys().iter().all(|key| key.kernel.by_token().is_some()));
            }
        }
    }

    /// Kernels with Ampere's instructions hold 16 query heads of a KV head.
    #[test]
    fn other_gpus_than_hopper_have_8_bit_caches_for_usual_heads() {
        for device in ["a100", "rtx4090"] {
            for (q_heads, kv_heads, dim) in [(32, 8, 128), (28, 4, 128), (14, 2, 64), (8, 4, 256)] {
                let spec = Spec::new(q_heads, kv_heads, dim);
                for spec in [spec, spec.with_window_left(1023)] {
                    for checked in on(device, &spec) {
                        checked.unwrap_or_else(|error| panic!("{device}, {spec:?}: {error}"));
                    }
                }
            }
            let [auto, plain, scaled] = on(device, &Spec::new(32, 1, 128));
            auto.unwrap();
            assert!(plain.is_err() && scaled.is_err());
        }
    }

    /// Prefills would convert all keys of each decode.
    #[test]
    fn groups_that_no_decode_kernel_holds_have_16_bit_caches_only() {
        let checked = on("h200", &Spec::new(71, 1, 64));
        for (checked, cache_type) in checked.into_iter().zip(CacheType::ALL) {
            match (cache_type.is_8_bit(), checked) {
                (false, checked) => checked.unwrap(),
                (true, Err(Error::CacheType { reason, .. })) => {
                    assert!(reason.contains("71 query heads"), "{reason}");
                }
                (true, other) => panic!("{other:?}"),
            }
        }
    }

    /// Without POD, workspaces of graphs have no room for converted keys.
    #[test]
    fn decodes_convert_no_keys() {
        let device = DeviceDescription::named("h200").unwrap();
        let planning = PlanOptions::default().with_pod(PodMode::Serial);
        let fixed = planning.with_split(SplitMode::Fixed { tokens: 320 });
        for (heads, requests, keys, page_size) in [
            ([32, 8, 128], 1, 30_000),
            ([32, 8, 128], 64, 4096),
            ([16, 1, 128], 7, 300),
            ([32, 8, 64], 128, 2000),
            ([8, 4, 256], 33, 17),
        ]
        .into_iter()
        .flat_map(|(heads, requests, keys)| [16, 5, 1].map(|page| (heads, requests, keys, page)))
        {
            let [q_heads, kv_heads, dim] = heads;
            let spec = CacheType::E4m3Scaled.spec(Spec::new(q_heads, kv_heads, dim));
            let limits = BatchLimits::decodes(requests, keys, page_size).with_prefill_keys(0);
            for (planning, shared) in [planning, fixed].into_iter().flat_map(|p| [(p, 0), (p, 9)]) {
                let bound = Bound::new(&spec, &device, &planning, &limits).unwrap();
                assert_eq!(bound.converted_pages, 0);
                let mut table = PageTable::new(page_size, 1 << 23);
                for request in 0..requests {
                    let page = |at: u32| {
                        if at < shared {
                            at
                        } else {
                            40_000 * (1 + request) + at
                        }
                    };
                    table.push(
                        &(0..keys.div_ceil(page_size)).map(page).collect::<Vec<_>>(),
                        keys,
                    );
                }
                let batch = Batch::new((0..=requests).collect(), table);
                let options = planning.with_bound(bound);
                let plan = Planner::new()
                    .plan(&spec, &batch, &device, &options)
                    .unwrap();
                // The graph has the launches of this plan.
                let set = LaunchSet::decodes_with(&device, &spec, &planning).unwrap();
                assert_eq!(
                    set.clone().and(&plan),
                    set,
                    "{heads:?}, {requests} × {keys} on pages of {page_size}"
                );
            }
        }
    }

    /// Where 8-bit caches are taken, the launches of graphs of decodes are those of decodes, and have scales of each token.
    #[test]
    fn what_is_taken_has_launches() {
        let planning = PlanOptions::default().with_pod(PodMode::Serial);
        for device in ["h100", "h200", "a100", "rtx4090"] {
            let device = DeviceDescription::named(device).unwrap();
            let heads = [1, 2, 5, 8, 12, 16, 17, 32, 64, 65];
            let dims = (1..=16).map(|dim| 16 * dim);
            for (group, dim) in heads
                .into_iter()
                .flat_map(|g| dims.clone().map(move |d| (g, d)))
            {
                let spec = Spec::new(group, 1, dim);
                if check(&device, &spec, CacheType::E4m3Scaled).is_err() {
                    continue;
                }
                let spec = CacheType::E4m3Scaled.spec(spec);
                let set = LaunchSet::decodes_with(&device, &spec, &planning).unwrap();
                assert!(!set.has_prefills(), "{spec:?}");
                assert!(set.keys().iter().all(|key| key.kernel.by_token().is_some()));
                if device.compute_capability.0 == 9 {
                    let all = LaunchSet::all(&device, &spec).unwrap();
                    assert!(all.has_prefills(), "{spec:?}");
                }
            }
        }
    }

    #[test]
    fn what_has_no_kernels_is_refused_with_what_there_is() {
        let llama = Spec::new(32, 8, 128);
        for (device, spec, named) in [
            ("a100", Spec::new(32, 1, 128), "query heads"),
            ("h200", Spec::new(32, 8, 80), "heads of 80 in 8 bits"),
            ("h200", Spec::new(32, 8, 512), "no kernel for h200"),
            ("h200", Spec::new(80, 1, 64), "80"),
        ] {
            let [auto, plain, scaled] = on(device, &spec);
            auto.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
            for (refused, of) in [(plain, CacheType::E4m3), (scaled, CacheType::E4m3Scaled)] {
                let error = refused.expect_err("no kernels");
                assert!(
                    matches!(error, Error::CacheType { cache_type, .. } if cache_type == of),
                    "{error:?}"
                );
                let text = error.to_string();
                for part in [named, device, of.name(), "auto", "Hopper"] {
                    assert!(text.contains(part), "{part} is not in: {text}");
                }
            }
        }
        for group in [32, 64] {
            let [_, plain, scaled] = on("h200", &Spec::new(group, 1, 128));
            assert!(plain.is_ok() && scaled.is_ok(), "{group} heads fit a tile");
        }
        // Kernels with scales of each token have no soft cap.
        let mut capped = llama;
        capped.variant.soft_cap = Some(30.0);
        let [auto, plain, scaled] = on("h200", &capped);
        assert!(auto.is_ok() && plain.is_ok());
        assert!(matches!(scaled, Err(Error::CacheType { .. })), "{scaled:?}");
    }
}
