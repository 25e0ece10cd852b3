//! Copies by tensor maps: ranks, swizzles, boxes over every edge.

use std::ffi::c_void;

use tandem_attn::{
    exec::gpu::{Swizzle, TensorMap},
    problem::Dtype,
};

use super::{
    common::{Memory, Rng, Stream},
    launches::{Output, raw::Entry},
};

/// Boxes that are loaded and stored.
pub const CASES: u64 = 240;

/// Bytes of the tensor and of its box at most.
const TENSOR: usize = 1 << 16;
const BOX: usize = 1 << 14;

fn kernel(rank: usize) -> String {
    let coordinates: Vec<String> = (0..rank).map(|axis| format!("%r{}", 10 + axis)).collect();
    let coordinates = coordinates.join(", ");
    let loads: String = (0..rank)
        .map(|axis| format!("    ld.param.u32 %r{}, [place+{}];\n", 10 + axis, 4 * axis))
        .collect();
    let head = format!(
        "    .reg .b32 %r<24>; .reg .b64 %l<8>; .reg .pred %p<4>;
    mov.b64 %l0, map;
    cvta.param.u64 %l0, %l0;
    ld.param.u64 %l1, [other];
    ld.param.u32 %r1, [bytes];
{loads}    mov.u32 %r0, %tid.x;
    mov.u32 %r2, memory;
    add.s32 %r3, %r2, {BOX};
"
    );
    let parameters = ".param .align 64 .b8 map[128], .param .align 4 .b8 place[20], .param .u64 other, .param .u32 bytes";
    let each = |name: &str, body: &str| {
        format!(
            "    mov.u32 %r4, %r0;
{name}:
    shl.b32 %r5, %r4, 2;
    setp.ge.u32 %p0, %r5, %r1;
    @%p0 bra {name}_DONE;
    mul.wide.u32 %l2, %r4, 4;
    add.s64 %l2, %l2, %l1;
    add.s32 %r6, %r5, %r2;
{body}
    add.s32 %r4, %r4, 32;
    bra {name};
{name}_DONE:
"
        )
    };
    let out = each(
        "OUT",
        "    ld.shared.b32 %r7, [%r6]; st.global.b32 [%l2], %r7;",
    );
    let fill = each(
        "FILL",
        "    ld.global.b32 %r7, [%l2]; st.shared.b32 [%r6], %r7;",
    );
    format!(
        ".version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry load({parameters})
{{
{head}    setp.ne.s32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], %r1;
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%l0, {{{coordinates}}}], [%r3];
READY:
    bar.warp.sync -1;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
{out}    ret;
}}
.visible .entry store({parameters})
{{
{head}{fill}    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    setp.ne.s32 %p1, %r0, 0;
    @%p1 bra DONE;
    cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%l0, {{{coordinates}}}], [%r2];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
    ret;
}}
"
    )
}

pub fn run(case: u64) -> Result<Vec<Output>, String> {
    let mut rng = Rng(case);
    let rank = 1 + rng.below(5);
    let dtype = [Dtype::F8E4M3, Dtype::BF16, Dtype::F32][rng.below(3)];
    let size = dtype.bytes();
    let swizzle = [
        Swizzle::None,
        Swizzle::Bytes32,
        Swizzle::Bytes64,
        Swizzle::Bytes128,
    ][rng.below(4)];
    // Rows of a swizzled box have the width of the swizzle, as those of the kernels.
    let inner = match swizzle {
        Swizzle::None => 16 * (1 + rng.below(8) as u32),
        Swizzle::Bytes32 => 32,
        Swizzle::Bytes64 => 64,
        Swizzle::Bytes128 => 128,
    };
    let mut box_dims = vec![inner / size];
    let mut box_bytes = inner;
    for _ in 1..rank {
        let most = (BOX as u32 / box_bytes).clamp(1, 9);
        box_dims.push(1 + rng.below(most as usize) as u32);
        box_bytes *= box_dims[box_dims.len() - 1];
    }
    // A tensor somewhat larger or smaller than its box, dense but for gaps behind rows.
    let mut dims = vec![u64::from(box_dims[0]) + rng.below(40) as u64];
    let mut strides = Vec::new();
    let mut stride = (dims[0] * u64::from(size)).next_multiple_of(16) + 16 * rng.below(3) as u64;
    for &of_box in &box_dims[1..] {
        strides.push(stride);
        let extent = 1 + rng.below(of_box as usize + 3) as u64;
        dims.push(extent);
        stride *= extent;
    }
    if stride as usize > TENSOR {
        // Too large a draw: its first dimension alone.
        dims.truncate(1);
        strides.truncate(0);
        box_dims.truncate(1);
        box_bytes = inner;
    }
    let rank = dims.len();
    // Along rows boxes begin at multiples of 16 bytes: the hardware takes no others.
    let unit = 16 / size as i32;
    let place: [i32; 5] = std::array::from_fn(|axis| match (axis, dims.get(axis)) {
        (0, Some(&extent)) => unit * (rng.below(extent as usize / unit as usize + 4) as i32 - 3),
        (_, Some(&extent)) => rng.below(extent as usize + 4) as i32 - 3,
        _ => 0,
    });
    let values: Vec<u8> = (0..TENSOR).map(|_| rng.bits() as u8).collect();
    let text = kernel(rank);
    let mut outputs = Vec::new();
    for name in ["load", "store"] {
        let entry = Entry::load(text.as_bytes(), name)?;
        let tensor = Memory::new(&values);
        let other = match name {
            "load" => Memory::new(&vec![0_u8; box_bytes as usize]),
            _ => Memory::new(&values[TENSOR - box_bytes as usize..]),
        };
        let map = TensorMap {
            name: "a test's",
            address: tensor.address(),
            dtype,
            dims: &dims,
            strides: &strides,
            box_dims: &box_dims,
            swizzle,
        };
        let mut map = map.encode().map_err(|error| error.to_string())?;
        // An H200 called an instruction illegal where boxes begin before their tensor: no kernel has such.
        let mut place = place.map(|at| at.max(0));
        let (mut address, mut bytes) = (other.address(), box_bytes);
        let mut parameters = [
            map.as_mut_ptr().cast::<c_void>(),
            place.as_mut_ptr().cast(),
            (&raw mut address).cast(),
            (&raw mut bytes).cast(),
        ];
        // SAFETY: the map is that of a tensor that is there, and the box has room.
        unsafe { entry.launch(1, 32, BOX as u32 + 16, &mut parameters, &Stream::new()) }?;
        outputs.push(match name {
            "load" => Output::exact("the box", &other.read::<u8>()),
            _ => Output::exact("the tensor", &tensor.read::<u8>()),
        });
    }
    Ok(outputs)
}
