//! Matrix products and fragments, compared with their definitions.

use ptx_run::{Fault, Memory, Module};

use crate::{
    assert_fault,
    harness::{SCHEDULES, STORE, kernel, launch, run, words},
};

/// Small integers that are exact in bf16, for A, B and C of each test.
fn value(seed: usize, row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3 + seed * 5) % 13) as f32 - 6.0
}

fn bf16(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

fn pair(low: f32, high: f32) -> u32 {
    u32::from(bf16(high)) << 16 | u32::from(bf16(low))
}

#[test]
fn the_product_of_a_warp() {
    // Fragments as PTX defines them, built lane by lane.
    let mut input = Vec::new();
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4 * 2);
        for (row, k) in [(g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8)] {
            input.push(pair(value(1, row, k), value(1, row, k + 1)));
        }
        for k in [t, t + 8] {
            input.push(pair(value(2, k, g), value(2, k + 1, g)));
        }
        input.extend([0, 0]);
    }
    let body = "shl.b32 %r3, %r0, 5; cvt.u64.u32 %rd3, %r3; add.s64 %rd3, %rd3, %rd1;
        ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd3]; ld.global.v2.b32 {%r24, %r25}, [%rd3+16];
        mov.b32 %r30, 0f3F800000; mov.b32 %r31, 0f3F800000; mov.b32 %r32, 0f3F800000; mov.b32 %r33, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r30, %r31, %r32, %r33}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r30, %r31, %r32, %r33};
        mov.b32 %r10, REG;";
    for (register, high, odd) in [
        ("%r30", 0, 0),
        ("%r31", 0, 1),
        ("%r32", 8, 0),
        ("%r33", 8, 1),
    ] {
        let found = words(
            32,
            &format!("{}\n{STORE}", body.replace("REG", register)),
            &input,
        );
        for (lane, &bits) in found.iter().enumerate() {
            let (row, column) = (lane / 4 + high, lane % 4 * 2 + odd);
            let sum: f32 = (0..16)
                .map(|k| value(1, row, k) * value(2, k, column))
                .sum();
            assert_eq!(f32::from_bits(bits), sum + 1.0, "row {row} column {column}");
        }
    }
}

#[test]
fn matrices_are_loaded_stored_and_transposed() {
    // Rows of 16 bytes: element e of row r is r * 16 + e.
    let row = |r: u32| (0..4).map(move |at| (r * 16 + at * 2 + 1) << 16 | (r * 16 + at * 2));
    let input: Vec<u32> = (0..32).flat_map(row).collect();
    let fill = "shl.b32 %r3, %r0, 4; add.s32 %r4, %r2, %r3; cvt.u64.u32 %rd3, %r3; add.s64 %rd3, %rd3, %rd1;
        ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd3]; st.shared.v4.b32 [%r4], {%r20, %r21, %r22, %r23}; bar.warp.sync -1;";
    let element = |matrix: u32, r: u32, e: u32| (matrix * 8 + r) * 16 + e;
    for (trans, register, matrix) in [("", "%r30", 0), ("", "%r33", 3), (".trans", "%r31", 1)] {
        let load = format!(
            "ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r30, %r31, %r32, %r33}}, [%r4]; mov.b32 %r10, {register};"
        );
        let found = words(32, &format!("{fill}{load}{STORE}"), &input);
        for (lane, &bits) in found.iter().enumerate() {
            let (g, t) = (lane as u32 / 4, lane as u32 % 4 * 2);
            let expected = match trans {
                "" => element(matrix, g, t + 1) << 16 | element(matrix, g, t),
                _ => element(matrix, t + 1, g) << 16 | element(matrix, t, g),
            };
            assert_eq!(bits, expected, "lane {lane}{trans}");
        }
    }
    // Load a matrix, transpose it in registers, store it elsewhere, and read it back.
    let there = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r30}, [%r4]; movmatrix.sync.aligned.m8n8.trans.b16 %r31, %r30;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4+1024], {%r31}; bar.warp.sync -1; add.s32 %r5, %r2, %r1; ld.shared.b32 %r10, [%r5+1024];";
    let found = words(32, &format!("{fill}{there}{STORE}"), &input);
    for (at, &bits) in found.iter().enumerate() {
        let (r, e) = (at as u32 / 4, at as u32 % 4 * 2);
        assert_eq!(bits, element(0, e + 1, r) << 16 | element(0, e, r));
    }
}

/// Layout of a `wgmma` operand in shared memory.
#[derive(Clone, Copy)]
struct Layout {
    transposed: bool,
    /// Bytes of a row of the swizzle pattern; 16 if there is none.
    row: usize,
}

impl Layout {
    /// Byte offset of an element (line along M or N, and k), from the definition of the canonical layouts. Leading and
    /// stride offsets are chosen such that nothing overlaps.
    fn offset(self, line: usize, k: usize) -> usize {
        let (outer, inner) = if self.transposed {
            (k, line)
        } else {
            (line, k)
        };
        let per_row = self.row / 2;
        let plain = inner / per_row * 4096
            + outer / 8 * (self.row * 8)
            + outer % 8 * self.row
            + inner % per_row * 2;
        let units = self.row / 16;
        plain ^ (plain / 128 % units * 16)
    }

    fn descriptor(self, base: usize) -> u64 {
        let mode = match self.row {
            16 => 0,
            128 => 1,
            64 => 2,
            _ => 3,
        };
        let stride = (self.row * 8) as u64;
        // Without a swizzle, the leading offset is the distance of core matrices along K if K is contiguous. Otherwise
        // the two offsets are exchanged.
        let (leading, stride) = match (self.row, self.transposed) {
            (16, true) => (stride, 4096),
            _ => (4096, stride),
        };
        (base as u64 >> 4) | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62
    }
}

const N: usize = 16;
const B_AT: usize = 32 << 10;

/// A warpgroup adds two products. Shared memory is filled from global memory in the host's layout; `%rd4` and `%rd5`
/// describe A and B. `load` runs before the products; `types` and `operands` complete the instructions, with `ADD` for
/// whether a product adds.
fn products(load: &str, a: Layout, b: Layout, types: &str, operands: [&str; 2]) -> Module {
    let registers: Vec<String> = (0..N / 2).map(|at| format!("%r{}", 40 + at)).collect();
    let list = registers.join(", ");
    let stores: String = (0..N / 2)
        .map(|at| format!("st.global.b32 [%rd7+{}], %r{};\n", at * 4, 40 + at))
        .collect();
    let [first, second] = operands;
    let (first, second) = (first.replace("ADD", "0"), second.replace("ADD", "1"));
    kernel(
        2,
        &format!(
            "mov.b32 %r3, %r1;
            FILL: cvt.u64.u32 %rd3, %r3; add.s64 %rd3, %rd3, %rd1; ld.global.b32 %r4, [%rd3];
            add.s32 %r5, %r2, %r3; st.shared.b32 [%r5], %r4;
            add.s32 %r3, %r3, 512; setp.lt.u32 %p1, %r3, 65536; @%p1 bra FILL;
            fence.proxy.async.shared::cta;
            bar.sync 0;
            {load}
            mov.b64 %rd4, {}; mov.b64 %rd5, {};
            wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n{N}{types} {{{list}}}, {first};
            wgmma.mma_async.sync.aligned.m64n{N}{types} {{{list}}}, {second};
            wgmma.commit_group.sync.aligned;
            wgmma.wait_group.sync.aligned 0;
            shl.b32 %r6, %r0, 5; cvt.u64.u32 %rd6, %r6; add.s64 %rd7, %rd0, %rd6;
            {stores}",
            a.descriptor(0),
            b.descriptor(B_AT),
        ),
    )
}

/// Runs two equal products of an image under all schedules: each element is twice `sum` of its line and column.
fn assert_products(module: &Module, image: &[u8], what: &str, sum: impl Fn(usize, usize) -> f32) {
    for schedule in SCHEDULES {
        let mut memory = Memory::new();
        let out = memory.allocate(128 * N * 2);
        let source = memory.allocate_with(image);
        run(module, &launch(128), &[out, source], &mut memory, schedule)
            .unwrap_or_else(|report| panic!("{what}: {report}"));
        let found = memory.read(out, 128 * N * 2).unwrap();
        for (at, bytes) in found.chunks_exact(4).enumerate() {
            let (thread, at) = (at / (N / 2), at % (N / 2));
            let got = f32::from_le_bytes(bytes.try_into().unwrap());
            let line = thread / 32 * 16 + thread % 32 / 4 + at % 4 / 2 * 8;
            let column = at / 4 * 8 + thread % 4 * 2 + at % 2;
            assert_eq!(got, 2.0 * sum(line, column), "{what}: {line}, {column}");
        }
    }
}

#[test]
fn the_product_of_a_warpgroup_in_all_layouts() {
    for (transposed, row) in [
        (false, 128),
        (false, 64),
        (false, 32),
        (false, 16),
        (true, 128),
        (true, 64),
        (true, 32),
        (true, 16),
    ] {
        let layout = Layout { transposed, row };
        let mut image = vec![0_u8; 64 << 10];
        let mut put = |at: usize, x: f32| image[at..at + 2].copy_from_slice(&bf16(x).to_le_bytes());
        for k in 0..16 {
            (0..64).for_each(|line| put(layout.offset(line, k), value(3, line, k)));
            (0..N).for_each(|line| put(B_AT + layout.offset(line, k), value(4, k, line)));
        }
        let flag = u8::from(transposed);
        let operands = format!("%rd4, %rd5, ADD, 1, 1, {flag}, {flag}");
        let module = products("", layout, layout, "k16.f32.bf16.bf16", [&operands; 2]);
        let what = format!("transposed {transposed}, rows of {row}");
        assert_products(&module, &image, &what, |line, column| {
            (0..16)
                .map(|k| value(3, line, k) * value(4, k, column))
                .sum()
        });
    }
}

/// e4m3 encoding of small integers: magnitudes 0 … 8, with a sign.
fn e4m3(x: i32) -> u8 {
    let magnitude = [0, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50][x.unsigned_abs() as usize];
    magnitude | u8::from(x < 0) << 7
}

/// 8-bit products: K-major, 32 columns at a time, A in shared memory or in registers.
#[test]
fn the_product_of_a_warpgroup_in_8_bits() {
    let a = |line: usize, k: usize| (line * 7 + k * 3 + line * k) as i32 % 13 - 6;
    let b = |k: usize, column: usize| (k * 5 + column * 11 + k * column) as i32 % 15 - 7;
    for row in [128_usize, 64, 32, 16] {
        let layout = Layout {
            transposed: false,
            row,
        };
        // A layout counts elements of 2 bytes.
        let place = |line, k: usize| layout.offset(line, k / 2) + k % 2;
        let mut image = vec![0_u8; 64 << 10];
        for k in 0..32 {
            (0..64).for_each(|line| image[place(line, k)] = e4m3(a(line, k)));
            (0..N).for_each(|line| image[B_AT + place(line, k)] = e4m3(b(k, line)));
        }
        // After A and B come the fragments of A: four words per thread.
        for thread in 0..128_usize {
            let (g, t) = (thread / 32 * 16 + thread % 32 / 4, thread % 4 * 4);
            for word in 0..4 {
                for byte in 0..4 {
                    let (line, k) = (g + word % 2 * 8, t + word / 2 * 16 + byte);
                    image[(48 << 10) + thread * 16 + word * 4 + byte] = e4m3(a(line, k));
                }
            }
        }
        let load = "shl.b32 %r6, %r0, 4; add.s32 %r6, %r6, %r2;
            ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r6+49152];";
        let operands = [
            "%rd4, %rd5, ADD, 1, 1",
            "{%r20, %r21, %r22, %r23}, %rd5, ADD, 1, 1",
        ];
        let module = products(load, layout, layout, "k32.f32.e4m3.e4m3", operands);
        assert_products(
            &module,
            &image,
            &format!("rows of {row}"),
            |line, column| {
                let sum: i32 = (0..32).map(|k| a(line, k) * b(k, column)).sum();
                sum as f32
            },
        );
    }
}

/// A warpgroup's product with A in registers, with the surrounding code.
const REGISTERS: &str = "
    mov.b32 %r3, %r1;
FILL: add.s32 %r5, %r2, %r3; st.shared.b32 [%r5], 0;
    add.s32 %r3, %r3, 512; setp.lt.u32 %p1, %r3, 1024; @%p1 bra FILL;
    mov.b32 %r20, %r0; mov.b32 %r21, %r0; mov.b32 %r22, %r0; mov.b32 %r23, %r0;
    add.s32 %r24, %r20, 1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %rd4, 4611686293305360384;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r40, %r41, %r42, %r43}, {%r24, %r21, %r22, %r23}, %rd4, 0, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    add.s32 %r10, %r40, 0;";

#[test]
fn registers_belong_to_a_product_until_it_is_awaited() {
    assert_eq!(words(128, &format!("{REGISTERS}\n{STORE}"), &[]), [0; 128]);
    let without = |what: &str| REGISTERS.replace(what, "");
    assert_fault!(
        128,
        &without("wgmma.wait_group.sync.aligned 0;"),
        Fault::OwnedRegister { .. },
        "add.s32 %r10"
    );
    assert_fault!(
        128,
        &without("wgmma.commit_group.sync.aligned;"),
        Fault::OwnedRegister { .. },
        "add.s32 %r10"
    );
    assert_fault!(
        128,
        &REGISTERS.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 1"),
        Fault::OwnedRegister { .. },
        "add.s32 %r10"
    );
    assert_fault!(
        128,
        &without("wgmma.fence.sync.aligned;"),
        Fault::NoProductFence { .. },
        "wgmma.mma_async"
    );
    assert_fault!(
        128,
        &without("fence.proxy.async.shared::cta;"),
        Fault::NoProxyFence { .. },
        "wgmma.mma_async"
    );
    let early = REGISTERS.replace(
        "wgmma.wait_group",
        "add.s32 %r24, %r20, 2;\nwgmma.wait_group",
    );
    assert_fault!(128, &early, Fault::OwnedRegister { .. }, "add.s32 %r24");
    let overwritten = REGISTERS.replace("wgmma.wait_group", "mov.b32 %r40, 0;\nwgmma.wait_group");
    assert_fault!(
        128,
        &overwritten,
        Fault::OwnedRegister { .. },
        "mov.b32 %r40"
    );
    let late = REGISTERS.replace("wgmma.mma_async", "add.s32 %r24, %r20, 2;\nwgmma.mma_async");
    assert_fault!(
        128,
        &late,
        Fault::NoProductFence { what: "A" },
        "wgmma.mma_async"
    );
}

#[test]
fn shared_memory_must_not_change_under_a_product() {
    let body = REGISTERS.replace(
        "wgmma.wait_group",
        "st.shared.b32 [%r2], 0;\nwgmma.wait_group",
    );
    assert_fault!(128, &body, Fault::Race { .. }, "st.shared.b32 [%r2], 0");
}

#[test]
fn all_warps_of_a_warpgroup_issue_the_same_products() {
    let lines = || REGISTERS.lines();
    let product = lines().find(|line| line.contains("mma_async"));
    let product = product.expect("a product");
    // Three warps issue one more.
    let more = format!(
        "setp.lt.u32 %p1, %r0, 96; @%p1 bra MORE; bra ON;\nMORE: {product}\nON: wgmma.commit_group"
    );
    let more = REGISTERS.replace("wgmma.commit_group", &more);
    // Two warps issue the same product at another place of the code.
    let apart = format!(
        "setp.lt.u32 %p1, %r0, 64; @%p1 bra HERE;\n{product}\nbra ON;\nHERE: {product}\nON: "
    );
    let apart = REGISTERS.replace(product, &apart);
    for body in [more, apart] {
        assert_fault!(128, &body, Fault::OtherProduct { .. }, "wgmma.mma_async");
    }
}

#[test]
fn products_need_all_lanes() {
    let body = "mov.b32 %r3, 0; setp.lt.u32 %p1, %r0, 5; @%p1 bra A; bra B;\n\
                A: movmatrix.sync.aligned.m8n8.trans.b16 %r4, %r3;\nB:";
    assert_fault!(32, body, Fault::Diverged { got: 31, .. }, "movmatrix");
}
