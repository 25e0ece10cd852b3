//! Matrix products with cuBLASLt, which is opened when the first model is loaded.
//!
//! The library chooses the fastest algorithm once per shape; the choice is kept. If results are not to depend on the number of
//! rows, all numbers of rows have one algorithm.

mod product;

use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    ptr::from_ref,
};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{self, cublasLtHandle_t, cublasLtMatmulAlgo_t},
};
use tandem_attn::exec::gpu::{DeviceBuffer, DevicePtr, Gpu, Stream};

use crate::Error;
use product::{Product, for_all_rows};

/// Workspace of algorithms in bytes, as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// The library's handle, and the chosen algorithm of each shape so far.
pub(super) struct Blas {
    handle: cublasLtHandle_t,
    workspace: DeviceBuffer<u8>,
    products: HashMap<Shape, Product>,
    /// Whether a row of results is not to depend on the number of rows.
    by_row: bool,
    /// The algorithms for that, by shapes of no rows.
    for_all_rows: HashMap<Shape, cublasLtMatmulAlgo_t>,
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

/// The names of files by which the engine looks for cuBLASLt when it loads a model on a GPU, in this order.
#[must_use]
pub fn cublas_lt_names() -> Vec<String> {
    cudarc::get_lib_name_candidates("cublasLt")
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
            by_row: false,
            for_all_rows: HashMap::new(),
        })
    }

    /// Whether a row of results does not depend on the number of rows.
    pub(super) const fn is_by_row(&self) -> bool {
        self.by_row
    }

    /// Sets whether a row of later products is not to depend on the number of rows.
    pub(super) fn set_by_row(&mut self, by_row: bool) {
        if self.by_row != by_row {
            self.by_row = by_row;
            self.products.clear();
        }
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
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) if self.by_row => {
                let any = self.workspace.address();
                let algorithm = match self.for_all_rows.entry(Shape { rows: 0, ..shape }) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(new) => {
                        *new.insert(for_all_rows(handle, shape, any).map_err(|error| {
                            shape.error("choosing an algorithm for all rows", error)
                        })?)
                    }
                };
                new.insert(
                    Product::with(handle, shape, algorithm, any)
                        .map_err(|error| shape.error("cublasLtMatmulAlgoCheck", error))?,
                )
            }
            Entry::Vacant(new) => new.insert(
                Product::fastest(handle, shape)
                    .map_err(|error| shape.error("choosing an algorithm", error))?,
            ),
        };
        assert_eq!(shape.biased, bias.is_some(), "a bias if the shape has one");
        if let Some(bias) = bias {
            // SAFETY: the descriptor lives in `self`; a product that is enqueued has copied it.
            unsafe { product.operands.multiply.add(bias) }
                .map_err(|error| shape.error("cublasLtMatmulDescSetAttribute", error))?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let operands = &product.operands;
        let [of_w, of_x, of_out] = operands.layouts.each_ref().map(|layout| layout.0);
        let pointer = |address: DevicePtr| address as *const c_void;
        // SAFETY: the descriptors live in `self`; the caller vouches for the matrices; the workspace has the size for
        // which the algorithm was chosen.
        let multiplied = unsafe {
            result::matmul(
                handle,
                operands.multiply.0,
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

#[cfg(test)]
mod tests {
    /// The guide has this order.
    #[test]
    fn the_library_without_a_version_is_looked_for_first() {
        let names = super::cublas_lt_names();
        let place = |end: &str| {
            let name = format!("libcublasLt.so{end}");
            names.iter().position(|of| *of == name)
        };
        assert_eq!(place(""), Some(0), "{names:?}");
        assert!(place(".12").is_some() && place(".12") < place(".11"));
        assert!(place(".13").is_none_or(|of_13| Some(of_13) < place(".12")));
    }
}
