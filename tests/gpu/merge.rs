//! `merge_states` on the GPU against its definition in f64, and against the CPU.

use crate::common::{self, Memory, Rng, Stream, Tolerance, compare, decode, encode};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    abi::MergeRow,
    exec::{
        cpu,
        gpu::{Gpu, MODULES, Module, PartialStates},
    },
    problem::Dtype,
    tensor::Element,
};

#[derive(Clone, Debug)]
struct Shape {
    q_heads: usize,
    head_dim: usize,
    dtype: Dtype,
    /// Slots of each output token; `None`: the token is not merged.
    rows: Vec<Option<usize>>,
    /// Elements between the rows of `out`, beyond the row itself.
    gap: usize,
    wants_lse: bool,
    /// Of 8 states so many saw no key.
    empty_eighths: usize,
    seed: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    let heads = prop_oneof![Just(1_usize), 1..9_usize, Just(32), Just(64)];
    let dim = prop_oneof![
        Just(8_usize),
        Just(64),
        Just(72),
        Just(128),
        Just(192),
        Just(256),
        Just(512)
    ];
    let dtype = prop_oneof![Just(Dtype::BF16), Just(Dtype::F16), Just(Dtype::F32)];
    let slots = prop_oneof![1 => Just(None), 8 => (0..9_usize).prop_map(Some), 1 => (9..160_usize).prop_map(Some)];
    (
        heads,
        dim,
        dtype,
        prop::collection::vec(slots, 0..24),
        (0..3_usize).prop_map(|gap| gap * 8),
        any::<bool>(),
        0..8_usize,
        any::<u64>(),
    )
        .prop_map(
            |(q_heads, head_dim, dtype, rows, gap, wants_lse, empty_eighths, seed)| Shape {
                q_heads,
                head_dim,
                dtype,
                rows,
                gap,
                wants_lse,
                empty_eighths,
                seed,
            },
        )
}

/// Everything a call takes, in host memory.
#[derive(Clone)]
struct Case {
    shape: Shape,
    partial_out: Vec<f32>,
    partial_lse: Vec<f32>,
    rows: Vec<MergeRow>,
    merge_slots: Vec<u32>,
    /// What stands in `out` before: NaN, in the gaps and in rows that are not merged as well.
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Case {
    fn new(shape: &Shape) -> Self {
        let mut rng = Rng(shape.seed);
        let used: usize = shape.rows.iter().flatten().sum();
        // Slots in any order, some of them used by nobody.
        let slots = used + 3;
        let mut order: Vec<u32> = (0..slots as u32).collect();
        rng.shuffle(&mut order);
        let mut rows = Vec::new();
        let mut begin = 0;
        for (token, count) in shape.rows.iter().enumerate() {
            let Some(count) = *count else { continue };
            rows.push(MergeRow {
                token: token as u32,
                slots_begin: begin,
                slots: count as u32,
                reserved: 0,
            });
            begin += count as u32;
        }
        rng.shuffle(&mut rows);
        let merge_slots = order[..used].to_vec();

        let (heads, dim) = (shape.q_heads, shape.head_dim);
        let mut partial_out = rng.floats(slots * heads * dim, -4.0, 4.0);
        let mut partial_lse = rng.floats(slots * heads, -20.0, 20.0);
        for state in 0..slots * heads {
            let unused = !merge_slots.contains(&((state / heads) as u32));
            if unused || rng.below(8) < shape.empty_eighths {
                partial_lse[state] = if unused { f32::NAN } else { f32::NEG_INFINITY };
                partial_out[state * dim..][..dim].fill(f32::NAN);
            }
        }
        let tokens = shape.rows.len();
        Self {
            partial_out,
            partial_lse,
            rows,
            merge_slots,
            out: vec![f32::NAN; tokens * (heads * dim + shape.gap)],
            lse: vec![f32::NAN; tokens * heads],
            shape: shape.clone(),
        }
    }

    /// The bytes of `out` and `lse` after the GPU ran.
    fn on_gpu(&self, gpu: &Gpu) -> (Vec<u8>, Vec<f32>) {
        let Shape {
            q_heads,
            head_dim,
            dtype,
            gap,
            wants_lse,
            ..
        } = self.shape;
        let slots = self.partial_lse.len() / q_heads;
        let tokens = self.shape.rows.len();
        let stream = Stream::new();
        let (partial_out, partial_lse) = (
            Memory::new(&self.partial_out),
            Memory::new(&self.partial_lse),
        );
        let (rows, merge_slots) = (Memory::new(&self.rows), Memory::new(&self.merge_slots));
        let (out, lse) = (
            Memory::new(&encode(dtype, &self.out)),
            Memory::new(&self.lse),
        );
        let partials = PartialStates {
            out: partial_out.tensor(Dtype::F32, [slots, q_heads, head_dim]),
            lse: partial_lse.tensor(Dtype::F32, [slots, q_heads]),
        };
        let out_tensor = out
            .tensor(dtype, [tokens, q_heads, head_dim])
            .with_stride(0, q_heads * head_dim + gap);
        let lse_tensor = lse.tensor(Dtype::F32, [tokens, q_heads]);
        // SAFETY: everything is there as described until the stream is done, rows and slots are in bounds.
        unsafe {
            gpu.merge_states(
                &partials,
                rows.array(),
                merge_slots.array(),
                &out_tensor,
                wants_lse.then_some(&lse_tensor),
                stream.0,
            )
        }
        .expect("a good call");
        stream.wait();
        (out.read(), lse.read())
    }

    /// `out` (without gaps) and `lse` by definition; NaN where nothing is written.
    fn exact(&self) -> (Vec<f64>, Vec<f64>) {
        let (heads, dim, tokens) = (
            self.shape.q_heads,
            self.shape.head_dim,
            self.shape.rows.len(),
        );
        let mut out = vec![f64::NAN; tokens * heads * dim];
        let mut lse = vec![f64::NAN; tokens * heads];
        for row in &self.rows {
            let slots = &self.merge_slots[row.slots_begin as usize..][..row.slots as usize];
            for head in 0..heads {
                let states: Vec<usize> = slots
                    .iter()
                    .map(|&slot| slot as usize * heads + head)
                    .filter(|&state| self.partial_lse[state] > f32::NEG_INFINITY)
                    .collect();
                let log = |state: usize| f64::from(self.partial_lse[state]);
                let max = states
                    .iter()
                    .map(|&s| log(s))
                    .fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = states.iter().map(|&s| (log(s) - max).exp2()).sum();
                let at = row.token as usize * heads + head;
                for i in 0..dim {
                    let weighted = |&s: &usize| {
                        (log(s) - max).exp2() * f64::from(self.partial_out[s * dim + i])
                    };
                    out[at * dim + i] = if states.is_empty() {
                        0.0
                    } else {
                        states.iter().map(weighted).sum::<f64>() / sum
                    };
                }
                if self.shape.wants_lse {
                    lse[at] = if states.is_empty() {
                        f64::NEG_INFINITY
                    } else {
                        (max + sum.log2()) * std::f64::consts::LN_2
                    };
                }
            }
        }
        (out, lse)
    }

    fn on_cpu<T: Element>(&self) -> (Vec<f64>, Vec<f64>) {
        let (heads, dim, tokens) = (
            self.shape.q_heads,
            self.shape.head_dim,
            self.shape.rows.len(),
        );
        let mut out = vec![T::from_f32(f32::NAN); tokens * heads * dim];
        let mut lse = vec![f32::NAN; tokens * heads];
        let partials = cpu::Partials {
            out: &self.partial_out,
            lse: &self.partial_lse,
            q_heads: heads,
            head_dim_v: dim,
        };
        let wanted = self.shape.wants_lse.then_some(&mut lse[..]);
        cpu::merge_states(&partials, &self.rows, &self.merge_slots, &mut out, wanted).unwrap();
        (common::to_f64(&out), common::to_f64(&lse))
    }

    /// Rows without the gaps between them; checks that the gaps still hold what they held.
    fn without_gaps(&self, out: &[u8]) -> Vec<f64> {
        let width = self.shape.q_heads * self.shape.head_dim;
        let values = decode(self.shape.dtype, out);
        let rows = values.chunks(width + self.shape.gap);
        rows.flat_map(|row| {
            assert!(row[width..].iter().all(|x| x.is_nan()), "a gap was written");
            row[..width].to_vec()
        })
        .collect()
    }

    fn check(&self, who: &str, out: &[f64], lse: &[f64]) -> Result<(), String> {
        let (heads, dim, tokens) = (
            self.shape.q_heads,
            self.shape.head_dim,
            self.shape.rows.len(),
        );
        let (right_out, right_lse) = self.exact();
        let tolerance = Tolerance::of(self.shape.dtype);
        compare(
            &format!("{who} out"),
            &[tokens, heads, dim],
            out,
            &right_out,
            tolerance,
        )?;
        let tolerance = Tolerance::of(Dtype::F32);
        compare(
            &format!("{who} lse"),
            &[tokens, heads],
            lse,
            &right_lse,
            tolerance,
        )
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_cpu_merges_as_defined(shape in shape()) {
        let case = Case::new(&shape);
        let (out, lse) = match shape.dtype {
            Dtype::BF16 => case.on_cpu::<bf16>(),
            Dtype::F16 => case.on_cpu::<f16>(),
            _ => case.on_cpu::<f32>(),
        };
        case.check("CPU", &out, &lse).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn the_gpu_merges_as_defined() {
    let Some(gpu) = common::gpu("the_gpu_merges_as_defined") else {
        return;
    };
    let config = ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(shape in shape())| {
        let case = Case::new(&shape);
        let (out, lse) = case.on_gpu(gpu);
        let values = case.without_gaps(&out);
        case.check("GPU", &values, &common::to_f64(&lse)).map_err(TestCaseError::fail)?;
        let again = case.on_gpu(gpu);
        prop_assert_eq!(&out, &again.0, "the same call gives the same bits");
    });
}

#[test]
fn many_rows_fill_the_machine() {
    let Some(gpu) = common::gpu("many_rows_fill_the_machine") else {
        return;
    };
    let case = Case::new(&Shape {
        q_heads: 8,
        head_dim: 128,
        dtype: Dtype::BF16,
        // Some have several sections, and a few more than all warps of a block take at a time.
        rows: (0..3001)
            .map(|row| {
                Some(if row % 100 == 0 {
                    20 + row / 25
                } else {
                    row % 11
                })
            })
            .collect(),
        gap: 0,
        wants_lse: true,
        empty_eighths: 1,
        seed: 7,
    });
    let (out, lse) = case.on_gpu(gpu);
    case.check("GPU", &case.without_gaps(&out), &common::to_f64(&lse))
        .unwrap();

    // So many rows and a few at a time are merged by different kernels: by both to the same bits.
    let row_bytes = out.len() / 3001;
    for rows in case.rows.chunks(200) {
        let few = Case {
            rows: rows.to_vec(),
            ..case.clone()
        };
        check_same_rows(&few, gpu, (&out, &lse), row_bytes);
    }
    // With rows of several sections shared by as many warps as there can be.
    for row in case.rows.iter().rev().filter(|row| row.slots > 16).take(6) {
        let few = Case {
            rows: vec![*row],
            ..case.clone()
        };
        check_same_rows(&few, gpu, (&out, &lse), row_bytes);
    }
}

/// The rows of a case have the same bits as among many.
fn check_same_rows(few: &Case, gpu: &Gpu, (out, lse): (&[u8], &[f32]), row_bytes: usize) {
    let (few_out, few_lse) = few.on_gpu(gpu);
    for row in &few.rows {
        let token = row.token as usize;
        let bytes = token * row_bytes..(token + 1) * row_bytes;
        assert_eq!(few_out[bytes.clone()], out[bytes], "token {token}");
        let heads = token * 8..(token + 1) * 8;
        assert_eq!(few_lse[heads.clone()], lse[heads], "token {token}");
    }
}

#[test]
fn ptx_compiled_by_the_driver_merges_the_same() {
    let Some(gpu) = common::gpu("ptx_compiled_by_the_driver_merges_the_same") else {
        return;
    };
    // Of all families it would take minutes.
    let modules: Vec<_> = MODULES
        .iter()
        .map(|module| Module {
            cubin: module.cubin.clone().filter(|_| module.family != "passes"),
            ..module.clone()
        })
        .collect();
    let from_ptx = Gpu::builder()
        .modules(&modules)
        .compile_ptx(&mut |step| println!("{step}"))
        .build(0)
        .expect("the driver compiles our PTX");
    assert_eq!(from_ptx.arch(), gpu.arch());
    let case = Case::new(&Shape {
        q_heads: 3,
        head_dim: 72,
        dtype: Dtype::F16,
        rows: (0..50).map(|row| Some(row % 7)).collect(),
        gap: 8,
        wants_lse: true,
        empty_eighths: 2,
        seed: 11,
    });
    let (out, lse) = case.on_gpu(&from_ptx);
    case.check("GPU", &case.without_gaps(&out), &common::to_f64(&lse))
        .unwrap();
}
