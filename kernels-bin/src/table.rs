// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            20875402,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            9753040,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            29439253,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            12988304,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            18018809,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            9512536,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.variants.ptx.zst"),
            11417627,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.variants.cubin.zst"),
            5402800,
        )),
    },
    Module {
        arch: "sm_80",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.variants.ptx.zst"),
            1599400,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.variants.cubin.zst"),
            730400,
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
            2064804,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            1116960,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.sm80_decode.ptx.zst"),
            2064805,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            1140920,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.pod.ptx.zst"),
            1369570,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            596152,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1369569,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.pod.cubin.zst"),
            622368,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            1590491,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            529184,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.sm80_prefill.ptx.zst"),
            1590492,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            542104,
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
            741238,
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
            714027,
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
            3006837,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill_f8.cubin.zst"),
            1335184,
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
