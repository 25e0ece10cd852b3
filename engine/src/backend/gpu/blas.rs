//! Products of matrices by cuBLASLt, which is opened when the first model is loaded.
//!
//! For each shape the library is asked once which algorithm is fastest, and the answer is kept.

use std::{collections::HashMap, ffi::c_void, ptr::from_ref};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{
        self, cublasComputeType_t::CUBLAS_COMPUTE_32F, cublasLtHandle_t, cublasLtMatmulAlgo_t,
        cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
        cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        cublasLtMatrixLayout_t, cudaDataType,
    },
};
use half::bf16;
use tandem_attn::exec::gpu::{DeviceBuffer, DevicePtr, Gpu, Stream};

use crate::Error;

/// What algorithms may use beside the matrices, as NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// The library, and what it said of shapes so far.
pub(super) struct Blas {
    handle: cublasLtHandle_t,
    workspace: DeviceBuffer<u8>,
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
    algorithm: cublasLtMatmulAlgo_t,
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
        let handle = self.handle;
        let product = match self.products.entry(shape) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => new.insert(
                Product::new(handle, shape)
                    .map_err(|error| shape.error("choosing an algorithm", error))?,
            ),
        };
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [of_w, of_x, of_out] = product.layouts;
        let pointer = |address: DevicePtr| address as *const c_void;
        // SAFETY: the descriptors live in `self`, the matrices are as the caller says, and the workspace is as large as
        // the algorithm was asked for.
        let multiplied = unsafe {
            result::matmul(
                handle,
                product.multiply,
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
                &product.algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                stream.as_raw().cast(),
            )
        };
        multiplied.map_err(|error| shape.error("cublasLtMatmul", error))
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
        // SAFETY: the descriptors were made above, and the attributes are of the sizes that the library documents.
        let found = unsafe {
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
            let found =
                result::get_matmul_algo_heuristic(handle, multiply, w, x, out, out, preference);
            result::destroy_matmul_pref(preference)?;
            found?
        };
        Ok(Self {
            multiply,
            layouts,
            algorithm: found.algo,
        })
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
