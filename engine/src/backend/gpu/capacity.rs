//! How many tokens the caches hold.

use cudarc::driver::result::mem_get_info;
use tandem_attn::{Error as AttentionError, exec::gpu::Gpu, problem::Dtype};

use super::{
    GpuOptions,
    buffers::{self, cuda},
    logit_buffers,
};
use crate::{Architecture, Error};

/// Of this many parts of the free memory, caches leave one: for CUDA graphs, and for the device's other programs.
const PARTS: u64 = 10;
/// Memory is allocated in pieces of this size; each layer has up to four allocations.
const PIECE: u64 = 2 << 20;
/// Slots are numbers of 32 bits, the largest of which stands for none.
const MOST: u64 = 1 << 31;

/// Free memory and all memory of a GPU, in bytes.
pub(super) fn memory(gpu: &Gpu) -> Result<[u64; 2], Error> {
    gpu.make_current()?;
    let (free, total) = mem_get_info().map_err(|error| cuda("cuMemGetInfo", &error))?;
    Ok([free as u64, total as u64])
}

fn bytes_per_token(a: &Architecture, options: &GpuOptions) -> u64 {
    a.kv_bytes_per_token(options.cache_type, Dtype::BF16)
}

/// Refuses what does not fit beside the weights: buffers of steps, and caches that are asked for, or those of one step.
pub(super) fn check(
    a: &Architecture,
    options: &GpuOptions,
    [free, total]: [u64; 2],
) -> Result<(), Error> {
    let caches = match options.cache_tokens {
        Some(tokens) => {
            let caches = u64::from(tokens).saturating_mul(bytes_per_token(a, options));
            caches.saturating_add(logit_buffers::most_bytes(a, options.step_requests))
        }
        None => least_bytes(a, options),
    };
    let steps = buffers::bytes(a, options);
    let bytes = caches.saturating_add((2 * a.weights()).saturating_add(steps));
    let [bytes, free, total] = [bytes, free, total].map(|bytes| bytes as usize);
    match bytes <= free {
        true => Ok(()),
        false => Err(AttentionError::OutOfMemory { bytes, free, total }.into()),
    }
}

/// Memory that caches leave beside themselves.
fn beside(a: &Architecture, options: &GpuOptions) -> u64 {
    let rounding = 4 * PIECE * a.layers.len() as u64;
    rounding.saturating_add(logit_buffers::most_bytes(a, options.step_requests))
}

/// The fewest tokens that caches have by default.
fn least(a: &Architecture, options: &GpuOptions) -> u64 {
    let tokens = u64::from(a.positions.min(options.step_tokens));
    tokens.next_multiple_of(options.page_size.into())
}

/// Free memory with which caches have so many.
fn least_bytes(a: &Architecture, options: &GpuOptions) -> u64 {
    let caches = least(a, options).saturating_mul(bytes_per_token(a, options));
    let parts = caches.div_ceil(PARTS - 1).saturating_mul(PARTS);
    parts.saturating_add(beside(a, options))
}

/// The tokens that are asked for, or as many as fit most of the memory that is free after everything else is loaded,
/// but for what rules of logits may need later. Too little memory for the tokens of one step, or for all positions if
/// these are fewer, is an error: no useful prompt would fit.
pub(super) fn tokens(
    a: &Architecture,
    options: &GpuOptions,
    [free, total]: [u64; 2],
) -> Result<u32, Error> {
    if let Some(tokens) = options.cache_tokens {
        return Ok(tokens);
    }
    let page = u64::from(options.page_size);
    let each = bytes_per_token(a, options);
    let fit = free.saturating_sub(beside(a, options)) / PARTS * (PARTS - 1) / each;
    if fit < least(a, options) {
        let bytes = [least_bytes(a, options), free, total];
        let [bytes, free, total] = bytes.map(|bytes| bytes as usize);
        return Err(AttentionError::OutOfMemory { bytes, free, total }.into());
    }
    let longest = u64::from(a.positions).next_multiple_of(page);
    let useful = longest.saturating_mul(options.step_requests.max(1).into());
    let pages = fit.min(useful).min(MOST) / page;
    Ok((pages.max(1) * page) as u32)
}

#[cfg(test)]
mod tests {
    use tandem_schedule::{CacheType, ModelDescription};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn llama() -> Architecture {
        let model = ModelDescription::named("llama-3-8b").expect("known");
        Architecture::described(&model, 8192).expect("gated")
    }

    #[test]
    fn caches_take_most_of_the_memory_that_is_left() {
        let (a, mut options) = (llama(), GpuOptions::default());
        let fit = |options: &GpuOptions, free: u64| {
            tokens(&a, options, [free, 141 * GIB]).expect("there is room")
        };
        // 128 KiB for each token: 9/10 of 8 GiB less 256 MiB and 10 MiB for rules of logits.
        let wide = fit(&options, 8 * GIB);
        assert_eq!(wide, 57_056);
        options.cache_type = CacheType::E4m3;
        assert!(fit(&options, 8 * GIB).abs_diff(2 * wide) <= 16);
        options.cache_type = CacheType::Auto;
        // No more than all requests of a step can use.
        assert_eq!(fit(&options, 1000 * GIB), 64 * 8192);
        options.step_requests = 1;
        assert_eq!(fit(&options, 120 * GIB), 8192);
        (options.step_requests, options.page_size) = (u32::MAX, 7);
        let most = fit(&options, u64::MAX);
        assert!(most.is_multiple_of(7) && most > (1 << 31) - 7 && most <= 1 << 31);
        options.cache_tokens = Some(1000);
        assert_eq!(fit(&options, 0), 1000);
    }

    /// A step has up to 1024 tokens of 128 KiB.
    #[test]
    fn too_little_memory_for_a_step_is_refused() {
        let (mut a, mut options) = (llama(), GpuOptions::default());
        let sizes = |a: &Architecture, options: &GpuOptions, free: u64| {
            let refused = match tokens(a, options, [free, 141 * GIB]) {
                Ok(tokens) => return Ok(tokens),
                Err(refused) => refused,
            };
            let Error::Attention(AttentionError::OutOfMemory {
                bytes,
                free: is_free,
                total,
            }) = refused
            else {
                panic!("{refused:?}");
            };
            assert_eq!([is_free as u64, total as u64], [free, 141 * GIB]);
            Err(bytes as u64)
        };
        let needed = sizes(&a, &options, 0).unwrap_err();
        let beside = (256 << 20) + logit_buffers::most_bytes(&a, options.step_requests);
        assert_eq!(needed, (128_u64 << 20).div_ceil(9) * 10 + beside);
        assert_eq!(sizes(&a, &options, needed - 100), Err(needed));
        assert_eq!(sizes(&a, &options, needed), Ok(1024));
        // A prompt is never longer than the positions.
        a.positions = 100;
        let needed = sizes(&a, &options, 0).unwrap_err();
        assert_eq!(sizes(&a, &options, needed), Ok(112));
        (a.positions, options.page_size) = (8192, 7);
        let needed = sizes(&a, &options, 0).unwrap_err();
        assert_eq!(sizes(&a, &options, needed), Ok(1029));
    }

    #[test]
    fn caches_that_do_not_fit_are_refused_before_the_weights_are_read() {
        let (a, mut options) = (llama(), GpuOptions::default());
        let memory = [24 * GIB, 24 * GIB];
        check(&a, &options, memory).expect("16 GB of weights");
        options.cache_tokens = Some(60_000);
        check(&a, &options, memory).expect("8 GB more");
        options.cache_tokens = Some(90_000);
        let refused = check(&a, &options, memory).unwrap_err().to_string();
        let logits = logit_buffers::most_bytes(&a, options.step_requests);
        let steps = buffers::bytes(&a, &options);
        let bytes = 2 * a.weights() + (90_000 << 17) + logits + steps;
        assert!(
            refused.starts_with(&format!("{bytes} bytes do not fit")),
            "{refused}"
        );
        options.cache_tokens = Some(u32::MAX);
        assert!(check(&a, &options, memory).is_err());
    }

    /// A large --budget ended with an error after the weights had been read.
    #[test]
    fn buffers_of_steps_are_counted_before_the_weights_are_read() {
        let (a, mut options) = (llama(), GpuOptions::default());
        let memory = [24 * GIB, 24 * GIB];
        check(&a, &options, memory).expect("24 GB hold 16 GB of weights");
        // 4096 and more numbers of 16 bits for each token: 12 GB, and as many for the caches of a step.
        for cache_tokens in [Some(1000), None] {
            options.step_tokens = 100_000;
            options.cache_tokens = cache_tokens;
            let refused = check(&a, &options, memory).unwrap_err().to_string();
            assert!(refused.contains("bytes do not fit"), "{refused}");
        }
        options.step_tokens = 60_000;
        options.cache_tokens = Some(1000);
        let with = |free: u64| check(&a, &options, [free, 24 * GIB]).is_ok();
        let needed = 2 * a.weights()
            + (1000 << 17)
            + buffers::bytes(&a, &options)
            + logit_buffers::most_bytes(&a, options.step_requests);
        assert!(with(needed) && !with(needed - 1));
    }

    /// The server ended when the logits of a step with repetition penalties found no memory beside the caches.
    #[test]
    fn adjusted_logits_have_room_beside_the_caches() {
        let (mut a, mut options) = (llama(), GpuOptions::default());
        // A row has no more tokens than the vocabulary.
        for (positions, most) in [(8192, 8192), (1 << 20, a.vocabulary as u64)] {
            a.positions = positions;
            let [few, many] = [8, 64].map(|requests| {
                options.step_requests = requests;
                tokens(&a, &options, [8 * GIB, 141 * GIB]).expect("there is room")
            });
            let (lost, rows) = (u64::from(few - many) << 17, 56 * 16 * most * 9 / 10);
            assert!(
                lost.abs_diff(rows) < rows / 3,
                "{lost} bytes, {rows} of tokens"
            );
        }
        options.cache_tokens = Some(1000);
        let without = 2 * a.weights() + (1000 << 17) + buffers::bytes(&a, &options);
        let free = without + 64 * 16 * a.vocabulary as u64;
        check(&a, &options, [free, free]).unwrap_err();
        check(&a, &options, [free + (1 << 20), free]).expect("a little more for rows");
    }
}
