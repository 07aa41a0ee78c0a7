//! The reductions that partial values, collectives and reducing operators share: sum, maximum, minimum.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::cpu::{Isa, Kernel, Num, dispatch};
use super::dtype::for_dtype;
use super::{DType, Element, Float, Tensor};
use crate::error::{Error, Result};

/// A reduction of several values to one. It is written `sum`, `max` or `min`.
///
/// ```
/// use isoshard::tensor::{ReduceOp, Tensor};
/// let mut acc = Tensor::from_vec(vec![1.0f32, 5.0], [2])?;
/// ReduceOp::Max.fold(&mut acc, &Tensor::from_vec(vec![3.0f32, f32::NAN], [2])?)?;
/// assert_eq!(acc.to_f64_vec()[0], 3.0);
/// assert!(acc.to_f64_vec()[1].is_nan());
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceOp {
    /// The sum. f16 and bf16 are added in f32 and rounded once per addition.
    Sum,
    /// The maximum. If any value is NaN the result is NaN, always with the same bits; 0 is larger than -0. The result
    /// has the same bits in any order.
    Max,
    /// The minimum, by the rules of the maximum.
    Min,
}

impl ReduceOp {
    /// Returns the identity, which leaves every other value unchanged by bits: -0.0 for a sum (0.0 would change -0.0),
    /// the lowest value for a maximum, the highest for a minimum. (A maximum or minimum gives every NaN the same bits.)
    pub(crate) fn identity(self, dtype: DType) -> f64 {
        let (lowest, highest) = match dtype {
            DType::I64 => (i64::MIN as f64, i64::MAX as f64),
            DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
            DType::U8 => (0.0, 255.0),
            DType::Bool => (0.0, 1.0),
            _ => (f64::NEG_INFINITY, f64::INFINITY),
        };
        match self {
            ReduceOp::Sum => -0.0,
            ReduceOp::Max => lowest,
            ReduceOp::Min => highest,
        }
    }

    /// Returns the larger of two floats as [`Num::max`] does.
    #[inline(always)]
    pub(crate) fn larger<T: Float<Acc: Num>>(a: T, b: T) -> T {
        T::narrow(Num::max(a.widen(), b.widen()))
    }

    /// Returns the smaller of two floats as [`Num::min`] does.
    #[inline(always)]
    pub(crate) fn smaller<T: Float<Acc: Num>>(a: T, b: T) -> T {
        T::narrow(Num::min(a.widen(), b.widen()))
    }

    /// Sets each element of `acc` to the reduction of itself, on the left, and the element of `x`. `acc` is copied
    /// first if its buffer is shared.
    ///
    /// ```
    /// use isoshard::tensor::{ReduceOp, Tensor};
    /// let mut acc = Tensor::from_vec(vec![1i32, 2, 3], [3])?;
    /// ReduceOp::Sum.fold(&mut acc, &Tensor::from_vec(vec![10i32, 20, 30], [3])?)?;
    /// assert_eq!(acc.to_vec::<i32>()?, [11, 22, 33]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the dtypes or the numbers of elements differ.
    pub fn fold(self, acc: &mut Tensor, x: &Tensor) -> Result<()> {
        if acc.dtype() != x.dtype() || acc.numel() != x.numel() {
            return Err(Error::invalid(
                "fold",
                "the operands' dtypes or numbers of elements differ",
                format!("{}, {}", acc.notation(), x.notation()),
                "",
            ));
        }
        let x = x.contiguous()?;
        match x.dtype() {
            DType::F32 => fold_float::<f32>(self, acc, &x),
            DType::F64 => fold_float::<f64>(self, acc, &x),
            DType::F16 => fold_float::<half::f16>(self, acc, &x),
            DType::BF16 => fold_float::<half::bf16>(self, acc, &x),
            DType::Bool => {
                let x = x.as_slice::<bool>()?;
                for (a, &b) in acc.make_mut::<bool>()?.iter_mut().zip(x) {
                    *a = if self == ReduceOp::Min { *a & b } else { *a | b };
                }
                Ok(())
            }
            DType::I64 => fold_int::<i64>(self, acc, &x, i64::wrapping_add),
            DType::I32 => fold_int::<i32>(self, acc, &x, i32::wrapping_add),
            DType::U8 => fold_int::<u8>(self, acc, &x, u8::wrapping_add),
        }
    }
}

fn fold_float<T: Float<Acc: Num>>(op: ReduceOp, acc: &mut Tensor, x: &Tensor) -> Result<()> {
    let (acc, x) = (acc.make_mut::<T>()?, x.as_slice::<T>()?);
    match op {
        ReduceOp::Sum => acc.iter_mut().zip(x).for_each(|(a, &b)| *a = T::narrow(a.widen() + b.widen())),
        ReduceOp::Max => dispatch(FoldSlices { acc, x, join: ReduceOp::larger::<T> }),
        ReduceOp::Min => dispatch(FoldSlices { acc, x, join: ReduceOp::smaller::<T> }),
    }
    Ok(())
}

/// The loop of [`ReduceOp::fold`] for the floats' maximum and minimum.
struct FoldSlices<'a, T, F> {
    acc: &'a mut [T],
    x: &'a [T],
    join: F,
}

impl<T: Copy, F: Fn(T, T) -> T> Kernel for FoldSlices<'_, T, F> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        self.acc.iter_mut().zip(self.x).for_each(|(a, &b)| *a = (self.join)(*a, b));
    }
}

fn fold_int<T: Element + Ord>(op: ReduceOp, acc: &mut Tensor, x: &Tensor, add: fn(T, T) -> T) -> Result<()> {
    let pairs = acc.make_mut::<T>()?.iter_mut().zip(x.as_slice::<T>()?);
    match op {
        ReduceOp::Sum => pairs.for_each(|(a, &b)| *a = add(*a, b)),
        ReduceOp::Max => pairs.for_each(|(a, &b)| *a = (*a).max(b)),
        ReduceOp::Min => pairs.for_each(|(a, &b)| *a = (*a).min(b)),
    }
    Ok(())
}

impl Tensor {
    /// Returns a tensor with the dtype, shape and device of `like` whose elements are the identity of `op`.
    ///
    /// # Errors
    /// Returns an error if the device's memory does not suffice.
    pub(crate) fn identity(op: ReduceOp, like: &Tensor) -> Result<Tensor> {
        if like.is_meta() {
            return Tensor::without_elements(like.dtype(), like.shape());
        }
        let identity = match (op, like.dtype()) {
            // f64 cannot represent every i64 beyond 2^53.
            (ReduceOp::Max, DType::I64) => Tensor::build(like.shape(), |out: &mut [i64]| out.fill(i64::MIN)),
            (ReduceOp::Min, DType::I64) => Tensor::build(like.shape(), |out: &mut [i64]| out.fill(i64::MAX)),
            (_, dtype) => {
                for_dtype!(any dtype, T => Tensor::build(like.shape(), |out: &mut [T]| {
                    out.fill(T::from_f64(op.identity(dtype)));
                }))
            }
        };
        identity.to_device(like.device())
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        })
    }
}

impl fmt::Debug for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_change_nothing_by_bits() {
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
            for x in [
                Tensor::from_vec(vec![-0.0f32, 0.0, 3.5, f32::NEG_INFINITY, f32::INFINITY, f32::NAN], [6]),
                Tensor::from_vec(vec![i64::MIN, i64::MAX, 0, -1], [4]),
                Tensor::from_vec(vec![0u8, 255, 7], [3]),
                Tensor::from_vec(vec![false, true], [2]),
            ] {
                let x = x.expect("as many values as elements");
                let (mut left, mut right) = (x.clone(), Tensor::identity(op, &x).unwrap());
                op.fold(&mut left, &right.clone()).expect("alike");
                op.fold(&mut right, &x).expect("alike");
                assert_eq!(left.as_bytes(), x.as_bytes(), "{op} of {x:?}");
                assert_eq!(right.as_bytes(), x.as_bytes(), "{op} of {x:?}");
            }
        }
    }

    #[test]
    fn extremes_commute_and_associate_by_bits() {
        let odd = [-0.0, 0.0, -1.0, f32::from_bits(0xffc0_0042), f32::INFINITY];
        let of = |i: usize| odd[i % 5];
        let x = [1, 5, 25].map(|step| {
            Tensor::from_vec((0..125).map(|i| of(i / step)).collect(), [125]).expect("as many values")
        });
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = x.each_ref().map(|t| crate::tensor::cpu::cast(t, dtype).expect("a float"));
            for op in [ReduceOp::Max, ReduceOp::Min] {
                let join = |a: &Tensor, b: &Tensor| {
                    let mut a = a.clone();
                    op.fold(&mut a, b).expect("alike");
                    a
                };
                let want = join(&join(&x[0], &x[1]), &x[2]);
                for [a, b, c] in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
                    let [a, b, c] = [a, b, c].map(|i| &x[i]);
                    assert_eq!(join(&join(a, b), c).as_bytes(), want.as_bytes(), "{op} {dtype}");
                    assert_eq!(join(a, &join(b, c)).as_bytes(), want.as_bytes(), "{op} {dtype}");
                }
            }
        }
    }
}
