use crate::harness::{STORE, words};

/// The value of `%r10` in each of 32 threads, as a signed number.
fn lanes(body: &str) -> Vec<i32> {
    words(32, &format!("{body}\n{STORE}"), &[])
        .into_iter()
        .map(|word| word as i32)
        .collect()
}

fn each(f: impl Fn(i32) -> i32) -> Vec<i32> {
    (0..32).map(f).collect()
}

#[test]
fn integers_wrap_and_shifts_are_clamped() {
    assert_eq!(lanes("mad.lo.s32 %r10, %r0, -3, 7;"), each(|t| t * -3 + 7));
    assert_eq!(lanes("mul.hi.u32 %r10, %r0, -1;"), each(|t| (t - 1).max(0)));
    assert_eq!(
        lanes("mov.b32 %r3, 1; add.s32 %r4, %r0, 16; shl.b32 %r10, %r3, %r4;"),
        each(|t| 1_i32.checked_shl(16 + t as u32).unwrap_or(0))
    );
    assert_eq!(
        lanes("neg.s32 %r3, %r0; shr.s32 %r10, %r3, 40;"),
        each(|t| if t == 0 { 0 } else { -1 })
    );
    assert_eq!(lanes("bfe.u32 %r10, %r0, 1, 3;"), each(|t| t >> 1 & 7));
    assert_eq!(
        lanes(
            "sub.s32 %r3, %r0, 16; div.s32 %r4, %r3, 3; rem.s32 %r5, %r3, 3; mad.lo.s32 %r10, %r4, 100, %r5;"
        ),
        each(|t| (t - 16) / 3 * 100 + (t - 16) % 3)
    );
    assert_eq!(
        lanes("popc.b32 %r3, %r0; clz.b32 %r4, %r0; mad.lo.s32 %r10, %r3, 100, %r4;"),
        each(|t| (t.count_ones() * 100 + t.leading_zeros()) as i32)
    );
}

/// The smallest number divided by -1 overflows.
#[test]
fn a_division_that_overflows_wraps() {
    let body = "mov.b32 %r3, -2147483648; div.s32 %r4, %r3, -1; rem.s32 %r5, %r3, -1; add.s32 %r10, %r4, %r5;";
    assert_eq!(lanes(body), [i32::MIN; 32]);
    let body = "mov.b64 %rd3, -9223372036854775808; div.s64 %rd4, %rd3, -1; rem.s64 %rd5, %rd3, -1;\n\
                add.s64 %rd4, %rd4, %rd5; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r10, %rd4;";
    assert_eq!(lanes(body), [i32::MIN; 32]);
}

#[test]
fn results_of_16_bits_lose_what_is_above() {
    let product = |instruction: &str| {
        let cut = format!("add.s32 %r3, %r0, 60000; {instruction}");
        lanes(&format!("{cut} mov.b32 %r10, %r4;"))
    };
    assert_eq!(
        product("add.s16 %r4, %r3, 5530;"),
        each(|t| (60_000 + t + 5530) % 65_536)
    );
    assert_eq!(product("sub.s16 %r4, %r0, %r3;"), each(|_| 65_536 - 60_000));
    assert_eq!(
        product("shl.b16 %r4, %r3, 3;"),
        each(|t| (60_000 + t) * 8 % 65_536)
    );
    assert_eq!(
        product("mul.lo.s16 %r4, %r3, 171;"),
        each(|t| (60_000 + t) * 171 % 65_536)
    );
    assert_eq!(
        product("mad.lo.s16 %r4, %r3, 171, 2052;"),
        each(|t| ((60_000 + t) * 171 + 2052) % 65_536)
    );
}

/// LLVM prints constants of 16 bits with a sign: `x == u16::MAX` compares with -1.
#[test]
fn constants_of_16_bits_have_no_sign() {
    let halves = |t: i32| (t + 65_520) as u16;
    let chosen = |instructions: &str| {
        let half = "add.s32 %r3, %r0, 65520; cvt.u16.u32 %h1, %r3;";
        lanes(&format!("{half} {instructions} selp.b32 %r10, 1, 0, %p1;"))
    };
    let expected = |holds: fn(u16) -> bool| each(|t| i32::from(holds(halves(t))));
    assert_eq!(
        chosen("setp.eq.b16 %p1, %h1, -1;"),
        expected(|half| half == u16::MAX)
    );
    assert_eq!(
        chosen("setp.gt.u16 %p1, %h1, -9;"),
        expected(|half| half > 65_527)
    );
    assert_eq!(
        chosen("xor.b16 %h2, %h1, -32768; setp.lt.u16 %p1, %h2, 32768;"),
        expected(|half| half >= 32_768)
    );
    assert_eq!(
        chosen("setp.eq.b16 %p2, %h1, 7; selp.b16 %h2, -1, 5, %p2; setp.eq.b16 %p1, %h2, 65535;"),
        expected(|half| half == 7)
    );
}

#[test]
fn longs_are_made_of_words() {
    assert_eq!(
        lanes("mul.wide.s32 %rd3, %r0, -5; shr.s64 %rd4, %rd3, 1; mov.b64 {%r10, _}, %rd4;"),
        each(|t| (t * -5) >> 1)
    );
    assert_eq!(
        lanes("mov.b64 %rd3, {%r0, %r1}; mov.b64 {_, %r10}, %rd3;"),
        each(|t| t * 4)
    );
    assert_eq!(
        lanes("cvt.u64.u32 %rd3, %r0; mad.lo.s64 %rd4, %rd3, %rd3, 9; cvt.u32.u64 %r10, %rd4;"),
        each(|t| t * t + 9)
    );
    assert_eq!(
        lanes("cvt.u64.u32 %rd3, %r0; setp.gt.u64 %p1, %rd3, 10; selp.b32 %r10, 1, 2, %p1;"),
        each(|t| if t > 10 { 1 } else { 2 })
    );
    assert_eq!(
        lanes("cvt.u64.u32 %rd3, %r0; mul.hi.u64 %rd3, %rd3, -1; cvt.u32.u64 %r10, %rd3;"),
        each(|t| (t - 1).max(0))
    );
}

#[test]
fn floats_become_integers_towards_zero_and_within_their_range() {
    let of_float = |convert: &str, bits: u32| {
        let body = format!("mov.b32 %r3, 0f{bits:08X}; {convert}");
        lanes(&body)[0]
    };
    let word =
        |kind: &str, x: f32| of_float(&format!("cvt.rzi.{kind}.f32 %r10, %r3;"), x.to_bits());
    for x in [2.9, -2.9, 0.0, 3e9, -3e9, f32::INFINITY, f32::NAN] {
        assert_eq!(word("u32", x), x as u32 as i32, "{x}");
        assert_eq!(word("s32", x), x as i32, "{x}");
    }
    let high = |kind: &str, x: f32| {
        let convert = format!("cvt.rzi.{kind}.f32 %rd3, %r3; mov.b64 {{_, %r10}}, %rd3;");
        of_float(&convert, x.to_bits())
    };
    for x in [2.9, 3e12, -3e12, f32::NEG_INFINITY] {
        assert_eq!(high("u64", x), (x as u64 >> 32) as i32, "{x}");
        assert_eq!(high("s64", x), (x as i64 >> 32) as i32, "{x}");
    }
    assert_eq!(high("u64", f32::NAN), i32::MIN);
}

#[test]
fn floats_and_what_is_not_a_number() {
    let bits = |f: fn(f32) -> f32| each(|t| f(t as f32).to_bits() as i32);
    assert_eq!(
        lanes("cvt.rn.f32.u32 %r3, %r0; fma.rn.f32 %r10, %r3, 0f40000000, 0f3F800000;"),
        bits(|x| x * 2.0 + 1.0)
    );
    assert_eq!(
        lanes("cvt.rn.f32.u32 %r3, %r0; rcp.approx.ftz.f32 %r10, %r3;"),
        bits(|x| 1.0 / x)
    );
    assert_eq!(
        lanes("cvt.rn.f32.u32 %r3, %r0; rcp.rn.f32 %r10, %r3;"),
        bits(|x| 1.0 / x)
    );
    assert_eq!(
        lanes("cvt.rn.f32.u32 %r3, %r0; sin.approx.ftz.f32 %r10, %r3;"),
        bits(f32::sin)
    );
    assert_eq!(
        lanes("cvt.rn.f32.u32 %r3, %r0; cos.approx.ftz.f32 %r10, %r3;"),
        bits(f32::cos)
    );
    assert_eq!(
        lanes("mov.b32 %r3, 0fFF800000; ex2.approx.ftz.f32 %r10, %r3;"),
        each(|_| 0)
    );
    // The maximum of a number and NaN is the number.
    assert_eq!(
        lanes("mov.b32 %r3, 0f7FC00000; max.f32 %r10, %r3, 0f3F800000;"),
        each(|_| 0x3F80_0000)
    );
    let compare = |how: &str| {
        lanes(&format!(
            "mov.b32 %r3, 0f7FC00000; setp.{how}.f32 %p1, %r3, 0f00000000; selp.b32 %r10, 1, 0, %p1;"
        ))
    };
    assert_eq!(
        [
            compare("lt")[0],
            compare("geu")[0],
            compare("eq")[0],
            compare("ltu")[0],
            compare("nan")[0],
            compare("num")[0]
        ],
        [0, 1, 0, 1, 1, 0]
    );
    assert_eq!(
        lanes("cvt.rn.f32.u32 %r3, %r0; setp.nan.f32 %p1, %r3, %r3; selp.b32 %r10, 1, 0, %p1;"),
        each(|_| 0)
    );
}

#[test]
fn pairs_of_8_bit_floats_are_rounded_and_bounded() {
    let pack = |a: f32, b: f32| {
        let (a, b) = (a.to_bits(), b.to_bits());
        lanes(&format!(
            "cvt.rn.satfinite.e4m3x2.f32 %h1, 0f{a:08X}, 0f{b:08X}; cvt.u32.u16 %r10, %h1;"
        ))[0] as u32
    };
    assert_eq!(pack(1.0, -2.0), 0x38C0);
    // A tie, rounded to even; the largest value; NaN; the smallest value; half of it.
    assert_eq!(pack(17.0, 19.0), 0x585A);
    assert_eq!(pack(449.0, f32::NEG_INFINITY), 0x7EFE);
    assert_eq!(pack(f32::NAN, 0.001_953_125), 0x7F01);
    assert_eq!(pack(0.000_976_562_5, 0.015), 0x0008);

    let pack = |a: f32, b: f32| {
        let (a, b) = (a.to_bits(), b.to_bits());
        lanes(&format!(
            "cvt.rn.satfinite.e5m2x2.f32 %h1, 0f{a:08X}, 0f{b:08X}; cvt.u32.u16 %r10, %h1;"
        ))[0] as u32
    };
    assert_eq!(pack(1.0, -2.0), 0x3CC0);
    assert_eq!(pack(9.0, 11.0), 0x484A);
    assert_eq!(pack(61_440.0, f32::NEG_INFINITY), 0x7BFB);
    assert_eq!(pack(f32::NAN, 2_f32.powi(-16)), 0x7F01);
    assert_eq!(pack(2_f32.powi(-17), 2_f32.powi(-14)), 0x0004);
}

#[test]
fn pairs_of_8_bit_floats_become_halves_exactly() {
    let unpack = |pair: u32| {
        lanes(&format!(
            "mov.b32 %r3, {pair}; cvt.u16.u32 %h1, %r3; cvt.rn.f16x2.e4m3x2 %r10, %h1;"
        ))[0] as u32
    };
    // 1 and -2; the largest and the smallest; zeros; the largest subnormal number.
    assert_eq!(unpack(0xC038), 0xC000_3C00);
    assert_eq!(unpack(0x017E), 0x1800_5F00);
    assert_eq!(unpack(0x8000), 0x8000_0000);
    assert_eq!(unpack(0x8707), 0xA300_2300);
    assert_eq!(unpack(0xFF7F), 0x7FFF_7FFF);

    let unpack = |pair: u32| {
        lanes(&format!(
            "mov.b32 %r3, {pair}; cvt.u16.u32 %h1, %r3; cvt.rn.f16x2.e5m2x2 %r10, %h1;"
        ))[0] as u32
    };
    // 1 and -2; the largest and the smallest; infinities; NaN.
    assert_eq!(unpack(0xC03C), 0xC000_3C00);
    assert_eq!(unpack(0x017B), 0x0100_7B00);
    assert_eq!(unpack(0xFC7C), 0xFC00_7C00);
    assert_eq!(unpack(0xFE7D), 0x7FFF_7FFF);
}

#[test]
fn bytes_are_permuted_by_digits() {
    let permuted = |selector: &str| {
        lanes(&format!(
            "mov.b32 %r3, 0x83020100; mov.b32 %r4, 0x77665544; prmt.b32 %r10, %r3, %r4, {selector};"
        ))[0] as u32
    };
    assert_eq!(permuted("0x3120"), 0x8301_0200);
    assert_eq!(permuted("0x7604"), 0x7766_0044);
    assert_eq!(permuted("0xB8F0"), 0xFF00_0000);
}

#[test]
fn pairs_of_halves_have_the_first_operand_above() {
    assert_eq!(
        lanes("cvt.rn.bf16x2.f32 %r10, 0f40000000, 0f3F800000;"),
        each(|_| 0x4000_3F80)
    );
    assert_eq!(
        lanes("cvt.rn.f16x2.f32 %r10, 0f40000000, 0f3F800000;"),
        each(|_| 0x4000_3C00)
    );
}

#[test]
fn the_larger_of_pairs_of_halves_is_the_number_beside_nan() {
    let larger = |kind: &str, a: u32, b: u32| {
        lanes(&format!(
            "mov.b32 %r3, {a:#x}; mov.b32 %r4, {b:#x}; max.{kind} %r10, %r3, %r4;"
        ))[0] as u32
    };
    // 1 and −2 with 2 and −1; NaN and 0 with −1 and −0.
    assert_eq!(larger("bf16x2", 0x3F80_C000, 0x4000_BF80), 0x4000_BF80);
    assert_eq!(larger("bf16x2", 0x7FFF_0000, 0xBF80_8000), 0xBF80_0000);
    assert_eq!(larger("f16x2", 0x3C00_C000, 0x4000_BC00), 0x4000_BC00);
    assert_eq!(larger("f16x2", 0x7FFF_0000, 0xBC00_8000), 0xBC00_0000);
    // The smallest f16, which is not 0.
    assert_eq!(larger("f16x2", 0x0001_0000, 0x0000_0001), 0x0001_0001);
}

#[test]
fn pairs_of_f16_are_multiplied_and_rounded_once() {
    let product = |a: u32, b: u32| {
        lanes(&format!(
            "mov.b32 %r3, {a:#x}; mov.b32 %r4, {b:#x}; mul.rn.f16x2 %r10, %r3, %r4;"
        ))[0] as u32
    };
    // −2 · 3 and 1.5 · 0.5.
    assert_eq!(product(0xC000_3E00, 0x4200_3800), 0xC600_3A00);
    // (1 + 2⁻¹⁰)² = 1 + 2⁻⁹ + 2⁻²⁰; 2⁻¹⁴ · 2⁻¹⁰, the smallest f16.
    assert_eq!(product(0x3C01_0400, 0x3C01_1400), 0x3C02_0001);
    // 256 · 256 overflows; half of the smallest is rounded to even.
    assert_eq!(product(0x5C00_0001, 0x5C00_3800), 0x7C00_0000);
}

#[test]
fn pairs_of_f16_are_multiplied_and_added_and_rounded_once() {
    let sum = |a: u32, b: u32, c: u32| {
        lanes(&format!(
            "mov.b32 %r3, {a:#x}; mov.b32 %r4, {b:#x}; mov.b32 %r5, {c:#x}; fma.rn.f16x2 %r10, %r3, %r4, %r5;"
        ))[0] as u32
    };
    // −2 · 3 + 1 and 1.5 · 0.5 + 0.25.
    assert_eq!(sum(0xC000_3E00, 0x4200_3800, 0x3C00_3400), 0xC500_3C00);
    // ∞ · 0 is NaN, and −0 · 0 − 0 is −0.
    assert_eq!(sum(0x7C00_8000, 0, 0x3C00_8000) & 0x7E00_FFFF, 0x7E00_8000);
    // 2⁻²⁴ · 2⁻²⁴ breaks a tie of 1 + 2⁻¹¹ upwards, which a second rounding would lose; the other way round it is lost.
    assert_eq!(sum(0x1000_0001, 0x3C00_0001, 0x3C00_3C00), 0x3C00_3C00);
    assert_eq!(sum(0x0001_1001, 0x0001_3C00, 0x3C00_3C00), 0x3C00_3C01);
}

#[test]
fn lanes_part_and_meet_again() {
    let body = "mov.b32 %r10, 0; setp.lt.u32 %p1, %r0, 10; @%p1 bra LESS; add.s32 %r10, %r10, 100; bra.uni MEET;\n\
                LESS: add.s32 %r10, %r10, 1;\nMEET: vote.sync.ballot.b32 %r3, %p1, -1; popc.b32 %r4, %r3; add.s32 %r10, %r10, %r4;";
    assert_eq!(lanes(body), each(|t| if t < 10 { 11 } else { 110 }));
}

#[test]
fn a_loop_runs_as_often_as_each_lane_asks() {
    let body = "mov.b32 %r10, 0; mov.b32 %r3, 0;\nAGAIN: add.s32 %r10, %r10, %r3; add.s32 %r3, %r3, 1;\n\
                setp.le.u32 %p1, %r3, %r0; @%p1 bra AGAIN; bar.warp.sync -1;";
    assert_eq!(lanes(body), each(|t| t * (t + 1) / 2));
}

/// The lane that got the lock must go on while the others ask for it.
#[test]
fn lanes_wait_for_one_another() {
    let body = "AGAIN: atom.acquire.gpu.global.cas.b32 %r3, [%rd1], 0, 1; setp.ne.b32 %p1, %r3, 0;\n\
                @%p1 bra AGAIN; ld.global.b32 %r4, [%rd1+4]; add.s32 %r10, %r4, 1; st.global.b32 [%rd1+4], %r10;\n\
                atom.release.gpu.global.exch.b32 %r5, [%rd1], 0;";
    let mut found = words(32, &format!("{body}\n{STORE}"), &[0, 0]);
    found.sort_unstable();
    assert_eq!(found, (1..=32).collect::<Vec<u32>>());
}

#[test]
fn a_table_of_branches() {
    let body = "and.b32 %r3, %r0, 3;\nT: .branchtargets A, B, C, B;\nbrx.idx %r3, T;\n\
                A: mov.b32 %r10, 7; bra M;\nB: mov.b32 %r10, 8; bra M;\nC: mov.b32 %r10, 9;\nM: bar.warp.sync -1;";
    assert_eq!(lanes(body), each(|t| [7, 8, 9, 8][t as usize % 4]));
}

#[test]
fn lanes_exchange_values() {
    assert_eq!(
        lanes("shfl.sync.bfly.b32 %r10, %r0, 5, 31, -1;"),
        each(|t| t ^ 5)
    );
    assert_eq!(
        lanes("shfl.sync.down.b32 %r10, %r0, 8, 31, -1;"),
        each(|t| if t < 24 { t + 8 } else { t })
    );
    assert_eq!(
        lanes("shfl.sync.idx.b32 %r10, %r0, 1, 7199, -1;"),
        each(|t| t / 4 * 4 + 1)
    );
    assert_eq!(lanes("redux.sync.max.u32 %r10, %r0, -1;"), each(|_| 31));
    assert_eq!(
        lanes("elect.sync _|%p1, -1; selp.b32 %r10, 1, 0, %p1;"),
        each(|t| i32::from(t == 0))
    );
}

#[test]
fn threads_share_memory_over_a_barrier() {
    let body = "add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0; bar.sync 0;\n\
                xor.b32 %r4, %r0, 96; shl.b32 %r4, %r4, 2; add.s32 %r4, %r2, %r4; ld.shared.b32 %r10, [%r4];";
    let found = words(128, &format!("{body}\n{STORE}"), &[]);
    assert_eq!(found, (0..128).map(|t| t ^ 96).collect::<Vec<u32>>());
}

#[test]
fn atomics_count_every_thread_once() {
    let body = "st.shared.b32 [%r2], 0; bar.sync 0; atom.relaxed.cta.shared.add.u32 %r3, [%r2], 1; bar.sync 0;\n\
                ld.shared.b32 %r10, [%r2];";
    // All threads write the same zero to one address.
    let body = body.replace(
        "st.shared.b32 [%r2], 0;",
        "setp.eq.b32 %p1, %r0, 0; @%p1 st.shared.b32 [%r2], 0;",
    );
    assert_eq!(words(96, &format!("{body}\n{STORE}"), &[]), [96; 96]);
}

#[test]
fn wide_loads_and_stores() {
    let body = "and.b32 %r3, %r1, 12; cvt.u64.u32 %rd3, %r3; ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd1];\n\
                ld.global.nc.v2.b32 {%r24, %r25}, [%rd1+8]; add.s32 %r10, %r23, %r24; add.s32 %r10, %r10, %r20;";
    assert_eq!(
        words(32, &format!("{body}\n{STORE}"), &[1, 10, 100, 1000])[0],
        1101
    );
}
