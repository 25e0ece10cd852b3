//! What calls are given: pools and tensors in the memory of a case.

use tandem_attn::{
    exec::gpu::{DeviceArray, DeviceTensor, KvPool, KvScales, RopePart},
    problem::{Dtype, KvLayout},
};

use super::Runner;
use crate::{case::Scales, hooks, refused::Given, world::REQUESTS};

impl Runner<'_> {
    pub(super) fn pools(&self) -> [KvPool; 2] {
        let (case, world, spec) = (self.case, &self.world, &self.case.spec);
        let at = |place: usize| self.given.address() + place as u64;
        let [k, v] = world.scales.each_ref().map(|place| at(place.start));
        let (heads, pages) = (spec.kv_heads as usize, world.pages as usize);
        let flat = |address, len| DeviceTensor::new(address, Dtype::F32, [len]);
        let scales = match case.scales {
            Scales::One => KvScales::One,
            Scales::InRow => KvScales::InRow,
            Scales::Tensor => KvScales::Tensor {
                k: flat(k, 1),
                v: flat(v, 1),
            },
            Scales::Head => KvScales::Head {
                k: flat(k, heads),
                v: flat(v, heads),
            },
            Scales::Request => {
                let tensor =
                    |address| DeviceTensor::new(address, Dtype::F32, [REQUESTS as usize, heads]);
                KvScales::Request {
                    k: tensor(k),
                    v: tensor(v),
                    of_token: DeviceArray::new(at(world.of_token.start), case.most_tokens()),
                }
            }
            Scales::Token => {
                let shape = [pages, case.page_size as usize, heads];
                KvScales::Token {
                    k: DeviceTensor::new(k, Dtype::F32, shape),
                    v: DeviceTensor::new(v, Dtype::F32, shape),
                }
            }
        };
        [0, 1].map(|index| {
            let [k, v] = world.cached_at[index].map(|place| self.cache.address() + place as u64);
            let layout = &world.pools[index];
            let mut pool = KvPool::new(spec, KvLayout::Nhd, case.page_size, world.pages, k, v)
                .with_strides(layout.k, layout.v)
                .with_scales(scales);
            pool.rope = case.pools[index].two_pools.then_some(RopePart {
                pool: k + u64::from(spec.head_dim_v * spec.kv_dtype.bytes()),
                strides: layout.k,
            });
            pool
        })
    }

    /// What a run of so many tokens is given, all of it right.
    pub(super) fn given(&self, parts: usize, tokens: usize) -> Given {
        let (world, spec) = (&self.world, &self.case.spec);
        let heads = spec.q_heads as usize;
        let given = |place: usize| self.given.address() + place as u64;
        let result = |place: usize| self.results.address() + place as u64;
        let tensor = |address, dtype, dim: u32, stride| {
            DeviceTensor::new(address, dtype, [tokens, heads, dim as usize]).with_stride(0, stride)
        };
        let [q_stride, out_stride] = world.strides;
        let pools = self.pools();
        Given {
            q: tensor(
                given(world.q.start),
                spec.q_dtype,
                spec.head_dim_qk,
                q_stride,
            ),
            pools: (0..parts).map(|part| pools[part % 2]).collect(),
            out: tensor(
                result(world.out.start),
                spec.out_dtype,
                spec.head_dim_v,
                out_stride,
            ),
            lse: Some(DeviceTensor::new(
                result(world.lse.start),
                Dtype::F32,
                [tokens, heads],
            )),
            sinks: spec
                .variant
                .sinks
                .then(|| DeviceArray::new(given(world.sinks.start), spec.sinks())),
            own: hooks::own_bytes(spec, given(world.slopes.start)),
            indices: None,
        }
    }
}
