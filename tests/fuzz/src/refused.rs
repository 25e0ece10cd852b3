//! Wrong runs and appends on a GPU, by class: each is refused before anything is launched.

mod appends;

use tandem_attn::{
    Error,
    exec::gpu::{
        DeviceArray, DeviceTensor, Gpu, KvPool, KvScales, RopePart, RunTensors, Stream, Workspace,
    },
    plan::Plan,
    problem::Dtype,
};

pub use self::appends::{Append, append};

use crate::{numeric::Rng, tally::Tally};

/// What a run is given.
#[derive(Clone)]
pub struct Given {
    pub q: DeviceTensor<3>,
    pub pools: Vec<KvPool>,
    pub out: DeviceTensor<3>,
    pub lse: Option<DeviceTensor<2>>,
    pub sinks: Option<DeviceArray<f32>>,
    /// The bytes of what hooks take.
    pub own: Vec<u8>,
    pub indices: Option<DeviceArray<i32>>,
}

impl Given {
    /// # Safety
    /// As [`Gpu::run_with`].
    pub unsafe fn run(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        let mut tensors = RunTensors::new(&self.q, &self.pools, &self.out);
        tensors.lse = self.lse.as_ref();
        tensors.sinks = self.sinks;
        tensors.own = &self.own;
        tensors.indices = self.indices;
        // SAFETY: the caller's promise.
        unsafe { gpu.run_with(workspace, &tensors, stream) }
    }
}

/// A run, and what it is of.
struct Asked<'a> {
    given: Given,
    plan: &'a Plan,
    /// Whether the first part has keys that someone reads.
    reads: bool,
}

type Wrong = fn(&mut Asked<'_>, &mut Rng) -> Option<()>;

/// Another type, of 16 bits.
fn other(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::BF16 => Dtype::F16,
        _ => Dtype::BF16,
    }
}

/// 32 bits in the place of 16, and 8 in the place of 32.
fn of_32_bits(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::F32 => Dtype::F8E4M3,
        _ => Dtype::F32,
    }
}

/// Changes a tensor.
macro_rules! changed {
    ($asked:ident.$tensor:ident, $change:expr) => {{
        let change: fn(&mut DeviceTensor<3>) = $change;
        change(&mut $asked.given.$tensor);
        Some(())
    }};
}

const RUNS: [(&str, Wrong); 42] = [
    ("q between vectors", |asked, _| {
        changed!(asked.q, |q| q.address += 2)
    }),
    ("q half a vector on", |asked, _| {
        changed!(asked.q, |q| q.address += 8)
    }),
    ("q is null", |asked, _| changed!(asked.q, |q| q.address = 0)),
    ("q of another type", |asked, _| {
        changed!(asked.q, |q| q.dtype = other(q.dtype))
    }),
    ("q of 32 bits", |asked, _| {
        changed!(asked.q, |q| q.dtype = of_32_bits(q.dtype))
    }),
    ("q with a token less", |asked, _| {
        changed!(asked.q, |q| q.shape[0] -= 1)
    }),
    ("q with a token more", |asked, _| {
        asked.given.out.shape[0] += 1;
        if let Some(lse) = &mut asked.given.lse {
            lse.shape[0] += 1;
        }
        changed!(asked.q, |q| q.shape[0] += 1)
    }),
    ("q with other heads", |asked, _| {
        changed!(asked.q, |q| q.shape[1] += 1)
    }),
    ("q with shorter heads", |asked, _| {
        changed!(asked.q, |q| q.shape[2] -= 16)
    }),
    ("q with a gap between elements", |asked, _| {
        changed!(asked.q, |q| q.strides[2] = 2)
    }),
    ("q with gaps between heads", |asked, _| {
        changed!(asked.q, |q| q.strides[1] += 8)?;
        (asked.given.q.shape[1] > 1).then_some(())
    }),
    ("q with odd rows", |asked, _| {
        changed!(asked.q, |q| q.strides[0] += 4)?;
        (asked.given.q.shape[0] > 1).then_some(())
    }),
    ("out between vectors", |asked, _| {
        changed!(asked.out, |out| out.address += 2)
    }),
    ("out is null", |asked, _| {
        changed!(asked.out, |out| out.address = 0)
    }),
    ("out of another type", |asked, _| {
        changed!(asked.out, |out| out.dtype = other(out.dtype))
    }),
    ("out of 32 bits", |asked, _| {
        changed!(asked.out, |out| out.dtype = of_32_bits(out.dtype))
    }),
    ("out with a token less", |asked, _| {
        changed!(asked.out, |out| out.shape[0] -= 1)
    }),
    ("out with other heads", |asked, _| {
        changed!(asked.out, |out| out.shape[1] += 1)
    }),
    ("out with longer heads", |asked, _| {
        changed!(asked.out, |out| out.shape[2] += 16)
    }),
    ("out with odd rows", |asked, _| {
        changed!(asked.out, |out| out.strides[0] += 4)?;
        (asked.given.out.shape[0] > 1).then_some(())
    }),
    ("outputs that overlap", |asked, rng| {
        let out = &mut asked.given.out;
        let row = out.shape[1] * out.shape[2];
        out.strides[0] = [0, row - 8][rng.below(2)];
        (out.shape[0] > 1).then_some(())
    }),
    ("log-sums between words", |asked, _| {
        asked.given.lse.as_mut()?.address += 2;
        Some(())
    }),
    ("log-sums at null", |asked, _| {
        asked.given.lse.as_mut()?.address = 0;
        Some(())
    }),
    ("log-sums of 16 bits", |asked, _| {
        asked.given.lse.as_mut()?.dtype = Dtype::BF16;
        Some(())
    }),
    ("log-sums of other heads", |asked, _| {
        asked.given.lse.as_mut()?.shape[1] += 1;
        Some(())
    }),
    ("log-sums of fewer tokens", |asked, _| {
        asked.given.lse.as_mut()?.shape[0] -= 1;
        Some(())
    }),
    ("log-sums with gaps", |asked, _| {
        let lse = asked.given.lse.as_mut()?;
        lse.strides[0] += 1;
        (lse.shape[0] > 1).then_some(())
    }),
    ("no pools", |asked, _| {
        asked.given.pools.clear();
        Some(())
    }),
    ("a pool too many", |asked, _| {
        asked.given.pools.push(asked.given.pools[0]);
        Some(())
    }),
    ("a pool of other pages", |asked, _| {
        let pool = &mut asked.given.pools[0];
        pool.k_strides.page_size += 1;
        pool.v_strides.page_size += 1;
        Some(())
    }),
    ("values on other pages than keys", |asked, _| {
        asked.given.pools[0].v_strides.page_size += 8;
        asked.reads.then_some(())
    }),
    ("a pool without the last page in use", |asked, _| {
        let part = &asked.plan.parts[0];
        let pages = &asked.plan.page_ids[part.pages.start as usize..part.pages.end as usize];
        asked.given.pools[0].pages = *pages.iter().max()?;
        Some(())
    }),
    ("a pool of another type", |asked, _| {
        let pool = &mut asked.given.pools[0];
        pool.dtype = if pool.dtype == Dtype::F32 {
            Dtype::F16
        } else {
            Dtype::F32
        };
        asked.reads.then_some(())
    }),
    ("keys at null", |asked, _| {
        asked.given.pools[0].k = 0;
        asked.reads.then_some(())
    }),
    ("values at null", |asked, _| {
        asked.given.pools[0].v = 0;
        asked.reads.then_some(())
    }),
    ("keys between vectors", |asked, _| {
        asked.given.pools[0].k += 2;
        asked.reads.then_some(())
    }),
    ("pages between vectors", |asked, _| {
        asked.given.pools[0].k_strides.page += 1;
        asked.given.pools[0].v_strides.page += 1;
        (asked.reads && asked.given.pools[0].pages > 1).then_some(())
    }),
    (
        "a pool of what only latent keys have, or one of other pages",
        |asked, _| {
            let latent = asked.plan.spec.latent;
            let pool = &mut asked.given.pools[0];
            let mut strides = pool.k_strides;
            strides.page_size += u32::from(latent);
            pool.rope = Some(RopePart {
                pool: pool.k,
                strides,
            });
            Some(())
        },
    ),
    (
        "a pool of what only latent keys have at null",
        |asked, _| {
            asked.given.pools[0].rope.as_mut()?.pool = 0;
            asked.reads.then_some(())
        },
    ),
    ("sinks missing, or where there are none", |asked, _| {
        let heads = asked.given.q.shape[1];
        asked.given.sinks = match asked.given.sinks {
            Some(_) => None,
            None => Some(DeviceArray::new(asked.given.q.address, heads)),
        };
        Some(())
    }),
    ("scales for 16 bits, or of other heads", |asked, _| {
        let address = asked.given.lse?.address;
        let heads = asked.plan.spec.kv_heads as usize + 1;
        let tensor = DeviceTensor::new(address, Dtype::F32, [heads]);
        asked.given.pools[0].scales = KvScales::Head {
            k: tensor,
            v: tensor,
        };
        asked.reads.then_some(())
    }),
    (
        "nothing for the variant, or something for none",
        |asked, _| {
            match asked.given.own.is_empty() {
                false => asked.given.own.clear(),
                true => asked.given.own.extend([7; 4]),
            }
            Some(())
        },
    ),
];

/// Runs a plan that is in the workspace with a mistake of some class.
///
/// # Errors
/// Where it is not refused.
pub fn run(
    gpu: &Gpu,
    workspace: &mut Workspace,
    plan: &Plan,
    given: &Given,
    stream: Stream,
    rng: &mut Rng,
    tally: &mut Tally,
) -> Result<(), String> {
    if plan.total_q == 0 || plan.groups.is_empty() {
        return Ok(()); // there is nothing to launch
    }
    let (class, wrong) = RUNS[rng.below(RUNS.len())];
    let mut asked = Asked {
        given: given.clone(),
        plan,
        reads: plan.items.iter().any(|item| item.part == 0),
    };
    if wrong(&mut asked, rng).is_none() {
        return Ok(());
    }
    // SAFETY: it is refused. Where it is not, what it writes is found.
    match unsafe { asked.given.run(gpu, workspace, stream) } {
        Err(error @ Error::Driver { .. }) => Err(format!("{class}: {error}")),
        Err(_) => {
            tally.refused(class);
            Ok(())
        }
        Ok(()) => Err(format!("run, though wrong: {class}")),
    }
}
