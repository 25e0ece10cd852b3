//! Compares with candle's own operations, on the CPU.

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use tandem_candle::{
    Attention, KvLayout, Layer, flash_attn_varlen, flash_attn_varlen_windowed, paged_attention,
    reshape_and_cache, reshape_and_quantise, varlen_attention,
};

const HEADS: (usize, usize) = (8, 2);
const DIM: usize = 64;
const BLOCK: usize = 16;
const SCALE: f32 = 0.11;

fn randn(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0_f32, 1.0, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// Attention of one request in f64: `[queries, heads, dim]` on `[keys, kv_heads, dim]`; the queries are the last
/// tokens.
fn naive(q: &Tensor, k: &Tensor, v: &Tensor, layer: &Layer) -> Result<Tensor> {
    let by_head = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.transpose(0, 1)?.contiguous();
    let (q, k, v) = (by_head(q)?, by_head(k)?, by_head(v)?);
    let (heads, queries, _) = q.dims3()?;
    let (kv_heads, keys, _) = k.dims3()?;
    let repeat = |tensor: &Tensor| {
        let (_, keys, dim) = tensor.dims3()?;
        let shape = (kv_heads, heads / kv_heads, keys, dim);
        tensor
            .unsqueeze(1)?
            .broadcast_as(shape)?
            .reshape((heads, keys, dim))
    };
    let mut logits = (q.matmul(&repeat(&k)?.t()?.contiguous()?)? * f64::from(layer.scale))?;
    if let Some(cap) = layer.soft_cap.map(f64::from) {
        logits = ((logits / cap)?.tanh()? * cap)?;
    }
    let hidden = |query: usize, key: usize| {
        let position = (keys - queries + query) as i64;
        let first = layer
            .window_left
            .map_or(i64::MIN, |window| position - i64::from(window));
        layer.causal && key as i64 > position || (key as i64) < first
    };
    let mask = (0..queries).flat_map(|query| (0..keys).map(move |key| (query, key)));
    let mask: Vec<f64> = mask
        .map(|(query, key)| {
            if hidden(query, key) {
                f64::NEG_INFINITY
            } else {
                0.0
            }
        })
        .collect();
    let mask = Tensor::from_vec(mask, (1, queries, keys), q.device())?;
    let logits = logits.broadcast_add(&mask)?;
    let weights = logits
        .broadcast_sub(&logits.max_keepdim(D::Minus1)?)?
        .exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&repeat(&v)?)?.transpose(0, 1)
}

fn assert_close(got: &Tensor, right: &Tensor) -> Result<()> {
    let tolerance = match got.dtype() {
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    };
    assert_eq!(got.dims(), right.dims());
    let difference = (got.to_dtype(DType::F64)? - right)?
        .abs()?
        .max_all()?
        .to_scalar::<f64>()?;
    assert!(difference < tolerance, "{difference} in {:?}", got.dtype());
    Ok(())
}

/// A cache with the keys of requests of some lengths, in blocks that are not adjacent.
struct Cached {
    keys: Vec<(Tensor, Tensor)>,
    tables: Vec<Vec<usize>>,
    caches: (Tensor, Tensor),
}

impl Cached {
    fn new(lengths: &[usize], layout: KvLayout, dtype: DType) -> Result<Self> {
        let blocks = lengths.iter().map(|len| len.div_ceil(BLOCK)).sum::<usize>() + 2;
        let shape = match layout {
            KvLayout::Nhd => [blocks, BLOCK, HEADS.1, DIM],
            KvLayout::Hnd => [blocks, HEADS.1, BLOCK, DIM],
        };
        let caches = (randn(&shape, dtype)?, randn(&shape, dtype)?);
        // Blocks are used from the last one down, with padding after those in use.
        let mut free = (0..blocks).rev();
        let (mut keys, mut tables) = (Vec::new(), Vec::new());
        for &len in lengths {
            let table: Vec<usize> = free.by_ref().take(len.div_ceil(BLOCK)).collect();
            let (k, v) = (
                randn(&[len, HEADS.1, DIM], dtype)?,
                randn(&[len, HEADS.1, DIM], dtype)?,
            );
            let slots: Vec<i64> = (0..len)
                .map(|at| (table[at / BLOCK] * BLOCK + at % BLOCK) as i64)
                .collect();
            let slots = Tensor::new(slots, &Device::Cpu)?;
            reshape_and_cache(&k, &v, &caches.0, &caches.1, &slots, layout)?;
            keys.push((k, v));
            tables.push(table.into_iter().chain([usize::MAX; 3]).collect());
        }
        Ok(Self {
            keys,
            tables,
            caches,
        })
    }

    fn check(&self, q: &Tensor, queries: &[usize], layer: &Layer, got: &Tensor) -> Result<()> {
        let mut first = 0;
        for (&queries, (k, v)) in queries.iter().zip(&self.keys) {
            if queries > 0 {
                let right = naive(&q.narrow(0, first, queries)?, k, v, layer)?;
                assert_close(&got.narrow(0, first, queries)?, &right)?;
            }
            first += queries;
        }
        Ok(())
    }
}

#[test]
fn hybrid_batches_in_every_type_and_layout_are_candles_attention() -> Result<()> {
    let attention = Attention::new(&Device::Cpu)?;
    let (lengths, queries) = ([37, 1, 128, 50, 9], [1, 1, 40, 0, 9]);
    for (dtype, layout) in [
        (DType::F32, KvLayout::Nhd),
        (DType::F32, KvLayout::Hnd),
        (DType::BF16, KvLayout::Nhd),
        (DType::F16, KvLayout::Hnd),
    ] {
        let cached = Cached::new(&lengths, layout, dtype)?;
        let step = attention.step(&cached.tables, &lengths, &queries, BLOCK)?;
        let q = randn(&[queries.iter().sum(), HEADS.0, DIM], dtype)?;
        let global = Layer::new(SCALE).with_layout(layout);
        for layer in [
            global.clone(),
            global.clone().with_window_left(20),
            global.clone().with_soft_cap(5.0),
            global.clone().non_causal(),
        ] {
            let (k, v) = &cached.caches;
            let got = paged_attention(&q, k, v, &step, &layer)?;
            assert_eq!((got.dtype(), got.is_contiguous()), (dtype, true));
            cached.check(&q, &queries, &layer, &got)?;
        }
        // One plan for each class of layers, regardless of the number of layers.
        let (k, v) = &cached.caches;
        let _ = paged_attention(&q, k, v, &step, &global)?;
        assert_eq!(step.plans(), 4);
    }
    Ok(())
}

#[test]
fn block_tables_and_lengths_may_be_tensors() -> Result<()> {
    let (attention, lengths) = (Attention::new(&Device::Cpu)?, [20_usize, 35]);
    let cached = Cached::new(&lengths, KvLayout::Nhd, DType::F32)?;
    let (q, layer) = (randn(&[2, HEADS.0, DIM], DType::F32)?, Layer::new(SCALE));
    let run = |step| {
        paged_attention(&q, &cached.caches.0, &cached.caches.1, &step, &layer)?.to_vec3::<f32>()
    };
    let right = run(attention.decode(&cached.tables, &lengths, BLOCK)?)?;
    // Rows of equal width, with −1 (or another number) as padding.
    let width = 4;
    let padded = |fill: i64| -> Vec<i64> {
        let row = |table: &Vec<usize>| {
            let used = table
                .iter()
                .filter(|&&block| block < 1000)
                .map(|&block| block as i64);
            used.chain(std::iter::repeat(fill))
                .take(width)
                .collect::<Vec<_>>()
        };
        cached.tables.iter().flat_map(row).collect()
    };
    let tables = |fill| Tensor::from_vec(padded(fill), (2, width), &Device::Cpu);
    let lengths = Tensor::new(&[20_u32, 35], &Device::Cpu)?;
    assert_eq!(
        run(attention.decode(&tables(-1)?, &lengths, BLOCK)?)?,
        right
    );
    let unsigned = tables(0)?.to_dtype(DType::U32)?;
    assert_eq!(
        run(attention.decode(&unsigned, &lengths.to_dtype(DType::I64)?, BLOCK)?)?,
        right
    );
    Ok(())
}

#[test]
fn slots_of_minus_one_are_left_out_and_rows_may_be_slices() -> Result<()> {
    let dtype = DType::F32;
    let (k_cache, v_cache) = (
        randn(&[2, BLOCK, HEADS.1, DIM], dtype)?,
        randn(&[2, BLOCK, HEADS.1, DIM], dtype)?,
    );
    let before = k_cache.copy()?;
    // Keys and values as slices of a fused projection.
    let fused = randn(&[3, HEADS.0 + 2 * HEADS.1, DIM], dtype)?;
    let k = fused.narrow(1, HEADS.0, HEADS.1)?;
    let v = fused.narrow(1, HEADS.0 + HEADS.1, HEADS.1)?;
    let slots = Tensor::new(&[5_i64, -1, 30], &Device::Cpu)?;
    reshape_and_cache(&k, &v, &k_cache, &v_cache, &slots, KvLayout::Nhd)?;
    let rows = |cache: &Tensor| cache.reshape((2 * BLOCK, HEADS.1, DIM))?.to_vec3::<f32>();
    let (now, new, old) = (
        rows(&k_cache)?,
        k.contiguous()?.to_vec3::<f32>()?,
        rows(&before)?,
    );
    for slot in 0..2 * BLOCK {
        let right = match slot {
            5 => &new[0],
            30 => &new[2],
            _ => &old[slot],
        };
        assert_eq!(&now[slot], right, "slot {slot}");
    }
    assert_eq!(rows(&v_cache)?[30], v.contiguous()?.to_vec3::<f32>()?[2]);

    // Queries from the same rows: two tokens of a request in blocks 1 and 0.
    let q = fused.narrow(1, 0, HEADS.0)?.narrow(0, 0, 2)?;
    let step = Attention::new(&Device::Cpu)?.step(&[vec![1_u32, 0]], &[25_u32], &[2_u32], BLOCK)?;
    let got = paged_attention(&q, &k_cache, &v_cache, &step, &Layer::new(SCALE))?;
    let keys = |cache: &Tensor| Tensor::cat(&[cache.i(1)?, cache.i(0)?.narrow(0, 0, 9)?], 0);
    assert_close(
        &got,
        &naive(&q, &keys(&k_cache)?, &keys(&v_cache)?, &Layer::new(SCALE))?,
    )
}

#[test]
fn packed_sequences_are_candles_attention() -> Result<()> {
    let attention = Attention::new(&Device::Cpu)?;
    for (ends_q, ends_k) in [
        ([0_u32, 5, 5, 6, 38], [0_u32, 7, 20, 33, 65]),
        // All lengths are multiples of 16, so keys are read as pages.
        ([0, 16, 32, 33, 48], [0, 32, 48, 64, 96]),
    ] {
        let (queries, keys) = (ends_q[4] as usize, ends_k[4] as usize);
        let q = randn(&[queries, HEADS.0, DIM], DType::F32)?;
        // Keys and values as slices of one tensor.
        let kv = randn(&[keys, 2 * HEADS.1, DIM], DType::F32)?;
        let (k, v) = (kv.narrow(1, 0, HEADS.1)?, kv.narrow(1, HEADS.1, HEADS.1)?);
        let check = |got: &Tensor, layer: &Layer| {
            for (ends_q, ends_k) in ends_q.windows(2).zip(ends_k.windows(2)) {
                let part = |tensor: &Tensor, ends: &[u32]| {
                    tensor.narrow(0, ends[0] as usize, (ends[1] - ends[0]) as usize)
                };
                if ends_q[0] < ends_q[1] {
                    let right = naive(
                        &part(&q, ends_q)?,
                        &part(&k, ends_k)?,
                        &part(&v, ends_k)?,
                        layer,
                    )?;
                    assert_close(&part(got, ends_q)?, &right)?;
                }
            }
            Ok::<_, candle_core::Error>(())
        };
        let step = attention.varlen(&ends_q, &ends_k)?;
        let local = Layer::new(SCALE).with_window_left(3);
        check(&varlen_attention(&q, &k, &v, &step, &local)?, &local)?;
        let ends = |ends: &[u32]| Tensor::new(ends, &Device::Cpu);
        let (ends_q, ends_k) = (ends(&ends_q)?, ends(&ends_k)?);
        for causal in [true, false] {
            let mut layer = Layer::new(SCALE);
            layer.causal = causal;
            let got = flash_attn_varlen(&q, &k, &v, &ends_q, &ends_k, 32, 32, SCALE, causal)?;
            check(&got, &layer)?;
        }
        let windowed = flash_attn_varlen_windowed(
            &q,
            &k,
            &v,
            &ends_q,
            &ends_k,
            32,
            32,
            SCALE,
            Some(3),
            Some(0),
        )?;
        check(&windowed, &local)?;
    }
    Ok(())
}

#[test]
fn tensors_that_do_not_go_together_are_refused_and_nothing_is_written() -> Result<()> {
    let attention = Attention::new(&Device::Cpu)?;
    let says = |result: Result<Tensor>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let layer = Layer::new(SCALE);
    let (q, cache) = (
        randn(&[2, 8, 64], DType::F32)?,
        randn(&[4, 16, 2, 64], DType::F32)?,
    );
    let step = attention.decode(&[vec![3_usize], vec![0]], &[16_usize, 1], 16)?;
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| paged_attention(q, k, v, &step, &layer);
    says(
        attend(&q.narrow(0, 0, 1)?, &cache, &cache),
        "q has 1 tokens: it must be 2",
    );
    says(
        attend(&q, &cache.narrow(0, 0, 2)?, &cache),
        "the key pool has 2 pages",
    );
    says(attend(&q.to_dtype(DType::F64)?, &cache, &cache), "q is F64");
    says(attend(&q, &cache, &cache.to_dtype(DType::F16)?), "v is F16");
    says(
        attend(&q, &cache.reshape((4, 8, 2, 2, 64))?, &cache),
        "[blocks, kv_heads, block_size, head_dim]",
    );
    says(
        attend(
            &q,
            &cache.transpose(2, 3)?.contiguous()?.transpose(2, 3)?,
            &cache,
        ),
        "between the elements of a head",
    );
    says(
        varlen_attention(&q, &q, &q, &step, &layer),
        "use paged_attention",
    );
    let packed = attention.varlen(&[0, 2], &[0, 2])?;
    says(
        paged_attention(&q, &cache, &cache, &packed, &layer),
        "use varlen_attention",
    );
    says(
        varlen_attention(&q, &randn(&[3, 2, 64], DType::F32)?, &q, &packed, &layer),
        "the lengths end at 2",
    );

    let no_step = |result: Result<tandem_candle::Step>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    no_step(
        attention.decode(&[vec![3_usize]], &[17_usize], 16),
        "give at least 2 pages",
    );
    no_step(attention.decode(&[vec![-1_i64]], &[1_usize], 16), "is -1");
    no_step(
        attention.decode(&[vec![3_usize]], &[1_usize, 1], 16),
        "1 block tables and 2 lengths",
    );
    no_step(
        attention.decode(&[vec![3_usize]], &[1_usize], 0),
        "page size",
    );
    no_step(
        attention.step(&[vec![3_usize]], &[1_usize], &[1_usize, 1], 16),
        "2 lengths of queries",
    );
    no_step(attention.varlen(&[0, 3, 2], &[0, 2, 2]), "ascend from 0");
    no_step(attention.varlen(&[0, 3], &[0, 2, 2]), "2 and 3 entries");

    let ends = Tensor::new(&[0_u32, 2], &Device::Cpu)?;
    let k = randn(&[2, 2, 64], DType::F32)?;
    let flash = |most, right| {
        flash_attn_varlen_windowed(&q, &k, &k, &ends, &ends, most, 2, SCALE, None, right)
    };
    says(flash(1, Some(0)), "a sequence has 2 tokens");
    says(flash(2, Some(4)), "only 0 (causal) and none");

    let before = cache.flatten_all()?.to_vec1::<f32>()?;
    let fewer = cache.narrow(0, 0, 3)?;
    let slots = Tensor::new(&[0_i64, 1], &Device::Cpu)?;
    let error = reshape_and_cache(&k, &k, &cache, &fewer, &slots, KvLayout::Nhd).unwrap_err();
    assert!(error.to_string().contains("must be the same"), "{error}");
    let append = |k: &Tensor, v: &Tensor, slots: &[i64]| {
        let (v_cache, slots) = (cache.copy()?, Tensor::new(slots, &Device::Cpu)?);
        let error = reshape_and_cache(k, v, &cache, &v_cache, &slots, KvLayout::Nhd).unwrap_err();
        assert_eq!(cache.flatten_all()?.to_vec1::<f32>()?, before);
        Ok::<_, candle_core::Error>(error.to_string())
    };
    for (error, words) in [
        (append(&k, &k, &[0, 64])?, "below 64"),
        (append(&k, &k, &[0, 0])?, "its own place"),
        (append(&k, &k, &[0])?, "each token has one"),
        (
            append(&k, &randn(&[2, 4, 64], DType::F32)?, &[0, 1])?,
            "its cache 2 of 64",
        ),
    ] {
        assert!(error.contains(words), "{error}");
    }
    Ok(())
}

/// Kernels get only addresses, so types and shapes are checked before a plan is made.
#[test]
fn caches_of_other_types_or_heads_than_the_plan_would_have_are_refused() -> Result<()> {
    let step = Attention::new(&Device::Cpu)?.decode(&[vec![0_usize]], &[1_usize], BLOCK)?;
    let q = randn(&[1, HEADS.0, DIM], DType::BF16)?;
    let cache = |dim, dtype| randn(&[2, BLOCK, HEADS.1, dim], dtype);
    let (k, narrow) = (cache(DIM, DType::BF16)?, cache(DIM / 2, DType::BF16)?);
    for (k, v, words) in [
        (&k, &cache(DIM, DType::F16)?, "one type"),
        (&narrow, &k, "k of"),
    ] {
        let refusal = paged_attention(&q, k, v, &step, &Layer::new(SCALE));
        let text = refusal.expect_err("it is refused").to_string();
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(step.plans(), 0);
    Ok(())
}

#[test]
fn caches_of_8_bits_are_those_of_their_numbers_times_the_scales() -> Result<()> {
    let [k_scale, v_scale] = [0.02_f32, 0.015];
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        let layer = Layer::new(SCALE).with_layout(layout);
        let quantised = layer.clone().with_kv_scales(k_scale, v_scale);
        let blocks = 5;
        let shape = match layout {
            KvLayout::Nhd => [blocks, BLOCK, HEADS.1, DIM],
            KvLayout::Hnd => [blocks, HEADS.1, BLOCK, DIM],
        };
        let empty = || Tensor::zeros(&shape, DType::F8E4M3, &Device::Cpu);
        let (k_cache, v_cache) = (empty()?, empty()?);
        let rows = || randn(&[40, HEADS.1, DIM], DType::BF16);
        let (k, v) = (rows()?, rows()?);
        // The request starts in block 3. One token is left out and follows in the next call.
        let table = [3_usize, 0, 4];
        let slots: Vec<i64> = (0..40)
            .map(|at| (table[at / BLOCK] * BLOCK + at % BLOCK) as i64)
            .collect();
        let mut first = slots.clone();
        first[7] = -1;
        for slots in [first, slots] {
            let slots = Tensor::new(slots, &Device::Cpu)?;
            reshape_and_quantise(&k, &v, &k_cache, &v_cache, &slots, &quantised)?;
        }

        // The same numbers in a wider type, in a separate cache.
        let widened = |cache: &Tensor, scale: f32| -> Result<Tensor> {
            cache.to_dtype(DType::F32)? * f64::from(scale)
        };
        let wide = [widened(&k_cache, k_scale)?, widened(&v_cache, v_scale)?];
        let attention = Attention::new(&Device::Cpu)?;
        let step = attention.step(&[table.to_vec()], &[40_usize], &[9_usize], BLOCK)?;
        let q = randn(&[9, HEADS.0, DIM], DType::F32)?;
        let got = paged_attention(&q, &k_cache, &v_cache, &step, &quantised)?;
        let right = paged_attention(&q, &wide[0], &wide[1], &step, &layer)?;
        assert_close(&got, &right.to_dtype(DType::F64)?)?;

        // They are close to the appended numbers: e4m3 has three mantissa bits.
        let by_token = |cache: &Tensor| match layout {
            KvLayout::Nhd => Ok(cache.clone()),
            KvLayout::Hnd => cache.transpose(1, 2)?.contiguous(),
        };
        let back = by_token(&wide[0])?.i((3, 7))?;
        let error = (back - k.i(7)?.to_dtype(DType::F32)?)?.abs()?.max_all()?;
        let error = error.to_scalar::<f32>()?;
        assert!(error > 0.0 && error < 0.25, "{error}");
    }
    Ok(())
}

/// Keys were written before the values were checked.
#[test]
fn what_is_refused_because_of_the_values_leaves_the_keys() -> Result<()> {
    let slots = Tensor::new(&[0_i64, 3], &Device::Cpu)?;
    let rows = randn(&[2, HEADS.1, DIM], DType::F32)?;
    let strided = randn(&[2, DIM, HEADS.1], DType::F32)?.transpose(1, 2)?;
    let cache = Tensor::zeros((2, BLOCK, HEADS.1, DIM), DType::F32, &Device::Cpu)?;
    let apart = Tensor::zeros((2, BLOCK, DIM, HEADS.1), DType::F32, &Device::Cpu)?;
    let apart = apart.transpose(2, 3)?;
    let is_zero = |cache: &Tensor| {
        let sum = cache.to_dtype(DType::F32)?.abs()?.sum_all()?;
        Ok::<_, candle_core::Error>(sum.to_scalar::<f32>()? == 0.0)
    };
    for (v, v_cache) in [(&strided, &cache.copy()?), (&rows, &apart)] {
        let refused = reshape_and_cache(&rows, v, &cache, v_cache, &slots, KvLayout::Nhd);
        assert!(refused.is_err());
        assert!(is_zero(&cache)?);
    }
    let narrow = cache.to_dtype(DType::F8E4M3)?;
    let wide = rows.to_dtype(DType::F64)?;
    let layer = Layer::new(SCALE);
    let refused = reshape_and_quantise(&rows, &wide, &narrow, &narrow.copy()?, &slots, &layer);
    assert!(refused.is_err());
    assert!(is_zero(&narrow)?);
    Ok(())
}

#[test]
fn scales_and_types_of_caches_that_do_not_go_together_are_refused() -> Result<()> {
    let cache = |dtype| Tensor::zeros((2, BLOCK, HEADS.1, DIM), dtype, &Device::Cpu);
    let rows = randn(&[1, HEADS.1, DIM], DType::BF16)?;
    let slots = Tensor::new(&[0_i64], &Device::Cpu)?;
    let layer = Layer::new(SCALE).with_kv_scales(1.0, 1.0);
    let (wide, narrow) = (cache(DType::BF16)?, cache(DType::F8E4M3)?);
    let refusals = [
        reshape_and_quantise(&rows, &rows, &wide, &wide, &slots, &layer),
        reshape_and_cache(&rows, &rows, &narrow, &narrow, &slots, KvLayout::Nhd),
    ];
    for refusal in refusals {
        let text = refusal.expect_err("they are refused").to_string();
        assert!(
            text.contains("reshape_and_quantise is for caches of F8E4M3"),
            "{text}"
        );
    }
    let step = Attention::new(&Device::Cpu)?.decode(&[vec![0_usize]], &[1_usize], BLOCK)?;
    let q = randn(&[1, HEADS.0, DIM], DType::BF16)?;
    let refusal = paged_attention(&q, &wide, &wide, &step, &layer);
    let text = refusal.expect_err("it is refused").to_string();
    assert!(text.contains("only caches of F8E4M3 have scales"), "{text}");
    for (k, v) in [
        (0.0, 1.0),
        (1.0, f32::NAN),
        (f32::INFINITY, 1.0),
        (-1.0, 1.0),
    ] {
        let layer = layer.clone().with_kv_scales(k, v);
        for refusal in [
            paged_attention(&q, &narrow, &narrow, &step, &layer).map(|_| ()),
            reshape_and_quantise(&rows, &rows, &narrow, &narrow, &slots, &layer),
        ] {
            let text = refusal.expect_err("it is refused").to_string();
            assert!(text.contains("give positive finite numbers"), "{text}");
        }
    }
    Ok(())
}
