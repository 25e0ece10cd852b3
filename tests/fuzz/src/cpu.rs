//! A case on the CPU.

use tandem_attn::{
    exec::Cpu,
    kv::{KvScales, KvTensors},
    plan::{DeviceDescription, Plan},
    problem::{Batch, Dtype},
    tensor::{HeadTensors, TensorMut, TensorRef},
};

use crate::{
    case::{Appends, Case, Scales},
    oracle::{self, Right},
    planned::{Planned, planned},
    tally::{Failure, Tally},
    with_type,
    world::{REQUESTS, World},
    wrong,
};

/// A tensor in an image, from a byte on.
fn tensor<const RANK: usize>(
    dtype: Dtype,
    bytes: &[u8],
    shape: [usize; RANK],
    strides: [usize; RANK],
) -> TensorRef<'_, RANK> {
    let whole = bytes.len() / 4 * 4;
    with_type!(dtype, T => {
        let elements: &[T] = bytemuck::cast_slice(&bytes[..whole]);
        TensorRef::strided(elements, shape, strides).expect("inside the image")
    })
}

fn tensor_mut<const RANK: usize>(
    dtype: Dtype,
    bytes: &mut [u8],
    shape: [usize; RANK],
    strides: [usize; RANK],
) -> TensorMut<'_, RANK> {
    let whole = bytes.len() / 4 * 4;
    with_type!(dtype, T => {
        let elements: &mut [T] = bytemuck::cast_slice_mut(&mut bytes[..whole]);
        TensorMut::strided(elements, shape, strides).expect("inside the image")
    })
}

struct Runner<'a> {
    case: &'a Case,
    cpu: Cpu,
    world: World,
    tally: Tally,
}

/// Plans the case and runs it.
pub fn run(case: &Case) -> Result<Tally, Failure> {
    let has_extras = case.steps.iter().any(|step| !step.extras.is_empty());
    if case.appends != Appends::Copied || case.spec.variant.hooks.is_some() || has_extras {
        return Err(Failure {
            step: None,
            what:
                "the case is for a GPU: it has hooks, appends or calls that are drawn for GPUs only"
                    .into(),
        });
    }
    let mut device = DeviceDescription::named("cpu").expect("it is built in");
    device.sms = case.sms;
    let mut tally = Tally::default();
    let steps = planned(case, &device, &mut tally)?;
    let mut runner = Runner {
        case,
        cpu: Cpu::new(),
        world: World::new(case),
        tally,
    };
    for (at, planned) in steps.iter().enumerate() {
        runner
            .step(at, planned)
            .map_err(|what| Failure::at(at, what))?;
    }
    Ok(runner.tally)
}

impl Runner<'_> {
    fn step(&mut self, at: usize, planned: &Planned) -> Result<(), String> {
        let case = self.case;
        let batch = &planned.batch;
        let new = self.world.new_slots(case, at);
        self.append(&new)?;
        let tokens = batch.total_q() as usize;
        let q = self.world.write_queries(case, at, tokens);
        let right = Right::from(oracle::right(case, batch, &self.world, &q));
        for (index, plan) in planned.plans.iter().enumerate() {
            let call = |what| format!("plan {index}: {what}");
            let mut first = None;
            for _ in 0..2 {
                let mut results = self.world.results.clone();
                self.run(plan, batch, results.bytes_mut()).map_err(call)?;
                self.tally.calls += 1;
                oracle::judge(case, &self.world, tokens, false, results.bytes(), &right)
                    .map_err(call)?;
                self.tally.right(&["run"]);
                self.tally.right(&case.special(case.steps.get(at)));
                let first = first.get_or_insert_with(|| results.clone());
                if let Some(byte) = first.differs(results.bytes()) {
                    return Err(call(format!("a second run differs at byte {byte}")));
                }
            }
            for _ in 0..case.wrong {
                let mut results = self.world.results.clone();
                let damaged = wrong::damaged_plan(plan, case.seed ^ self.tally.calls);
                // Whatever it computes: it is refused, or stays within its outputs.
                let refused = self.run(&damaged, batch, results.bytes_mut()).is_err();
                self.tally.calls += 1;
                if refused && self.world.results.differs(results.bytes()).is_some() {
                    return Err(call("a plan was refused, and outputs were written".into()));
                }
            }
        }
        Ok(())
    }

    fn append(&mut self, new: &[u32]) -> Result<(), String> {
        let (case, spec) = (self.case, self.case.spec);
        let listed = self.world.write_rows(case, new);
        let world = &mut self.world;
        let place = world.slots.start..world.slots.start + 4 * listed;
        let slots: Vec<u32> = bytemuck::cast_slice(&world.given.bytes()[place]).to_vec();
        let before = world.cache.clone();
        let heads = spec.kv_heads as usize;
        for side in 0..if spec.latent { 1 } else { 2 } {
            let dim = [spec.head_dim_qk, spec.head_dim_v][side] as usize;
            let from = &world.given.bytes()[world.rows[side].start..];
            let rows = tensor(
                spec.kv_dtype,
                from,
                [listed, heads, dim],
                [heads * dim, dim, 1],
            );
            for (pool, at) in world.pools.iter().zip(world.cached_at) {
                let strides = [pool.k, pool.v][side];
                let shape = [world.pages as usize, case.page_size as usize, heads, dim];
                let strides = [strides.page, strides.token, strides.head, 1].map(|s| s as usize);
                let bytes = &mut world.cache.bytes_mut()[at[side]..];
                let pool = tensor_mut(spec.kv_dtype, bytes, shape, strides);
                Cpu::append_rows(&rows, &slots, pool).map_err(|error| error.to_string())?;
                self.tally.calls += 1;
            }
        }
        let after = std::mem::replace(&mut world.cache, before);
        for &slot in new {
            world.fill(case, slot);
            world.write_cache(case, slot);
        }
        match world.cache.differs(after.bytes()) {
            Some(at) => Err(format!("an append differs at byte {at} of the cache")),
            None => Ok(()),
        }
    }

    fn run(&self, plan: &Plan, batch: &Batch, results: &mut [u8]) -> Result<(), String> {
        let (case, world, spec) = (self.case, &self.world, self.case.spec);
        let (tokens, heads) = (batch.total_q() as usize, spec.q_heads as usize);
        let (dim, dim_v) = (spec.head_dim_qk as usize, spec.head_dim_v as usize);
        let given = world.given.bytes();
        let q = tensor(
            spec.q_dtype,
            &given[world.q.start..],
            [tokens, heads, dim],
            [world.strides[0], dim, 1],
        );
        let requests: Vec<u32> = (0..tokens as u32)
            .map(|token| token * 7 % REQUESTS)
            .collect();
        let [k_scales, v_scales] = &world.scale_values;
        let strides = tandem_attn::problem::KvLayout::Nhd.strides(case.page_size, spec.kv_heads, 1);
        let scales = match case.scales {
            // Not drawn in rows.
            Scales::One | Scales::InRow => KvScales::One,
            Scales::Tensor => KvScales::Tensor {
                k: k_scales[0],
                v: v_scales[0],
            },
            Scales::Head => KvScales::Head {
                k: k_scales,
                v: v_scales,
            },
            Scales::Request => KvScales::Request {
                k: k_scales,
                v: v_scales,
                of_token: &requests,
            },
            Scales::Token => KvScales::Token {
                k: k_scales,
                v: v_scales,
                k_strides: strides,
                v_strides: strides,
            },
        };
        let kv_heads = spec.kv_heads as usize;
        let pool = |side: usize, dim: usize, part: usize| {
            let pool = &world.pools[part % 2];
            let strides = [pool.k, pool.v][side];
            let at = world.cached_at[part % 2][side];
            tensor(
                spec.kv_dtype,
                &world.cache.bytes()[at..],
                [world.pages as usize, case.page_size as usize, kv_heads, dim],
                [strides.page, strides.token, strides.head, 1].map(|stride| stride as usize),
            )
        };
        let kv: Vec<_> = (0..batch.parts.len())
            .map(|part| KvTensors {
                k: pool(0, dim, part),
                v: pool(if spec.latent { 0 } else { 1 }, dim_v, part),
                scales,
            })
            .collect();
        let (outs, lses) = results.split_at_mut(world.lse.start);
        let out = tensor_mut(
            spec.out_dtype,
            &mut outs[world.out.start..],
            [tokens, heads, dim_v],
            [world.strides[1], dim_v, 1],
        );
        let lse = bytemuck::cast_slice_mut(&mut lses[..tokens * heads * 4]);
        let mut of_heads = HeadTensors::default();
        if spec.variant.sinks {
            of_heads = of_heads.with_sinks(&world.sink_values);
        }
        self.cpu
            .run_tensors_heads(plan, &q, &kv, out, Some(lse), &of_heads)
            .map_err(|error| error.to_string())
    }
}
