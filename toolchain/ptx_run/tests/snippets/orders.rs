//! What orders accesses of blocks and of launches: releases, acquires, scopes, waits for the launch before.

use ptx_run::{Fault, Launch, Memory, Schedule};

use crate::harness::{faults_of, kernel, launch, run};

#[test]
fn blocks_race_in_global_memory() {
    let launch = Launch {
        grid: [2, 1, 1],
        ..launch(32)
    };
    let body = "cvt.u64.u32 %rd3, %r1; add.s64 %rd3, %rd3, %rd0; mov.u32 %r5, %ctaid.x;\nst.global.b32 [%rd3], %r5;";
    for (fault, line) in faults_of(&launch, body) {
        assert!(
            matches!(&fault, Fault::Race { .. }) && line.contains("st.global"),
            "{fault}"
        );
    }
}

#[test]
fn a_flag_orders_what_a_fence_stands_before() {
    // Block 0 writes and sets a flag with an atomic; block 1 waits for the flag and reads.
    let body = "mov.u32 %r5, %ctaid.x; setp.ne.b32 %p1, %r5, 0; @%p1 bra READER;\n\
                st.global.b32 [%rd0], 7;\nFENCE\natom.relaxed.gpu.global.add.u32 %r6, [%rd1], 1;\nret;\n\
                READER: ld.relaxed.gpu.global.b32 %r6, [%rd1]; setp.eq.b32 %p2, %r6, 16843009; @%p2 bra READER;\n\
                FENCE\nld.global.b32 %r7, [%rd0];";
    let launch = Launch {
        grid: [2, 1, 1],
        block: [1, 1, 1],
        ..launch(1)
    };
    for schedule in [Schedule::RoundRobin, Schedule::Random(1)] {
        let mut memory = Memory::new();
        let (data, flag) = (memory.allocate(4), memory.allocate_with(&[1; 4]));
        let good = kernel(2, &body.replace("FENCE", "fence.acq_rel.gpu;"));
        run(&good, &launch, &[data, flag], &mut memory, schedule).unwrap();
        let mut memory = Memory::new();
        let (data, flag) = (memory.allocate(4), memory.allocate_with(&[1; 4]));
        let bad = kernel(
            2,
            &body
                .replacen("FENCE", "", 1)
                .replace("FENCE", "fence.acq_rel.gpu;"),
        );
        let report = run(&bad, &launch, &[data, flag], &mut memory, schedule).unwrap_err();
        assert!(matches!(report.fault, Fault::Race { .. }), "{report}");
    }
}

/// A release for the whole GPU is one for the block, too.
#[test]
fn an_acquire_for_the_block_finds_a_release_for_the_gpu() {
    let body = "setp.ge.u32 %p1, %r0, 32; @%p1 bra READER; setp.ne.b32 %p2, %r0, 0; @%p2 exit;\n\
                st.global.b32 [%rd0], 7; st.release.gpu.global.b32 [%rd1], 1;\nret;\n\
                READER: ld.acquire.cta.global.b32 %r6, [%rd1]; setp.ne.b32 %p3, %r6, 1; @%p3 bra READER;\n\
                ld.global.b32 %r7, [%rd0];";
    for schedule in [Schedule::RoundRobin, Schedule::Random(1)] {
        let mut memory = Memory::new();
        let (data, flag) = (memory.allocate(4), memory.allocate_with(&[0; 4]));
        let module = kernel(2, body);
        run(&module, &launch(64), &[data, flag], &mut memory, schedule)
            .unwrap_or_else(|report| panic!("{report}"));
    }
}

/// Who acquires what the second of two threads stored knows nothing of the first; an atomic of the second passes it on.
#[test]
fn a_store_replaces_what_was_released_before() {
    // The threads take turns by counting, without an order. The first writes the data.
    let body = |second: &str| {
        format!(
            "setp.eq.b32 %p1, %r0, 0; setp.eq.b32 %p2, %r0, 32; setp.eq.b32 %p3, %r0, 64;\n\
             @%p2 bra SECOND; @%p3 bra THIRD; @!%p1 bra END;\n\
             st.global.b32 [%rd0], 7; st.release.gpu.global.b32 [%rd1], 1; bra END;\n\
             SECOND: ld.relaxed.gpu.global.b32 %r3, [%rd1]; setp.ne.b32 %p4, %r3, 1; @%p4 bra SECOND;\n\
             {second} bra END;\n\
             THIRD: ld.acquire.gpu.global.b32 %r3, [%rd1]; setp.ne.b32 %p4, %r3, 2; @%p4 bra THIRD;\n\
             ld.global.b32 %r4, [%rd0];\nEND:"
        )
    };
    let result = |second: &str| {
        let mut memory = Memory::new();
        let (data, flag) = (memory.allocate(4), memory.allocate_with(&[0; 4]));
        let (module, schedule) = (kernel(2, &body(second)), Schedule::RoundRobin);
        run(&module, &launch(96), &[data, flag], &mut memory, schedule)
    };
    result("red.relaxed.gpu.global.add.u32 [%rd1], 1;").unwrap_or_else(|report| panic!("{report}"));
    for store in ["st.relaxed", "st.release"] {
        let report = result(&format!("{store}.gpu.global.b32 [%rd1], 2;")).unwrap_err();
        assert!(matches!(report.fault, Fault::Race { .. }), "{report}");
    }
    // A comparison that fails writes nothing.
    let fails = "atom.release.gpu.global.cas.b32 %r5, [%rd1], 9, 3; red.relaxed.gpu.global.add.u32 [%rd1], 1;";
    result(fails).unwrap_or_else(|report| panic!("{report}"));
}

/// Atomics whose scope is the block are none for another block.
#[test]
fn atomics_of_two_blocks_need_the_scope_of_the_gpu() {
    let add = |scope: &str| format!("red.relaxed.{scope}.global.add.u32 [%rd1], 1;");
    let two = Launch {
        grid: [2, 1, 1],
        ..launch(1)
    };
    for (fault, _) in faults_of(&two, &add("cta")) {
        assert!(matches!(fault, Fault::Race { .. }), "{fault}");
    }
    for (body, launch) in [(add("gpu"), two), (add("cta"), launch(64))] {
        let mut memory = Memory::new();
        let count = memory.allocate_with(&[0; 4]);
        let schedule = Schedule::RoundRobin;
        run(
            &kernel(2, &body),
            &launch,
            &[0, count],
            &mut memory,
            schedule,
        )
        .unwrap();
    }
}

/// A block per row: each exchanges values over a barrier.
#[test]
fn more_blocks_than_16_bits_number() {
    let body = "add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0; bar.sync 0;\n\
                xor.b32 %r4, %r3, 128; ld.shared.b32 %r5, [%r4];";
    let many = Launch {
        grid: [65_600, 1, 1],
        limit: 100_000_000,
        shared: 1024,
        ..launch(64)
    };
    let schedule = Schedule::RoundRobin;
    run(&kernel(0, body), &many, &[], &mut Memory::new(), schedule)
        .unwrap_or_else(|report| panic!("{report}"));
    let more = Launch {
        grid: [65_536, 65_536, 1],
        ..many
    };
    let report = run(&kernel(0, body), &more, &[], &mut Memory::new(), schedule).unwrap_err();
    assert!(matches!(report.fault, Fault::Launch { .. }), "{report}");
}

#[test]
fn a_launch_beside_the_one_before_must_wait_for_it() {
    let mut memory = Memory::new();
    let data = memory.allocate_with(&[0; 4]);
    let write = kernel(
        1,
        "setp.eq.b32 %p1, %r0, 0; @%p1 st.global.b32 [%rd0], 7; griddepcontrol.launch_dependents;",
    );
    let read = |wait: &str| kernel(1, &format!("{wait}\nld.global.b32 %r3, [%rd0];"));
    let beside = Launch {
        overlaps: true,
        ..launch(32)
    };
    let schedule = Schedule::Random(0);
    run(&write, &launch(32), &[data], &mut memory, schedule).unwrap();
    run(
        &read("griddepcontrol.wait;"),
        &beside,
        &[data],
        &mut memory,
        schedule,
    )
    .unwrap();
    run(&write, &launch(32), &[data], &mut memory, schedule).unwrap();
    let report = run(&read(""), &beside, &[data], &mut memory, schedule).unwrap_err();
    assert!(matches!(report.fault, Fault::NoGridWait { .. }), "{report}");
    // An ordinary launch begins after the end of the previous one.
    run(&write, &launch(32), &[data], &mut memory, schedule).unwrap();
    run(&read(""), &launch(32), &[data], &mut memory, schedule).unwrap();
}

/// The writes of the first of many launches are recognised as those of another launch.
#[test]
fn a_chain_of_launches_that_wait_is_ordered() {
    let mut memory = Memory::new();
    let data = memory.allocate_with(&[0; 4]);
    let write = kernel(1, "setp.eq.b32 %p1, %r0, 40; @%p1 st.global.b32 [%rd0], 7;");
    let wait = kernel(1, "griddepcontrol.wait;");
    let read = kernel(1, "griddepcontrol.wait;\nld.global.b32 %r3, [%rd0];");
    let beside = Launch {
        overlaps: true,
        ..launch(64)
    };
    let schedule = Schedule::Random(0);
    run(&write, &launch(64), &[data], &mut memory, schedule).unwrap();
    for launches in [3, 14, 15, 16, 17, 30, 31, 32, 33, 70] {
        for _ in 0..launches {
            run(&wait, &beside, &[data], &mut memory, schedule).unwrap();
        }
        for _ in 0..2 {
            run(&read, &beside, &[data], &mut memory, schedule)
                .unwrap_or_else(|report| panic!("after {launches} launches: {report}"));
        }
        run(&write, &launch(64), &[data], &mut memory, schedule).unwrap();
    }
}

/// A counter with which the previous launch released its partial states, as in decodes with merges.
#[test]
fn a_launch_beside_the_one_before_may_acquire_what_that_released() {
    let mut memory = Memory::new();
    let data = memory.allocate_with(&[0; 8]);
    let count = |order: &str| {
        format!("setp.eq.b32 %p1, %r0, 0; @%p1 atom.{order}.gpu.global.add.u32 %r4, [%rd0+4], 1;")
    };
    let write = kernel(
        1,
        &format!(
            "setp.eq.b32 %p1, %r0, 0; @%p1 st.global.b32 [%rd0], 7; {} griddepcontrol.launch_dependents;",
            count("acq_rel")
        ),
    );
    let read = |order: &str| {
        let load = "@%p1 ld.global.b32 %r3, [%rd0];";
        kernel(1, &format!("{}\n{load}", count(order)))
    };
    let beside = Launch {
        overlaps: true,
        ..launch(32)
    };
    let schedule = Schedule::Random(0);
    run(&write, &launch(32), &[data], &mut memory, schedule).unwrap();
    run(&read("acq_rel"), &beside, &[data], &mut memory, schedule).unwrap();
    run(&write, &launch(32), &[data], &mut memory, schedule).unwrap();
    let report = run(&read("relaxed"), &beside, &[data], &mut memory, schedule).unwrap_err();
    assert!(matches!(report.fault, Fault::NoGridWait { .. }), "{report}");
}
