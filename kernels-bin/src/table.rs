// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            21462026,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            10000944,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            29543446,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            13029264,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            18102652,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            9553496,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.variants.ptx.zst"),
            11477181,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.variants.cubin.zst"),
            5428400,
        )),
    },
    Module {
        arch: "sm_80",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.variants.ptx.zst"),
            1606663,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.variants.cubin.zst"),
            733472,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "mla",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.mla.ptx.zst"),
            2504709,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.mla.cubin.zst"),
            1102160,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_decode",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.sm80_decode.ptx.zst"),
            2071438,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            1119008,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.sm80_decode.ptx.zst"),
            2071439,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            1143992,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.pod.ptx.zst"),
            1376500,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            598200,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1376499,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.pod.cubin.zst"),
            625440,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            1598895,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            532256,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.sm80_prefill.ptx.zst"),
            1598896,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            545176,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "passes",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.passes.ptx.zst"),
            424822,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.passes.cubin.zst"),
            233208,
        )),
    },
    Module {
        arch: "sm_80",
        family: "passes",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.passes.ptx.zst"),
            424011,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.passes.cubin.zst"),
            220832,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "step",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.step.ptx.zst"),
            741188,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.step.cubin.zst"),
            371664,
        )),
    },
    Module {
        arch: "sm_80",
        family: "step",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.step.ptx.zst"),
            713977,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.step.cubin.zst"),
            337440,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill_f8",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill_f8.ptx.zst"),
            3026705,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill_f8.cubin.zst"),
            1345424,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "quantise",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.quantise.ptx.zst"),
            231636,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.quantise.cubin.zst"),
            140520,
        )),
    },
    Module {
        arch: "sm_80",
        family: "measure",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.measure.ptx.zst"),
            7789,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.measure.cubin.zst"),
            9504,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "measure",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.measure.ptx.zst"),
            22526,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.measure.cubin.zst"),
            17784,
        )),
    },
]
