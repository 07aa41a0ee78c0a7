//! The kernels of [isoshard](https://docs.rs/isoshard): loops over slices, and CUDA sources, that give the same bits on every CPU,
//! number of threads and device.
//!
//! This package knows slices and strides, and no tensor: `isoshard` checks shapes, allocates results and calls it. Users of
//! `isoshard` do not need it, except for their own operators' loops, and for those `isoshard::tensor::cpu` has what they need.
//!
//! ```
//! use isoshard_kernels::{Gemm, MatMut, MatRef};
//! let (a, b, mut c) = ([1.0f32, 2.0], [3.0, 4.0], [0.0; 1]);
//! f32::product(1.0, MatRef::new(&a, (1, 2), (2, 1))?, MatRef::new(&b, (2, 1), (1, 1))?, 0.0, MatMut::new(&mut c, (1, 1), (1, 1))?);
//! assert_eq!(c, [11.0]);
//! # Ok::<(), isoshard_kernels::MatrixFault>(())
//! ```
//!
//! | room | has |
//! |---|---|
//! | [`element`] | dtypes and the Rust types of elements |
//! | [`summation`] | the order of additions in every sum |
//! | [`memory`] | the pool of blocks of a thread |
//! | [`isa`] | instruction sets and caches |
//! | [`num`], [`math`] | arithmetic that a loop is generic over, and elementary functions |
//! | [`threads`] | the threads of a kernel |
//! | [`loops`], [`sums`], [`gemm`] | the kernels |
//! | [`attention`], [`order`], [`rows`] | kernels of single operators, built on these |
//! | [`cuda`] | the sources of kernels for devices |
//!
//! Every loop is slice-invariant: the value of an output element does not depend on the other elements of the call, nor on the
//! instruction set. A large kernel is cut into parts for the threads that [`with_threads`] allows, with the same bits.

// The head of a room names its files, which are private.
#![allow(rustdoc::private_intra_doc_links)]

pub mod attention;
pub mod cuda;
pub mod element;
pub mod gemm;
pub mod isa;
pub mod loops;
pub mod math;
pub mod memory;
pub mod num;
pub mod order;
pub mod rows;
pub mod summation;
pub mod sums;
pub mod threads;

/// A list with one number per dim. Up to five dims it does not allocate.
pub type Dims = smallvec::SmallVec<[usize; 5]>;

pub use element::{DType, Element, Float, NotFloat};
pub use gemm::{Gemm, LeafContraction, LeafRuns, MatMut, MatRef, MatrixFault, Product, Stack, packs_lines};
pub use isa::caches::{Caches, with_caches};
pub use isa::map_slice::map_slice;
pub use isa::simd::{Isa, Kernel, dispatch, opaque_index, prefetch, prefetch_ahead, prefetch_line, with_isa};
pub use loops::aligned_buffer::AlignedBuffer;
pub use loops::cast::{cast, casts_packed};
pub use loops::copy::{as_elements_mut, copy_strided};
pub use loops::formulas::{
    BitFunction, Constants, FloatPredicate, FloatPredicateLoops, Function, Loops, NumFunction, Relation,
    RelationLoops, widest_of,
};
pub use loops::streaming::{PIECE_BYTES, Streaming, with_streaming_from};
pub use loops::strided_rows::{EachChunk, StridedRows};
pub use loops::two_passes::TwoPasses;
pub use loops::wide_functions::WideFunction;
pub use num::bit_num::BitNum;
pub use num::real::{Num, Real, Widen, is_nan};
pub use rows::RowBody;
pub use summation::{LEAF, Leaf, SplitRule};
pub use sums::reduce::{Reducible, Reduction, sum_of_squares};
pub use sums::reducer::{JoinOperation, MaxReducer, MinReducer, Reducer, SumReducer};
pub use sums::tree::{BlockTree, RowTree, merges, row_max};
pub use threads::parts::{Cut, RowsMut};
pub use threads::team::{for_each_part, set_smallest_part, with_threads};
