// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            21116828,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            10065360,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            29528450,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            13719440,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            18260032,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            9526872,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.variants.ptx.zst"),
            11556892,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.variants.cubin.zst"),
            5722288,
        )),
    },
    Module {
        arch: "sm_80",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.variants.ptx.zst"),
            1659578,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.variants.cubin.zst"),
            773408,
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
            2140864,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            1122080,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.sm80_decode.ptx.zst"),
            2140865,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            1149112,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.pod.ptx.zst"),
            1398910,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            633016,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1398909,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.pod.cubin.zst"),
            651040,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            1634787,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            600864,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.sm80_prefill.ptx.zst"),
            1634788,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            613784,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "passes",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.passes.ptx.zst"),
            347662,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.passes.cubin.zst"),
            194224,
        )),
    },
    Module {
        arch: "sm_80",
        family: "passes",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.passes.ptx.zst"),
            347055,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.passes.cubin.zst"),
            184224,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "step",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.step.ptx.zst"),
            715727,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.step.cubin.zst"),
            354576,
        )),
    },
    Module {
        arch: "sm_80",
        family: "step",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.step.ptx.zst"),
            688560,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.step.cubin.zst"),
            321568,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill_f8",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill_f8.ptx.zst"),
            3047622,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill_f8.cubin.zst"),
            1351568,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "quantise",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.quantise.ptx.zst"),
            230622,
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
