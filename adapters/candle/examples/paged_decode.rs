//! One decode step of three requests with a paged cache, through candle:
//! `cargo run -p tandem-candle --example paged_decode`, on a GPU with `--features cuda`.

use candle_core::{DType, Device, Result, Tensor};
use tandem_candle::{Attention, Layer, paged_attention, reshape_and_cache};

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let attention = Attention::new(&device)?;
    let layer = Layer::new(1.0 / 128_f32.sqrt());
    // 64 blocks of 16 tokens, 8 KV heads of 128 elements.
    let cache = |_| Tensor::randn(0_f32, 1.0, (64, 16, 8, 128), &device)?.to_dtype(DType::BF16);
    let (k_cache, v_cache) = (cache(0)?, cache(1)?);

    // Once per step: block tables, lengths including the new tokens, and the slots of the new tokens.
    let tables = [vec![4_usize, 9, 11], vec![30], vec![7, 2]];
    let lengths = [37_usize, 1, 32];
    let step = attention.decode(&tables, &lengths, 16)?;
    let slot = |(blocks, len): (&Vec<usize>, &usize)| {
        (blocks[(len - 1) / 16] * 16 + (len - 1) % 16) as i64
    };
    let slots: Vec<i64> = tables.iter().zip(&lengths).map(slot).collect();
    let slots = Tensor::new(slots, &device)?;

    // Once per layer.
    let heads = |heads| Tensor::randn(0_f32, 1.0, (3, heads, 128), &device)?.to_dtype(DType::BF16);
    let (q, k, v) = (heads(32)?, heads(8)?, heads(8)?);
    reshape_and_cache(&k, &v, &k_cache, &v_cache, &slots, layer.layout)?;
    let out = paged_attention(&q, &k_cache, &v_cache, &step, &layer)?;

    // The second request has only one token, so its output is that token's value.
    let own = v
        .get(1)?
        .to_dtype(DType::F32)?
        .unsqueeze(1)?
        .broadcast_as((8, 4, 128))?
        .reshape((32, 128))?;
    let differs = (out.get(1)?.to_dtype(DType::F32)? - own)?
        .abs()?
        .max_all()?
        .to_scalar::<f32>()?;
    println!(
        "{:?}; of the request with one token, {differs} from its value",
        out.shape()
    );
    Ok(())
}
