//! The page pools of the CPU: F32, or E4M3 with or without a scale for each token and KV head.

use tandem_attn::{
    Cpu, Error,
    kv::{AppendScales, KvScales, KvStrides, KvView, KvViewMut, PageCopy},
    plan::Plan,
    problem::{KvLayout, Spec},
    step::cpu::{self as step, QkvStep},
    tensor::{Element, F8E4M3},
};
use tandem_schedule::CacheType;

/// The sizes of all pools.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages {
    pub count: u32,
    pub size: u32,
}

/// Keys and values of one layer.
#[derive(Debug)]
pub(super) enum Pool {
    F32(Numbers<f32>),
    E4m3(Numbers<F8E4M3>),
}

/// Keys and values in one element type, with their scales if there are any.
#[derive(Debug)]
pub(super) struct Numbers<T> {
    pages: Pages,
    /// Keys, and values: `[pages, page_size, kv_heads, head_dim]`.
    sides: [Vec<T>; 2],
    /// Their scales: `[pages, page_size, kv_heads]`.
    scales: Option<[Vec<f32>; 2]>,
}

impl Pool {
    /// None if there is not enough memory.
    pub(super) fn new(cache_type: CacheType, spec: &Spec, pages: Pages) -> Option<Self> {
        match cache_type.is_8_bit() {
            false => Numbers::new(cache_type, spec, pages).map(Self::F32),
            true => Numbers::new(cache_type, spec, pages).map(Self::E4m3),
        }
    }

    /// Copies pages with their scales.
    pub(super) fn copy(&mut self, spec: &Spec, copies: &[PageCopy]) -> Result<(), Error> {
        match self {
            Self::F32(numbers) => numbers.copy(spec, copies),
            Self::E4m3(numbers) => numbers.copy(spec, copies),
        }
    }

    /// Writes the queries of a projection to `q`, and its keys and values to their slots.
    pub(super) fn append(
        &mut self,
        spec: &Spec,
        qkv: &QkvStep<'_, f32>,
        slots: &[u32],
        q: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            Self::F32(numbers) => numbers.append(spec, qkv, slots, q),
            Self::E4m3(numbers) => numbers.append(spec, qkv, slots, q),
        }
    }

    /// Computes the attention of a plan.
    pub(super) fn attend(
        &self,
        cpu: &Cpu,
        plan: &Plan,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            Self::F32(numbers) => cpu.run(plan, q, &[numbers.view(&plan.spec)], out, None),
            Self::E4m3(numbers) => cpu.run(plan, q, &[numbers.view(&plan.spec)], out, None),
        }
    }
}

/// The scales of rows that were never written, which are zeros. None if there is not enough memory.
fn ones(rows: usize) -> Option<Vec<f32>> {
    let mut scales = Vec::new();
    scales.try_reserve_exact(rows).ok()?;
    scales.resize(rows, 1.0);
    Some(scales)
}

impl<T: Element> Numbers<T> {
    fn new(cache_type: CacheType, spec: &Spec, pages: Pages) -> Option<Self> {
        let [heads, dim] = [spec.kv_heads, spec.head_dim_qk].map(|size| size as usize);
        let rows = (pages.count as usize).checked_mul(pages.size as usize)?;
        let rows = rows.checked_mul(heads)?;
        // The system hands out pages of zeros when they are first used.
        let side = || bytemuck::allocation::try_zeroed_vec(rows.checked_mul(dim)?).ok();
        let sides = [side()?, side()?];
        let scales = match cache_type.is_scaled() {
            true => Some([ones(rows)?, ones(rows)?]),
            false => None,
        };
        Some(Self {
            pages,
            sides,
            scales,
        })
    }

    /// Strides of the scales.
    fn strides(&self, spec: &Spec) -> KvStrides {
        KvLayout::Nhd.strides(self.pages.size, spec.kv_heads, 1)
    }

    fn copy(&mut self, spec: &Spec, copies: &[PageCopy]) -> Result<(), Error> {
        let Self {
            pages,
            sides: [k, v],
            scales,
        } = self;
        let mut pool = KvViewMut::new(spec, KvLayout::Nhd, pages.size, k, v);
        let of_page = (pages.size * spec.kv_heads) as usize;
        for copy in copies {
            pool.copy_page(spec, copy.from, copy.to)?;
            let [from, to] = [copy.from, copy.to].map(|page| page as usize * of_page);
            for scales in scales.iter_mut().flatten() {
                scales.copy_within(from..from + of_page, to);
            }
        }
        Ok(())
    }

    fn append(
        &mut self,
        spec: &Spec,
        qkv: &QkvStep<'_, f32>,
        slots: &[u32],
        q: &mut [f32],
    ) -> Result<(), Error> {
        let strides = self.strides(spec);
        let Self {
            pages,
            sides: [k, v],
            scales,
        } = self;
        let mut pool = KvViewMut::new(spec, KvLayout::Nhd, pages.size, k, v);
        let scales = match scales {
            None => AppendScales::Given(KvScales::One),
            Some([k, v]) => AppendScales::Computed {
                k,
                v,
                k_strides: strides,
                v_strides: strides,
            },
        };
        step::qkv(spec, qkv, slots, q, &mut pool, pages.count, scales)
    }

    fn view(&self, spec: &Spec) -> KvView<'_, T> {
        let [k, v] = &self.sides;
        let view = KvView::new(spec, KvLayout::Nhd, self.pages.size, k, v);
        let strides = self.strides(spec);
        match &self.scales {
            None => view,
            Some([k, v]) => view.with_scales(KvScales::Token {
                k,
                v,
                k_strides: strides,
                v_strides: strides,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No machine has so much memory, and no `usize` counts it.
    #[test]
    fn caches_that_cannot_be_allocated_are_none() {
        let spec = Spec::new(1024, 1024, 128);
        let pages = Pages {
            count: u32::MAX,
            size: u32::MAX,
        };
        for cache_type in CacheType::ALL {
            assert!(Pool::new(cache_type, &spec, pages).is_none());
        }
        assert_eq!(ones(usize::MAX / 2), None);
        assert_eq!(ones(2), Some(vec![1.0; 2]));
    }
}
