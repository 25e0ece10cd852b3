//! What measures the hardware.

use kernels_gpu::{
    measure::{ceilings::READ_TILE, loops::Binding},
    registry::Op,
};
use tandem_attn::{
    abi::LoopsParams,
    exec::gpu::{Gpu, KernelInfo},
};

use super::Output;
use crate::common::{Memory, Rng, Stream};

pub fn run(gpu: &Gpu, row: &KernelInfo, seed: u64) -> Result<Vec<Output>, String> {
    let (sink, stream) = (Memory::new(&[0_u32; 4]), Stream::new());
    let mut rng = Rng(seed);
    match row.op {
        Op::MeasureRead => {
            let tiles = 1 + rng.below(3);
            let source = Memory::new(&vec![1_u8; tiles * READ_TILE as usize]);
            let bytes = tiles * READ_TILE as usize;
            // SAFETY: the memory is there until the stream was waited for.
            unsafe { gpu.read_all(source.address(), bytes, sink.address(), stream.0) }
                .map_err(|error| error.to_string())?;
            stream.wait();
            Ok(Vec::new())
        }
        Op::MeasureProducts => {
            // SAFETY: the same.
            unsafe { gpu.multiply(1, sink.address(), stream.0) }
                .map_err(|error| error.to_string())?;
            stream.wait();
            Ok(Vec::new())
        }
        _ => loops(gpu, &mut rng, &stream),
    }
}

fn loops(gpu: &Gpu, rng: &mut Rng, stream: &Stream) -> Result<Vec<Output>, String> {
    let (elements, products, rounds) = (300 + rng.below(700), 200 + rng.below(300), 3);
    let [first, second] = [(); 2].map(|()| rng.floats(elements, -1.0, 1.0));
    let factors = rng.floats(products, -1.0, 1.0);
    let mut outputs = Vec::new();
    for binding in [
        Binding::Memory,
        Binding::Compute,
        Binding::ByBlock,
        Binding::BySm,
    ] {
        let (first_memory, second_memory) = (Memory::new(&first), Memory::new(&second));
        let (sums, scaled) = (Memory::new(&vec![0.0_f32; elements]), Memory::new(&factors));
        let counters = Memory::new(&vec![0_u32; 2 + gpu.multiprocessors() as usize]);
        let params = LoopsParams {
            memory: [
                first_memory.address(),
                second_memory.address(),
                sums.address(),
            ],
            compute: scaled.address(),
            counters: counters.address(),
            elements: elements as u32,
            products: products as u32,
            factor: 0.5,
            rounds,
            blocks: 2,
            binding: 0,
        };
        // SAFETY: memory is as described until the stream was waited for.
        unsafe { gpu.overlap_loops(binding, params, stream.0) }
            .map_err(|error| error.to_string())?;
        stream.wait();
        let (sums, scaled) = (sums.read::<f32>(), scaled.read::<f32>());
        let (adds, multiplies) = (binding != Binding::Compute, binding != Binding::Memory);
        let right: Vec<f32> = first.iter().zip(&second).map(|(a, b)| a + b).collect();
        if adds && sums != right {
            return Err(format!("sums of {binding:?}"));
        }
        let right: Vec<f32> = factors
            .iter()
            .map(|x| x * 0.5_f32.powi(rounds as i32))
            .collect();
        if multiplies && scaled != right {
            return Err(format!("products of {binding:?}"));
        }
        outputs.extend([
            Output::exact("sums", &sums),
            Output::exact("products", &scaled),
        ]);
    }
    Ok(outputs)
}
