// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            10842616,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            4401424,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            30172074,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            12078160,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            22114047,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            9720856,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "variants",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.variants.ptx.zst"),
            12312836,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.variants.cubin.zst"),
            5279344,
        )),
    },
    Module {
        arch: "sm_80",
        family: "variants",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.variants.ptx.zst"),
            1853869,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.variants.cubin.zst"),
            773536,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "mla",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.mla.ptx.zst"),
            3244243,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.mla.cubin.zst"),
            1118256,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.ptx.zst"),
            2375522,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            1123232,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.ptx.zst"),
            2375523,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            1147256,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.pod.ptx.zst"),
            1606344,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            633208,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1606343,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.pod.cubin.zst"),
            652192,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            1869759,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            602016,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.ptx.zst"),
            1869760,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            613976,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "passes",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.passes.ptx.zst"),
            381975,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.passes.cubin.zst"),
            194416,
        )),
    },
    Module {
        arch: "sm_80",
        family: "passes",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.passes.ptx.zst"),
            381710,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.passes.cubin.zst"),
            184352,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "step",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.step.ptx.zst"),
            849847,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.step.cubin.zst"),
            383312,
        )),
    },
    Module {
        arch: "sm_80",
        family: "step",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.step.ptx.zst"),
            815512,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.step.cubin.zst"),
            345248,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill_f8",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.prefill_f8.ptx.zst"),
            1355320,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill_f8.cubin.zst"),
            652368,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "quantise",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.quantise.ptx.zst"),
            262183,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.quantise.cubin.zst"),
            155048,
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
