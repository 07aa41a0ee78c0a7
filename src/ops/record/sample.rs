//! Samples: small calls of an operator, at odd sizes, that every test of operators runs.

use std::fmt;
use std::sync::Arc;

use super::{Meta, Op};
#[cfg(any(test, feature = "testing"))]
use crate::base::mix;
#[cfg(any(test, feature = "testing"))]
use crate::tensor::Tensor;
use crate::tensor::{DType, Shape};

/// The kind of values that an operand of a sample has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InputFill {
    /// Integers from -4 to 4. Their sums and products are exact in any order.
    Ints,
    /// Positive multiples of 1/8 up to 4, for logarithms, roots and divisors.
    Positive,
    /// Multiples of 1/8 from 0 to 1, for probabilities.
    Unit,
    /// Odd multiples of 1/16 from 1/16 to 15/16, for inverse functions.
    InsideUnit,
    /// Multiples of 1/8 above 1, up to 5.
    AboveOne,
    /// Integers from 0 to below this number.
    Index(usize),
    /// Integers from -1 to below this number. As many consecutive elements as there are such integers differ, if their
    /// number is prime.
    Slots(usize),
    /// False and true.
    Bools,
}

/// One operand of a sample.
///
/// ```
/// use isoshard::{ops::Input, tensor::DType};
/// let input = Input::index([2, 3], 5);
/// assert_eq!(input.meta.to_string(), "i64[2, 3]");
/// assert!(input.values(DType::F32, 0).to_f64_vec().iter().all(|&i| i < 5.0));
/// ```
#[derive(Clone, Debug)]
pub struct Input {
    /// The dtype and global shape.
    pub meta: Meta,
    /// The kind of values.
    pub fill: InputFill,
}

/// A small call of an operator, which the tests run under every combination of placements.
///
/// ```
/// use isoshard::ops::{Input, Sample, Softmax};
/// let sample = Sample::new(Softmax { dim: 1 }, [Input::ints([5, 3])]);
/// assert_eq!(format!("{sample:?}"), "Softmax { dim: 1 } f32[5, 3]");
/// ```
#[derive(Clone)]
pub struct Sample {
    /// The operator with its attributes.
    pub op: Arc<dyn Op>,
    /// The operands. Floating-point operands are f32; a test may widen all of them to f64.
    pub ins: Vec<Input>,
    /// The number of additions behind one element of a result that may round differently if a dim is sharded. 0 if
    /// results have the same bits under every layout. Tests derive their bound in fast mode from it.
    pub rounded_sums: usize,
    /// False if finite differences cannot check the derivative: it has kinks, or the results are integers.
    pub smooth: bool,
}

impl Input {
    /// Creates an f32 operand of integers from -4 to 4.
    pub fn ints(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::F32, shape), fill: InputFill::Ints }
    }

    /// Creates an f32 operand of values in (0, 4].
    pub fn positive(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::F32, shape), fill: InputFill::Positive }
    }

    /// Creates an f32 operand of values in [0, 1].
    pub fn unit(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::F32, shape), fill: InputFill::Unit }
    }

    /// Creates an i64 operand of indices below `n`.
    pub fn index(shape: impl Into<Shape>, n: usize) -> Input {
        Input { meta: Meta::new(DType::I64, shape), fill: InputFill::Index(n) }
    }

    /// Creates an i64 operand of slots below `n`, or -1 for a dropped row. If `n + 1` is prime, `n + 1` consecutive
    /// elements differ.
    ///
    /// ```
    /// # use isoshard::{ops::Input, tensor::DType};
    /// let mut slots = Input::slots([7], 6).values(DType::F32, 0).to_f64_vec();
    /// slots.sort_by(f64::total_cmp);
    /// assert_eq!(slots, [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    /// ```
    pub fn slots(shape: impl Into<Shape>, n: usize) -> Input {
        Input { meta: Meta::new(DType::I64, shape), fill: InputFill::Slots(n) }
    }

    /// Creates a bool operand.
    pub fn bools(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::Bool, shape), fill: InputFill::Bools }
    }

    /// Returns the values, a function of `salt` and the element's index (feature `testing`). Floating-point values have the
    /// given dtype.
    #[cfg(any(test, feature = "testing"))]
    pub fn values(&self, dtype: DType, salt: u64) -> Tensor {
        // Any fixed mixing function would do.
        let hash = |e: u64| mix((e ^ salt.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15));
        let n = self.meta.shape.numel() as u64;
        let value = |e: u64| match self.fill {
            InputFill::Ints => (hash(e) % 9) as f64 - 4.0,
            InputFill::Positive => ((hash(e) % 32) + 1) as f64 / 8.0,
            InputFill::Unit => (hash(e) % 9) as f64 / 8.0,
            InputFill::InsideUnit => ((hash(e) % 8) * 2 + 1) as f64 / 16.0,
            InputFill::AboveOne => ((hash(e) % 32) + 9) as f64 / 8.0,
            InputFill::Index(below) => (hash(e) % below.max(1) as u64) as f64,
            // A multiple of e by a factor that is no multiple of the prime.
            InputFill::Slots(below) => {
                let (n, factor) = (below as u64 + 1, 1 + hash(0) % below.max(1) as u64);
                ((e % n * factor + hash(1) % n) % n) as f64 - 1.0
            }
            InputFill::Bools => (hash(e) % 2) as f64,
        };
        let dtype = if self.meta.dtype.is_float() { dtype } else { self.meta.dtype };
        crate::tensor::for_dtype!(any dtype, T => Tensor::from_vec(
            (0..n).map(|e| <T as crate::tensor::Element>::from_f64(value(e))).collect(),
            self.meta.shape.clone(),
        ).expect("as many values as the shape has elements"))
    }
}

impl Sample {
    /// Creates a sample whose results have the same bits under every layout, and whose derivative is smooth.
    pub fn new(op: impl Op, ins: impl IntoIterator<Item = Input>) -> Sample {
        Sample { op: Arc::new(op), ins: ins.into_iter().collect(), rounded_sums: 0, smooth: true }
    }

    /// Sets the number of additions behind an element of a result that may round differently
    /// ([`Sample::rounded_sums`]).
    ///
    /// ```
    /// # use isoshard::ops::{Input, Sample, SumExp};
    /// let sample = Sample::new(SumExp, [Input::ints([3, 7]), Input::ints([3, 1])]).rounded(7);
    /// assert_eq!(sample.rounded_sums, 7);
    /// ```
    pub fn rounded(mut self, n: usize) -> Sample {
        self.rounded_sums = n;
        self
    }

    /// States that finite differences cannot check the derivative ([`Sample::smooth`]).
    pub(crate) fn not_smooth(mut self) -> Sample {
        self.smooth = false;
        self
    }

    /// Returns the operands' dtypes and global shapes.
    pub fn metas(&self) -> Vec<Meta> {
        self.ins.iter().map(|i| i.meta.clone()).collect()
    }
}

/// Writes the operator and its operands: `Cast { dtype: F64 } f32[5, 3]`.
impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.op, super::list(&self.metas()))
    }
}
