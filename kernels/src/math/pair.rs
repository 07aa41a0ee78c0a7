//! Sums and products with their rounding errors, and the notation that all functions of this folder share with
//! `kernels/cuda/math.cuh`.

/// Evaluates a polynomial in f64 by Horner's rule, highest coefficient first.
macro_rules! polynomial {
    ($x:expr, $first:expr, $($c:expr),+ $(,)?) => {{
        let x: f64 = $x;
        let mut p: f64 = $first;
        $(p = p.mul_add(x, $c);)+
        p
    }};
}

/// Evaluates a polynomial in f64 by Estrin's scheme, lowest coefficient first: neighbours are joined with `x`, their pairs with
/// `x²`, and so on. (Loops over an array, inlined into the loop of a kernel, are not unrolled, and that loop is no longer vectorised.)
macro_rules! estrin {
    ($x:expr, $($c:expr),+ $(,)?) => {{
        let x: f64 = $x;
        estrin!(@join x [] $($c),+)
    }};
    (@join $x:ident [$($joined:expr),*] $a:expr, $b:expr $(, $c:expr)*) => {
        estrin!(@join $x [$($joined,)* fma($b, $x, $a)] $($c),*)
    };
    (@join $x:ident [$($joined:expr),*] $a:expr) => {
        estrin!(@join $x [$($joined,)* $a])
    };
    (@join $x:ident [$joined:expr]) => {
        $joined
    };
    (@join $x:ident [$($joined:expr),+]) => {{
        let square = $x * $x;
        estrin!(@join square [] $($joined),+)
    }};
}

/// `1.5 · 2^52`: adding it to a number below 2^51 rounds to the nearest integer, which stands in the low bits.
pub(crate) const ROUND: f64 = 6_755_399_441_055_744.0;
/// π/2 as a sum of three numbers.
pub(crate) const HALF_PI: [f64; 3] = [1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33];

/// Returns `a · b + c`, rounded once.
#[inline(always)]
pub(crate) fn fma(a: f64, b: f64, c: f64) -> f64 {
    a.mul_add(b, c)
}

/// Returns one of two values. Both are computed.
#[inline(always)]
pub(crate) fn select(condition: bool, yes: f64, no: f64) -> f64 {
    if condition { yes } else { no }
}

/// Returns the rounded sum and its error.
#[inline(always)]
pub(crate) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let t = sum - a;
    (sum, (a - (sum - t)) + (b - t))
}

/// Returns the rounded sum and its error, if `a` is 0 or |`a`| is at least |`b`|.
#[inline(always)]
pub(crate) fn fast_two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    (sum, b - (sum - a))
}

/// Returns the rounded product and its error.
#[inline(always)]
pub(crate) fn two_product(a: f64, b: f64) -> (f64, f64) {
    let product = a * b;
    (product, fma(a, b, -product))
}

/// Returns 2^`k`, a normal number, for an integer in the low bits of `k`.
#[inline(always)]
pub(crate) fn power_of_two(k: u64) -> f64 {
    f64_of(plus(k, 1023) << 52)
}

/// Returns the magnitude.
#[inline(always)]
pub(crate) fn abs(x: f64) -> f64 {
    x.abs()
}

/// Returns the square root.
#[inline(always)]
pub(crate) fn sqrt(x: f64) -> f64 {
    x.sqrt()
}

/// Returns the magnitude of `x` with the sign of `sign`.
#[inline(always)]
pub(crate) fn copysign(x: f64, sign: f64) -> f64 {
    x.copysign(sign)
}

/// Returns the bits of `x`.
#[inline(always)]
pub(crate) fn bits_of(x: f64) -> u64 {
    x.to_bits()
}

/// Returns the number with these bits.
#[inline(always)]
pub(crate) fn f64_of(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// Returns the sum, which wraps.
#[inline(always)]
pub(crate) fn plus(a: u64, b: u64) -> u64 {
    a.wrapping_add(b)
}

/// Returns the difference, which wraps.
#[inline(always)]
pub(crate) fn minus(a: u64, b: u64) -> u64 {
    a.wrapping_sub(b)
}

/// Returns half of a signed integer, rounded down.
#[inline(always)]
pub(crate) fn half_of(n: u64) -> u64 {
    ((n as i64) >> 1) as u64
}
