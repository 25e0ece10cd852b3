//! The known devices. The H200 is the GPU whose times and rates were measured. An H100 has the same SMs: its memory
//! bandwidth was measured, all other values are those of the H200.

use super::{
    DecodeDescription, DeviceDescription, HeadRate, JointDescription, PrefillDescription,
    QueryStep, TileCost, WiderTile,
};
use crate::{
    plan::{
        data::Tile,
        model::hybrid::{PodConfig, PodDescription, Share},
    },
    problem::Compute,
};

/// A description, by its name.
type Known = (&'static str, fn() -> DeviceDescription);

/// All known devices.
pub(super) const KNOWN: [Known; 6] = [
    ("h200", h200),
    ("h100", h100),
    ("a100", a100),
    ("a6000", a6000),
    ("rtx4090", rtx4090),
    ("cpu", cpu),
];

fn h200() -> DeviceDescription {
    // Of a prefill of 128 × 80 beside decodes.
    let of_80 = shares(&[
        (0.326, 1.472, 0.125),
        (0.394, 1.504, 0.053),
        (0.485, 1.556, 0.003),
        (0.561, 1.496, 0.001),
        (0.652, 1.453, 0.001),
        (0.727, 1.401, 0.005),
        (0.780, 1.372, 0.020),
        (0.833, 1.343, 0.045),
        (0.909, 1.312, 0.110),
        (0.970, 1.347, 0.182),
        (1.0, 1.362, 0.204),
    ]);
    DeviceDescription {
        name: "h200".into(),
        compute_capability: (9, 0),
        sms: 132,
        shared_bytes_per_sm: 233_472,
        shared_bytes_per_cta: 232_448,
        registers_per_sm: 65_536,
        l2_bytes: 52_428_800,
        read_bytes_per_ns: 4550.0,
        flops_per_ns: 780_000.0,
        launch_ns: 2500.0,
        merge_ns: 500.0,
        merge_last_ns: 2500.0,
        merge_state_ns: 100.0,
        decode_max_tokens: 8,
        decode_max_rows: 64,
        decode_max_tiles: 4,
        decode: DecodeDescription {
            ctas_per_sm: 1,
            rows: Vec::new(),
            keys: None,
            unit_ns: 1000.0,
            tiles: hopper_decode_tiles(),
            joint: Some(JointDescription {
                cut_ns: 2000.0,
                apart_ns: 3000.0,
                behind_ns: 7000.0,
                bytes: 1.0,
            }),
        },
        prefill: PrefillDescription {
            ctas_per_sm: 1,
            keys: None,
            by_q_len: vec![
                step(None, 128, Some(8)).of_heads(256),
                step(Some(64), 128, None).of_products(Compute::F8),
                step(None, 128, Some(8)).of_products(Compute::F8),
                step(Some(64), 128, None),
                step(Some(4095), 128, Some(1)),
                step(None, 192, Some(8)),
            ],
            of_heads: vec![HeadRate {
                head_dim: 64,
                part: 0.64,
            }],
            unit_ns: 1000.0,
        },
        pod: PodDescription {
            streams_loss: 0.97,
            idle_loss: 0.1,
            decode_alone: 0.95,
            prefill_ns: 7000.0,
            decode_ns: 12_000.0,
            fused_ns: 13_000.0,
            behind_ns: 2500.0,
            tile_ns: 2500.0,
            configs: vec![
                PodConfig {
                    shares: of_80.clone(),
                    kv_bits: Some(16),
                    ..two_kernels("two kernels, prefill 128 × 80", 80, (1.05, 0.989))
                },
                PodConfig {
                    shares: shares(&[
                        (0.326, 1.885, 0.205),
                        (0.394, 1.898, 0.178),
                        (0.485, 1.930, 0.152),
                        (0.561, 1.964, 0.143),
                        (0.652, 1.971, 0.101),
                        (0.727, 1.951, 0.065),
                        (0.780, 1.896, 0.049),
                        (0.833, 1.781, 0.023),
                        (0.909, 1.681, 0.021),
                        (0.970, 1.625, 0.061),
                        (1.0, 1.575, 0.088),
                    ]),
                    kv_bits: Some(16),
                    ..two_kernels("two kernels, prefill 128 × 64", 64, (1.1, 0.970))
                },
                PodConfig {
                    decode: Some(Tile { m: 16, n: 64 }),
                    shares: of_80,
                    kv_bits: Some(16),
                    ..two_kernels("two kernels, 9 to 16 rows", 80, (1.05, 0.989))
                },
                PodConfig {
                    decode: Some(Tile { m: 8, n: 128 }),
                    shares: shares(&[
                        (0.33, 1.147, 0.157),
                        (0.42, 1.157, 0.160),
                        (0.5, 1.199, 0.130),
                        (0.6, 1.255, 0.112),
                        (0.7, 1.300, 0.023),
                        (0.8, 1.298, 0.029),
                        (0.9, 1.269, 0.104),
                        (1.0, 1.395, 0.181),
                    ]),
                    kv_bits: Some(16),
                    ..two_kernels("two kernels, heads of 64", 112, (1.0, 0.96))
                },
                PodConfig {
                    virtual_decodes: 4,
                    prefill_slowdown: 2.0,
                    decode_slowdown: 1.0,
                    overlap_loss: 0.3,
                    ..by_tickets("one kernel, prefill 128 × 64")
                },
                PodConfig {
                    decode: Some(Tile { m: 8, n: 128 }),
                    kv_bits: Some(8),
                    shares: shares(&[
                        (0.33, 1.57, 0.40),
                        (0.5, 1.533, 0.323),
                        (0.667, 1.402, 0.347),
                        (0.79, 1.148, 0.507),
                        (0.91, 1.108, 0.683),
                        (1.0, 1.064, 0.743),
                    ]),
                    ..two_kernels("two kernels, 8 bits", 80, (1.05, 0.989))
                },
                PodConfig {
                    decode: None,
                    kv_bits: Some(8),
                    shares: shares(&[
                        (0.33, 1.13, 0.07),
                        (0.5, 1.13, 0.19),
                        (0.67, 1.13, 0.38),
                        (0.83, 1.13, 0.64),
                        (1.0, 1.13, 0.97),
                    ]),
                    ..two_kernels("SMs apart, 8 bits", 128, (1.0, 1.16))
                },
                PodConfig {
                    decode: None,
                    kv_bits: Some(16),
                    shares: shares(&[
                        (0.33, 1.06, 0.17),
                        (0.5, 1.06, 0.33),
                        (0.67, 1.06, 0.53),
                        (0.83, 1.06, 0.74),
                        (1.0, 1.1, 0.97),
                    ]),
                    ..two_kernels("SMs apart", 128, (0.9, 1.02))
                },
            ],
        },
        variants: None,
    }
}

/// The SXM form.
fn h100() -> DeviceDescription {
    DeviceDescription {
        name: "h100".into(),
        read_bytes_per_ns: 3100.0,
        ..h200()
    }
}

fn a100() -> DeviceDescription {
    DeviceDescription {
        name: "a100".into(),
        compute_capability: (8, 0),
        sms: 108,
        shared_bytes_per_sm: 167_936,
        shared_bytes_per_cta: 166_912,
        registers_per_sm: 65_536,
        l2_bytes: 41_943_040,
        read_bytes_per_ns: 1850.0,
        flops_per_ns: 230_000.0,
        launch_ns: 2500.0,
        merge_ns: 500.0,
        merge_last_ns: 0.0,
        merge_state_ns: 0.0,
        decode_max_tokens: 8,
        decode_max_rows: 0,
        decode_max_tiles: 0,
        decode: DecodeDescription {
            ctas_per_sm: 1,
            rows: Vec::new(),
            keys: None,
            unit_ns: 1000.0,
            tiles: Vec::new(),
            joint: None,
        },
        prefill: PrefillDescription {
            ctas_per_sm: 1,
            keys: None,
            by_q_len: vec![
                step(Some(32), 128, None).of_heads(64),
                step(None, 128, Some(1)).of_heads(64),
                step(Some(32), 128, None),
                step(None, 128, Some(8)),
            ],
            of_heads: Vec::new(),
            unit_ns: 1000.0,
        },
        pod: PodDescription {
            streams_loss: 0.95,
            configs: vec![PodConfig {
                virtual_decodes: 3,
                prefill_slowdown: 1.0,
                decode_slowdown: 1.05,
                overlap_loss: 0.2,
                ..by_tickets("2 CTAs, prefill 128 × 64")
            }],
            ..PodDescription::default()
        },
        variants: None,
    }
}

fn a6000() -> DeviceDescription {
    DeviceDescription {
        name: "a6000".into(),
        compute_capability: (8, 6),
        sms: 84,
        shared_bytes_per_sm: 102_400,
        shared_bytes_per_cta: 101_376,
        l2_bytes: 6_291_456,
        read_bytes_per_ns: 590.0,
        flops_per_ns: 45_000.0,
        pod: PodDescription::default(),
        ..a100()
    }
}

fn rtx4090() -> DeviceDescription {
    DeviceDescription {
        name: "rtx4090".into(),
        compute_capability: (8, 9),
        sms: 128,
        l2_bytes: 75_497_472,
        read_bytes_per_ns: 960.0,
        flops_per_ns: 150_000.0,
        ..a6000()
    }
}

/// One core; the executor sets the number of cores.
fn cpu() -> DeviceDescription {
    DeviceDescription {
        name: "cpu".into(),
        compute_capability: (0, 0),
        sms: 1,
        shared_bytes_per_sm: 1 << 30,
        shared_bytes_per_cta: 1 << 30,
        registers_per_sm: 1 << 30,
        l2_bytes: 32 << 20,
        read_bytes_per_ns: 10.0,
        flops_per_ns: 100.0,
        launch_ns: 1000.0,
        merge_ns: 1000.0,
        merge_last_ns: 0.0,
        merge_state_ns: 0.0,
        decode_max_tokens: 8,
        decode_max_rows: 0,
        decode_max_tiles: 0,
        decode: DecodeDescription {
            ctas_per_sm: 1,
            rows: vec![8, 16, 32, 64, 128],
            keys: Some(64),
            unit_ns: 500.0,
            tiles: Vec::new(),
            joint: None,
        },
        prefill: PrefillDescription {
            ctas_per_sm: 1,
            keys: Some(64),
            by_q_len: vec![step(Some(32), 256, None), step(None, 128, Some(1))],
            of_heads: Vec::new(),
            unit_ns: 500.0,
        },
        pod: PodDescription::default(),
        variants: None,
    }
}

/// Speeds of Hopper's decode kernels, by rows.
fn hopper_decode_tiles() -> Vec<TileCost> {
    let few_rows = |m, flops_per_ns| TileCost {
        m,
        head_dim: None,
        kv_bits: None,
        share: 1,
        alone: 2.1,
        read: 0.94,
        flops_per_ns,
        unit_ns: 1000.0,
        queued_ns: Some(300.0),
        state_ns: None,
        spread_states: None,
        cut_ns: None,
        wider: None,
        few_keys: None,
        smaller: None,
        joined: None,
    };
    let rows_64 = TileCost {
        m: 64,
        head_dim: None,
        kv_bits: None,
        share: 2,
        alone: 2.3,
        read: 0.92,
        flops_per_ns: 555_000.0,
        unit_ns: 1000.0,
        queued_ns: None,
        state_ns: None,
        spread_states: None,
        // A state has 64 rows, and several tokens are merged in a kernel.
        cut_ns: Some(5000.0),
        wider: None,
        few_keys: None,
        smaller: None,
        joined: None,
    };
    // Measured with 1 to 256 requests of 512 to 8,192 keys, each in pieces of 96 to 1,024 (docs/notes/mla.md).
    let latent = TileCost {
        head_dim: Some(576),
        share: 1,
        alone: 1.6,
        flops_per_ns: 785_000.0,
        unit_ns: 3000.0,
        state_ns: Some(60.0),
        spread_states: Some(1.0),
        cut_ns: None,
        // Tokens of several tiles: shorter blocks.
        smaller: Some([1000.0, 2500.0]),
        ..rows_64
    };
    // What a cut adds where it gains about as much: 246 batches of 1 to 64 requests, uncut and in 2 to 6 equal pieces
    // (docs/notes/decode.md). The 3 µs are of the kernel for few keys, whose states are merged in a kernel; 8 × 32 tiles of the
    // same heads have this price, too, though their CTAs may merge.
    let cut = |tile: TileCost, ns| TileCost {
        cut_ns: Some(ns),
        ..tile
    };
    let rows_8 = cut(few_rows(8, 200_000.0), 1500.0);
    // Warps that convert 64 elements a key are hardly faster with the SM's bandwidth to themselves. Fitted to 7 batches of 7 to 49
    // requests, whole and in pieces of 256 to 3,072 keys (docs/notes/fp8.md).
    let converting = TileCost {
        kv_bits: Some(8),
        head_dim: Some(64),
        alone: 1.2,
        read: 0.8,
        unit_ns: 2000.0,
        queued_ns: None,
        ..rows_8
    };
    let rows_16 = few_rows(16, 250_000.0);
    // Measured with requests of 100 to 4,096 keys (docs/notes/decode.md, for 8-bit keys docs/notes/fp8.md).
    let wider = |tile: TileCost, kv_bits, head_dim, units, keys| TileCost {
        kv_bits: Some(kv_bits),
        head_dim: Some(head_dim),
        wider: Some(WiderTile {
            rows: 64,
            units,
            keys,
        }),
        ..tile
    };
    // Each tile converts its keys, so a CTA takes nearly as long for a block if it has the SM alone.
    let of_8_bits = |head_dim, alone, flops_per_ns| TileCost {
        kv_bits: Some(8),
        head_dim: Some(head_dim),
        alone,
        flops_per_ns,
        smaller: Some([1.0, 2000.0]),
        ..rows_64
    };
    vec![
        wider(cut(rows_8, 2000.0), 16, 64, 3.8, [192, 700]),
        TileCost {
            few_keys: Some(4000.0),
            ..wider(cut(rows_8, 3000.0), 16, 128, 3.8, [192, 700])
        },
        converting,
        rows_8,
        wider(cut(rows_16, 2000.0), 16, 64, 1.4, [0, 1500]),
        TileCost {
            few_keys: Some(250.0),
            ..wider(cut(rows_16, 2000.0), 16, 128, 1.4, [0, u32::MAX])
        },
        wider(rows_16, 8, 64, 1.4, [0, 400]),
        wider(rows_16, 8, 128, 1.4, [0, 400]),
        rows_16,
        of_8_bits(64, 1.3, 250_000.0),
        of_8_bits(128, 1.3, 340_000.0),
        // Of products of 1,610 cycles a block (docs/notes/fp8.md).
        TileCost {
            m: 128,
            share: 1,
            smaller: None,
            cut_ns: None,
            unit_ns: 3000.0,
            ..of_8_bits(128, 1.0, 600_000.0)
        },
        TileCost {
            share: 1,
            ..of_8_bits(256, 1.0, 360_000.0)
        },
        TileCost {
            head_dim: Some(256),
            share: 1,
            alone: 1.0,
            ..rows_64
        },
        // Rows of 656 bytes are converted, which takes longer than their products.
        TileCost {
            kv_bits: Some(8),
            alone: 1.3,
            flops_per_ns: 525_000.0,
            ..latent
        },
        latent,
        // Heads of 512: computed from bytes and products, not measured.
        TileCost {
            head_dim: Some(512),
            share: 1,
            alone: 1.0,
            flops_per_ns: 450_000.0,
            unit_ns: 3000.0,
            state_ns: Some(200.0),
            cut_ns: None,
            ..rows_64
        },
        rows_64,
        TileCost {
            m: 128,
            share: 1,
            alone: 1.3,
            read: 0.78,
            flops_per_ns: 640_000.0,
            unit_ns: 3000.0,
            cut_ns: None,
            ..rows_64
        },
    ]
}

const fn step(up_to: Option<u32>, rows: u32, pack: Option<u32>) -> QueryStep {
    QueryStep {
        head_dim: None,
        compute: None,
        up_to,
        rows,
        pack,
    }
}

impl QueryStep {
    const fn of_heads(mut self, head_dim: u32) -> Self {
        self.head_dim = Some(head_dim);
        self
    }

    const fn of_products(mut self, compute: Compute) -> Self {
        self.compute = Some(compute);
        self
    }
}

/// A persistent prefill and a persistent decode, one CTA of each on an SM.
fn two_kernels(
    name: &str,
    prefill_keys: u32,
    (prefill_slowdown, decode_slowdown): (f64, f64),
) -> PodConfig {
    PodConfig {
        name: name.into(),
        by_tickets: false,
        prefill: Tile {
            m: 128,
            n: prefill_keys,
        },
        prefill_pack: None,
        decode: Some(Tile { m: 8, n: 64 }),
        kv_bits: None,
        virtual_decodes: 1,
        prefill_slowdown,
        decode_slowdown,
        overlap_loss: 0.0,
        shares: Vec::new(),
    }
}

/// One kernel with both operations, two CTAs of it on an SM.
fn by_tickets(name: &str) -> PodConfig {
    PodConfig {
        by_tickets: true,
        decode: Some(Tile { m: 16, n: 32 }),
        ..two_kernels(name, 64, (1.0, 1.0))
    }
}

fn shares(measured: &[(f64, f64, f64)]) -> Vec<Share> {
    let share = |&(part, prefill, decode)| Share {
        part,
        prefill,
        decode,
    };
    measured.iter().map(share).collect()
}
