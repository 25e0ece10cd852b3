//! Products of warpgroups: where operands lie in shared memory and in registers.

use std::{ffi::c_void, fmt};

use half::{bf16, f16};

use super::{
    common::{Memory, Rng, Stream},
    launches::{Output, raw::Entry},
};

/// Bytes of shared memory that operands lie in.
const SHARED: usize = 192 << 10;

/// Pairs of products of a kernel.
const CASES: usize = 6;

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    n: u32,
    bf16: bool,
    /// A lies in registers; else in shared memory, along K or along M.
    a: A,
    /// B lies along N instead of K.
    transposed: bool,
    swizzle: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum A {
    Registers,
    Shared,
    Transposed,
}

impl Shape {
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for n in [8, 16, 24, 32, 64, 80, 96, 112, 128, 192, 256] {
            for (at, a) in [A::Registers, A::Shared, A::Transposed]
                .into_iter()
                .enumerate()
            {
                for transposed in [false, true] {
                    for swizzle in 0..4 {
                        let bf16 = (at + swizzle as usize + n as usize / 8).is_multiple_of(2);
                        all.push(Self {
                            n,
                            bf16,
                            a,
                            transposed,
                            swizzle,
                        });
                    }
                }
            }
        }
        all
    }

    /// Bytes of a row of the swizzle's pattern.
    fn row(&self) -> usize {
        [16, 128, 64, 32][self.swizzle as usize]
    }

    /// A descriptor, and a random place for what it describes: `lines` of 16 numbers along K, or along the lines
    /// where it is transposed.
    fn descriptor(&self, transposed: bool, lines: usize, rng: &mut Rng) -> u64 {
        let groups = lines / 8;
        let atom = 8 * self.row();
        let (leading, stride, start, extent);
        if self.swizzle == 0 {
            // Core matrices of 128 bytes, anywhere.
            let step = |rng: &mut Rng| 128 * (1 + rng.below(3));
            (leading, stride) = (step(rng), step(rng));
            extent = groups.max(2) * (leading + stride) + 128;
            start = 16 * rng.below((SHARED - extent) / 16);
        } else if transposed {
            // Atoms of 8 numbers along K and a row along the lines.
            let atoms = (lines * 2).div_ceil(self.row());
            leading = atom * (1 + rng.below(3));
            stride = atom * (1 + rng.below(3));
            extent = atoms.max(2) * (leading + stride) + atom;
            start = 1024 * rng.below((SHARED - extent) / 1024);
        } else {
            leading = 16;
            stride = atom * (1 + rng.below(3));
            extent = groups * stride + atom;
            // A part of the row, as a loop over K takes it.
            let part = 32 * rng.below((self.row() / 32).max(1));
            start = 1024 * rng.below((SHARED - extent) / 1024) + part;
        }
        let field = |bytes: usize| (bytes as u64 >> 4) & 0x3FFF;
        // The base of shared memory is added by the kernel.
        field(start) | field(leading) << 16 | field(stride) << 32 | u64::from(self.swizzle) << 62
    }

    fn kernel(&self) -> String {
        let element = if self.bf16 { "bf16" } else { "f16" };
        let registers = self.n / 2;
        let list: Vec<String> = (0..registers).map(|at| format!("%f{at}")).collect();
        let list = list.join(", ");
        let flag = u32::from(self.transposed);
        let product = |a: &str, b: &str, add: u32| {
            let (a, flags) = match self.a {
                A::Registers => ("{%r20, %r21, %r22, %r23}", format!("{flag}")),
                A::Shared => (a, format!("0, {flag}")),
                A::Transposed => (a, format!("1, {flag}")),
            };
            format!(
                "    wgmma.mma_async.sync.aligned.m64n{}k16.f32.{element}.{element} {{{list}}}, {a}, {b}, {add}, 1, 1, {flags};\n",
                self.n
            )
        };
        let zeroes: String = (0..registers)
            .map(|at| format!("    mov.b32 %f{at}, 0f00000000;\n"))
            .collect();
        let stores: String = (0..registers)
            .map(|at| format!("    st.global.f32 [%l7+{}], %f{at};\n", at * 512))
            .collect();
        format!(
            ".version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry products(.param .u64 image, .param .u64 cases, .param .u64 to)
.maxntid 128
{{
    .reg .b32 %r<32>; .reg .f32 %f<{registers}>; .reg .b64 %l<16>; .reg .pred %p<2>;
    ld.param.u64 %l0, [image];
    ld.param.u64 %l1, [cases];
    ld.param.u64 %l2, [to];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, memory;
    shr.u32 %r2, %r1, 4;
    cvt.u64.u32 %l3, %r2;
    mul.wide.u32 %l4, %r0, 16;
    add.s64 %l4, %l4, %l0;
    shl.b32 %r3, %r0, 4;
    add.s32 %r3, %r3, %r1;
    mov.u32 %r4, 0;
FILL:
    ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%l4];
    st.shared.v4.b32 [%r3], {{%r5, %r6, %r7, %r8}};
    add.s64 %l4, %l4, 2048;
    add.s32 %r3, %r3, 2048;
    add.s32 %r4, %r4, 2048;
    setp.lt.u32 %p0, %r4, {SHARED};
    @%p0 bra FILL;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mul.wide.u32 %l4, %r0, 16;
    add.s64 %l4, %l4, %l0;
    mul.wide.u32 %l7, %r0, 4;
    add.s64 %l7, %l7, %l2;
    mov.u32 %r4, 0;
NEXT:
    ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%l4];
    ld.global.u64 %l8, [%l1];
    ld.global.u64 %l9, [%l1+8];
    ld.global.u64 %l10, [%l1+16];
    ld.global.u64 %l11, [%l1+24];
    add.s64 %l8, %l8, %l3;
    add.s64 %l9, %l9, %l3;
    add.s64 %l10, %l10, %l3;
    add.s64 %l11, %l11, %l3;
{zeroes}    wgmma.fence.sync.aligned;
{first}{second}    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
{stores}    add.s64 %l4, %l4, 2048;
    add.s64 %l1, %l1, 32;
    add.s64 %l7, %l7, {bytes};
    add.s32 %r4, %r4, 1;
    setp.lt.u32 %p0, %r4, {CASES};
    @%p0 bra NEXT;
    ret;
}}
",
            first = product("%l8", "%l9", 0),
            second = product("%l10", "%l11", 1),
            bytes = registers * 512,
        )
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            n,
            bf16,
            a,
            transposed,
            swizzle,
        } = self;
        write!(
            f,
            "wgmma n{n} bf16 {bf16} A {a:?} B transposed {transposed} swizzle {swizzle}"
        )
    }
}

pub fn run(shape: &Shape) -> Result<Vec<Output>, String> {
    let mut rng = Rng(u64::from(shape.n) * 64 + u64::from(shape.swizzle) * 8 + shape.a as u64);
    // Small whole numbers: their sums are exact.
    let bits = |x: f32| match shape.bf16 {
        true => bf16::from_f32(x).to_bits(),
        false => f16::from_f32(x).to_bits(),
    };
    let table = [-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -3.0, 4.0].map(bits);
    let image: Vec<u16> = (0..SHARED / 2).map(|_| table[rng.below(8)]).collect();
    let mut cases = Vec::new();
    for _ in 0..2 * CASES {
        cases.push(shape.descriptor(shape.a == A::Transposed, 64, &mut rng));
        cases.push(shape.descriptor(shape.transposed, shape.n as usize, &mut rng));
    }
    let entry = Entry::load(shape.kernel().as_bytes(), "products")?;
    let (image, cases) = (Memory::new(&image), Memory::new(&cases));
    let to = Memory::new(&vec![0.0_f32; CASES * 64 * shape.n as usize]);
    let mut addresses = [&image, &cases, &to].map(Memory::address);
    let mut parameters = addresses
        .each_mut()
        .map(|one| (&raw mut *one).cast::<c_void>());
    // SAFETY: the arrays have what the kernel reads and writes, and descriptors stay within shared memory.
    unsafe { entry.launch(1, 128, SHARED as u32, &mut parameters, &Stream::new()) }?;
    Ok(vec![Output::exact("products", &to.read::<f32>())])
}
