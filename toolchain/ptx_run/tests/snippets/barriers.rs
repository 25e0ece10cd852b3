//! Named barriers and mbarriers.

use ptx_run::Fault;

use crate::{
    assert_fault,
    harness::{STORE, words},
};

/// Warp 0 fills a buffer of 128 bytes repeatedly, and warp 1 adds up its contents. Barriers: full at 0, empty at 8;
/// data at 1024.
const RING: &str = "
    setp.ne.b32 %p1, %r0, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 32;
    mbarrier.init.shared::cta.b64 [%r2+8], 32;
READY: bar.sync 0;
    and.b32 %r3, %r1, 127; add.s32 %r3, %r3, %r2;
    mov.b32 %r4, 0; mov.b32 %r10, 0;
    setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUMER;
PRODUCE: and.b32 %r5, %r4, 1; xor.b32 %r6, %r5, 1;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2+8], %r6; @!%p3 bra W1;
    add.s32 %r7, %r4, %r0; st.shared.b32 [%r3+1024], %r7;
    mbarrier.arrive.shared::cta.b64 _, [%r2];
    add.s32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 6; @%p4 bra PRODUCE; bra.uni END;
CONSUMER: and.b32 %r5, %r4, 1;
W2: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], %r5; @!%p3 bra W2;
    xor.b32 %r8, %r3, 4; ld.shared.b32 %r7, [%r8+1024]; add.s32 %r10, %r10, %r7;
    mbarrier.arrive.shared::cta.b64 _, [%r2+8];
    add.s32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 6; @%p4 bra CONSUMER;
END:";

#[test]
fn a_ring_of_one_buffer() {
    let found = words(64, &format!("{RING}\n{STORE}"), &[]);
    let expected: Vec<u32> = (0..32).map(|lane| 6 * (lane ^ 1) + 15).collect();
    assert_eq!(found[32..], expected);
}

#[test]
fn a_ring_whose_producer_does_not_wait() {
    let body = RING.replace("@!%p3 bra W1;", "");
    // Or the producer finishes everything before the consumer arrives.
    assert_fault!(
        64,
        &body,
        Fault::Race { .. } | Fault::Mbarrier { .. } | Fault::Deadlock { .. },
        ""
    );
}

#[test]
fn a_ring_whose_consumer_does_not_wait() {
    let body = RING.replace("@!%p3 bra W2;", "");
    assert_fault!(
        64,
        &body,
        Fault::Race { .. } | Fault::Deadlock { .. } | Fault::UninitialisedRegister { .. },
        ""
    );
}

#[test]
fn a_wait_for_the_wrong_parity() {
    let body = RING.replace(
        "CONSUMER: and.b32 %r5, %r4, 1;",
        "CONSUMER: add.s32 %r5, %r4, 1; and.b32 %r5, %r5, 1;",
    );
    assert_fault!(
        64,
        &body,
        Fault::Race { .. } | Fault::UninitialisedRegister { .. } | Fault::Deadlock { .. },
        ""
    );
    assert_fault!(
        64,
        &RING.replace("and.b32 %r5, %r4, 1;\nW2", "and.b32 %r5, %r4, 7;\nW2"),
        Fault::Mbarrier { .. },
        "try_wait"
    );
}

/// Lane 0 and the other lanes of warp 0 wait for the same phase at two places; lane 0 reads data that warp 1 stores
/// late. Barrier at 0; data at 1024.
const TWO_PLACES: &str = "
    setp.ne.b32 %p1, %r0, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 32;
READY: bar.sync 0;
    mov.b32 %r10, 0; mov.b32 %r4, 0; add.s32 %r3, %r2, %r1;
    setp.ge.u32 %p2, %r0, 32; @%p2 bra PRODUCER;
    @%p1 bra OTHERS;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra W1;
    ld.shared.b32 %r10, [%r2+1152]; bra END;
OTHERS:
W2: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra W2;
    bra END;
PRODUCER: add.s32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 10000; @%p4 bra PRODUCER;
    st.shared.b32 [%r3+1024], %r0;
    mbarrier.arrive.shared::cta.b64 _, [%r2];
END:";

#[test]
fn lanes_that_wait_in_two_places() {
    let found = words(64, &format!("{TWO_PLACES}\n{STORE}"), &[]);
    assert_eq!(found[0], 32);
    assert_eq!(found[1..], [0; 63]);
}

#[test]
fn a_lane_that_does_not_wait_while_others_do() {
    let body = TWO_PLACES.replace("@!%p3 bra W1;", "");
    assert_fault!(
        64,
        &format!("{body}\n{STORE}"),
        Fault::Race { .. } | Fault::UninitialisedRegister { .. },
        ""
    );
}

#[test]
fn an_arrival_that_is_missing_ends_in_a_deadlock() {
    let body = RING.replace("mbarrier.arrive.shared::cta.b64 _, [%r2+8];", "");
    for (fault, _) in crate::harness::faults(64, &body) {
        let Fault::Deadlock { waiting } = fault else {
            panic!("{fault}")
        };
        assert!(
            waiting
                .iter()
                .all(|one| one.place.text.contains("try_wait")),
            "{waiting:?}"
        );
        assert!(
            waiting.iter().any(|one| one
                .what
                .contains("mbarrier 0x8 parity 0: phase 0 lacks 32 arrivals")),
            "{waiting:?}"
        );
    }
}

#[test]
fn more_arrivals_than_were_said() {
    let body = RING.replace("[%r2], 32;", "[%r2], 31;");
    assert_fault!(64, &body, Fault::Mbarrier { .. }, "mbarrier.arrive");
}

#[test]
fn a_barrier_that_is_used_before_it_is_there() {
    let body = RING.replace("READY: bar.sync 0;", "READY:");
    assert_fault!(
        64,
        &body,
        Fault::Mbarrier { .. } | Fault::Race { .. },
        "mbarrier."
    );
}

#[test]
fn data_over_a_barrier() {
    let body = RING.replace(
        "st.shared.b32 [%r3+1024], %r7;",
        "st.shared.b32 [%r3], %r7;",
    );
    assert_fault!(64, &body, Fault::Mbarrier { .. }, "st.shared");
}

#[test]
fn named_barriers_of_some_warps() {
    // Warp 0 arrives and continues; warp 1 waits for its writes.
    let body = "mov.b32 %r10, 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra WAITER;\n\
                add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0; bar.arrive 3, 64; bra END;\n\
                WAITER: bar.sync 3, 64; xor.b32 %r3, %r1, 132; add.s32 %r3, %r3, %r2; ld.shared.b32 %r10, [%r3];\nEND:";
    let found = words(64, &format!("{body}\n{STORE}"), &[]);
    assert_eq!(
        found[32..],
        (0..32).map(|lane| lane ^ 1).collect::<Vec<u32>>()
    );
}

/// One of two warps passes many more phases before the other one runs again.
#[test]
fn a_phase_is_kept_until_all_have_passed_it() {
    let body = "bar.sync 1, 64; mov.b32 %r10, 0; setp.lt.u32 %p1, %r0, 32; @%p1 bra END;\n\
                AGAIN: bar.sync 1, 32; add.s32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 70; @%p1 bra AGAIN;\nEND:";
    let found = words(64, &format!("{body}\n{STORE}"), &[]);
    assert_eq!((found[0], found[63]), (0, 70));
}

#[test]
fn a_vote_of_the_block() {
    let body =
        "setp.eq.b32 %p1, %r0, 70; bar.red.or.pred %p2, 1, 96, %p1; selp.b32 %r10, 5, 6, %p2;";
    assert_eq!(words(96, &format!("{body}\n{STORE}"), &[]), [5; 96]);
}

#[test]
fn threads_that_have_ended_are_not_waited_for() {
    let body = "setp.ge.u32 %p1, %r0, 64; @%p1 exit; bar.sync 0; mov.b32 %r10, 1;";
    assert_eq!(words(64, &format!("{body}\n{STORE}"), &[]), [1; 64]);
    let body = format!(
        "setp.ge.u32 %p1, %r0, 32; @%p1 bra OUT; bar.sync 0; mov.b32 %r10, 1; {STORE}\nret;\nOUT: mov.b32 %r10, 2; {STORE}"
    );
    assert_eq!(words(64, &body, &[])[31..33], [1, 2]);
}
