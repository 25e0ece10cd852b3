//! Products of matrices by cuBLASLt, which is opened when the first model is loaded.
//!
//! For each shape the library is asked once which algorithms may be fastest. Shapes that come again and again, those of
//! captured steps, are timed with each; others take the first.

use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    ptr::from_ref,
};

use cudarc::{
    cublaslt::{
        result::{self, CublasError},
        sys::{
            self, cublasComputeType_t::CUBLAS_COMPUTE_32F, cublasLtHandle_t, cublasLtMatmulAlgo_t,
            cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
            cublasLtMatmulHeuristicResult_t,
            cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            cublasLtMatrixLayout_t, cudaDataType,
        },
    },
    driver::{
        DriverError,
        result::{event, memset_d8_async, stream},
        sys::CUevent_flags,
    },
};
use half::bf16;
use tandem_attn::exec::gpu::{DeviceBuffer, DevicePtr, Gpu, Stream};

use super::buffers::cuda;
use crate::Error;

/// What algorithms may use beside the matrices, as NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;
const ELSEWHERE: usize = 256 << 20;
/// Algorithms that are timed, and how often each.
const CANDIDATES: usize = 8;
const TIMES: usize = 3;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// The library, and what it said of shapes so far.
pub(super) struct Blas {
    handle: cublasLtHandle_t,
    workspace: DeviceBuffer<u8>,
    /// Larger than the second-level cache: filled before what is timed, as in a model nothing is in that cache.
    elsewhere: DeviceBuffer<u8>,
    products: HashMap<Shape, Product>,
}

// SAFETY: a handle and descriptors may be used by any thread, one at a time, as `&mut self` has it.
unsafe impl Send for Blas {}

/// `out = x · wᵀ`: `x` is `[rows, inputs]`, `w` is `[outputs, inputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Results are in f32; else in bf16, as everything else is.
    pub in_f32: bool,
}

/// Descriptors of a shape, and its algorithm.
struct Product {
    multiply: cublasLtMatmulDesc_t,
    /// Of `w`, `x` and `out`.
    layouts: [cublasLtMatrixLayout_t; 3],
    /// The likeliest to be fast come first; one is left once they were timed.
    algorithms: Vec<cublasLtMatmulAlgo_t>,
}

impl Blas {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, Error> {
        // SAFETY: opens a library of NVIDIA's, and closes it.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoCublasLt);
        }
        gpu.make_current()?;
        let handle = result::create_handle().map_err(|error| Error::CublasLt {
            call: "cublasLtCreate",
            m: 0,
            n: 0,
            k: 0,
            status: error.to_string(),
        })?;
        Ok(Self {
            handle,
            workspace: DeviceBuffer::zeroed(gpu, WORKSPACE)?,
            elsewhere: DeviceBuffer::zeroed(gpu, ELSEWHERE)?,
            products: HashMap::new(),
        })
    }

    /// Puts a product on a stream.
    ///
    /// # Safety
    /// The matrices are dense, of the shape and in device memory, and stay until the work on `stream` is done; the
    /// context of `stream` is current.
    pub(super) unsafe fn multiply(
        &mut self,
        shape: Shape,
        [x, w, out]: [DevicePtr; 3],
        stream: Stream,
    ) -> Result<(), Error> {
        if shape.rows == 0 {
            return Ok(());
        }
        let product = match self.products.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let product = Product::new(self.handle, shape);
                new.insert(product.map_err(|error| shape.error("choosing an algorithm", error))?)
            }
        };
        // SAFETY: the caller's promises.
        unsafe { product.run(self.handle, 0, [x, w, out], &self.workspace, stream) }
            .map_err(|error| shape.error("cublasLtMatmul", error))
    }

    /// Times the algorithms that may be fastest for a shape, and keeps the one that is; nothing where that was done.
    /// The product is in `out` afterwards.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), and `stream` is not being captured.
    pub(super) unsafe fn tune(
        &mut self,
        shape: Shape,
        matrices: [DevicePtr; 3],
        stream: Stream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promises.
        unsafe { self.multiply(shape, matrices, stream)? };
        let Some(product) = self.products.get_mut(&shape) else {
            return Ok(());
        };
        if product.algorithms.len() == 1 {
            return Ok(());
        }
        let raw = stream.as_raw().cast();
        let flags = CUevent_flags::CU_EVENT_DEFAULT;
        let failed = |error: DriverError| cuda("timing a product", &error);
        let [begin, end] = [event::create(flags), event::create(flags)];
        let (begin, end) = (begin.map_err(failed)?, end.map_err(failed)?);
        let mut best = (f32::INFINITY, 0);
        for (candidate, _) in product.algorithms.iter().enumerate() {
            for _ in 0..TIMES {
                // SAFETY: the caller's promises; the memory that is filled is ours.
                let ran = unsafe {
                    memset_d8_async(self.elsewhere.address(), 1, ELSEWHERE, raw).map_err(failed)?;
                    event::record(begin, raw).map_err(failed)?;
                    let ran =
                        product.run(self.handle, candidate, matrices, &self.workspace, stream);
                    event::record(end, raw).map_err(failed)?;
                    stream::synchronize(raw).map_err(failed)?;
                    ran
                };
                // SAFETY: both were recorded, and the stream waited for.
                let time = unsafe { event::elapsed(begin, end) }.map_err(failed)?;
                // What an algorithm refuses is no result.
                if ran.is_ok() && time < best.0 {
                    best = (time, candidate);
                }
            }
        }
        product.algorithms = vec![product.algorithms[best.1]];
        // SAFETY: made above, and waited for; as above.
        unsafe {
            event::destroy(begin).map_err(failed)?;
            event::destroy(end).map_err(failed)?;
            self.multiply(shape, matrices, stream)
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.products.clear();
        // SAFETY: made by us, and nothing uses it any more.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Shape {
    fn error(self, call: &'static str, error: CublasError) -> Error {
        Error::CublasLt {
            call,
            m: self.rows,
            n: self.outputs,
            k: self.inputs,
            status: error.to_string(),
        }
    }
}

impl Product {
    fn new(handle: cublasLtHandle_t, shape: Shape) -> Result<Self, CublasError> {
        let Shape {
            rows,
            inputs,
            outputs,
            in_f32,
        } = shape;
        let (element, result_element) = match in_f32 {
            true => (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_32F),
            false => (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_16BF),
        };
        const { assert!(size_of::<bf16>() == 2) };
        // The library counts columns first: there a row-major matrix is its transpose, and the product
        // outᵀ = w · xᵀ has `w` transposed.
        let layout = |element, rows: usize, columns: usize| {
            result::create_matrix_layout(element, rows as u64, columns as u64, rows as i64)
        };
        let multiply = result::create_matmul_desc(CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?;
        let layouts = [
            layout(element, inputs, outputs)?,
            layout(element, inputs, rows)?,
            layout(result_element, outputs, rows)?,
        ];
        let preference = result::create_matmul_pref()?;
        let mut found: [cublasLtMatmulHeuristicResult_t; CANDIDATES] = [(); CANDIDATES].map(|()| {
            // SAFETY: numbers and an opaque array of them; the library fills it in.
            unsafe { std::mem::zeroed() }
        });
        let mut count = 0;
        // SAFETY: the descriptors were made above, and the attributes are of the sizes that the library documents.
        unsafe {
            result::set_matmul_desc_attribute(
                multiply,
                CUBLASLT_MATMUL_DESC_TRANSA,
                from_ref(&TRANSPOSED).cast(),
                size_of_val(&TRANSPOSED),
            )?;
            result::set_matmul_pref_attribute(
                preference,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                from_ref(&WORKSPACE).cast(),
                size_of_val(&WORKSPACE),
            )?;
            let [w, x, out] = layouts;
            let answered = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                multiply,
                w,
                x,
                out,
                out,
                preference,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            result::destroy_matmul_pref(preference)?;
            answered.result()?;
        }
        let found = &found[..(count.max(0) as usize).min(CANDIDATES)];
        let usable = found.iter().filter(|one| one.state.result().is_ok());
        let algorithms: Vec<_> = usable.map(|one| one.algo).collect();
        if algorithms.is_empty() {
            return Err(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            ));
        }
        Ok(Self {
            multiply,
            layouts,
            algorithms,
        })
    }

    /// # Safety
    /// As [`Blas::multiply`].
    unsafe fn run(
        &self,
        handle: cublasLtHandle_t,
        candidate: usize,
        [x, w, out]: [DevicePtr; 3],
        workspace: &DeviceBuffer<u8>,
        stream: Stream,
    ) -> Result<(), CublasError> {
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [of_w, of_x, of_out] = self.layouts;
        let pointer = |address: DevicePtr| address as *const c_void;
        // SAFETY: the descriptors live in `self`, the matrices are as the caller says, and the workspace is as large as
        // the algorithms were told.
        unsafe {
            result::matmul(
                handle,
                self.multiply,
                from_ref(&one).cast(),
                from_ref(&zero).cast(),
                pointer(w),
                of_w,
                pointer(x),
                of_x,
                pointer(out),
                of_out,
                out as *mut c_void,
                of_out,
                &self.algorithms[candidate],
                workspace.address() as *mut c_void,
                WORKSPACE,
                stream.as_raw().cast(),
            )
        }
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made by us; a product on a stream needs them no more once it is put there.
        unsafe {
            let _ = result::destroy_matmul_desc(self.multiply);
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}
