//! `wgmma` of every width and in every form.

use cuda_std::wgmma::*;

macro_rules! widths {
    ($($name:ident $n:literal)*) => {$(
        #[cuda_std::kernel(max_threads = 128, min_blocks = 1)]
        pub unsafe fn $name(a: Descriptor, b: Descriptor, r: [u32; 4], add: bool, out: *mut [f32; $n / 2]) {
            unsafe {
                core::arch::asm!(
                    concat!("// expect 5* wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.bf16.bf16 "),
                    concat!("// expect 4* wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.f16.f16 "),
                    concat!("// expect 4* wgmma.mma_async.sync.aligned.m64n", $n, "k32.f32.e4m3.e4m3 "),
                    "// expect wgmma.fence.sync.aligned;",
                    "// expect wgmma.commit_group.sync.aligned;",
                    "// expect wgmma.wait_group.sync.aligned 0;",
                    options(nomem, nostack),
                );
                let mut d = [0.0; $n / 2];
                fence();
                mma_ss::<Bf16, false, false, true, _>(&mut d, a, b);
                mma_ss::<Bf16, true, true, false, _>(&mut d, a.advance(32), b);
                mma_ss_if::<Bf16, false, false, _>(&mut d, a, b.advance(64), add);
                mma_rs::<Bf16, true, true, _>(&mut d, r, b);
                mma_rs_if::<Bf16, false, _>(&mut d, r, b, add);
                mma_rs::<F16, false, false, _>(&mut d, r, b);
                mma_ss::<F16, true, true, true, _>(&mut d, a, b);
                mma_ss_if::<F16, true, true, _>(&mut d, a, b, add);
                mma_rs_if::<F16, true, _>(&mut d, r, b, add);
                mma_ss_e4m3::<false, _>(&mut d, a, b);
                mma_ss_e4m3::<true, _>(&mut d, a.advance(32), b);
                mma_rs_e4m3::<true, _>(&mut d, r, b);
                mma_rs_e4m3::<false, _>(&mut d, r, b);
                commit_group();
                wait_group::<0>();
                fence_operand(&mut d);
                *out = d;
            }
        }
    )*};
}

widths! {
    wgmma_n8 8 wgmma_n16 16 wgmma_n24 24 wgmma_n32 32 wgmma_n40 40 wgmma_n48 48 wgmma_n56 56 wgmma_n64 64
    wgmma_n72 72 wgmma_n80 80 wgmma_n88 88 wgmma_n96 96 wgmma_n104 104 wgmma_n112 112 wgmma_n120 120
    wgmma_n128 128 wgmma_n136 136 wgmma_n144 144 wgmma_n152 152 wgmma_n160 160 wgmma_n168 168
    wgmma_n176 176 wgmma_n184 184 wgmma_n192 192 wgmma_n200 200 wgmma_n208 208 wgmma_n216 216
    wgmma_n224 224 wgmma_n232 232 wgmma_n240 240 wgmma_n248 248 wgmma_n256 256
}
