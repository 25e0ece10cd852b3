//! Clusters of blocks.

use ptx_run::{Fault, Launch, Memory, Module, Schedule};

use crate::harness::{SCHEDULES, faults_of, kernel, launch, run};

macro_rules! assert_fault_of {
    ($body:expr, $pattern:pat, $line:expr) => {
        for (fault, line) in faults_of(&clusters(), $body) {
            assert!(matches!(&fault, $pattern), "{fault}");
            assert!(line.contains($line), "reported at {line:?}: {fault}");
        }
    };
}

/// Each of 4 blocks writes 100 times its number plus the thread's number to the next block, which reads it.
const RING: &str = "
    mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %cluster_nctarank; mov.u32 %r5, %ctaid.x;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    add.s32 %r6, %r3, 1; rem.u32 %r6, %r6, %r4;
    add.s32 %r7, %r2, %r1;
    mapa.shared::cluster.u32 %r8, %r7, %r6;
    mad.lo.s32 %r9, %r5, 100, %r0;
    st.shared::cluster.b32 [%r8], %r9;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ld.shared.b32 %r10, [%r7];
    mov.u32 %r11, %ntid.x; mad.lo.s32 %r12, %r5, %r11, %r0;
    mul.wide.u32 %rd10, %r12, 4; add.s64 %rd10, %rd0, %rd10; st.global.b32 [%rd10], %r10;";

fn clusters() -> Launch {
    Launch {
        grid: [8, 1, 1],
        cluster: 4,
        resident: 6,
        ..launch(64)
    }
}

#[test]
fn blocks_write_into_one_another() {
    for schedule in SCHEDULES {
        let mut memory = Memory::new();
        let out = memory.allocate(8 * 64 * 4);
        let module = kernel(1, RING);
        run(&module, &clusters(), &[out], &mut memory, schedule)
            .unwrap_or_else(|report| panic!("{schedule:?}: {report}"));
        let bytes = memory.read(out, 8 * 64 * 4).unwrap();
        for (at, word) in bytes.chunks(4).enumerate() {
            let (block, thread) = (at / 64, at % 64);
            let from = block / 4 * 4 + (block + 3) % 4;
            let got = u32::from_le_bytes(word.try_into().unwrap()) as usize;
            assert_eq!(got, from * 100 + thread, "block {block} thread {thread}");
        }
    }
}

#[test]
fn what_the_barrier_does_not_order_is_a_race() {
    let body = RING.replace(
        "barrier.cluster.arrive.aligned",
        "barrier.cluster.arrive.relaxed.aligned",
    );
    assert_fault_of!(&body, Fault::Race { .. }, "ld.shared");
}

#[test]
fn a_block_that_may_not_have_begun_has_no_shared_memory() {
    let body = RING.replace(
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;\n",
        "",
    );
    assert_fault_of!(&body, Fault::OutOfBounds { .. }, "st.shared::cluster");
}

#[test]
fn a_rank_that_is_not_there() {
    let body = RING.replace("rem.u32 %r6, %r6, %r4;", "");
    assert_fault_of!(&body, Fault::OutOfBounds { .. }, "st.shared::cluster");
}

#[test]
fn a_warp_that_does_not_arrive() {
    let body = RING.replace(
        "barrier.cluster.arrive.aligned;",
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra ON; barrier.cluster.arrive.aligned; ON:",
    );
    assert_fault_of!(&body, Fault::ClusterBarrier { .. }, "barrier.cluster.wait");
}

/// Each warp sends its first thread's number to the first block of its cluster, which waits for all 8 numbers.
const SENT: &str = "
    mov.u32 %r3, %cluster_ctarank; add.s32 %r4, %r2, 1024;
    or.b32 %r5, %r3, %r0; setp.ne.u32 %p1, %r5, 0;
    @%p1 bra STARTED;
    mbarrier.init.shared::cta.b64 [%r4], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 64;
    STARTED:
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    shr.u32 %r6, %r0, 5; shl.b32 %r7, %r3, 1; add.s32 %r6, %r6, %r7;
    shl.b32 %r7, %r6, 3; add.s32 %r7, %r2, %r7;
    and.b32 %r8, %r0, 31; setp.ne.u32 %p2, %r8, 0;
    cvt.u64.u32 %rd10, %r6;
    mov.u32 %r9, 0;
    mapa.shared::cluster.u32 %r10, %r7, %r9; mapa.shared::cluster.u32 %r11, %r4, %r9;
    @%p2 bra SENT;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r10], %rd10, [%r11];
    SENT:
    setp.ne.u32 %p3, %r3, 0; setp.ge.u32 %p4, %r0, 32; or.pred %p3, %p3, %p4;
    @%p3 bra END;
    WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p5, [%r4], 0;
    @%p5 bra ARRIVED;
    bra WAIT;
    ARRIVED:
    setp.ge.u32 %p6, %r0, 8;
    @%p6 bra END;
    shl.b32 %r12, %r0, 3; add.s32 %r12, %r2, %r12;
    ld.shared.b64 %rd11, [%r12];
    mov.u32 %r13, %ctaid.x; shl.b32 %r13, %r13, 1; add.s32 %r13, %r13, %r0;
    mul.wide.u32 %rd12, %r13, 8; add.s64 %rd12, %rd0, %rd12; st.global.b64 [%rd12], %rd11;
    END:";

#[test]
fn numbers_are_sent_to_the_first_block() {
    for schedule in SCHEDULES {
        let mut memory = Memory::new();
        let out = memory.allocate(16 * 8);
        let module = kernel(1, SENT);
        run(&module, &clusters(), &[out], &mut memory, schedule)
            .unwrap_or_else(|report| panic!("{schedule:?}: {report}"));
        let bytes = memory.read(out, 16 * 8).unwrap();
        for (at, word) in bytes.chunks(8).enumerate() {
            let got = u64::from_le_bytes(word.try_into().unwrap()) as usize;
            assert_eq!(got, at % 8, "number {at}");
        }
    }
}

#[test]
fn a_number_that_nobody_waited_for_is_a_race() {
    let body = SENT.replace("@%p5 bra ARRIVED;\n    bra WAIT;", "");
    assert_fault_of!(
        &body,
        Fault::Race { .. } | Fault::UninitialisedRegister { .. },
        ""
    );
}

#[test]
fn an_mbarrier_that_was_not_fenced_is_a_race() {
    let body = SENT.replace("fence.mbarrier_init.release.cluster;", "");
    assert_fault_of!(&body, Fault::Race { .. }, "mbarrier.try_wait");
}

/// What the macros of `cuda_std` make: an array of the module, and the size of clusters.
#[test]
fn arrays_and_clusters_that_the_code_declares() {
    let text = ".version 8.0\n.target sm_90a\n.shared .align 4 .b8 first[6];\n.shared .align 8 .b8 second[256];\n\
        .shared .align 8 .b8 second_2[4096];\n.extern .shared .align 1024 .b8 window[];\n\
        .visible .entry k(.param .u64 out)\n.maxntid 32, 1, 1\n.reqnctapercluster 2, 1, 1\n{\n\
        .reg .b32 %r<9>; .reg .b64 %rd<3>;\n\
        ld.param.b64 %rd1, [out]; mov.u32 %r1, first; mov.u32 %r2, second; mov.u32 %r3, window;\n\
        st.shared.b32 [%r2], %r1; st.shared.b32 [%r2+252], %r3; mov.u32 %r4, %cluster_nctarank;\n\
        mov.u32 %r5, %ctaid.x; mul.wide.u32 %rd2, %r5, 16; add.s64 %rd1, %rd1, %rd2;\n\
        st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};\nret;\n}\n\
        .visible .entry other()\n{\nret;\n}\n";
    let module = Module::parse(text).unwrap();
    assert_eq!(module.entry("k").unwrap().cluster, Some(2));
    let mut memory = Memory::new();
    let out = memory.allocate(64);
    let pair = Launch {
        grid: [2, 1, 1],
        cluster: 2,
        ..launch(1)
    };
    let schedule = Schedule::RoundRobin;
    run(&module, &pair, &[out], &mut memory, schedule).unwrap_or_else(|report| panic!("{report}"));
    let words = memory.read(out, 16).unwrap().chunks(4);
    let words: Vec<u32> = words
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    assert_eq!(words, [0, 8, 1024, 2]);
    let alone = Launch { cluster: 1, ..pair };
    let report = run(&module, &alone, &[out], &mut memory, schedule).unwrap_err();
    assert!(matches!(report.fault, Fault::Launch { .. }), "{report}");
    module.check("other").unwrap();
}
