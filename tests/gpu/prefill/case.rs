//! Random batches of prefills.

use proptest::prelude::*;
use tandem_attn::{
    plan::{DeviceDescription, QueryStep},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

use super::common::Rng;

/// Heads, requests, and how they lie in memory.
#[derive(Clone, Debug)]
pub struct Case {
    pub kv_heads: u32,
    pub group: u32,
    /// Of queries and keys; values have as much, but for 192 it is 128.
    pub head_dim: u32,
    pub rows: u32,
    /// Of a block: those that leave room for decodes are run alone here.
    pub keys: u32,
    pub f16: bool,
    pub cap: bool,
    pub causal: bool,
    pub window: Option<u32>,
    pub layout: KvLayout,
    /// None: a cache without pages.
    pub page_size: Option<u32>,
    pub packed: bool,
    /// The kernels of Ampere, whatever the GPU.
    pub ampere: bool,
    /// Queries, and keys before them.
    pub requests: Vec<(u32, u32)>,
    /// Of the device that is planned for: many cut what few leave whole.
    pub sms: u32,
    pub seed: u64,
}

/// Around the edges of tiles, blocks and pages.
fn length(most: u32) -> impl Strategy<Value = u32> {
    prop_oneof![
        2 => Just(0),
        2 => Just(1),
        6 => 0..most,
        2 => (1..4_u32, 0..3_u32).prop_map(|(tiles, off)| tiles * 64 + off - 1),
        1 => (1..6_u32, 0..3_u32).prop_map(|(blocks, off)| blocks * 80 + off - 1),
    ]
}

/// A random case.
pub fn case() -> impl Strategy<Value = Case> {
    (
        (
            1..3_u32,
            prop_oneof![4 => 1..5_u32, 2 => 5..9_u32, 1 => Just(16)],
        ),
        (
            prop_oneof![
                2 => Just(64_u32),
                4 => Just(128),
                1 => Just(192),
                1 => Just(256),
                1 => Just(80),
                1 => Just(96),
                1 => Just(112),
            ],
            prop_oneof![2 => Just((128_u32, 128)), 1 => Just((128, 80)), 1 => Just((128, 64)), 2 => Just((192, 128))],
        ),
        (
            any::<bool>(),
            prop::bool::weighted(0.2),
            prop::bool::weighted(0.7),
        ),
        prop::option::weighted(0.3, 0..200_u32),
        prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)],
        prop_oneof![
            3 => Just(Some(16_u32)),
            2 => (1..17_u32).prop_map(|eighth| Some(eighth * 8)),
            2 => (1..8_u32).prop_map(Some),
            1 => (1..129_u32).prop_map(Some),
            1 => Just(None),
        ],
        (any::<bool>(), any::<bool>()),
        prop::collection::vec((length(330), length(600)), 1..4),
        (prop_oneof![Just(1_u32), Just(8), Just(132)], any::<u64>()),
    )
        .prop_map(
            |(
                (kv_heads, group),
                (head_dim, (rows, keys)),
                (f16, cap, causal),
                window,
                layout,
                page_size,
                (packed, ampere),
                requests,
                (sms, seed),
            )| Case {
                kv_heads,
                group,
                head_dim,
                // A soft cap and wide heads have tiles of 128 rows only.
                rows: if cap || head_dim > 128 { 128 } else { rows },
                keys: if cap || head_dim != 128 { 128 } else { keys },
                f16,
                // Other heads with a cap are padded.
                cap: cap && head_dim.is_multiple_of(64) && head_dim != 192,
                causal,
                window,
                layout,
                page_size,
                packed,
                ampere: ampere && head_dim <= 128 && head_dim.is_multiple_of(64),
                requests,
                sms,
                seed,
            },
        )
}

impl Case {
    pub fn spec(&self) -> Spec {
        let dtype = if self.f16 { Dtype::F16 } else { Dtype::BF16 };
        let mut spec = Spec::new(self.kv_heads * self.group, self.kv_heads, self.head_dim)
            .with_head_dim_v(if self.head_dim == 192 {
                128
            } else {
                self.head_dim
            })
            .with_dtype(dtype);
        spec.variant.causal = self.causal;
        spec.variant.window_left = self.window;
        spec.variant.soft_cap = self.cap.then_some(20.0);
        spec
    }

    pub fn batch(&self) -> Batch {
        let mut rng = Rng(self.seed);
        let lengths: Vec<u32> = self
            .requests
            .iter()
            .map(|&(q, before)| q + before)
            .collect();
        let mut qo_indptr = vec![0];
        for (queries, _) in &self.requests {
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + queries);
        }
        let Some(page_size) = self.page_size else {
            return Batch::new(qo_indptr, self.contiguous(&lengths));
        };
        let pages: u32 = lengths.iter().map(|len| len.div_ceil(page_size)).sum();
        let mut order: Vec<u32> = (0..pages + 3).collect();
        rng.shuffle(&mut order);
        let mut table = PageTable::new(page_size, pages + 3);
        for len in lengths {
            let count = len.div_ceil(page_size) as usize;
            table.push(&order.split_off(order.len() - count), len);
        }
        Batch::new(qo_indptr, table)
    }

    /// One request after the other in memory, some apart from the one before.
    fn contiguous(&self, lengths: &[u32]) -> PageTable {
        let apart = [0, 1, 40][self.seed as usize % 3];
        let (mut runs, mut end) = (Vec::new(), 0_u32);
        for len in lengths {
            // At multiples of 8 or anywhere.
            let aligned = [1, 8][self.seed as usize / 3 % 2];
            end = (end + apart).next_multiple_of(aligned);
            runs.push(end..end + len);
            end += len;
        }
        PageTable::contiguous(end.next_multiple_of(8), &runs).expect("the runs end within")
    }

    /// Everything as prefill, with this tile.
    pub fn device(&self) -> DeviceDescription {
        let mut device = DeviceDescription::named("h200").expect("a known device");
        device.sms = self.sms;
        device.decode_max_tokens = 0;
        device.decode_max_rows = 0;
        device.decode_max_tiles = 0;
        device.prefill.by_q_len = vec![QueryStep {
            head_dim: None,
            compute: None,
            up_to: None,
            rows: self.rows,
            pack: (!self.packed).then_some(1),
        }];
        device
    }
}
