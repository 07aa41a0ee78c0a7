//! The exponential function, and the hyperbolic tangent and the logistic function, which are computed from it.
//!
//! ```
//! use isoshard_kernels::math::exp::{exp_f64, sigmoid_f32, tanh_f32};
//! assert_eq!((exp_f64(0.0), exp_f64(-1e9), exp_f64(1e9)), (1.0, 0.0, f64::INFINITY));
//! assert_eq!((tanh_f32(50.0), sigmoid_f32(0.0)), (1.0, 0.5));
//! ```
//!
//! The argument is `x = n ln 2 + r` with `|r| <= ln(2) / 2`; adding and subtracting `1.5 * 2^p` rounds to the integer
//! `n`. `e^r` is its Taylor series up to a term whose successor is far below half an ulp. `2^n` is applied as two
//! factors, so that subnormal results are rounded once. For -inf, which masks write, both factors are 0, because products that underflow
//! are slow (`benches/results/2026-11-26-calls-and-masks.md`).
//!
//! Error bounds in ulp over all arguments (f32: measured over every float):
//!
//! | | exp | tanh | sigmoid |
//! |---|---|---|---|
//! | f32 | 1.1 | 2.5 | 2.5 |
//! | f64 | 1.1 | 2.5 | 2.5 |

/// The functions of one float type.
macro_rules! exp_family {
    ($t:ident, $bits:ident, $int:ident, $mantissa:expr, $bias:expr, $shift:expr, $ln2_lo:expr, $low:expr, $high:expr,
     $tanh_high:expr, [$first:expr, $($coefficient:expr),*], $exp:ident, $begin:ident, $end:ident, $mid:ident,
     $mid_arguments:ident: [$mid_low:expr, $mid_high:expr], $tanh:ident,
     $sigmoid:ident, $split:ident, $reduce:ident, $of_parts:ident) => {
        /// Returns e to the power of `x`: 0 if that underflows, infinity if it overflows.
        #[inline(always)]
        pub fn $exp(x: $t) -> $t {
            let [shifted, r] = $begin(x);
            $end(shifted, r)
        }

        /// Returns the parts of the argument: `n + 1.5 * 2^p`, which is never 0, and `r`.
        #[inline(always)]
        pub(crate) fn $begin(x: $t) -> [$t; 2] {
            // Two comparisons rather than `clamp`, so that a NaN stays a NaN.
            let x = if x > $high { $high } else { x };
            $reduce(if x < $low { $low } else { x })
        }

        /// Returns the exponential of the argument whose parts these are.
        #[inline(always)]
        pub(crate) fn $end(shifted: $t, r: $t) -> $t {
            let (n, em1) = $of_parts([shifted, r]);
            let half = n >> 1; // Each of the two factors is a normal number, or 0 at the least argument.
            let scale = |n: $int| $t::from_bits((n.wrapping_add($bias) << $mantissa) as $bits);
            (1.0 + em1) * scale(half) * scale(n.wrapping_sub(half))
        }

        /// The arguments whose exponentials are normal numbers, and finite.
        pub(crate) const $mid_arguments: [$t; 2] = [$mid_low, $mid_high];

        /// Returns e to the power of such an argument, with the same bits by fewer operations, and NaN for NaN. Other results are
        /// arbitrary.
        #[inline(always)]
        pub(crate) fn $mid(x: $t) -> $t {
            let (n, em1) = $split(x);
            (1.0 + em1) * $t::from_bits((n.wrapping_add($bias) << $mantissa) as $bits)
        }

        /// Returns the hyperbolic tangent.
        #[inline(always)]
        pub fn $tanh(x: $t) -> $t {
            let y = 2.0 * x.abs();
            let y = if y > $tanh_high { $tanh_high } else { y };
            let (n, em1) = $split(y);
            let scale = $t::from_bits((n.wrapping_add($bias) << $mantissa) as $bits);
            // e^y - 1 without cancellation, as 2^n (e^r - 1) + (2^n - 1).
            let em1 = scale.mul_add(em1, scale - 1.0);
            (em1 / (em1 + 2.0)).copysign(x)
        }

        /// Returns the logistic function `1 / (1 + e^-x)`.
        #[inline(always)]
        pub fn $sigmoid(x: $t) -> $t {
            let e = $exp(-x.abs());
            (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
        }

        /// Returns `n` and `e^r - 1`.
        #[inline(always)]
        pub(crate) fn $split(x: $t) -> ($int, $t) {
            $of_parts($reduce(x))
        }

        /// Returns `n + 1.5 * 2^p` and `r`.
        #[inline(always)]
        fn $reduce(x: $t) -> [$t; 2] {
            let shifted = x.mul_add(std::$t::consts::LOG2_E, $shift);
            let n = shifted - $shift;
            let r = n.mul_add(-std::$t::consts::LN_2, x);
            [shifted, n.mul_add($ln2_lo, r)]
        }

        /// Returns `n` and `e^r - 1`.
        #[inline(always)]
        fn $of_parts([shifted, r]: [$t; 2]) -> ($int, $t) {
            let mut p: $t = $first;
            $(p = p.mul_add(r, $coefficient);)*
            (shifted.to_bits().wrapping_sub(($shift as $t).to_bits()) as $int, (r * r).mul_add(p, r))
        }
    };
}

exp_family!(
    f32,
    u32,
    i32,
    23,
    127,
    12582912.0f32,
    1.904_654_3e-9,
    -176.0, // n = -254
    89.0,
    20.0,
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5],
    exp_f32,
    begin_f32,
    end_f32,
    exp_mid_f32,
    MID_ARGUMENTS_F32: [-86.0, 88.0],
    tanh_f32,
    sigmoid_f32,
    split_f32,
    reduce_f32,
    of_parts_f32
);

exp_family!(
    f64,
    u64,
    i64,
    52,
    1023,
    6755399441055744.0f64,
    -2.319_046_813_846_299_6e-17,
    -1418.0, // n = -2046
    710.0,
    40.0,
    [
        1.0 / 6227020800.0,
        1.0 / 479001600.0,
        1.0 / 39916800.0,
        1.0 / 3628800.0,
        1.0 / 362880.0,
        1.0 / 40320.0,
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5
    ],
    exp_f64,
    begin_f64,
    end_f64,
    exp_mid_f64,
    MID_ARGUMENTS_F64: [-707.0, 709.0],
    tanh_f64,
    sigmoid_f64,
    split_f64,
    reduce_f64,
    of_parts_f64
);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The distance in units in the last place of `f32` at the exact value.
    pub(in crate::math) fn ulps_f32(got: f32, exact: f64) -> f64 {
        if got.is_nan() || exact.is_nan() {
            return if got.is_nan() && exact.is_nan() { 0.0 } else { f64::INFINITY };
        }
        if f64::from(got) == exact || (got.is_infinite() && exact as f32 == got) {
            return 0.0;
        }
        let exponent = (exact.abs().log2().floor() as i32).max(-126);
        (f64::from(got) - exact).abs() / 2f64.powi(exponent - 23)
    }

    pub(in crate::math) fn ulps_f64(got: f64, exact: f64) -> f64 {
        if got == exact {
            return 0.0;
        }
        (got - exact).abs() / (exact.abs().next_up() - exact.abs())
    }

    /// The worst error over one float in `step`, of both signs, infinities and NaN included.
    pub(in crate::math) fn worst_f32(step: usize, f: fn(f32) -> f32, exact: fn(f64) -> f64) -> (f64, f32) {
        let specials = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN, 1e-45];
        let sweep = (0..=u32::MAX).step_by(step).map(f32::from_bits);
        sweep.chain(specials).fold((0.0, 0.0), |worst, x| {
            let ulps = ulps_f32(f(x), exact(f64::from(x)));
            if ulps > worst.0 { (ulps, x) } else { worst }
        })
    }

    fn sigmoid(x: f64) -> f64 {
        let e = (-x.abs()).exp();
        (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
    }

    #[test]
    fn f32_within_bounds() {
        let step: usize = std::env::var("ISOSHARD_SWEEP_STEP").map_or(1009, |s| s.parse().unwrap());
        let (exp, tanh) = (worst_f32(step, exp_f32, f64::exp), worst_f32(step, tanh_f32, f64::tanh));
        let sigmoid = worst_f32(step, sigmoid_f32, sigmoid);
        println!("exp {exp:?}, tanh {tanh:?}, sigmoid {sigmoid:?}");
        assert!(exp.0 <= 1.1 && tanh.0 <= 2.5 && sigmoid.0 <= 2.5, "{exp:?} {tanh:?} {sigmoid:?}");
        assert_eq!(tanh_f32(-0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!((exp_f32(f32::NEG_INFINITY), exp_f32(0.0), exp_f32(89.0)), (0.0, 1.0, f32::INFINITY));
    }

    #[test]
    fn arguments_in_the_middle_give_the_same_bits() {
        let [low, high] = MID_ARGUMENTS_F32;
        let positive = (0..=high.to_bits()).step_by(1009).map(f32::from_bits);
        let negative = (0..=(-low).to_bits()).step_by(1009).map(|bits| -f32::from_bits(bits));
        for x in positive.chain(negative).chain([low, high]) {
            let (got, want) = (exp_mid_f32(x), exp_f32(x));
            assert!(got.to_bits() == want.to_bits() && want.is_normal(), "{x}: {got} {want}");
        }
        let [low, high] = MID_ARGUMENTS_F64;
        for x in (0..=1_000_000).map(|i| low + (high - low) * (f64::from(i) * 1e-6)) {
            let (got, want) = (exp_mid_f64(x), exp_f64(x));
            assert!(got.to_bits() == want.to_bits() && want.is_normal(), "{x}: {got} {want}");
        }
        assert!(exp_mid_f32(f32::NAN).is_nan() && exp_mid_f64(f64::NAN).is_nan());
    }

    /// Between the least result and the argument at which both factors are 0, one of them may be.
    #[test]
    fn arguments_far_below_give_zero() {
        let bits = (-104f32).to_bits()..=f32::NEG_INFINITY.to_bits();
        for x in bits.step_by(1009).map(f32::from_bits).chain([f32::NEG_INFINITY]) {
            assert_eq!(exp_f32(x).to_bits(), 0, "{x}");
        }
        for x in (-1_500_000..-745_134).map(|i| f64::from(i) * 1e-3).chain([-1e300, f64::NEG_INFINITY]) {
            assert_eq!(exp_f64(x).to_bits(), 0, "{x}");
        }
    }

    #[test]
    fn f64_within_bounds() {
        // The library's own functions are within one unit themselves.
        let mut worst = [0.0f64; 3];
        for i in -300_000..=300_000 {
            let x = f64::from(i) * 0.002_471;
            for (w, (got, exact)) in worst.iter_mut().zip([
                (exp_f64(x), x.exp()),
                (tanh_f64(x * 0.03), (x * 0.03).tanh()),
                (sigmoid_f64(x * 0.1), sigmoid(x * 0.1)),
            ]) {
                if exact.is_finite() {
                    *w = w.max(ulps_f64(got, exact));
                }
            }
        }
        println!("{worst:?}");
        assert!(worst[0] <= 2.0 && worst[1] <= 3.5 && worst[2] <= 3.5, "{worst:?}");
        assert_eq!((exp_f64(-1e300), exp_f64(0.0), exp_f64(1e300)), (0.0, 1.0, f64::INFINITY));
        assert_eq!((tanh_f64(1e300), tanh_f64(f64::NEG_INFINITY), sigmoid_f64(-800.0)), (1.0, -1.0, 0.0));
        assert!(exp_f64(f64::NAN).is_nan() && tanh_f64(f64::NAN).is_nan() && sigmoid_f64(f64::NAN).is_nan());
        assert_eq!(exp_f64(-745.0), (-745.0f64).exp(), "a subnormal");
    }
}
