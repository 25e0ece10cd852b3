//! Descriptors of a shape, and the choice of its algorithm.

use std::ptr::{from_ref, null_mut};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{
        self,
        cublasComputeType_t::CUBLAS_COMPUTE_32F,
        cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
        cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
        cublasLtMatmulDesc_t,
        cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE,
            CUBLASLT_MATMUL_DESC_TRANSA,
        },
        cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
        cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        },
        cublasLtMatrixLayout_t,
        cublasLtReductionScheme_t::{
            CUBLASLT_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_NONE,
        },
        cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        cudaDataType,
    },
};
use half::bf16;
use tandem_attn::exec::gpu::DevicePtr;

use super::{Shape, WORKSPACE};

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// One algorithm for all numbers of rows is chosen for this number: that of a large step of decodes.
const CHOSEN_FOR: usize = 64;
/// The library's first choices for it, of which the first is taken that computes any number of rows.
const TRIED: usize = 16;
/// Numbers of rows that an algorithm must compute: parts of its tiles, and many.
const CHECKED: [usize; 8] = [1, 2, 3, 17, 64, 129, 1024, 8191];

/// Descriptors of a shape, and the algorithm chosen for it. An enqueued product no longer needs them.
pub(super) struct Product {
    pub operands: Operands,
    pub algorithm: cublasLtMatmulAlgo_t,
}

/// Descriptors of a shape.
pub(super) struct Operands {
    pub multiply: Multiply,
    /// Layouts of `w`, `x` and `out`.
    pub layouts: [Layout; 3],
    biased: bool,
}

// Each descriptor has a type of its own, so that those of a shape without an algorithm are freed, too.
pub(super) struct Multiply(pub cublasLtMatmulDesc_t);
pub(super) struct Layout(pub cublasLtMatrixLayout_t);
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
    pub(super) unsafe fn add(&self, bias: DevicePtr) -> Result<(), CublasError> {
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

impl Product {
    /// With the library's first choice for the shape.
    pub(super) fn fastest(handle: cublasLtHandle_t, shape: Shape) -> Result<Self, CublasError> {
        let operands = Operands::new(shape)?;
        let found = operands.found(handle, 1, true)?;
        let algorithm = found
            .first()
            .ok_or(CublasError(CUBLAS_STATUS_NOT_SUPPORTED))?;
        Ok(Self {
            algorithm: algorithm.algo,
            operands,
        })
    }

    /// With an algorithm that was chosen [for all rows](for_all_rows). `any` is an address in device memory.
    pub(super) fn with(
        handle: cublasLtHandle_t,
        shape: Shape,
        algorithm: cublasLtMatmulAlgo_t,
        any: DevicePtr,
    ) -> Result<Self, CublasError> {
        let operands = Operands::new(shape)?;
        operands.check(handle, &algorithm, any)?;
        Ok(Self {
            operands,
            algorithm,
        })
    }
}

/// The algorithm with which results do not depend on the number of rows: the same tiles for any number, and one sum along the
/// inputs for each result, without a split. `any` is an address in device memory.
pub(super) fn for_all_rows(
    handle: cublasLtHandle_t,
    shape: Shape,
    any: DevicePtr,
) -> Result<cublasLtMatmulAlgo_t, CublasError> {
    let of = |rows: usize| Operands::new(Shape { rows, ..shape });
    let found = of(CHOSEN_FOR)?.found(handle, TRIED, false)?;
    let checked = CHECKED.iter().map(|&rows| of(rows));
    let checked = checked.collect::<Result<Vec<_>, _>>()?;
    let found = found.iter().map(|found| found.algo);
    let mut fitting = found.filter(|algorithm| {
        let fits = |of: &Operands| of.check(handle, algorithm, any).is_ok();
        splits(algorithm).is_ok_and(|splits| splits <= 1) && checked.iter().all(fits)
    });
    fitting
        .next()
        .ok_or(CublasError(CUBLAS_STATUS_NOT_SUPPORTED))
}

/// Parts of the inputs that an algorithm adds apart.
fn splits(algorithm: &cublasLtMatmulAlgo_t) -> Result<i32, CublasError> {
    let mut splits = 0_i32;
    // SAFETY: the attribute has the size that the library documents.
    unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
            (&raw mut splits).cast(),
            size_of_val(&splits),
            null_mut(),
        )
        .result()?;
    }
    Ok(splits)
}

impl Operands {
    fn new(shape: Shape) -> Result<Self, CublasError> {
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
        // SAFETY: the descriptor was created above, and the attributes have the sizes that the library documents.
        unsafe {
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
        }
        Ok(Self {
            multiply,
            layouts,
            biased,
        })
    }

    /// The library's choices, the first of which it takes for the fastest: at most `most`, and only those without a split of the
    /// inputs unless these are `split`.
    fn found(
        &self,
        handle: cublasLtHandle_t,
        most: usize,
        split: bool,
    ) -> Result<Vec<cublasLtMatmulHeuristicResult_t>, CublasError> {
        let preference = Preference(result::create_matmul_pref()?);
        let reductions = match split {
            true => CUBLASLT_REDUCTION_SCHEME_MASK,
            false => CUBLASLT_REDUCTION_SCHEME_NONE,
        } as u32;
        let mut found = Vec::<cublasLtMatmulHeuristicResult_t>::with_capacity(most);
        let mut count = 0;
        let [w, x, out] = self.layouts.each_ref().map(|layout| layout.0);
        // SAFETY: the descriptors live in `self`, and the attributes have the sizes that the library documents. It writes
        // `count` results, at most as many as there is room for.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                from_ref(&WORKSPACE).cast(),
                size_of_val(&WORKSPACE),
            )?;
            result::set_matmul_pref_attribute(
                preference.0,
                CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                from_ref(&reductions).cast(),
                size_of_val(&reductions),
            )?;
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.multiply.0,
                w,
                x,
                out,
                out,
                preference.0,
                most as i32,
                found.as_mut_ptr(),
                &mut count,
            )
            .result()?;
            found.set_len(most.min(count.max(0) as usize));
        }
        found.retain(|found| found.state.result().is_ok());
        Ok(found)
    }

    /// Whether an algorithm computes these operands within the workspace.
    fn check(
        &self,
        handle: cublasLtHandle_t,
        algorithm: &cublasLtMatmulAlgo_t,
        any: DevicePtr,
    ) -> Result<(), CublasError> {
        let [w, x, out] = self.layouts.each_ref().map(|layout| layout.0);
        let mut checked = std::mem::MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: the descriptors live in `self`. The library writes the result if it succeeds, and reads no bias.
        let checked = unsafe {
            if self.biased {
                self.multiply.add(any)?;
            }
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.multiply.0,
                w,
                x,
                out,
                out,
                algorithm,
                checked.as_mut_ptr(),
            )
            .result()?;
            checked.assume_init()
        };
        checked.state.result()?;
        match checked.workspaceSize <= WORKSPACE {
            true => Ok(()),
            false => Err(CublasError(CUBLAS_STATUS_NOT_SUPPORTED)),
        }
    }
}
