//! What a vendor's library of matrix products must offer.
//!
//! In its notation columns lie one after the other, as BLAS (Dongarra et al., 1990) has it.

use std::fmt;

use super::handle::{Address, DriverResult, Handle};
use crate::tensor::DType;

/// A library of matrix products, for the device of a driver. Calls may come from any thread.
///
/// # Safety
/// An implementation does what the calls say, and touches no other memory.
pub unsafe trait Blas: Send + Sync + fmt::Debug {
    /// The bytes that a product wants to work in; none where the library does not take such a product.
    fn workspace_bytes(&self, product: &Product) -> DriverResult<Option<usize>>;

    /// Puts `out = left @ right` on a stream, for all products of the batch.
    ///
    /// # Safety
    /// [`Blas::workspace_bytes`] took the product; `room` has as many bytes, aligned to 256. The operands and the result lie
    /// in allocated memory until it is done, and the result in nobody else's.
    unsafe fn multiply(&self, product: &Product, room: Address, stream: Handle) -> DriverResult<()>;
}

/// Products of matrices of one kind: `rows x sum` by `sum x cols`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// The elements' type: a floating one. f16 and bf16 are summed in f32 and rounded once.
    pub dtype: DType,
    /// Whether f32 may be rounded to tf32 (10 bits of mantissa) before it is multiplied.
    pub tf32: bool,
    /// Rows of the result.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// What is summed over.
    pub sum: usize,
    /// How many products.
    pub batch: usize,
    /// `rows x sum`.
    pub left: Matrix,
    /// `sum x cols`.
    pub right: Matrix,
    /// `rows x cols`; not transposed.
    pub out: Matrix,
}

/// Where a matrix lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Its first element.
    pub at: Address,
    /// False: row `i` of column `j` lies `i + j * step` elements on. True: `j + i * step`.
    pub transposed: bool,
    /// See `transposed`; at least the extent that it steps over (BLAS's leading dimension).
    pub step: usize,
    /// From one product's matrix to the next's, in elements; 0 where all share one.
    pub batch_step: usize,
}
