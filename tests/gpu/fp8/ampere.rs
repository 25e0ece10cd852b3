//! Decodes with Ampere's instructions, on any GPU.

use super::*;

/// An A100 with as many SMs as the GPU has. All requests of a few tokens are decodes.
fn a100(gpu: &Gpu) -> DeviceDescription {
    let mut device = DeviceDescription::named("a100").expect("it is built in");
    device.sms = gpu.multiprocessors();
    device.decode_max_tiles = 64;
    device
}

#[test]
fn decode_of_8_bit_pages_with_amperes_instructions_is_the_reference() {
    let Some(gpu) = gpu("decode_of_8_bit_pages_with_amperes_instructions_is_the_reference") else {
        return;
    };
    let device = a100(gpu);
    let mut runner = proptest::test_runner::TestRunner::new(cases(300));
    runner
        .run(&case(8, 4), |case| check_any_on(gpu, &device, &case))
        .unwrap();
}

/// In graphs, and with splits of a page: most of the work is at the start and the end of units.
#[test]
fn graphs_of_ampere_decode_many_units_of_one_chunk() {
    let Some(gpu) = gpu("graphs_of_ampere_decode_many_units_of_one_chunk") else {
        return;
    };
    for (group, dim, granularity) in [(16, 64, 0), (1, 128, 4), (8, 256, 3), (5, 256, 4)] {
        let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 16 });
        let case = many_units_of_one_chunk(gpu, [group, dim], granularity, options);
        check_on::<bf16, F8E4M3>(gpu, &a100(gpu), &case).unwrap();
    }
}

/// Heads between those of the kernels, prompts too.
#[test]
fn padded_heads_of_8_bits_with_amperes_instructions_are_the_reference() {
    let Some(gpu) = gpu("padded_heads_of_8_bits_with_amperes_instructions_are_the_reference")
    else {
        return;
    };
    let dims = prop::sample::select(&[16_u32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240]);
    let device = a100(gpu);
    let mut runner = proptest::test_runner::TestRunner::new(cases(60));
    runner
        .run(&(case(30, 4), dims), |(mut case, dim)| {
            let Spec {
                q_heads, kv_heads, ..
            } = case.spec;
            case.set_heads(Spec::new(q_heads, kv_heads, dim));
            // Graphs have no prefills with Ampere's instructions.
            case.captured &= case.batch.qo_indptr.windows(2).all(|of| of[1] - of[0] <= 4);
            match case.seed % 3 {
                0 => check_on::<f16, F8E4M3>(gpu, &device, &case),
                _ => check_on::<bf16, F8E4M3>(gpu, &device, &case),
            }
        })
        .unwrap();
}
