//! Tensors whose elements are fixed functions of their index, and comparisons by bits.
//!
//! ```
//! use isoshard::testing::values::{bits_differ, ordinary, tensor};
//! use isoshard::tensor::{DType, ReduceOp};
//!
//! let x = ordinary(DType::F32, &[4].into(), 1);
//! assert_eq!(bits_differ(&x, &ordinary(DType::F32, &[4].into(), 1)), None);
//! let [plus, minus] = [0.0, -0.0].map(|zero| tensor(DType::F32, &[1.0, zero], &[2].into()));
//! assert_eq!(bits_differ(&plus, &minus).unwrap(), "element 1: 0e0 instead of -0e0");
//! ```

use crate::base;
use crate::ops::{Input, InputFill, Sample};
use crate::tensor::{DType, Element, Shape, Tensor, for_dtype};

/// A fixed stream of numbers: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
pub struct SplitMix(pub u64);

impl SplitMix {
    /// Returns the next number.
    ///
    /// ```
    /// use isoshard::testing::values::SplitMix;
    /// assert_eq!(SplitMix(0).next_u64(), 0xe220_a839_7b1d_cdaf); // the first number of the published stream
    /// ```
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number from 0 to `n - 1`.
    ///
    /// ```
    /// # use isoshard::testing::values::SplitMix;
    /// let mut stream = SplitMix(1);
    /// assert!((0..100).all(|_| stream.below(3) < 3));
    /// ```
    ///
    /// # Panics
    /// Panics if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// Returns an item of a list.
    ///
    /// ```
    /// # use isoshard::testing::values::SplitMix;
    /// assert!(["dp", "tp"].contains(SplitMix(7).pick(&["dp", "tp"])));
    /// ```
    ///
    /// # Panics
    /// Panics if the list is empty.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Mixes the bits of a number: SplitMix64's finaliser. Different numbers give different numbers.
///
/// ```
/// use isoshard::testing::values::mix;
/// assert_eq!(mix(0), 0);
/// assert!((mix(1) ^ mix(2)).count_ones() > 16);
/// ```
pub fn mix(number: u64) -> u64 {
    base::mix(number)
}

/// Creates a tensor of `dtype` with these values, rounded or truncated to it.
///
/// ```
/// use isoshard::{tensor::DType, testing::values::tensor};
/// assert_eq!(tensor(DType::I32, &[1.0, -2.0], &[2].into()).to_vec::<i32>()?, [1, -2]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Panics
/// Panics if the shape has another number of elements.
pub fn tensor(dtype: DType, values: &[f64], shape: &Shape) -> Tensor {
    for_dtype!(any dtype, T => {
        let elements: Vec<T> = values.iter().map(|&value| T::from_f64(value)).collect();
        Tensor::from_vec(elements, shape.clone()).expect("as many values as elements")
    })
}

/// Creates a tensor of integers from -3 to 3 that depend on the index and on `salt`. Their sums are exact in any order.
///
/// ```
/// use isoshard::{tensor::DType, testing::values::small_ints};
/// let x = small_ints(DType::BF16, &[4, 9].into(), 1).to_f64_vec();
/// assert!(x.iter().all(|x| x.abs() <= 3.0 && x.fract() == 0.0));
/// ```
pub fn small_ints(dtype: DType, shape: &Shape, salt: u64) -> Tensor {
    let n = shape.numel() as u64;
    let values: Vec<f64> = (0..n).map(|e| (mix(e ^ salt << 40 ^ 0x5a17) % 7) as f64 - 3.0).collect();
    tensor(dtype, &values, shape)
}

/// Returns true if the numbers are equal within `bound`. NaNs are equal, and so are zeros of either sign: `-(1 - 1)` is
/// -0 and `-1 + 1` is +0.
///
/// ```
/// use isoshard::testing::values::agree;
/// assert!(agree(0.0, -0.0, 0.0) && agree(f64::NAN, -f64::NAN, 0.0) && agree(1.0, 1.25, 0.25));
/// assert!(!agree(1.0, f64::NAN, 9.0));
/// ```
pub fn agree(a: f64, b: f64, bound: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= bound
}

/// Returns the largest difference that a result may have from the whole's. It is 0 if the sample says that no addition
/// is rounded. Else `n` additions are each wrong by half an ulp of at most the largest value times the number of
/// addends, on both sides, and 8 ulps cover roundings outside sums.
///
/// ```
/// use isoshard::{ops::{Exp, Input, Sample}, tensor::{DType, Tensor}, testing::values::bound};
/// let sample = Sample::new(Exp, [Input::ints([3])]);
/// assert_eq!(bound(&sample, &Tensor::full(DType::F32, [3], 5.0)), 0.0);
/// ```
pub fn bound(sample: &Sample, whole: &Tensor) -> f64 {
    match sample.rounded_sums {
        0 => 0.0,
        n => (n + 8) as f64 * epsilon(whole.dtype()) * magnitude(whole),
    }
}

/// Returns the largest finite absolute value, or 1 if that is larger.
///
/// ```
/// use isoshard::{tensor::DType, testing::values::{magnitude, tensor}};
/// assert_eq!(magnitude(&tensor(DType::F32, &[0.5, -7.0, f64::INFINITY], &[3].into())), 7.0);
/// assert_eq!(magnitude(&tensor(DType::F32, &[0.5], &[1].into())), 1.0);
/// ```
pub fn magnitude(t: &Tensor) -> f64 {
    t.to_f64_vec().into_iter().filter(|v| v.is_finite()).fold(1.0, |m, v| m.max(v.abs()))
}

/// Returns the distance from 1 to the next number; 0 for dtypes whose arithmetic does not round.
///
/// ```
/// use isoshard::{tensor::DType, testing::values::epsilon};
/// assert_eq!([DType::BF16, DType::I64].map(epsilon), [1.0 / 128.0, 0.0]);
/// ```
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 0.0,
    }
}

/// Returns the values of a sample's operands: small numbers whose sums and products are exact.
///
/// ```
/// use isoshard::{ops::{Add, Input, Sample}, tensor::DType, testing::values::values};
/// let sample = Sample::new(Add, [Input::ints([3]), Input::positive([3])]);
/// let ins = values(&sample, DType::F64, 1);
/// assert!(ins[1].to_f64_vec().iter().all(|x| *x > 0.0 && *x <= 4.0));
/// ```
pub fn values(sample: &Sample, dtype: DType, salt: u64) -> Vec<Tensor> {
    let one = |(i, input): (usize, &Input)| input.values(dtype, salt * 16 + i as u64 + 1);
    sample.ins.iter().enumerate().map(one).collect()
}

/// Returns operands like a sample's with ordinary values: normals times powers of ten, whose sums are hardly ever exact.
/// They are positive if the sample asks for that; indices and conditions are the sample's own.
///
/// ```
/// use isoshard::{ops::{Embedding, Input, Sample}, tensor::DType, testing::values::ordinary_values};
/// let sample = Sample::new(Embedding, [Input::ints([5, 2]), Input::index([3], 5)]);
/// let ins = ordinary_values(&sample, DType::F32, 1);
/// assert_eq!(ins[1].dtype(), DType::I64);
/// assert!(ins[0].to_f64_vec().iter().any(|x| x.fract() != 0.0));
/// ```
pub fn ordinary_values(sample: &Sample, dtype: DType, salt: u64) -> Vec<Tensor> {
    let one = |(i, input): (usize, &Input)| match input.fill {
        InputFill::Ints if input.meta.dtype.is_float() => {
            ordinary(dtype, &input.meta.shape, salt * 16 + i as u64)
        }
        InputFill::Positive => {
            let x = ordinary(DType::F64, &input.meta.shape, salt * 16 + i as u64).to_f64_vec();
            tensor(dtype, &x.iter().map(|v| v.abs().clamp(1e-3, 1e3)).collect::<Vec<_>>(), &input.meta.shape)
        }
        _ => input.values(dtype, salt * 16 + i as u64 + 1),
    };
    sample.ins.iter().enumerate().map(one).collect()
}

/// Creates a tensor of normals times powers of ten from 1e-2 to 1e2, which depend on the index and on `salt`.
///
/// ```
/// use isoshard::{tensor::DType, testing::values::{bits_differ, ordinary}};
/// let [a, b] = [1, 2].map(|salt| ordinary(DType::F32, &[8].into(), salt));
/// assert!(bits_differ(&a, &b).is_some());
/// ```
pub fn ordinary(dtype: DType, shape: &Shape, salt: u64) -> Tensor {
    let unit = |z: u64| ((z >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let value = |e: u64| {
        let (a, b, c) = (mix(e ^ salt << 33), mix(e ^ salt << 33 ^ 0xabcd), mix(e ^ salt << 33 ^ 0x1234));
        let normal = (-2.0 * unit(a).ln()).sqrt() * (std::f64::consts::TAU * unit(b)).cos();
        normal * 10f64.powi((c % 5) as i32 - 2)
    };
    tensor(dtype, &(0..shape.numel() as u64).map(value).collect::<Vec<_>>(), shape)
}

/// Describes the first element whose bits differ, NaNs aside, or a difference of shapes or dtypes; `None` if there is
/// none.
///
/// ```
/// use isoshard::{tensor::{DType, Tensor}, testing::values::bits_differ};
/// let [two, three] = [2, 3].map(|n| Tensor::zeros(DType::F32, [n]));
/// assert_eq!(bits_differ(&two, &three).unwrap(), "f32[2] instead of f32[3]");
/// ```
pub fn bits_differ(got: &Tensor, want: &Tensor) -> Option<String> {
    if got.shape() != want.shape() || got.dtype() != want.dtype() {
        return Some(format!("{} instead of {}", got.notation(), want.notation()));
    }
    first_difference(got, want).map(|(e, values)| format!("element {e}: {values}"))
}

/// Returns the first element whose bits differ, NaNs aside, and both values, of tensors of one shape and dtype.
pub(super) fn first_difference(got: &Tensor, want: &Tensor) -> Option<(usize, String)> {
    if got.dtype() == DType::I64 {
        // Wider than the 53 bits of an f64's fraction.
        let [got, want] = [got, want].map(|x| x.to_vec::<i64>().expect("its dtype"));
        let e = got.iter().zip(&want).position(|(g, w)| g != w)?;
        return Some((e, format!("{} instead of {}", got[e], want[e])));
    }
    let mut pairs = got.to_f64_vec().into_iter().zip(want.to_f64_vec()).enumerate();
    // Widening to f64 keeps every number and the sign of zero.
    let (e, (g, w)) = pairs.find(|(_, (g, w))| g.to_bits() != w.to_bits() && !(g.is_nan() && w.is_nan()))?;
    Some((e, format!("{g:e} instead of {w:e}")))
}
