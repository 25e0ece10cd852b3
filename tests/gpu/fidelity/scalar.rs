//! Instructions of single lanes: each on numbers of every kind.

use std::ffi::c_void;

use tandem_attn::problem::Dtype;

use super::{
    common::{Memory, Rng, Stream},
    launches::{Output, raw::Entry},
};

/// An instruction with its operands: `%r`, `%f` and `%l` are words, floats and longs: of the result, then of what is
/// given. Behind a bar stands what the result is: `bits`, `float` (NaN is NaN) or `near`.
pub const OPERATIONS: &[&str] = &[
    "add.s32 %r0, %r1, %r2;|bits",
    "sub.s32 %r0, %r1, %r2;|bits",
    "mul.lo.s32 %r0, %r1, %r2;|bits",
    "mul.hi.u32 %r0, %r1, %r2;|bits",
    "mad.lo.s32 %r0, %r1, %r2, %r3;|bits",
    "div.u32 %r0, %r1, %r3;|bits",
    "rem.u32 %r0, %r1, %r3;|bits",
    "min.s32 %r0, %r1, %r2;|bits",
    "max.s32 %r0, %r1, %r2;|bits",
    "min.u32 %r0, %r1, %r2;|bits",
    "max.u32 %r0, %r1, %r2;|bits",
    "neg.s32 %r0, %r1;|bits",
    "and.b32 %r0, %r1, %r2;|bits",
    "or.b32 %r0, %r1, %r2;|bits",
    "xor.b32 %r0, %r1, %r2;|bits",
    "not.b32 %r0, %r1;|bits",
    "shl.b32 %r0, %r1, %r4;|bits",
    "shr.u32 %r0, %r1, %r4;|bits",
    "shr.s32 %r0, %r1, %r4;|bits",
    "bfe.u32 %r0, %r1, %r4, %r5;|bits",
    "prmt.b32 %r0, %r1, %r2, %r3;|bits",
    "popc.b32 %r0, %r1;|bits",
    "clz.b32 %r0, %r1;|bits",
    "add.s64 %l0, %l1, %l2;|bits",
    "sub.s64 %l0, %l1, %l2;|bits",
    "mul.lo.s64 %l0, %l1, %l2;|bits",
    "mul.hi.u64 %l0, %l1, %l2;|bits",
    "mad.lo.s64 %l0, %l1, %l2, %l3;|bits",
    "div.u64 %l0, %l1, %l3;|bits",
    "shl.b64 %l0, %l1, %r4;|bits",
    "shr.u64 %l0, %l1, %r4;|bits",
    "bfe.u64 %l0, %l1, %r4, %r5;|bits",
    "mul.wide.u32 %l0, %r1, %r2;|bits",
    "mul.wide.s32 %l0, %r1, %r2;|bits",
    "cvt.u64.u32 %l0, %r1;|bits",
    "cvt.u32.u64 %r0, %l1;|bits",
    "shfl.sync.bfly.b32 %r0, %r1, 5, 31, -1;|bits",
    "shfl.sync.down.b32 %r0, %r1, 3, 31, -1;|bits",
    "shfl.sync.up.b32 %r0, %r1, 2, 0, -1;|bits",
    "shfl.sync.idx.b32 %r0, %r1, %r4, 31, -1;|bits",
    "{ .reg .pred p; setp.lt.s32 p, %r1, %r2; vote.sync.ballot.b32 %r0, p, -1; }|bits",
    "redux.sync.max.u32 %r0, %r1, -1;|bits",
    "redux.sync.add.s32 %r0, %r1, -1;|bits",
    "{ .reg .pred p; setp.lt.u32 p, %r1, %r2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.ge.s32 p, %r1, %r2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.lt.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.ltu.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.leu.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.gtu.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.geu.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.eq.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.ne.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.neu.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "{ .reg .pred p; setp.nan.f32 p, %f1, %f2; selp.b32 %r0, 1, 0, p; }|bits",
    "add.rn.f32 %f0, %f1, %f2;|float",
    "sub.rn.f32 %f0, %f1, %f2;|float",
    "mul.rn.f32 %f0, %f1, %f2;|float",
    "fma.rn.f32 %f0, %f1, %f2, %f3;|float",
    "div.rn.f32 %f0, %f1, %f2;|float",
    "rcp.rn.f32 %f0, %f1;|float",
    "max.f32 %f0, %f1, %f2;|float",
    "min.f32 %f0, %f1, %f2;|float",
    "abs.f32 %f0, %f1;|float",
    "neg.f32 %f0, %f1;|float",
    "ex2.approx.ftz.f32 %f0, %f3;|near",
    "lg2.approx.ftz.f32 %f0, %f1;|near",
    "rcp.approx.ftz.f32 %f0, %f3;|near",
    "rsqrt.approx.ftz.f32 %f0, %f3;|near",
    "sin.approx.ftz.f32 %f0, %f3;|near",
    "cos.approx.ftz.f32 %f0, %f3;|near",
    "cvt.rn.f16x2.f32 %r0, %f3, %f2;|halves",
    "cvt.rn.bf16x2.f32 %r0, %f3, %f2;|halves",
    "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %f3, %f2; cvt.u32.u16 %r0, h; }|eights",
    "{ .reg .b16 h; cvt.u16.u32 h, %r1; cvt.rn.f16x2.e4m3x2 %r0, h; }|halves",
];

/// Rounds of 32 lanes.
const ROUNDS: usize = 64;

/// Words that are given to a lane, the last two of a few bits.
const WORDS: usize = 5;

fn kernel(operation: &str) -> String {
    format!(
        ".version 8.3
.target sm_90a
.address_size 64
.visible .entry scalar(.param .u64 from, .param .u64 to)
{{
    .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %l<16>; .reg .pred %p<4>;
    ld.param.u64 %l8, [from];
    ld.param.u64 %l9, [to];
    mov.u32 %r8, %tid.x;
    mov.u32 %r9, 0;
LOOP:
    mad.lo.s32 %r10, %r9, 32, %r8;
    mul.wide.u32 %l10, %r10, 48;
    add.s64 %l10, %l10, %l8;
    ld.global.u32 %r1, [%l10];
    ld.global.u32 %r2, [%l10+4];
    ld.global.u32 %r3, [%l10+8];
    ld.global.u32 %r4, [%l10+12];
    ld.global.u32 %r5, [%l10+16];
    ld.global.u64 %l1, [%l10+24];
    ld.global.u64 %l2, [%l10+32];
    ld.global.u64 %l3, [%l10+40];
    mov.b32 %f1, %r1;
    mov.b32 %f2, %r2;
    mov.b32 %f3, %r3;
    mov.b32 %r0, 0;
    mov.b32 %f0, %r0;
    mov.b64 %l0, 0;
    {operation}
    mul.wide.u32 %l11, %r10, 16;
    add.s64 %l11, %l11, %l9;
    st.global.u32 [%l11], %r0;
    st.global.f32 [%l11+4], %f0;
    st.global.u64 [%l11+8], %l0;
    add.s32 %r9, %r9, 1;
    setp.lt.u32 %p0, %r9, {ROUNDS};
    @%p0 bra LOOP;
    ret;
}}
"
    )
}

/// Numbers of every kind: of the first words any bits, and now and then those of special floats.
fn given() -> Vec<u32> {
    const SPECIAL: [f32; 10] = [
        0.0,
        -0.0,
        1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-40,
        65_520.0,
    ];
    let mut rng = Rng(77);
    let mut words = Vec::new();
    for _ in 0..32 * ROUNDS {
        let mut lane = [0_u32; 12];
        for word in &mut lane {
            *word = match rng.below(4) {
                0 => SPECIAL[rng.below(SPECIAL.len())].to_bits(),
                1 => rng.between(-500.0, 500.0).to_bits(),
                _ => rng.bits() as u32,
            };
        }
        // The third is a moderate float, and never zero; the fourth and fifth are counts.
        lane[2] = (rng.between(0.01, 9.0) * [1.0, -1.0][rng.below(2)]).to_bits();
        lane[WORDS - 2] = rng.below(40) as u32;
        lane[WORDS - 1] = rng.below(40) as u32;
        lane[10] = lane[10].max(1);
        words.extend(lane);
    }
    words
}

pub fn run(index: usize) -> Result<Vec<Output>, String> {
    let (operation, kind) = OPERATIONS[index].split_once('|').expect("a kind");
    let entry = Entry::load(kernel(operation).as_bytes(), "scalar")?;
    let (from, to) = (
        Memory::new(&given()),
        Memory::new(&[0_u32; 32 * ROUNDS * 4]),
    );
    let (mut from_address, mut to_address) = (from.address(), to.address());
    let mut parameters = [
        (&raw mut from_address).cast::<c_void>(),
        (&raw mut to_address).cast::<c_void>(),
    ];
    // SAFETY: both arrays have what the kernel reads and writes.
    unsafe { entry.launch(1, 32, 0, &mut parameters, &Stream::new()) }?;
    let mut got = to.read::<u32>();
    let is_nan = |bits: u32| f32::from_bits(bits).is_nan();
    match kind {
        "float" | "near" => got
            .iter_mut()
            .filter(|bits| is_nan(**bits))
            .for_each(|bits| *bits = 0x7FFF_FFFF),
        // A NaN has many forms.
        "halves" => {
            let canonical = |half: u32| match half & 0x7FFF {
                bits if bits > 0x7F80 && operation.contains("bf16") => 0x7FFF,
                bits if bits > 0x7C00 && !operation.contains("bf16") => 0x7FFF,
                _ => half,
            };
            for word in got.iter_mut().step_by(4) {
                *word = canonical(*word & 0xFFFF) | canonical(*word >> 16) << 16;
            }
        }
        "eights" => {
            let canonical = |byte: u32| if byte & 0x7F == 0x7F { 0x7F } else { byte };
            for word in got.iter_mut().step_by(4) {
                *word = canonical(*word & 0xFF) | canonical(*word >> 8 & 0xFF) << 8;
            }
        }
        _ => {}
    }
    Ok(vec![match kind {
        "near" => {
            let floats: Vec<f32> = got
                .iter()
                .skip(1)
                .step_by(4)
                .map(|&x| f32::from_bits(x))
                .collect();
            Output::rounded("results", Dtype::F32, 0.0, &floats)
        }
        _ => Output::exact("results", &got),
    }])
}
