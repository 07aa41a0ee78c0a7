//! Matrix products with cuBLASLt.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::cublas::sys::cublasOperation_t as Operation;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtMatmulDescAttributes_t as OfProduct,
    cublasLtMatmulPreferenceAttributes_t as OfChoice, cublasLtMatrixLayoutAttribute_t as OfLayout,
    cudaDataType as Type,
};

use crate::base::lock;
use crate::tensor::DType;
use crate::tensor::cuda::{Address, Blas, DriverError, DriverResult, Handle, Matrix, Product};

/// The largest workspace: NVIDIA's advice for Hopper.
const MOST_ROOM_BYTES: usize = 32 << 20;

/// The library, with the algorithms that it has chosen.
pub(super) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    /// The algorithm by shape; `None` if the library has none.
    chosen: Mutex<HashMap<Product, Option<Arc<ChosenAlgorithm>>>>,
}

// SAFETY: cuBLASLt's handle may be used by several threads at once.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cublasLt")
    }
}

impl CublasLt {
    /// Opens the library in the calling thread's context. Returns `None` if it is not installed or does not start.
    pub(super) fn open() -> Option<CublasLt> {
        // SAFETY: the function only looks up the library.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        // The look-up panics if the library is too old to have one of the functions.
        let handle = std::panic::catch_unwind(result::create_handle).ok()?.ok()?;
        Some(CublasLt { handle, chosen: Mutex::default() })
    }

    fn choose(&self, product: &Product) -> DriverResult<Option<Arc<ChosenAlgorithm>>> {
        let shape = shape(product);
        if let Some(found) = self.lock().get(&shape) {
            return Ok(found.clone());
        }
        let made = match ChosenAlgorithm::new(self.handle, &shape) {
            Ok(chosen) => Some(Arc::new(chosen)),
            Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => None,
            Err(e) => return Err(call_error("cublasLtMatmulAlgoGetHeuristic")(e)),
        };
        self.lock().insert(shape, made.clone());
        Ok(made)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Product, Option<Arc<ChosenAlgorithm>>>> {
        lock(&self.chosen)
    }
}

// SAFETY: the library gets the operands, the result and the workspace, and no other memory.
unsafe impl Blas for CublasLt {
    fn workspace_bytes(&self, product: &Product) -> DriverResult<Option<usize>> {
        Ok(self.choose(product)?.map(|chosen| chosen.algorithm.workspaceSize))
    }

    unsafe fn multiply(&self, product: &Product, room: Address, stream: Handle) -> DriverResult<()> {
        let Some(chosen) = self.choose(product)? else {
            return Err(call_error("cublasLtMatmul")(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            )));
        };
        let (ones, zeros) = ((1.0f32, 1.0f64), (0.0f32, 0.0f64));
        let pick = |pair: &(f32, f64)| match product.dtype {
            DType::F64 => (&raw const pair.1).cast::<c_void>(),
            _ => (&raw const pair.0).cast(),
        };
        let d = &chosen.description;
        // SAFETY: the descriptions are alive; the caller promises the memory.
        let done = unsafe {
            result::matmul(
                self.handle,
                d.product,
                pick(&ones),
                pick(&zeros),
                product.left.at as *const c_void,
                d.left,
                product.right.at as *const c_void,
                d.right,
                product.out.at as *const c_void,
                d.out,
                product.out.at as *mut c_void,
                d.out,
                &chosen.algorithm.algo,
                room as *mut c_void,
                chosen.algorithm.workspaceSize,
                stream as sys::cudaStream_t,
            )
        };
        done.map_err(call_error("cublasLtMatmul"))
    }
}

/// Returns the key of an algorithm: the product with each address replaced by its alignment.
fn shape(product: &Product) -> Product {
    let aligned = |m: Matrix| Matrix { at: 1 << m.at.trailing_zeros().min(8), ..m };
    let (left, right, out) = (aligned(product.left), aligned(product.right), aligned(product.out));
    Product { left, right, out, ..*product }
}

/// The algorithm for one shape.
struct ChosenAlgorithm {
    description: ProductDescription,
    algorithm: sys::cublasLtMatmulHeuristicResult_t,
}

impl ChosenAlgorithm {
    fn new(handle: sys::cublasLtHandle_t, shape: &Product) -> Result<ChosenAlgorithm, CublasError> {
        let description = ProductDescription::new(shape)?;
        let preference = AlgorithmPreference(result::create_matmul_pref()?);
        preference.set(OfChoice::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, MOST_ROOM_BYTES as u64)?;
        let alignments = [
            (OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape.left.at),
            (OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape.right.at),
            (OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape.out.at),
            (OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape.out.at),
        ];
        for (attribute, bytes) in alignments {
            preference.set(attribute, bytes as u32)?;
        }
        let d = &description;
        // SAFETY: all descriptions are alive.
        let algorithm = unsafe {
            result::get_matmul_algo_heuristic(handle, d.product, d.left, d.right, d.out, d.out, preference.0)
        }?;
        Ok(ChosenAlgorithm { description, algorithm })
    }
}

/// A shape in the library's terms; null pointers are not created yet.
struct ProductDescription {
    product: sys::cublasLtMatmulDesc_t,
    left: sys::cublasLtMatrixLayout_t,
    right: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

// SAFETY: the library only reads descriptions once they are created, from any thread.
unsafe impl Send for ProductDescription {}
// SAFETY: as above.
unsafe impl Sync for ProductDescription {}

impl ProductDescription {
    fn new(shape: &Product) -> Result<ProductDescription, CublasError> {
        let (product, layout_of) = (ptr::null_mut(), ptr::null_mut());
        let mut d = ProductDescription { product, left: layout_of, right: layout_of, out: layout_of };
        let (compute, scale) = match shape.dtype {
            DType::F64 => (Compute::CUBLAS_COMPUTE_64F, Type::CUDA_R_64F),
            _ if shape.tf32 => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, Type::CUDA_R_32F),
            _ => (Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F),
        };
        d.product = result::create_matmul_desc(compute, scale)?;
        let transposed = [
            (OfProduct::CUBLASLT_MATMUL_DESC_TRANSA, shape.left.transposed),
            (OfProduct::CUBLASLT_MATMUL_DESC_TRANSB, shape.right.transposed),
        ];
        for (attribute, transposed) in transposed {
            let value = if transposed { Operation::CUBLAS_OP_T } else { Operation::CUBLAS_OP_N };
            let at = (&raw const value).cast();
            // SAFETY: the description was created above; the value has its attribute's type.
            unsafe { result::set_matmul_desc_attribute(d.product, attribute, at, size_of_val(&value)) }?;
        }
        d.left = layout(shape, &shape.left, (shape.rows, shape.sum))?;
        d.right = layout(shape, &shape.right, (shape.sum, shape.cols))?;
        d.out = layout(shape, &shape.out, (shape.rows, shape.cols))?;
        Ok(d)
    }
}

impl Drop for ProductDescription {
    fn drop(&mut self) {
        for layout in [self.left, self.right, self.out].into_iter().filter(|l| !l.is_null()) {
            // SAFETY: created by this type, and destroyed once.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        if !self.product.is_null() {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matmul_desc(self.product) };
        }
    }
}

/// Creates the description of a matrix, by columns, or by rows if it is transposed.
fn layout(
    shape: &Product,
    matrix: &Matrix,
    (rows, cols): (usize, usize),
) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let dtype = match shape.dtype {
        DType::F64 => Type::CUDA_R_64F,
        DType::F16 => Type::CUDA_R_16F,
        DType::BF16 => Type::CUDA_R_16BF,
        _ => Type::CUDA_R_32F,
    };
    let (rows, cols) = if matrix.transposed { (cols, rows) } else { (rows, cols) };
    let layout = result::create_matrix_layout(dtype, rows as u64, cols as u64, matrix.step as i64)?;
    let (batch, step) = (shape.batch as i32, matrix.batch_step as i64);
    // SAFETY: the layout was created above; the values have their attributes' types.
    let set = unsafe {
        result::set_matrix_layout_attribute(
            layout,
            OfLayout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
            (&raw const batch).cast(),
            size_of_val(&batch),
        )
        .and_then(|()| {
            result::set_matrix_layout_attribute(
                layout,
                OfLayout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                (&raw const step).cast(),
                size_of_val(&step),
            )
        })
    };
    set.map(|()| layout).inspect_err(|_| {
        // SAFETY: created above, and not shared.
        let _ = unsafe { result::destroy_matrix_layout(layout) };
    })
}

struct AlgorithmPreference(sys::cublasLtMatmulPreference_t);

impl AlgorithmPreference {
    fn set<T: bytemuck::NoUninit>(&self, attribute: OfChoice, value: T) -> Result<(), CublasError> {
        let at = (&raw const value).cast();
        // SAFETY: the preference is alive, and the value outlives the call, which refuses another size.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, at, size_of::<T>()) }
    }
}

impl Drop for AlgorithmPreference {
    fn drop(&mut self) {
        // SAFETY: created by its owner, and destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// Returns a function that turns a status into the error of `call`.
fn call_error(call: &'static str) -> impl Fn(CublasError) -> DriverError {
    move |CublasError(status)| {
        let out_of_memory = status == sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED;
        DriverError { call, code: format!("{status:?}"), out_of_memory }
    }
}
