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

mod aligned_buffer;
mod bit_num;
mod caches;
mod cast;
mod copy;
mod extremes;
mod gemm;
mod lanes;
mod leaves;
mod loops;
mod map;
mod map_slice;
mod memory;
mod neighbours;
mod parts;
mod pointwise;
mod rare;
mod real;
mod reduce;
mod reducer;
mod row_terms;
mod rows;
pub mod simd;
mod streamed;
mod strided_rows;
mod threads;
mod tree;
mod two_passes;
mod wide;

pub use bit_num::BitNum;
pub(crate) use caches::CACHE_LINE_BYTES;
pub use caches::{Caches, with_caches};
pub use cast::cast;
pub(crate) use copy::{as_elements_mut, copy_strided};
pub(crate) use extremes::{fast_extreme, first_with};
pub(crate) use gemm::{Band, BandedProduct, packs_lines};
pub use gemm::{Gemm, LeafContraction, LeafRuns, MatMut, MatRef, gemm, linear};
pub(crate) use loops::widest_of;
pub use loops::{
    BitFunction, Constants, FloatPredicate, FloatPredicateLoops, Function, Loops, NumFunction, Relation,
    RelationLoops,
};
#[cfg(test)]
pub use map::map2;
pub use map::{map, map1};
pub use map_slice::map_slice;
pub use memory::memory_bytes;
pub(crate) use parts::{Cut, RowsMut, SharedRows};
pub use pointwise::{compare, compute, expect_matching, select, test};
pub use real::{Num, Real, Widen, is_nan};
pub(crate) use reduce::sum_of_squares;
pub use reduce::{reduce, reduce_wide};
pub use reducer::{JoinOperation, MaxReducer, MinReducer, Reducer, SumReducer};
pub use rows::{RowBody, over_rows};
pub use simd::{Isa, Kernel, dispatch, prefetch, with_isa};
pub(crate) use simd::{prefetch_ahead, prefetch_line_to_write};
pub use strided_rows::{EachChunk, StridedRows};
pub(crate) use threads::for_each_part;
#[cfg(test)]
pub(crate) use threads::set_smallest_part;
pub use threads::{threads_each, threads_from_env, with_threads};
pub(crate) use tree::join_leaves;
pub use tree::{BlockTree, RowTree, merges, row_max};
pub use two_passes::TwoPasses;
pub use wide::WideFunction;
