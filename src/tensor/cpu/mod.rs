//! Loops over CPU memory that operators build their kernels from.
//!
//! Every loop is slice-invariant: the value of an output element does not depend on which other elements are computed
//! beside it, nor on the instruction set. All are single-threaded, since callers run in parallel, but for products where
//! [`with_threads`] allows more.

mod cast;
mod copy;
mod gemm;
mod map;
mod map_slice;
mod pointwise;
mod real;
mod reduce;
mod rows;
pub mod simd;
mod strided_rows;
mod tree;

pub use cast::cast;
pub(crate) use copy::{as_elements_mut, copy_strided};
pub use gemm::{Gemm, MatMut, MatRef, UnaryF, Unchanged, gemm, gemm_fused, with_threads};
#[cfg(test)]
pub use map::map2;
pub use map::{map, map1};
pub use map_slice::map_slice;
pub use pointwise::{
    Function, Loops, NumFunction, Relation, RelationLoops, compare, compute, expect_matching, select,
};
pub use real::{Num, Real, Widen, is_nan};
pub use reduce::{reduce, reduce_wide};
pub use rows::{RowBody, over_rows};
pub use simd::{Isa, Kernel, dispatch, with_isa};
pub use strided_rows::{EachChunk, StridedRows};
pub use tree::{MaxReducer, MinReducer, Reducer, RowTree, SumReducer, merges, row_max};
