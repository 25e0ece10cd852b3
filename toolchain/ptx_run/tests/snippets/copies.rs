//! Asynchronous copies.

use ptx_run::{Fault, Launch, Memory, Report, Schedule, Swizzle, TensorMap};

use crate::{
    assert_fault,
    harness::{SCHEDULES, STORE, kernel, launch, run, words},
};

const LANES: &str = "
    cvt.u64.u32 %rd3, %r1; add.s64 %rd3, %rd3, %rd1; add.s32 %r3, %r2, %r1;
    cp.async.ca.shared.global [%r3], [%rd3], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.warp.sync -1;
    xor.b32 %r4, %r1, 4; add.s32 %r4, %r4, %r2; ld.shared.b32 %r10, [%r4];";

#[test]
fn copies_of_lanes() {
    let numbers: Vec<u32> = (0..32).map(|lane| lane * 3).collect();
    let found = words(32, &format!("{LANES}\n{STORE}"), &numbers);
    assert_eq!(
        found,
        (0..32).map(|lane| (lane ^ 1) * 3).collect::<Vec<u32>>()
    );
    let short = LANES
        .replace("[%rd3], 4;", "[%rd3], 4, %r5;")
        .replace("cp.async.ca", "and.b32 %r5, %r0, 4;\ncp.async.ca");
    let found = words(32, &format!("{short}\n{STORE}"), &numbers);
    assert_eq!(
        found,
        (0..32)
            .map(|lane| if lane & 4 == 0 { 0 } else { (lane ^ 1) * 3 })
            .collect::<Vec<u32>>()
    );
}

#[test]
fn copies_of_lanes_that_are_not_awaited() {
    assert_fault!(
        32,
        &LANES.replace("cp.async.wait_group 0;", ""),
        Fault::Race { .. },
        "ld.shared"
    );
    assert_fault!(
        32,
        &LANES.replace("wait_group 0", "wait_group 1"),
        Fault::Race { .. },
        "ld.shared"
    );
    // Each lane waits only for its own copies.
    assert_fault!(
        32,
        &LANES.replace("bar.warp.sync -1;", ""),
        Fault::Race { .. },
        "ld.shared"
    );
}

/// Thread 0 copies 256 bytes; all threads read them.
const BULK: &str = "
    setp.ne.b32 %p1, %r0, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], %r4, [%r2];
READY: bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
    add.s32 %r5, %r3, %r1; ld.shared.b32 %r10, [%r5];";

fn bulk() -> String {
    format!("add.s32 %r3, %r2, 1024; mov.b32 %r4, 256;\n{BULK}")
}

#[test]
fn a_bulk_copy_completes_at_its_barrier() {
    let numbers: Vec<u32> = (0..64).map(|lane| lane + 7).collect();
    assert_eq!(
        words(64, &format!("{}\n{STORE}", bulk()), &numbers),
        numbers
    );
}

#[test]
fn a_bulk_copy_that_is_used_wrongly() {
    let body = bulk();
    // If copies complete at once, a copy that is not waited for does no harm.
    let found = crate::harness::faults_under(
        &SCHEDULES[3..],
        &launch(64),
        &body.replace("@!%p2 bra WAIT;", ""),
    );
    assert!(
        found
            .iter()
            .all(|(fault, line)| matches!(fault, Fault::Race { .. }) && line.contains("ld.shared")),
        "{found:?}"
    );
    assert_fault!(
        64,
        &body.replace("fence.mbarrier_init.release.cluster;", ""),
        Fault::NoProxyFence { .. },
        "cp.async.bulk"
    );
    assert_fault!(
        64,
        &body.replace("_, [%r2], 256;", "_, [%r2], 272;"),
        Fault::Deadlock { .. },
        ""
    );
    assert_fault!(
        64,
        &body.replace("mov.b32 %r4, 256", "mov.b32 %r4, 250"),
        Fault::Operand { .. },
        "cp.async.bulk"
    );
    assert_fault!(
        64,
        &body.replace("%r2, 1024;", "%r2, 1032;"),
        Fault::Misaligned { align: 16, .. },
        "cp.async.bulk"
    );
    // Threads read the memory that the copy overwrites.
    let early = body.replace(
        "@%p1 bra READY;\n",
        "add.s32 %r5, %r3, %r1; st.shared.b32 [%r5], %r0; @%p1 bra READY;\n",
    );
    assert_fault!(
        64,
        &early,
        Fault::Race { .. } | Fault::NoProxyFence { .. },
        ""
    );
}

/// All threads read a copied block and arrive, and thread 0 copies over it. A thread must wait for its load before it arrives,
/// by using what it loaded or by a proxy fence: the arrival may overtake the load, and the copy, too. On an H200 that several
/// processes shared, values were overwritten before they were read.
#[test]
fn a_copy_waits_for_loads_in_flight() {
    let used = bulk().replace(
        "fence.mbarrier_init",
        "mbarrier.init.shared::cta.b64 [%r2+8], 64;\nfence.mbarrier_init",
    ) + "
    add.s32 %r11, %r10, 1;
    mbarrier.arrive.shared::cta.b64 _, [%r2+8];
    @%p1 bra AGAIN;
ALL: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+8], 0; @!%p2 bra ALL;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], %r4, [%r2];
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 1; @!%p2 bra AGAIN;
";
    let numbers: Vec<u32> = (0..64).map(|lane| lane + 7).collect();
    let sums: Vec<u32> = numbers.iter().map(|number| number + 1).collect();
    let store = STORE.replace("%r10", "%r11");
    assert_eq!(words(64, &format!("{used}{store}"), &numbers), sums);

    let later = used.replace("add.s32 %r11, %r10, 1;", "") + "add.s32 %r11, %r10, 1;\n";
    // Whether the copy comes first or the use depends on the schedule.
    assert_fault!(
        64,
        &later,
        Fault::LoadInFlight { .. } | Fault::Race { .. },
        ""
    );
    let moved = later.replace(
        "mbarrier.arrive.shared",
        "mov.b32 %r12, %r10;\nmbarrier.arrive.shared",
    );
    assert_fault!(
        64,
        &moved,
        Fault::LoadInFlight { .. } | Fault::Race { .. },
        ""
    );
    // Before the copy: thread 0 sees the arrival, not the use.
    let soon = later.replace("@%p1 bra AGAIN;", "add.s32 %r11, %r10, 1; @%p1 bra AGAIN;");
    assert_fault!(
        64,
        &soon,
        Fault::LoadInFlight { .. } | Fault::Race { .. },
        ""
    );
    // What is never used need not have been read.
    let unused = used.replace("add.s32 %r11, %r10, 1;", "");
    words(64, &unused, &numbers);

    let fenced = later.replace(
        "mbarrier.arrive.shared",
        "fence.proxy.async.shared::cta;\nmbarrier.arrive.shared",
    );
    assert_eq!(words(64, &format!("{fenced}{store}"), &numbers), sums);
    // A fence after the arrival is too late.
    let after = later.replace(
        "@%p1 bra AGAIN;",
        "fence.proxy.async.shared::cta;\n@%p1 bra AGAIN;",
    );
    assert_fault!(
        64,
        &after,
        Fault::LoadInFlight { .. } | Fault::Race { .. },
        ""
    );
    // A later arrival tells of loads that an earlier one did not cover.
    let twice = used
        .replace(
            "[%r2+8], 64;",
            "[%r2+8], 64;\nmbarrier.init.shared::cta.b64 [%r2+16], 64;",
        )
        .replace(
            "add.s32 %r11",
            "mbarrier.arrive.shared::cta.b64 _, [%r2+16];\nadd.s32 %r11",
        );
    assert_eq!(words(64, &format!("{twice}{store}"), &numbers), sums);
}

#[test]
fn a_phase_must_not_end_before_its_copies() {
    // Fewer bytes are expected than arrive, in two copies: the first ends the phase.
    let body = bulk().replace(
        "[%r3], [%rd1], %r4, [%r2];",
        "[%r3], [%rd1], %r4, [%r2];\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+512], [%rd1], %r4, [%r2];",
    );
    for (fault, _) in crate::harness::faults(64, &body) {
        assert!(
            matches!(
                fault,
                Fault::Mbarrier { .. }
                    | Fault::Deadlock { .. }
                    | Fault::Race { .. }
                    | Fault::UninitialisedRegister { .. }
            ),
            "{fault}"
        );
    }
}

/// Threads write a tile, and thread 0 copies it out.
const OUT: &str = "
    add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.b32 %p1, %r0, 0; @%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], %r4;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END: bar.sync 0;
    st.shared.b32 [%r3], 0;";

#[test]
fn a_bulk_copy_out_of_shared_memory() {
    let body = format!("mov.b32 %r4, 256;\n{OUT}");
    assert_eq!(words(64, &body, &[]), (0..64).collect::<Vec<u32>>());
    assert_fault!(
        64,
        &body.replace("fence.proxy.async.shared::cta;", ""),
        Fault::NoProxyFence { .. },
        "cp.async.bulk"
    );
    assert_fault!(
        64,
        &body.replace("cp.async.bulk.wait_group.read 0;", ""),
        Fault::Unfinished { .. } | Fault::Race { .. },
        ""
    );
    // Nobody waits for a group that is not committed, nor does the wait that comes after it.
    let uncommitted = body
        .replace("cp.async.bulk.commit_group;", "")
        .replace("END: bar.sync 0;\n    st.shared.b32 [%r3], 0;", "END:");
    assert_fault!(64, &uncommitted, Fault::Unfinished { .. }, "");
    assert_fault!(
        64,
        &body.replacen("bar.sync 0;", "", 1),
        Fault::Race { .. } | Fault::UninitialisedRegister { .. },
        ""
    );
    // A fence before the write does not count.
    let early = body
        .replace("fence.proxy.async.shared::cta;", "")
        .replace("add.s32 %r3", "fence.proxy.async.shared::cta;\nadd.s32 %r3");
    assert_fault!(64, &early, Fault::NoProxyFence { .. }, "cp.async.bulk");
}

/// A sum has no value if one of its numbers has none.
#[test]
fn a_reduction_onto_memory_that_nobody_wrote() {
    let body = format!("mov.b32 %r4, 256;\n{OUT}");
    let body = body.replace(
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    );
    assert_fault!(64, &body, Fault::Uninitialised { .. }, "cp.reduce");
}

/// A warp writes, fences and signals. It fences many more times before another warp copies the data.
#[test]
fn a_fence_is_known_after_128_more() {
    let body = "
        mov.b32 %r4, 128; setp.lt.u32 %p1, %r0, 32; @%p1 bra COPIES;
        fence.proxy.async.shared::cta;
        add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0;
        fence.proxy.async.shared::cta;
        bar.arrive 1, 64;
        mov.b32 %r5, 128;
    AGAIN: fence.proxy.async.shared::cta;
        add.s32 %r5, %r5, -1; setp.ne.b32 %p2, %r5, 0; @%p2 bra AGAIN;
        bra END;
    COPIES: bar.sync 1, 64;
        mov.b32 %r5, 3000;
    DELAY: add.s32 %r5, %r5, -1; setp.ne.b32 %p2, %r5, 0; @%p2 bra DELAY;
        add.s32 %r6, %r2, 128; setp.ne.b32 %p3, %r0, 0; @%p3 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r6], %r4;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    END: bar.sync 0;";
    let copied = words(64, body, &[]);
    assert_eq!(copied[..32], (32..64).collect::<Vec<u32>>());
    // As a loader does that waits for flags in global memory.
    let polls = body
        .replace("mov.b32 %r5, 128;", "mov.b32 %r5, 900;")
        .replace(
            "AGAIN: fence.proxy.async.shared::cta;",
            "AGAIN: fence.proxy.async.global;",
        );
    let copied = words(64, &polls, &[]);
    assert_eq!(copied[..32], (32..64).collect::<Vec<u32>>());
}

/// Two dimensions of 4-byte elements, and a box of 32 × 8 with a 128-byte swizzle; coordinates in `%r5`, `%r6`.
fn tensor(column: i32, row: i32, schedule: Schedule) -> Result<Vec<u32>, Box<Report>> {
    let body = format!(
        "add.s32 %r3, %r2, 1024; mov.b32 %r5, {column}; mov.b32 %r6, {row};
        setp.ne.b32 %p1, %r0, 0; @%p1 bra READY;
        mbarrier.init.shared::cta.b64 [%r2], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1, {{%r5, %r6}}], [%r2];
    READY: bar.sync 0;
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
        add.s32 %r7, %r3, %r1; ld.shared.b32 %r10, [%r7];\n{STORE}"
    );
    let mut memory = Memory::new();
    let out = memory.allocate(1024);
    // 40 columns, 10 rows, at a row stride of 48 elements.
    let values: Vec<u8> = (0..480_u32)
        .flat_map(|at| (at / 48 * 100 + at % 48).to_le_bytes())
        .collect();
    let address = memory.allocate_with(&values);
    let map = TensorMap {
        address,
        element_bytes: 4,
        is_f32: false,
        rank: 2,
        dims: [40, 10, 0, 0, 0],
        strides: [192, 0, 0, 0],
        box_dims: [32, 8, 0, 0, 0],
        swizzle: Swizzle::B128,
    };
    let map: Vec<u8> = map
        .encode()
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let map = memory.allocate_with(&map);
    run(
        &kernel(2, &body),
        &Launch {
            block: [256, 1, 1],
            ..launch(256)
        },
        &[out, map],
        &mut memory,
        schedule,
    )?;
    let words = memory.read(out, 1024).unwrap().chunks(4);
    Ok(words
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect())
}

#[test]
fn boxes_begin_at_16_bytes_of_a_row() {
    let report = tensor(-3, 0, Schedule::RoundRobin).expect_err("illegal on the hardware");
    assert!(matches!(report.fault, Fault::Operand { .. }), "{report}");
}

#[test]
fn a_box_of_a_tensor_is_swizzled_and_filled_with_zeros() {
    for (column, row) in [(0, 0), (4, 1), (16, 5), (-4, -2), (36, 9), (40, 0)] {
        for schedule in SCHEDULES {
            let found = tensor(column, row, schedule).expect("no fault");
            for (y, x) in (0..8).flat_map(|y| (0..32).map(move |x| (y, x))) {
                let (c, r) = (column + x, row + y);
                let inside = (0..40).contains(&c) && (0..10).contains(&r);
                let expected = if inside { (r * 100 + c) as u32 } else { 0 };
                let place = (y * 32 + ((x / 4) ^ y) * 4 + x % 4) as usize;
                assert_eq!(
                    found[place], expected,
                    "box at {column}, {row}: element {x}, {y}"
                );
            }
        }
    }
}
