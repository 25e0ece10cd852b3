//! A case on a GPU, or on an emulated one.

use std::collections::{BTreeMap, btree_map::Entry};

use tandem_attn::{
    Error,
    exec::gpu::{
        Arch, DeviceArray, DeviceBuffer, DeviceTensor, Gpu, Graph, LaunchSet, OwnedStream,
        Workspace, WorkspaceOptions,
    },
    plan::{DeviceDescription, Plan, PlanError, PlanOptions, Planner},
    problem::PageTable,
    reference::Output,
};

use crate::{
    case::{Case, Step},
    numeric::Rng,
    oracle,
    planned::{Planned, bound, planned},
    refused,
    tally::{Failure, Tally},
    world::World,
};

mod given;
mod workspace;

/// By the launches that their plans need; one with all launches has none.
type Graphs = BTreeMap<Option<u128>, Graph>;

/// The memory of a case on the device, and what runs there.
struct Runner<'a> {
    case: &'a Case,
    gpu: &'a Gpu,
    stream: OwnedStream,
    world: World,
    cache: DeviceBuffer<u8>,
    given: DeviceBuffer<u8>,
    results: DeviceBuffer<u8>,
    /// For runs at once, and for those of a graph.
    eager: Workspace,
    captured: Option<(Workspace, Graphs)>,
    /// The most parts of a batch.
    parts: usize,
    /// Of other heads than the case's.
    other: Option<Plan>,
    tally: Tally,
}

fn text(error: Error) -> String {
    error.to_string()
}

/// Plans the case and runs it.
pub fn run(case: &Case, gpu: &Gpu) -> Result<Tally, Failure> {
    gpu.make_current().map_err(|error| Failure {
        step: None,
        what: error.to_string(),
    })?;
    let mut device = gpu.device();
    device.sms = case.sms;
    if !case.joint {
        device.decode.joint = None;
    }
    let mut tally = Tally::default();
    let steps = planned(case, &device, &mut tally)?;
    if steps.iter().all(|step| step.plans.is_empty()) {
        return Ok(tally);
    }
    let runner = Runner::new(case, gpu, &device, &steps, tally);
    let mut runner = runner.map_err(|error| Failure {
        step: None,
        what: error.to_string(),
    })?;
    for (at, planned) in steps.iter().enumerate() {
        let done = runner.step(at, planned);
        done.map_err(|what| Failure::at(at, what))?;
    }
    Ok(runner.tally)
}

impl<'a> Runner<'a> {
    fn new(
        case: &'a Case,
        gpu: &'a Gpu,
        device: &DeviceDescription,
        steps: &[Planned],
        mut tally: Tally,
    ) -> Result<Self, Error> {
        let world = World::new(case);
        let bound = bound(steps, case.slack);
        let options = WorkspaceOptions::default().with_arch(case.ampere.then_some(Arch::Sm80));
        let eager = gpu.workspace(&case.spec, &bound, options)?;
        let mut parts: Vec<usize> = Vec::new();
        let captured = match case.graph {
            true => {
                let mut set = match case.seed % 2 {
                    0 => LaunchSet::all(device, &case.spec)?,
                    _ => LaunchSet::new(),
                };
                for plan in steps.iter().filter_map(|step| step.plans.first()) {
                    set = set.and(plan);
                }
                parts = set.keys().iter().map(|key| key.part as usize + 1).collect();
                parts.extend(steps.iter().map(|step| step.batch.parts.len()));
                let set = set.with_merge_mode(case.options.merge_mode);
                let options = WorkspaceOptions::default().with_launches(set);
                match gpu.workspace(&case.spec, &bound, options) {
                    // The first plan may have been refused for the same merges, so that others made the set.
                    Err(Error::Plan(PlanError::Unsupported(error))) => {
                        tally.unsupported(&error.to_string());
                        None
                    }
                    made => Some((made?, Graphs::new())),
                }
            }
            false => None,
        };
        let mut spec = case.spec;
        spec.scale *= 0.5;
        let mut table = PageTable::new(case.page_size, 1);
        table.push(&[0], 1);
        let batch = tandem_attn::problem::Batch::new(vec![0, 1], table);
        let other = Planner::new().plan(&spec, &batch, device, &PlanOptions::default());
        Ok(Self {
            case,
            gpu,
            stream: gpu.stream()?,
            cache: DeviceBuffer::from_slice(gpu, world.cache.bytes())?,
            given: DeviceBuffer::from_slice(gpu, world.given.bytes())?,
            results: DeviceBuffer::from_slice(gpu, world.results.bytes())?,
            world,
            eager,
            captured,
            parts: parts.into_iter().max().unwrap_or(0),
            other: other.ok(),
            tally,
        })
    }

    fn step(&mut self, at: usize, planned: &Planned) -> Result<(), String> {
        let case = self.case;
        let new = self.world.new_slots(case, at);
        let tokens = planned.batch.total_q() as usize;
        let q = self.world.write_queries(case, at, tokens);
        let listed = self.world.write_rows(case, &new);
        self.given
            .write(0, self.world.given.bytes())
            .map_err(text)?;
        self.append(listed, &new)?;
        let right = oracle::right(case, &planned.batch, &self.world, &q);
        for (index, plan) in planned.plans.iter().enumerate() {
            let call = |what| format!("plan {index}: {what}");
            self.plan(plan, at, &right).map_err(call)?;
        }
        if let Some(plan) = planned.plans.first() {
            let call = |what| format!("by a graph: {what}");
            self.replay(plan, &case.steps[at], &right).map_err(call)?;
        }
        self.unchanged()
    }

    /// Nothing that calls read was written.
    fn unchanged(&self) -> Result<(), String> {
        for (name, image, memory) in [
            ("keys and values", &self.world.cache, &self.cache),
            ("inputs", &self.world.given, &self.given),
        ] {
            if let Some(at) = image.differs(&memory.read().map_err(text)?) {
                return Err(format!("byte {at} of the {name} was written"));
            }
        }
        Ok(())
    }

    fn append(&mut self, listed: usize, new: &[u32]) -> Result<(), String> {
        let (case, spec) = (self.case, self.case.spec);
        let at = |place: usize| self.given.address() + place as u64;
        let slots = DeviceArray::new(at(self.world.slots.start), listed);
        let heads = spec.kv_heads as usize;
        let [k, v] = [spec.head_dim_qk, spec.head_dim_v].map(|dim| [listed, heads, dim as usize]);
        let k = DeviceTensor::new(at(self.world.rows[0].start), spec.kv_dtype, k);
        let v = DeviceTensor::new(at(self.world.rows[1].start), spec.kv_dtype, v);
        for (pool, layout) in self.pools().into_iter().zip(self.world.pools) {
            let mut rng = Rng(case.seed ^ 10 ^ self.tally.calls);
            for _ in 0..case.wrong {
                let given = refused::Append { pool, slots, k, v };
                refused::append(
                    self.gpu,
                    &spec,
                    given,
                    &self.stream,
                    &mut rng,
                    &mut self.tally,
                )?;
            }
            // SAFETY: all of it is in memory of ours, and the stream is waited for.
            let done = unsafe {
                match spec.latent {
                    true => {
                        let shape = [self.world.pages, case.page_size, 1, spec.head_dim_qk];
                        let mut pool =
                            DeviceTensor::new(pool.k, spec.kv_dtype, shape.map(|x| x as usize));
                        let strides = [layout.k.page, layout.k.token, layout.k.head];
                        for (axis, stride) in strides.into_iter().enumerate() {
                            pool = pool.with_stride(axis, stride as usize);
                        }
                        self.gpu.append_rows(&k, slots, &pool, *self.stream)
                    }
                    false => {
                        let gpu = self.gpu;
                        gpu.append_paged_kv(&spec, &pool, slots, &k, &v, *self.stream)
                    }
                }
            };
            done.map_err(text)?;
            self.tally.calls += 1;
        }
        self.stream.synchronize().map_err(text)?;
        for &slot in new {
            self.world.fill(case, slot);
            self.world.write_cache(case, slot);
        }
        self.unchanged()
            .map_err(|what| format!("an append: {what}"))
    }

    /// A plan at once: after wrong calls, twice.
    fn plan(&mut self, plan: &Plan, at: usize, right: &Output) -> Result<(), String> {
        let case = self.case;
        let tokens = plan.total_q as usize;
        let given = self.given(plan.parts.len(), tokens);
        let mut rng = Rng(case.seed ^ 11 ^ (at as u64) << 32 ^ self.tally.calls);
        self.spoil(false)?;
        if let Some(other) = &self.other {
            // SAFETY: it is refused.
            if unsafe { self.eager.upload(other, *self.stream) }.is_ok() {
                return Err("a plan of another specification was uploaded".into());
            }
            self.tally.refused("a plan of another specification");
            // SAFETY: likewise.
            match unsafe { given.run(self.gpu, &mut self.eager, *self.stream) } {
                Err(Error::NoPlan) => self.tally.refused("a run without a plan"),
                other => return Err(format!("a run without a plan: {other:?}")),
            }
        }
        // SAFETY: the stream is ours, and runs before it were waited for.
        match unsafe { self.eager.upload(plan, *self.stream) } {
            Err(error @ Error::NoInstance { .. }) => {
                self.tally.unsupported(&error.to_string());
                return Ok(());
            }
            done => done.map_err(text)?,
        }
        for _ in 0..case.wrong {
            let (gpu, stream) = (self.gpu, *self.stream);
            refused::run(
                gpu,
                &mut self.eager,
                plan,
                &given,
                stream,
                &mut rng,
                &mut self.tally,
            )?;
        }
        let mut first: Option<Vec<u8>> = None;
        for _ in 0..2 {
            self.results
                .write(0, self.world.results.bytes())
                .map_err(text)?;
            // SAFETY: everything lives until the stream was waited for.
            match unsafe { given.run(self.gpu, &mut self.eager, *self.stream) } {
                Err(error @ Error::Driver { .. }) => return Err(text(error)),
                Err(error) => {
                    self.tally.unsupported(&error.to_string());
                    return Ok(());
                }
                Ok(()) => {}
            }
            self.stream.synchronize().map_err(text)?;
            self.judge(tokens, right, &mut first)?;
            // From the second run on launches are those of the first, with other addresses.
            let (gpu, stream) = (self.gpu, *self.stream);
            refused::run(
                gpu,
                &mut self.eager,
                plan,
                &given,
                stream,
                &mut rng,
                &mut self.tally,
            )?;
        }
        self.workspace(false, plan)
    }

    /// Results are right, and those of a second run the same.
    fn judge(
        &mut self,
        tokens: usize,
        right: &Output,
        first: &mut Option<Vec<u8>>,
    ) -> Result<(), String> {
        self.tally.calls += 1;
        let results = self.results.read().map_err(text)?;
        oracle::judge(self.case, &self.world, tokens, true, &results, right)?;
        let first = first.get_or_insert_with(|| results.clone());
        let mut pairs = first.iter().zip(&results);
        match pairs.position(|(a, b)| a != b) {
            Some(at) => Err(format!("a second run differs at byte {at} of the results")),
            None => Ok(()),
        }
    }

    /// The plan of a step by a graph, twice: by the one that was captured in the first step that could be, or by one of the
    /// launches that the plan needs.
    fn replay(&mut self, plan: &Plan, step: &Step, right: &Output) -> Result<(), String> {
        if self.captured.is_none() {
            return Ok(());
        }
        self.spoil(true)?;
        let most = self.case.most_tokens();
        let parts = self.parts;
        let given = self.given(parts, most);
        let (workspace, graphs) = self.captured.as_mut().expect("looked at above");
        // SAFETY: the stream is ours, and runs before it were waited for.
        match unsafe { workspace.upload(plan, *self.stream) } {
            Err(error @ Error::Driver { .. }) => return Err(text(error)),
            Err(error) => {
                self.tally.unsupported(&error.to_string());
                return Ok(());
            }
            Ok(()) => {}
        }
        let only_needed = (self.case.seed / 2).is_multiple_of(2);
        let key = only_needed.then(|| workspace.needed_launches());
        if let Entry::Vacant(place) = graphs.entry(key) {
            if only_needed {
                workspace.launch_only_needed();
            }
            let gpu = self.gpu;
            // SAFETY: everything that is captured lives as long as the graph.
            let made = self
                .stream
                .capture(|stream| unsafe { given.run(gpu, workspace, stream) });
            match made {
                Ok(made) => drop(place.insert(made)),
                Err(error @ Error::Driver { .. }) => return Err(text(error)),
                Err(error) => {
                    self.tally.unsupported(&error.to_string());
                    return Ok(());
                }
            }
        }
        let tokens = step.rows.iter().map(|row| row.queries as usize).sum();
        let mut first = None;
        for _ in 0..2 {
            self.results
                .write(0, self.world.results.bytes())
                .map_err(text)?;
            let (_, graphs) = self.captured.as_ref().expect("looked at above");
            let graph = graphs.get(&key).expect("captured by now");
            // SAFETY: everything in it lives.
            unsafe { graph.launch(*self.stream) }.map_err(text)?;
            self.stream.synchronize().map_err(text)?;
            self.judge(tokens, right, &mut first)?;
        }
        self.workspace(true, plan)
    }
}
