// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            9805440,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            3938960,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            5866309,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            2512816,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            5751709,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            2591512,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "mla",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.mla.ptx.zst"),
            644052,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.mla.cubin.zst"),
            214576,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.ptx.zst"),
            2373160,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            1122208,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.ptx.zst"),
            2373161,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            1147512,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.pod.ptx.zst"),
            1536590,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            591736,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1536589,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.pod.cubin.zst"),
            618400,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            1715713,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            513952,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.ptx.zst"),
            1715714,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            527448,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "passes",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.passes.ptx.zst"),
            210240,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.passes.cubin.zst"),
            109456,
        )),
    },
    Module {
        arch: "sm_80",
        family: "passes",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.passes.ptx.zst"),
            210107,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.passes.cubin.zst"),
            103584,
        )),
    },
    Module {
        arch: "sm_80",
        family: "measure",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.measure.ptx.zst"),
            9175,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.measure.cubin.zst"),
            9632,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "measure",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.measure.ptx.zst"),
            25996,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.measure.cubin.zst"),
            17976,
        )),
    },
]
