//! The types of elements.

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of elements.
///
/// ```
/// use isoshard_kernels::DType;
/// assert_eq!((DType::BF16.size_bytes(), DType::BF16.is_float(), DType::BF16.to_string()), (2, true, "bf16".into()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper 16 bits of a binary32.
    BF16,
    /// A 64-bit signed integer; the type of indices.
    I64,
    /// A 32-bit signed integer.
    I32,
    /// An 8-bit unsigned integer.
    U8,
    /// A truth value in one byte, 0 or 1; the type of a comparison's result.
    Bool,
}

impl DType {
    /// Every dtype, in the order of declaration.
    ///
    /// ```
    /// use isoshard_kernels::DType;
    /// assert_eq!(DType::ALL.iter().filter(|dtype| dtype.is_float()).count(), 4);
    /// ```
    pub const ALL: [DType; 8] =
        [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8, DType::Bool];

    /// Returns the size of one element in bytes.
    ///
    /// ```
    /// use isoshard_kernels::DType;
    /// assert_eq!((DType::F64.size_bytes(), DType::F16.size_bytes(), DType::Bool.size_bytes()), (8, 2, 1));
    /// ```
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 | DType::Bool => 1,
        }
    }

    /// Returns the bytes of so many elements, at most `u64::MAX`: the elements of several tensors may be more than there are
    /// addresses.
    pub fn bytes_of(self, numel: usize) -> u64 {
        (numel as u64).saturating_mul(self.size_bytes() as u64)
    }

    /// Returns true for f32, f64, f16 and bf16.
    ///
    /// ```
    /// use isoshard_kernels::DType;
    /// assert!(DType::F16.is_float() && !DType::I64.is_float());
    /// ```
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    /// Returns true for f16 and bf16, which are computed in f32.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// Returns the name, as in the notation `bf16[2, 3]`.
    ///
    /// ```
    /// use isoshard_kernels::DType;
    /// assert_eq!(DType::I32.name(), "i32");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// Checks that an operator named `verb` was given floating-point elements.
    ///
    /// ```
    /// use isoshard_kernels::DType;
    /// assert_eq!(DType::I64.expect_float("exp").unwrap_err().verb, "exp");
    /// ```
    ///
    /// # Errors
    /// Returns an error that names `verb` if the dtype is an integer or `bool`.
    pub fn expect_float(self, verb: &str) -> Result<(), NotFloat> {
        if self.is_float() { Ok(()) } else { Err(NotFloat { verb: verb.into(), dtype: self }) }
    }
}

/// The refusal of elements that are not floating-point by an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFloat {
    /// The operator's name.
    pub verb: String,
    /// The dtype of the elements.
    pub dtype: DType,
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type of elements.
///
/// ```
/// use isoshard_kernels::{DType, Element};
/// fn sum<T: Element>(x: &[T]) -> f64 {
///     x.iter().map(|x| x.to_f64()).sum()
/// }
/// assert_eq!(sum(&[1u8, 2, 3]), 6.0);
/// assert_eq!(sum(&[half::f16::ONE]), 1.0);
/// assert_eq!(<i32 as Element>::DTYPE, DType::I32);
/// ```
///
/// # Safety
/// The type has the size and the alignment of the Rust type that its `DTYPE` is named after, `f32` for [`DType::F32`], because
/// each reads what the other has written. It has no padding, and every bit pattern is a valid value; with [`DType::Bool`]
/// its values are the bytes 0 and 1 alone.
pub unsafe trait Element: Copy + Default + PartialEq + fmt::Debug + Send + Sync + 'static {
    /// The dtype of this type.
    const DTYPE: DType;
    /// Returns the value as f64; integers beyond 2^53 are rounded.
    fn to_f64(self) -> f64;
    /// Returns the value nearest to `x`, ties to even. Integers truncate toward zero and saturate; `bool` is `x != 0`.
    fn from_f64(x: f64) -> Self;
}

macro_rules! element {
    ($($t:ty, $d:ident, $to:expr, $from:expr;)*) => {$(
        // SAFETY: a primitive type (or `repr(transparent)` around one) of the size that `DType::size_bytes` returns; only
        // `bool` has invalid bit patterns.
        unsafe impl Element for $t {
            const DTYPE: DType = DType::$d;
            #[inline(always)]
            fn to_f64(self) -> f64 {
                let to: fn($t) -> f64 = $to;
                to(self)
            }
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                let from: fn(f64) -> $t = $from;
                from(x)
            }
        }
    )*};
}

element! {
    f32, F32, |x| f64::from(x), |x| x as f32;
    f64, F64, |x| x, |x| x;
    f16, F16, f16::to_f64, |x| f16::from_f32(odd_f32(x));
    bf16, BF16, bf16::to_f64, |x| bf16::from_f32(odd_f32(x));
    i64, I64, |x| x as f64, |x| x as i64;
    i32, I32, f64::from, |x| x as i32;
    u8, U8, f64::from, |x| x as u8;
    bool, Bool, |x| f64::from(u8::from(x)), |x| x != 0.0;
}

/// Rounds `x` to odd at 14 significant bits: if it has more, the last one is set. Rounding the result to f16 or bf16
/// gives the same value as rounding `x` once, on every CPU, since both have at most 12 bits including the one that
/// decides. (`half`'s conversions from f64 round through f32 if the CPU has f16 instructions, and drop the lower 32 bits
/// otherwise.)
#[inline(always)]
pub fn odd_f32(x: f64) -> f32 {
    const REST: u64 = (1 << 39) - 1;
    let bits = x.to_bits();
    // A rest that is not 0 carries into the last bit.
    let inexact = ((bits & REST) + REST) & (REST + 1);
    // All numbers that bf16 does not round to 0 are f32 now, subnormals included.
    f64::from_bits((bits | inexact) & !REST) as f32
}

/// A floating-point element, with the type in which its arithmetic is done: f16 and bf16 compute in f32 and round once.
///
/// ```
/// use half::bf16;
/// use isoshard_kernels::Float;
/// let (a, b) = (bf16::from_f32(1.0), bf16::from_f32(0.001));
/// let sum: f32 = a.widen() + b.widen();
/// assert_eq!(bf16::narrow(sum), bf16::ONE); // 1.001 rounded
/// ```
pub trait Float: Element {
    /// The type that arithmetic uses: f64 for f64, else f32.
    type Acc: Float<Acc = Self::Acc> + std::ops::Add<Output = Self::Acc> + std::ops::Mul<Output = Self::Acc>;
    /// Converts to the wider type, exactly.
    fn widen(self) -> Self::Acc;
    /// Rounds to the nearest value, ties to even.
    fn narrow(x: Self::Acc) -> Self;
}

macro_rules! float {
    ($($t:ty, $acc:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Float for $t {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                let widen: fn($t) -> $acc = $widen;
                widen(self)
            }
            #[inline(always)]
            fn narrow(x: $acc) -> Self {
                let narrow: fn($acc) -> $t = $narrow;
                narrow(x)
            }
        }
    )*};
}

float! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All finite values from 0 up, and the power of two that would come next.
    fn finite_values<T: Element>(finite: u16, from_bits: fn(u16) -> T) -> Vec<f64> {
        let mut values: Vec<f64> = (0..finite).map(|bits| from_bits(bits).to_f64()).collect();
        let [.., before, last] = values[..] else { unreachable!() };
        values.push(last + (last - before));
        values
    }

    /// The midpoint of two neighbours rounds to the even one; a value next to the midpoint, by less than f32 resolves,
    /// rounds to the nearer one.
    fn rounds_once<T: Element>(finite: u16, from_bits: fn(u16) -> T) {
        let values = finite_values(finite, from_bits);
        assert_eq!(from_bits(finite).to_f64(), f64::INFINITY);
        for (below, pair) in values.windows(2).enumerate() {
            let below = below as u16;
            let middle = f64::midpoint(pair[0], pair[1]);
            let cases = [
                (pair[0], below),
                (middle.next_down(), below),
                (middle, below + below % 2),
                (middle.next_up(), below + 1),
                (middle * (1.0 - 1e-11), below),
                (middle * (1.0 + 1e-11), below + 1),
                (pair[1], below + 1),
            ];
            for (x, want) in cases {
                let want = from_bits(want).to_f64();
                for x in [x, -x] {
                    let got = T::from_f64(x).to_f64();
                    assert_eq!(got.to_bits(), want.copysign(x).to_bits(), "{x:e} as {}: {got:e}", T::DTYPE);
                }
            }
        }
        for x in [f64::MAX, f64::INFINITY] {
            assert_eq!(T::from_f64(-x).to_f64(), f64::NEG_INFINITY);
        }
        assert_eq!(T::from_f64(f64::from_bits(1)).to_f64().to_bits(), 0);
        assert!(T::from_f64(f64::NAN).to_f64().is_nan());
    }

    #[test]
    fn narrow_floats_are_rounded_once() {
        rounds_once(0x7c00, f16::from_bits);
        rounds_once(0x7f80, bf16::from_bits);
    }
}
