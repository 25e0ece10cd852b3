//! Each kind of fault is reported at the instruction that causes it, under every schedule.

use ptx_run::{Fault, Launch, Memory, Module, ParseError, Schedule};

use crate::{
    assert_fault,
    harness::{STORE, kernel, launch, run, words},
};

#[test]
fn an_unknown_instruction_is_an_error_with_its_line() {
    let module = Module::parse(".version 8.0\n.visible .entry k()\n{\n\t.reg .b32 %r<2>;\n\tdp4a.u32.u32 %r1, %r1, %r1, %r1;\n}\n").unwrap();
    let ParseError { line, text, .. } = module.check("k").unwrap_err();
    assert_eq!((line, text.as_str()), (5, "dp4a.u32.u32"));
}

#[test]
fn warps_that_race() {
    let body = "add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0;\n\
                xor.b32 %r4, %r1, 128; add.s32 %r4, %r2, %r4;\nld.shared.b32 %r10, [%r4];";
    for (fault, _) in crate::harness::faults(64, body) {
        assert!(matches!(fault, Fault::Race { .. }), "{fault}");
    }
}

#[test]
fn lanes_of_a_warp_race_without_a_barrier() {
    let body = "add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0;\n\
                xor.b32 %r4, %r1, 4; add.s32 %r4, %r2, %r4;\nld.shared.b32 %r10, [%r4];";
    assert_fault!(
        32,
        body,
        Fault::Race {
            before_access: "written",
            ..
        },
        "ld.shared"
    );
    let mended = body.replace("xor", "bar.warp.sync -1;\nxor");
    let mut memory = Memory::new();
    run(
        &kernel(0, &mended),
        &launch(32),
        &[],
        &mut memory,
        Schedule::Late(3),
    )
    .unwrap();
}

/// 16-bit outputs are stored one by one.
#[test]
fn the_first_half_of_a_word_is_not_forgotten() {
    let halves = |second: &str| {
        format!(
            "setp.ge.u32 %p1, %r0, 32; @%p1 bra READER; setp.ne.b32 %p2, %r0, 0;\n\
             @%p2 bra END; st.shared.b16 [%r2], 1;\n{second} bra END;\n\
             READER: ld.shared.b16 %h1, [%r2];\nEND:"
        )
    };
    for (fault, _) in crate::harness::faults_under(
        &[Schedule::RoundRobin],
        &launch(64),
        &halves("st.shared.b16 [%r2+2], 2;"),
    ) {
        assert!(matches!(fault, Fault::Race { .. }), "{fault}");
    }
    // Two lanes of one instruction write a half each, and a third lane reads.
    let lanes = "setp.gt.u32 %p1, %r0, 1; shl.b32 %r3, %r0, 1; add.s32 %r3, %r2, %r3;\n\
                 @%p1 bra READ; st.shared.b16 [%r3], %r0;\nREAD: ld.shared.b16 %h1, [%r2];";
    assert_fault!(32, lanes, Fault::Race { .. }, "ld.shared");
}

/// What `ld.global.nc` reads must not be written by the launch, before or after, in whatever order.
#[test]
fn data_that_must_be_read_only() {
    let body = "st.global.b32 [%rd0], 7;\nbar.sync 0;\nld.global.nc.b32 %r3, [%rd0];";
    let one = format!("setp.eq.b32 %p1, %r0, 0; @%p1 {body}");
    assert_fault!(64, &one, Fault::ReadOnly { .. }, "ld.global.nc");
}

#[test]
fn bytes_that_nobody_wrote() {
    for space in ["shared.b32 %r10, [%r2+8]", "global.b32 %r10, [%rd0]"] {
        // Uninitialised values may be read, moved and computed with, but must not leave the block or decide anything.
        let body = format!(
            "ld.{space}; add.s32 %r11, %r10, 1; st.shared.b32 [%r2+16], %r11; bar.warp.sync -1;\n"
        );
        let mut memory = Memory::new();
        let out = memory.allocate(64);
        run(
            &kernel(2, &body),
            &launch(1),
            &[out, 0],
            &mut memory,
            Schedule::RoundRobin,
        )
        .unwrap();
        for (fault, line) in crate::harness::faults(
            1,
            &format!("{body}ld.shared.b32 %r12, [%r2+16];\nst.global.b32 [%rd1], %r12;"),
        ) {
            let Fault::UninitialisedRegister {
                read: Some(read), ..
            } = fault
            else {
                panic!("{fault}")
            };
            assert!(read.0.text.contains("ld.shared.b32 %r12") && line.contains("st.global"));
        }
    }
}

#[test]
fn registers_without_a_value() {
    assert_fault!(
        32,
        "add.s32 %r3, %r9, 1; st.global.b32 [%rd1], %r3;",
        Fault::UninitialisedRegister { read: None, .. },
        "st.global"
    );
    assert_fault!(
        32,
        "@%p3 bra AWAY; AWAY:",
        Fault::UninitialisedRegister {
            what: "a guard",
            ..
        },
        "bra"
    );
}

#[test]
fn accesses_outside() {
    assert_fault!(
        32,
        "ld.global.b32 %r10, [%rd1+4096];",
        Fault::OutOfBounds { .. },
        "ld.global"
    );
    assert_fault!(
        32,
        "st.shared.b32 [%r2+65536], %r0;",
        Fault::OutOfBounds { .. },
        "st.shared"
    );
    assert_fault!(
        32,
        "ld.param.b64 %rd3, [p0+16];",
        Fault::OutOfBounds { .. },
        "ld.param"
    );
    assert_fault!(
        32,
        "mov.b64 %rd3, 0; ld.global.b32 %r10, [%rd3];",
        Fault::OutOfBounds { .. },
        "ld.global"
    );
}

#[test]
fn accesses_that_are_not_aligned() {
    assert_fault!(
        32,
        "ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd1+8];",
        Fault::Misaligned { align: 16, .. },
        "ld.global"
    );
}

#[test]
fn a_barrier_in_divergent_code() {
    let body = "setp.lt.u32 %p1, %r0, 16; @%p1 bra HERE; bra MEET;\nHERE: bar.sync 0;\nMEET:";
    assert_fault!(
        32,
        body,
        Fault::Diverged {
            expected: u32::MAX,
            got: 0xFFFF
        },
        "bar.sync"
    );
}

#[test]
fn barriers_with_counts_that_differ() {
    let body =
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra HERE; bar.sync 1, 64; ret;\nHERE: bar.sync 1, 96;";
    assert_fault!(64, body, Fault::Barrier { id: 1, .. }, "bar.sync");
    assert_fault!(
        64,
        "bar.sync 1, 40;",
        Fault::Barrier { id: 1, .. },
        "bar.sync"
    );
    assert_fault!(
        96,
        "bar.arrive 1, 64; bar.sync 2, 96;",
        Fault::Barrier { id: 1, .. },
        ""
    );
}

#[test]
fn a_phase_that_may_not_be_over() {
    // Warps 1 and 2 meet at a barrier at which warp 0 still waits for warp 1. Only the order of the warps separates the
    // phases.
    let body = "setp.ge.u32 %p1, %r0, 64; @%p1 bra MEET; setp.ge.u32 %p1, %r0, 32; @%p1 bra TELL;\n\
                bar.sync 1, 64; bra END;\nTELL: bar.arrive 1, 64;\nMEET: bar.sync 1, 64;\nEND: mov.b32 %r10, 1;";
    assert_fault!(96, body, Fault::Barrier { id: 1, .. }, "bar.");
    // Now they know that warp 0 has passed.
    let body = body.replace("bra END;", "bar.sync 2, 96; bra END;");
    let body = body.replace("MEET:", "MEET: bar.sync 2, 96;");
    assert_eq!(words(96, &format!("{body}\n{STORE}"), &[]), [1; 96]);
}

#[test]
fn a_barrier_that_too_few_come_to() {
    let body = "setp.lt.u32 %p1, %r0, 32; @%p1 bra HERE; ret;\nHERE: bar.sync 1, 64;";
    for (fault, _) in crate::harness::faults(64, body) {
        let Fault::Deadlock { waiting } = fault else {
            panic!("{fault}")
        };
        assert_eq!(waiting.len(), 1);
        assert!(waiting[0].place.text.contains("bar.sync"));
        assert_eq!(waiting[0].what, "barrier 1, 32 of 64 threads are there");
    }
}

/// A tree reduction over a warp, in a block of 16 threads.
#[test]
fn a_shuffle_from_a_lane_that_is_not_there_has_no_value() {
    let body = "shfl.sync.down.b32 %r10, %r0, 8, 31, 65535; setp.lt.u32 %p1, %r0, 8; @!%p1 mov.b32 %r10, 1;";
    let found = words(16, &format!("{body}\n{STORE}"), &[]);
    assert_eq!(found[..8], (8..16).collect::<Vec<u32>>());
    let used = body.replace("@!%p1 mov.b32 %r10, 1;", STORE);
    assert_fault!(16, &used, Fault::UninitialisedRegister { .. }, "st.global");
}

#[test]
fn an_entry_without_a_return_ends() {
    let text = ".version 8.0\n.target sm_80\n.visible .entry k()\n{\n.reg .b32 %r<2>;\nmov.u32 %r1, %tid.x;\n}\n";
    let (module, mut memory) = (Module::parse(text).unwrap(), Memory::new());
    let schedule = Schedule::RoundRobin;
    run(&module, &launch(32), &[], &mut memory, schedule).unwrap();
}

#[test]
fn a_trap_and_a_panic() {
    assert_fault!(32, "trap;", Fault::Trap { .. }, "trap");
}

#[test]
fn more_registers_than_there_are() {
    // 512 threads have 128 registers each; four warps request more than the others released.
    let body = "setp.lt.u32 %p1, %r0, 128; @%p1 bra PRODUCER;\n\
                setmaxnreg.inc.sync.aligned.u32 168;\nret;\nPRODUCER: setmaxnreg.dec.sync.aligned.u32 24;\nret;";
    for (fault, _) in crate::harness::faults(512, body) {
        let Fault::Deadlock { waiting } = fault else {
            panic!("{fault}")
        };
        assert!(waiting.iter().all(|one| one.what.contains("168 registers")));
    }
}

#[test]
fn a_loop_without_end() {
    for (fault, _) in crate::harness::faults(32, "AGAIN: bra AGAIN;") {
        assert!(
            matches!(&fault, Fault::TooLong { limit: 1_000_000, waiting } if waiting[0].place.text.contains("AGAIN")),
            "{fault}"
        );
    }
}

#[test]
fn a_launch_that_cannot_be() {
    let mut memory = Memory::new();
    let module = kernel(1, "");
    for (wrong, parameters) in [
        (
            Launch {
                block: [1024, 1, 1],
                ..launch(32)
            },
            vec![0],
        ),
        (
            Launch {
                shared: 1 << 20,
                ..launch(32)
            },
            vec![0],
        ),
        (launch(32), vec![]),
    ] {
        let report = run(
            &module,
            &wrong,
            &parameters,
            &mut memory,
            Schedule::RoundRobin,
        )
        .unwrap_err();
        assert!(matches!(report.fault, Fault::Launch { .. }), "{report}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let module = kernel(
        2,
        "atom.relaxed.gpu.global.add.u32 %r10, [%rd1], 1; cvt.u64.u32 %rd3, %r1; add.s64 %rd3, %rd0, %rd3; st.global.b32 [%rd3], %r10;",
    );
    let order = |seed| {
        let mut memory = Memory::new();
        let (out, count) = (memory.allocate(1024), memory.allocate_with(&[0; 4]));
        run(
            &module,
            &launch(256),
            &[out, count],
            &mut memory,
            Schedule::Random(seed),
        )
        .unwrap();
        memory.read(out, 1024).unwrap().to_vec()
    };
    assert_eq!(order(1), order(1));
    assert!(
        (2..10).any(|seed| order(seed) != order(1)),
        "seeds do not matter"
    );
}
