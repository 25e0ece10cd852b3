// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            8895542,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            3551184,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            10817973,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            4316112,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            11510820,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            5128984,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.ptx.zst"),
            2131612,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            1057696,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.ptx.zst"),
            2131613,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            977080,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.pod.ptx.zst"),
            1416172,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            515320,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1416171,
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
            1617153,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            456608,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.ptx.zst"),
            1617154,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            472536,
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
