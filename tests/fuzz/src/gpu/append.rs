//! New keys and values, as they are and quantised.

use tandem_attn::{
    Error,
    exec::gpu::{AppendScales, DeviceArray, DeviceTensor, KvPool},
};

use super::{Runner, text};
use crate::{
    case::{Appends, Case, Pool, Scales},
    numeric::Rng,
    refused,
};

/// What an append is given.
struct New {
    slots: DeviceArray<u32>,
    k: DeviceTensor<3>,
    v: DeviceTensor<3>,
}

impl Runner<'_> {
    /// Appends new rows to both pools. Afterwards these are as they must be, and nothing else was written.
    pub(super) fn append(&mut self, listed: usize, slots: &[u32]) -> Result<(), String> {
        let (case, spec) = (self.case, self.case.spec);
        let at = |place: usize| self.given.address() + place as u64;
        let heads = spec.kv_heads as usize;
        let [k, v] = [spec.head_dim_qk, spec.head_dim_v].map(|dim| [listed, heads, dim as usize]);
        let rows = &self.world.rows;
        let new = New {
            slots: DeviceArray::new(at(self.world.slots.start), listed),
            k: DeviceTensor::new(at(rows[0].start), case.row_dtype(), k),
            v: DeviceTensor::new(at(rows[1].start), case.row_dtype(), v),
        };
        for (pool, layout) in self.pools().into_iter().zip(self.world.pools) {
            let mut rng = Rng(case.seed ^ 10 ^ self.tally.calls);
            for _ in 0..case.wrong {
                let New { slots, k, v } = new;
                let given = refused::Append { pool, slots, k, v };
                let (gpu, stream) = (self.gpu, &self.stream);
                refused::append(gpu, &spec, given, stream, &mut rng, &mut self.tally)?;
            }
            self.append_to(&pool, &layout, &new).map_err(text)?;
            self.tally.calls += 1;
        }
        self.stream.synchronize().map_err(text)?;
        for &slot in slots {
            self.world.fill(case, slot);
            self.world.write_cache(case, slot);
        }
        self.unchanged()
            .map_err(|what| format!("an append: {what}"))
    }

    fn append_to(&self, pool: &KvPool, layout: &Pool, new: &New) -> Result<(), Error> {
        let Case {
            spec,
            scales,
            appends,
            page_size,
            ..
        } = self.case;
        let (gpu, stream) = (self.gpu, *self.stream);
        let New { slots, k, v } = new;
        let of_append = match appends {
            Appends::Computed => AppendScales::Computed,
            _ => AppendScales::Given,
        };
        // SAFETY: all of it is in memory of ours, and the stream is waited for.
        unsafe {
            match (spec.latent, appends) {
                (true, _) if *scales == Scales::InRow => {
                    let [tokens, _, dim] = k.shape;
                    let rows = DeviceTensor::new(k.address, k.dtype, [tokens, dim]);
                    gpu.append_latent_656(pool, *slots, &rows, stream)
                }
                (true, _) => {
                    let shape = [self.world.pages, *page_size, 1, spec.head_dim_qk];
                    let shape = shape.map(|extent| extent as usize);
                    let mut pool = DeviceTensor::new(pool.k, spec.kv_dtype, shape);
                    let strides = [layout.k.page, layout.k.token, layout.k.head];
                    for (axis, stride) in strides.into_iter().enumerate() {
                        pool = pool.with_stride(axis, stride as usize);
                    }
                    gpu.append_rows(k, *slots, &pool, stream)
                }
                (false, Appends::Copied) => gpu.append_paged_kv(spec, pool, *slots, k, v, stream),
                (false, _) => gpu.append_quantised(spec, pool, of_append, *slots, k, v, stream),
            }
        }
    }
}
