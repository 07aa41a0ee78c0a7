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
/// use isoshard::tensor::cpu::{FloatPredicate, FloatPredicateLoops, Num, Real, test};
/// use isoshard::tensor::Tensor;
///
/// struct IsWhole;
/// impl FloatPredicate for IsWhole {
///     #[inline(always)]
///     fn at<A: Real>(x: A) -> bool {
///         x.floor() == x
///     }
/// }
/// const IS_WHOLE: FloatPredicateLoops = FloatPredicateLoops::of::<IsWhole>();
/// let x = Tensor::from_vec(vec![2.0f32, 2.5], [2])?;
/// assert_eq!(test("is_whole", &IS_WHOLE, &x)?.to_vec::<bool>()?, [true, false]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::FloatPredicate;
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
/// use isoshard::tensor::cpu::{Relation, RelationLoops, compare};
/// use isoshard::tensor::Tensor;
///
/// struct Above;
/// impl Relation for Above {
///     #[inline(always)]
///     fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool {
///         x > y
///     }
/// }
/// const ABOVE: RelationLoops = RelationLoops::of::<Above>();
/// let (x, y) = (Tensor::from_vec(vec![1.0f32, 5.0], [2])?, Tensor::from_vec(vec![2.0f32, 2.0], [2])?);
/// assert_eq!(compare("above", &ABOVE, &x, &y)?.to_vec::<bool>()?, [false, true]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::Relation;
/// ```
/// use isoshard::tensor::Tensor;
/// use isoshard::tensor::cpu::{Constants, Function, Loops, Num, Real, TwoPasses, compute};
///
/// /// `tanh(e^(x / 2))`
/// struct Gate;
/// impl Function<1> for Gate {
///     #[inline(always)]
///     fn at<A: Real>(_: Constants, x: [A; 1]) -> A {
///         Gate::second(x, Gate::first(x))
///     }
/// }
/// impl TwoPasses<1> for Gate {
///     #[inline(always)]
///     fn first<A: Real>([x]: [A; 1]) -> A {
///         (x * A::of(0.5)).exp()
///     }
///     #[inline(always)]
///     fn second<A: Real>(_: [A; 1], first: A) -> A {
///         first.tanh()
///     }
/// }
/// let x = Tensor::from_vec(vec![0.0f32, 2.0, -9.0], [3])?;
/// let passes = compute("gate", &Loops::floats_in_two_passes::<Gate, 1>(), [0.0; 2], &mut [x.clone()])?;
/// let at_once = compute("gate", &Loops::floats::<Gate, 1>(), [0.0; 2], &mut [x])?;
/// assert_eq!(passes.as_bytes()?, at_once.as_bytes()?);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::TwoPasses;
/// ```
/// use isoshard::tensor::cpu::{Constants, Loops, Real, WideFunction, compute};
/// use isoshard::tensor::Tensor;
///
/// struct Exp;
/// impl WideFunction<1> for Exp {
///     #[inline(always)]
///     fn at(_: Constants, [x]: [f64; 1]) -> f64 {
///         Real::exp(x)
///     }
/// }
/// const EXP: Loops = Loops::wide::<Exp, 1>();
/// let y = compute("exp", &EXP, [0.0; 2], &mut [Tensor::from_vec(vec![0.0f32, 1.0], [2])?])?;
/// assert_eq!(y.to_vec::<f32>()?, [1.0, 2.7182817]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[doc(inline)]
pub use isoshard_kernels::WideFunction;
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
    BitNum, BlockTree, Caches, Constants, EachChunk, FloatPredicateLoops, Gemm, Isa, JoinOperation, Kernel,
    LeafContraction, LeafRuns, Loops, MatMut, MatRef, MaxReducer, MinReducer, Num, Real, Reducer,
    RelationLoops, RowBody, RowTree, StridedRows, SumReducer, Widen, dispatch, is_nan, map_slice, merges,
    prefetch, row_max, with_caches, with_isa,
};
pub(crate) use isoshard_kernels::{
    Cut, RowsMut, as_elements_mut, copy_strided, for_each_part, opaque_index, prefetch_ahead, widest_of,
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
pub use rows::over_rows;
pub(crate) use rows::over_rows_with;
pub use threads::{threads_each, threads_from_env};
