//! A case on a GPU, or on an emulated one.

use std::collections::BTreeMap;

use tandem_attn::{
    Error,
    exec::gpu::{
        Arch, DeviceBuffer, Gpu, Graph, LaunchSet, OwnedStream, Workspace, WorkspaceOptions,
    },
    plan::{DeviceDescription, Plan, PlanError, PlanOptions, Planner},
    problem::PageTable,
    tensor::ShapeError,
};

use crate::{
    case::Case,
    numeric::Rng,
    oracle::{self, Right},
    planned::{Planned, bound, planned},
    refused,
    tally::{Failure, Tally},
    world::World,
};

mod append;
mod blocks;
mod by_head;
mod chosen;
mod extras;
mod given;
mod merged;
mod replay;
mod tree;
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
    device: DeviceDescription,
    /// The most parts of a batch, and the most tokens.
    most: [usize; 2],
    /// Of other heads than the case's.
    other: Option<Plan>,
    tally: Tally,
}

fn text(error: Error) -> String {
    error.to_string()
}

/// Counts a refusal of a right call by its reason.
///
/// # Errors
/// An error that says anything else than that there is no kernel for the call or its layout.
fn refusal(error: Error, tally: &mut Tally) -> Result<(), String> {
    match error {
        Error::NoInstance { .. }
        | Error::NotOnDevice { .. }
        | Error::Problem(_)
        | Error::Stride { .. }
        | Error::Shape(ShapeError::Scaled { .. })
        | Error::Plan(PlanError::Unsupported(_) | PlanError::NoTile { .. }) => {
            tally.unsupported(&error.to_string());
            Ok(())
        }
        // Its kernels cannot merge what prefills and decodes leave together.
        Error::NotCaptured { ref launch } if launch.contains("choose MergeMode::Kernel") => {
            tally.unsupported(&error.to_string());
            Ok(())
        }
        other => Err(text(other)),
    }
}

/// The instructions that a case asks for, if any.
fn arch(case: &Case) -> Option<Arch> {
    case.ampere.then_some(Arch::Sm80)
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
    let mut runner = match Runner::new(case, gpu, &device, &steps, tally.clone()) {
        Ok(runner) => runner,
        Err(error) => {
            return match refusal(error, &mut tally) {
                Ok(()) => Ok(tally),
                Err(what) => Err(Failure { step: None, what }),
            };
        }
    };
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
        let options = WorkspaceOptions::default().with_arch(arch(case));
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
        let tokens = steps.iter().flat_map(|step| &step.plans);
        let tokens = tokens.map(|plan| plan.total_q as usize);
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
            device: device.clone(),
            most: [parts, tokens.collect()].map(|of| of.into_iter().max().unwrap_or(0)),
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
        let batch = &planned.batch;
        let exact = Right::from(oracle::right(case, batch, &self.world, &q));
        for (index, plan) in planned.plans.iter().enumerate() {
            let in_f8 = oracle::of_plan(case, batch, plan, &self.world, &q);
            let right = in_f8.as_ref().unwrap_or(&exact);
            let call = |what| format!("plan {index}: {what}");
            self.plan(plan, at, right).map_err(call)?;
            if index == 0 {
                let call = |what| format!("by a graph: {what}");
                self.replay(plan, &case.steps[at], right).map_err(call)?;
            }
        }
        self.unchanged()?;
        self.extras(at, &q)
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

    /// A plan at once: after wrong calls, twice.
    fn plan(&mut self, plan: &Plan, at: usize, right: &Right) -> Result<(), String> {
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
        if let Err(error) = unsafe { self.eager.upload(plan, *self.stream) } {
            return self.refused(error);
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
            if let Err(error) = unsafe { given.run(self.gpu, &mut self.eager, *self.stream) } {
                return self.refused(error);
            }
            self.stream.synchronize().map_err(text)?;
            self.judge("run", tokens, right, &mut first)?;
            self.tally.right(&case.special(Some(&case.steps[at])));
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

    /// Results are right, and those of a second run the same. The name is of what was called.
    fn judge(
        &mut self,
        called: &'static str,
        tokens: usize,
        right: &Right,
        first: &mut Option<Vec<u8>>,
    ) -> Result<(), String> {
        self.tally.calls += 1;
        let results = self.results.read().map_err(text)?;
        oracle::judge(self.case, &self.world, tokens, true, &results, right)?;
        self.tally.right(&[called]);
        let first = first.get_or_insert_with(|| results.clone());
        let mut pairs = first.iter().zip(&results);
        match pairs.position(|(a, b)| a != b) {
            Some(at) => Err(format!("a second run differs at byte {at} of the results")),
            None => Ok(()),
        }
    }
}
