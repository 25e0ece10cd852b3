//! Clusters of blocks.

use ptx_run::{Fault, Launch, Memory};

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
