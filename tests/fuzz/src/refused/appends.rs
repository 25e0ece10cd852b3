//! Wrong appends, by class.

use tandem_attn::{
    Error,
    exec::gpu::{DeviceArray, DeviceTensor, Gpu, KvPool, OwnedStream},
    problem::Spec,
};

use super::other;
use crate::{numeric::Rng, tally::Tally};

/// What an append is given.
#[derive(Clone, Copy)]
pub struct Append {
    pub pool: KvPool,
    pub slots: DeviceArray<u32>,
    pub k: DeviceTensor<3>,
    pub v: DeviceTensor<3>,
}

type WrongAppend = fn(&mut Append) -> Option<()>;

const APPENDS: [(&str, WrongAppend); 12] = [
    ("append: fewer slots than tokens", |given| {
        given.slots.len = given.slots.len.checked_sub(1)?;
        Some(())
    }),
    ("append: slots at null", |given| {
        given.slots.address = 0;
        Some(())
    }),
    ("append: keys of another type", |given| {
        given.k.dtype = other(given.k.dtype);
        Some(())
    }),
    ("append: values of other heads", |given| {
        given.v.shape[1] += 1;
        Some(())
    }),
    ("append: keys of other lengths", |given| {
        given.k.shape[2] += 16;
        Some(())
    }),
    ("append: keys between vectors", |given| {
        given.k.address += 2;
        Some(())
    }),
    ("append: values at null", |given| {
        given.v.address = 0;
        Some(())
    }),
    ("append: odd rows", |given| {
        given.k.strides[0] += 1;
        Some(())
    }),
    ("append: a gap between elements", |given| {
        given.v.strides[2] = 2;
        Some(())
    }),
    ("append: pages of no tokens", |given| {
        given.pool.k_strides.page_size = 0;
        given.pool.v_strides.page_size = 0;
        Some(())
    }),
    ("append: values on other pages than keys", |given| {
        given.pool.v_strides.page_size += 1;
        Some(())
    }),
    ("append: a pool of another type", |given| {
        given.pool.dtype = other(given.pool.dtype);
        Some(())
    }),
];

/// Appends with a mistake of some class.
///
/// # Errors
/// Where it is not refused.
pub fn append(
    gpu: &Gpu,
    spec: &Spec,
    mut given: Append,
    stream: &OwnedStream,
    rng: &mut Rng,
    tally: &mut Tally,
) -> Result<(), String> {
    let (class, wrong) = APPENDS[rng.below(APPENDS.len())];
    if given.slots.len == 0 || wrong(&mut given).is_none() {
        return Ok(());
    }
    let Append { pool, slots, k, v } = &given;
    // SAFETY: it is refused. Where it is not, what it writes is found.
    match unsafe { gpu.append_paged_kv(spec, pool, *slots, k, v, **stream) } {
        Err(error @ Error::Driver { .. }) => Err(format!("{class}: {error}")),
        Err(_) => {
            tally.refused(class);
            Ok(())
        }
        Ok(()) => Err(format!("done, though wrong: {class}")),
    }
}
