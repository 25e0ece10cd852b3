// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            8906362,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            3550416,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            5583250,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            2327120,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            5319633,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            2463128,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.ptx.zst"),
            2132324,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            1058720,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.ptx.zst"),
            2132325,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            1067448,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.pod.ptx.zst"),
            1416232,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            536312,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1416231,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.pod.cubin.zst"),
            561056,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            1616621,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            455584,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.ptx.zst"),
            1616622,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            472024,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "passes",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.passes.ptx.zst"),
            137259,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.passes.cubin.zst"),
            75784,
        )),
    },
    Module {
        arch: "sm_80",
        family: "passes",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.passes.ptx.zst"),
            137126,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.passes.cubin.zst"),
            70560,
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
