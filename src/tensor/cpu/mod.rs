//! CPU kernels for dense tensors: elementwise functions, reductions, matrix products, conversions.
//!
//! ```
//! use isoshard::tensor::{DType, ReduceOp, Tensor, cpu};
//! let x = Tensor::from_vec((0..6i64).collect(), [2, 3])?.cast(DType::F32)?;
//! let squares = cpu::map1::<f32, f32, _>(&x, |x| x * x)?;
//! assert_eq!(cpu::reduce("sum", &squares, &[1], ReduceOp::Sum, false)?.to_vec::<f32>()?, [5.0, 50.0]);
//! let (a, b) = (x.unsqueeze(0)?, x.transpose(0, 1)?.unsqueeze(0)?);
//! assert_eq!(cpu::gemm("matmul", &a, &b, &[3])?.to_vec::<f32>()?, [5.0, 14.0, 14.0, 50.0]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Operators build their kernels from these loops. Every loop is slice-invariant: the value of an output element does
//! not depend on the other elements of the call, nor on the instruction set. A large kernel is cut into parts for the
//! threads that [`with_threads`] or [`threads_from_env`] allows, with the same bits.

mod cast;
mod gemm;
mod map;
mod memory;
mod pointwise;
mod reduce;
mod rows;
mod threads;

pub(crate) use isoshard_kernels::{
    Band, BandedProduct, CACHE_LINE_BYTES, Cut, RowsMut, SharedRows, as_elements_mut, copy_strided,
    fast_extreme, first_with, for_each_part, join_leaves, packs_lines, prefetch_ahead,
    prefetch_line_to_write,
};
#[doc(inline)]
pub use isoshard_kernels::{
    BitFunction, BitNum, BlockTree, Caches, Constants, EachChunk, FloatPredicate, FloatPredicateLoops,
    Function, Gemm, Isa, JoinOperation, Kernel, LeafContraction, LeafRuns, Loops, MatMut, MatRef, MaxReducer,
    MinReducer, Num, NumFunction, Real, Reducer, Relation, RelationLoops, RowTree, StridedRows, SumReducer,
    TwoPasses, WideFunction, Widen, dispatch, is_nan, map_slice, merges, prefetch, row_max, with_caches,
    with_isa, with_threads,
};

pub use cast::cast;
pub use gemm::{gemm, linear};
#[cfg(test)]
pub use map::map2;
pub use map::{map, map1};
pub use memory::memory_bytes;
pub use pointwise::{compare, compute, expect_matching, select, test};
pub(crate) use reduce::sum_of_squares;
pub use reduce::{reduce, reduce_wide};
pub use rows::{RowBody, over_rows};
pub use threads::{threads_each, threads_from_env};
