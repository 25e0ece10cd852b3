//! The error type of the crate.

use std::path::PathBuf;

use thiserror::Error;

use crate::{
    kv::OutOfPages,
    plan::{BrokenPlan, PlanError},
    problem::{Dtype, ProblemError},
    shard::{RankError, ShardError},
    step::StepError,
    tensor::ShapeError,
};

/// The error type of the crate. Nothing was launched or written, unless a variant says otherwise.
///
/// Every message contains the values and says what to do.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A specification or a batch is wrong.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Planning failed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The plan contradicts itself.
    #[error(transparent)]
    BrokenPlan(#[from] BrokenPlan),
    /// A batch could not be distributed over ranks.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A group of ranks failed.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// The shape of a tensor does not match the rest of the call.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A page pool has too few free pages. Nothing was changed.
    #[error(transparent)]
    OutOfPages(#[from] OutOfPages),
    /// A description of the step around attention is invalid.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The extent of a tensor does not match the rest of the call.
    #[error("{tensor} has {got} {dimension}: it must be {rule}")]
    Extent {
        /// The tensor.
        tensor: &'static str,
        /// What its dimension counts.
        dimension: &'static str,
        /// The extent given.
        got: usize,
        /// What it must be.
        rule: String,
    },
    /// A tensor is null but has elements.
    #[error("{tensor} is a null pointer: pass a device address, or a tensor without elements")]
    NullPointer {
        /// The tensor.
        tensor: &'static str,
    },
    /// The address of a tensor is not aligned for vector loads.
    #[error("{tensor} starts at {address:#x}: give an address that is a multiple of {align} bytes")]
    Misaligned {
        /// The tensor.
        tensor: &'static str,
        /// Its address.
        address: u64,
        /// What the address must be a multiple of.
        align: u32,
    },
    /// An element type that the operation does not take.
    #[error("{tensor} is {got:?}: use {expected}")]
    Dtype {
        /// The tensor.
        tensor: &'static str,
        /// Its element type.
        got: Dtype,
        /// The types that are possible.
        expected: &'static str,
    },
    /// Two tensors that must have one element type have two.
    #[error("{tensor} is {got:?} and {other} is {expected:?}: convert one of them")]
    DtypesDiffer {
        /// The tensor.
        tensor: &'static str,
        /// Its element type.
        got: Dtype,
        /// The tensor it goes with.
        other: &'static str,
        /// That one's element type.
        expected: Dtype,
    },
    /// A stride that the kernels cannot follow.
    #[error("{tensor} has a stride of {got} elements between {dimension}: it must be {rule}")]
    Stride {
        /// The tensor.
        tensor: &'static str,
        /// What the stride leads over.
        dimension: &'static str,
        /// The stride given.
        got: usize,
        /// What it must be.
        rule: String,
    },
    /// A head dimension that the kernel does not take.
    #[error("{tensor} has a head dimension of {got}: give a multiple of {multiple}")]
    HeadDim {
        /// The tensor.
        tensor: &'static str,
        /// The head dimension.
        got: usize,
        /// What it must be a multiple of.
        multiple: usize,
    },
    /// No kernel was compiled for what was requested.
    #[error("no {kernel} kernel supports {asked}; supported: {there}")]
    NoInstance {
        /// The kernel.
        kernel: &'static str,
        /// What was asked for.
        asked: String,
        /// What there is.
        there: &'static str,
    },
    /// The workspace was made for another specification than the plan.
    #[error(
        "the workspace was made for {workspace}, but the plan for {plan}: make a workspace for each specification"
    )]
    OtherSpec {
        /// The fields of the workspace's specification that differ, with their values.
        workspace: String,
        /// The same fields of the plan's specification.
        plan: String,
    },
    /// A run of a workspace on another GPU than the one that it was made on. Nothing was launched.
    #[error(
        "the workspace was made on GPU {workspace}, but the run is on GPU {gpu}: make a workspace for each GPU"
    )]
    OtherGpu {
        /// The ordinal of the workspace's GPU.
        workspace: u32,
        /// The ordinal of the GPU given.
        gpu: u32,
    },
    /// There is no plan in the workspace.
    #[error("no plan was uploaded to the workspace: call Workspace::upload first")]
    NoPlan,
    /// A plan needs a launch that the workspace's launch set does not have.
    #[error(
        "the workspace's launch set has no launch {launch}: add it before capturing, or run without a launch set"
    )]
    NotCaptured {
        /// The launch.
        launch: String,
    },
    /// A call within a capture that would not do what it says when the graph is launched.
    #[error("{call} cannot be captured: {instead}")]
    InCapture {
        /// The call.
        call: &'static str,
        /// What to do.
        instead: &'static str,
    },
    /// A graph was launched for a plan that needs a launch which the graph does not contain.
    #[error(
        "the uploaded plan needs the launch {launch}, and the graph was captured without it: capture again with this plan, \
         or capture all launches of the workspace's launch set"
    )]
    NotInGraph {
        /// The launch.
        launch: String,
    },
    /// A graph of a workspace without a launch set was launched for a plan with other launches than the captured one.
    #[error(
        "the uploaded plan has other launches, items or merges than the one that the graph was captured with: capture again \
         with this plan, or give the workspace a launch set (WorkspaceOptions::launches)"
    )]
    OtherLaunches,
    /// A graph was launched for a plan that the captured tensors or pools do not fit.
    #[error(
        "the uploaded plan needs {planned} {what}, and the graph was captured with {captured}: capture with tensors and \
         pools for the largest step, or capture again with this plan"
    )]
    BeyondGraph {
        /// What does not fit.
        what: &'static str,
        /// What the plan in the workspace needs.
        planned: u32,
        /// What the captured tensors or pools have.
        captured: u32,
    },
    /// The number of page pools is not the number of parts of the plan or of the workspace's launch set.
    #[error(
        "{got} page pools for {expected} parts: give one for each part of the plan, in the batch's order, and one for \
         each part that the workspace's launch set has launches for"
    )]
    Pools {
        /// Pools given.
        got: usize,
        /// Parts of the plan, or of the launch set.
        expected: usize,
    },
    /// In the debug mode of a workspace: a page id on the device that its pool does not have.
    #[error(
        "request {request} of part {part}: page {page} of its table is {got}, and the pool has {pages} pages: give the pool \
         that the batch was made for, or find what wrote to the page ids since they were uploaded"
    )]
    PageOutside {
        /// The part of the batch.
        part: u32,
        /// The request (row block of the part).
        request: u32,
        /// Which page of its table.
        page: u32,
        /// The id that stands there.
        got: u32,
        /// Pages of the pool.
        pages: u32,
    },
    /// In the debug mode of a workspace: an item on the device that points outside an array.
    #[error(
        "item {item} of part {part} ({}): {what} is {got}, and the limit is {limit}: the plan on the device is \
         damaged; find what writes to the workspace, and upload the plan again",
        match .request { Some(request) => format!("of request {request}"), None => "of no request".into() }
    )]
    Damaged {
        /// The item.
        item: u32,
        /// The request whose table it reads, if known.
        request: Option<u32>,
        /// The part of the batch.
        part: u32,
        /// What is out of bounds.
        what: &'static str,
        /// Its value.
        got: u32,
        /// What it must not reach, or for ends of keys not pass.
        limit: u32,
    },
    /// An index that points outside what it indexes.
    #[error(
        "{array}[{index}] is {got}: give a number {}below {limit}, the number of {of}{}",
        if *.got < 0 { "from 0 and " } else { "" },
        if *.got < 0 { ", or -1 for a token that is not written" } else { "" }
    )]
    IndexOutOfRange {
        /// The array of indices.
        array: &'static str,
        /// The place in it.
        index: usize,
        /// What stands there. Only slots can be negative.
        got: i128,
        /// One past the largest index.
        limit: u64,
        /// What is indexed.
        of: &'static str,
    },
    /// Two entries have the same place.
    #[error(
        "{array}[{index}] goes to {got}, as an earlier entry does: give each entry its own place"
    )]
    WrittenTwice {
        /// The array of places.
        array: &'static str,
        /// The later entry.
        index: usize,
        /// The place.
        got: u64,
    },
    /// There is no CUDA driver on this machine.
    #[error(
        "no CUDA driver: tried {} ({reason}). Install NVIDIA's driver (with it, `nvidia-smi` works), start a \
         container with the GPU passed through, or name the library in TANDEM_LIBCUDA; the CPU backend needs none",
        .searched.join(", ")
    )]
    NoDriver {
        /// The files that were tried, in order.
        searched: Vec<String>,
        /// What the loader said about the first that is there, else about the first of them.
        reason: String,
    },
    /// There is a driver, but no GPU of that number.
    #[error(
        "GPU {ordinal} does not exist, the driver shows {count}: check CUDA_VISIBLE_DEVICES and `nvidia-smi -L`"
    )]
    NoDevice {
        /// The number asked for.
        ordinal: u32,
        /// GPUs that the driver shows.
        count: u32,
    },
    /// No kernel of this build runs on the GPU.
    #[error(
        "{device} has compute capability {}.{}, and this build has kernels for {}: use another GPU or the CPU \
         backend",
        .compute.0, .compute.1, .built_for.join(", ")
    )]
    UnsupportedArchitecture {
        /// Name of the GPU.
        device: String,
        /// Its compute capability.
        compute: (u32, u32),
        /// The architectures in this build.
        built_for: Vec<&'static str>,
    },
    /// The kernels of a variant were not compiled for the GPU.
    #[error(
        "{device} has compute capability {}.{}, and the kernels of the variant {variant:?} were compiled for {}: compile them for the \
         GPU, too (`CudaBuilder::arch`, with the families for its architecture in `variant_kernels!`)",
        .compute.0, .compute.1, .built_for.join(", ")
    )]
    VariantArchitecture {
        /// The variant.
        variant: kernels_gpu::HooksName,
        /// Name of the GPU.
        device: String,
        /// Its compute capability.
        compute: (u32, u32),
        /// The architectures of its modules.
        built_for: Vec<&'static str>,
    },
    /// A kernel that this GPU does not have: the plan is for another device, or the kernels for Ampere lack what was asked for.
    #[error(
        "{device} runs the kernels for {arch}, and among these is none {what}: plan with `Gpu::device()`; what the kernels for Ampere \
         lack runs on Hopper or on the CPU"
    )]
    NotOnDevice {
        /// What the kernel does, or its name.
        what: String,
        /// Name of the GPU.
        device: String,
        /// The architecture of the kernels that it runs.
        arch: &'static str,
    },
    /// The program has no machine code for the GPU, and the driver was not allowed to compile PTX.
    #[error(
        "no machine code of the {family} kernels runs on {device} (compute capability {}.{}){}. The driver can compile \
         the PTX for {arch}, which takes a minute or more at the first start: allow it with \
         Gpu::builder().compile_ptx(…)",
        .compute.0, .compute.1,
        .refused.as_ref().map_or(String::new(), |name| format!(", the driver answered {name}; a newer driver may load it"))
    )]
    NoMachineCode {
        /// Name of the GPU.
        device: String,
        /// Its compute capability.
        compute: (u32, u32),
        /// The architecture of the PTX.
        arch: &'static str,
        /// The family of kernels.
        family: &'static str,
        /// The driver's answer to machine code that should run there; `None` where there is none.
        refused: Option<String>,
    },
    /// A context that is not the primary one of its device: memory and streams of the two do not mix.
    #[error(
        "the context is not the primary one of device {ordinal}: retain that (as cust's Context::new and cudarc's \
         CudaContext::new do) and allocate in it"
    )]
    ForeignContext {
        /// The device of the context.
        ordinal: u32,
    },
    /// The kernels in the program cannot be unpacked: its file is damaged.
    #[error("{reason}; build or install the program again")]
    DamagedKernels {
        /// What is wrong.
        reason: String,
    },
    /// A folder has no kernels that could replace those in the program, or one that cannot be read.
    #[error(
        "{}: {reason}: give a folder with kernels that replace those in the program, named as sm_90a-mla.cubin or \
         sm_90a-mla.ptx",
        .file.display()
    )]
    NoModules {
        /// The folder, or the file in it.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The driver cannot compile the PTX, and there is no machine code for the GPU.
    #[error(
        "the kernels for {arch} are PTX {}.{}, too new for a driver of CUDA {}.{}: update the driver",
        .ptx.0, .ptx.1, .driver.0, .driver.1
    )]
    PtxTooNew {
        /// The architecture of the module.
        arch: &'static str,
        /// Version of its PTX.
        ptx: (u32, u32),
        /// The newest CUDA version that the driver knows.
        driver: (u32, u32),
    },
    /// The driver refused a module for another reason.
    #[error(
        "the driver did not load the kernels for {arch}: {name} ({code}): update the driver, or report what it said: {log}"
    )]
    ModuleRefused {
        /// The architecture of the module.
        arch: &'static str,
        /// The driver's error code.
        code: u32,
        /// The name of that code.
        name: String,
        /// What the driver's compiler said, if it ran.
        log: String,
    },
    /// A kernel is in none of the modules that were loaded.
    #[error(
        "no module for {arch} has a kernel named {kernel}: rebuild the crate, its parts are of different versions"
    )]
    NoKernel {
        /// The kernel.
        kernel: String,
        /// The architecture of the modules.
        arch: &'static str,
    },
    /// The GPU was opened without the kernels of this variant.
    #[error(
        "the specification uses the variant {asked:?}, but the GPU was opened with {there:?}: give the variant to \
         `Gpu::builder().variant`"
    )]
    NoVariant {
        /// The variant.
        asked: kernels_gpu::HooksName,
        /// Those there are.
        there: Vec<kernels_gpu::HooksName>,
    },
    /// The GPU was to be opened with two variants of one name.
    #[error(
        "two variants are called {name:?}, one of yours and another of yours or of the library: give each a name of its own in \
         `variant_kernels!`"
    )]
    VariantTwice {
        /// The name.
        name: kernels_gpu::HooksName,
    },
    /// A launch that the kernel or the GPU does not allow.
    #[error("{kernel} cannot be launched with {got} {what}: at most {limit}")]
    LaunchLimit {
        /// The name of its entry.
        kernel: String,
        /// What there is too much of.
        what: &'static str,
        /// How much was asked for.
        got: u64,
        /// How much there may be.
        limit: u64,
    },
    /// The driver lacks a function.
    #[error("the driver has no {function}: update it to CUDA {since} or newer")]
    OldDriver {
        /// The function.
        function: &'static str,
        /// The first CUDA version that has it.
        since: &'static str,
    },
    /// A tensor that the tensor memory accelerator cannot describe.
    #[error("no tensor map for {tensor}: {what} is {got}, it must be {rule}")]
    TensorMap {
        /// The tensor.
        tensor: &'static str,
        /// The quantity.
        what: &'static str,
        /// Its value.
        got: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// The device has too little memory.
    #[error(
        "{bytes} bytes do not fit in the device's memory: {free} of {total} are free; lower the limits of the plans \
         (`Bound::workspace_bytes` says what they take, `BatchLimits::with_query_tokens` and `with_prefill_keys` count most) or \
         the pages of the cache"
    )]
    OutOfMemory {
        /// The bytes asked for.
        bytes: usize,
        /// Free bytes.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// A driver call failed. The reported error may be of earlier work on the stream.
    #[error("{call} failed: {name} ({code}), {text}")]
    Driver {
        /// The function called.
        call: &'static str,
        /// The driver's error code.
        code: u32,
        /// The name of that code.
        name: String,
        /// The driver's words for it.
        text: String,
    },
}
