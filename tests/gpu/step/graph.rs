//! A captured step.

use half::bf16;
use tandem_attn::{
    Error,
    exec::gpu::{AppendScales, DeviceBuffer, DeviceRope, Gpu, KvPool, QkvStep, Stream},
    problem::{KvLayout, Spec},
    step::{Activation, Draw, RmsNorm, Rope, Sampling},
};

use super::{common, common::Rng};

const TOKENS: usize = 3;
const WIDTH: usize = 64;
const VOCABULARY: usize = 40;

/// What a small step reads and writes.
struct Step {
    table: DeviceBuffer<bf16>,
    weight: DeviceBuffer<bf16>,
    x: DeviceBuffer<bf16>,
    normed: DeviceBuffer<bf16>,
    rope: DeviceRope,
    ids: DeviceBuffer<u32>,
    slots: DeviceBuffer<u32>,
    positions: DeviceBuffer<u32>,
    draws: DeviceBuffer<Draw>,
    /// Queries, keys, values, gates.
    out: [DeviceBuffer<bf16>; 4],
    drawn: DeviceBuffer<u32>,
}

fn draw(position: u64) -> Draw {
    let sampling = Sampling {
        temperature: 1.0,
        ..Sampling::GREEDY
    };
    sampling.draw(position).expect("a good sampling")
}

impl Step {
    fn new(gpu: &Gpu) -> Result<Self, Error> {
        let mut rng = Rng(6);
        let mut random = |count: usize| {
            let values = rng.floats(count, -1.0, 1.0);
            let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
            DeviceBuffer::from_slice(gpu, &values)
        };
        let (table, weight) = (random(VOCABULARY * WIDTH)?, random(WIDTH)?);
        let zeros = |count: usize| DeviceBuffer::zeroed(gpu, count);
        Ok(Self {
            table,
            weight,
            x: zeros(TOKENS * WIDTH)?,
            normed: zeros(TOKENS * WIDTH)?,
            rope: gpu.rope(&Rope::new(16, 1e4).table()?)?,
            ids: DeviceBuffer::from_slice(gpu, &[1, 2, 3])?,
            slots: DeviceBuffer::from_slice(gpu, &[0, 1, 2])?,
            positions: DeviceBuffer::from_slice(gpu, &[0, 1, 2])?,
            draws: DeviceBuffer::from_slice(gpu, &[0, 1, 2].map(draw))?,
            out: [
                zeros(TOKENS * 32)?,
                zeros(8 * 16)?,
                zeros(8 * 16)?,
                zeros(TOKENS * WIDTH / 2)?,
            ],
            drawn: DeviceBuffer::zeroed(gpu, TOKENS)?,
        })
    }

    fn queue(&self, gpu: &Gpu, stream: Stream) -> Result<(), Error> {
        let spec = Spec::new(2, 1, 16);
        let [q, k, v, gated] = &self.out;
        let pool = KvPool::new(&spec, KvLayout::Nhd, 8, 1, k.address(), v.address());
        let (x, normed) = (
            self.x.tensor([TOKENS, WIDTH]),
            self.normed.tensor([TOKENS, WIDTH]),
        );
        let (table, weight) = (
            self.table.tensor([VOCABULARY, WIDTH]),
            self.weight.tensor([WIDTH]),
        );
        let (q, gated) = (q.tensor([TOKENS, 2, 16]), gated.tensor([TOKENS, WIDTH / 2]));
        let step = QkvStep {
            qkv: normed,
            bias: None,
            norm: None,
            rope: Some((&self.rope, self.positions.array())),
        };
        let (ids, slots, draws) = (self.ids.array(), self.slots.array(), self.draws.array());
        // SAFETY: everything is there as described as long as `self`; slots are distinct.
        unsafe {
            gpu.embed(&table, ids, 1.0, &x, stream)?;
            gpu.rms_norm(RmsNorm::new(1e-6), &x, &weight, None, &normed, stream)?;
            gpu.qkv_step(&spec, &step, slots, &q, &pool, AppendScales::Given, stream)?;
            gpu.gate(Activation::Silu, &normed, &gated, stream)?;
            gpu.sample(&normed, draws, self.drawn.array(), stream)
        }
    }

    fn clear(&mut self) -> Result<(), Error> {
        self.drawn.write(0, &[u32::MAX; TOKENS])?;
        self.out.iter_mut().try_for_each(|out| {
            let zeros = vec![bf16::ZERO; out.len()];
            out.write(0, &zeros)
        })
    }

    fn results(&self) -> Result<(Vec<Vec<bf16>>, Vec<u32>), Error> {
        let out = self.out.iter().map(DeviceBuffer::read);
        Ok((out.collect::<Result<_, _>>()?, self.drawn.read()?))
    }
}

/// All kernels of a step in one graph: a launch with other ids, positions, slots and random numbers does what the calls
/// do.
#[test]
fn a_captured_step_replays() -> Result<(), Error> {
    let Some(gpu) = common::gpu("a_captured_step_replays") else {
        return Ok(());
    };
    let mut step = Step::new(gpu)?;
    let stream = gpu.stream()?;
    let graph = stream.capture(|stream| step.queue(gpu, stream))?;
    step.ids.write(0, &[9, 30, 4])?;
    step.slots.write(0, &[5, 3, 7])?;
    step.positions.write(0, &[100, 7, 3])?;
    step.draws.write(0, &[7, 8, 9].map(draw))?;
    step.clear()?;
    step.queue(gpu, *stream)?;
    stream.synchronize()?;
    let right = step.results()?;
    assert!(
        right
            .0
            .iter()
            .all(|out| out.iter().any(|&x| x != bf16::ZERO))
    );
    assert!(right.1.iter().all(|&id| (id as usize) < WIDTH));

    step.clear()?;
    // SAFETY: what was captured lives.
    unsafe { graph.launch(*stream)? };
    stream.synchronize()?;
    assert_eq!(step.results()?, right);
    Ok(())
}
