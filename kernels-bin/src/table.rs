// Written by `cargo xtask package`.
&[
    Module {
        arch: "sm_80",
        family: "all",
        ptx: Image::zstd(
            include_bytes!("../data/sm_80.all.ptx.zst"),
            5307794,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_80.all.cubin.zst"),
            2143648,
        )),
    },
    Module {
        arch: "sm_90a",
        family: "all",
        ptx: Image::zstd(
            include_bytes!("../data/sm_90a.all.ptx.zst"),
            25144818,
        ),
        cubin: Some(Image::zstd(
            include_bytes!("../data/sm_90a.all.cubin.zst"),
            10372768,
        )),
    },
]
