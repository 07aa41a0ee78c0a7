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
//! threads that [`with_threads`] or `ISOSHARD_THREADS` allows, with the same bits.

mod cast;
mod gemm;
mod map;
mod memory;
mod pointwise;
mod reduce;
mod rows;
mod threads;

/// ```
/// use isoshard::tensor::cpu::{BitFunction, BitNum, Loops, compute};
/// use isoshard::tensor::Tensor;
///
/// struct Without;
/// impl BitFunction<2> for Without {
///     #[inline(always)]
///     fn at<A: BitNum>([x, y]: [A; 2]) -> A {
///         x.bit_and(y.bit_not())
///     }
/// }
/// const LOOPS: Loops = Loops::bits::<Without, 2>();
/// let (x, y) = (Tensor::from_vec(vec![7u8, 6], [2])?, Tensor::from_vec(vec![2u8, 3], [2])?);
/// assert_eq!(compute("without", &LOOPS, [0.0; 2], &mut [x, y])?.to_vec::<u8>()?, [5, 4]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::BitFunction;
/// ```
/// use isoshard::tensor::cpu::{Constants, Function, Loops, Num, Real, compute};
/// use isoshard::tensor::Tensor;
///
/// struct Softplus;
/// impl Function<1> for Softplus {
///     #[inline(always)]
///     fn at<A: Real>([s, _]: Constants, [x]: [A; 1]) -> A {
///         (A::ONE + (x * A::of(s)).exp()).ln() / A::of(s)
///     }
/// }
/// const SOFTPLUS: Loops = Loops::floats::<Softplus, 1>();
///
/// let x = Tensor::from_vec(vec![0.0f32, 3.0], [2])?;
/// let y = compute("softplus", &SOFTPLUS, [2.0, 0.0], &mut [x])?.to_vec::<f32>()?;
/// assert_eq!(y[0], 2f32.ln() / 2.0);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::Function;
/// ```
/// use isoshard::tensor::cpu::{Constants, Loops, Num, NumFunction, compute};
/// use isoshard::tensor::Tensor;
///
/// struct SquaredDistance;
/// impl NumFunction<2> for SquaredDistance {
///     #[inline(always)]
///     fn at<A: Num>(_: Constants, [x, y]: [A; 2]) -> A {
///         x.sub(y).mul(x.sub(y))
///     }
/// }
/// const LOOPS: Loops = Loops::numbers::<SquaredDistance, 2>();
/// let (x, y) = (Tensor::from_vec(vec![5i64, 1], [2])?, Tensor::from_vec(vec![2i64, 2], [2])?);
/// assert_eq!(compute("distance", &LOOPS, [0.0; 2], &mut [x, y])?.to_vec::<i64>()?, [9, 1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::NumFunction;
/// ```
/// use isoshard::tensor::{DType, Tensor, cpu};
/// let (a, b) = (Tensor::full(DType::F32, [1, 64, 9], 0.1), Tensor::full(DType::F32, [1, 9, 64], 3.0));
/// let product = || cpu::gemm("matmul", &a, &b, &[9]);
/// assert_eq!(cpu::with_threads(4, product)?.as_bytes()?, product()?.as_bytes()?);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::with_threads;
#[doc(inline)]
pub use isoshard_kernels::{
    BitNum, Constants, Gemm, Isa, Kernel, Loops, MatMut, MatRef, Num, Real, Widen, with_isa,
};
pub(crate) use isoshard_kernels::{
    Cut, FloatPredicate, FloatPredicateLoops, Relation, RelationLoops, RowsMut, StridedRows, TwoPasses,
    WideFunction, as_elements_mut, copy_strided, dispatch, for_each_part, is_nan, map_slice, opaque_index,
    prefetch, prefetch_ahead, widest_of,
};

pub use cast::cast;
pub use gemm::{gemm, linear};
#[cfg(test)]
pub use map::map2;
pub use map::{map, map1};
pub use memory::memory_bytes;
pub use pointwise::compute;
pub(crate) use pointwise::{compare, expect_matching, select, test};
pub use reduce::reduce;
pub(crate) use reduce::{reduce_wide, sum_of_squares};
pub(crate) use rows::over_rows_with;
pub use threads::threads_each;
