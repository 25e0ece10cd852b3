//! Fragments of matrices: loads, stores, transposition, and products of warps.

use std::ffi::c_void;

use half::{bf16, f16};

use super::{
    common::{Memory, Rng, Stream},
    launches::{Output, raw::Entry},
};

/// Bytes of shared memory that all instructions read or write.
const SHARED: usize = 4096;

/// Words of a lane's results.
const RESULTS: usize = 48;

fn kernel() -> String {
    let mut body = String::new();
    let mut at = 0;
    let mut store = |body: &mut String, registers: &[String]| {
        for register in registers {
            body.push_str(&format!(
                "    st.global.b32 [%l3+{}], {register};\n",
                at * 4
            ));
            at += 1;
        }
    };
    let names = |count: usize| {
        (0..count)
            .map(|i| format!("%r{}", 10 + i))
            .collect::<Vec<_>>()
    };
    for count in [1, 2, 4] {
        for transposed in ["", ".trans"] {
            let list = names(count);
            body.push_str(&format!(
                "    ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{}}}, [%r2];\n",
                list.join(", ")
            ));
            store(&mut body, &list);
        }
    }
    body.push_str("    movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r3;\n");
    store(&mut body, &names(1));
    let floats: Vec<String> = (0..4).map(|i| format!("%f{i}")).collect();
    for element in ["f16", "bf16"] {
        body.push_str(&format!(
            "    mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 {{%f0, %f1, %f2, %f3}}, \
             {{%r20, %r21, %r22, %r23}}, {{%r24, %r25}}, {{%f4, %f5, %f6, %f7}};\n"
        ));
        store(&mut body, &floats);
    }
    body.push_str("    bar.warp.sync -1;\n");
    // Each store has a part of the memory of its own.
    let mut part = 0;
    for count in [1, 2, 4] {
        for transposed in ["", ".trans"] {
            let values: Vec<String> = (20..20 + count).map(|i| format!("%r{i}")).collect();
            body.push_str(&format!(
                "    add.s32 %r30, %r4, {};\n    stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%r30], {{{}}};\n",
                part * 512,
                values.join(", ")
            ));
            part += 1;
        }
    }
    assert!(at <= RESULTS, "{at} results");
    format!(
        ".version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry fragments(.param .u64 from, .param .u64 lanes, .param .u64 to, .param .u64 stored)
{{
    .reg .b32 %r<40>; .reg .f32 %f<8>; .reg .b64 %l<8>; .reg .pred %p<2>;
    ld.param.u64 %l0, [from];
    ld.param.u64 %l1, [lanes];
    ld.param.u64 %l2, [to];
    ld.param.u64 %l5, [stored];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, memory;
    mov.u32 %r5, %r0;
FILL:
    mul.wide.u32 %l4, %r5, 4;
    add.s64 %l4, %l4, %l0;
    ld.global.b32 %r6, [%l4];
    shl.b32 %r7, %r5, 2;
    add.s32 %r7, %r7, %r1;
    st.shared.b32 [%r7], %r6;
    add.s32 %r5, %r5, 32;
    setp.lt.u32 %p0, %r5, {words};
    @%p0 bra FILL;
    bar.warp.sync -1;
    mul.wide.u32 %l4, %r0, 64;
    add.s64 %l4, %l4, %l1;
    ld.global.b32 %r2, [%l4];
    add.s32 %r2, %r2, %r1;
    ld.global.b32 %r4, [%l4+4];
    add.s32 %r4, %r4, %r1;
    ld.global.b32 %r3, [%l4+8];
    ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%l4+16];
    ld.global.v2.b32 {{%r24, %r25}}, [%l4+32];
    ld.global.v4.f32 {{%f4, %f5, %f6, %f7}}, [%l4+48];
    mul.wide.u32 %l3, %r0, {result_bytes};
    add.s64 %l3, %l3, %l2;
{body}
    bar.warp.sync -1;
    mov.u32 %r5, %r0;
DUMP:
    mul.wide.u32 %l4, %r5, 4;
    add.s64 %l4, %l4, %l5;
    shl.b32 %r7, %r5, 2;
    add.s32 %r7, %r7, %r1;
    ld.shared.b32 %r6, [%r7];
    st.global.b32 [%l4], %r6;
    add.s32 %r5, %r5, 32;
    setp.lt.u32 %p0, %r5, {words};
    @%p0 bra DUMP;
    ret;
}}
",
        words = SHARED / 4,
        result_bytes = RESULTS * 4,
    )
}

pub fn run(seed: u64) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed);
    let image: Vec<u32> = (0..SHARED / 4).map(|_| rng.bits() as u32).collect();
    // Places of a load: any rows of 16 bytes. Places of a store: distinct ones of 512 bytes.
    let mut places: Vec<u32> = (0..32).map(|at| at * 16).collect();
    rng.shuffle(&mut places);
    let mut lanes = Vec::new();
    // Small whole numbers have the same bits in both halves' types only by chance: seeds take turns.
    let bits = |x: f32| match seed % 2 {
        0 => f16::from_f32(x).to_bits(),
        _ => bf16::from_f32(x).to_bits(),
    };
    for place in &places {
        let mut lane = [0_u32; 16];
        lane[0] = 16 * rng.below(SHARED / 16) as u32;
        lane[1] = *place;
        lane[2] = rng.bits() as u32;
        for word in &mut lane[4..10] {
            let [low, high] = [(); 2].map(|()| bits(rng.below(7) as f32 - 3.0));
            *word = u32::from(high) << 16 | u32::from(low);
        }
        for word in &mut lane[12..16] {
            *word = (rng.below(100) as f32).to_bits();
        }
        lanes.extend(lane);
    }
    let entry = Entry::load(kernel().as_bytes(), "fragments")?;
    let (from, given) = (Memory::new(&image), Memory::new(&lanes));
    let (to, stored) = (
        Memory::new(&vec![0_u32; 32 * RESULTS]),
        Memory::new(&vec![0_u32; SHARED / 4]),
    );
    let mut addresses = [&from, &given, &to, &stored].map(Memory::address);
    let mut parameters = addresses
        .each_mut()
        .map(|one| (&raw mut *one).cast::<c_void>());
    // SAFETY: the arrays have what the kernel reads and writes.
    unsafe { entry.launch(1, 32, SHARED as u32, &mut parameters, &Stream::new()) }?;
    let mut results = to.read::<u32>();
    // Products of the numbers of the other type are sums whose order counts: they are left out.
    let other = 15 + 4 * (1 - seed as usize % 2);
    for lane in results.chunks_mut(RESULTS) {
        lane[other..other + 4].fill(0);
    }
    Ok(vec![
        Output::exact("results", &results),
        Output::exact("shared memory", &stored.read::<u32>()),
    ])
}
