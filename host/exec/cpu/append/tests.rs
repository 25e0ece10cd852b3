use proptest::prelude::*;

use super::*;
use crate::{
    kv::{AppendScales, KvScales, KvStrides, KvView},
    problem::{Dtype, KvLayout},
    tensor::F8E4M3,
};

/// Rows of keys and values side by side.
fn fuse(k: &[f32], k_width: usize, v: &[f32], v_width: usize) -> Vec<f32> {
    let rows = k.chunks(k_width).zip(v.chunks(v_width));
    rows.flat_map(|(k, v)| [k, v].concat()).collect()
}

proptest! {
    #[test]
    fn rows_are_where_a_view_reads_them(
        heads in 1..5_u32,
        dims in (1..4_u32, 1..4_u32),
        (page_size, pages) in (1..20_u32, 1..6_u32),
        nhd in any::<bool>(),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
    ) {
        let spec = Spec::new(heads, heads, dims.0 * 16).with_head_dim_v(dims.1 * 16).with_dtype(Dtype::F32);
        let layout = if nhd { KvLayout::Nhd } else { KvLayout::Hnd };
        let mut free: Vec<u32> = (0..pages * page_size).collect();
        let slots: Vec<u32> = order
            .iter()
            .map(|index| if free.is_empty() { NO_SLOT } else { free.swap_remove(index.index(free.len())) })
            .collect();
        let numbered = |width: u32, first: f32| -> Vec<f32> {
            (0..slots.len() as u32 * width).map(|i| first + i as f32).collect()
        };
        let (k, v) = (numbered(heads * spec.head_dim_qk, 1.0), numbered(heads * spec.head_dim_v, 2.0));
        let slots_in_pool = (pages * page_size * heads) as usize;
        let mut k_pool = vec![0.0; slots_in_pool * spec.head_dim_qk as usize];
        let mut v_pool = vec![0.0; slots_in_pool * spec.head_dim_v as usize];
        let mut pool = KvViewMut::new(&spec, layout, page_size, &mut k_pool, &mut v_pool);
        Cpu::append_paged_kv(&spec, pages, &slots, &k, &v, &mut pool).unwrap();

        // Keys and values one at a time, from fused rows, with 64-bit slots: the pools must be the same.
        let signed: Vec<i64> = slots.iter().map(|&slot| if slot == NO_SLOT { -1 } else { slot.into() }).collect();
        let widths = [spec.head_dim_qk, spec.head_dim_v].map(|dim| (heads * dim) as usize);
        let fused = fuse(&k, widths[0], &v, widths[1]);
        for (first, dim, right) in [(0, spec.head_dim_qk, &k_pool), (widths[0], spec.head_dim_v, &v_pool)] {
            let [heads, dim, pages, page_size] = [heads, dim, pages, page_size].map(|extent| extent as usize);
            let rows = fused.get(first..).unwrap_or(&[]);
            let rows = TensorRef::strided(rows, [slots.len(), heads, dim], [widths[0] + widths[1], dim, 1]).unwrap();
            let mut pool = vec![0.0; right.len()];
            let to = match layout {
                KvLayout::Nhd => TensorMut::new(&mut pool, [pages, page_size, heads, dim]).unwrap(),
                KvLayout::Hnd => TensorMut::new(&mut pool, [pages, heads, page_size, dim]).unwrap().swap_axes(1, 2),
            };
            Cpu::append_rows(&rows, &signed, to).unwrap();
            prop_assert_eq!(&pool, right);
        }

        // Quantised one at a time: the same as both at once.
        let of_heads: Vec<f32> = (0..heads).map(|head| 0.5 + head as f32).collect();
        let empty = |pool: &[f32]| vec![F8E4M3(0); pool.len()];
        let (mut k_narrow, mut v_narrow) = (empty(&k_pool), empty(&v_pool));
        let mut narrow = KvViewMut::new(&spec, layout, page_size, &mut k_narrow, &mut v_narrow);
        let scales = AppendScales::Given(KvScales::Head { k: &of_heads, v: &of_heads });
        let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
        Cpu::append_quantised(&of_8_bits, pages, &slots, &k, &v, &mut narrow, scales).unwrap();
        for (first, dim, right) in [(0, spec.head_dim_qk, &k_narrow), (widths[0], spec.head_dim_v, &v_narrow)] {
            let [heads, dim, pages, page_size] = [heads, dim, pages, page_size].map(|extent| extent as usize);
            let rows = fused.get(first..).unwrap_or(&[]);
            let rows = TensorRef::strided(rows, [slots.len(), heads, dim], [widths[0] + widths[1], dim, 1]).unwrap();
            let mut pool = vec![F8E4M3(0); right.len()];
            let to = match layout {
                KvLayout::Nhd => TensorMut::new(&mut pool, [pages, page_size, heads, dim]).unwrap(),
                KvLayout::Hnd => TensorMut::new(&mut pool, [pages, heads, page_size, dim]).unwrap().swap_axes(1, 2),
            };
            Cpu::append_rows_quantised(&rows, &of_heads, &signed, to).unwrap();
            prop_assert_eq!(&pool, right);
        }

        let view = KvView::new(&spec, layout, page_size, &k_pool, &v_pool);
        let mut k_rows = k.chunks_exact(spec.head_dim_qk as usize);
        let mut v_rows = v.chunks_exact(spec.head_dim_v as usize);
        for &slot in &slots {
            for head in 0..heads {
                let (k, v) = (k_rows.next().unwrap(), v_rows.next().unwrap());
                if slot != NO_SLOT {
                    let (page, offset) = (slot / page_size, slot % page_size);
                    prop_assert_eq!(view.key(page, offset, head, spec.head_dim_qk), k);
                    prop_assert_eq!(view.value(page, offset, head, spec.head_dim_v), v);
                }
            }
        }
        for slot in free {
            for head in 0..heads {
                let untouched = view.key(slot / page_size, slot % page_size, head, spec.head_dim_qk);
                prop_assert!(untouched.iter().all(|&x| x == 0.0));
            }
        }
    }
}

#[test]
fn each_thing_that_is_wrong_has_its_error_and_nothing_is_written() {
    let good = Spec::new(1, 1, 16).with_dtype(Dtype::F32);
    let call = |spec: Spec, page_size: u32, pages: u32, slots: &[u32], tokens: (usize, usize)| {
        let (mut k_pool, mut v_pool) = ([7.0_f32; 8 * 16], [7.0_f32; 8 * 16]);
        let mut pool = KvViewMut::new(&spec, KvLayout::Hnd, page_size, &mut k_pool, &mut v_pool);
        let (k, v) = (vec![1.0; tokens.0 * 16], vec![1.0; tokens.1 * 16]);
        let error = Cpu::append_paged_kv(&spec, pages, slots, &k, &v, &mut pool).unwrap_err();
        assert!(k_pool.iter().chain(&v_pool).all(|&x| x == 7.0), "{error}");
        error
    };
    let length = |error| match error {
        Error::Shape(ShapeError::Length { name, got, .. }) => (name, got),
        other => panic!("{other:?}"),
    };
    assert_eq!(length(call(good, 4, 2, &[0, 1], (1, 2))), ("k", 16));
    assert_eq!(length(call(good, 4, 2, &[0, 1], (2, 3))), ("v", 48));
    let too_small = call(good, 4, 3, &[0], (1, 1));
    assert!(
        matches!(
            too_small,
            Error::Shape(ShapeError::PoolTooSmall { tensor: "k", .. })
        ),
        "{too_small:?}"
    );
    assert!(matches!(
        call(good, 4, 2, &[0, 8], (2, 2)),
        Error::IndexOutOfRange {
            index: 1,
            got: 8,
            limit: 8,
            ..
        }
    ));
    assert!(matches!(
        call(good, 4, 2, &[3, 3], (2, 2)),
        Error::WrittenTwice {
            index: 1,
            got: 3,
            ..
        }
    ));
    let headless = Spec {
        kv_heads: 0,
        ..good
    };
    assert!(matches!(
        call(headless, 4, 2, &[], (0, 0)),
        Error::Extent { got: 0, .. }
    ));
    let differ = |got, expected| Error::DtypesDiffer {
        tensor: "the KV pool",
        got,
        other: "the spec's KV",
        expected,
    };
    let of_16_bits = call(Spec::new(1, 1, 16), 4, 2, &[0], (1, 1));
    assert_eq!(of_16_bits, differ(Dtype::F32, Dtype::BF16));
    let (mut k, mut v) = ([F8E4M3(7); 8 * 16], [F8E4M3(7); 8 * 16]);
    let mut pool = KvViewMut::new(&good, KvLayout::Hnd, 4, &mut k, &mut v);
    let (spec, scales) = (
        good.with_kv_dtype(Dtype::F8E5M2),
        AppendScales::Given(KvScales::One),
    );
    let (of_8_bits, row) = (differ(Dtype::F8E4M3, Dtype::F8E5M2), [1.0_f32; 16]);
    let done = Cpu::append_quantised(&spec, 2, &[0], &row, &row, &mut pool, scales);
    assert_eq!(done, Err(of_8_bits));
    assert!(k.iter().chain(&v).all(|x| x.0 == 7));
    let no_page = call(good, 0, 2, &[], (0, 0));
    assert!(
        matches!(
            no_page,
            Error::Problem(ProblemError::PageSize { got: 0, .. })
        ),
        "{no_page:?}"
    );
}

#[test]
fn wrong_rows_of_one_tensor_are_refused_and_nothing_is_written() {
    let fails = |rows: &TensorRef<'_, 3>, slots: &[i64]| {
        let mut pool = [7.0_f32; 2 * 4 * 2 * 16];
        let to = TensorMut::new(&mut pool, [2, 4, 2, 16]).unwrap();
        let error = Cpu::append_rows(rows, slots, to).unwrap_err();
        assert!(pool.iter().all(|&x| x == 7.0), "{error}");
        error
    };
    let elements = [1.0_f32; 3 * 2 * 16];
    let rows = |shape| TensorRef::new(&elements, shape).unwrap();
    let good = rows([3, 2, 16]);
    let extent = |error| match error {
        Error::Extent { dimension, got, .. } => (dimension, got),
        other => panic!("{other:?}"),
    };
    assert_eq!(extent(fails(&good, &[0, 1])), ("tokens", 3));
    assert_eq!(
        extent(fails(&rows([3, 1, 16]), &[0, 1, 2])),
        ("KV heads", 1)
    );
    let narrow = fails(&rows([3, 2, 8]), &[0, 1, 2]);
    assert_eq!(extent(narrow), ("elements in a head", 8));
    let apart = TensorRef::strided(&elements, [3, 2, 16], [1, 3, 2]).unwrap();
    let apart = fails(&apart, &[0, 1, 2]);
    assert!(matches!(apart, Error::Stride { got: 2, .. }), "{apart:?}");
    let half = [half::f16::ONE; 3 * 2 * 16];
    let half = fails(&TensorRef::new(&half, [3, 2, 16]).unwrap(), &[0, 1, 2]);
    assert!(matches!(
        half,
        Error::DtypesDiffer {
            got: Dtype::F16,
            expected: Dtype::F32,
            ..
        }
    ));
    for (slots, index, got) in [
        ([0, -2, 1], 1, -2),
        ([-1, 0, 8], 2, 8),
        ([1 << 40, 0, 1], 0, 1 << 40),
    ] {
        let outside = fails(&good, &slots);
        assert_eq!(
            outside,
            Error::IndexOutOfRange {
                array: "slots",
                index,
                got,
                limit: 8,
                of: "tokens in the pool"
            }
        );
    }
    assert_eq!(
        fails(&good, &[0, -2, 1]).to_string(),
        "slots[1] is -2: give a number from 0 and below 8, the number of tokens in the pool, or -1 for a token that is not \
         written"
    );
    // The first entry whose place is already taken, whatever the order of the places.
    let twice = append_slots(&[5, 3, -1, -1, 5, 3]);
    assert!(
        matches!(
            twice,
            Error::WrittenTwice {
                index: 4,
                got: 5,
                ..
            }
        ),
        "{twice:?}"
    );
}

/// Two slots of such a pool are one place, of which the later token would be lost.
#[test]
fn pools_whose_rows_overlap_are_refused() {
    let overlaps = |done: Result<(), Error>| {
        let error = done.unwrap_err();
        assert!(error.to_string().contains("no two rows overlap"), "{error}");
    };
    let elements = [1.0_f32; 2 * 16];
    let rows = TensorRef::new(&elements, [2, 1, 16]).unwrap();
    let mut pool = [0.0_f32; 8 * 16];
    let pool_of = |pool| TensorMut::strided(pool, [2, 4, 1, 16], [64, 8, 16, 1]).unwrap();
    overlaps(Cpu::append_rows(&rows, &[1, 2], pool_of(&mut pool)));
    let mut narrow = [F8E4M3(0); 8 * 16];
    let to = TensorMut::strided(&mut narrow, [2, 4, 1, 16], [16, 16, 16, 1]).unwrap();
    overlaps(Cpu::append_rows_quantised(&rows, &[1.0], &[1, 2], to));
    let keys = [1.0_f32; 576];
    let keys = TensorRef::new(&keys, [1, 576]).unwrap();
    let mut latent = vec![F8E4M3(0); 8 * 656];
    let to = TensorMut::strided(&mut latent, [2, 4, 656], [4 * 656, 640, 1]).unwrap();
    overlaps(Cpu::append_latent_656(&keys, &[1], to));

    let spec = Spec::new(1, 1, 16).with_dtype(Dtype::F32);
    let (mut k, mut v) = ([0.0_f32; 8 * 16], [0.0_f32; 8 * 16]);
    let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
    pool.v_strides.token = 0;
    overlaps(Cpu::append_paged_kv(
        &spec,
        2,
        &[1, 2],
        &elements,
        &elements,
        &mut pool,
    ));
    let (mut k, mut v) = (narrow, narrow);
    let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
    pool.k_strides.page = 16;
    let scales = AppendScales::Given(KvScales::One);
    overlaps(Cpu::append_quantised(
        &spec.with_kv_dtype(Dtype::F8E4M3),
        2,
        &[1, 2],
        &elements,
        &elements,
        &mut pool,
        scales,
    ));

    // Scales that are written: those of the two heads of a token would be one.
    let (spec, rows) = (spec.with_kv_dtype(Dtype::F8E4M3), [1.0_f32; 2 * 16]);
    let two_heads = Spec::new(2, 2, 16).with_kv_dtype(Dtype::F8E4M3);
    for (spec, token, page, tokens) in [(two_heads, 1, 8, 1), (spec, 1, 3, 2)] {
        let (mut k, mut v) = ([F8E4M3(0); 8 * 32], [F8E4M3(0); 8 * 32]);
        let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
        let heads = spec.kv_heads;
        let dense = KvStrides {
            page: 4 * heads,
            token: heads,
            head: 1,
            page_size: 4,
        };
        let strides = KvStrides {
            token,
            page,
            ..dense
        };
        let (mut of_keys, mut of_values) = ([0.0; 32], [0.0; 32]);
        let scales = AppendScales::Computed {
            k: &mut of_keys,
            v: &mut of_values,
            k_strides: dense,
            v_strides: strides,
        };
        let slots = &[1, 2][..tokens];
        overlaps(Cpu::append_quantised(
            &spec, 2, slots, &rows, &rows, &mut pool, scales,
        ));
        assert_eq!((k, of_keys), ([F8E4M3(0); 8 * 32], [0.0; 32]));
    }
}

fn append_slots(slots: &[i64]) -> Error {
    let rows = vec![1.0_f32; slots.len() * 16];
    let rows = TensorRef::new(&rows, [slots.len(), 1, 16]).unwrap();
    let mut pool = [0.0_f32; 8 * 16];
    Cpu::append_rows(
        &rows,
        slots,
        TensorMut::new(&mut pool, [2, 4, 1, 16]).unwrap(),
    )
    .unwrap_err()
}
