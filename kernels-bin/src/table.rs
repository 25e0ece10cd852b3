// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            18911435,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            8494104,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            27908066,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            12716112,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            17104918,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            8714264,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.variants.ptx.zst"),
            10817099,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.variants.cubin.zst"),
            5226928,
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
            773536,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "mla",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.mla.ptx.zst"),
            2527586,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.mla.cubin.zst"),
            1118736,
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
            1123232,
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
            1147256,
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
            633208,
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
            652192,
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
            602016,
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
            613976,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "passes",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.passes.ptx.zst"),
            347665,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.passes.cubin.zst"),
            195440,
        )),
    },
    Module {
        arch: "sm_80",
        family: "passes",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.passes.ptx.zst"),
            347058,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.passes.cubin.zst"),
            184352,
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
            355792,
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
            321696,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill_f8",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill_f8.ptx.zst"),
            3043060,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill_f8.cubin.zst"),
            1348688,
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
            141736,
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
            9632,
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
            17976,
        )),
    },
]
