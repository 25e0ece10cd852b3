//! GPU backend: uses candle's memory and stream, and keeps the workspaces.

use std::sync::{Arc, Mutex, Weak};

use candle_core::{
    CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail,
    cuda_backend::{
        CudaDType, CudaStorageSlice,
        cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop},
    },
};
use tandem_attn::{
    gpu::{
        DeviceArray, DeviceTensor, Gpu, KvPool, KvScales, RunTensors, Stream, Workspace,
        WorkspaceOptions,
    },
    half::{bf16, f16},
    kv::KvStrides,
    plan::{Bound, DeviceDescription, Plan},
    problem::{Dtype, KvLayout, Spec},
    tensor::Element,
};

use crate::{
    growth::{grown, of_both},
    layout::Axes,
    ops::Attend,
    step::lock,
    wrap,
};

/// The handle of a stream.
fn raw(stream: &CudaStream) -> Stream {
    Stream::from_raw(stream.cu_stream().cast())
}

/// A storage, and the layout of the tensor in it.
type Part<'a> = (&'a CudaStorage, &'a Layout);

/// Address and type of a storage's contents, and the guard that orders work on it.
macro_rules! in_storage {
    ($slice:expr, $pointer:ident, $stream:expr) => {
        match $slice {
            CudaStorageSlice::BF16(slice) => with(Dtype::BF16, slice.$pointer($stream)),
            CudaStorageSlice::F16(slice) => with(Dtype::F16, slice.$pointer($stream)),
            CudaStorageSlice::F32(slice) => with(Dtype::F32, slice.$pointer($stream)),
            CudaStorageSlice::F8E4M3(slice) => with(Dtype::F8E4M3, slice.$pointer($stream)),
            _ => bail!("attention takes BF16 and F16, and caches of F8E4M3"),
        }
    };
}
thread_local! {
    /// Ends with the thread.
    static THREAD: Arc<()> = Arc::default();
}

/// A GPU, and a workspace for each class of layers on each stream.
#[derive(Debug)]
pub struct Backend {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    classes: Mutex<Vec<Class>>,
    scales: Mutex<Vec<(f32, CudaSlice<f32>)>>,
}

/// The workspace of plans for some heads, on one stream.
#[derive(Debug)]
struct Class {
    spec: Spec,
    stream: Stream,
    /// The thread. Candle's streams are those of a thread: all have the same handle, which is another stream in each thread.
    thread: Weak<()>,
    bound: Bound,
    workspace: Workspace,
    /// The plan in the workspace.
    uploaded: Option<Arc<Plan>>,
}

impl Backend {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        Ok(Self {
            // For GPUs newer than Hopper and drivers older than the machine code.
            gpu: Gpu::builder()
                .compile_ptx(&mut |_| {})
                .build_in_cudarc(stream.context())
                .map_err(wrap)?,
            stream,
            classes: Mutex::default(),
            scales: Mutex::default(),
        })
    }

    pub fn description(&self) -> DeviceDescription {
        self.gpu.device()
    }

    /// Allocates a workspace for plans within a bound, on the stream of the backend's device.
    pub fn reserve(&self, spec: &Spec, bound: &Bound) -> Result<()> {
        let mut classes = lock(&self.classes);
        self.class(&mut classes, spec, bound, &self.stream, of_both)
            .map(drop)
    }

    /// The class of some heads on a stream, with a workspace for the bound. One that is too small is replaced by one of the
    /// `larger` bound.
    fn class<'a>(
        &self,
        classes: &'a mut Vec<Class>,
        spec: &Spec,
        bound: &Bound,
        on: &CudaStream,
        larger: fn(&Bound, &Bound) -> Bound,
    ) -> Result<&'a mut Class> {
        let stream = raw(on);
        let thread = THREAD.with(Arc::downgrade);
        let known = classes.iter().position(|class| {
            (&class.spec, class.stream) == (spec, stream) && class.thread.ptr_eq(&thread)
        });
        if let Some(index) = known.filter(|&index| classes[index].bound.check(bound).is_ok()) {
            return Ok(&mut classes[index]);
        }
        let mut bound = *bound;
        if let Some(index) = known {
            bound = larger(&bound, &classes[index].bound);
            // Work under way still uses the old workspace.
            on.synchronize().map_err(candle_core::Error::wrap)?;
            classes.remove(index);
        }
        let of_ended = |class: &Class| class.thread.strong_count() == 0;
        if classes.iter().any(of_ended) {
            // Their work may still be under way.
            on.context()
                .synchronize()
                .map_err(candle_core::Error::wrap)?;
            classes.retain(|class| !of_ended(class));
        }
        let workspace = self
            .gpu
            .workspace(spec, &bound, WorkspaceOptions::default());
        classes.push(Class {
            spec: *spec,
            stream,
            thread,
            bound,
            workspace: workspace.map_err(wrap)?,
            uploaded: None,
        });
        let last = classes.len() - 1;
        Ok(&mut classes[last])
    }

    /// Computes attention into a dense tensor of the queries' type.
    pub fn attend(&self, run: &Attend, parts: [Part<'_>; 3]) -> Result<(CudaStorage, Shape)> {
        match run.plan.spec.out_dtype {
            Dtype::BF16 => self.attend_in::<bf16>(run, parts),
            Dtype::F16 => self.attend_in::<f16>(run, parts),
            Dtype::F32 => self.attend_in::<f32>(run, parts),
            other => bail!("no kernel takes {other:?}"),
        }
    }

    fn attend_in<T: CudaDType + DeviceRepr + Element>(
        &self,
        run: &Attend,
        [q, k, v]: [Part<'_>; 3],
    ) -> Result<(CudaStorage, Shape)> {
        let Attend {
            plan,
            scales,
            sinks,
            ..
        } = run;
        let (spec, device) = (&plan.spec, q.0.device.clone());
        let page_size = plan.parts[0].page_size as usize;
        let stream = device.cuda_stream();
        let shape = [plan.total_q, spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
        let elements = shape.iter().product::<usize>();
        // SAFETY: the run writes all of it. The driver does not allocate 0 bytes.
        let mut out = unsafe { device.alloc::<T>(elements.max(1)) }?;
        {
            let (q, _q) = tensor(q.0, Axes::<3>::of(q.1)?, &stream)?;
            let (k, _k) = tensor(k.0, Axes::pages(k.1, page_size)?, &stream)?;
            let (v, _v) = tensor(v.0, Axes::pages(v.1, page_size)?, &stream)?;
            let mut pool = pool(spec, &k, &v)?;
            if let Some(scales) = scales {
                let [k, v] = scales.map(|scale| self.scale(scale, &stream));
                pool = pool.with_scales(KvScales::Tensor { k: k?, v: v? });
            }
            let (address, _out) = out.device_ptr_mut(&stream);
            let out = DeviceTensor::new(address, T::DTYPE, shape);
            let pools = [pool];
            let mut tensors = RunTensors::new(&q, &pools, &out);
            let sinks = sinks.as_ref().map(Tensor::storage_and_layout);
            let sinks = match &sinks {
                Some((storage, layout)) => Some(dense::<f32>("sinks", storage, layout, &stream)?),
                None => None,
            };
            if let Some((sinks, _read)) = &sinks {
                tensors = tensors.with_sinks(*sinks);
            }
            let mut classes = lock(&self.classes);
            let class = self.class(&mut classes, spec, &Bound::of(plan), &stream, grown)?;
            if !class
                .uploaded
                .as_ref()
                .is_some_and(|uploaded| Arc::ptr_eq(uploaded, plan))
            {
                class.uploaded = None;
                // SAFETY: the stream is candle's, of the primary context, and all runs of this workspace are on it: the
                // workspace is this thread's alone.
                unsafe { class.workspace.upload(plan, raw(&stream)) }.map_err(wrap)?;
                class.uploaded = Some(plan.clone());
            }
            // SAFETY: candle's storages hold the tensors in memory of this device, which `attend` of the crate checks, and
            // the guards order later work on them after this run. The plan comes from the planner unchanged.
            unsafe {
                self.gpu
                    .run_with(&mut class.workspace, &tensors, raw(&stream))
            }
            .map_err(wrap)?;
        }
        Ok((
            CudaStorage::wrap_cuda_slice(out, device),
            Shape::from(shape.to_vec()),
        ))
    }

    /// A scale in device memory. It stays there, because layers have few scales.
    fn scale(&self, scale: f32, stream: &Arc<CudaStream>) -> Result<DeviceTensor<1>> {
        let mut scales = lock(&self.scales);
        let known = scales
            .iter()
            .find(|(known, _)| known.to_bits() == scale.to_bits());
        let address = match known {
            Some((_, there)) => there.device_ptr(stream).0,
            None => {
                let there = stream
                    .clone_htod(&[scale])
                    .map_err(candle_core::Error::wrap)?;
                // The next call may read it on another stream.
                stream.synchronize().map_err(candle_core::Error::wrap)?;
                let address = there.device_ptr(stream).0;
                scales.push((scale, there));
                address
            }
        };
        Ok(DeviceTensor::new(address, Dtype::F32, [1]))
    }

    /// Copies rows of new tokens to their slots. With a scale, quantises them.
    pub fn append(
        &self,
        (cache, cache_layout): (&mut CudaStorage, &Layout),
        (rows, rows_layout): Part<'_>,
        slots: &Tensor,
        scale: Option<f32>,
    ) -> Result<()> {
        let stream = rows.device.cuda_stream();
        let scale = scale.map(|scale| self.scale(scale, &stream)).transpose()?;
        let (rows, _rows) = tensor(rows, Axes::<3>::of(rows_layout)?, &stream)?;
        let axes = Axes::<4>::of(cache_layout)?;
        let (address, dtype, _cache) = in_storage!(&mut cache.slice, device_ptr_mut, &stream);
        let pool = described(address, dtype, axes);
        let ((storage, layout), of) = (slots.storage_and_layout(), slots.dtype());
        let (slots, _slots) = match of {
            // Negative ones are beyond any pool when they are read without a sign.
            DType::I32 => {
                let (slots, read) = dense::<i32>("slots", &storage, layout, &stream)?;
                (DeviceArray::new(slots.address, slots.len), read)
            }
            _ => dense::<u32>("slots", &storage, layout, &stream)?,
        };
        // SAFETY: candle's storages hold the tensors in memory of this device, and the guards order later work on them
        // after this copy. If two tokens have the same slot, one of the two rows remains.
        unsafe {
            match scale {
                Some(scale) => {
                    let scale = Some(&scale);
                    self.gpu
                        .append_rows_quantised(&rows, scale, slots, &pool, raw(&stream))
                }
                None => self.gpu.append_rows(&rows, slots, &pool, raw(&stream)),
            }
        }
        .map_err(wrap)
    }
}

/// The elements of a dense tensor that a call on the stream reads.
fn dense<'a, T: CudaDType + DeviceRepr + 'a>(
    name: &str,
    storage: &'a Storage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> Result<(DeviceArray<T>, SyncOnDrop<'a>)> {
    let Storage::Cuda(storage) = storage else {
        bail!("the {name} are not on the GPU that the cache is on");
    };
    let (address, read) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
    let first = address + (layout.start_offset() * size_of::<T>()) as u64;
    Ok((DeviceArray::new(first, layout.shape().elem_count()), read))
}

fn with<G>(dtype: Dtype, (address, guard): (u64, G)) -> (u64, Dtype, G) {
    (address, dtype, guard)
}

/// A tensor that a call on the stream reads.
fn tensor<'a, const RANK: usize>(
    storage: &'a CudaStorage,
    axes: Axes<RANK>,
    stream: &'a CudaStream,
) -> Result<(DeviceTensor<RANK>, SyncOnDrop<'a>)> {
    let (address, dtype, read) = in_storage!(&storage.slice, device_ptr, stream);
    Ok((described(address, dtype, axes), read))
}

/// Describes a tensor in a storage that begins at an address.
fn described<const RANK: usize>(
    storage: u64,
    dtype: Dtype,
    axes: Axes<RANK>,
) -> DeviceTensor<RANK> {
    let Axes {
        first,
        shape,
        strides,
    } = axes;
    let address = storage + first as u64 * u64::from(dtype.bytes());
    (0..RANK).fold(DeviceTensor::new(address, dtype, shape), |tensor, axis| {
        tensor.with_stride(axis, strides[axis])
    })
}

/// Describes keys and values of `[pages, page_size, kv_heads, head_dim]` for the kernels.
fn pool(spec: &Spec, k: &DeviceTensor<4>, v: &DeviceTensor<4>) -> Result<KvPool> {
    let narrow = |name: &str, what: &str, number: usize| match u32::try_from(number) {
        Ok(number) => Ok(number),
        Err(_) => bail!("{name} has {number} {what}, more than 32 bits count"),
    };
    let strides = |name: &str, tensor: &DeviceTensor<4>| {
        let [page, token, head, element] = tensor.strides;
        if element != 1 && tensor.shape[3] > 1 {
            bail!(
                "{name} has a stride of {element} between the elements of a head: they must lie side by side"
            );
        }
        Ok(KvStrides {
            page: narrow(name, "elements in a page", page)?,
            token: narrow(name, "elements between tokens", token)?,
            head: narrow(name, "elements between heads", head)?,
            page_size: narrow(name, "tokens in a page", tensor.shape[1])?,
        })
    };
    if k.shape[..3] != v.shape[..3] {
        bail!(
            "k is {:?} and v is {:?}: pages, tokens and heads must be the same",
            k.shape,
            v.shape
        );
    }
    let (k_strides, v_strides) = (strides("k", k)?, strides("v", v)?);
    let pages = narrow("k", "pages", k.shape[0])?;
    Ok(KvPool::new(
        spec,
        KvLayout::Nhd,
        k_strides.page_size,
        pages,
        k.address,
        v.address,
    )
    .with_strides(k_strides, v_strides))
}
