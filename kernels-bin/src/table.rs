// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_90a",
        family: "decode_wgmma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_wgmma.ptx.zst"),
            24413544,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_wgmma.cubin.zst"),
            11373840,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.prefill.ptx.zst"),
            29837894,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill.cubin.zst"),
            13112208,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "decode_mma",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.decode_mma.ptx.zst"),
            17875002,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.decode_mma.cubin.zst"),
            9504344,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.variants.ptx.zst"),
            11416746,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.variants.cubin.zst"),
            5416176,
        )),
    },
    Module {
        arch: "sm_80",
        family: "variants",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.variants.ptx.zst"),
            1601897,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.variants.cubin.zst"),
            744736,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "mla",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.mla.ptx.zst"),
            4649364,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.mla.cubin.zst"),
            2013392,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_decode",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.sm80_decode.ptx.zst"),
            7977240,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_decode.cubin.zst"),
            4310816,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_decode",
        ptx: Image::ptx_for(
            "sm_90a",
            include_bytes!("../data/sm_80.sm80_decode.ptx.zst"),
            7977241,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_decode.cubin.zst"),
            4390552,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "pod",
        ptx: Image::ptx_for(
            "sm_90a",
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1374720,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.pod.cubin.zst"),
            601336,
        )),
    },
    Module {
        arch: "sm_80",
        family: "pod",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.pod.ptx.zst"),
            1374719,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.pod.cubin.zst"),
            632608,
        )),
    },
    Module {
        arch: "sm_80",
        family: "sm80_prefill",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            3738906,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.sm80_prefill.cubin.zst"),
            1243936,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "sm80_prefill",
        ptx: Image::ptx_for(
            "sm_90a",
            include_bytes!("../data/sm_80.sm80_prefill.ptx.zst"),
            3738907,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.sm80_prefill.cubin.zst"),
            1286200,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "passes",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.passes.ptx.zst"),
            425347,
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
            3047813,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.prefill_f8.cubin.zst"),
            1347472,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "quantise",
        ptx: Image::ptx(
            include_bytes!("../data/sm_90a.quantise.ptx.zst"),
            233481,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.quantise.cubin.zst"),
            141544,
        )),
    },
    Module {
        arch: "sm_80",
        family: "quantise",
        ptx: Image::ptx(
            include_bytes!("../data/sm_80.quantise.ptx.zst"),
            280751,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.quantise.cubin.zst"),
            144288,
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
