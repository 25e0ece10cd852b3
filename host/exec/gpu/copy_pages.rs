//! Copies of whole pages within a pool.

use super::{
    DevicePtr, DeviceTensor, Gpu, KvPool, KvScales, Stream,
    driver::{Check, Current, cuMemcpyDtoDAsync},
    pool::check_page_size,
    scales::{KEYS, VALUES},
};
use crate::{
    Error,
    exec::apart::{check_apart, check_copies, check_pool},
    kv::{
        LATENT_656_BYTES, PageCopy,
        latent_parts::{check_parts, rope_dim},
    },
    problem::Spec,
};

/// An array of a pool, as runs of consecutive bytes of each page.
struct Array {
    name: &'static str,
    address: DevicePtr,
    /// Bytes from a page to the next.
    page: u64,
    /// Bytes of a run.
    run: u64,
    /// Numbers of runs and bytes from one to the next, of two nested loops.
    loops: [(u64, u64); 2],
}

impl Array {
    /// Rows of `dim` elements, `tokens × heads` of them in a page. Rows without gaps between them are one run.
    fn new(
        name: &'static str,
        address: DevicePtr,
        bytes: u64,
        [page, token, head]: [u64; 3],
        [tokens, heads]: [u64; 2],
        dim: u64,
    ) -> Self {
        let mut loops = [(tokens, token * bytes), (heads, head * bytes)];
        loops.sort_unstable_by_key(|&(_, stride)| stride);
        let mut run = dim * bytes;
        for (count, stride) in &mut loops {
            if *count > 1 && *stride != run {
                break;
            }
            (run, *count) = (run * *count, 1);
        }
        Self {
            name,
            address,
            page: page * bytes,
            run,
            loops,
        }
    }

    fn scales(name: &'static str, scales: &DeviceTensor<3>) -> Self {
        let strides = scales.strides.map(|stride| stride as u64);
        let [_, tokens, heads] = scales.shape.map(|extent| extent as u64);
        Self::new(name, scales.address, 4, strides, [tokens, heads], 1)
    }

    /// # Safety
    /// The pages are there, and `stream` lives.
    unsafe fn copy(&self, PageCopy { from, to }: PageCopy, stream: Stream) -> Result<(), Error> {
        let page = |page: u32| self.address + u64::from(page) * self.page;
        let [(outer, by_outer), (inner, by_inner)] = self.loops;
        for offset in (0..outer).flat_map(|i| (0..inner).map(move |j| i * by_outer + j * by_inner))
        {
            // SAFETY: the caller's promise.
            unsafe {
                cuMemcpyDtoDAsync(
                    page(to) + offset,
                    page(from) + offset,
                    self.run as usize,
                    stream,
                )
            }
            .check("cuMemcpyDtoDAsync")?;
        }
        Ok(())
    }
}

/// The arrays of a pool whose pages belong together.
fn arrays(spec: &Spec, pool: &KvPool) -> Result<Vec<Array>, Error> {
    let bytes = u64::from(pool.dtype.bytes());
    let rows = |name, address, strides: kernels_gpu::abi::KvStrides, dim: u32| {
        check_page_size(0, strides.page_size)?;
        check_pool(name, pool.pages, spec.kv_heads, dim, strides)?;
        let [page, token, head, tokens] =
            [strides.page, strides.token, strides.head, strides.page_size].map(u64::from);
        let heads = u64::from(spec.kv_heads);
        Ok::<_, Error>(Array::new(
            name,
            address,
            bytes,
            [page, token, head],
            [tokens, heads],
            dim.into(),
        ))
    };
    let of_keys = match (pool.scales, pool.rope) {
        (KvScales::InRow, _) => LATENT_656_BYTES,
        (_, Some(_)) => spec.head_dim_v,
        _ => spec.head_dim_qk,
    };
    let mut arrays = vec![rows("the key pool", pool.k, pool.k_strides, of_keys)?];
    if let Some(rope) = pool.rope {
        check_parts(spec, pool.scales == KvScales::InRow, 0)?;
        arrays.push(rows(
            "the second pool of the keys",
            rope.pool,
            rope.strides,
            rope_dim(spec),
        )?);
    }
    if !spec.latent {
        arrays.push(rows(
            "the value pool",
            pool.v,
            pool.v_strides,
            spec.head_dim_v,
        )?);
    }
    if let KvScales::Token { k, v } = &pool.scales {
        // Copies have no query tokens.
        pool.scale_parameters(spec, 0)?;
        for (name, scales) in [(KEYS, k), (VALUES, v)] {
            check_apart(name, scales.shape, 1, scales.strides)?;
            arrays.push(Array::scales(name, scales));
        }
    }
    Ok(arrays)
}

impl Gpu {
    /// Copies pages of a pool, one after the other, with the scales of their tokens if each has one. Call it for the pools of all
    /// layers with what [`Sequence::append`](crate::kv::Sequence::append) and
    /// [`PagePool::make_unique`](crate::kv::PagePool::make_unique) return, before the pages are written.
    ///
    /// A page is one copy of the driver for keys and one for values where it has no gaps, as in a dense pool; otherwise one for each
    /// run of bytes. The same call on the CPU is [`Cpu::copy_pages`](crate::Cpu::copy_pages).
    ///
    /// # Safety
    /// - The pool and its scales are in this GPU's memory as described, until the work on `stream` is done. Nothing else
    ///   reads the new pages or writes the pool meanwhile.
    /// - `stream` is a stream of the device's primary context, or null (the default stream).
    ///
    /// # Errors
    /// [`Error::IndexOutOfRange`] for a page that the pool does not have, and an error for each thing that can be wrong with the pool,
    /// before anything is copied; [`Error::Driver`].
    pub unsafe fn copy_pages(
        &self,
        spec: &Spec,
        pool: &KvPool,
        copies: &[PageCopy],
        stream: Stream,
    ) -> Result<(), Error> {
        spec.check()?;
        pool.check_dtype(spec)?;
        pool.check_heads(spec)?;
        let arrays = arrays(spec, pool)?;
        check_copies(copies, pool.pages.into())?;
        if copies.is_empty() {
            return Ok(());
        }
        if let Some(null) = arrays.iter().find(|array| array.address == 0) {
            return Err(Error::NullPointer { tensor: null.name });
        }
        let _current = Current::enter(self.context.raw())?;
        for &copy in copies.iter().filter(|copy| copy.from != copy.to) {
            for array in &arrays {
                // SAFETY: the caller's promises, and the pages are in the pool.
                unsafe { array.copy(copy, stream) }?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Dtype, KvLayout};

    const A: DevicePtr = 1 << 30;

    fn refused(spec: &Spec, pool: &KvPool) -> Error {
        match arrays(spec, pool) {
            Ok(_) => panic!("taken: {pool:?}"),
            Err(error) => error,
        }
    }

    /// Pages behind the end of the scales were copied.
    #[test]
    fn scales_are_those_of_the_pool() {
        let spec = Spec::new(8, 8, 128).with_kv_dtype(Dtype::F8E4M3);
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 200, A, A);
        let scales = |dtype, shape| DeviceTensor::new(A, dtype, shape);
        let good = scales(Dtype::F32, [200, 16, 8]);
        let with = |k, v| pool.with_scales(KvScales::Token { k, v });
        assert_eq!(
            arrays(&spec, &with(good, good)).map(|arrays| arrays.len()),
            Ok(4)
        );
        for bad in [
            scales(Dtype::F32, [100, 16, 8]),
            scales(Dtype::F32, [200, 8, 8]),
            scales(Dtype::F32, [200, 16, 4]),
            scales(Dtype::BF16, [200, 16, 8]),
            DeviceTensor {
                address: A + 2,
                ..good
            },
            good.with_stride(0, 127),
            good.with_stride(2, 0),
        ] {
            refused(&spec, &with(bad, good));
            refused(&spec, &with(good, bad));
        }
        let inside = good.with_stride(0, 4096);
        assert!(arrays(&spec, &with(inside, inside)).is_ok());
    }

    /// A copy overwrote a part of the page behind it.
    #[test]
    fn pages_of_latent_pools_are_apart() {
        let spec = Spec::latent(16, 512, 64);
        let of_bytes = spec.with_kv_dtype(Dtype::F8E4M3);
        let parts = KvPool::latent_parts(&spec, 16, 10, A, A);
        for (spec, pool) in [
            (spec, KvPool::latent(&spec, 16, 10, A)),
            (of_bytes, KvPool::latent_656(16, 10, A)),
            (spec, parts),
        ] {
            assert!(arrays(&spec, &pool).is_ok(), "{pool:?}");
            let mut strides = pool.k_strides;
            strides.page -= 1;
            let pool = pool.with_strides(strides, strides);
            let error = refused(&spec, &pool);
            assert!(matches!(error, Error::Stride { .. }), "{error}");
        }
        let mut second = parts;
        if let Some(rope) = &mut second.rope {
            rope.strides.page -= 1;
        }
        let error = refused(&spec, &second);
        assert!(error.to_string().contains("the second pool"), "{error}");
    }
}
