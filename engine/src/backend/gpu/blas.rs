//! Matrix products with cuBLASLt, which is opened when the first model is loaded.
//!
//! The library chooses the fastest algorithm once per shape; the choice is kept.

use std::{collections::HashMap, ffi::c_void, ptr::from_ref};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{
        self,
        cublasComputeType_t::CUBLAS_COMPUTE_32F,
        cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
        cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE,
            CUBLASLT_MATMUL_DESC_TRANSA,
        },
        cublasLtMatmulPreference_t,
        cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        cublasLtMatrixLayout_t, cudaDataType,
    },
};
use half::bf16;
use tandem_attn::exec::gpu::{DeviceBuffer, DevicePtr, Gpu, Stream};

use crate::Error;

/// Workspace of algorithms in bytes, as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// The library's handle, and the chosen algorithm of each shape so far.
pub(super) struct Blas {
    handle: cublasLtHandle_t,
    workspace: DeviceBuffer<u8>,
    products: HashMap<Shape, Product>,
}

// SAFETY: any thread may use the handle and the descriptors, one at a time; `&mut self` ensures that.
unsafe impl Send for Blas {}

/// `out = x · wᵀ + bias`: `x` is `[rows, inputs]`, `w` is `[outputs, inputs]`, `out` is `[rows, outputs]`, `bias` is `[outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Elements from a row of `out` to the next, at least `outputs`.
    pub out_stride: usize,
    /// Whether results are in f32; otherwise they are in bf16, like the inputs.
    pub in_f32: bool,
    /// Whether there is a bias, of the type of the results.
    pub biased: bool,
}

/// Descriptors of a shape, and the algorithm chosen for it. An enqueued product no longer needs them.
struct Product {
    multiply: Multiply,
    /// Layouts of `w`, `x` and `out`.
    layouts: [Layout; 3],
    algorithm: cublasLtMatmulAlgo_t,
}

// Each descriptor has a type of its own, so that those of a shape without an algorithm are freed, too.
struct Multiply(cublasLtMatmulDesc_t);
struct Layout(cublasLtMatrixLayout_t);
struct Preference(cublasLtMatmulPreference_t);

impl Drop for Multiply {
    fn drop(&mut self) {
        // SAFETY: it was created with the value, and nothing else has it.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

impl Multiply {
    /// Sets the bias of the next products.
    ///
    /// # Safety
    /// The descriptor is one for products with a bias, and no other thread uses it.
    unsafe fn add(&self, bias: DevicePtr) -> Result<(), CublasError> {
        // SAFETY: the attribute has the size that the library documents.
        unsafe {
            result::set_matmul_desc_attribute(
                self.0,
                CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                from_ref(&bias).cast(),
                size_of_val(&bias),
            )
        }
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

impl Blas {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, Error> {
        // SAFETY: opens NVIDIA's library and closes it.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoCublasLt);
        }
        gpu.make_current()?;
        let workspace = DeviceBuffer::zeroed(gpu, WORKSPACE)?;
        let handle = result::create_handle().map_err(|error| Error::CublasLt {
            call: "cublasLtCreate",
            m: 0,
            n: 0,
            k: 0,
            status: error.to_string(),
        })?;
        Ok(Self {
            handle,
            workspace,
            products: HashMap::new(),
        })
    }

    /// Enqueues a product on a stream.
    ///
    /// # Safety
    /// The matrices, and the bias if there is one, have the given shape and are dense, but for the stride of `out`. They are in
    /// device memory and stay there until the work on `stream` is done, and the context of `stream` is current.
    pub(super) unsafe fn multiply(
        &mut self,
        shape: Shape,
        [x, w, out]: [DevicePtr; 3],
        bias: Option<DevicePtr>,
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
        assert_eq!(shape.biased, bias.is_some(), "a bias if the shape has one");
        if let Some(bias) = bias {
            // SAFETY: the descriptor lives in `self`; a product that is enqueued has copied it.
            unsafe { product.multiply.add(bias) }
                .map_err(|error| shape.error("cublasLtMatmulDescSetAttribute", error))?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [of_w, of_x, of_out] = product.layouts.each_ref().map(|layout| layout.0);
        let pointer = |address: DevicePtr| address as *const c_void;
        // SAFETY: the descriptors live in `self`; the caller vouches for the matrices; the workspace has the size for
        // which the algorithm was chosen.
        let multiplied = unsafe {
            result::matmul(
                handle,
                product.multiply.0,
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
        // SAFETY: we created it, and nothing uses it any more.
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
            out_stride,
            in_f32,
            biased,
        } = shape;
        let (element, result_element) = match in_f32 {
            true => (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_32F),
            false => (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_16BF),
        };
        const { assert!(size_of::<bf16>() == 2) };
        // cuBLASLt is column-major: it sees a row-major matrix as its transpose. It computes outᵀ = w · xᵀ, for which
        // `w` is marked as transposed.
        let layout = |element, rows: usize, columns: usize, stride: usize| {
            result::create_matrix_layout(element, rows as u64, columns as u64, stride as i64)
                .map(Layout)
        };
        let multiply = result::create_matmul_desc(CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?;
        let multiply = Multiply(multiply);
        let layouts = [
            layout(element, inputs, outputs, inputs)?,
            layout(element, inputs, rows, inputs)?,
            layout(result_element, outputs, rows, out_stride)?,
        ];
        let preference = Preference(result::create_matmul_pref()?);
        // SAFETY: the descriptors were created above, and the attributes have the sizes that the library documents.
        let found = unsafe {
            result::set_matmul_desc_attribute(
                multiply.0,
                CUBLASLT_MATMUL_DESC_TRANSA,
                from_ref(&TRANSPOSED).cast(),
                size_of_val(&TRANSPOSED),
            )?;
            if biased {
                let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                result::set_matmul_desc_attribute(
                    multiply.0,
                    CUBLASLT_MATMUL_DESC_EPILOGUE,
                    from_ref(&epilogue).cast(),
                    size_of_val(&epilogue),
                )?;
            }
            result::set_matmul_pref_attribute(
                preference.0,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                from_ref(&WORKSPACE).cast(),
                size_of_val(&WORKSPACE),
            )?;
            let [w, x, out] = layouts.each_ref().map(|layout| layout.0);
            let (multiply, preference) = (multiply.0, preference.0);
            result::get_matmul_algo_heuristic(handle, multiply, w, x, out, out, preference)?
        };
        Ok(Self {
            multiply,
            layouts,
            algorithm: found.algo,
        })
    }
}
