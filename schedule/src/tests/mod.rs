use super::{
    chunk::ChunkSize,
    cost::{CostModel, Parallel},
    policy::{self, PolicyOptions},
    *,
};

mod composer;
mod cost;

fn cost() -> CostModel {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let hardware = Hardware::named("a100").unwrap();
    CostModel::new(&model, &hardware, Parallel::default()).unwrap()
}

fn options() -> PolicyOptions {
    PolicyOptions {
        chunk: ChunkSize::Fixed(64),
        target_ns: 12e6,
        cost: cost(),
    }
}
