//! The interface to a vendor's library of matrix products.
//!
//! Matrices are column-major, as in BLAS (Dongarra et al., 1990).

use std::fmt;

use super::handle::{Address, DriverResult, Handle};
use crate::tensor::DType;

/// A library of matrix products for the device of a driver. Any thread may call it.
///
/// # Safety
/// An implementation computes the products as documented, and touches no memory but the operands, the result and the
/// workspace.
pub unsafe trait Blas: Send + Sync + fmt::Debug {
    /// Returns the bytes of workspace that a product needs, or `None` if the library does not support the product.
    fn workspace_bytes(&self, product: &Product) -> DriverResult<Option<usize>>;

    /// Puts `out = left @ right` on a stream, for all products of the batch.
    ///
    /// # Safety
    /// [`Blas::workspace_bytes`] supports the product, and `workspace` has that many bytes, aligned to 256. Until the
    /// stream has done the work, operands and result are allocated, and nothing else uses the result.
    unsafe fn multiply(&self, product: &Product, room: Address, stream: Handle) -> DriverResult<()>;
}

/// A batch of matrix products, each `rows x sum` by `sum x cols`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// The elements' dtype, which is a floating-point type. f16 and bf16 are summed in f32 and rounded once.
    pub dtype: DType,
    /// True if f32 operands may be rounded to tf32 (10 bits of mantissa) before they are multiplied.
    pub tf32: bool,
    /// The rows of the result.
    pub rows: usize,
    /// The columns of the result.
    pub cols: usize,
    /// The length of the contraction.
    pub sum: usize,
    /// The number of products.
    pub batch: usize,
    /// The left operands, `rows x sum`.
    pub left: Matrix,
    /// The right operands, `sum x cols`.
    pub right: Matrix,
    /// The results, `rows x cols`, not transposed.
    pub out: Matrix,
}

/// The address and strides of the matrices of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// The address of the first element.
    pub at: Address,
    /// If false, the element in row `i` of column `j` is at offset `i + j * step`; if true, at `j + i * step`.
    pub transposed: bool,
    /// The leading dimension, as BLAS calls it: the distance between columns, or between rows if `transposed`.
    pub step: usize,
    /// The distance between the matrices of two products, in elements; 0 if all products share one matrix.
    pub batch_step: usize,
}
